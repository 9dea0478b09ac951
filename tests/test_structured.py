"""What a caller may ask for, and what it becomes: equal constraints are equal, and what is none says so."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from specserve.errors import InputError
from specserve.structured.spec import Structured
from specserve.types import SamplingParams


class Person(BaseModel):
    name: str
    age: int


@dataclass
class Place:
    name: str


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        (Person, Person.model_json_schema()),
        (list[Person], {**json.loads('{"items":{"$ref":"#/$defs/Person"},"type":"array"}')}),
        (Literal["a", "b"], {"enum": ["a", "b"], "type": "string"}),
        ({"type": "integer"}, {"type": "integer"}),
        (True, True),
    ],
)
def test_types_and_schemas_become_json_schemas(value: Any, schema: Any) -> None:
    params = SamplingParams(structured=value)
    assert params.structured is not None
    assert params.structured.kind == "json_schema"
    found = json.loads(params.structured.text)
    assert found == schema or {name: found[name] for name in schema} == schema


def test_equal_constraints_are_equal() -> None:
    assert Structured.of(Person) == Structured.json(Person.model_json_schema())
    assert Structured.of({"a": 1}) == Structured.json('{"a":1}')
    assert hash(Structured.regex("a")) == hash(Structured("regex", "a"))
    assert Structured.of(Structured.regex("a")) == Structured.regex("a")
    assert Structured.of(Place).kind == "json_schema"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Structured.regex(""),
        lambda: Structured.choice([]),
        lambda: Structured.choice("abc"),
        lambda: Structured.choice(["a", ""]),
        lambda: Structured.choice(["a", "\ud800"]),
        lambda: Structured.regex("\udfff"),
        lambda: Structured.json("{"),
        lambda: Structured.json({"a": {1, 2}}),
        lambda: Structured.json({"a": float("nan")}),
        lambda: Structured.json(object()),
        lambda: Structured("rexeg", "a"),
        lambda: Structured.regex("a" * 2**20 + "a"),
        lambda: SamplingParams(structured=3),
        lambda: SamplingParams(structured=Person, ignore_eos=True),
    ],
)
def test_what_is_no_constraint_says_so(make: Any) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert caught.value.param in ("structured", "ignore_eos")


def test_a_near_miss_is_named() -> None:
    with pytest.raises(InputError, match="regex"):
        Structured("rexeg", "a")  # type: ignore[arg-type]


def test_a_grammar_has_a_name_or_a_file(tmp_path: Path) -> None:
    assert Structured.named("uuid").kind == "regex"
    assert "\nstart: query\n" in Structured.named("sql").text
    (tmp_path / "two.lines.lark").write_text("start: A\nA: /é/\n", "utf-8")
    assert Structured.file(str(tmp_path / "two.lines.lark")) == Structured.grammar("start: A\nA: /é/\n")
    (tmp_path / "bytes.ebnf").write_bytes(b"\xff")
    for name, said in {"bytes.ebnf": "cannot be read", "none.regex": "cannot be read", "a.txt": "must end in"}.items():
        with pytest.raises(InputError, match=said):
            Structured.file(tmp_path / name)
