"""Tells the calls of tools in an answer from its text: the AnswerParser (answer.py) of requests with tools.

    calling = ToolCalling(format, tools, prompt)    # once for a request
    parser = calling.parser()                       # once for each completion
    parts = parser.push(text) + ... + parser.finish()

What comes out is a list of `Text`, `Call` and `Arguments`, and however the answer was cut into pieces, the parts add up
to the same. A call comes when it is whole: a `Call`, then its `Arguments`. Nothing of what may be a call comes before.
What looks like one and is none, because its JSON is broken or there is no such tool, is `Text`, as it was written.
Blanks before a call, and after the last, belong to no text. Reasoning is text, and a call inside of it is none.

What delimits a call, and what is inside, is read by transformers' own parser.
"""

from __future__ import annotations

import copy
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic_core import from_json

from specserve.errors import InputError, ModelError
from specserve.server.wire.answer import Arguments, Call, Part, Text
from specserve.server.wire.fields import well_formed
from specserve.server.wire.tools.arguments import whole_object
from specserve.structured.fits import fits
from specserve.text.tools import CallFormat
from specserve.types import SamplingParams

_CALLS = "tool_calls"  # the field of a response_template
_LONG_DELIMITER = 1024  # characters; what may be a longer one is looked at again when half as much has come again


class ToolCalling:
    """How the answers to one request are read. `tools` are the request's, `prompt` its rendered text: a template may
    have opened the model's reasoning already. Without `parallel` calls after the first are left out, as vLLM does.

    Raises InputError where transformers is too old for it, ModelError for a response_template that is broken.
    """

    def __init__(
        self,
        call_format: CallFormat,
        tools: Sequence[Mapping[str, Any]],
        prompt: str = "",
        *,
        parallel: bool = True,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self._format = call_format
        self._parse, load = _transformers()
        try:
            self.template: Any = load(dict(call_format.template))
        except ValueError as error:
            raise ModelError(f"tokenizer_config.json: response_template is broken: {error}") from error
        calls_are_json = self.template.fields[_CALLS].content == "json"
        self._typed_by = None if calls_are_json else list(tools)  # JSON says itself what is a number
        self._tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self.parallel = parallel
        self.new_id = new_id or ids_of_calls(call_format)
        self._begun = ToolCallParser(self, self._answer_begun_in(prompt))

    def parser(self) -> ToolCallParser:
        """For one completion."""
        return copy.copy(self._begun)

    def read(self, text: str) -> list[tuple[str, str]]:
        """Names and arguments, as JSON text, of the calls that `text` is; empty if it is none."""
        try:
            message = self._parse(text, self.template, prefix="", tools=self._typed_by)
            return [self._checked(function) for function in _functions(message.get(_CALLS, []))]
        except (ValueError, TypeError, KeyError, RecursionError):
            return []  # a model may write anything, and what is no call is text

    def fits(self, name: str, arguments: str) -> bool:
        """Whether the arguments fit the tool's parameters. What is in doubt fits: it is for the client to say."""
        return fits(whole_object(arguments), self._tools[name].get("parameters") or {}) is not False

    def is_cut(self, content: str) -> bool:
        """Whether the text after the beginning of a call, which nothing closes, is one that was cut off: JSON goes on,
        and calls in tags have an end."""
        if self._typed_by is not None:
            return self.template.fields[_CALLS].close_re is not None
        try:
            json.JSONDecoder().raw_decode(content.lstrip())
        except (ValueError, RecursionError):
            return not content.strip() or _begins_json(content)
        return False

    def begins_in(self, text: str) -> bool:
        """Whether the text ends in the midst of what begins a call."""
        found = self.template.fields[_CALLS].open_re.search(text, partial=True)
        return found is not None and found.partial and found.start() < len(text)

    def _checked(self, function: Any) -> tuple[str, str]:
        """Raises ValueError for what is no call of one of the tools."""
        if not isinstance(function, Mapping) or function.get("name") not in self._tools:
            raise ValueError("no such tool")
        arguments = function.get("arguments", function.get("parameters"))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, Mapping | None):
            raise ValueError("arguments are an object")
        text = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
        return function["name"], well_formed(text)

    def _answer_begun_in(self, prompt: str) -> str:
        """What the prompt holds of the answer already."""
        end = None
        for anchor in self.template.start_anchor_re.finditer(prompt):
            end = anchor.end()
        return "" if end is None else prompt[end:]


