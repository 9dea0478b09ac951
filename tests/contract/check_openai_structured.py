"""openai's client, versions 2 and 3: answers that are objects of a class, and calls of tools that are made, whole and
streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

MESSAGES: Any = [{"role": "user", "content": "Describe Paris, the city in France."}]
GREEDY: Any = {"temperature": 0, "max_tokens": 120}


class Size(StrEnum):
    small = "small"
    large = "large"


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    size: Size
    inhabitants: int = Field(ge=0, le=99_999_999)
    has_river: bool


@pytest.fixture(scope="module")
def client(url: str, key: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=300) as opened:
        yield opened


@pytest.fixture
def tools() -> Any:
    return [
        openai.pydantic_function_tool(City, name="describe"),
        openai.pydantic_function_tool(Measure, name="measure"),
    ]


class Measure(BaseModel):
    """How large something is."""

    size: Size


def test_an_answer_is_an_object(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(model=model, messages=MESSAGES, response_format=City, **GREEDY)
    city = answer.choices[0].message.parsed
    assert isinstance(city, City)
    assert City.model_validate_json(answer.choices[0].message.content or "") == city


def test_any_object(client: openai.OpenAI, model: str) -> None:
    kind: Any = {"type": "json_object"}
    answer = client.chat.completions.create(model=model, messages=MESSAGES, response_format=kind, **GREEDY)
    text = answer.choices[0].message.content or ""
    assert text.startswith("{")
    assert answer.choices[0].finish_reason == "length" or isinstance(json.loads(text), dict)


def test_a_streamed_object_grows(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(model=model, messages=MESSAGES, response_format=City, **GREEDY) as stream:
        grown = [event.parsed for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(final, City)
    assert len(grown) > 1


@pytest.mark.parametrize("parallel", [True, False])
def test_a_tool_that_must_be_called_is(client: openai.OpenAI, model: str, tools: Any, parallel: bool) -> None:
    answer = client.chat.completions.parse(
        model=model, messages=MESSAGES, tools=tools, tool_choice="required", parallel_tool_calls=parallel, **GREEDY
    )
    choice = answer.choices[0]
    calls = choice.message.tool_calls or []
    assert choice.message.content is None
    assert choice.finish_reason == "tool_calls" and calls
    assert all(isinstance(call.function.parsed_arguments, City | Measure) for call in calls)
    assert parallel or len(calls) == 1


def test_a_tool_that_is_named_is_called_and_streamed(client: openai.OpenAI, model: str, tools: Any) -> None:
    choice: Any = {"type": "function", "function": {"name": "describe"}}
    asked: Any = {"model": model, "messages": MESSAGES, "tools": tools, "tool_choice": choice, **GREEDY}
    whole = client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert whole is not None and [call.function.name for call in whole] == ["describe"]
    with client.chat.completions.stream(**asked) as stream:
        pieces = [e.arguments_delta for e in stream if e.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert len([piece for piece in pieces if piece]) > 3
    assert "".join(pieces) == whole[0].function.arguments
    City.model_validate_json(whole[0].function.arguments)


def test_responses_are_objects_too(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "input": "Describe Paris.", "max_output_tokens": 120, "temperature": 0}
    assert isinstance(client.responses.parse(text_format=City, **asked).output_parsed, City)


def test_drafts_change_nothing(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "messages": MESSAGES, "response_format": City, **GREEDY}
    bodies = [{"speculative": {"drafter": drafter}} for drafter in ("none", "ngram", "grammar")]
    answers = [client.chat.completions.parse(**asked, extra_body=body) for body in bodies]
    said = [answer.choices[0].message.content for answer in answers]
    assert len(set(said)) == 1


def test_what_cannot_be_enforced_is_a_bad_request(client: openai.OpenAI, model: str) -> None:
    schema = {"type": "array", "items": {}, "uniqueItems": True}
    kind: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as raised:
        client.chat.completions.create(model=model, messages=MESSAGES, response_format=kind, **GREEDY)
    assert raised.value.param == "response_format"
