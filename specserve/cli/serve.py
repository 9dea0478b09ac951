"""`specserve serve`: options of a server and its engine. Knows how they are written; specserve.server does the rest."""

from __future__ import annotations

import os
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from specserve.cli.options import ENGINE_HELP, MODEL, engine_options, options_type
from specserve.config import DEFAULT_MODEL, EngineConfig
from specserve.server.engine.spawn import Nest
from specserve.server.options import ServeOptions

LISTENING = Group("Listening", sort_key=5)
ACCESS = Group("Access", sort_key=6)
PATIENCE = Group("Patience", sort_key=7)
OPERATION = Group("Operation", sort_key=8)

SERVE_HELP: dict[str, tuple[Group, str]] = {
    "host": (LISTENING, "Address to listen on; 0.0.0.0 is every one."),
    "port": (LISTENING, "Port to listen on; 0 is any that is free."),
    "uds": (LISTENING, "Unix socket to listen on instead; only its owner may connect."),
    "tls_cert": (LISTENING, "PEM file with the certificate chain; makes it HTTPS."),
    "tls_key": (LISTENING, "PEM file with the certificate's private key."),
    "root_path": (LISTENING, "Path that stands before all others behind a proxy, such as /llm."),
    "served_model_name": (LISTENING, "Name of the model in requests; may be repeated, the first is in answers."),
    "api_key": (
        ACCESS,
        "A key that lets requests in; may be repeated. With any, only /live, /health, /ready, / and /docs are open.",
    ),
    "api_key_file": (ACCESS, "File with one key a line."),
    "cors_origin": (ACCESS, 'Origin whose web pages may call; may be repeated, "*" is all.'),
    "allowed_host": (
        ACCESS,
        'Name in the Host header, besides localhost and addresses; may be repeated, "*" is all. Checked on loopback.',
    ),
    "share_drafts": (
        ACCESS,
        "Draft for requests without a key or cache_salt from each other's answers; times and counts tell of these.",
    ),
    "admin": (ACCESS, "Answer POST /reset_prefix_cache."),
    "scheduling_policy": (
        OPERATION,
        "fcfs: first come, first served; priority: any request may have a priority of its own.",
    ),
    "reasoning_format": (
        OPERATION,
        "auto: what a model thinks before it answers a conversation is told apart; none: it is text.",
    ),
    "max_queue": (PATIENCE, "Completions that may wait; more are refused with 429."),
    "max_body_mib": (PATIENCE, "Largest body of a request, in MiB."),
    "max_tokenize_characters": (PATIENCE, "Longest text that /tokenize and count_tokens take."),
    "header_timeout_s": (PATIENCE, "Seconds for a request's first line and headers."),
    "body_timeout_s": (PATIENCE, "Seconds for a request's body."),
    "queue_timeout_s": (PATIENCE, "Seconds a request may wait for its grammar and its first step; 0 is no limit."),
    "request_timeout_s": (PATIENCE, "Seconds a request may take in all; 0 is no limit."),
    "write_timeout_s": (PATIENCE, "Seconds in which a client may take nothing of its answer."),
    "drain_timeout_s": (PATIENCE, "Seconds that running requests get after SIGTERM."),
    "stall_timeout_s": (PATIENCE, "Seconds without progress after which the engine is started again."),
    "start_timeout_s": (PATIENCE, "Seconds until the engine must be ready."),
    "status_interval_s": (OPERATION, "Seconds between two lines of live status; 0 is none."),
    "chat_template": (OPERATION, "Jinja file to use in place of the model's chat template."),
    "default_chat_template_kwargs": (
        OPERATION,
        'JSON object of values for the chat template that a request may replace, such as {"enable_thinking": false}.',
    ),
    "generation_config": (
        OPERATION,
        "Sampling values of requests that say none: auto takes the model's generation_config.json, none takes none; or "
        "a file or folder.",
    ),
    "log_format": (OPERATION, "Lines for people, or JSON objects."),
    "log_level": (OPERATION, "Least important messages that are shown."),
}

if TYPE_CHECKING:
    ListenOptions = ServeOptions
    ServeEngineOptions = EngineConfig
else:
    ListenOptions = options_type(ServeOptions, "ListenOptions", SERVE_HELP)
    ServeEngineOptions = options_type(EngineConfig, "ServeEngineOptions", ENGINE_HELP, hidden=("model",))

_ENGINE = ServeEngineOptions()
_LISTEN = ListenOptions()


def serve(
    model: Annotated[
        str, Parameter(group=MODEL, help="Catalog name, Hugging Face folder, .gguf file or hub id (org/name).")
    ] = DEFAULT_MODEL,
    *,
    listen: Annotated[ListenOptions, Parameter(name="*")] = _LISTEN,
    engine: Annotated[ServeEngineOptions, Parameter(name="*")] = _ENGINE,
) -> None:
    """Serve a model over HTTP with OpenAI's API, until SIGINT or SIGTERM."""
    begun = _process_start()
    with Nest() as nest:
        nest.prepare()  # before the imports below, which take as long as its own
        from specserve.server.http.run import serve as run
        from specserve.server.logs import configure

        options = ServeOptions(**{entry.name: getattr(listen, entry.name) for entry in fields(ServeOptions)})
        configure(options.log_format, options.log_level)
        run({**engine_options(replace(engine)), "model": model}, options, begun, nest)


def _process_start() -> float:
    """When this process began, in seconds of time.perf_counter(); now, where /proc does not tell."""
    try:
        after_name = Path("/proc/self/stat").read_text("utf-8").rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(after_name[19]) / _ticks_per_second()
    except (OSError, AttributeError):
        age = 0.0
    return time.perf_counter() - age


def _ticks_per_second() -> int:
    return os.sysconf("SC_CLK_TCK")
