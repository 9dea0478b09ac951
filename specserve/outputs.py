"""Turns the engine's events into what a caller sees: text, ids, log-probabilities, why it ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import msgspec

from specserve.engine.packed import Packed
from specserve.engine.request import Request
from specserve.errors import FailureCode, SpecserveError
from specserve.explained import Explained
from specserve.text.detokenizer import Split, detokenizers
from specserve.text.tokenizer import Tokenizer
from specserve.types import Event, FinishReason, LogprobBlock, SamplingParams, SequenceStats, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Chunk:
    """New text of one completion. `finish_reason` and `stats` come with the last chunk, whose text may be empty. Where
    reasoning is told apart, `text` is the answer's."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # with finish_reason "error"; so is the next
    error_code: FailureCode | None = None
    stats: SequenceStats | None = None
    explained: Explained | None = None  # the step that it came from, if asked for
    pieces: list[str] = field(default_factory=list)  # of all text, what each token made visible; the end's is no piece
    reasoning: str = ""
    num_reasoning_tokens: int = 0  # first ones of token_ids that are reasoning or mark it; fewer than 0: so many before
    beam: tuple[float, float] | None = None  # of a beam's answer: its cumulative log-probability, and its score


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n completions. `logprobs` has an entry per token id if they were asked for. `reasoning`, of a
    chat with a model that reasons, is no part of `text`; `num_reasoning_tokens` of the tokens are reasoning or mark
    it."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # with finish_reason "error"; so is the next
    error_code: FailureCode | None = None
    stats: SequenceStats = field(default_factory=SequenceStats)
    reasoning: str = ""
    num_reasoning_tokens: int = 0
    beam: tuple[float, float] | None = field(default=None, repr=False)

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over the output tokens, natural log; None unless logprobs were asked for, or beam search found it."""
        if self.beam is not None:
            return self.beam[0]
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)

    @property
    def score(self) -> float | None:
        """Of an answer of beam search, by which answers are in order: cumulative_logprob / length ** length_penalty."""
        return None if self.beam is None else self.beam[1]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a verify step emitted on average, the bonus counted: 1.0 without speculation."""
        return self.stats.mean_acceptance_length


