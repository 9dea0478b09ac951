"""Load over HTTP, against a server whose answers have scripted times: client and server run on sockets in one event
loop with a virtual clock, so every figure can be worked out by hand."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import math
import os
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from hypothesis import given, strategies as st
from rich.console import Console

from specserve.bench.prompts import Prompt
from specserve.bench.serve.load import ClosedLoop, Extent, Load, OpenLoop
from specserve.bench.serve.measure import Record, measure
from specserve.bench.serve.report import (
    PERCENTILES,
    Goodput,
    by_adapter,
    details,
    distribution,
    overview,
    remarks,
    summary,
)
from specserve.bench.serve.run import Asks, Change, Plan, Point, Target, run
from specserve.cli.main import run as cli
from specserve.errors import ConfigError, ServerError

InVirtualTime = Callable[[Awaitable[Any]], Any]
Step = tuple[float, str | bytes]  # seconds to wait, and what is sent then; text is the data of an event


def close(value: Any) -> Any:
    """Virtual clocks are exact to rounding; a moment that a socket needs moves none."""
    return pytest.approx(value, abs=1e-6)


def chunk(text: str = "", finish: str | None = None, **more: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish, **more}]})


def delta(finish: str | None = None, **said: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": said, "finish_reason": finish}]})


def usage(tokens: int, speculation: dict[str, Any] | None = None, **more: Any) -> str:
    metrics = {} if speculation is None else {"metrics": {"speculative_decoding": speculation}}
    return json.dumps({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": tokens, **more}, **metrics})


def speculated(steps: int, accepted: int, drafted: int, histogram: list[int]) -> dict[str, Any]:
    return {
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "acceptance_histogram": histogram,
    }


# First text after 0.5 s, then two more after 0.25 s and 0.75 s; seven tokens.
USUAL: list[Step] = [
    *((0.5, chunk("a")), (0.25, chunk("b")), (0.75, chunk("c")), (0.0, chunk(finish="stop"))),
    *((0.125, usage(7)), (0.0, "[DONE]")),
]


@dataclass
class Script:
    """What comes of one request: a status, then the steps; `cut` ends the connection instead of the body."""

    steps: list[Step] = field(default_factory=lambda: list(USUAL))
    status: int = 200
    wait: float = 0.0  # before the status
    cut: bool = False


@dataclass
class Server:
    """Answers request i with `script(i)`; keeps bodies, and how many requests there were at a time."""

    script: Callable[[int], Script] = lambda number: Script()
    replicas: Any = None  # what /stats says of engines, or what gives it
    models: Any = field(default_factory=lambda: {"data": [{"id": "tiny"}, {"id": "other"}]})
    bodies: list[Any] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    connections: set[Any] = field(default_factory=set)
    running: int = 0
    most: int = 0
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/stats":
            return web.json_response({"replicas": self.replicas() if callable(self.replicas) else self.replicas})
        self.keys.append(request.headers.get("Authorization"))
        if request.method == "GET":
            return web.json_response(self.models)
        number = len(self.bodies)
        self.bodies.append(await request.json())
        self.paths.append(request.path)
        self.times.append(asyncio.get_running_loop().time())
        self.connections.add(request.transport)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self._answer(request, self.script(number))
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request, script: Script) -> web.StreamResponse:
        await asyncio.sleep(script.wait)
        response = web.StreamResponse(status=script.status)
        await response.prepare(request)
        for seconds, data in script.steps:
            await asyncio.sleep(seconds)
            await response.write(data if isinstance(data, bytes) else f"data: {data}\n\n".encode())
        if script.cut:
            assert request.transport is not None
            await asyncio.sleep(0.001)
            request.transport.abort()
        return response

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Server]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}".format(*runner.addresses[0][:2])
        try:
            yield self
        finally:
            await runner.cleanup()


PROMPTS = [Prompt("one", "x"), Prompt("two", "y"), Prompt("three", "x")]


def plan(*loads: Load, num: int | None = 4, duration: float | None = None, warmup: int = 0, **asks: Any) -> Plan:
    asked = Asks(**{"prompts": PROMPTS, "endpoint": "completions", "max_tokens": 9} | asks)
    return Plan(loads=loads, extent=Extent(num, duration), asks=asked, warmup=warmup)


@pytest.fixture
def points(in_virtual_time: InVirtualTime) -> Callable[..., list[Point]]:
    def measured(server: Server, chosen: Plan, model: str | None = None, **target: Any) -> list[Point]:
        async def main() -> list[Point]:
            async with server.serving():
                return (await run(Target(url=server.url, **target), chosen, model))[1]

        return in_virtual_time(main())

    return measured


Points = Callable[..., list[Point]]


def figures(point: Point, *goodput: str) -> dict[str, Any]:
    return summary(point, Goodput.parse(goodput))


def test_requests_of_each_replica_are_told(points: Points) -> None:
    """Of those that the load sent: a third went to the first, which had one before. The warm-up is none of them."""
    server = Server()
    server.replicas = lambda: [{"num_requests": 1 + len(server.bodies) // 3}, {"num_requests": len(server.bodies)}]
    (point,) = points(server, plan(ClosedLoop(1), num=6, warmup=3))
    assert point.by_replica == [2, 6]
    found = figures(point)
    assert found["replicas"] == [{"requests": 2}, {"requests": 6}]
    assert "1 at once: requests by replica 0: 2 (25%), 1: 6 (75%)." in remarks(found)


@pytest.mark.parametrize("replicas", [None, [], "many", [{"requests": 3}], [1, 2]])
def test_a_server_that_tells_of_no_replicas_has_none(points: Points, replicas: Any) -> None:
    (point,) = points(Server(replicas=replicas), plan(ClosedLoop(1), num=1))
    assert point.by_replica is None
    assert figures(point)["replicas"] is None
    assert not any("replica" in line for line in remarks(figures(point)))


# --- loads ------------------------------------------------------------------------------------------------------------


def test_an_open_loop_does_not_wait_for_slow_answers(points: Points) -> None:
    """Ten requests in one second, each answered after a hundred: all run at once, and took what they took."""
    server = Server(lambda number: Script([(100.0, chunk("a", "stop")), (0.0, "[DONE]")]))
    (point,) = points(server, plan(OpenLoop(10.0, "constant"), num=10))
    assert server.times == close([i / 10 for i in range(10)])
    assert server.most == 10
    assert [record.due - point.began for record in point.records] == close([i / 10 for i in range(10)])
    assert [record.e2e for record in point.records] == close([100.0] * 10)
    assert point.ended - point.began == close(100.9)


def test_a_closed_loop_keeps_so_many_running_and_no_more(points: Points) -> None:
    server = Server(lambda number: Script([(float(number + 1), chunk("a", "stop")), (0.0, "[DONE]")]))
    (point,) = points(server, plan(ClosedLoop(2), num=5))
    assert server.most == 2
    # 0 ends at 1, 1 at 2; 2 runs 1 to 4, 3 runs 2 to 6, 4 runs 4 to 9
    assert server.times == close([0, 0, 1, 2, 4])
    assert [record.number for record in point.records] == [0, 1, 2, 3, 4]
    assert point.ended - point.began == close(9)
    assert [record.lag for record in point.records] == [0.0] * 5


@pytest.mark.parametrize(("load", "sent", "end"), [(OpenLoop(2.0, "constant"), 7, 4.5), (ClosedLoop(3), 9, 4.75)])
def test_a_duration_ends_sending_and_waits_for_the_rest(points: Points, load: Load, sent: int, end: float) -> None:
    """At two a second seven begin before 3.5 s. An answer takes 1.5 s and its usage 0.125 more, so three at once begin
    at 0, 1.625 and 3.25."""
    server = Server()
    (point,) = points(server, plan(load, num=None, duration=3.5))
    assert len(point.records) == len(server.bodies) == sent
    assert all(record.completed for record in point.records)
    assert figures(point)["seconds"] == close(end)
    (point,) = points(Server(), plan(load, num=2, duration=3.5))
    assert len(point.records) == 2


def test_latency_counts_from_when_a_request_was_due(in_virtual_time: InVirtualTime) -> None:
    """While the event loop is stuck for 3 s requests become due, and are sent late: their times include the wait."""

    async def main() -> Point:
        loop = asyncio.get_running_loop()

        def stuck() -> None:
            loop._virtual.now += 3.0  # type: ignore[attr-defined]

        async with Server().serving() as server:
            loop.call_at(0.5, stuck)
            return (await run(Target(url=server.url), plan(OpenLoop(1.0, "constant"), num=5)))[1][0]

    point = in_virtual_time(main())
    lags = [record.lag for record in point.records]
    assert lags == close([0, 2.5, 1.5, 0.5, 0])
    assert [record.ttft for record in point.records[1:]] == close([lag + 0.5 for lag in lags[1:]])
    assert [record.e2e for record in point.records[1:]] == close([lag + 1.5 for lag in lags[1:]])
    assert figures(point)["lag_ms"]["max"] == close(2500)
    assert any("load generator was late" in line for line in remarks(figures(point)))


def test_poisson_arrivals_have_the_rate_and_the_law_of_poisson() -> None:
    times = list(itertools.islice(OpenLoop(4.0).times(7), 20_000))
    gaps = np.diff(times, prepend=0.0)
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)
    assert (gaps > 0.25).mean() == pytest.approx(math.exp(-1), abs=0.01)
    assert list(itertools.islice(OpenLoop(8.0).times(7), 50)) == pytest.approx([t / 2 for t in times[:50]])
    assert next(OpenLoop(4.0).times(8)) != times[0]


def test_each_load_begins_when_the_one_before_is_over(points: Points) -> None:
    server = Server()
    first, second = points(server, plan(OpenLoop(2.0, "constant"), OpenLoop(4.0, "constant"), num=2, warmup=3))
    assert len(server.bodies) == 3 + 2 + 2
    assert server.times[:3] == close([0, 1.625, 3.25])  # one after the other, to the end of the body
    assert second.began >= first.ended
    assert [len(first.records), len(second.records)] == [2, 2]


def test_all_requests_of_a_burst_are_sent_at_once(points: Points) -> None:
    """More than the hundred connections that aiohttp allows if it is not told otherwise."""
    server = Server(lambda number: Script([(50.0, chunk("a", "stop"))]))
    (point,) = points(server, plan(OpenLoop(1000.0, "constant"), num=150))
    assert server.most == 150
    assert max(record.lag for record in point.records) == close(0)


@pytest.mark.parametrize("arrival", ["poisson", "constant"])
def test_at_an_infinite_rate_all_are_sent_at_once(points: Points, arrival: str) -> None:
    server = Server(lambda number: Script([(5.0, chunk("a", "stop"))]))
    (point,) = points(server, plan(OpenLoop(math.inf, arrival), num=40))
    assert server.most == 40
    assert {record.due for record in point.records} == {point.records[0].due}
    assert summary(point, Goodput({}))["load"] == {"name": "inf/s", "kind": "open", "rate": "inf", "arrival": arrival}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: OpenLoop(0.0),
        lambda: OpenLoop(-1.0),
        lambda: OpenLoop(-math.inf),
        lambda: OpenLoop(math.nan),
        lambda: plan(OpenLoop(math.inf), num=None, duration=5.0),  # it would never end
        lambda: ClosedLoop(0),
        lambda: Extent(),
        lambda: Target(url="localhost:8000"),
        lambda: Target(url="http://a", timeout=0),
    ],
)
def test_loads_that_cannot_be(wrong: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError):
        wrong()


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_requests_have_the_prompts_in_turn_and_the_fields_as_given(points: Points) -> None:
    server = Server()
    chosen = plan(ClosedLoop(1), num=4, temperature=0.5, seed=20, fields={"top_p": 0.9, "max_tokens": 3})
    (point,) = points(server, chosen, api_key="secret")
    assert server.paths == ["/v1/completions"] * 4
    assert [body["prompt"] for body in server.bodies] == ["one", "two", "three", "one"]
    assert [body["seed"] for body in server.bodies] == [20, 21, 22, 23]
    assert [record.category for record in point.records] == ["x", "y", "x", "x"]
    rest = {name: value for name, value in server.bodies[0].items() if name not in ("prompt", "seed")}
    assert rest == {
        "model": "tiny",
        "max_tokens": 3,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_p": 0.9,
    }
    assert set(server.keys) == {"Bearer secret"}
    assert len(server.connections) == 1


def test_chat_and_a_named_model_without_sampling(points: Points) -> None:
    server = Server()
    points(server, plan(ClosedLoop(1), num=1, endpoint="chat"), model="mine")
    assert server.paths == ["/v1/chat/completions"]
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "one"}]
    assert (server.bodies[0]["model"], server.bodies[0]["temperature"]) == ("mine", 0.0)
    assert not {"seed", "prompt"} & server.bodies[0].keys()
    assert server.keys == [None]  # the server was not asked for its models


def test_adapters_of_the_server_are_asked_in_turn(points: Points) -> None:
    server = Server(models={"data": [{"id": "tiny"}, {"id": "fr"}, {"id": "legal"}]})
    asked = plan(ClosedLoop(2), num=7, warmup=1, adapters=("fr", "none", "legal"))
    (point,) = points(server, asked)
    assert [body["model"] for body in server.bodies] == ["fr", *("fr", "tiny", "legal") * 2, "fr"]
    found = figures(point)
    assert [record["adapter"] for record in found["records"]] == [*("fr", "none", "legal") * 2, "fr"]
    assert {name: each["requests"] for name, each in found["adapters"].items()} == {"fr": 3, "none": 2, "legal": 2}
    assert found["adapters"]["fr"]["ttft_ms"]["p50"] == pytest.approx(500, abs=1e-3)
    assert found["adapters"]["legal"]["output_tokens"] == 14
    assert "legal" in printed(by_adapter(found))
    (point,) = points(server, plan(ClosedLoop(1), num=2, adapters=("none", "legal")), model="mine")
    assert [body["model"] for body in server.bodies[8:]] == ["mine", "legal"]


def test_adapters_that_a_server_does_not_have_end_before_anything_is_sent(points: Points) -> None:
    server = Server(models={"data": [{"id": "tiny"}, {"id": "legal"}]})
    with pytest.raises(ConfigError, match=r"Unknown adapter 'legl'. Did you mean 'legal'\? .* Load it there"):
        points(server, plan(ClosedLoop(1), adapters=("none", "legl")), model="tiny")
    assert server.bodies == []
    with pytest.raises(ConfigError, match="3 adapters are asked in turn, by 2 requests"):
        plan(ClosedLoop(1), num=2, adapters=("a", "b", "c"))


@pytest.mark.parametrize("models", [{"data": []}, {}, [], {"data": [{}]}, {"data": ["a"]}, {"data": 5}])
def test_a_server_without_models_is_an_error(points: Points, models: Any) -> None:
    with pytest.raises(ServerError, match="--model"):
        points(Server(models=models), plan(ClosedLoop(1)))


def test_no_server_and_a_failing_warm_up_are_errors(points: Points, in_virtual_time: InVirtualTime) -> None:
    with pytest.raises(ServerError, match="No server at"):
        in_virtual_time(run(Target(url="http://127.0.0.1:9"), plan(ClosedLoop(1))))
    with pytest.raises(ServerError, match=r"warm-up failed .HTTP 418"):
        points(Server(lambda number: Script([], status=418)), plan(ClosedLoop(1), warmup=1))


def test_watchers_see_every_beginning_and_end(in_virtual_time: InVirtualTime) -> None:
    seen: list[Change] = []

    async def main() -> None:
        async with Server().serving() as server:
            await run(Target(url=server.url), plan(ClosedLoop(2), num=3, warmup=1), None, seen.append)

    in_virtual_time(main())
    assert [(change.load, change.record is None) for change in seen[:2]] == [("warm-up", True), ("warm-up", False)]
    rest = seen[2:]
    assert {change.load for change in rest} == {"2 at once"}
    assert [change.record is None for change in rest] == [True, True, False, True, False, False]


# --- one request ------------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(in_virtual_time: InVirtualTime) -> Callable[..., Record]:
    def one(*steps: Step, timeout: float = 60.0, **script: Any) -> Record:
        async def main() -> Record:
            server = Server(lambda number: Script(list(steps), **script))
            async with server.serving(), aiohttp.ClientSession() as session:
                record = Record(number=0, category="all", due=0.0, started=0.0)
                return await measure(session, server.url, {}, record, timeout)

        return in_virtual_time(main())

    return one


Measured = Callable[..., Record]


def test_times_of_one_answer(measured: Measured) -> None:
    record = measured(*USUAL, wait=1.0)
    assert (record.status, record.error, record.finish_reason) == (200, None, "stop")
    assert record.ttft == close(1.5)
    assert record.e2e == close(2.5)  # the usage that comes later is nobody's waiting
    assert record.tpot == close(1.0 / 6)
    assert record.chunk_gaps == close([0.25, 0.75])
    assert (record.output_tokens, record.prompt_tokens, record.cached_tokens) == (7, 10, None)


def test_events_may_be_split_and_joined_anywhere(measured: Measured) -> None:
    text = "".join(f"data: {data}\r\n\r\n" for _, data in USUAL).encode()
    record = measured((1.0, b": ping\r\n\r\n"), (1.0, text[:20]), (1.0, text[20:]))
    assert record.completed
    assert record.ttft == close(3.0)
    assert record.chunk_gaps == close([0.0, 0.0])  # they came together
    record = measured(*((1.0, text[i : i + 40]) for i in range(0, len(text), 40)))
    assert (record.completed, len(record.chunk_times), record.output_tokens) == (True, 3, 7)


def test_the_first_text_counts_and_not_the_role(measured: Measured) -> None:
    steps = [
        (1.0, delta(role="assistant", content="", refusal=None)),
        *((1.0, delta(content="a")), (1.0, delta("stop")), (1.0, usage(2)), (0.0, "[DONE]")),
    ]
    record = measured(*steps)
    assert (record.ttft, record.e2e, record.tpot) == (close(2.0), close(3.0), close(1.0))
    reasoning = measured((1.0, delta(reasoning_content="hm")), (1.0, delta(content="a")), (0.0, delta("stop")))
    assert reasoning.ttft == close(1.0)
    called = measured((1.0, delta(tool_calls=[{"index": 0}])), (1.0, delta("tool_calls")))
    assert called.ttft == close(1.0)


def test_an_answer_without_text_ends_with_its_first_token(measured: Measured) -> None:
    record = measured((2.0, chunk(finish="stop")), (1.0, usage(1)), (0.0, "[DONE]"))
    assert (record.ttft, record.e2e, record.tpot) == (close(2.0), close(2.0), None)
    assert record.chunk_gaps == []
    record = measured((2.0, "[DONE]"))
    assert (record.completed, record.ttft, record.tpot) == (True, close(2.0), None)


def test_gaps_per_token(measured: Measured) -> None:
    def with_ids(text: str, *ids: int) -> str:
        return chunk(text, token_ids=list(ids))

    steps = [(1.0, with_ids("a", 1)), (0.6, with_ids("bc", 2, 3)), (0.0, with_ids("", 4)), (0.9, with_ids("é", 5, 6))]
    end = [(0.0, chunk(finish="stop", token_ids=[])), (0.0, usage(6))]
    record = measured(*steps, *end)
    assert record.chunk_tokens == [1, 2, 3]  # a token whose text came later counts with it
    assert record.token_gaps == close([0.3, 0.3, 0.3, 0.3, 0.3])
    unknown = measured(*USUAL)
    assert (unknown.chunk_tokens, unknown.token_gaps) == ([None] * 3, None)
    one_each = measured(*USUAL[:4], (0.0, usage(3)))
    assert one_each.token_gaps == one_each.chunk_gaps


def test_without_usage_nothing_per_token_is_made_up(measured: Measured) -> None:
    record = measured(*USUAL[:4], (0.0, "[DONE]"))
    assert record.completed
    assert (record.output_tokens, record.tpot, record.token_gaps) == (None, None, None)
    assert measured(*USUAL[:4], (0.0, '{"choices": [], "usage": {"completion_tokens": "7"}}')).output_tokens is None


ERROR = '{"error": {"message": "NaN", "type": "server_error"}}'


@pytest.mark.parametrize(
    ("steps", "script", "kind", "message"),
    [
        ([(0.0, ERROR.encode())], {"status": 500}, "HTTP 500", "NaN"),
        ([(0.0, b"")], {"status": 404}, "HTTP 404", "404"),
        ([USUAL[0], (0.0, ERROR), *USUAL[1:]], {}, "error in stream", "NaN"),
        ([*USUAL[:4], (0.0, ERROR)], {}, "error in stream", "NaN"),
        (USUAL[:3], {}, "incomplete", "finish_reason"),
        ([(0.0, b'{"choices": []}')], {}, "incomplete", "finish_reason"),
        ([USUAL[0], (0.0, "{")], {}, "malformed stream", "{"),
        ([USUAL[0], (0.0, "[1]")], {}, "malformed stream", "[1]"),
        (USUAL[:3], {"cut": True}, "connection lost", ""),
        (USUAL[:4], {"cut": True}, "connection lost", ""),
        ([(61.0, chunk("a"))], {}, "timeout", "60 seconds"),
        ([], {"wait": 61.0}, "timeout", "60 seconds"),
    ],
)
def test_failures_have_a_kind_and_a_message(
    measured: Measured, steps: list[Step], script: dict[str, Any], kind: str, message: str
) -> None:
    record = measured(*steps, **script)
    assert record.error == kind
    assert message in (record.message or "")
    assert (record.completed, record.ttft, record.tpot) == (False, None, None)
    assert record.status == (None if script.get("wait") else script.get("status", 200))


def test_a_connection_that_is_cut_after_the_end_does_no_harm(measured: Measured) -> None:
    assert measured(*USUAL, cut=True).completed
    assert measured(*USUAL, (100.0, b": too long")).completed  # [DONE] came, then nothing for longer than the timeout


@pytest.mark.parametrize(
    "odd",
    [
        *('{"choices": 3}', '{"choices": [7]}', '{"choices": [{"delta": 4}]}', '{"usage": 1}', '{"metrics": []}'),
        *('{"metrics": {"speculative_decoding": 2}}', "{}", '{"error": null, "choices": null}'),
    ],
)
def test_odd_events_of_other_servers_do_no_harm(measured: Measured, odd: str) -> None:
    record = measured(USUAL[0], (0.0, odd), *USUAL[1:])
    assert (record.completed, record.output_tokens, record.tpot) == (True, 7, close(1.0 / 6))


def test_no_connection_is_a_record_too(in_virtual_time: InVirtualTime) -> None:
    async def main() -> Record:
        async with aiohttp.ClientSession() as session:
            record = Record(number=0, category="all", due=0.0, started=0.0)
            return await measure(session, "http://127.0.0.1:9", {}, record, 5.0)

    record = in_virtual_time(main())
    assert (record.error, record.status) == ("no connection", None)


# --- figures ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_distributions_are_numpys_of_the_values_there_are(values: list[float]) -> None:
    found = distribution([None, *values, None])
    assert found is not None
    assert found == {
        "count": len(values),
        "mean": float(np.mean(values)),
        **{f"p{p}": pytest.approx(float(np.percentile(values, p))) for p in (50, 90, 95, 99)},
        "max": max(values),
    }
    assert list(found) == ["count", "mean", "p50", "p90", "p95", "p99", "max"]
    assert PERCENTILES == (50, 90, 95, 99)


def test_a_distribution_of_nothing_is_none() -> None:
    assert distribution([]) is None
    assert distribution([None]) is None


def mixed(number: int) -> Script:
    """Two good answers, a slow one, a full server, one that drains, a failure."""
    told = [speculated(4, 3, 10, [2, 1, 1]), speculated(6, 6, 8, [2, 2, 2, 0])]
    return [
        Script([*USUAL[:4], (0.0, usage(7, told[0], prompt_tokens_details={"cached_tokens": 4})), (0.0, "[DONE]")]),
        Script([(0.25, chunk("a")), (0.5, chunk("b")), (0.0, chunk(finish="length")), (0.0, usage(3, told[1]))]),
        Script([(3.0, chunk("a")), (1.0, chunk("b")), (0.0, chunk(finish="stop")), (0.0, usage(11))]),
        Script([], status=429, wait=0.125),
        Script([], status=503, wait=0.375),
        Script([(0.5, ERROR)]),
    ][number]


def test_the_summary_of_a_mixed_load(points: Points) -> None:
    (point,) = points(Server(mixed), plan(OpenLoop(1.0, "constant"), num=6))
    found = figures(point, "ttft:600", "tpot:200")
    assert found["load"] == {"name": "1/s", "kind": "open", "rate": 1.0, "arrival": "constant"}
    assert [found[name] for name in ("requests", "completed", "rejected", "failed")] == [6, 3, 2, 1]
    assert found["errors"] == {"HTTP 429": 1, "HTTP 503": 1, "error in stream": 1}
    assert found["statuses"] == {"200": 4, "429": 1, "503": 1}
    assert found["finish_reasons"] == {"stop": 2, "length": 1}
    assert found["seconds"] == close(6.0)  # the third was due at 2 and took 4
    assert found["requests_per_second"] == close(3 / 6)
    assert (found["output_tokens"], found["prompt_tokens"], found["cached_prompt_tokens"]) == (21, 30, 4)
    assert found["output_tokens_per_second"] == close(21 / 6)
    expected = {
        "ttft_ms": [500, 250, 3000],
        "tpot_ms": [1000 / 6, 250, 100],
        "chunk_gap_ms": [250, 750, 500, 1000],
        "e2e_ms": [1500, 750, 4000],
        "output_tokens_per_request": [7, 3, 11],
        "reject_ms": [125, 375],
        "lag_ms": [0] * 6,
    }
    for name, values in expected.items():
        assert found[name] == pytest.approx(distribution(values), abs=1e-3), name
    assert found["token_gap_ms"] is None
    assert found["goodput"] == {
        "limits_ms": {"ttft": 600, "tpot": 200},
        "good": 1,
        "share": 1 / 6,
        "per_second": close(1 / 6),
    }
    assert found["speculation"] == {
        "answers": 2,
        "steps": 10,
        "draft_tokens": 18,
        "accepted_tokens": 9,
        "mean_acceptance_length": 1.9,
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [4, 3, 3, 0],
    }


def test_the_file_has_every_request(points: Points) -> None:
    (point,) = points(Server(mixed), plan(OpenLoop(1.0, "constant"), num=6))
    found = json.loads(json.dumps(figures(point), allow_nan=False))["records"]
    assert [record["number"] for record in found] == list(range(6))
    assert [record["due_ms"] for record in found] == close([0, 1000, 2000, 3000, 4000, 5000])
    first, rejected = found[0], found[3]
    assert first["chunk_ms"] == pytest.approx([500, 750, 1500], abs=1e-3)
    assert (first["ttft_ms"], first["e2e_ms"]) == (pytest.approx(500, abs=1e-3), pytest.approx(1500, abs=1e-3))
    assert first["usage"]["completion_tokens"] == 7
    assert first["speculative_decoding"]["num_spec_steps"] == 4
    assert (rejected["status"], rejected["error"], rejected["ttft_ms"]) == (429, "HTTP 429", None)
    assert rejected["e2e_ms"] == pytest.approx(125, abs=1e-3)


def record(ttft: float = 0.1, tokens: int | None = 11, end: float = 1.1, error: str | None = None) -> Record:
    """The usual one takes 100 ms per token."""
    stated = None if tokens is None else {"completion_tokens": tokens}
    return Record(
        number=0,
        category="",
        due=5.0,
        started=5.0,
        ended=5.0 + end,
        error=error,
        chunk_times=[5.0 + ttft],
        usage=stated,
    )


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (["ttft:100.001"], True),
        (["ttft:99.999"], False),
        (["tpot:100.001"], True),
        (["tpot:99.999"], False),
        (["e2e:1100.001"], True),
        (["e2e:1099.999"], False),
        (["ttft:200", "tpot:200", "e2e:2000"], True),
        (["ttft:200", "tpot:20", "e2e:2000"], False),
    ],
)
def test_goodput_needs_every_limit(limits: list[str], kept: bool) -> None:
    assert Goodput.parse(limits).keeps(record()) == kept
    assert not Goodput.parse(limits).keeps(record(error="timeout"))


def test_goodput_of_one_token_and_of_unknown_tokens() -> None:
    limit = Goodput.parse(["tpot:1"])
    assert limit.keeps(record(tokens=1))
    assert not limit.keeps(record(tokens=2))
    assert not limit.keeps(record(tokens=None))


@pytest.mark.parametrize(
    "texts", [["ttf:5"], ["ttft"], ["ttft:"], ["ttft:x"], ["ttft:-5"], ["ttft:0"], ["ttft:nan"], ["ttft:1", "ttft:2"]]
)
def test_wrong_goodput_limits(texts: list[str]) -> None:
    with pytest.raises(ConfigError, match="ttft"):
        Goodput.parse(texts)


def test_nothing_at_all_has_a_summary() -> None:
    found = figures(Point(ClosedLoop(1), 0.0, 0.0, []), "ttft:5")
    assert (found["requests"], found["requests_per_second"], found["ttft_ms"]) == (0, 0.0, None)
    assert found["goodput"]["share"] == 0.0


def printed(*tables: Any) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(*tables)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_tables_and_remarks(points: Points) -> None:
    measured = points(Server(lambda number: mixed(number % 6)), plan(OpenLoop(1.0, "constant"), ClosedLoop(6), num=6))
    found = [figures(point, "ttft:600") for point in measured]
    cells = [line.split() for line in printed(overview("tiny", found)).splitlines()]
    assert ["1/s", "3", "2", "1", "0.50", "3.50", "500/2950", "167/248", "1.90", "33%"] in cells
    lines = [line.split() for line in printed(details(found[0])).splitlines()]
    assert ["first", "token", "ms", "1250", "500", "2500", "2750", "2950", "3000"] in lines
    assert not any(line[:2] == ["token", "gap"] for line in lines)  # unknown: no row of dashes
    said = "\n".join(remarks(found[0]))
    for words in ("1 x HTTP 429", "13% of the prompt tokens", "33.3% of the requests keep ttft 600 ms: 0.33 a second"):
        assert words in said
    assert "late" not in said


def test_other_servers_have_empty_columns(points: Points) -> None:
    """No metrics, no usage, no [DONE]."""
    (point,) = points(Server(lambda number: Script(USUAL[:4])), plan(ClosedLoop(1), num=2))
    found = figures(point)
    assert (found["completed"], found["speculation"], found["tpot_ms"]) == (2, None, None)
    assert (found["output_tokens"], found["output_tokens_per_second"], found["goodput"]) == (None, None, None)
    row = next(line.split() for line in printed(overview("other", [found])).splitlines() if "at once" in line)
    assert row == ["1", "at", "once", "2", "0", "0", "0.67", "-", "500/500", "-", "-", "-"]
    assert "states no usage" in "\n".join(remarks(found))


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick() -> Iterator[Server]:
    """A server on a thread of its own, in real time, without waits."""
    server = Server(lambda number: Script([(0.0, data) for _, data in USUAL]))
    ready, stop, loop = threading.Event(), asyncio.Event(), asyncio.new_event_loop()

    async def main() -> None:
        async with server.serving():
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    ready.wait()
    yield server
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPECSERVE_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments: str) -> tuple[int, str, str]:
        status = cli(["bench", "serve", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


Command = Callable[..., tuple[int, str, str]]


def test_the_command_measures_and_writes_everything(
    command: Command, quick: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECSERVE_API_KEY", "secret")
    Path("p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "category": "x"}\n')
    flags = ("--url", quick.url + "/v1/", "--rate", "500,1000", "--num-requests", "5", "--prompts", "p.jsonl")
    more = ("--drafter", "ngram", "--ignore-eos", "--token-ids", "--extra", '{"top_p": 0.5}', "--max-tokens", "9")
    more = (*more, "--adapter", "other", "--adapter", "none")
    status, out, err = command(*flags, *more, "--goodput", "ttft:60000", "e2e:60000", "--json", "out.json")
    assert status == 0, err
    assert len(quick.bodies) == 1 + 5 + 5
    for body in quick.bodies:
        assert body["speculative"] == {"drafter": "ngram"}
        assert (body["ignore_eos"], body["return_token_ids"], body["top_p"], body["max_tokens"]) == (True, True, 0.5, 9)
    assert set(quick.keys) == {"Bearer secret"}
    found = json.loads(Path("out.json").read_text())
    assert (found["model"], found["endpoint"], found["prompts"], found["warmup"]) == ("tiny", "chat", 2, 1)
    assert found["adapters"] == list(found["loads"][0]["adapters"]) == ["other", "none"]
    assert [body["model"] for body in quick.bodies].count("tiny") == 2 + 2
    assert [load["load"]["name"] for load in found["loads"]] == ["500/s", "1000/s"]
    assert [load["completed"] for load in found["loads"]] == [5, 5]
    assert [len(load["records"]) for load in found["loads"]] == [5, 5]
    assert "secret" not in Path("out.json").read_text() + out + err
    for words in (
        "500/s",
        "1000/s",
        "first token ms",
        "drafter ngram",
        "100.0% of the requests keep",
        "500/s by adapter",
    ):
        assert words in out


def test_ctrl_c_keeps_what_was_measured(command: Command, quick: Server) -> None:
    """In the second load, with a request under way: figures of the others are shown and written, the status is 130."""
    usual = quick.script

    def script(number: int) -> Script:
        if number == 7:
            os.kill(os.getpid(), signal.SIGINT)
            return Script([(60.0, "never")])
        return usual(number)

    quick.script = script
    Path("p.jsonl").write_text('{"prompt": "a"}\n')
    flags = ("--url", quick.url, "--prompts", "p.jsonl", "--concurrency", "2,1", "--num-requests", "4", "--warmup", "0")
    status, out, err = command(*flags, "--json", "out.json")
    assert status == 130, err
    first, second = json.loads(Path("out.json").read_text())["loads"]
    assert (first["completed"], first["interrupted"]) == (4, False)
    assert (second["interrupted"], second["requests"], second["completed"]) == (True, 3, 3)
    assert "1 at once: interrupted." in out
    assert "Traceback" not in err


def test_standard_output_may_have_json_alone(command: Command, quick: Server) -> None:
    Path("p.jsonl").write_text('{"prompt": "a"}\n')
    status, out, err = command("--url", quick.url, "--prompts", "p.jsonl", "--json")
    assert status == 0, err
    assert json.loads(out)["loads"][0]["completed"] == 1


def test_ctrl_c_before_anything_was_measured(command: Command, quick: Server) -> None:
    def script(number: int) -> Script:
        os.kill(os.getpid(), signal.SIGINT)
        return Script([(60.0, "never")])

    quick.script = script
    Path("p.jsonl").write_text('{"prompt": "a"}\n')
    assert command("--url", quick.url, "--prompts", "p.jsonl", "--json", "out.json")[:2] == (130, "")
    assert not Path("out.json").exists()


def test_without_options_each_prompt_is_asked_once(command: Command, quick: Server) -> None:
    Path("p.jsonl").write_text('{"prompt": "a"}\n' * 3)
    status, out, err = command("--url", quick.url, "--prompts", "p.jsonl", "--warmup", "0", "--endpoint", "completions")
    assert status == 0, err
    assert len(quick.bodies) == 3
    assert "1 at once" in out


def test_options_come_from_a_table_of_the_file(command: Command, quick: Server) -> None:
    Path("p.jsonl").write_text('{"prompt": "a"}\n')
    Path("specserve.toml").write_text(
        f'[bench.serve]\nurl = "{quick.url}"\nconcurrency = [2, 3]\nnum_requests = 4\nprompts = "p.jsonl"\nwarmup = 0\n'
    )
    status, _, err = command("--json", "o.json")
    assert status == 0, err
    assert [load["load"]["concurrency"] for load in json.loads(Path("o.json").read_text())["loads"]] == [2, 3]
    assert len(quick.bodies) == 8


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rate", "1", "--concurrency", "1"], "Give one of them"),
        (["--rate", "x"], "write them as"),
        (["--rate", "0"], "above 0"),
        (["--rate", "1,inf", "--duration", "5"], "--num-requests"),
        (["--concurrency", "1.5"], "whole number"),
        (["--concurrency", "0"], "at least 1"),
        (["--num-requests", "0"], ">= 1"),
        (["--extra", "{"], "no JSON"),
        (["--extra", "[]"], "JSON object"),
        (["--goodput", "tfft:5"], "Did you mean 'ttft'"),
        (["--prompts", "none.jsonl"], "none.jsonl"),
        (["--plot", "x.gif"], ".svg"),
        (["--arrival", "steady"], "poisson"),
    ],
)
def test_wrong_options_end_before_anything_is_sent(
    command: Command, quick: Server, flags: list[str], said: str
) -> None:
    status, _, err = command("--url", quick.url, *flags)
    assert status == 2
    assert said in err
    assert quick.keys == []


def test_an_address_that_is_none(command: Command) -> None:
    status, _, err = command("--url", "localhost:8000")
    assert (status, "http://" in err) == (2, True)


def test_no_server_is_one_line_and_status_1(command: Command) -> None:
    status, out, err = command("--url", "http://127.0.0.1:9")
    assert (status, out) == (1, "")
    assert re.fullmatch(r"specserve: No server at http://127\.0\.0\.1:9/v1/models: [^\n]*--url\.\n", err)


def test_a_plot_needs_matplotlib_before_anything_is_sent(
    command: Command, quick: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = command("--url", quick.url, "--plot", "x.svg")
    assert status == 2
    assert "pip install 'specserve[plot]'" in err
    assert quick.keys == []


def test_an_infinite_rate_is_no_number_in_json(command: Command, quick: Server) -> None:
    flags = ("--url", quick.url, "--rate", "200,inf", "--num-requests", "5", "--json", "out.json")
    status, out, err = command(*flags)
    assert status == 0, err

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    found = json.loads(Path("out.json").read_text(), parse_constant=refuse)
    assert [load["load"]["rate"] for load in found["loads"]] == [200.0, "inf"]
    assert [load["completed"] for load in found["loads"]] == [5, 5]
    assert "inf/s" in out


@pytest.mark.parametrize("rates", ["300", "300,600", "inf", "300,inf"])
@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_plots_are_drawn(command: Command, quick: Server, rates: str, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="Plots are an extra.")
    flags = ("--url", quick.url, "--rate", rates, "--num-requests", "3", "--plot", f"x.{suffix}")
    status, _, err = command(*flags)
    assert status == 0, err
    begin = {"svg": b"<?xml", "png": b"\x89PNG"}[suffix]
    assert Path(f"x.{suffix}").read_bytes().startswith(begin)


def test_the_command_loads_no_torch() -> None:
    import subprocess

    code = (
        "import sys, specserve.cli.bench_serve, specserve.bench.serve.run, specserve.bench.serve.report;"
        "sys.exit(bool({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    folder = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=folder, check=False).returncode == 0
