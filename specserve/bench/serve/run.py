"""A measurement of a running server: which requests, and one load after the other."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from specserve.adapters import NO_ADAPTER
from specserve.bench.prompts import Prompt
from specserve.bench.serve.load import ClosedLoop, Extent, Load, OpenLoop
from specserve.bench.serve.measure import Record, measure
from specserve.errors import ConfigError, ServerError, unknown

_STATS_S = 5.0  # at most, for what a server says of its engines
ENDPOINTS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server: its address, with or without /v1, and how long a request may take, in seconds."""

    url: str
    api_key: str | None = None
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"The url is {self.url!r}; it must begin with http:// or https://.")
        if not self.timeout > 0:
            raise ConfigError(f"timeout is {self.timeout}; it must be a number of seconds above 0.")

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    def session(self) -> aiohttp.ClientSession:
        """With as many connections as there are requests."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        connector = aiohttp.TCPConnector(limit=0)
        return aiohttp.ClientSession(connector=connector, headers=headers, cookie_jar=aiohttp.DummyCookieJar())


@dataclass(frozen=True, slots=True, kw_only=True)
class Asks:
    """What is sent: request i has prompt i, from the start again after the last, and is sampled with seed + i.
    `adapters` are asked in turn, by the names that the server has them under; NO_ADAPTER among them is the model, and
    without any all requests are its. `fields` are sent as they are, over all others."""

    prompts: Sequence[Prompt]
    endpoint: str = "chat"  # of ENDPOINTS
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    adapters: Sequence[str] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)

    def prompt(self, number: int) -> Prompt:
        return self.prompts[number % len(self.prompts)]

    def adapter(self, number: int) -> str | None:
        return self.adapters[number % len(self.adapters)] if self.adapters else None

    def body(self, model: str, number: int) -> dict[str, Any]:
        text = self.prompt(number).text
        asked = {"messages": [{"role": "user", "content": text}]} if self.endpoint == "chat" else {"prompt": text}
        sampled = {"seed": self.seed + number} if self.temperature > 0 else {}
        shared = {"max_tokens": self.max_tokens, "temperature": self.temperature, **sampled}
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        named = self.adapter(number)
        return {"model": model if named in (None, NO_ADAPTER) else named, **asked, **shared, **streaming, **self.fields}


@dataclass(frozen=True, slots=True)
class Point:
    """One load and what became of its requests, from `began` to `ended` on the event loop's clock. Of one that was
    `interrupted` there are the requests that had ended. `by_replica`: how many the server sent to each of its engines;
    None where it has one, or does not tell."""

    load: Load
    began: float
    ended: float
    records: list[Record]
    interrupted: bool = False
    by_replica: Sequence[int] | None = None


@dataclass(slots=True)
class Measurement:
    """What has been measured so far, of which model."""

    model: str = ""
    points: list[Point] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Change:
    """A request was sent, or has ended if there is a record."""

    load: str
    record: Record | None = None


Watch = Callable[[Change], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`warmup` requests, one after the other and not counted, then each load for its extent, when the one before is
    over. The loads' arrivals are drawn with the seed of `asks`."""

    loads: Sequence[Load]
    extent: Extent
    asks: Asks
    warmup: int = 0

    def __post_init__(self) -> None:
        for load in self.loads:
            if isinstance(load, OpenLoop) and math.isinf(load.rate) and self.extent.num_requests is None:
                raise ConfigError("rate is inf, which sends all requests at once: say how many with --num-requests.")
        if self.extent.num_requests is not None and len(self.asks.adapters) > self.extent.num_requests:
            counts = f"{len(self.asks.adapters)} adapters are asked in turn, by {self.extent.num_requests} requests"
            raise ConfigError(f"{counts}. Send more with --num-requests.")


async def run(
    target: Target,
    plan: Plan,
    model: str | None = None,
    watch: Watch = lambda change: None,
    measurement: Measurement | None = None,
) -> tuple[str, list[Point]]:
    """Measure; gives the model's name too. `model` None is the first that the server has. `measurement` has what was
    measured even when this is cancelled. Raises ServerError if the server cannot be asked, or if a request of the
    warm-up fails, and ConfigError for an adapter that it does not have."""
    made = measurement or Measurement()
    async with target.session() as session:
        made.model = await _checked(session, target, plan, model)
        asking = _Asking(session, target, plan.asks, made.model, watch)
        if plan.warmup:
            warm = ClosedLoop(1)
            for record in await warm.run(asking.sender("warm-up", []), Extent(plan.warmup), 0):
                _check_warm(record)
        for load in plan.loads:
            await _measure_load(asking, load, plan, made.points)
        return made.model, made.points


