"""Greedy answers of the real model with numbers in them end by themselves: by a schema, in arguments of tools, in any
object."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field, TypeAdapter

from specserve import LLM, SamplingParams, Structured
from specserve.text.tool_tags import HERMES


class Closed(BaseModel):
    model_config = {"extra": "forbid"}


class City(Closed):
    name: Annotated[str, Field(max_length=40)]
    population: int


class Price(Closed):
    price: float
    amount: Decimal


class Place(Closed):
    latitude: float
    longitude: float
    height: int
    area: Annotated[float, Field(gt=0)]


Pair = Annotated[list[float], Field(min_length=2, max_length=2)]


class Matrix(Closed):
    rows: Annotated[list[Pair], Field(min_length=2, max_length=2)]


class Number(Closed):
    n: float


class Whole(Closed):
    n: int


class Cents(Closed):
    euros: Annotated[float, Field(multiple_of=0.01, ge=0)]


ASKED: list[tuple[str, Any]] = [
    ("What is the population of Paris? Answer as JSON.", City),
    ("The price of 3 apples as JSON.", Price),
    ("Describe Berlin in JSON.", Place),
    ("Write the identity matrix as JSON.", Matrix),
    ("How large is pi? JSON.", Number),
    ("What is 1/3? JSON.", Number),
    ("What is 2**64? JSON.", Whole),
    ("What is 11 * 101? JSON.", Whole),
    ("What does it cost? JSON.", Cents),
]
TOOLS: list[tuple[str, Any]] = [("Set the volume.", Whole), ("Set it to pi.", Number)]


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    with LLM(str(smollm2), kv_cache_gib=0.4) as made:
        yield made


def answer(llm: LLM, question: str, structured: Any) -> str:
    params = SamplingParams(structured=structured, max_tokens=256, temperature=0)
    output = llm.chat([{"role": "user", "content": question}], params)[0].outputs[0]
    assert output.finish_reason == "stop", output.text
    return output.text


@pytest.mark.parametrize(("question", "kind"), ASKED)
def test_answers_of_a_schema_end(llm: LLM, question: str, kind: type[BaseModel]) -> None:
    kind.model_validate_json(answer(llm, question, kind))


@pytest.mark.parametrize(("question", "kind"), TOOLS)
def test_arguments_of_tools_end(llm: LLM, question: str, kind: type[BaseModel]) -> None:
    tool = {"type": "function", "function": {"name": "set", "parameters": TypeAdapter(kind).json_schema()}}
    calls = HERMES.calls([tool], parallel=False)
    text = answer(llm, question, Structured.structural_tag({"type": "structural_tag", "format": calls}))
    kind.model_validate(json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))["arguments"])


def test_any_object_ends(llm: LLM) -> None:
    json.loads(answer(llm, "Give me a JSON object with the numbers pi and e.", Structured.json_object()))
