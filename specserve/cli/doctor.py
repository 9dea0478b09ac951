"""`specserve doctor`: prints what specserve.doctor finds."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from specserve.cli.doctor_head import diagnose_head
from specserve.cli.json_output import JsonFile, is_json_alone, write_json
from specserve.cli.options import (
    ENGINE_HELP,
    GROUPS,
    MODEL,
    SPECULATION,
    Whole,
    engine_options,
    help_of,
    model_parameter,
    options_type,
)
from specserve.config import DEFAULT_MODEL, DEFAULT_NUM_SPECULATIVE_TOKENS, EngineConfig
from specserve.errors import ConfigError
from specserve.parallel.address import Address
from specserve.parallel.security import read_secret
from specserve.server.engine.replicas import check_experts, check_prefill
from specserve.server.options import ServeOptions

_OF_ENGINES = (
    *("tensor_parallel_size", "pipeline_parallel_size", "ranks_listen", "ranks_secret_file", "threads", "device"),
    *("dtype", "quantization", "max_model_len", "max_num_seqs", "kv_cache_gib"),
)
_OF_SERVERS = ("data_parallel_size", "enable_expert_parallel", "prefill_replicas", "api_processes", "engine")

if TYPE_CHECKING:
    Engines = EngineConfig
    Servers = ServeOptions
else:
    Engines = options_type(EngineConfig, "Engines", {name: ENGINE_HELP[name] for name in _OF_ENGINES})
    _HELP = help_of(ServeOptions, "Engine")
    Servers = options_type(
        ServeOptions, "Servers", {name: _HELP[name] for name in _OF_SERVERS}, engine_insecure_no_tls=True
    )

_ENGINES, _SERVERS = Engines(), Servers()


def doctor(
    model: Annotated[str, model_parameter("The model, or LoRA adapter, whose folder is looked up.")] = DEFAULT_MODEL,
    *,
    isa: Annotated[str, Parameter(group=MODEL, help=ENGINE_HELP["isa"].text)] = "auto",
    head: Annotated[
        str | None,
        Parameter(
            group=SPECULATION,
            help="Replay this draft head (folder or hub id; for MTP the model that has the layers) on the model, and "
            "say where its acceptance is lost.",
        ),
    ] = None,
    text: Annotated[
        str | None,
        Parameter(group=SPECULATION, help="With --head: a text file that answers go on from, not bundled prompts."),
    ] = None,
    num_speculative_tokens: Annotated[
        Whole, Parameter(group=SPECULATION, help="With --head: tokens of a draft.")
    ] = DEFAULT_NUM_SPECULATIVE_TOKENS,
    engines: Annotated[Engines, Parameter(name="*")] = _ENGINES,
    servers: Annotated[Servers, Parameter(name="*")] = _SERVERS,
    port: Annotated[
        int | None, Parameter(group=GROUPS["Engine"], help="Say whether a server could listen on this port.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Show the device, memory, kernels, model folder and versions, and which models of the catalog fit; with a layout,
    whether it suits the machine and the model. Loads no weights, but with --head, which is then all that is shown."""
    from specserve.doctor import Section, as_dict, examine, show
    from specserve.layout import Layout
    from specserve.server.engine.process import check_shared

    config = EngineConfig(**engine_options(engines, model=model))
    if head is not None or text is not None:
        _check_alone(given := engine_options(engines, model=model, isa=isa), servers, port)
        diagnose_head(head, given, text, num_speculative_tokens, json_file)
        return
    if num_speculative_tokens != DEFAULT_NUM_SPECULATIVE_TOKENS:
        raise ConfigError("--num-speculative-tokens is for the replay of --head. Give both.")
    size = servers.data_parallel_size
    check_prefill(config, servers.prefill_replicas)
    check_experts(config, servers.enable_expert_parallel)
    check_shared(config, size)
    others = servers.prefill_replicas, servers.api_processes, len(servers.engine), servers.enable_expert_parallel
    layout = Layout(config, size, *others)
    sections = examine(model, isa, layout=layout if layout.is_divided else None, device_name=config.device)
    if config.ranks_listen is not None:
        read_secret(Path(config.ranks_secret_file or ""), "--ranks-secret-file")
        said, fault = _joining(Address.parse(config.ranks_listen, "--ranks-listen"), model)
        sections.append(Section("Ranks", [("this host", said)], fault))
    if port is not None:
        said, fault = _listening(port)
        sections.append(Section("Port", [("listening", said)], fault))
    write_json(json_file, as_dict(sections))
    if not is_json_alone(json_file):
        show(sections)
    for section in sections:
        if section.fault is not None:
            raise section.fault


def _check_alone(given: Mapping[str, Any], servers: ServeOptions, port: int | None) -> None:
    """Raises ConfigError for options of a layout beside --head."""
    ranks = given["tensor_parallel_size"] * given["pipeline_parallel_size"]
    if ranks > 1 or servers != _SERVERS or port is not None:
        raise ConfigError("--head is replayed in this process: leave out --port and the options of a layout.")


def _joining(address: Address, model: str) -> tuple[str, ConfigError | None]:
    """Whether the first process could listen there, or, where that is another host, that this one joins."""
    fault = _why_not(address, "Choose another --ranks-listen.")
    command = f"specserve rank {model} --join {address} --secret-file FILE"
    if fault is None:
        return f"has the first process: {address} is free. On the others: {command}", None
    if isinstance(fault.__cause__, OSError) and fault.__cause__.errno == errno.EADDRNOTAVAIL:
        return f"has not that address, and joins: {command}", None
    return str(fault), fault


def _listening(port: int) -> tuple[str, ConfigError | None]:
    """Whether a server could listen there. Raises ConfigError for what is no port."""
    options = ServeOptions(port=port)
    address = Address(options.host, options.port)
    fault = _why_not(address, "Choose another --port.")
    return (f"{address} is free", None) if fault is None else (str(fault), fault)


def _why_not(address: Address, remedy: str) -> ConfigError | None:
    """Why nothing can listen there."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        family, kind, protocol, _, where = found
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        made = ConfigError(f"{address} cannot be listened on: {error.strerror or error}. {remedy}")
        made.__cause__ = error
        return made
    return None
