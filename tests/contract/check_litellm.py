"""LiteLLM, which speaks Ollama's API under two names: ollama/ asks /api/generate and ollama_chat/ asks /api/chat."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import litellm
import pytest

MESSAGES: Any = [{"role": "user", "content": "Name three rivers of Europe."}]


@pytest.fixture(autouse=True)
def route(need_route: Callable[[str], None]) -> None:
    need_route("/api/chat")


@pytest.fixture(params=["ollama", "ollama_chat"])
def complete(request: Any, url: str, key: str, model: str) -> Callable[..., Any]:
    def complete(**more: Any) -> Any:
        asked: Any = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0, **more}
        return litellm.completion(f"{request.param}/{model}", api_base=url, api_key=key, timeout=120, **asked)

    return complete


def test_answers(complete: Callable[..., Any]) -> None:
    whole = complete()
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.completion_tokens == 12
    parts = list(complete(stream=True))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    assert parts[-1].choices[0].finish_reason is not None


def test_formats(complete: Callable[..., Any]) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    format = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    answer = complete(response_format=format, max_tokens=60)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Oslo", "Rome")


def test_errors(complete: Callable[..., Any]) -> None:
    with pytest.raises(litellm.exceptions.BadRequestError, match="1000000"):
        complete(num_ctx=10**6)


def test_a_conversation_with_calls_goes_on(url: str, key: str, model: str) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    said = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    answer = litellm.completion(
        f"ollama_chat/{model}", said, tools=[tool], max_tokens=12, temperature=0, api_base=url, api_key=key
    )
    assert answer.usage.completion_tokens == 12 or answer.choices[0].finish_reason in ("stop", "tool_calls")
