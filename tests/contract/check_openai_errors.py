"""openai's client, versions 2 and 3: each of its error classes, what they hold, and that it waits as it is told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

MESSAGES: Any = [{"role": "user", "content": "Write a long story about a lighthouse and its keeper."}]
ENDLESS: Any = {"max_tokens": 6000, "temperature": 0, "extra_body": {"ignore_eos": True}}


class Recorder:
    """Every response that a client was sent, retries too."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.times: list[float] = []  # of arrival, seconds of time.monotonic()
        self.sent: list[float] = []

    def client(self, url: str, key: str, **options: Any) -> openai.OpenAI:
        hooks = {"request": [self._sending], "response": [self._came]}
        return openai.OpenAI(
            base_url=f"{url}/v1", api_key=key, http_client=openai.DefaultHttpxClient(event_hooks=hooks), **options
        )

    def _sending(self, request: Any) -> None:
        self.sent.append(time.monotonic())

    def _came(self, response: Any) -> None:
        self.statuses.append(response.status_code)
        self.times.append(time.monotonic())


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def client(url: str, key: str, recorder: Recorder) -> Iterator[openai.OpenAI]:
    """Retries twice, as openai's clients do unless told."""
    with recorder.client(url, key) as opened:
        yield opened


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1), ("top_p", 2), ("n", 0), ("max_tokens", 0), ("stop", [""]), ("top_logprobs", 21)],
)
def test_a_wrong_field_is_a_bad_request(
    client: openai.OpenAI, recorder: Recorder, model: str, field: str, value: Any
) -> None:
    asked: Any = {field: value}
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=model, messages=MESSAGES, **asked)
    error = raised.value
    assert (error.status_code, error.type, error.param) == (400, "invalid_request_error", field)
    assert field in error.message
    assert error.request_id
    assert recorder.statuses == [400]


def test_a_prompt_too_long_is_a_bad_request_once(client: openai.OpenAI, recorder: Recorder, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=model, prompt=[5] * 9000)
    assert raised.value.code == "context_length_exceeded"
    assert "9000" in raised.value.message
    assert recorder.statuses == [400]


def test_an_unknown_model_is_not_found(client: openai.OpenAI, recorder: Recorder) -> None:
    for call in (
        lambda: client.chat.completions.create(model="gpt-none", messages=MESSAGES),
        lambda: client.completions.create(model="gpt-none", prompt="a"),
        lambda: client.models.retrieve("gpt-none"),
    ):
        with pytest.raises(openai.NotFoundError) as raised:
            call()
        assert (raised.value.code, raised.value.param) == ("model_not_found", "model")
    assert recorder.statuses == [404] * 3


def test_a_route_that_is_not_there_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.images.generate(prompt="a cat")
    assert raised.value.code == "not_found"


def test_a_wrong_key_is_refused(url: str, recorder: Recorder, model: str) -> None:
    with recorder.client(url, "wrong") as opened, pytest.raises(openai.AuthenticationError) as raised:
        opened.chat.completions.create(model=model, messages=MESSAGES)
    assert (raised.value.code, raised.value.type) == ("invalid_api_key", "authentication_error")
    assert "wrong" not in raised.value.message.split()[-1]
    assert recorder.statuses == [401]


@pytest.fixture
def busy(narrow_url: str, key: str, model: str) -> Iterator[Any]:
    """A stream that takes the narrow server's only place, as long as it is open and allowed to last."""
    with openai.OpenAI(base_url=f"{narrow_url}/v1", api_key=key, timeout=300) as opened:
        stream = opened.chat.completions.create(model=model, messages=MESSAGES, stream=True, **ENDLESS)
        next(iter(stream))
        yield stream
        stream.close()


def test_a_full_server_says_so(busy: Any, narrow_url: str, key: str, model: str, recorder: Recorder) -> None:
    with recorder.client(narrow_url, key, max_retries=0) as opened, pytest.raises(openai.RateLimitError) as raised:
        opened.chat.completions.create(model=model, messages=MESSAGES)
    assert (raised.value.code, raised.value.type) == ("overloaded", "rate_limit_error")
    assert int(raised.value.response.headers["retry-after"]) >= 1
    assert recorder.statuses == [429]


def test_a_full_server_is_asked_again_when_it_said(
    busy: Any, narrow_url: str, key: str, model: str, recorder: Recorder
) -> None:
    """The client's own first pause would be half a second at most; the server asks for one."""
    with recorder.client(narrow_url, key, max_retries=60) as opened:
        raw = opened.chat.completions.with_raw_response.create(model=model, messages=MESSAGES, max_tokens=2)
    assert raw.parse().usage.completion_tokens == 2
    assert recorder.statuses == [429] * raw.retries_taken + [200]
    assert raw.retries_taken >= 1
    pauses = [again - told for told, again in zip(recorder.times, recorder.sent[1:], strict=False)]
    assert min(pauses) >= 1.0


def test_an_error_in_mid_stream_is_raised(busy: Any) -> None:
    """The server's limit of time ends a stream that has begun: an event with an error, which is no end of text."""
    with pytest.raises(openai.APIError) as raised:
        for _ in busy:
            pass
    assert not isinstance(raised.value, openai.APIStatusError | openai.APIConnectionError)
    assert (raised.value.code, raised.value.type) == ("timeout", "timeout_error")
    assert "longer than this server allows" in raised.value.message


def test_a_timeout_before_the_answer_has_a_status(narrow_url: str, key: str, model: str, recorder: Recorder) -> None:
    with recorder.client(narrow_url, key, max_retries=0) as opened, pytest.raises(openai.InternalServerError) as raised:
        opened.chat.completions.create(model=model, messages=MESSAGES, **ENDLESS)
    assert (raised.value.status_code, raised.value.code) == (504, "timeout")
    assert recorder.statuses == [504]
