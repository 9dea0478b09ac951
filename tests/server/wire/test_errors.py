"""Each failure has its status, its type and its code, and what nobody foresaw says nothing of itself."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from specserve.errors import CapacityError, EngineError, InputError, ModelError, PromptTooLongError
from specserve.server.wire.errors import (
    WireError,
    body_too_large,
    method_not_allowed,
    model_not_found,
    overloaded,
    route_not_found,
    timed_out,
    unauthorized,
    unavailable,
    unsupported_media_type,
    wire_error,
)


class _Temperature(BaseModel):
    temperature: float


def _invalid() -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        _Temperature.model_validate({"temperature": "warm"}, strict=True)
    return caught.value


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (InputError("n is 0.", "n"), 400, "invalid_request_error", "n", None),
        (InputError("No such drafter.", "drafter"), 400, "invalid_request_error", "speculative.drafter", None),
        (InputError("The body is empty."), 400, "invalid_request_error", None, None),
        (
            PromptTooLongError(300, 255, "the context"),
            400,
            "invalid_request_error",
            "prompt",
            "context_length_exceeded",
        ),
        (_invalid(), 400, "invalid_request_error", "temperature", None),
        (EngineError("The engine stopped."), 500, "server_error", None, "engine_error"),
        (CapacityError("Full."), 503, "service_unavailable", None, "insufficient_capacity"),
        (TimeoutError(), 504, "timeout_error", None, "timeout"),
        (ModelError("/secret/path"), 500, "server_error", None, "internal_error"),
        (KeyError("/secret/path"), 500, "server_error", None, "internal_error"),
        (RecursionError("/secret/path"), 500, "server_error", None, "internal_error"),
        (model_not_found("tinny", ["tiny"]), 404, "invalid_request_error", "model", "model_not_found"),
        (route_not_found("/v2"), 404, "invalid_request_error", None, "not_found"),
        (method_not_allowed("PUT", ["POST"]), 405, "invalid_request_error", None, "method_not_allowed"),
        (body_too_large(10), 413, "invalid_request_error", None, "body_too_large"),
        (unsupported_media_type("text/plain"), 415, "invalid_request_error", None, "unsupported_media_type"),
        (unauthorized(), 401, "authentication_error", None, "invalid_api_key"),
        (overloaded("Full."), 429, "rate_limit_error", None, "overloaded"),
        (unavailable("Loading."), 503, "service_unavailable", None, "unavailable"),
        (timed_out(408, "Too slow."), 408, "timeout_error", None, "timeout"),
    ],
)
def test_what_the_client_is_told(error: Exception, status: int, kind: str, param: str | None, code: str | None) -> None:
    told = wire_error(error)
    assert told.status == status
    assert told.body == {"error": {"message": told.message, "type": kind, "param": param, "code": code}}
    assert "/secret" not in told.message


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (PromptTooLongError(300, 255, "the context"), {"x-should-retry": "false"}),
        (overloaded("Full.", 2.1), {"Retry-After": "3"}),
        (unavailable("Draining."), {"Retry-After": "1"}),
        (CapacityError("Full."), {"Retry-After": "1"}),
        (timed_out(408, "Too slow."), {}),
        (EngineError("Stopped."), {}),
    ],
)
def test_who_may_try_again(error: Exception, headers: dict[str, str]) -> None:
    assert wire_error(error).headers == headers


def test_a_status_has_the_header_that_http_wants_with_it() -> None:
    assert method_not_allowed("PUT", ["POST", "GET"]).headers == {"Allow": "GET, POST", "x-should-retry": "false"}
    assert unauthorized().headers == {"WWW-Authenticate": "Bearer", "x-should-retry": "false"}


def test_a_prompt_too_long_names_both_numbers() -> None:
    message = wire_error(PromptTooLongError(300, 255, "the context is 256 tokens")).message
    assert "300" in message
    assert "255" in message


def test_a_finding_of_pydantic_is_one_sentence() -> None:
    assert wire_error(_invalid()).message == 'temperature is "warm"; it must be a finite number.'


def test_what_is_told_can_always_be_sent() -> None:
    """A client may name a field with half of a surrogate pair."""
    told = wire_error(InputError("\ud800 is NaN.", "\ud800"))
    assert told.body["error"] | {"message": "\ufffd is NaN.", "param": "\ufffd"} == told.body["error"]


@pytest.mark.parametrize("make", [route_not_found, unsupported_media_type, lambda s: model_not_found(s, ["tiny"])])
def test_long_client_strings_are_cut(make: Any) -> None:
    told = make("x" * 10**6)
    assert isinstance(told, WireError)
    assert len(told.message) < 300
