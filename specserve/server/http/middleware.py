"""What happens to every request, whatever its route: an id, a line in the log, the right to be here, errors as JSON."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from specserve.server.http.context import context, route_path
from specserve.server.http.respond import (
    ADAPTER,
    CHUNKED,
    FAILURE,
    IGNORED,
    OUTPUTS,
    TENANT,
    json_response,
    public_error,
)
from specserve.server.logs import log_request, request_id
from specserve.server.wire.anthropic_api.models import VERSION_HEADER
from specserve.server.wire.anthropic_api.requests import anthropic_error
from specserve.server.wire.errors import (
    WireError,
    body_too_large,
    expectation_failed,
    method_not_allowed,
    route_not_found,
    unauthorized,
)
from specserve.server.wire.ollama_api.requests import ollama_error
from specserve.version import __version__

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID = web.RequestKey("request_id", str)
CLIENT_CLOSED = 499  # nginx's status for a client that left; only in the log

KEY_NUMBER = web.RequestKey("key_number", int)  # of the request's API key, as the server was told them, from 1

_POLLED = ("/live", "/health", "/ready", "/metrics", "/stats")
_PRINTABLE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@web.middleware
async def translate_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives the request an id, its errors the shape that clients read, and the log a line."""
    begun = time.perf_counter()
    token = request_id.set(identify(request))
    status = CLIENT_CLOSED
    try:
        response = await _answered(request, handler)
        status = response.status
        return response
    except ConnectionError:  # nobody is left who could be told; aiohttp would log it as a fault
        if request.transport is not None and not request.transport.is_closing():
            raise
        return web.Response(status=CLIENT_CLOSED)
    finally:
        _record(request, status, 1e3 * (time.perf_counter() - begun))
        request_id.reset(token)


def identify(request: web.BaseRequest) -> str:
    """The request's id: the client's own where it can stand in a header, else a new one."""
    sent = request.headers.get("X-Request-Id", "")
    request[REQUEST_ID] = sent if _PRINTABLE_ID.fullmatch(sent) else secrets.token_hex(8)
    return request[REQUEST_ID]


def _record(request: web.Request, status: int, milliseconds: float) -> None:
    """The log's line; what machines ask for every few seconds gets none for an answer that they wait for. An error that
    came after the head of a stream has the status that it would have had before."""
    if status in (200, 503) and route_path(request) in _POLLED:
        return
    stats = [completion.stats for output in request.get(OUTPUTS, ()) for completion in output.outputs]
    num_steps = sum(s.num_steps for s in stats)
    failure = request.get(FAILURE)
    log_request(
        method=request.method,
        path=request.path,
        status=failure.status if status == 200 and failure else status,
        client=request.remote or None,  # a Unix socket's has none
        key=request.get(KEY_NUMBER),
        error=failure.code if failure else None,
        milliseconds=milliseconds,
        adapter=request.get(ADAPTER),
        num_prompt_tokens=_total(len(output.prompt_token_ids) for output in request.get(OUTPUTS, ())),
        num_output_tokens=_total(len(c.token_ids) for output in request.get(OUTPUTS, ()) for c in output.outputs),
        mean_acceptance_length=1 + sum(s.num_accepted_tokens for s in stats) / num_steps if num_steps else None,
    )


def _total(counts: Iterable[int]) -> int | None:
    """None for a request that never reached the engine."""
    known = list(counts)
    return sum(known) if known else None


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ConnectionError:
        raise  # nobody is left who could be told
    except web.HTTPException as error:
        failure = _http_failure(request, error)
    except Exception as error:
        failure = public_error(error)
    return error_response(request, failure)


def error_response(request: web.Request, failure: WireError) -> web.Response:
    """The response that tells of a failure."""
    context(request).service.metrics.refused(failure.status)
    request[FAILURE] = failure
    response = json_response(_error_body(request, failure), failure.status, failure.headers)
    if request.get(CHUNKED):  # aiohttp's writer keeps to what the head said whose place this one takes
        response.enable_chunked_encoding()
    if failure.status in (408, 413):  # the rest of the body is not waited for
        response.force_close()
    return response


def _error_body(request: web.Request, failure: WireError) -> Mapping[str, Any]:
    """In the words of the API that was asked."""
    path = route_path(request)
    models_of_anthropic = path.startswith("/v1/models") and VERSION_HEADER in request.headers
    if path.startswith("/v1/messages") or models_of_anthropic:
        return anthropic_error(failure, request[REQUEST_ID])
    return ollama_error(failure) if path.startswith("/api/") else failure.body


def _http_failure(request: web.Request, error: web.HTTPException) -> WireError:
    """aiohttp's own findings."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        return method_not_allowed(request.method, error.allowed_methods)
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return body_too_large(context(request).options.max_body_bytes)
    if isinstance(error, web.HTTPExpectationFailed):
        return expectation_failed()
    if error.status == 404:
        return route_not_found(request.path)
    return WireError(error.status, "invalid_request_error", error.reason, code="bad_request")


def keys_required(keys: Collection[str], public: Collection[object]) -> Middleware:
    """Lets in whoever has one of the keys, and everybody to the handlers in `public`. Digests are compared, so the time
    says nothing of a key."""
    digests = [_digest(key) for key in keys]

    @web.middleware
    async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.match_info.handler not in public:
            number = request[KEY_NUMBER] = _key_number(request, digests)
            request[TENANT] = digests[number - 1]
        return await handler(request)

    return authorize


def _key_number(request: web.Request, digests: Sequence[bytes]) -> int:
    """Which key was sent, from 1. Raises WireError when it is none of them."""
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    sent = bearer.strip() if scheme.lower() == "bearer" else request.headers.get("X-Api-Key", "")
    given = _digest(sent)
    matches = [hmac.compare_digest(given, digest) for digest in digests]  # every one is compared
    if not any(matches):
        raise unauthorized()
    return matches.index(True) + 1


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def cross_origin(origins: Collection[str]) -> Middleware:
    """Answers the browser's question whether a page of another origin may call, for the pages of `origins` or, with
    "*", all."""

    @web.middleware
    async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if not (asks and _is_allowed(request, origins)):
            return await handler(request)
        sent = request.headers.get("Access-Control-Request-Headers", "authorization, content-type")
        return web.Response(
            status=204,
            headers={
                "Access-Control-Allow-Methods": "GET, POST",
                "Access-Control-Allow-Headers": sent,
                "Access-Control-Max-Age": "600",
            },
        )

    return answer_preflight


def _is_allowed(request: web.Request, origins: Collection[str]) -> bool:
    return "*" in origins or request.headers.get("Origin") in origins


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """A signal's receiver: headers that every response has, streams too."""
    own_headers(request, response)
    if request.get(IGNORED):
        response.headers["X-Specserve-Ignored"] = request[IGNORED]
    origin = request.headers.get("Origin")
    if origin is not None and _is_allowed(request, context(request).options.cors_origin):
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Vary"] = "Origin"


def own_headers(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Sets the headers that even a response to no request has."""
    response.headers["Server"] = f"specserve/{__version__}"
    response.headers["X-Content-Type-Options"] = "nosniff"
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = response.headers["Request-Id"] = request[REQUEST_ID]  # OpenAI's, Anthropic's