class ToolCallParser:
    """Follows one answer, which goes on from `begun`; see the module. However the answer is cut into pieces, and
    whatever it holds, each of its characters is looked at a few times."""

    def __init__(self, calling: ToolCalling, begun: str = "") -> None:
        self._calling = calling
        self._text = begun  # all of it
        self._num_sent = 0  # characters that were sent, or are left out
        self._blank = 0  # what is from there to here is blank
        self._at = 0  # where to look on
        self._enough = 0  # characters that there must be for another look to be worth it
        self._matches: dict[Any, Any] = {}  # by pattern, the first one at or after `_at` when it was searched
        self._open: Any = None  # the field that has begun
        self._start, self._inside = 0, 0  # where it began, and where its content does
        self._called = False
        self._last: tuple[str, str] | None = None  # the last call
        self._after = 0  # where it ended
        self._cut = False  # in the midst of a call
        self._advance(final=False)
        self._num_sent, self._called, self._last = len(begun), False, None

    def push(self, text: str) -> list[Part]:
        """What is certain now."""
        whole, self._text = self._text, ""  # Python lets a text grow in place that has one name, a local one
        whole += text
        self._text = whole
        return self._advance(final=False) if len(whole) >= self._enough else []

    def finish(self) -> list[Part]:
        """What was held back, once no more text will come."""
        parts = self._advance(final=True)
        if self._in_call:
            parts += self._unclosed_calls()
        rest = self._text[self._num_sent :]
        self._cut |= self._last is not None and self._calling.begins_in(self._text[self._after :])
        self._num_sent = len(self._text)
        return parts if not rest or (self._called and rest.isspace()) else [*parts, Text(rest)]

    @property
    def called(self) -> bool | None:
        if self._cut or self._last is None:
            return False if self._cut else None
        return self._calling.fits(*self._last)

    @property
    def _in_call(self) -> bool:
        return self._open is not None and self._open.name == _CALLS

    def _advance(self, final: bool) -> list[Part]:
        self._matches = {}
        parts: list[Part] = []
        while True:
            found, certain = self._scan(final)
            if found is None:
                self._at = certain
                pending = len(self._text) - certain
                self._enough = len(self._text) + (pending // 2 if pending > _LONG_DELIMITER else 0)
                return parts + self._visible(self._start if self._in_call else certain)
            field, match = found
            self._at = match.end()
            if self._open is None:
                self._open, self._start, self._inside = field, match.start(), match.end()
                continue
            if self._in_call:
                parts += self._calls(self._at)
            self._open = None

    def _visible(self, end: int) -> list[Part]:
        """The text before `end`, but for blanks: a call may come after them."""
        begin = max(self._num_sent, self._blank)
        self._blank = max(begin, end)
        new = self._text[begin:end].rstrip()
        if not new:
            return []
        text = self._text[self._num_sent : begin + len(new)]
        self._num_sent += len(text)
        return [Text(text)]

    def _calls(self, end: int) -> list[Part]:
        """What lies from the open field's beginning to `end`; if it is no call it stays to be told as text."""
        calls = self._calling.read(self._text[self._start : end])
        if not calls:
            return []
        parts = self._visible(self._start)
        self._num_sent = end
        for name, arguments in calls:
            if self._calling.parallel or not self._called:
                parts += [Call(self._calling.new_id(), name), Arguments(arguments)]
                self._last, self._after = (name, arguments), end
            self._called = True
        return parts

    def _unclosed_calls(self) -> list[Part]:
        """What the field that is open at the text's end holds; part of what would close it may have come."""
        end, close = len(self._text), self._open.close_re
        found = None if close is None else close.search(self._text, self._inside, partial=True)
        if found is not None and found.partial:
            end = found.start()
        self._cut = self._calling.is_cut(self._text[self._inside : end])
        parts = [] if self._cut else self._calls(end)
        if parts and self._open.close_literals is not None:
            self._num_sent = self._after = len(self._text)
        return parts

    def _scan(self, final: bool) -> tuple[tuple[Any, Any] | None, int]:
        """What opens or closes a field next, if that is certain, and where uncertainty begins."""
        best: tuple[Any, Any] | None = None
        certain = len(self._text)
        for field, pattern, grows in self._watched():
            match = self._search(pattern, final)
            if match is None or (self._open is not None and match.end() == self._start):
                continue  # a close that is nothing, where the field began
            at_end = match.end() == len(self._text)
            if match.partial or (not final and at_end and (grows or match.start() == match.end())):
                certain = min(certain, match.start())
            elif best is None or _place(match) < _place(best[1]):
                best = field, match
        return (best, certain) if best is None or best[1].start() < certain else (None, certain)

    def _search(self, pattern: Any, final: bool) -> Any:
        """The first match from `_at` on. One that lies further on is not searched for again from each place before."""
        match = self._matches.get(pattern)
        if pattern not in self._matches or (match is not None and match.start() < self._at):
            match = self._matches[pattern] = pattern.search(self._text, self._at, partial=not final)
        return match

    def _watched(self) -> Iterator[tuple[Any, Any, bool]]:
        """Fields, what may open or close them now, and whether more text could make that longer."""
        if self._open is None:
            for field in self._calling.template.fields.values():
                if field.open_re is not None:
                    yield field, field.open_re, field.open_literals is None or field.open_literal_can_extend
        elif (field := self._open).close_re is not None:
            yield field, field.close_re, field.close_literals is None or field.close_literal_can_extend


def _place(match: Any) -> tuple[int, int]:
    """The first is the least, of two that begin together the longer."""
    return match.start(), -match.end()


def _functions(value: Any) -> Iterator[Any]:
    """The calls in `tool_calls`, which formats put in lists or in objects with a `function`."""
    if isinstance(value, list):
        for entry in value:
            yield from _functions(entry)
    elif isinstance(value, Mapping) and "function" in value and "name" not in value:
        yield from _functions(value["function"])
    else:
        yield value


def _begins_json(text: str) -> bool:
    try:
        from_json(text, allow_partial=True)
    except ValueError:
        return False
    return True


def ids_of_calls(call_format: CallFormat) -> Callable[[], str]:
    """What makes the ids of calls."""
    return _short_id if call_format.short_ids else _id


def keeping_delimiters(call_format: CallFormat, params: SamplingParams) -> SamplingParams:
    """`params` with which the text keeps what delimits calls."""
    return replace(params, skip_special_tokens=False) if call_format.special else params


def _id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    return secrets.token_hex(5)[:9]


def _transformers() -> tuple[Callable[..., dict[str, Any]], Callable[..., Any]]:
    """Its parser, and what reads a response_template for it."""
    try:
        # Importing it takes a second, and few requests bring tools; torch stays out.
        from transformers.utils.chat_parsing import parse_response
        from transformers.utils.chat_parsing.response_templates import load_response_template
    except ImportError as error:
        raise InputError(
            "tools need transformers' parser of answers, in 5.23 and later. Upgrade it.", "tools"
        ) from error
    return parse_response, load_response_template
