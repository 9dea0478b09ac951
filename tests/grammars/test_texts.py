"""Texts that JSON cannot write as they are, in const, enum, names, patterns and not: each backend takes the right ones
and no other, or refuses the schema with the keyword. Every schema goes the whole way, through the process that tries
it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from specserve.registry import GRAMMARS
from specserve.structured import suite
from specserve.structured.spec import Structured
from specserve.structured.trial import Trial
from specserve.testing import write_tiny_model

TEXTS = [
    "hello\0there",
    "\0",
    "a\x01b",
    "\x1f",
    "a\x0bb",
    "a\x7fb",
    "a\x80b",
    "\b\f\n\r\t",
    'say "a\\b/c"',
    '"',
    "\\",
    "a\u2028b",
    "\ufffe\uffff",
    "e\u0301",
    "😀\U0010ffff",
]
KINDS = ("const", "enum", "inside", "name", "not", "pattern", "name pattern")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module", params=GRAMMARS.names())
def trial(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Trial]:
    if GRAMMARS.missing(request.param) is not None:
        pytest.skip(f"{GRAMMARS.missing(request.param)} is not installed.")
    trial = Trial(tiny, 293, request.param, limit_s=60.0)
    yield trial
    trial.close()


def like(text: str) -> list[str]:
    """Texts that are nearly this one."""
    bare = "".join(letter for letter in text if letter.isprintable())
    near = {bare, text[:-1], text[1:], text + "x", text.replace("\0", "\\0"), text.partition("\0")[0], "x", ""}
    return sorted(near - {text})


def entry(kind: str, text: str) -> dict[str, Any]:
    """A schema about a text, with instances that fit and that do not."""
    written = "".join(f"\\u{ord(c):04x}" if ord(c) < 2**16 else c for c in text)
    closed = {"type": "object", "additionalProperties": False}
    schema: dict[str, Any] = {
        "const": {"const": text},
        "enum": {"enum": [text, "another"]},
        "inside": {"const": {"k": [text]}},
        "name": {**closed, "properties": {text: {"type": "null"}}, "required": [text]},
        "not": {"type": "string", "not": {"const": text}},
        "pattern": {"type": "string", "pattern": f"^{written}$"},
        "name pattern": {**closed, "patternProperties": {f"^{written}$": {"type": "null"}}, "minProperties": 1},
    }[kind]

    def instance(said: str) -> Any:
        return {"inside": {"k": [said]}}.get(kind, {said: None} if "name" in kind else said)

    fits = kind != "not"
    tests = [{"data": instance(text), "valid": fits}]
    tests += [{"data": instance(near), "valid": not fits} for near in like(text)]
    return {"schema": schema, "tests": tests}


def outcome(trial: Trial, given_: dict[str, Any]) -> suite.Group:
    (group,) = suite.check([given_], trial)
    return group


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_enforced_exactly_or_refused_with_the_keyword(trial: Trial, kind: str) -> None:
    for text in TEXTS:
        group = outcome(trial, entry(kind, text))
        assert group.outcome in (suite.PASSED, suite.REFUSED), (text, group)
        if group.outcome == suite.REFUSED and kind != "not":
            keyword = {"inside": "const", "name": "properties", "name pattern": "attern"}.get(kind, kind)
            assert keyword in str(group.reason) or "scalar" in str(group.reason), (text, group)


@pytest.mark.parametrize("kind", ["const", "enum", "name"])
def test_const_enum_and_names_are_enforced_by_all(trial: Trial, kind: str) -> None:
    for text in TEXTS:
        assert outcome(trial, entry(kind, text)).outcome == suite.PASSED, text


@pytest.fixture(scope="module")
def auto(tiny: Path) -> Iterator[Trial]:
    trial = Trial(tiny, 293, "llguidance", limit_s=60.0)
    yield trial
    trial.close()


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(st.sampled_from('\0\x01\x0b\n\x1f\x7f"\\/aé😀'), min_size=1, max_size=4), kind=st.sampled_from(KINDS)
)
@example(text="ab", kind="not")
def test_any_such_text(auto: Trial, text: str, kind: str) -> None:
    group = outcome(auto, entry(kind, text))
    assert group.outcome in (suite.PASSED, suite.REFUSED), group


SETS = {
    r'^[^"]$': 'ab\\\n"',
    r"^[^\\]$": 'ab"\n\\',
    r'^[^"\\]+$': 'ab\n"\\',
    r'^a[^"a]?$': '"a\\b',
    r"^[\x00-\x1f!]$": '!\n"\\a',
    r'^[^"\x7f-\uffff]$': 'a\n\\"é',
    r"^[]a]$|^[^]\"]$": 'a]b"\\',
    r'^(?:[^"\x00]|\n)$': 'a\n"\\',
    r"^[^\x00-\x1f]$": 'a"\\\n',
    r"^[\w\"-]$": 'a"-\\',
}


@pytest.mark.parametrize("pattern", SETS)
def test_a_set_holds_what_it_says(trial: Trial, auto: Trial, pattern: str) -> None:
    """Python's own `re` says what fits."""
    texts = [*SETS[pattern], *(f"a{letter}" for letter in SETS[pattern]), ""]
    tests = [{"data": text, "valid": re.search(pattern.replace("$", r"\Z"), text) is not None} for text in texts]
    asked = {"schema": {"type": "string", "pattern": pattern}, "tests": tests}
    assert outcome(auto, asked).outcome == suite.PASSED
    assert outcome(trial, asked).outcome != suite.WRONG_ACCEPT, "xgrammar writes no escapes for what a set holds"


