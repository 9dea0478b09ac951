"""`specserve serve`: options of a server and its engine."""

from __future__ import annotations

import os
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from specserve.cli.options import ENGINE_HELP, MODEL, engine_options, options_type
from specserve.config import DEFAULT_MODEL, EngineConfig
from specserve.help import Help
from specserve.server.engine.spawn import EngineSpawner
from specserve.server.options import ServeOptions

SERVE_HELP: dict[str, Help] = {
    "host": Help("Address to listen on; 0.0.0.0 is every one.", "Listening"),
    "port": Help("Port to listen on; 0 is any that is free.", "Listening"),
    "uds": Help("Unix socket to listen on instead; only its owner may connect.", "Listening"),
    "tls_cert": Help("PEM file with the certificate chain; makes it HTTPS.", "Listening"),
    "tls_key": Help("PEM file with the certificate's private key.", "Listening"),
    "root_path": Help("Path that stands before all others behind a proxy, such as /llm.", "Listening"),
    "served_model_name": Help("Name of the model in requests; may be repeated, the first is in answers.", "Listening"),
    "api_key": Help(
        "A key that lets requests in; may be repeated. With any, only /live, /health, /ready, / and /docs are open.",
        "Access",
    ),
    "api_key_file": Help("File with one key a line.", "Access"),
    "cors_origin": Help('Origin whose web pages may call; may be repeated, "*" is all.', "Access"),
    "allowed_host": Help(
        'Name in the Host header, besides localhost and addresses; may be repeated, "*" is all. Checked on loopback.',
        "Access",
    ),
    "share_drafts": Help(
        "Draft for requests without a key or cache_salt from each other's answers; times and counts tell of these.",
        "Access",
    ),
    "admin": Help("Answer POST /reset_prefix_cache.", "Access"),
    "scheduling_policy": Help(
        "fcfs: first come, first served; priority: any request may have a priority of its own.",
        "Operation",
    ),
    "reasoning_format": Help(
        "auto: what a model thinks before it answers a conversation is told apart; none: it is text.",
        "Operation",
    ),
    "max_queue": Help("Completions that may wait; more are refused with 429.", "Limits"),
    "max_body_mib": Help("Largest body of a request, in MiB.", "Limits"),
    "max_tokenize_characters": Help("Longest text that /tokenize and count_tokens take.", "Limits"),
    "header_timeout_s": Help("Seconds for a request's first line and headers.", "Limits"),
    "body_timeout_s": Help("Seconds for a request's body.", "Limits"),
    "queue_timeout_s": Help("Seconds a request may wait for its grammar and its first step; 0 is no limit.", "Limits"),
    "request_timeout_s": Help("Seconds a request may take in all; 0 is no limit.", "Limits"),
    "write_timeout_s": Help("Seconds in which a client may take nothing of its answer.", "Limits"),
    "drain_timeout_s": Help("Seconds that running requests get after SIGTERM.", "Limits"),
    "stall_timeout_s": Help("Seconds without progress after which the engine is started again.", "Limits"),
    "start_timeout_s": Help("Seconds until the engine must be ready.", "Limits"),
    "status_interval_s": Help("Seconds between two lines of live status; 0 is none.", "Operation"),
    "chat_template": Help("Jinja file to use in place of the model's chat template.", "Operation"),
    "default_chat_template_kwargs": Help(
        'JSON object of values for the chat template that a request may replace, such as {"enable_thinking": false}.',
        "Operation",
    ),
    "generation_config": Help(
        "Sampling values of requests that say none: auto takes the model's generation_config.json, none takes none; or "
        "a file or folder.",
        "Operation",
    ),
    "log_format": Help("Lines for people, or JSON objects.", "Operation"),
    "log_level": Help("Least important messages that are shown.", "Operation"),
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
    model: Annotated[str, Parameter(group=MODEL, help=ENGINE_HELP["model"].text)] = DEFAULT_MODEL,
    *,
    listen: Annotated[ListenOptions, Parameter(name="*")] = _LISTEN,
    engine: Annotated[ServeEngineOptions, Parameter(name="*")] = _ENGINE,
) -> None:
    """Serve a model over HTTP with OpenAI's API, until SIGINT or SIGTERM."""
    begun = _process_start()
    with EngineSpawner() as spawner:
        spawner.prepare()  # before the imports below, which take as long as its own
        from specserve.server.http.run import serve as run
        from specserve.server.logs import configure

        options = ServeOptions(**{entry.name: getattr(listen, entry.name) for entry in fields(ServeOptions)})
        configure(options.log_format, options.log_level)
        run({**engine_options(replace(engine)), "model": model}, options, begun, spawner)


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
