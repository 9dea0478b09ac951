"""Calls whose grammar lets nothing else through, told while they come."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, strategies as st

from specserve.server.wire.answer import Arguments, Call, Part
from specserve.server.wire.tools.enforced import EnforcedCalls
from specserve.text.tool_tags import HERMES, LLAMA, MISTRAL_LIST, MISTRAL_NAMED, QWEN_TAGS, CallStyle

STYLES = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL_NAMED, "mistral list": MISTRAL_LIST}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(
        st.from_regex(r"[A-Za-z0-9_.:/-]{1,12}", fullmatch=True), st.dictionaries(st.text(max_size=5), JSON, max_size=3)
    ),
    min_size=1,
    max_size=3,
)


def written(style: CallStyle, calls: list[tuple[str, str]]) -> str:
    made = [f"{style.before}{name}{style.between}{arguments}{style.after}" for name, arguments in calls]
    return style.around[0] + (style.separator or "").join(made) + style.around[1]


def parser(style: CallStyle) -> EnforcedCalls:
    count = itertools.count()
    return EnforcedCalls(style, lambda: f"id{next(count)}")


def added_up(parts: list[Part]) -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = []
    for part in parts:
        if isinstance(part, Call):
            found.append((part.id, part.name, ""))
        else:
            assert isinstance(part, Arguments) and part.text
            found[-1] = (*found[-1][:2], found[-1][2] + part.text)
    return found


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
@given(calls=CALLS, ascii_only=st.booleans(), cuts=st.lists(st.integers(0, 400), max_size=12))
def test_however_it_is_cut(
    style: CallStyle, calls: list[tuple[str, object]], ascii_only: bool, cuts: list[int]
) -> None:
    said = [(name, json.dumps(arguments, ensure_ascii=ascii_only)) for name, arguments in calls]
    said = said if style.separator is not None else said[:1]
    text = written(style, said)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    reader = parser(style)
    parts = [part for a, b in itertools.pairwise(places) for part in reader.push(text[a:b])]
    assert added_up([*parts, *reader.finish()]) == [(f"id{i}", *call) for i, call in enumerate(said)]


def test_arguments_come_while_they_are_written() -> None:
    reader = parser(HERMES)
    assert reader.push('<tool_call>\n{"name": "add", "argu') == []
    assert reader.push('ments": {"a": "}') == [Call("id0", "add"), Arguments('{"a": "}')]
    assert reader.push('\\"') == [Arguments('\\"')]
    assert reader.push('"}}\n</tool') == [Arguments('"}')]
    assert reader.push('_call>\n<tool_call>\n{"name": "b", "arguments": {') == [Call("id1", "b"), Arguments("{")]
    assert reader.finish() == []


def test_one_that_is_cut_off_in_its_name_is_no_call() -> None:
    reader = parser(HERMES)
    assert reader.push('<tool_call>\n{"name": "ad') + reader.finish() == []


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_wherever_it_ends_only_a_last_call_that_is_whole_was_called(style: CallStyle) -> None:
    """The end of a whole call may be missing, but nothing of another one may have come."""
    said = [("add", '{"a": "}]"}'), ("b", "{}")][: 1 if style.separator is None else 2]
    text = written(style, said)
    places = [at for at in range(len(text) + 1) if _called(style, text[:at])]
    whole = [text.index(arguments) + len(arguments) for _, arguments in said]
    ends = [begin + len(style.after) for begin in whole]
    ends[-1] = len(text)
    expected = [at for begin, end in zip(whole, ends, strict=True) for at in range(begin, end + 1)]
    is_list = bool(style.around[1])  # what closes it is not what separates two
    assert places == expected or (is_list and set(expected) == set(places))


def _called(style: CallStyle, text: str) -> bool:
    reader = parser(style)
    assert reader.push(text) is not None
    assert reader.finish() == []
    return reader.called


def test_arguments_in_tags_are_none_of_it() -> None:
    with pytest.raises(AssertionError):
        parser(QWEN_TAGS)
