"""Streams whose events have names and tell of items: content blocks, output items."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace

from specserve.outputs import Chunk, CompletionOutput, RequestOutput, extended
from specserve.server.wire.answer import (
    AnswerParser,
    Arguments,
    Call,
    Item,
    Part,
    PlainText,
    Reasoning,
    Text,
    add,
    begins,
    begun,
    parts_of,
)
from specserve.server.wire.json.pieces import LongText
from specserve.server.wire.openai.replies import Reply
from specserve.server.wire.openai.stream import Event, Stream

_NAME_FIRST = '{"type":"'


class ItemStream(Stream):
    """The events of one answer, of one prompt. Every event is an object that begins with its name as `type`."""

    def __init__(self, reply: Reply, output: RequestOutput, parser: AnswerParser | None = None) -> None:
        """`parser` tells calls from text; without one all is text."""
        assert len(output.outputs) == 1, "these APIs have one answer"
        super().__init__(reply, [output])
        self._output = output
        self._parser = parser or PlainText()
        self._items: list[Item] = []  # all but the last have ended

    def frame(self, event: str) -> bytes:
        """An event under its name, as it goes over the wire."""
        assert event.startswith(_NAME_FIRST), "an event without a name"
        name = event[len(_NAME_FIRST) : event.index('"', len(_NAME_FIRST))]
        return f"event: {name}\ndata: {event}\n\n".encode()

    def long_frame(self, event: LongText) -> Iterator[bytes]:
        yield f"event: {event.body['type']}\n".encode()
        yield from super().long_frame(event)

    def _chunk_events(self, index: int, chunk: Chunk) -> list[Event]:
        events: list[Event] = []
        scores = self._output.outputs[0].logprobs
        if chunk.num_reasoning_tokens < 0 and scores is not None:  # so many of the first tokens are text after all
            first = scores[: -chunk.num_reasoning_tokens]
            chunk = replace(chunk, logprobs=extended(first, chunk.logprobs) if chunk.logprobs else first)
        for part in parts_of(self._parser, chunk):
            events += self._part(part)
        if chunk.finish_reason is not None and self._items:
            events += self._close(self._items[-1], is_cut(chunk, self._parser))
        return events

    def _part(self, part: Part) -> list[Event]:
        events: list[Event] = []
        last = self._items[-1] if self._items else None
        if begins(part, last):
            events += [] if last is None else self._close(last, cut=False)
            self._items.append(begun(part, len(self._items)))
            events += self._open(self._items[-1])
        add(self._items[-1], part)
        return events if isinstance(part, Call) else [*events, self._grow(self._items[-1], part)]

    @abstractmethod
    def _open(self, item: Item) -> list[Event]:
        """The events an item begins with, still empty."""

    @abstractmethod
    def _grow(self, item: Item, part: Reasoning | Text | Arguments) -> Event:
        """The event that tells of new text or arguments, which the item has already."""

    @abstractmethod
    def _close(self, item: Item, cut: bool) -> list[Event]:
        """The events an item ends with; `cut`: it is not what it should have become."""


def is_cut(end: Chunk | CompletionOutput, parser: AnswerParser) -> bool:
    """Whether an answer that has ended is incomplete: at the limit of tokens, or with a call that cannot be made."""
    return end.finish_reason == "length" or parser.called is False
