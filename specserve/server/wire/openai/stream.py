"""A response as a sequence of events: what follows `data: ` in each, as JSON text.

Rules: a chat choice begins with an assistant's empty text; finish_reason is null until a choice's last chunk, which has
no text; one chunk may carry several tokens. At the end comes usage, if asked for, with no choices, then [DONE]. After
an error event nothing comes, not even [DONE].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias

from specserve.outputs import Chunk, RequestOutput
from specserve.server.wire.answer import Arguments, Part, PlainText, Reasoning, Text, parts_of
from specserve.server.wire.errors import WireError
from specserve.server.wire.json.pieces import LongText, json_text
from specserve.server.wire.openai.explained import explained_step
from specserve.server.wire.openai.logprobs import CompletionLogprobs, chat_logprobs
from specserve.server.wire.openai.replies import EchoedPrompt, Reply, finish_reason, raise_failure

DONE = "[DONE]"

Event: TypeAlias = Any  # the JSON of one event: text, or a LongText


class Stream(ABC):
    """The events of one call. `outputs` are its prompts' outputs, which a Collector fills while the chunks come;
    `media` is the type of what goes on the wire."""

    media: ClassVar[str] = "text/event-stream; charset=utf-8"

    def __init__(self, reply: Reply, outputs: Sequence[RequestOutput]) -> None:
        self._reply = reply
        self._outputs = outputs
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self.failure: WireError | None = None  # after it, no more events; the connection is closed

    def frame(self, event: str) -> bytes:
        """What goes on the wire for one event."""
        return f"data: {event}\n\n".encode()

    def frames(self, event: Event) -> Iterator[bytes]:
        """As `frame`, in pieces where the event is long."""
        if isinstance(event, LongText):
            yield from self.long_frame(event)
        else:
            yield self.frame(event)

    def long_frame(self, event: LongText) -> Iterator[bytes]:
        """What goes on the wire for an event that is long."""
        yield b"data: "
        yield from event.pieces()
        yield b"\n\n"

    def ping(self) -> bytes:
        """What goes on the wire while there is nothing to say: a comment."""
        return b": ping\n\n"

    @property
    def failed(self) -> bool:
        return self.failure is not None

    @property
    def finished(self) -> bool:
        """Whether every choice has had its last chunk: time for `end`."""
        return len(self._ended) == sum(len(output.outputs) for output in self._outputs)

    def push(self, chunk: Chunk, prompt: int = 0) -> list[Event]:
        """The events of one chunk of a completion of the prompt with this index. One that did not end well is an error
        event and the end of the stream."""
        return list(self.events(chunk, prompt))

    def events(self, chunk: Chunk, prompt: int = 0) -> Iterator[Event]:
        """As `push`, each event made when it is wanted; all of them must be before the next chunk."""
        assert not self.failed, "push after an error event"
        index = sum(len(output.outputs) for output in self._outputs[:prompt]) + chunk.index
        assert index not in self._ended, "push after a choice's last chunk"
        try:
            raise_failure([chunk])
        except WireError as error:
            yield from self.fail(error)
            return
        if index not in self._begun:
            yield from self._begin(index, self._outputs[prompt])
            self._begun.add(index)
        yield from self._chunk_events(index, chunk)
        if chunk.finish_reason is not None:
            self._ended.add(index)

    @abstractmethod
    def end(self, now: float) -> list[Event]:
        """The events after the last chunk; `now` is time.perf_counter()."""

    @abstractmethod
    def fail(self, error: WireError) -> list[Event]:
        """The events that tell of an error, and nothing after them."""

    @abstractmethod
    def _begin(self, index: int, output: RequestOutput) -> Iterable[Event]:
        """The events a choice begins with."""

    @abstractmethod
    def _chunk_events(self, index: int, chunk: Chunk) -> list[Event]:
        """The events of one chunk of a choice that has begun."""


class ChoiceStream(Stream):
    """The streams of chat completions and completions: each event has its choice in `choices`."""

    kind: ClassVar[str]

    def end(self, now: float) -> list[str]:
        """Usage if it was asked for, and the end mark; `now` is time.perf_counter()."""
        assert self.finished and not self.failed, "end before the end"
        if not self._reply.include_usage:
            return [DONE]
        return [self._event([], **self._reply.totals(self._outputs, now)), DONE]

    def fail(self, error: WireError) -> list[str]:
        """The error event, and nothing after it."""
        self.failure = error
        return [json_text(error.body)]

    def _chunk_events(self, index: int, chunk: Chunk) -> list[str]:
        choices = self._choices(index, chunk)
        if chunk.explained is not None:
            choices = choices or [self._choice(index, self._nothing)]
            choices[0]["explained"] = explained_step(chunk, self._reply.vocabulary.token_bytes)
        events = [self._event([choice]) for choice in choices]
        if chunk.finish_reason is not None:
            events.append(self._event([self._ending(index, chunk)]))
        return events

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        unknown = {"usage": None} if self._reply.include_usage else {}  # OpenAI: null until the last chunk
        return json_text({**self._reply.head(self.kind), "choices": choices, **unknown, **more})

    def _choice(self, index: int, content: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, **content, "logprobs": None, "finish_reason": None}

    def _choices(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        """The choice with a chunk's content, once for each event that this takes; none where it has no content."""
        has_content = chunk.text or chunk.logprobs or (self._reply.return_token_ids and chunk.token_ids)
        return [self._tokens(index, chunk)] if has_content else []

    def _ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(token_ids)} if self._reply.return_token_ids else {}

    def _ending(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """A choice's last chunk, which has no text: that came before."""
        reasons = {"finish_reason": chunk.finish_reason, "stop_reason": chunk.stop_reason}
        scores = {} if chunk.beam is None else dict(zip(("cumulative_logprob", "score"), chunk.beam, strict=True))
        return {**self._choice(index, self._nothing), **reasons, **scores}

    @property
    @abstractmethod
    def _nothing(self) -> dict[str, Any]:
        """What stands in a choice that has no text."""

    @abstractmethod
    def _tokens(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """A choice with new text, and log-probabilities and ids if they were asked for."""


class ChatStream(ChoiceStream):
    """`chat.completion.chunk`; the first event has the prompt's ids, if ids were asked for. Calls of tools come as
    OpenAI sends them: the first delta of an index has its id, type and name, a later one the arguments."""

    kind = "chat.completion.chunk"

    def __init__(self, reply: Reply, output: RequestOutput) -> None:
        super().__init__(reply, [output])
        self._parsers = [reply.tool_parser() for _ in output.outputs] if reply.tool_parser else []
        self._num_calls = [0] * len(output.outputs)
        # Made before there is a token, while there is time: once there is one, it is waited for.
        self._opening = self._beginning(0, output, reply.return_token_ids)

    @property
    def _nothing(self) -> dict[str, Any]:
        return {"delta": {}}

    def _begin(self, index: int, output: RequestOutput) -> list[str]:
        if self._begun:
            return [self._beginning(index, output, with_ids=False)]
        return [self._beginning(index, output, self._reply.return_token_ids) if index else self._opening]

    def _beginning(self, index: int, output: RequestOutput, with_ids: bool) -> str:
        ids = {"prompt_token_ids": output.prompt_token_ids} if with_ids else {}
        return self._event([self._choice(index, {"delta": {"role": "assistant", "content": ""}})], **ids)

    def _choices(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        if not (self._parsers or chunk.reasoning):
            return super()._choices(index, chunk)
        parser = self._parsers[index] if self._parsers else PlainText()
        deltas = [self._delta(index, part) for part in parts_of(parser, replace(chunk, logprobs=None))]
        if chunk.logprobs or (self._reply.return_token_ids and chunk.token_ids):
            deltas = deltas or [{}]
            return [self._scored(index, deltas[0], chunk), *(self._choice(index, {"delta": d}) for d in deltas[1:])]
        return [self._choice(index, {"delta": delta}) for delta in deltas]

    def _delta(self, index: int, part: Part) -> dict[str, Any]:
        if isinstance(part, Text):
            return {"content": part.text}
        if isinstance(part, Reasoning):
            return {"reasoning_content": part.text}
        if isinstance(part, Arguments):
            return {"tool_calls": [{"index": self._num_calls[index] - 1, "function": {"arguments": part.text}}]}
        self._num_calls[index] += 1
        function = {"name": part.name, "arguments": ""}
        call = {"index": self._num_calls[index] - 1, "id": part.id, "type": "function", "function": function}
        return {"tool_calls": [call]}

    def _tokens(self, index: int, chunk: Chunk) -> dict[str, Any]:
        return self._scored(index, {"content": chunk.text}, chunk)

    def _scored(self, index: int, delta: dict[str, Any], chunk: Chunk) -> dict[str, Any]:
        """A choice with this delta, and what was asked for of the chunk's tokens."""
        choice = {**self._choice(index, {"delta": delta}), **self._ids(chunk.token_ids)}
        if chunk.logprobs is not None:
            choice["logprobs"] = chat_logprobs(chunk.logprobs, self._reply.vocabulary)
        return choice

    def _ending(self, index: int, chunk: Chunk) -> dict[str, Any]:
        reason = finish_reason(chunk, self._parsers[index].called if self._parsers else None)
        return {**super()._ending(index, chunk), "finish_reason": reason}


class CompletionStream(ChoiceStream):
    """`text_completion`, streamed. An echoed prompt is an event of its own before the completion's text; one with
    log-probabilities is several, the first of which has all of its text."""

    kind = "text_completion"

    def __init__(self, reply: Reply, outputs: Sequence[RequestOutput]) -> None:
        super().__init__(reply, outputs)
        self._scores: dict[int, CompletionLogprobs] = {}

    @property
    def _nothing(self) -> dict[str, Any]:
        return {"text": ""}

    def _begin(self, index: int, output: RequestOutput) -> Iterator[str]:
        echoed = EchoedPrompt(self._reply, output)
        self._scores[index] = echoed.scores
        ids = {"prompt_token_ids": output.prompt_token_ids} if self._reply.return_token_ids else {}
        for text, logprobs in echoed.pieces():
            if ids or self._reply.echo:
                yield self._event([{**self._choice(index, {"text": text}), "logprobs": logprobs, **ids}])
            ids = {}

    def _chunk_events(self, index: int, chunk: Chunk) -> list[str]:
        return super()._chunk_events(index, self._reply.to_send(chunk))

    def _tokens(self, index: int, chunk: Chunk) -> dict[str, Any]:
        choice = {**self._choice(index, {"text": chunk.text}), **self._ids(chunk.token_ids)}
        if chunk.logprobs is not None:
            choice["logprobs"] = self._scores[index].part(chunk.token_ids, chunk.logprobs)
        return choice
