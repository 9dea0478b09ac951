"""An answer's text as what it is made of: reasoning, texts, and calls of tools.

Reasoning, where it is told apart, comes before all else. Whoever can tell calls from text gives an `AnswerParser`. It
turns growing text into parts, and the shapes of the APIs that have content blocks or output items are made of those;
without one all of an answer is text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from specserve.outputs import Chunk, CompletionOutput, extended
from specserve.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Text:
    """More text. `scores` are the log-probabilities of its tokens, if they were asked for."""

    text: str
    scores: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call begins: `id` as it is told to the client, `name` of the tool."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments of the call that began last. All of them together are a JSON object as text."""

    text: str


Part: TypeAlias = Reasoning | Text | Call | Arguments


class AnswerParser(Protocol):
    """Tells what an answer is made of while it grows. It is used for one answer, and however the text is cut into
    pieces, the parts add up to the same."""

    def push(self, text: str) -> list[Part]:
        """What has become certain with this text; no part is empty."""

    def finish(self) -> list[Part]:
        """What was held back, when nothing more will come."""

    @property
    def called(self) -> bool | None:
        """Whether the last call that began is whole and fits its tool's parameters, once the answer has ended; None
        where none began."""


class PlainText:
    """The parser where no tools are: all is text, at once."""

    called = None

    def push(self, text: str) -> list[Part]:
        return [Text(text)] if text else []

    def finish(self) -> list[Part]:
        return []


def parts_of(parser: AnswerParser, answer: Chunk | CompletionOutput) -> list[Part]:
    """The parts of a chunk, or of a whole answer. Log-probabilities go with its first text; with an empty one if it has
    none. They are asked for only where there are no tools, so they cannot be those of a call; those of reasoning are
    left out."""
    before: list[Part] = [Reasoning(answer.reasoning)] if answer.reasoning else []
    parts = parser.push(answer.text)
    if answer.finish_reason is not None:
        parts += parser.finish()
    scores = answer.logprobs and answer.logprobs[max(answer.num_reasoning_tokens, 0) :]
    if not scores:
        return before + parts
    first = parts[0] if parts else Text("")
    assert isinstance(first, Text), "log-probabilities of an answer that calls tools"
    return [*before, Text(first.text, scores), *parts[1:]]


# --- parts added up ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TextItem:
    """Text that stands together; `index` counts the items before it."""

    index: int
    pieces: list[str] = field(default_factory=list)  # joined once: appending each to the text copies that every time
    scores: Sequence[TokenLogprobs] | None = None  # of its tokens, if they were asked for

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class ReasoningItem:
    """Reasoning that stands together."""

    index: int
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class CallItem:
    """One call; `arguments` is a JSON object as text when the call is whole."""

    index: int
    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


Item: TypeAlias = ReasoningItem | TextItem | CallItem


def begins(part: Part, last: Item | None) -> bool:
    """Whether an item begins with this part, `last` being the one before."""
    assert isinstance(last, CallItem) or not isinstance(part, Arguments), "arguments without a call"
    if isinstance(part, Reasoning):
        return not isinstance(last, ReasoningItem)
    return isinstance(part, Call) or (isinstance(part, Text) and not isinstance(last, TextItem))


def begun(part: Part, index: int) -> Item:
    """The item that begins with this part, which is still to be added."""
    assert not isinstance(part, Arguments)
    if isinstance(part, Call):
        return CallItem(index, part.id, part.name)
    return TextItem(index) if isinstance(part, Text) else ReasoningItem(index)


def add(item: Item, part: Part) -> None:
    """Let the item grow by this part."""
    if isinstance(part, Call):
        return
    item.pieces.append(part.text)
    if isinstance(part, Text) and part.scores:
        assert isinstance(item, TextItem)
        item.scores = extended(item.scores, part.scores)


def items_of(parts: Iterable[Part]) -> list[Item]:
    """The items that these parts add up to."""
    items: list[Item] = []
    for part in parts:
        if begins(part, items[-1] if items else None):
            items.append(begun(part, len(items)))
        add(items[-1], part)
    return items
