"""Reads an answer that is calls of tools and nothing else, as its grammar lets nothing else through: what a call is
need not be found out, so its arguments are told while they come.

An answer that is cut off ends in the midst of its arguments, as OpenAI's do.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from specserve.server.wire.answer import Arguments, Call, Part
from specserve.text.tool_tags import CallStyle


class EnforcedCalls:
    """The AnswerParser (answer.py) of one completion. `new_id` makes the id of a call. The style's arguments are JSON;
    those in tags are ToolCalling's to read."""

    def __init__(self, style: CallStyle, new_id: Callable[[], str]) -> None:
        assert not style.has_tags, "arguments in tags are no JSON"
        self._end = style.after + style.around[1]
        self._head = re.compile(f"{re.escape(style.before)}(?P<name>.+?){re.escape(style.between)}")
        self._new_id = new_id
        self._has_called = False
        self._rest = ""  # of what stands before arguments: the names of calls, and what is between calls
        self._scan: _Scan | None = None  # of the arguments that have begun

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        text, at = self._rest + text, 0
        while at < len(text):
            if self._scan is None:
                head = self._head.search(text, at)
                if head is None:
                    break
                parts.append(Call(self._new_id(), head["name"]))
                at, self._scan, self._has_called = head.end(), _Scan(), True
                continue
            end = self._scan.end(text, at)
            parts.append(Arguments(text[at:end]))
            at = end
            self._scan = None if self._scan.is_whole else self._scan
        self._rest = text[at:]
        return parts

    def finish(self) -> list[Part]:
        """Nothing was held back but what belongs to no call, and a call whose name is not whole is none."""
        return []

    @property
    def called(self) -> bool:
        """What is whole fits: the grammar has seen to it. More than the end of a call begins another one."""
        return self._has_called and self._scan is None and self._end.startswith(self._rest)


class _Scan:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self.is_whole = False
        self._depth = 0
        self._in_string = self._is_escaped = False

    def end(self, text: str, begin: int) -> int:
        """Where in text[begin:], which comes next, the object ends; the text's end if it goes on."""
        for at in range(begin, len(text)):
            self._take(text[at])
            if self._depth == 0:
                self.is_whole = True
                return at + 1
        return len(text)

    def _take(self, character: str) -> None:
        if self._in_string:
            self._in_string = self._is_escaped or character != '"'
            self._is_escaped = character == "\\" and not self._is_escaped
        elif character == '"':
            self._in_string = True
        else:
            self._depth += (character in "{[") - (character in "}]")
