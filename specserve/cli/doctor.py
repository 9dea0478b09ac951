"""`specserve doctor`: prints what specserve.doctor finds."""

from __future__ import annotations

import socket
from typing import Annotated

from cyclopts import Parameter

from specserve.cli.json_output import JsonFile, is_json_alone, write_json
from specserve.cli.options import ENGINE_HELP, GROUPS, MODEL, help_of, model_parameter
from specserve.config import DEFAULT_MODEL, EngineConfig
from specserve.errors import ConfigError
from specserve.server.options import ServeOptions


def _option(text: str) -> Parameter:
    return Parameter(group=GROUPS["Engine"], help=text)


def doctor(
    model: Annotated[str, model_parameter("The model, or LoRA adapter, whose folder is looked up.")] = DEFAULT_MODEL,
    *,
    isa: Annotated[str, Parameter(group=MODEL, help=ENGINE_HELP["isa"].text)] = "auto",
    tensor_parallel_size: Annotated[int, _option(ENGINE_HELP["tensor_parallel_size"].text)] = 1,
    pipeline_parallel_size: Annotated[int, _option(ENGINE_HELP["pipeline_parallel_size"].text)] = 1,
    data_parallel_size: Annotated[int, _option(help_of(ServeOptions)["data_parallel_size"].text)] = 1,
    enable_expert_parallel: Annotated[bool, _option(help_of(ServeOptions)["enable_expert_parallel"].text)] = False,
    threads: Annotated[int | None, _option(ENGINE_HELP["threads"].text)] = None,
    port: Annotated[int | None, _option("Say whether a server could listen on this port.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Show the device, memory, kernels, model folder and versions, and which models of the catalog fit; with a layout,
    whether it suits the machine and the model. Loads no weights."""
    from specserve.doctor import Section, as_dict, examine, show
    from specserve.layout import Layout
    from specserve.server.engine.replicas import check_experts

    config = EngineConfig(
        tensor_parallel_size=tensor_parallel_size, pipeline_parallel_size=pipeline_parallel_size, threads=threads
    )
    ServeOptions(data_parallel_size=data_parallel_size, enable_expert_parallel=enable_expert_parallel)
    check_experts(config, enable_expert_parallel)
    layout = Layout(data_parallel_size, tensor_parallel_size, threads, pipeline_parallel_size, enable_expert_parallel)
    sections = examine(model, isa, layout=layout if layout.is_divided else None)
    if port is not None:
        options = ServeOptions(port=port)
        fault = _why_not(options)
        free = f"{options.host}:{port} is free" if fault is None else str(fault)
        sections.append(Section("Port", [("listening", free)], fault))
    write_json(json_file, as_dict(sections))
    if not is_json_alone(json_file):
        show(sections)
    for section in sections:
        if section.fault is not None:
            raise section.fault


def _why_not(options: ServeOptions) -> ConfigError | None:
    """Why a server cannot listen there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        reason = error.strerror or error
        return ConfigError(f"{options.host}:{options.port} cannot be listened on: {reason}. Choose another --port.")
    return None
