"""Server-sent events out of bytes that arrive in any pieces."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """The data lines of one event, joined by line feeds, and the event's name."""

    data: str
    event: str = "message"


class EventParser:
    """Takes the body of a `text/event-stream` piece by piece; a piece may end anywhere, inside a character too.

    By the HTML standard (section 9.2.6, interpreting an event stream): comments and unknown fields are skipped, and an
    event that is not ended by an empty line is none. `id` and `retry` are skipped too: they serve to connect again,
    and an answer that was cut off cannot be taken up where it ended.
    """

    def __init__(self) -> None:
        self._line: list[bytes] = []  # pieces of the line that has not ended
        self._data: list[str] = []
        self._event = ""
        self._after_return = False  # the last piece ended in CR, so a LF now belongs to it
        self._at_start = True

    def feed(self, piece: bytes) -> list[ServerSentEvent]:
        """The events that end in this piece."""
        if not piece:
            return []
        if self._after_return:
            piece = piece.removeprefix(b"\n")
        self._after_return = piece.endswith(b"\r")
        first, *others = _LINE_END.split(piece)
        self._line.append(first)
        events = []
        for beginning in others:
            event = self._end_line()
            self._line = [beginning]
            if event is not None:
                events.append(event)
        return events

    def _end_line(self) -> ServerSentEvent | None:
        line = b"".join(self._line)
        if self._at_start:
            line = line.removeprefix(_BYTE_ORDER_MARK)
            self._at_start = False
        if not line:
            return self._end_event()
        name, _, value = line.decode("utf-8", "replace").partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
        elif name == "event":
            self._event = value.removeprefix(" ")
        return None

    def _end_event(self) -> ServerSentEvent | None:
        data, name = self._data, self._event
        self._data, self._event = [], ""
        return ServerSentEvent("\n".join(data), name or "message") if data else None