def test_a_name_cannot_come_again_in_another_spelling(auto: Trial) -> None:
    r"""Texts with long escapes are enforced where they cannot be used to say "a" as "\u0061"."""
    open_ = {"type": "object", "properties": {"a": {"const": "\0"}}}
    said = auto.run(Structured.json(open_))
    assert str(said.refused).startswith("const: a control character")
    closed = {**open_, "additionalProperties": False}
    told = auto.run(Structured.json(closed), [r'{"a": "\u0000"}', r'{"\u0061": "\u0000"}', r'{"a": ""}', "{}"])
    assert told.accepted == [True, False, False, True]


@pytest.mark.parametrize("schema", ['{"const":"\\ud800"}', '{"enum":["a\\udfffb"]}', '{"pattern":"^\\ud800$"}'])
def test_half_of_a_surrogate_pair_is_no_text(trial: Trial, schema: str) -> None:
    """As JSON text, in which it is spelled with an escape, it comes as far as the backend."""
    refused = trial.run(Structured.json(schema)).refused
    assert refused is not None, json.loads(schema)


@pytest.mark.parametrize("name", ["topic", "url", "unknown", "int32", ""])
def test_a_format_that_the_standard_does_not_define_is_an_annotation(trial: Trial, name: str) -> None:
    for kind, fits, wrong in (("string", "any text", 5), ("integer", 5, "any text")):
        tests = [{"data": fits, "valid": True}, {"data": wrong, "valid": False}]
        assert outcome(trial, {"schema": {"type": kind, "format": name}, "tests": tests}).outcome == suite.PASSED


@pytest.mark.parametrize(
    ("name", "fits", "wrong"), [("uuid", "0b14e9a2-9d1b-4c4e-8f3a-0123456789ab", "0b14"), ("ipv6", "::1", "1")]
)
def test_a_format_that_it_defines_is_enforced_or_refused(trial: Trial, name: str, fits: str, wrong: str) -> None:
    tests = [{"data": fits, "valid": True}, {"data": wrong, "valid": False}]
    group = outcome(trial, {"schema": {"type": "string", "format": name}, "tests": tests})
    assert group.outcome == suite.PASSED or "format" in str(group.reason)
