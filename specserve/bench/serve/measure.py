"""One streamed request: sent, read and timed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

from specserve.errors import ServerError
from specserve.sse import EventParser

REJECTED = (429, 503)
MAX_MESSAGE = 500  # characters of an error that are kept


@dataclass(slots=True, kw_only=True)
class Record:
    """What became of one request. Times are seconds on the event loop's clock, counted from `due`, when it should have
    been sent: a client that waits for its turn waits too."""

    number: int
    category: str
    due: float
    started: float
    adapter: str | None = None  # that was asked, in turn with others; NO_ADAPTER: the model
    ended: float = 0.0  # the last text or finish_reason, or the failure
    status: int | None = None  # HTTP; None if no answer came
    error: str | None = None  # the kind of failure, None for a whole answer
    message: str | None = None
    chunk_times: list[float] = field(default_factory=list)  # of chunks that have text
    chunk_tokens: list[int | None] = field(default_factory=list)  # None: the chunk did not say
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    speculation: dict[str, Any] | None = None  # `metrics.speculative_decoding`

    @property
    def completed(self) -> bool:
        return self.error is None

    @property
    def rejected(self) -> bool:
        return self.status in REJECTED

    @property
    def lag(self) -> float:
        """How late it was sent: the load generator's own delay."""
        return self.started - self.due

    @property
    def e2e(self) -> float:
        return self.ended - self.due

    @property
    def ttft(self) -> float | None:
        """To the first text; of an answer without any, to its end."""
        if not self.completed:
            return None
        return (self.chunk_times[0] if self.chunk_times else self.ended) - self.due

    @property
    def output_tokens(self) -> int | None:
        return self._counted("completion_tokens")

    @property
    def prompt_tokens(self) -> int | None:
        return self._counted("prompt_tokens")

    @property
    def cached_tokens(self) -> int | None:
        """Of the prompt's, those whose KV was cached."""
        details = (self.usage or {}).get("prompt_tokens_details")
        count = details.get("cached_tokens") if isinstance(details, Mapping) else None
        return count if isinstance(count, int) else None

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None without such a token or without its count."""
        tokens = self.output_tokens
        if not self.completed or not self.chunk_times or tokens is None or tokens < 2:
            return None
        return (self.ended - self.chunk_times[0]) / (tokens - 1)

    @property
    def chunk_gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.chunk_times)]

    @property
    def token_gaps(self) -> list[float] | None:
        """Each gap, shared out evenly to the tokens of the chunk that ended it; None if a chunk's tokens are unknown.
        Where there are as many chunks as tokens, each has one."""
        counts = self.chunk_tokens
        if None in counts:
            counts = [1] * len(counts) if len(counts) == self.output_tokens else []
        if len(counts) != len(self.chunk_times):
            return None
        return [gap / n for gap, n in zip(self.chunk_gaps, counts[1:], strict=False) if n for _ in range(n)]

    def _counted(self, name: str) -> int | None:
        count = (self.usage or {}).get(name)
        return count if isinstance(count, int) else None


async def measure(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], record: Record, timeout: float
) -> Record:
    """Send a request that asks for a stream, and fill its record. Nothing that a server does is an exception here. An
    answer is whole with [DONE], or when its body ends after a finish_reason."""
    loop = asyncio.get_running_loop()
    events = _Events(record)
    record.started = loop.time()
    try:
        async with session.post(url, json=body, timeout=aiohttp.ClientTimeout(total=timeout)) as response:
            record.status = response.status
            await _read(response, events)
    except TimeoutError:
        events.lost("timeout", f"There was no end within {timeout:g} seconds.")
    except (aiohttp.ClientError, OSError) as error:
        kind = "no connection" if record.status is None else "connection lost"
        events.lost(kind, str(error) or type(error).__name__)
    if record.error is not None:
        record.ended = loop.time()
    return record


async def _read(response: aiohttp.ClientResponse, events: _Events) -> None:
    """To the end of the body, so that the connection can be used again."""
    if response.status != 200:
        told = ServerError.of_answer(response.status, await response.text(errors="replace"))
        events.fail(f"HTTP {response.status}", str(told))
        return
    loop = asyncio.get_running_loop()
    parser = EventParser()
    async for piece in response.content.iter_any():
        now = loop.time()
        for event in parser.feed(piece):
            events.take(event.data, now)
    if events.record.finish_reason is None:
        events.lost("incomplete", "The stream ended without a finish_reason and without [DONE].")


class _Events:
    """The events of a stream, as they come, into a record. After a failure, and after [DONE], nothing counts."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._done = False
        self._held = 0  # tokens whose text has not come: part of a character, or of what may be a stop string

    def fail(self, kind: str, message: str) -> None:
        self._done = True
        self.record.error, self.record.message = kind, message[:MAX_MESSAGE]

    def lost(self, kind: str, message: str) -> None:
        """The connection is gone, which after the end does no harm."""
        if not self._done:
            self.fail(kind, message)

    def take(self, data: str, now: float) -> None:
        """One event's data, at that time."""
        if self._done:
            return
        if data == "[DONE]":
            self._done = True
            self.record.ended = self.record.ended or now
            return
        try:
            value = json.loads(data)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            self.fail("malformed stream", f"An event is no JSON object: {data}")
        elif value.get("error") is not None:
            self.fail("error in stream", str(ServerError.of_answer(200, data)))
        else:
            self._chunk(value, now)

    def _chunk(self, value: dict[str, Any], now: float) -> None:
        choices = value.get("choices")
        choices = [each for each in choices if isinstance(each, dict)] if isinstance(choices, list) else []
        self._text(choices, now)
        for choice in choices:
            if choice.get("finish_reason") is not None:
                self.record.finish_reason, self.record.ended = str(choice["finish_reason"]), now
        if isinstance(value.get("usage"), dict):
            self.record.usage = value["usage"]
        metrics = value.get("metrics")
        if isinstance(metrics, dict) and isinstance(metrics.get("speculative_decoding"), dict):
            self.record.speculation = metrics["speculative_decoding"]

    def _text(self, choices: list[dict[str, Any]], now: float) -> None:
        tokens = _num_tokens(choices)
        if any(map(_has_text, choices)):
            self.record.chunk_times.append(now)
            self.record.chunk_tokens.append(None if tokens is None else tokens + self._held)
            self.record.ended, self._held = now, 0
        else:
            self._held += tokens or 0


def _has_text(choice: dict[str, Any]) -> bool:
    """Whether a choice says anything: text, reasoning (under any of its names) or a tool call."""
    if choice.get("text"):
        return True
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(value for name, value in delta.items() if name != "role")


def _num_tokens(choices: list[dict[str, Any]]) -> int | None:
    """Tokens of a chunk by their ids, if it has them."""
    ids = [each for choice in choices if isinstance(each := choice.get("token_ids"), list)]
    return sum(map(len, ids)) if len(ids) == len(choices) else None
