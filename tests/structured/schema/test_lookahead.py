"""Patterns without look-aheads: they match the same texts as those with them, which are judged by jsonschema-rs."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import example, given, strategies as st

from specserve.structured.base import Vocabulary
from specserve.structured.compiler import Compiler
from specserve.structured.schema.lookahead import replaced, without_lookaheads
from specserve.structured.spec import Structured

DECIMAL = r"^(?!^[-+.]*$)[+-]?0*"  # as pydantic begins them
REPLACED = [
    rf"{DECIMAL}\d*\.?\d*$",
    rf"{DECIMAL}\d*\.?\d{{0,2}}0*$",
    rf"{DECIMAL}(?:\d{{0,4}}|(?=[\d.]{{1,7}}0*$)\d{{0,4}}\.\d{{0,2}}0*$)",
    rf"{DECIMAL}(?:\d{{0,6}}|(?=[\d.]{{1,7}}0*$)\d*\.\d*0*$)",
    r"^(?!\s*$).+$",
    r"^(?!\s+$)a*",
    r"^(?=.*[a-z])(?=.*\d).{3,}$",
    r"^(?=.{2,5}$)[a1.]+$",
    r"^(?!-)[a-z0-9-]+$",
    r"^(?!ab$)[ab]*$",
    r"^(?!ab|b1)[ab1]*$",
    r"^(?!(?:a|ab|1)$)[ab1]*$",
    r"^(?!.*--)[-a]+$",
    r"^(?!.*[.-]{2})[-a.\n]+$",
    r"^(?!.*\.\.)(?!\.)[a.]+$",
    r"^(?!.*b)[\s\S]*$",
    r"^(?![\s\S]*b)[\s\S]*$",
    r"^(?![^a])[ab]*$",
    r"^(?=a|b)[ab1]+$",
]
KEPT = [
    r"^(?!.*\s)a$", r"^(?!.*a.*b)a*$", r"a(?=b)", r"^a(?=b)b", r"(?<=a)b", r"^(?!a(?!b))a", r"^(?=a)b|c",
    r"^(?=(?=a)a)a", r"^(?!\1)a", r"^(?!\bx)a", r"^(?!.)a", r"^(?!a|b.)a", r"^(?=a$|b)ab", r"^(?!.*a$)a*",
    r"^(?!a)?a",
]  # fmt: skip


def fits(pattern: str, text: str) -> bool:
    return bool(jsonschema_rs.is_valid({"pattern": pattern}, text))


TEXTS = st.text("ab1-+. \n0", max_size=9)


@pytest.mark.parametrize("pattern", REPLACED)
@given(text=TEXTS)
@example("")
@example("a\n")
@example("ab")
@example("1.0")
def test_they_match_the_same(pattern: str, text: str) -> None:
    patterns = replaced(pattern)
    assert patterns
    assert not any("(?!" in each or "(?=" in each for each in patterns)
    assert fits(pattern, text) == all(fits(each, text) for each in patterns)


WORDS = Vocabulary(
    [b"", *(bytes((byte,)) for byte in range(128))], (0,), 129, lambda text: [b + 1 for b in text.encode()]
)


@cache
def compiler() -> Compiler:
    return Compiler(lambda: WORDS, "llguidance")


@pytest.mark.parametrize("pattern", REPLACED)
@given(text=TEXTS)
@example("a1b")
@example("-1.00")
def test_a_grammar_takes_the_texts_that_match(pattern: str, text: str) -> None:
    state = compiler().compile(Structured.json({"type": "string", "pattern": pattern})).start()
    assert all(state.advance(token) for token in [*WORDS.encode(json.dumps(text)), 0]) == fits(pattern, text)


@pytest.mark.parametrize("pattern", [*KEPT, "^a+$", ""])
def test_others_are_left_as_they_are(pattern: str) -> None:
    assert replaced(pattern) == []
    schema = {"type": "string", "pattern": pattern}
    assert without_lookaheads(schema) is schema


def test_a_document_asks_for_all_of_them_where_it_asked_for_one() -> None:
    inner: dict[str, Any] = {"type": "string", "pattern": r"^(?!-)a*$", "maxLength": 3}
    made = without_lookaheads({"properties": {"a": inner, "b": {"pattern": "^(?=a)"}}})
    one, other = made["properties"]["a"]["allOf"]
    assert one["type"] == other["type"] == "string"
    assert (one["pattern"], other["pattern"]) == (r"^(?:|[^\-][\s\S]*)$", "^a*$")
    assert "pattern" not in made["properties"]["a"]
    assert made["properties"]["b"] == {"pattern": "^a"}
    assert inner["pattern"] == r"^(?!-)a*$"
