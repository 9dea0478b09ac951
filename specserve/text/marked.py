"""Tells which fields of a conversation a chat template writes into the prompt: texts are put between marks, marks take
the place of numbers, and they are looked for in what comes out.

Marks prove it only where they change nothing else, so what was rendered with them is held against what was rendered
without. A template that looks into a text (its length, its beginning) is shown marks in fewer of them, and what no
marks can tell is tried: whether the prompt changes with it. Nothing of it is remembered: a template may read a field of
one message and not of the next, by its place, its value or what is beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from specserve.errors import InputError
from specserve.text.marks import STRUCTURE, Marks

Message: TypeAlias = Mapping[str, Any]
Render: TypeAlias = Callable[[Sequence[Message]], str]

BEGIN_OF_REASONING, END_OF_REASONING = "<think>", "</think>"
REASONING = "reasoning_content"
ARGUMENTS = "tool_calls.function.arguments"
_CALLS = "tool_calls"  # the one field of whose parts each has a name; of others the first name stands for all
# What is rendered for one conversation, in characters, takes at most half a second. The usual one is rendered once, and
# once more where it has fields that the template ignores.
_MOST_CHARACTERS = 2**24
_OF_A_FIELD = 64  # as many characters cost what a field costs, written or not


@dataclass(frozen=True, slots=True)
class Field:
    """A field of one message, as `name` says, or a part of it; `is_key`: of its arguments, a name."""

    message: int
    name: str
    value: Any
    is_key: bool = False


def left_out(render: Render, messages: Sequence[Message], text: str, answers: Collection[int]) -> list[Field]:
    """The fields of `messages` that are not in `text`, which is `render(messages)`, or not whole. Roles are not looked
    at, nor is what is empty. The messages at the places `answers` may begin with reasoning, a field of its own.

    Raises InputError where a template looks into so many of them that it would have to be asked too often.
    """
    return _Search(render, messages, text, answers).left_out()


class _Search:
    """In one conversation, whose fields are known by their places among all."""

    def __init__(self, render: Render, messages: Sequence[Message], text: str, answers: Collection[int]) -> None:
        self._render, self._messages, self._text, self._answers = render, messages, text, answers
        self._fields: list[Field] = []
        self._copies(lambda place, field: field.value)
        self._left = _MOST_CHARACTERS
        self._cost = len(text) + _OF_A_FIELD * len(self._fields)

    def left_out(self) -> list[Field]:
        of_one_name = sorted(range(len(self._fields)), key=lambda place: self._fields[place].name)
        lost = list(self._without_marks(of_one_name))
        doubtful = [place for place, is_lost in lost if not is_lost]
        found = {*(place for place, is_lost in lost if is_lost), *self._unchanging(doubtful)}
        return [self._fields[place] for place in sorted(found)]

    def _copies(self, put: Put) -> list[Message]:
        copier = _Copier(self._answers, put)
        copies = [copier.copy(i, message) for i, message in enumerate(self._messages)]
        self._fields = copier.fields
        return copies

    def _rendered(self, put: Put) -> str | None:
        """None where the template refuses it."""
        if self._left <= 0:
            raise InputError(
                "messages: this model's chat template looks into so many of their texts, numbers and booleans that "
                "what it leaves out cannot be told. Leave out fields that it does not need, or send fewer messages.",
                "messages",
            )
        self._left -= self._cost
        try:
            return self._render(self._copies(put))
        except InputError:
            return None

    # --- marks ---

    def _without_marks(self, places: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """Of these fields those that are not proven to be in the prompt, and whether it is proven that they are not."""
        if not places:
            return
        seen = self._seen(places)
        if seen is not None:
            yield from ((place, self._is_text(place)) for place in places if place not in seen)
        elif len(places) > 1:
            half = len(places) // 2
            yield from self._without_marks(places[:half])
            yield from self._without_marks(places[half:])
        else:
            yield places[0], self._is_text(places[0]) and not _is_in(self._fields[places[0]].value, self._text)

    def _is_text(self, place: int) -> bool:
        return isinstance(self._fields[place].value, str)

    def _seen(self, places: Collection[int]) -> Collection[int] | None:
        """Those whose marks are in the prompt, when these fields have marks; None where marks change the prompt."""
        chosen, marks = set(places), Marks()

        def put(place: int, field: Field) -> Any:
            return (
                _with_marks(field, marks.mark(2 * place), marks.mark(2 * place + 1)) if place in chosen else field.value
            )

        if (rendered := self._rendered(put)) is None:
            return None
        (first, *pieces), numbers = marks.split(rendered)
        stood = ["" if self._is_text(number // 2) else str(self._fields[number // 2].value) for number in numbers]
        if first + "".join(a + b for a, b in zip(stood, pieces, strict=True)) != self._text:
            return None
        both = set(numbers)
        return [p for p in chosen if 2 * p in both and (2 * p + 1 in both or not self._is_text(p))]

    # --- trials ---

    def _unchanging(self, places: Sequence[int]) -> Iterator[int]:
        """Of these fields those whose change changes nothing. Where none does all are changed at once."""
        if not places:
            return
        chosen = set(places)
        changed = self._rendered(lambda place, field: _other(field.value) if place in chosen else field.value)
        if changed == self._text:
            yield from places
        elif len(places) > 1:
            half = len(places) // 2
            yield from self._unchanging(places[:half])
            yield from self._unchanging(places[half:])


def _is_in(value: str, text: str) -> bool:
    return value in text or json.dumps(value, ensure_ascii=False)[1:-1] in text


def _with_marks(field: Field, first: str, second: str) -> Any:
    if isinstance(field.value, str):  # names are marked at their ends, so that they keep their order
        return f"{field.value}{first}{second}" if field.is_key else f"{first}{field.value}{second}"
    return int(first) if _is_number(field.value) else field.value


def _other(value: Any) -> Any:
    """Another value of the same kind; of a text the last character is another."""
    if isinstance(value, str):
        return value[:-1] + ("y" if value.endswith("x") else "x")
    if _is_number(value):
        return value + 1
    return not value if isinstance(value, bool) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# --- copies -----------------------------------------------------------------------------------------------------------

Put: TypeAlias = Callable[[int, Field], Any]  # what stands in a copy for a field, the first of which has the place 0


class _Copier:
    """Makes copies of messages, and lists their `fields`."""

    def __init__(self, answers: Collection[int], put: Put) -> None:
        self._answers, self._put = answers, put
        self.fields: list[Field] = []

    def copy(self, message: int, value: Message) -> Message:
        copied: Message = self._copy(message, "", value)
        return copied

    def _copy(self, message: int, name: str, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(message, name, value)
        if isinstance(value, Mapping):
            return {self._key(message, name, key): self._entry(message, name, key, v) for key, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._copy(message, name, entry) for entry in value]
        if value is None or name == ARGUMENTS:  # what is in arguments stands beside a name that is a field
            return value
        return self._field(Field(message, name, value))

    def _entry(self, message: int, name: str, key: Any, value: Any) -> Any:
        if name == ARGUMENTS:
            return self._copy(message, name, value)
        if key in STRUCTURE:
            return value
        within = f"{name}.{key}" if name.startswith(_CALLS) else name or key
        return self._copy(message, within, value)

    def _key(self, message: int, name: str, key: Any) -> Any:
        """Names of arguments are the client's own."""
        return self._field(Field(message, name, key, is_key=True)) if name == ARGUMENTS else key

    def _text(self, message: int, name: str, text: str) -> str:
        """Reasoning inside of an answer is a field of its own, as many templates take it out."""
        if name != "content" or END_OF_REASONING not in text or message not in self._answers:
            return self._core(message, name, text)
        thought, end, answer = text.rpartition(END_OF_REASONING)
        before, begin, thought = thought.rpartition(BEGIN_OF_REASONING)
        if not (before + thought + answer).strip():
            return self._core(message, REASONING, text)
        before, thought = (self._core(message, REASONING, part) for part in (before, thought))
        return f"{before}{begin}{thought}{end}{self._core(message, name, answer)}"

    def _core(self, message: int, name: str, text: str) -> str:
        """Blanks around a text are no part of the field: templates trim."""
        core = text.strip()
        if not core:
            return text
        at = text.index(core)
        return f"{text[:at]}{self._field(Field(message, name, core))}{text[at + len(core) :]}"

    def _field(self, field: Field) -> Any:
        self.fields.append(field)
        return self._put(len(self.fields) - 1, field)


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
