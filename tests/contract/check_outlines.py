"""outlines with a remote model, as a client of OpenAI and of a vLLM server: plain text, objects, choices, patterns and
grammars."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, Literal

import openai
import outlines
import pytest
from outlines.inputs import Chat
from outlines.types import CFG, Regex
from pydantic import BaseModel, ConfigDict, Field

QUESTION = "Write a long story about a lighthouse and its keeper."
GREEDY: Any = {"temperature": 0, "max_tokens": 30}
MAKERS: Any = [outlines.from_openai, outlines.from_vllm]


class City(BaseModel):
    """Of a few tokens, however little the model knows."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=99_999_999)


@pytest.fixture
def client(url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=300)


@pytest.fixture
def expected(client: openai.OpenAI, model: str) -> str:
    messages: Any = [{"role": "user", "content": QUESTION}]
    return str(client.chat.completions.create(model=model, messages=messages, **GREEDY).choices[0].message.content)


@pytest.mark.parametrize("make", MAKERS)
def test_plain_text(client: openai.OpenAI, model: str, expected: str, make: Callable[..., Any]) -> None:
    remote = make(client, model)
    assert remote(QUESTION, **GREEDY) == expected
    assert "".join(remote.stream(QUESTION, **GREEDY)) == expected
    assert remote(Chat([{"role": "user", "content": QUESTION}]), **GREEDY) == expected
    assert remote(QUESTION, n=2, **GREEDY) == [expected, expected]


@pytest.mark.parametrize("make", MAKERS)
def test_plain_text_async(url: str, key: str, model: str, expected: str, make: Callable[..., Any]) -> None:
    async def generate() -> str:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as opened:
            return str(await make(opened, model)(QUESTION, **GREEDY))

    assert asyncio.run(generate()) == expected


@pytest.mark.parametrize("make", MAKERS)
def test_an_object(client: openai.OpenAI, model: str, make: Callable[..., Any]) -> None:
    said = make(client, model)("Describe Paris, a city.", City, temperature=0, max_tokens=80)
    assert City.model_validate_json(said).name


@pytest.mark.parametrize(
    ("output_type", "pattern"),
    [
        (Literal["yes", "no"], "yes|no"),
        (int, r"[+-]?\d+"),
        (Regex(r"\d{4}-\d{2}"), r"\d{4}-\d{2}"),
        (bool, "True|False"),
    ],
)
def test_texts_of_a_pattern(client: openai.OpenAI, model: str, output_type: Any, pattern: str) -> None:
    """A vLLM server takes them; OpenAI has no words for them."""
    said = outlines.from_vllm(client, model)("Is the sky blue?", output_type, **GREEDY)
    assert re.fullmatch(pattern, said)


def test_a_grammar(client: openai.OpenAI, model: str) -> None:
    grammar = CFG('start: "sun" | "rain"')
    assert outlines.from_vllm(client, model)("The weather?", grammar, **GREEDY) in ("sun", "rain")


def test_any_object(client: openai.OpenAI, model: str) -> None:
    assert outlines.from_openai(client, model)("Describe Paris as JSON.", dict, **GREEDY).startswith("{")
