"""outlines with a remote model, as a client of OpenAI and of a vLLM server: plain text, and a clear refusal of what is
not served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import openai
import outlines
import pytest
from outlines.exceptions import BadRequestError
from outlines.inputs import Chat
from pydantic import BaseModel

QUESTION = "Count from one to twenty in words."
GREEDY: Any = {"temperature": 0, "max_tokens": 30}
MAKERS: Any = [outlines.from_openai, outlines.from_vllm]


class City(BaseModel):
    name: str
    population: int


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


@pytest.mark.parametrize(
    ("make", "output_type", "field"),
    [
        (outlines.from_openai, City, "response_format"),
        (outlines.from_openai, dict, "response_format"),
        (outlines.from_vllm, City, "structured_outputs"),
        (outlines.from_vllm, Literal["yes", "no"], "structured_outputs"),
        (outlines.from_vllm, int, "structured_outputs"),
    ],
)
def test_structure_is_refused_clearly(
    client: openai.OpenAI, model: str, make: Callable[..., Any], output_type: Any, field: str
) -> None:
    """Never an answer without the structure that was asked for."""
    with pytest.raises(BadRequestError) as raised:
        make(client, model)("Name a city.", output_type, **GREEDY)
    assert raised.value.status_code == 400
    cause = raised.value.original_exception
    assert isinstance(cause, openai.BadRequestError)
    assert (cause.param, cause.type) == (field, "invalid_request_error")
    assert "not supported" in cause.message
