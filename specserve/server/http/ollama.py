"""Ollama's API: its words for chat completions and completions, and what its clients ask of models."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from aiohttp import web

from specserve.checkpoint.pooling import Pooling
from specserve.server.http.bodies import parsed
from specserve.server.http.completions import (
    ignore_unrendered_tools,
    prepare_chat,
    prepare_completions,
    response_id,
)
from specserve.server.http.context import Context, context
from specserve.server.http.respond import Call, ignore, json_response, respond
from specserve.server.model_files import ModelFiles, read_model_files
from specserve.server.wire.errors import model_not_found, not_offered
from specserve.server.wire.json.text import LONG
from specserve.server.wire.ollama_api.answers import Kind, OllamaStream, answer_body, empty_body
from specserve.server.wire.ollama_api.requests import GenerateRequest, OllamaChatRequest, OllamaRequest, ShowRequest
from specserve.server.wire.openai.requests import ChatCompletionRequest, CompletionRequest, read
from specserve.server.wire.times import rfc3339
from specserve.server.wire.translated import read_translated
from specserve.version import __version__

OLLAMA_VERSION = "0.12.11"  # whose requests are understood: the first with log-probabilities
_NEVER = "9999-12-31T23:59:59Z"
_TAG = ":latest"
PARAMETERS = {"repetition_penalty": "repeat_penalty"}  # ours: Ollama's, where they differ

_read_chat = functools.partial(read_translated, OllamaChatRequest)
_read_generate = functools.partial(read_translated, GenerateRequest)
_read_show = functools.partial(read, ShowRequest)


# --- generation -------------------------------------------------------------------------------------------------------


async def chat(request: web.Request) -> web.StreamResponse:
    """POST /api/chat."""
    context(request).admission.check()
    return await _answer(request, await parsed(request, _read_chat), "chat")


async def generate(request: web.Request) -> web.StreamResponse:
    """POST /api/generate."""
    context(request).admission.check()
    return await _answer(request, await parsed(request, _read_generate), "generate")


async def _answer(request: web.Request, body: OllamaRequest, kind: Kind) -> web.StreamResponse:
    server = context(request)
    check_tag(server, body.name)
    limits = server.limits
    ignore(request, body.ignored(limits))
    if isinstance(body, GenerateRequest) and server.service.tokenizer.info()["chat_template"] is None:
        body = body.without_template()
    size = request.content_length or LONG  # unknown where it came in chunks
    wire = await server.service.threads.run(size, body.as_wire, limits)
    if body.is_empty:
        return json_response(empty_body(body.model or server.names[0], kind))
    with server.admission.enter(wire.num_choices) as place:
        if isinstance(wire, CompletionRequest):
            (prepared,), parser = await prepare_completions(server, wire), None
        else:
            assert isinstance(wire, ChatCompletionRequest)
            ignore_unrendered_tools(request, wire)
            prepared, parser = await prepare_chat(server, wire, body.own_names)
        reply = replace(
            server.reply(response_id("ollama", wire), wire, tool_parser=parser), model=body.model or server.names[0]
        )
        call = Call(
            requests=[prepared],
            stream=body.stream,
            place=place,
            body=lambda outputs, now: answer_body(reply, kind, outputs[0], now),
            events=lambda outputs: OllamaStream(reply, kind, outputs[0]),
        )
        return await respond(request, call)


# --- models -----------------------------------------------------------------------------------------------------------


async def tags(request: web.Request) -> web.Response:
    """GET /api/tags."""
    server = context(request)
    files = await _files(server)
    details = _details(server, files)
    listed = [
        {**_named(name), "modified_at": rfc3339(files.modified), "size": files.size, "digest": files.digest, **details}
        for name in (*server.names, *server.adapters)
    ]
    return json_response({"models": listed})


async def ps(request: web.Request) -> web.Response:
    """GET /api/ps: nothing while the engine loads."""
    server = context(request)
    ready = server.service.supervisor.ready
    if ready is None:
        return json_response({"models": []})
    files = await _files(server)
    loaded = {
        "size": files.size,
        "digest": files.digest,
        **_details(server, files),
        "expires_at": _NEVER,
        "size_vram": 0 if ready.about["device"] == "cpu" else files.size,
        "context_length": ready.max_model_len,
    }
    return json_response({"models": [{**_named(name), **loaded} for name in (*server.names, *server.adapters)]})


async def show(request: web.Request) -> web.Response:
    """POST /api/show."""
    server = context(request)
    body: ShowRequest = await parsed(request, _read_show)
    check_tag(server, (body.model or body.name or server.names[0]).removesuffix(_TAG))
    files, tokenizer = await _files(server), server.service.tokenizer
    architecture = files.family
    counted = {} if files.num_parameters is None else {"general.parameter_count": files.num_parameters}
    tells_reasoning = server.options.reasoning_format == "auto"
    reasons = tells_reasoning and await server.service.threads.on_thread(lambda: tokenizer.markers) is not None
    embeds = isinstance(server.pooling, Pooling)
    can = {"completion": True, "tools": tokenizer.takes_tools, "thinking": reasons, "embedding": embeds}
    shown = {
        "modelfile": "# specserve serves a model as its files are; there is no Modelfile.\n",
        "parameters": "\n".join(f"{PARAMETERS.get(name, name)} {v:g}" for name, v in server.sampling.items()),
        "template": tokenizer.info()["chat_template"] or "",
        **_details(server, files),
        "model_info": {
            "general.architecture": architecture,
            **counted,
            f"{architecture}.context_length": server.limits.max_model_len,
        },
        "capabilities": [name for name, is_so in can.items() if is_so],
        "modified_at": rfc3339(files.modified),
    }
    return json_response(shown)


async def version(request: web.Request) -> web.Response:
    """GET /api/version."""
    return json_response({"version": OLLAMA_VERSION, "specserve": __version__})


def check_tag(server: Context, name: str | None) -> None:
    """Raises WireError for a model that is not served. `name` is without `:latest`; qwen3:0.6b is qwen3-0.6b, too."""
    if name is not None and not {name, name + _TAG, name.replace(":", "-")} & {*server.names, *server.adapters}:
        raise model_not_found(name, [*server.names, *server.adapters])


def _named(name: str) -> dict[str, str]:
    """With a tag, as Ollama's names all are."""
    tagged = name if ":" in name.rpartition("/")[2] else name + _TAG
    return {"name": tagged, "model": tagged}


