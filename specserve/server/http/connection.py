"""A client's connection, where aiohttp itself answers: what is no HTTP request, and what no middleware has caught. The
answer has the shape of all errors, and the log shows nothing that was sent: a header may hold a key."""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.http_exceptions import (
    BadStatusLine,
    HttpProcessingError,
    InvalidURLError,
    LineTooLong,
    PayloadEncodingError,
)

from specserve.server.http.middleware import Handler, identify, own_headers, translate_errors
from specserve.server.http.respond import json_response
from specserve.server.wire.errors import WireError, bad_http, wire_error

_log = logging.getLogger(__name__)

_CAUSES: tuple[tuple[type[HttpProcessingError], str], ...] = (
    (LineTooLong, "the request line or a header is too long"),
    (BadStatusLine, "the request line is malformed"),
    (InvalidURLError, "the address in the request line is malformed"),
    (PayloadEncodingError, "the length of the body or of a chunk is malformed"),
    (HttpProcessingError, "the request line or a header is malformed"),
)


class Connection(web.RequestHandler):
    """aiohttp's own, but for how it tells of errors."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The response to what could not be read as a request, or failed where nobody foresaw it. aiohttp's own message
        quotes what was sent."""
        failure = _unreadable(request, exc)
        if failure is None:
            super().handle_error(request, status, exc, message)  # logs it; raises if a response has begun
            failure = wire_error(exc or RuntimeError(message))
        response = json_response(failure.body, failure.status, failure.headers)
        identify(request)
        own_headers(request, response)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Sends the response; where aiohttp raised before any middleware ran, the one that
        `translate_errors` makes of it."""
        if isinstance(resp, web.HTTPException) and isinstance(request, web.Request):
            resp = await translate_errors(request, _raising(resp))
        return await super().finish_response(request, resp, start_time)


def _raising(error: web.HTTPException) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        raise error

    return handler


def _unreadable(request: web.BaseRequest, error: BaseException | None) -> WireError | None:
    """What is wrong with bytes that are no HTTP request; None for any other failure."""
    cause = next((words for kind, words in _CAUSES if isinstance(error, kind)), None)
    if cause is None:
        return None
    _log.info("What came from %s is no HTTP request: %s.", request.remote or "a client", cause)
    return bad_http(cause)
