"""A body is read as json.loads reads it, or refused with a sentence: never a crash, never a number that is none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from specserve.errors import InputError
from specserve.server.wire.json_text import _BRACKET, MAX_DEPTH, json_object

SCALARS = (
    st.none() | st.booleans() | st.integers(1 - 10**20, 10**20 - 1) | st.floats(-1e300, 1e300) | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), st.booleans())
def test_reads_what_json_dumps_writes(fields: dict[str, Any], escaped: bool) -> None:
    assert json_object(json.dumps(fields, ensure_ascii=escaped).encode()) == fields


def test_half_a_surrogate_pair_is_for_the_fields_to_judge() -> None:
    assert json_object(b'{"a": "\\ud800"}') == {"a": "\ud800"}


@given(st.binary(max_size=40) | st.text('{}[]",:\\0123456789eE+-.naNIfity ', max_size=40).map(str.encode))
def test_any_bytes_are_an_object_or_refused(body: bytes) -> None:
    try:
        value = json_object(body)
    except InputError as error:
        message = str(error)
    else:
        message = "."
        assert json.loads(body) == value
    assert message.endswith(".")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b'{"model": "x"', "not valid JSON"),
        (b"{'model': 1}", "not valid JSON"),
        (b"null", "must be a JSON object"),
        (b"[1]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"1e999", "must be a JSON object"),
        (b'{"a": "\xff"}', "not valid UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "not valid UTF-8"),  # half of a surrogate pair, encoded
        (b"\xef\xbb\xbf{}", "byte order mark"),
        ('{"a": 1}'.encode("utf-16"), "not valid UTF-8"),
        (b"[" * 100_000, "nested"),
        (b'{"a":' * 100_000, "nested"),
        (b"[" * 100_000 + b"]" * 100_000, "nested"),
    ],
)
def test_refuses(body: bytes, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        json_object(body)
    assert caught.value.param is None


@pytest.mark.parametrize("number", ["1" * 5000, "-" + "9" * 21, "1e999", "-1e999", "NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize(("template", "path"), [("%s", "n"), ("[1, [%s]]", "n"), ('{"deep": [%s]}', "n.deep")])
def test_a_number_that_is_none_is_named(number: str, template: str, path: str) -> None:
    with pytest.raises(InputError, match=rf"^{path} ") as caught:
        json_object(f'{{"fine": 1, "n": {template % number}}}'.encode())
    assert caught.value.param == "n"
    assert len(str(caught.value)) < 100


def test_the_limits_themselves_are_taken() -> None:
    lists = MAX_DEPTH - 1
    assert json_object(b'{"a": ' + b"[" * lists + b"]" * lists + b"}")
    with pytest.raises(InputError, match="nested"):
        json_object(b'{"a": ' + b"[" * (lists + 1) + b"]" * (lists + 1) + b"}")
    assert json_object(b'{"a": 18446744073709551615, "b": -99999999999999999999}') == {"a": 2**64 - 1, "b": 1 - 10**20}


def test_brackets_in_text_are_no_nesting() -> None:
    text = '[{"\\' * 1000
    assert json_object(json.dumps({text: text}).encode()) == {text: text}


@pytest.mark.parametrize("tail", ["", "\\"])
def test_hostile_quotes_are_read_once(tail: str) -> None:
    """A string that never closes is one piece. Were it looked at anew from each quote, a body of a megabyte would take
    hours."""
    text = '"\\' * 1000 + tail
    assert [match.span() for match in _BRACKET.finditer(text)] == [(0, len(text))]
    with pytest.raises(InputError, match="not valid JSON"):
        json_object(b'{"a": ' + text.encode())
