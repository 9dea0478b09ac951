"""Server-sent events: every rule of the format by example, and any text in any pieces against a reading of the
whole."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from specserve.sse import EventParser, ServerSentEvent


def parsed(*pieces: bytes) -> list[ServerSentEvent]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def data(*pieces: bytes) -> list[str]:
    return [event.data for event in parsed(*pieces)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"data: a\n\n", ["a"]),
        (b"data: a\r\n\r\ndata: b\r\rdata: c\n\r\n", ["a", "b", "c"]),  # each kind of line end, mixed too
        (b"data: a\ndata: b\n\n", ["a\nb"]),
        (b"data: a\r\ndata: b\r\n\r\n", ["a\nb"]),  # CR LF is one end, also where a piece ends between them
        (b"data:a\n\ndata:  b\n\n", ["a", " b"]),  # one space is not data, a second is
        (b"data\n\n", [""]),  # a field without a colon is empty
        (b"data:\ndata:\n\n", ["\n"]),
        (b": ping\n\n:\n\ndata: a\n: inside\ndata: b\n\n", ["a\nb"]),
        (b"id: 7\nretry: 10\nnews: x\ndata: a\n\n", ["a"]),
        (b"Data: a\n\n data: b\n\n", []),  # names are exact
        (b"data: a\n", []),  # not ended
        (b"data: a", []),
        (b"\n\n\n", []),
        (b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n", ["a"]),  # a byte order mark is skipped once
        (b"data: a:b: c\n\n", ["a:b: c"]),
        (b"data: \xff\xe2\x82\n\n", ["\ufffd\ufffd"]),
        ("data: a\u2028b\x0bc\x85\n\n".encode(), ["a\u2028b\x0bc\x85"]),  # no line ends here
    ],
)
def test_rules(text: bytes, expected: list[str]) -> None:
    assert data(text) == expected
    assert data(*(text[i : i + 1] for i in range(len(text)))) == expected


def test_events_have_names_that_end_with_them() -> None:
    found = parsed(b"event: stop\ndata: 1\n\ndata: 2\n\nevent: lost\n\ndata: 3\n\nevent:\ndata: 4\n\n")
    assert [event.event for event in found] == ["stop", "message", "message", "message"]


def test_an_event_comes_with_the_piece_that_ends_it() -> None:
    parser = EventParser()
    assert parser.feed(b"data: a\r") == []
    assert parser.feed(b"\n\r") == [ServerSentEvent("a")]  # an empty line has ended, whatever follows the CR
    assert parser.feed(b"") == []
    assert parser.feed(b"\ndata: b\n\n") == [ServerSentEvent("b")]
    assert parser.feed(b"\n") == []


def test_many_small_pieces_of_a_long_line_are_joined_once() -> None:
    """A parser that joined at each piece would copy 10^10 bytes here, and the suite's limit would end it."""
    pieces = [b"x"] * 1_000_000
    assert len(data(b"data:", *pieces, b"\n\n")[0]) == 1_000_000


def reference(text: bytes) -> list[tuple[str, str]]:
    """The standard's grammar, on the whole text at once."""
    decoded = text.removeprefix(b"\xef\xbb\xbf").decode()
    blocks = re.split("\n\n", re.sub("\n{3,}", "\n\n", re.sub("\r\n|\r", "\n", decoded).lstrip("\n")))
    found = []
    for block in blocks[:-1]:
        fields = [[*line.split(":", 1), ""][:2] for line in block.split("\n")]
        fields = [[name, value[1:] if value[:1] == " " else value] for name, value in fields]
        lines = [value for name, value in fields if name == "data"]
        names = [value for name, value in fields if name == "event"]
        if lines:
            found.append(("\n".join(lines), (names[-1] if names else "") or "message"))
    return found


LINE = st.one_of(
    st.tuples(st.sampled_from(["data: ", "data:", "event: ", ": ", "id: ", "x"]), st.text("ab: é€😀", max_size=6)).map(
        "".join
    ),
    st.sampled_from(["", "", "data", "event"]),
)
TEXT = st.lists(st.tuples(LINE, st.sampled_from(["\n", "\r\n", "\r"])), max_size=24).map(
    lambda lines: "".join(line + end for line, end in lines).encode()
)


@given(TEXT, st.booleans(), st.lists(st.integers(0, 400), max_size=12))
def test_any_pieces_give_the_events_of_the_whole(text: bytes, marked: bool, cuts: list[int]) -> None:
    text = b"\xef\xbb\xbf" * marked + text
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    found = parsed(*(text[a:b] for a, b in pairwise(places)))
    assert [(event.data, event.event) for event in found] == reference(text)
