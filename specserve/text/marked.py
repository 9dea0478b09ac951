"""Tells which texts of a conversation a chat template writes into the prompt: each is put between marks, and the marks
are looked for in what comes out.

Marks prove it only where they change nothing else, so what was rendered with them is held against what was rendered
without. A template that looks into a text (its length, its beginning) is shown marks around fewer of them, and what no
marks can tell is looked for as it is.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from specserve.errors import InputError

Message: TypeAlias = Mapping[str, Any]
Render: TypeAlias = Callable[[Sequence[Message]], str]

BEGIN_OF_REASONING, END_OF_REASONING = "<think>", "</think>"
REASONING = "reasoning_content"
ARGUMENTS = "tool_calls.function.arguments"
_CALLS = "tool_calls"  # the one field of whose parts each has a name; of others the first name stands for all
_STRUCTURE = ("role", "type")  # templates compare these
_NONCE_DIGITS, _INDEX_DIGITS = 39, 8  # 39 digits are 128 bits
_MOST_RENDERED = 32  # times for fields that are no texts


@dataclass(frozen=True, slots=True)
class Field:
    """A field of one message, as `name` says, or a part of it. `is_text`: it is one, and not a number or a boolean."""

    message: int
    name: str
    value: Any
    is_text: bool = True


def left_out(render: Render, messages: Sequence[Message], text: str, answers: Collection[int]) -> list[Field]:
    """The fields of `messages` that are not in `text`, which is `render(messages)`, or not whole. Roles are not looked
    at, nor is what is empty. The messages at the places `answers` may begin with reasoning, a field of its own."""
    found = _without_marks(render, messages, text, _Marks(None, answers))
    if found is None:
        fields = _Marks(None, answers).of(messages)
        names = dict.fromkeys(field.name for field in fields if field.is_text)
        found = []
        for name in names:
            some = [field for field in fields if field.name == name and field.is_text]
            found += _left_out_of(render, messages, text, _Marks(name, answers), some)
        found += [field for field in fields if not field.is_text]
    return [field for field in found if field.is_text] + _unchanging(render, messages, text, found)


def _left_out_of(
    render: Render, messages: Sequence[Message], text: str, marks: _Marks, fields: Sequence[Field]
) -> list[Field]:
    """Those of the fields, which are all of one name."""
    found = _without_marks(render, messages, text, marks)
    if found is None:
        return [field for field in fields if not _is_in(field.value, text)]
    return [field for field in found if field.is_text and field.name == marks.only]


def _is_in(value: str, text: str) -> bool:
    return value in text or json.dumps(value, ensure_ascii=False)[1:-1] in text


def _without_marks(render: Render, messages: Sequence[Message], text: str, marks: _Marks) -> list[Field] | None:
    """Texts that have marks which are not in the prompt, or none, and all that is no text; None where marks change the
    prompt."""
    try:
        fields = marks.of(messages)
        first, *parts = render(marks.messages).split(marks.nonce)
        seen = {int(part[:_INDEX_DIGITS]) for part in parts}
    except (InputError, ValueError):  # refused, or marks were cut
        return None
    if first + "".join(part[_INDEX_DIGITS:] for part in parts) != text:
        return None
    return [field for i, field in enumerate(fields) if not (2 * i in seen and 2 * i + 1 in seen)]


class _Marks:
    """Copies of messages in which the texts of one name, None: of any, stand between marks. They are digits, which
    trimming, changes of case and JSON leave as they are."""

    def __init__(self, only: str | None, answers: Collection[int]) -> None:
        self.nonce = f"{secrets.randbelow(10**_NONCE_DIGITS):0{_NONCE_DIGITS}}"
        self.messages: list[Message] = []
        self.only, self._answers = only, answers
        self._fields: list[Field] = []

    def of(self, messages: Sequence[Message]) -> list[Field]:
        """Their fields; field i is between the marks 2 i and 2 i + 1."""
        for i, message in enumerate(messages):
            self.messages.append(self._copy(i, "", message))
        return self._fields

    def _copy(self, message: int, name: str, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(message, name, value)
        if isinstance(value, Mapping):
            return {self._key(message, name, key): self._entry(message, name, key, v) for key, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._copy(message, name, entry) for entry in value]
        if value is not None and name != ARGUMENTS:  # what is in arguments stands beside a name that has marks
            self._fields.append(Field(message, name, value, is_text=False))
        return value

    def _entry(self, message: int, name: str, key: Any, value: Any) -> Any:
        if name == ARGUMENTS:
            return self._copy(message, name, value)
        if key in _STRUCTURE:
            return value
        within = f"{name}.{key}" if name.startswith(_CALLS) else name or key
        return self._copy(message, within, value)

    def _key(self, message: int, name: str, key: Any) -> Any:
        """Names of arguments are the client's own. The mark is at the end, so that they keep their order."""
        if name != ARGUMENTS or not self._marks(name):
            return key
        return key + self._mark(Field(message, name, key), 0) + self._mark(None, 1)

    def _text(self, message: int, name: str, text: str) -> str:
        """Reasoning inside of an answer is a field of its own, as many templates take it out."""
        if name != "content" or END_OF_REASONING not in text or message not in self._answers:
            return self._between(message, name, text)
        thought, end, answer = text.rpartition(END_OF_REASONING)
        before, begin, thought = thought.rpartition(BEGIN_OF_REASONING)
        if not (before + thought + answer).strip():
            return self._between(message, REASONING, text)
        before, thought = (self._between(message, REASONING, part) for part in (before, thought))
        return f"{before}{begin}{thought}{end}{self._between(message, name, answer)}"

    def _between(self, message: int, name: str, text: str) -> str:
        """Blanks around a text stay outside: templates trim."""
        core = text.strip()
        if not core:
            return text
        field = Field(message, name, core)
        if not self._marks(name):
            self._fields.append(field)
            return text
        at = text.index(core)
        return f"{text[:at]}{self._mark(field, 0)}{core}{self._mark(None, 1)}{text[at + len(core) :]}"

    def _marks(self, name: str) -> bool:
        return self.only is None or name == self.only

    def _mark(self, field: Field | None, side: int) -> str:
        if field is not None:
            self._fields.append(field)
        return f"{self.nonce}{2 * (len(self._fields) - 1) + side:0{_INDEX_DIGITS}}"


