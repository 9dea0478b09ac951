"""Every failure as the client sees it: HTTP status, headers and OpenAI's error object.

Types: invalid_request_error (400, 403, 404, 405, 413, 415, 417), authentication_error (401), rate_limit_error (429),
server_error (500), service_unavailable (503), timeout_error (408, 504). What an unforeseen exception says stays in the
server's log.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from specserve.errors import CapacityError, EngineError, FailureCode, InputError, SpecserveError, TextError, unknown
from specserve.server.wire.fields import well_formed
from specserve.server.wire.openai.bodies import ErrorBody, ErrorType
from specserve.server.wire.sentences import as_input_error

MODEL_NOT_FOUND = "model_not_found"
INTERNAL_ERROR = "internal_error"  # the code of what nobody foresaw
COMPLETION_FAILED: FailureCode = "completion_failed"  # that of a completion that would fail again in the same way

_FINAL = (COMPLETION_FAILED, TextError.code)  # of what would fail again in the same way
_RETRIED = (408, 409, 429)  # what client SDKs send again, besides every status from 500 on
_RETRY_SECONDS = 1.0


class WireError(SpecserveError):
    """A failure in the client's terms. `retry_after` is in seconds, for 429 and 503; `own_headers` are those
    that HTTP wants with the status."""

    def __init__(
        self,
        status: int,
        kind: ErrorType,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        own_headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.message = status, kind, well_formed(message)
        self.param, self.code, self.retry_after = None if param is None else well_formed(param), code, retry_after
        self._own_headers = dict(own_headers or {})

    @property
    def body(self) -> ErrorBody:
        """The JSON body, and the body of the event when the stream has begun."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """`own_headers`, and whether and when to send the request again, as OpenAI's SDKs read it."""
        headers = dict(self._own_headers)
        if self.retry_after is not None:
            headers["Retry-After"] = str(math.ceil(self.retry_after))
        if (self.status < 500 and self.status not in _RETRIED) or self.code in _FINAL:
            headers["x-should-retry"] = "false"
        return headers


def wire_error(error: BaseException) -> WireError:
    """What the client is told about any exception; nothing of one that nobody foresaw."""
    if isinstance(error, WireError):
        return error
    for kind, answer in _ANSWERS:
        if isinstance(error, kind):
            return answer(error)
    return WireError(500, "server_error", "The server failed on this request; its log says why.", code=INTERNAL_ERROR)


def _bad_request(error: Any) -> WireError:
    param = _FIELDS.get(error.param, error.param)
    status = 404 if error.code == MODEL_NOT_FOUND else 400  # an adapter that was unloaded meanwhile
    return WireError(status, "invalid_request_error", str(error), param=param, code=error.code)


# The engine's name for a field: what a request calls it.
_FIELDS = {"adapter": "model", "drafter": "speculative.drafter", "num_speculative_tokens": "speculative.num_tokens"}

# The more special first.
_ANSWERS: tuple[tuple[type[BaseException], Callable[[Any], WireError]], ...] = (
    (InputError, _bad_request),
    (ValidationError, lambda error: _bad_request(as_input_error(error))),
    (TextError, lambda error: WireError(500, "server_error", str(error), code=error.code)),
    (EngineError, lambda error: WireError(500, "server_error", str(error), code="engine_error")),
    (CapacityError, lambda error: unavailable(str(error), code="insufficient_capacity")),
    (TimeoutError, lambda error: timed_out(504, "The request took longer than this server allows.")),
)


# --- what only a server can find wrong --------------------------------------------------------------------------------


def model_not_found(name: str, served: Iterable[str]) -> WireError:
    return _invalid(404, unknown("model", _short(name), served), param="model", code=MODEL_NOT_FOUND)


def not_offered(message: str, param: str | None = None) -> WireError:
    """For a route of another server's API; `message` says what to use instead. No 501: what clients send is no fault of
    the server, which those who watch it count by 5xx."""
    return _invalid(400, message, param=param, code="not_offered")


def route_not_found(path: str) -> WireError:
    return _invalid(404, f"There is no {_short(path)} here. GET /openapi.json lists what there is.", code="not_found")


def method_not_allowed(method: str, allowed: Iterable[str]) -> WireError:
    names = ", ".join(sorted(allowed))
    message = f"{_short(method)} does not work here. Allowed: {names}."
    return _invalid(405, message, code="method_not_allowed", own_headers={"Allow": names})


def bad_http(cause: str) -> WireError:
    return _invalid(400, f"This is no HTTP/1.1 request: {cause}.", code="bad_request")


def expectation_failed() -> WireError:
    return _invalid(417, "Expect may be 100-continue and nothing else. Leave the header out.", code="bad_request")


def body_too_large(limit: int) -> WireError:
    """`limit` in bytes."""
    return _invalid(413, f"The body is larger than {limit} bytes, the most this server takes.", code="body_too_large")


def unsupported_media_type(sent: str) -> WireError:
    message = f"The body is {_short(sent) or 'of no stated type'}. Send JSON as application/json, not compressed."
    return _invalid(415, message, code="unsupported_media_type")


def host_not_allowed(host: str) -> WireError:
    message = (
        f"The header Host is {_short(host)!r}, a name that this server does not know. Ask for it at localhost or an "
        "address, or start it with --allowed-host NAME."
    )
    return _invalid(403, message, code="host_not_allowed")


def origin_not_allowed(origin: str) -> WireError:
    message = (
        f"A web page of {_short(origin)!r} may not do this. Start the server with --cors-origin ORIGIN to let it, or "
        "send the request from a program."
    )
    return _invalid(403, message, code="origin_not_allowed")


def unauthorized() -> WireError:
    message = "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY' or in x-api-key."
    own_headers = {"WWW-Authenticate": "Bearer"}
    return WireError(401, "authentication_error", message, code="invalid_api_key", own_headers=own_headers)


def overloaded(message: str, retry_after: float = _RETRY_SECONDS) -> WireError:
    return WireError(429, "rate_limit_error", message, code="overloaded", retry_after=retry_after)


def unavailable(message: str, *, code: str = "unavailable", retry_after: float = _RETRY_SECONDS) -> WireError:
    return WireError(503, "service_unavailable", message, code=code, retry_after=retry_after)


def timed_out(status: int, message: str) -> WireError:
    """408: the client was too slow to send; 504: the server was too slow to answer."""
    assert status in (408, 504)
    return WireError(status, "timeout_error", message, code="timeout")


def _invalid(status: int, message: str, **more: Any) -> WireError:
    return WireError(status, "invalid_request_error", message, **more)


def _short(name: str) -> str:
    """Client strings are shown, but not whole."""
    return name if len(name) <= 100 else f"{name[:100]}..."
