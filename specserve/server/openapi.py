"""The OpenAPI 3.1 document of routes, made of the types that requests are validated with and answers are written in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeAlias

from aiohttp.typedefs import Handler
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode

from specserve.server.wire.fields import Limits
from specserve.server.wire.openai.bodies import ErrorBody
from specserve.server.wire.openai.sampling_fields import defaults
from specserve.version import __version__

Json: TypeAlias = dict[str, Any]

JSON, EVENTS, NDJSON, HTML = "application/json", "text/event-stream", "application/x-ndjson", "text/html"
METRICS, SCRIPT = "text/plain", "text/javascript"

_PLACE = "#/components/schemas/{model}"

_ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "A web page of another origin may not do this.",
    404: "There is no such model or path.",
    408: "The client was too slow to send the request.",
    413: "The body is too large.",
    415: "The body is not application/json, or it is compressed.",
    429: "More requests than the server takes at a time. Send it again after Retry-After.",
    500: "The server failed on this request; `message` says no more than it may.",
    503: "The engine is not ready, or the server is stopping. Send it again after Retry-After.",
    504: "The answer took longer than the server allows.",
}
_RETRIED_LATER = (429, 503)
_RETRY_AFTER = {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 0}}
_IGNORED = {
    "description": "Fields that were ignored, and format.NAME for each format that JSON Schema does not define, with "
    "commas between.",
    "schema": {"type": "string"},
}
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_NAME_IN_PATH = re.compile(r"{(\w+)}")

_ABOUT = """\
The HTTP API of specserve, in the shapes of OpenAI, vLLM, Anthropic and Ollama.

In requests, null is the default of every field that may be left out. A boolean is no number, text is no number, and \
whole numbers are written without a fraction. Fields that are not in this document are ignored, and where text is \
generated the header `x-specserve-ignored` names them; those that ask for something this server does not do are \
refused with status 400.

A path that is not in this document is answered with status 404, another method with 405, and a Host that the server \
does not know with 403, in the same error body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One method of one path, and what answers it. Types are what pydantic.TypeAdapter takes.

    `request` is a POST's body, and `example` one that works, the model's name aside. `replies` has the type of the body
    by HTTP status, JSON where `media` says nothing else; `event` is one of a streamed answer, which is sent as
    `event_media`: what `data:` holds, or a line. `errors` are the statuses, besides 401, that come with an `error`.
    `parameters` are those of its query and headers. `needs_key` is false for what is open even where keys are asked
    for.
    """

    method: str
    path: str
    handler: Handler
    name: str
    summary: str
    group: str
    replies: Mapping[int, Any] = field(default_factory=dict)
    media: str = JSON
    request: Any = None
    example: Mapping[str, Any] = field(default_factory=dict)
    parameters: tuple[Json, ...] = ()
    event: Any = None
    event_media: str = EVENTS
    error: Any = ErrorBody
    errors: tuple[int, ...] = ()
    needs_key: bool = True


class _Plain(GenerateJsonSchema):
    """Without a title for every field, which would only say its name again."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False


def document(
    routes: Sequence[Route],
    model: str,
    limits: Limits,
    drafters: Iterable[str],
    requires_key: bool,
    root_path: str = "",
) -> Json:
    """The document of a server with these routes, as JSON. `model` is the name it serves; `drafters` are
    `limits.drafters` in the order to list them; `requires_key`: it was started with API keys; `root_path`: what clients
    put before its paths."""
    schemas, components = _schemas(routes)
    paths: dict[str, Json] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, model, schemas, requires_key)
    made = {
        "openapi": "3.1.0",
        "info": {"title": "specserve", "version": __version__, "description": _ABOUT},
        "servers": [{"url": root_path or "/"}],
        "tags": [{"name": group} for group in dict.fromkeys(route.group for route in routes)],
        "security": [{name: []} for name in _KEYS] if requires_key else [],
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": _error_replies(routes, schemas),
            **({"securitySchemes": _KEYS} if requires_key else {}),
        },
    }
    names = ("vocab_size", "max_model_len", "max_completions", "min_priority", "max_priority")
    bounds = {name: getattr(limits, name) for name in names}
    fitted: Json = _fitted(made, {**bounds, **defaults(limits), "drafters": [*drafters, "none", None]})
    return fitted


# --- schemas ----------------------------------------------------------------------------------------------------------