@dataclass(slots=True)
class RequestOutput:
    """A request and its completions so far; `finished` when all have ended. `split` makes what tells a completion's
    reasoning apart; None where all is text."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    embedding: bytes | None = field(default=None, repr=False)  # of a request that embeds, as Event has it
    split: Split | None = field(default=None, repr=False)

    @classmethod
    def of(cls, request: Request, prompt: str | None, split: Split | None = None) -> RequestOutput:
        """Of a request that has not begun; `prompt` is its text."""
        completions = [CompletionOutput(index) for index in range(request.params.n)]
        return cls(request.id, prompt, request.prompt_ids, completions, split=split)

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


class Collector:
    """Follows one request from event to event. `abort(request_id, index)` is called when a stop string ends a
    completion, which the engine cannot see, as it knows no text but that of beams. `lazily`: log-probabilities stay
    packed until they are read, in order; else they are lists."""

    def __init__(
        self,
        output: RequestOutput,
        params: SamplingParams,
        tokenizer: Tokenizer,
        abort: Callable[[str, int], object],
        lazily: bool = False,
    ) -> None:
        self.output, self._abort, self._lazily = output, abort, lazily
        self.chunks: deque[Chunk] = deque()  # not taken yet
        self._shows_stop = params.include_stop_str_in_output
        self._texts = detokenizers(len(output.outputs), tokenizer, params, output.prompt_token_ids, output.split)

    @property
    def finished(self) -> bool:
        return self.output.finished

    def push(self, event: Event | SpecserveError) -> None:
        """Add an event to the output and the chunk it makes visible to `chunks`. Nothing follows a completion's end.
        Raises the error that ends a request in the place of events."""
        if isinstance(event, SpecserveError):
            raise event
        completion = self.output.outputs[event.index]
        if completion.finish_reason is not None:
            return
        if event.prompt_logprobs is not None:
            self.output.prompt_logprobs = self._scores(event.prompt_logprobs)
        self.output.embedding = event.embedding or self.output.embedding
        chunk = self._chunk(event)
        _append(completion, chunk)
        self.chunks.append(chunk)
        if chunk.finish_reason is not None and event.finish_reason is None:
            self._abort(event.request_id, event.index)

    def _chunk(self, event: Event) -> Chunk:
        text, tokens = self._texts[event.index], event.tokens
        # A token that ended the completion is an id and no text, as in vLLM; a stop string that ended a beam is text.
        hides_end = event.finish_reason == "stop" and not (self._shows_stop or isinstance(event.stop_reason, str))
        step = text.push(tokens[:-1] if hides_end else tokens, final=event.finish_reason is not None)
        reason, stop, logprobs = event.finish_reason, event.stop_reason, self._scores(event.logprobs)
        if step.stop is not None:
            reason, stop, tokens = "stop", step.stop, tokens[: step.num_kept]
            logprobs = logprobs and logprobs[: step.num_kept]
        rest = event.error, event.error_code, event.stats if reason else None, event.explained, step.pieces, *step.apart
        return Chunk(event.request_id, event.index, step.text, tokens, logprobs, reason, stop, *rest, event.beam)

    def _scores(self, blocks: list[LogprobBlock] | None) -> Any:
        return None if blocks is None else Packed(blocks) if self._lazily else list(Packed(blocks))


class Gathered:
    """A listener to one request that passes events on in lots, so that who reads them is not woken for every token: at
    the end of a completion, and when 64 tokens have come. A lot has one event for each completion, without what is
    explained. Not for requests with stop strings, whose end only the reader sees."""

    TOKENS = 64  # a reader is done with them in less than a millisecond

    def __init__(self, tell: Callable[[Event | SpecserveError], None]) -> None:
        self._tell = tell
        self._events: dict[int, list[Event]] = {}
        self._num_tokens = 0

    def __call__(self, event: Event | SpecserveError) -> None:
        if isinstance(event, SpecserveError):
            self._tell(event)
            return
        self._events.setdefault(event.index, []).append(event)
        self._num_tokens += len(event.tokens)
        if event.finish_reason is not None or self._num_tokens >= self.TOKENS:
            for events in self._events.values():
                self._tell(_as_one(events))
            self._events, self._num_tokens = {}, 0


def _as_one(events: Sequence[Event]) -> Event:
    """What these events of a completion say, in their order."""
    if len(events) == 1:
        return events[0]
    first, last = events[0], events[-1]
    return msgspec.structs.replace(
        last,
        tokens=list(chain.from_iterable(each.tokens for each in events)),
        logprobs=_joined([each.logprobs for each in events]),
        prompt_logprobs=_joined([each.prompt_logprobs for each in events]),
        embedding=first.embedding or last.embedding,
        explained=None,
    )


def _joined(blocks: Sequence[list[LogprobBlock] | None]) -> list[LogprobBlock] | None:
    present = [each for each in blocks if each is not None]
    return list(chain.from_iterable(present)) if present else None


def extended(scores: Any, more: Any) -> Any:
    """Log-probabilities and those after them, as one list that is the caller's own; it grows in place."""
    if scores is None:
        return more[:]
    scores += more
    return scores


def _append(completion: CompletionOutput, chunk: Chunk) -> None:
    text, completion.text = completion.text, ""  # Python lets a text grow in place that has one name, a local one
    text += chunk.text
    completion.text = text
    completion.reasoning += chunk.reasoning
    completion.num_reasoning_tokens += chunk.num_reasoning_tokens
    completion.token_ids += chunk.token_ids
    if chunk.logprobs is not None:
        completion.logprobs = extended(completion.logprobs, chunk.logprobs)
    completion.finish_reason, completion.stop_reason = chunk.finish_reason, chunk.stop_reason
    completion.error, completion.error_code = chunk.error, chunk.error_code
    completion.beam = chunk.beam
    if chunk.stats is not None:
        completion.stats = chunk.stats