def _details(server: Context, files: ModelFiles) -> dict[str, Any]:
    ready = server.service.supervisor.ready
    details = {
        "parent_model": "",
        "format": files.format,
        "family": files.family,
        "families": [files.family],
        "parameter_size": files.parameter_size,
        "quantization_level": "" if ready is None else ready.about["quantization"],
    }
    return {"details": details}


async def _files(server: Context) -> ModelFiles:
    return await server.service.threads.on_thread(read_model_files, server.folder)


# --- what there is none of --------------------------------------------------------------------------------------------

_MODELS = "This server runs the one model that it was started with."
NOT_OFFERED: Mapping[str, str] = {
    "pull": f"{_MODELS} Fetch one with `specserve pull NAME` and serve it with `specserve serve NAME`.",
    "push": f"{_MODELS} It publishes none; upload a folder with the hub's own tools.",
    "create": f"{_MODELS} Serve a folder or a GGUF file with `specserve serve PATH`; a system message goes into the "
    "request.",
    "copy": f"{_MODELS} Start it with --served-model-name NAME to give it more names.",
    "delete": f"{_MODELS} Remove files with `specserve rm NAME`.",
}


def refusing(what: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """The handler of a route that Ollama has and this server does not; `what` is one of NOT_OFFERED."""

    async def refuse(request: web.Request) -> web.StreamResponse:
        raise not_offered(NOT_OFFERED[what])

    return refuse