def _schemas(routes: Sequence[Route]) -> tuple[dict[str, Json], Json]:
    """The schema of every type in the routes by `_part`, and the schemas that these refer to."""
    types: dict[str, Any] = {}
    for route in routes:
        parts: list[tuple[str | int, Any]] = [
            ("request", route.request),
            ("event", route.event),
            ("error", route.error),
        ]
        parts += route.replies.items()
        types |= {_part(route, part): kind for part, kind in parts if kind is not None}
    mode: JsonSchemaMode = "validation"
    adapters = [(name, mode, TypeAdapter(kind)) for name, kind in types.items()]
    made, shared = TypeAdapter.json_schemas(adapters, ref_template=_PLACE, schema_generator=_Plain)
    return {name: schema for (name, _), schema in made.items()}, shared["$defs"]


def _part(route: Route, part: str | int) -> str:
    return f"{route.name} {part}"


def _fitted(value: Any, bounds: Mapping[str, Any]) -> Any:
    """`value` with every "x-limits" replaced by what it stands for on this server; of two bounds the narrower, of two
    defaults the server's."""
    if isinstance(value, list):
        return [_fitted(item, bounds) for item in value]
    if not isinstance(value, dict):
        return value
    fitted = {name: _fitted(item, bounds) for name, item in value.items()}
    for keyword, name in fitted.pop("x-limits", {}).items():
        bound = bounds[name]
        narrower = max if keyword == "minimum" else min
        is_bound = keyword in fitted and keyword != "default"
        fitted[keyword] = narrower(bound, fitted[keyword]) if is_bound else bound
    return fitted


# --- operations -------------------------------------------------------------------------------------------------------


def _operation(route: Route, model: str, schemas: Mapping[str, Json], requires_key: bool) -> Json:
    errors = sorted({*route.errors, *([401] if requires_key and route.needs_key else [])})
    replies = {str(status): _reply(route, status, schemas) for status in route.replies}
    replies |= {str(status): {"$ref": f"#/components/responses/{_error_name(route, status)}"} for status in errors}
    operation: Json = {
        "operationId": route.name,
        "summary": route.summary,
        "tags": [route.group],
        "responses": replies,
    }
    if not route.needs_key:
        operation["security"] = []
    names = _NAME_IN_PATH.findall(route.path)
    in_path = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    if parameters := [*in_path, *route.parameters]:
        operation["parameters"] = parameters
    if route.request is not None:
        names_model = "model" in getattr(route.request, "model_fields", ("model",))  # a union of requests has none
        example = {**({"model": model} if names_model else {}), **route.example}
        content = {JSON: {"schema": schemas[_part(route, "request")], "example": example}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _reply(route: Route, status: int, schemas: Mapping[str, Json]) -> Json:
    content = {route.media: {"schema": schemas[_part(route, status)]}}
    reply: Json = {"description": HTTPStatus(status).phrase, "content": content}
    if route.event is not None:
        content[route.event_media] = {"schema": _events(route.event_media, schemas[_part(route, "event")])}
        reply["headers"] = {"x-specserve-ignored": _IGNORED}
    return reply


def _events(media: str, event: Json) -> Json:
    """OpenAPI 3.1 has no word for a stream's events; 3.2 calls their schema itemSchema."""
    return {"type": "string", "description": _STREAMS[media], "x-itemSchema": event}


_STREAMS = {
    EVENTS: "With stream true. Each event has a line with `data: ` and JSON; OpenAI's chat completions and completions "
    "end with `data: [DONE]`. A stream that fails ends with an error as its last event.",
    NDJSON: "Without stream false. Each line is JSON; `done` is true in the last. A stream that fails ends with an "
    "error as its last line.",
}


def _error_replies(routes: Sequence[Route], schemas: Mapping[str, Json]) -> Json:
    """Every status that a route fails with, for each shape of errors."""
    return {
        _error_name(route, status): _error(status, schemas[_part(route, "error")])
        for route in routes
        for status in (401, *route.errors)
    }


def _error(status: int, schema: Json) -> Json:
    error: Json = {"description": _ERRORS[status], "content": {JSON: {"schema": schema}}}
    if status in _RETRIED_LATER:
        error["headers"] = {"Retry-After": _RETRY_AFTER}
    return error


def _error_name(route: Route, status: int) -> str:
    return f"{route.error.__name__}{status}"
