"""Requests to a running server: what is asked, and what came back when."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import aiohttp

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_HEADERS = {"Content-Type": "application/json"}
_DONE = b"[DONE]"


@dataclass
class Reading:
    """A response as it came. Times are of time.perf_counter(). What it means is only looked at when it is asked for, so
    that reading costs little while others are measured.

    `events` are the data of a stream's events, each with the time it was whole; `body` is all of a response that is no
    stream. `left`: this side went away before the end. `broken`: how the connection ended before the response did.
    """

    begun: float
    status: int = 0
    events: list[tuple[float, bytes]] = field(default_factory=list)
    body: bytes = b""
    ended: float = 0.0
    left: bool = False
    broken: str | None = None
    _rest: bytes = b""

    def hear(self, piece: bytes, now: float) -> None:
        *whole, self._rest = (self._rest + piece).split(b"\n\n")
        self.events += [(now, event[6:]) for event in whole if event.startswith(b"data: ")]

    def end(self) -> None:
        """The stream has ended, as far as HTTP knows."""
        if self._rest.strip():
            self.broken = f"it ended in the middle of an event: {self._rest[:200]!r}"

    @property
    def num_heard(self) -> int:
        """Events with tokens so far."""
        return sum(b'"token_ids":[' in event for _, event in self.events)

    @cached_property
    def bodies(self) -> list[tuple[float, dict[str, Any]]]:
        """The events' JSON; the end mark left out. Of a whole response the one body. `broken` has what is no JSON."""
        texts = [(self.ended, self.body)] if self.body else [each for each in self.events if each[1] != _DONE]
        found: list[tuple[float, dict[str, Any]]] = []
        for now, text in texts:
            try:
                found.append((now, json.loads(text)))
            except ValueError:
                self.broken = f"it holds what is no JSON: {text[:200]!r}"
        return found

    @cached_property
    def said(self) -> list[tuple[float, list[int]]]:
        """When which tokens came; of requests with return_token_ids and one choice."""
        choices = [(now, choice) for now, body in self.bodies for choice in body.get("choices", ())]
        return [(now, choice["token_ids"]) for now, choice in choices if choice.get("token_ids")]

    @property
    def tokens(self) -> list[int]:
        return [token for _, ids in self.said for token in ids]

    @property
    def finish_reason(self) -> str | None:
        reasons = [choice.get("finish_reason") for _, body in self.bodies for choice in body.get("choices", ())]
        return next((str(reason) for reason in reasons if reason), None)

    @property
    def error(self) -> dict[str, Any] | None:
        """The error object of the body or of the last event."""
        found = self.bodies[-1][1].get("error") if self.bodies else None
        return found if isinstance(found, dict) else None

    @property
    def ended_well(self) -> bool:
        """Whether all of the response came: a stream up to its end mark."""
        whole = self.events[-1][1] == _DONE if self.events else bool(self.body)
        return self.error is None and self.status == 200 and whole and not self.left and self.broken is None

    @property
    def trouble(self) -> str | None:
        """What is wrong with a response that ought to have ended well; None if it did."""
        if self.ended_well:
            return None
        if self.broken is not None:
            return self.broken
        message = self.error["message"] if self.error else "it ended without its end mark"
        return f"status {self.status}: {message}"

    @property
    def first_s(self) -> float:
        """Seconds from asking to the first token."""
        return self.said[0][0] - self.begun

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between events with tokens."""
        times = [now for now, _ in self.said]
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    @property
    def per_token_s(self) -> float:
        """Seconds a token after those that came first."""
        return (self.said[-1][0] - self.said[0][0]) / (len(self.tokens) - len(self.said[0][1]))


def never(reading: Reading) -> bool:
    """Stay to the end."""
    return False


class Client:
    """Asks one server. Leaving, or being cancelled, closes the connection in mid-response."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def ask(self, path: str, body: dict[str, Any] | bytes, leave: Callable[[Reading], bool] = never) -> Reading:
        """The response, up to its end, or up to where `leave` says so after a piece of a stream. A body may be JSON
        already. Never raises for what the server does: `Reading.broken` has it."""
        reading = Reading(time.perf_counter())
        try:
            await self._read(reading, path, body if isinstance(body, bytes) else json.dumps(body).encode(), leave)
        except (aiohttp.ClientError, ConnectionError) as error:
            reading.broken = f"{type(error).__name__}: {error}"
        reading.ended = time.perf_counter()
        return reading

    async def _read(self, reading: Reading, path: str, body: bytes, leave: Callable[[Reading], bool]) -> None:
        async with self.session.post(path, data=body, headers=_HEADERS) as response:
            reading.status = response.status
            if response.content_type != "text/event-stream":
                reading.body = await response.read()
                return
            async for piece in response.content.iter_any():
                reading.hear(piece, time.perf_counter())
                if leave(reading):
                    reading.left = True
                    response.close()
                    return
            reading.end()

    async def ask_briefly(self, seconds: float, path: str, body: dict[str, Any]) -> Reading | None:
        """The response if it ends within so many seconds; else this side leaves, and None."""
        try:
            async with asyncio.timeout(seconds):
                return await self.ask(path, body)
        except TimeoutError:
            return None

    async def get(self, path: str) -> dict[str, Any]:
        async with self.session.get(path) as response:
            found: dict[str, Any] = await response.json()
            return found

    async def status(self, path: str) -> int:
        """The status of a GET; 0 where nobody answers."""
        try:
            async with self.session.get(path) as response:
                await response.read()
                return response.status
        except (aiohttp.ClientError, ConnectionError):
            return 0


def completion(prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy request of exactly so many new tokens, streamed, that tells their ids."""
    asked = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    return {**asked, "return_token_ids": True, **more}
