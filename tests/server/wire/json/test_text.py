"""A body is read as json.loads reads it, or refused with a sentence: never a crash, never a number that is none."""

from __future__ import annotations

import json
import tracemalloc
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

import pytest
from hypothesis import given, strategies as st

from specserve.errors import InputError
from specserve.server.wire.json import reader as json_reader, text as json_text
from specserve.server.wire.json.reader import MAX_DEPTH
from specserve.server.wire.json.text import LONG, json_object

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


@pytest.mark.parametrize("depth", [MAX_DEPTH, 900, 10_000])
def test_what_is_whole_but_too_deep_is_refused(depth: int) -> None:
    with pytest.raises(InputError, match="nested"):
        json_object(b'{"a": ' + b"[" * depth + b"]" * depth + b"}")


@pytest.mark.parametrize("tail", ["", "\\"])
def test_hostile_quotes_are_read_once(tail: str) -> None:
    """Were a string that never closes looked at anew from each quote, a body of a megabyte would take hours."""
    text = '"\\' * 500_000 + tail
    with pytest.raises(InputError, match="not valid JSON"):
        json_object(b'{"a": ' + text.encode())


# --- long texts -------------------------------------------------------------------------------------------------------

FILLER = " " * LONG  # whatever it stands in is read by the other reader


def both(body: str | bytes) -> list[Any]:
    """What the two readers make of a text: a value, or the beginning of an error."""
    text = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
    found: list[Any] = []
    for padded in (text, text + FILLER.encode()):
        try:
            found.append(json_object(padded))
        except InputError as error:
            found.append((str(error).split(" at byte")[0], error.param))
    return found


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), st.booleans(), st.sampled_from([None, 1]))
def test_long_texts_are_read_as_short_ones(fields: dict[str, Any], escaped: bool, indent: int | None) -> None:
    short, long = both(json.dumps(fields, ensure_ascii=escaped, indent=indent))
    assert short == long == fields


@given(
    st.binary(max_size=40) | st.text('{}[]",:\\0123456789eE+-.naNIfityud8c ', max_size=40).map(lambda t: f'{{"a":{t}}}')
)
def test_long_texts_are_refused_as_short_ones(body: Any) -> None:
    short, long = both(body)
    assert isinstance(short, dict) == isinstance(long, dict)
    assert not isinstance(short, dict) or short == long


SPELLINGS = [
    *["1" * 21, "1e999", "NaN", "-Infinity", "[1, [1e999]]", '{"b": NaN}', "-0", "-", "01", "1.", "1e", "[1,]", "[,1]"],
    *["[1 2]", '{"a" 1}', '{"a":1,}', "{1: 2}", "tru", "[1, 2,3 , 4]", "[1, 02, 3]", "[1, 2.5, 3e2, -4]", '"\\x"'],
    *[
        '"\\ud83d\\ude00"',
        '"\\ud83d"',
        '"\\ude00\\ud83d"',
        '"\\u12"',
        '"a\nb"',
        '"abc',
        '"abc\\',
        '"\u00e9\\n\U0001f600"',
    ],
    *["[" * 64, "[" * 63 + "]" * 63, "[" * 64 + "]" * 64, '{"b": 1, "b": 2}', "1 2", "", '"\\\\ud83d\\ude00"'],
    *["1" * 5000, "-" + "1" * 5000, "1." + "1" * 300, "[12345678901234567890, 1]", "[123456789012345678901, 1]"],
]


@pytest.mark.parametrize("value", SPELLINGS)
def test_long_texts_say_of_a_value_what_short_ones_say(value: str) -> None:
    short, long = both(f'{{"a": {value}}}')
    assert short == long


@given(st.text(st.sampled_from('a\u00e9\U0001f600\\"\n\ud83d'), max_size=12), st.booleans(), st.integers(0, 3))
def test_texts_of_any_length_are_whole(unit: str, escaped: bool, before: int) -> None:
    """However escapes, pairs of surrogates and bytes of characters fall on the ends of what is read at once."""
    text = "x" * before + unit * 7000
    body = json.dumps({"a": text}, ensure_ascii=escaped).encode("utf-8", "surrogatepass") + FILLER.encode()
    if not escaped and "\ud83d" in text:
        with pytest.raises(InputError, match="UTF-8"):
            json_object(body)
        return
    assert json_object(body) == json.loads(json.dumps({"a": text}))


@pytest.mark.parametrize(
    "value",
    [
        "[" + "{}," * 1_500_000 + "{}]",
        "[" + '"",' * 1_500_000 + '""]',
        "{" + '"a":0,' * 300_000 + '"a":0}',
        "[" + "0.5," * 300_000 + "1]",
        "[" + "1," * 2_200_000 + "1]",
    ],
    ids=["objects", "texts", "names", "numbers", "ids"],
)
def test_what_would_fill_the_memory_is_refused_before_it_does(value: str) -> None:
    body = b'{"user": %b}' % value.encode()
    with pytest.raises(InputError, match="user is too much") as caught:
        json_object(body)
    assert caught.value.param == "user"


def test_the_memory_is_not_filled_before() -> None:
    """Fifteen megabytes of objects took 385."""
    body = b'{"user": [' + b"{}," * 1_500_000 + b"{}]}"
    tracemalloc.start()
    try:
        with pytest.raises(InputError):
            json_object(body)
        assert tracemalloc.get_traced_memory()[1] < 60_000_000
    finally:
        tracemalloc.stop()


def test_a_text_of_few_values_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation of 100 KB takes json.loads a tenth of a millisecond."""
    text = "It is, as they say, so. " * 1000 + "It is so. " * (LONG // 20)
    monkeypatch.setattr(json_text, "Reader", None)
    assert json_object(json.dumps({"a": text}).encode()) == {"a": text}
    with pytest.raises(TypeError, match="not callable"):
        json_object(json.dumps({"a": [[]] * 2**16}).encode())


def test_no_step_of_a_long_text_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one of them runs no other thread does: what each is given counts."""
    given_to: list[int] = []

    def measured(text: str, begin: int) -> tuple[str, int]:
        given_to.append(len(text))
        return scanstring(text, begin)  # type: ignore[no-any-return]

    def never(*arguments: Any, **more: Any) -> Any:
        raise AssertionError("json.loads reads all in one step")

    monkeypatch.setattr(json_reader, "scanstring", measured)
    monkeypatch.setattr(json, "loads", never)
    text = "ab\n" * 2_000_000
    assert json_object(('{"a": "' + "ab\\n" * 2_000_000 + '"}').encode()) == {"a": text}
    assert max(given_to) < 2**19
