"""What a server says of itself: health, models, versions, metrics, the live view's figures; and what an operator may
tell it."""

from __future__ import annotations

import functools
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiohttp import web

from specserve.adapters import AdapterSource
from specserve.errors import InputError
from specserve.server.engine.client import UnknownAdapterError
from specserve.server.engine.keeper import State
from specserve.server.http.bodies import parsed
from specserve.server.http.context import Context, context
from specserve.server.http.origin import check_origin
from specserve.server.http.respond import json_response
from specserve.server.metrics import CONTENT_TYPE
from specserve.server.service import Engines
from specserve.server.wire.anthropic_api.models import VERSION_HEADER, model_info, model_page
from specserve.server.wire.errors import model_not_found, route_not_found, unavailable
from specserve.server.wire.openai.bodies import ModelCard
from specserve.server.wire.openai.replies import model_card, model_list
from specserve.server.wire.openai.requests import (
    LoadAdapterRequest,
    ResetPrefixCacheRequest,
    UnloadAdapterRequest,
    read,
)
from specserve.server.wire.sentences import shown
from specserve.version import __version__

_read_reset = functools.partial(read, ResetPrefixCacheRequest)
_read_load = functools.partial(read, LoadAdapterRequest)
_read_unload = functools.partial(read, UnloadAdapterRequest)


async def live(request: web.Request) -> web.Response:
    """GET /live: 200 as long as this server works; it starts the engine again by itself. 503 where the process that has
    the engines stands still."""
    state = _state(context(request))
    return json_response({"status": state}, 503 if state == State.STALLED.value else 200)


async def health(request: web.Request) -> web.Response:
    """GET /health and /ready: 200 while requests are taken, else 503."""
    state = _state(context(request))
    return json_response({"status": state}, 200 if state == State.READY.value else 503)


async def models(request: web.Request) -> web.Response:
    """GET /v1/models, as OpenAI's clients read it, or Anthropic's where they say so."""
    server = context(request)
    stated = server.created, server.limits.max_model_len
    if VERSION_HEADER in request.headers:
        return json_response(model_page([*server.names, *server.adapters], *stated, request.query))
    adapters = {name: info.path for name, info in server.adapters.items()}
    return json_response(model_list(server.names, *stated, _runs(server), adapters))


async def model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}."""
    server = context(request)
    name = request.match_info["id"]
    server.check_model(name)
    if VERSION_HEADER in request.headers:
        return json_response(model_info(name, server.created, server.limits.max_model_len))
    return json_response(_card(server, name))


def _card(server: Context, name: str) -> ModelCard:
    shared = name, server.created, server.limits.max_model_len, _runs(server)
    if server.adapter_of(name) is None:
        return model_card(*shared)
    return model_card(*shared, root=server.adapters[name].path, parent=server.names[0])


async def version(request: web.Request) -> web.Response:
    """GET /version."""
    return json_response({"version": __version__})


async def server_info(request: web.Request) -> web.Response:
    """GET /server_info: how the server was started; keys are not told."""
    server = context(request)
    options = {name: _plain(value) for name, value in asdict(server.options).items() if not name.startswith("api_key")}
    ready = server.service.ready
    engine = {**ready.about, "drafter": ready.drafter, "drafters": ready.drafters}
    limits = {"max_model_len": ready.max_model_len, "max_num_seqs": ready.max_num_seqs}
    return json_response(
        {
            "version": __version__,
            "models": list(server.names),
            "engine": {**engine, **limits},
            "options": options,
            "sampling_defaults": dict(server.sampling),
            "timeline": server.timeline,
        }
    )


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics, for Prometheus."""
    body = await context(request).reports.exposition()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def stats(request: web.Request) -> web.Response:
    """GET /stats, for the live view."""
    return json_response(await context(request).reports.stats())


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """POST /reset_prefix_cache, with --admin."""
    server = _operated(request)
    body: ResetPrefixCacheRequest = await parsed(request, _read_reset, says_json=True)
    server.check_model(body.model)
    await _ready_supervisor(server).reset_prefix_cache()
    return json_response({"status": "ok"})


async def load_adapter(request: web.Request) -> web.Response:
    """POST /v1/load_lora_adapter, with --admin. Nobody waits for it but who asks: it is read beside the steps."""
    server = _operated(request)
    body: LoadAdapterRequest = await parsed(request, _read_load, says_json=True)
    if body.lora_name in server.names:
        raise InputError(f"{shown(body.lora_name)} is the model's own name; give the adapter another.", "lora_name")
    source = AdapterSource(body.lora_name, body.lora_path, body.pinned, body.head_path)
    await _ready_supervisor(server).load_adapter(source, body.load_inplace)
    return json_response(_card(server, body.lora_name))


async def unload_adapter(request: web.Request) -> web.Response:
    """POST /v1/unload_lora_adapter, with --admin. Requests that run with it end with it."""
    server = _operated(request)
    body: UnloadAdapterRequest = await parsed(request, _read_unload, says_json=True)
    try:
        await _ready_supervisor(server).unload_adapter(body.lora_name)
    except UnknownAdapterError:
        raise model_not_found(body.lora_name, server.adapters) from None
    return json_response({"status": "ok"})


def _operated(request: web.Request) -> Context:
    """The server that an operator tells something. Raises WireError without --admin. What such routes take cannot be
    sent by other sites' pages without being asked for by the browser first, and such are told apart."""
    server = context(request)
    if not server.options.admin:
        raise route_not_found(request.path)
    check_origin(request)
    return server


def _ready_supervisor(server: Context) -> Engines:
    if server.service.supervisor.state is not State.READY:
        raise unavailable("There is no engine now. Try again in a moment.")
    return server.service.supervisor


def _runs(server: Context) -> str:
    ready = server.service.supervisor.ready
    return "" if ready is None else ready.about["runs"]


def _state(server: Context) -> str:
    return "draining" if server.admission.draining else server.service.supervisor.state.value


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