async def _checked(session: aiohttp.ClientSession, target: Target, plan: Plan, model: str | None) -> str:
    """The model that is asked, of a server that has the plan's adapters."""
    if model is not None and not plan.asks.adapters:
        return model
    listed = await model_names(session, target)
    if model is None and not listed:
        raise ServerError(f"{target.base}/v1/models names no model. Give one with --model.", status=200)
    if missing := [name for name in plan.asks.adapters if name not in (*listed, NO_ADAPTER)]:
        todo = "Load it there with --lora, or with POST /v1/load_lora_adapter."
        raise ConfigError(f"{unknown('adapter', missing[0], listed)} {todo}")
    return model or listed[0]


async def model_names(session: aiohttp.ClientSession, target: Target) -> list[str]:
    """The names of /v1/models, its own first. Raises ServerError where none can be asked for."""
    url = f"{target.base}/v1/models"
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=target.timeout)) as response:
            text = await response.text(errors="replace")
            if response.status != 200:
                raise ServerError.of_answer(response.status, text)
            body = await response.json(content_type=None)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        reason = str(error) or type(error).__name__
        todo = "Start one with `specserve serve`, or give its address with --url."
        raise ServerError(f"No server at {url}: {reason}. {todo}", type="connection_error") from error
    data = body.get("data") if isinstance(body, dict) else None
    listed = data if isinstance(data, list) else []
    return [str(each["id"]) for each in listed if isinstance(each, dict) and "id" in each]


@dataclass(frozen=True, slots=True)
class _Asking:
    session: aiohttp.ClientSession
    target: Target
    asks: Asks
    model: str
    watch: Watch

    def sender(self, load: str, ended: list[Record]) -> Callable[[int, float], Any]:
        """What sends a request; its record is in `ended` too, once it has ended."""

        async def send(number: int, due: float) -> Record:
            self.watch(Change(load))
            prompt, adapter = self.asks.prompt(number), self.asks.adapter(number)
            record = Record(number=number, category=prompt.category, due=due, started=due, adapter=adapter)
            url = self.target.base + ENDPOINTS[self.asks.endpoint]
            await measure(self.session, url, self.asks.body(self.model, number), record, self.target.timeout)
            ended.append(record)
            self.watch(Change(load, record))
            return record

        return send


def _check_warm(record: Record) -> None:
    if record.error is not None:
        raise ServerError(f"The warm-up failed ({record.error}): {record.message}", status=record.status)


async def _measure_load(asking: _Asking, load: Load, plan: Plan, points: list[Point]) -> None:
    loop = asyncio.get_running_loop()
    before = await _requests_by_replica(asking)
    began, ended = loop.time(), list[Record]()
    try:
        records = await load.run(asking.sender(load.describe()["name"], ended), plan.extent, plan.asks.seed)
    except asyncio.CancelledError:
        ended.sort(key=lambda record: record.number)
        points.append(Point(load, began, loop.time(), ended, interrupted=True))
        raise
    until = max((record.ended for record in records), default=began)
    after = None if before is None else await _requests_by_replica(asking)
    shares = None
    if before is not None and after is not None and len(before) == len(after):
        shares = [late - early for early, late in zip(before, after, strict=True)]
    points.append(Point(load, began, until, records, by_replica=shares))


async def _requests_by_replica(asking: _Asking) -> list[int] | None:
    """How many requests each engine of a specserve has had, by its /stats; None for a server that does not say."""
    url, timeout = f"{asking.target.base}/stats", aiohttp.ClientTimeout(total=_STATS_S)
    try:
        async with asking.session.get(url, timeout=timeout) as response:
            told = await response.json(content_type=None) if response.status == 200 else None
        return [int(each["num_requests"]) for each in told["replicas"]] if told and told.get("replicas") else None
    except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
