"""Ollama's client: chat and generate, whole and streamed, with formats and tools, beside OpenAI's chat; models and
errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import ollama
import pytest

MESSAGES: Any = [{"role": "user", "content": "Write a long story about a lighthouse and its keeper."}]
OPTIONS: Any = {"temperature": 0, "num_predict": 40}
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(autouse=True)
def route(need_route: Callable[[str], None]) -> None:
    need_route("/api/chat")


@pytest.fixture
def client(url: str, key: str) -> ollama.Client:
    return ollama.Client(url, headers={"Authorization": f"Bearer {key}"})


@pytest.fixture
def text(ask: Any, model: str) -> str:
    """What chat says."""
    status, answer = ask(
        "/v1/chat/completions", {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 40}
    )
    assert status == 200
    return str(answer["choices"][0]["message"]["content"])


def test_chat_is_what_openais_says(client: ollama.Client, model: str, text: str) -> None:
    answer = client.chat(model, MESSAGES, options=OPTIONS)
    assert answer.message.content == text
    assert (answer.done, answer.done_reason, answer.eval_count) == (True, "length", 40)
    assert answer.total_duration >= answer.prompt_eval_duration + answer.eval_duration > 0
    parts = list(client.chat(f"{model}:latest", MESSAGES, options=OPTIONS, stream=True))
    assert "".join(part.message.content or "" for part in parts) == text
    assert [part.done for part in parts] == [*[False] * (len(parts) - 1), True]
    assert parts[-1].eval_count == 40


def test_chat_from_a_coroutine(url: str, key: str, model: str, text: str) -> None:
    async def ask() -> str:
        client = ollama.AsyncClient(url, headers={"Authorization": f"Bearer {key}"})
        parts = await client.chat(model, MESSAGES, options=OPTIONS, stream=True)
        return "".join([part.message.content or "" async for part in parts])

    assert asyncio.run(ask()) == text


def test_generate(client: ollama.Client, model: str, text: str) -> None:
    question = MESSAGES[0]["content"]
    assert client.generate(model, question, options=OPTIONS).response == text
    parts = list(client.generate(model, question, options=OPTIONS, stream=True))
    assert "".join(part.response or "" for part in parts) == text
    raw = client.generate(model, "One, two, three, four,", raw=True, options={**OPTIONS, "num_predict": 8})
    assert "five" in (raw.response or "")


def test_formats(client: ollama.Client, model: str) -> None:
    answer = client.chat(model, MESSAGES, format=SCHEMA, options={"num_predict": 60})
    assert json.loads(answer.message.content or "")["city"] in ("Oslo", "Rome")
    whole = client.generate(
        model, "Name a city as JSON.", format="json", options={"temperature": 0, "num_predict": 200}
    )
    assert isinstance(json.loads(whole.response or ""), dict)


def test_log_probabilities(client: ollama.Client, model: str) -> None:
    answer = client.chat(model, MESSAGES, options={**OPTIONS, "num_predict": 3}, logprobs=True, top_logprobs=2)
    assert [len(entry.top_logprobs or ()) for entry in answer.logprobs or ()] == [2, 2, 2]
    assert all(entry.logprob <= 0 for entry in answer.logprobs or ())


def test_a_conversation_with_calls_goes_on(client: ollama.Client, model: str) -> None:
    def weather(city: str) -> str:
        """The weather.

        Args:
            city: Where.
        """
        return "sunny"

    call = ollama.Message.ToolCall(
        function=ollama.Message.ToolCall.Function(name="weather", arguments={"city": "Oslo"})
    )
    said = [
        *MESSAGES,
        ollama.Message(role="assistant", tool_calls=[call]),
        ollama.Message(role="tool", tool_name="weather", content=weather("Oslo")),
    ]
    answer = client.chat(model, said, tools=[weather], options=OPTIONS)
    assert answer.message.content or answer.message.tool_calls


def test_models(client: ollama.Client, model: str) -> None:
    (listed,) = client.list().models
    (loaded,) = client.ps().models
    assert listed.model == loaded.model == f"{model}:latest"
    shown = client.show(model)
    assert shown.capabilities == ["completion"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == loaded.context_length
    assert shown.details == listed.details


def test_errors(client: ollama.Client, model: str) -> None:
    for fails, status, message in (
        (lambda: client.chat("gpt", MESSAGES), 404, "Unknown model"),
        (lambda: client.chat(model, MESSAGES, options={"num_ctx": 10**6}), 400, "1000000"),
        (lambda: client.generate(model, "a", suffix="b"), 400, "suffix"),
        (lambda: client.pull(model), 400, "specserve pull"),
        (lambda: client.embed(model, "a"), 400, "no embeddings"),
    ):
        with pytest.raises(ollama.ResponseError) as caught:
            fails()
        assert (caught.value.status_code, message in caught.value.error) == (status, True)
    with pytest.raises(ollama.ResponseError, match="Unknown model"):
        list(client.chat("gpt", MESSAGES, stream=True))