# --- numbers and booleans ---------------------------------------------------------------------------------------------


def _unchanging(render: Render, messages: Sequence[Message], text: str, fields: Iterable[Field]) -> list[Field]:
    """Those of the fields that are no texts whose change changes nothing; all of a name are changed together."""
    by_name = {field.name: field for field in fields if not field.is_text}
    return [
        field
        for i, (name, field) in enumerate(by_name.items())
        if i >= _MOST_RENDERED or _is_same(render, [_changed(message, name.split(".")) for message in messages], text)
    ]


def _is_same(render: Render, messages: Sequence[Message], text: str) -> bool:
    try:
        return render(messages) == text
    except InputError:
        return False


def _changed(value: Any, path: Sequence[str]) -> Any:
    """A copy in which all that lies at the path, or below, and is no text, is another."""
    if isinstance(value, Mapping):
        return {key: _changed(v, path[1:]) if path[:1] in ([], [key]) else v for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(entry, path) for entry in value]
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else value


# --- roles ------------------------------------------------------------------------------------------------------------

ROLES = ("system", "user", "assistant", "tool")


def told_apart(render: Render) -> frozenset[str]:
    """The roles whose messages give other prompts than the same messages of other roles do."""
    prompts = {role: _prompt_of(render, role) for role in ROLES}
    mine = [prompt for prompt in prompts.values() if prompt is not None]
    return frozenset(role for role, prompt in prompts.items() if mine.count(prompt or "") < 2)


def _prompt_of(render: Render, role: str) -> str | None:
    """None where the template refuses it."""
    try:
        return render([{"role": "user", "content": "a"}, {"role": role, "content": "b"}])
    except InputError:
        return None
