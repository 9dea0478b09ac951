"""Headless engines and a server that has them, on one event loop: the same text, and what happens when one side or the
way between them fails."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specserve.adapters import AdapterSource
from specserve.checkpoint.identity import model_digest
from specserve.checkpoint.weights import Weights
from specserve.engine.request import Request
from specserve.errors import ConfigError, EngineError, InputError, ModelError
from specserve.llm import LLM
from specserve.parallel.handshake import LinkError
from specserve.server.answers import Answers, Prepared
from specserve.server.chats import Chats
from specserve.server.engine import headless as headless_module
from specserve.server.engine.headless import HeadlessEngine
from specserve.server.engine.keeper import State, Timeouts
from specserve.server.engine.listen_options import EngineListenOptions
from specserve.server.engine.remote import Dialer
from specserve.server.engine.remote_engines import RemoteEngines
from specserve.server.grammar_validator import GrammarValidator
from specserve.server.metrics import Metrics
from specserve.server.service import Service
from specserve.structured.spec import Structured
from specserve.testing import write_adapter, write_tiny_model
from specserve.text.tokenizer import Tokenizer
from specserve.types import SamplingParams

OPTIONS: dict[str, Any] = {
    "threads": 1, "max_num_seqs": 4, "kv_cache_gib": 0.01, "max_model_len": 256, "drafter": "ngram", "max_loras": 2,
    "adaptive": False,
}  # fmt: skip
SECRET = b"0123456789abcdef0123456789abcdef"
PROMPTS = [[5, 6, 7, 8] * 8, [9, 10, 11] * 12, *([number, 3, number, 4] * 5 for number in range(20, 26))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1, seed=7, n=2, max_tokens=24, ignore_eos=True, logprobs=2),
]
ENDLESS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
Texts = list[list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_bytes(SECRET)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[SamplingParams, list[Texts]]:
    """By parameters, of each prompt: what one engine of this process says without drafts."""
    with LLM(str(folder), **OPTIONS | {"drafter": "none"}) as llm:
        return {
            params: [[each.token_ids for each in out.outputs] for out in llm.generate(PROMPTS, params)]
            for params in (*PARAMS, ENDLESS)
        }


async def until(condition: Callable[[], object], seconds: float = 180) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def headless(folder: Path, secret: Path, **options: Any) -> AsyncIterator[HeadlessEngine]:
    listen = EngineListenOptions(listen="127.0.0.1:0", secret_file=secret)
    engine = HeadlessEngine({"model": str(folder), **OPTIONS, **options}, listen)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


Engines = list[HeadlessEngine]
Play = Callable[[Engines], Coroutine[Any, Any, None]]
Shared = Callable[[Play], None]


@pytest.fixture(scope="module")
def shared(folder: Path, secret: Path) -> Iterator[Shared]:
    """`shared(play)`: a play on two engines that tests share. Both are ready, without a server and idle before and
    after it."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()

        async def started() -> Engines:
            return [await stack.enter_async_context(headless(folder, secret)) for _ in range(2)]

        engines = runner.run(started())

        async def played(play: Play) -> None:
            async with asyncio.timeout(400):
                await until(lambda: all(each.supervisor.state is State.READY for each in engines))
                await play(engines)
                await until(lambda: not any(each.is_connected or each.num_open for each in engines))
                await until(lambda: all(each.supervisor.state is State.READY for each in engines))

        yield lambda play: runner.run(played(play))
        runner.run(stack.aclose())


def dialer(folder: Path, heartbeat_s: float = 3.0, secret: bytes = SECRET) -> Dialer:
    return Dialer(secret, "tiny", model_digest(folder), None, heartbeat_s)


@asynccontextmanager
async def served(folder: Path, addresses: Sequence[object], dial: Dialer | None = None) -> AsyncIterator[Service]:
    """A server of these engines, all of which take requests."""
    metrics = Metrics("tiny")
    group = RemoteEngines(map(str, addresses), dial or dialer(folder), metrics.of_replica)
    service = Service(group, Tokenizer(folder), metrics, GrammarValidator(folder), Chats(folder), 2**20)
    try:
        await until(lambda: all(each.state == "ready" for each in group.replicas))
        yield service
    finally:
        await group.close()
        service.close()


def of(service: Service) -> RemoteEngines:
    assert isinstance(service.supervisor, RemoteEngines)
    return service.supervisor


def start(service: Service, prompt: list[int], params: SamplingParams, **fields: Any) -> Answers:
    return service.start([Prepared(Request(id=service.new_id(), prompt_ids=prompt, params=params, **fields))])


async def answer(service: Service, prompt: list[int], params: SamplingParams, **fields: Any) -> Texts:
    with start(service, prompt, params, **fields) as running:
        return [each.token_ids for each in (await running.whole())[0].outputs]


async def end(answers: Answers) -> list[int] | tuple[float, str]:
    """The tokens, or when it was told what."""
    try:
        return (await answers.whole())[0].outputs[0].token_ids
    except EngineError as error:
        return time.monotonic(), str(error)


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "seeded"])
def test_the_same_bits_from_engines_elsewhere(
    shared: Shared, folder: Path, expected: dict[SamplingParams, list[Texts]], params: SamplingParams
) -> None:
    """At once and one after another; both have some of them. Times are those of this side's clock."""

    async def play(engines: Engines) -> None:
        async with served(folder, [each.address for each in engines]) as service:
            at_once = await asyncio.gather(*(answer(service, prompt, params) for prompt in PROMPTS))
            assert at_once == expected[params]
            assert [await answer(service, prompt, params) for prompt in PROMPTS] == expected[params]
            statuses = of(service).replicas
            assert sum(each.num_requests for each in statuses) == 2 * len(PROMPTS)
            assert all(each.num_requests for each in statuses)
            assert [each.address for each in statuses] == [str(each.address) for each in engines]
            before = time.perf_counter()
            with start(service, PROMPTS[0], params) as running:
                stats = (await running.whole())[0].outputs[0].stats
            assert before < stats.arrived < (stats.finished or 0) < time.perf_counter()
            await until(lambda: service.metrics.ended["length"] == (2 * len(PROMPTS) + 1) * params.n)
            await until(lambda: of(service).gauges.num_free_blocks == of(service).gauges.num_blocks)

    shared(play)


def test_constraints_refusals_and_aborts_go_over_the_wire(shared: Shared, folder: Path) -> None:
    async def play(engines: Engines) -> None:
        async with served(folder, [engines[0].address]) as service:
            digits = replace(PARAMS[0], structured=Structured.regex("[0-9]{8}"), ignore_eos=False)
            (text,) = await answer(service, [1, 2, 3], digits)
            assert re.fullmatch("[0-9]{8}", service.tokenizer.decode(text, skip_special_tokens=True))
            with pytest.raises(Exception, match="adapter"):
                await answer(service, [1, 2, 3], PARAMS[0], adapter="none-such")
            with start(service, PROMPTS[0], ENDLESS) as running:
                await anext(aiter(running))
                assert engines[0].num_open == 1
            await until(lambda: engines[0].num_open == 0)
            await of(service).reset_prefix_cache()
            assert await answer(service, PROMPTS[0], PARAMS[0])

    shared(play)


def test_an_engine_process_that_dies_ends_its_own_requests_and_comes_back(
    shared: Shared, folder: Path, expected: dict[SamplingParams, list[Texts]]
) -> None:
    async def play(engines: Engines) -> None:
        async with served(folder, [each.address for each in engines]) as service:
            running = [start(service, prompt, ENDLESS) for prompt in PROMPTS[:6]]
            for answers in running:
                await anext(aiter(answers))
            theirs = [each.outputs[0].request_id in of(service)._replicas[1].client._open for each in running]
            assert sum(theirs) == 3
            begun = time.monotonic()
            os.kill(engines[1].supervisor.pid or 0, signal.SIGKILL)
            for is_lost, found, (whole,) in zip(
                theirs, await asyncio.gather(*map(end, running)), expected[ENDLESS], strict=False
            ):
                if is_lost:
                    told, words = found
                    assert told - begun < 1
                    assert re.search("engine 1 is lost.*send it again", words)
                else:
                    assert found == whole
            assert await answer(service, PROMPTS[0], PARAMS[0]) == expected[PARAMS[0]][0]
            await until(lambda: [each.state for each in of(service).replicas] == ["ready"] * 2)
            assert of(service).num_restarts == 1
            found = await asyncio.gather(*(answer(service, prompt, PARAMS[1]) for prompt in PROMPTS))
            assert found == expected[PARAMS[1]]
            assert service.metrics.ended["error"] == 3 and not service.metrics._open

    shared(play)


def test_a_way_that_is_cut_and_one_that_falls_silent(
    shared: Shared, folder: Path, expected: dict[SamplingParams, list[Texts]], proxy: Any
) -> None:
    """In mid-stream: at once, and after a heartbeat. The engine aborts what nobody waits for and serves again."""

    async def play(engines: Engines) -> None:
        slow = replace(ENDLESS, max_tokens=220)
        for fail, within_s in (("cut", 1.0), ("freeze", 1.0 + 0.5)):
            async with proxy(engines[0].address.port) as between:
                dial = dialer(folder, heartbeat_s=1.0)
                async with served(folder, [f"127.0.0.1:{between.port}"], dial) as service:
                    running = [start(service, prompt, slow) for prompt in PROMPTS[:4]]
                    for answers in running:
                        await anext(aiter(answers))
                    os.kill(engines[0].supervisor.pid or 0, signal.SIGSTOP)  # so that none ends before
                    begun = time.monotonic()
                    getattr(between, fail)()
                    for found in await asyncio.gather(*map(end, running)):
                        assert isinstance(found, tuple), "no answer was whole"
                        assert found[0] - begun < within_s
                    os.kill(engines[0].supervisor.pid or 0, signal.SIGCONT)
                    await until(lambda: engines[0].num_open == 0)
                    if fail == "cut":
                        await until(lambda: of(service).state is State.READY)
                        assert await answer(service, PROMPTS[0], PARAMS[0]) == expected[PARAMS[0]][0]

    shared(play)


def test_twenty_servers_come_and_go_and_leave_nothing(
    shared: Shared, folder: Path, expected: dict[SamplingParams, list[Texts]]
) -> None:
    """Each goes in mid-stream. No descriptor, thread, task or block is left; the prefix cache stays for the next."""

    async def play(engines: Engines) -> None:
        engine = engines[0]

        def left() -> tuple[int, int, int]:
            return len(os.listdir("/proc/self/fd")), threading.active_count(), len(asyncio.all_tasks())

        async def round_() -> None:
            metrics = Metrics("tiny")
            group = RemoteEngines([str(engine.address)], dialer(folder), metrics.of_replica)
            await group.wait_until_ready()
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            client = group.place(Request(id="0", prompt_ids=PROMPTS[0], params=ENDLESS))
            told: list[Any] = []

            def listen(event: Any) -> None:
                told.append(event)
                if not done.done():
                    done.set_result(None)

            client.submit(Request(id="0", prompt_ids=PROMPTS[0], params=ENDLESS), listen)
            await done
            await group.close()
            assert isinstance(told[-1], EngineError)
            await until(lambda: not engine.is_connected and engine.num_open == 0)

        await round_()
        before, gauges = left(), engine.supervisor.gauges
        for _ in range(20):
            await round_()
        await until(lambda: all(now <= then for now, then in zip(left(), before, strict=True)), 10)
        assert gauges is not None
        async with served(folder, [engine.address]) as service:
            assert await answer(service, PROMPTS[0], PARAMS[0]) == expected[PARAMS[0]][0]
            now = of(service).gauges
            assert now.num_prefix_hit_tokens - gauges.num_prefix_hit_tokens >= 20 * 16
            await until(lambda: of(service).gauges.num_free_blocks == of(service).gauges.num_blocks)

    shared(play)


def test_an_engine_serves_one_server_at_a_time(shared: Shared, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second is told, and has it once the first has gone."""

    async def play(engines: Engines) -> None:
        async with served(folder, [engines[0].address]) as first:
            second = RemoteEngines([str(engines[0].address)], dialer(folder), Metrics("second").of_replica)
            await until(lambda: "Another server has this engine" in caplog.text)
            assert second.state is State.LOADING
            assert await answer(first, PROMPTS[0], PARAMS[0])
        try:
            async with asyncio.timeout(120):
                await second.wait_until_ready()
        finally:
            await second.close()

    shared(play)


def test_engines_are_added_and_removed_while_it_serves(
    shared: Shared, folder: Path, expected: dict[SamplingParams, list[Texts]]
) -> None:
    """One that is removed ends what it runs first; then it is free for another server. Its number is used again."""

    async def play(engines: Engines) -> None:
        one, two = (str(each.address) for each in engines)
        async with served(folder, [one]) as service:
            group = of(service)
            for wrong in (one, "nowhere"):
                with pytest.raises(InputError, match="--engine"):
                    group.add_engine(wrong)
            group.add_engine(two)
            await until(lambda: [each.state for each in group.replicas] == ["ready"] * 2)
            running = [start(service, prompt, ENDLESS) for prompt in PROMPTS]
            for answers in running:
                await anext(aiter(answers))
            assert group.num_places == 8
            removing = asyncio.create_task(group.remove_engine(one))
            assert await answer(service, PROMPTS[0], PARAMS[0]) == expected[PARAMS[0]][0]
            assert group.num_places == 4
            await removing
            assert group.addresses == [two]
            await until(lambda: not engines[0].is_connected)
            assert [await end(answers) for answers in running] == [whole for (whole,) in expected[ENDLESS]]
            with pytest.raises(InputError, match=f"no engine at {one}; there are {two}"):
                await group.remove_engine(one)
            group.add_engine(one)
            await until(lambda: [each.state for each in group.replicas] == ["ready"] * 2)
            assert group.num_places == 8
            found = await asyncio.gather(*(answer(service, prompt, PARAMS[0]) for prompt in PROMPTS))
            assert found == expected[PARAMS[0]]
            await group.remove_engine(one, drain_s=0)
            await group.remove_engine(two, drain_s=0)
            assert group.state is State.RESTARTING and group.num_places == 0
            with pytest.raises(EngineError):
                group.place(Request(id="x", prompt_ids=[1], params=PARAMS[0]))

    shared(play)


def test_membership_gives_the_engines(shared: Shared, folder: Path) -> None:
    """A server that begins with none; what it raises ends the server."""

    async def play(engines: Engines) -> None:
        go = asyncio.Event()

        async def membership(group: RemoteEngines) -> None:
            group.add_engine(str(engines[0].address))
            await go.wait()
            raise EngineError("the cluster is gone")

        group = RemoteEngines([], dialer(folder), Metrics("tiny").of_replica, membership=membership)
        assert group.state is State.LOADING and group.ready is None
        await group.wait_until_ready()
        go.set()
        with pytest.raises(EngineError, match="the cluster is gone"):
            await asyncio.shield(group.finished)
        await group.close()

    shared(play)


def test_adapters_are_had_by_all_and_by_one_that_comes_back(shared: Shared, folder: Path, tmp_path: Path) -> None:
    shapes = {name: info.shape for name, info in Weights(folder).infos.items()}
    path = write_adapter(tmp_path / "fr", shapes, seed=1, size=0.5)

    async def play(engines: Engines) -> None:
        async with served(folder, [each.address for each in engines]) as service:
            group = of(service)
            plain = await answer(service, PROMPTS[0], PARAMS[0])
            with pytest.raises(InputError):
                await group.load_adapter(AdapterSource("fr", str(tmp_path / "none")), False)
            await group.load_adapter(AdapterSource("fr", str(path)), False)
            french = await answer(service, PROMPTS[0], PARAMS[0], adapter="fr")
            assert french != plain
            engines[1].supervisor.adapters.clear()  # as one that is started anew elsewhere
            os.kill(engines[1].supervisor.pid or 0, signal.SIGKILL)
            await until(lambda: group._replicas[1].state is not State.READY)
            await until(lambda: "fr" in group._replicas[1].adapters and group._replicas[1].state is State.READY)
            both = await asyncio.gather(*(answer(service, PROMPTS[0], PARAMS[0], adapter="fr") for _ in range(8)))
            assert both == [french] * 8
        async with served(folder, [each.address for each in engines]) as service:  # the next server finds them
            await until(lambda: all("fr" in each.adapters for each in of(service)._replicas))
            assert await answer(service, PROMPTS[0], PARAMS[0], adapter="fr") == french
            await of(service).unload_adapter("fr")
            assert not any(each.supervisor.adapters for each in engines)

    shared(play)


@pytest.mark.parametrize("look_s", [0.0, 0.05])
def test_an_engine_that_drains_ends_what_it_runs(
    look_s: float,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    secret: Path,
    expected: dict[SamplingParams, list[Texts]],
) -> None:
    """And closes behind the last events, also where it looks in the moment in which they come."""
    monkeypatch.setattr(headless_module, "_LOOK_S", look_s)

    async def play() -> None:
        async with headless(folder, secret) as engine, served(folder, [engine.address]) as service:
            running = [start(service, prompt, ENDLESS) for prompt in PROMPTS[:4]]
            for answers in running:
                await anext(aiter(answers))
            closing = asyncio.create_task(engine.close(drain_s=30))
            await until(lambda: of(service).state is not State.READY)
            with pytest.raises(EngineError):
                of(service).place(Request(id="x", prompt_ids=[1], params=PARAMS[0]))
            assert [await end(answers) for answers in running] == [whole for (whole,) in expected[ENDLESS][:4]]
            await closing
            assert await until(lambda: of(service)._replicas[0].failure is not None) is None

    asyncio.run(play())


async def refusal(folder: Path, address: object, dial: Dialer) -> str:
    """Why a server of this one engine ends at its start."""
    group = RemoteEngines([str(address)], dial, Metrics("tiny").of_replica)
    try:
        async with asyncio.timeout(120):
            with pytest.raises(ConfigError) as found:
                await group.wait_until_ready()
        assert group.state is State.FAILED
        return str(found.value)
    finally:
        await group.close()


def test_what_ends_a_start(shared: Shared, folder: Path, tmp_path: Path) -> None:
    async def play(engines: Engines) -> None:
        address = engines[0].address
        text = await refusal(folder, address, dialer(folder, secret=b"another secret, long enough"))
        assert f"Engine {address}: It refused: The other side has another secret." in text
        other = write_tiny_model(tmp_path / "other", "llama", seed=1)
        text = await refusal(other, address, dialer(other))
        assert "from other files" in text and model_digest(folder)[:12] in text and model_digest(other)[:12] in text

        async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        stranger = await asyncio.start_server(http, "127.0.0.1", 0)
        port = stranger.sockets[0].getsockname()[1]
        assert "no engine of specserve" in await refusal(folder, f"127.0.0.1:{port}", dialer(folder))
        stranger.close()

    shared(play)


def test_who_is_not_there_yet_is_waited_for(folder: Path, secret: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No such name, nobody at the port: said in the log, and tried again; in time it is an end."""

    async def play() -> None:
        metrics = Metrics("tiny")
        with caplog.at_level(logging.ERROR):
            group = RemoteEngines(["no-such-host.invalid:7000", "127.0.0.1:1"], dialer(folder), metrics.of_replica)
            await until(lambda: "cannot be resolved" in caplog.text and "cannot be connected to" in caplog.text)
            assert group.state is State.LOADING and not group.finished.done()
            async with headless(folder, secret) as engine:
                group.add_engine(str(engine.address))
                await group.wait_until_ready()
                await group.close()
        late = Timeouts(start_s=0.3)
        group = RemoteEngines(["127.0.0.1:1"], dialer(folder), metrics.of_replica, late)
        with pytest.raises(EngineError, match=r"No engine was ready after 0 s\. Engine 127\.0\.0\.1:1: It cannot be"):
            await group.wait_until_ready()
        await group.close()

    asyncio.run(play())


def test_engines_that_differ_do_not_serve_together(
    shared: Shared, folder: Path, secret: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(engines: Engines) -> None:
        async with (
            headless(folder, secret, max_model_len=128) as other,
            served(folder, [engines[0].address]) as service,
        ):
            await other.wait_until_ready()
            of(service).add_engine(str(other.address))
            await until(lambda: "Its max_model_len is 128, and that of the other engines 256." in caplog.text)
            assert [each.state for each in of(service).replicas] == ["ready", "loading"]
            assert await answer(service, PROMPTS[0], PARAMS[0])

    shared(play)


def test_an_engine_that_cannot_load_says_why(tmp_path: Path, folder: Path, secret: Path) -> None:
    async def play() -> None:
        engine = HeadlessEngine({"model": str(folder), **OPTIONS, "kv_cache_gib": 1e5}, listening(secret))
        group = RemoteEngines([str(await engine.start())], dialer(folder), Metrics("tiny").of_replica)
        with pytest.raises(ConfigError, match="It failed: kv_cache_gib is 100000"):
            await group.wait_until_ready()
        with pytest.raises(Exception, match="kv_cache_gib is 100000"):
            await engine.wait_until_ready()
        await group.close()
        await engine.close()
        with pytest.raises(ModelError, match="nothing"):
            HeadlessEngine({"model": str(tmp_path / "nothing")}, listening(secret))

    asyncio.run(play())


def listening(secret: Path, port: int = 0) -> EngineListenOptions:
    return EngineListenOptions(listen=f"127.0.0.1:{port}", secret_file=secret)


def test_a_port_that_is_taken(shared: Shared, folder: Path, secret: Path) -> None:
    async def play(engines: Engines) -> None:
        options = {"model": str(folder), **OPTIONS}
        second = HeadlessEngine(options, listening(secret, engines[0].address.port))
        with pytest.raises(
            ConfigError, match=rf"--listen 127\.0\.0\.1:{engines[0].address.port} cannot be listened on"
        ):
            await second.start()
        await second.close()
        nowhere = EngineListenOptions(listen="no-such-host.invalid:1", secret_file=secret, insecure_no_tls=True)
        with pytest.raises(ConfigError, match="cannot be resolved"):
            await HeadlessEngine(options, nowhere).start()

    shared(play)


def test_messages_that_no_server_sends_end_its_connection_only(shared: Shared, folder: Path) -> None:
    """Frames with the right tags: noise, reports, commands of another process, a request whose id is in use."""

    async def play(engines: Engines) -> None:
        import msgspec

        from specserve.server.engine.messages import Configure, Failed, Stop

        encode = msgspec.msgpack.encode
        request = encode(Request(id="0", prompt_ids=[1, 2, 3], params=ENDLESS))
        wrong = [
            [b"\xff" * 100], [b"\x80\x04\x95."], [encode(Stop())], [encode(Configure({"model": "x"}))],
            [encode(Failed("x"))], [request, request], [request[:-5]],
        ]  # fmt: skip
        pid = engines[0].supervisor.pid
        for messages in wrong:
            async with served(folder, [engines[0].address]) as service:
                client: Any = of(service)._replicas[0].client
                for message in messages:
                    client._write(message)
                error: LinkError = await asyncio.shield(client.over)
                assert str(error)
                await until(lambda: of(service).state is State.READY)
        assert engines[0].supervisor.pid == pid, "the engine's own process never noticed"
        async with served(folder, [engines[0].address]) as service:  # a request whose content is wrong is refused alone
            with pytest.raises(Exception, match="token"):
                await answer(service, [10**6], PARAMS[0])
            assert await answer(service, PROMPTS[0], PARAMS[0])

    shared(play)


def test_damaged_commands_harm_nobody_else(shared: Shared, folder: Path) -> None:
    """Requests of which bytes were changed, lost or doubled before their tags were made: each is taken, refused or the
    end of its connection. The engine's process goes on, and nothing stays open."""

    async def play(engines: Engines) -> None:
        import msgspec

        draw, pid, num_over = random.Random(3), engines[0].supervisor.pid, 0
        async with served(folder, [engines[0].address]) as service:
            for number in range(80):
                await until(lambda: of(service).state is State.READY)
                client: Any = of(service)._replicas[0].client
                params = replace(PARAMS[number % 2], stop=("a",), logit_bias={3: 1.0}, max_tokens=4)
                fields: dict[str, Any] = {"salt": b"x", "prediction": (1, 2, 3), "drafter": "ngram"}
                request = Request(id=f"r{number}", prompt_ids=list(range(1, 20)), params=params, **fields)
                message = bytearray(msgspec.msgpack.encode(request))
                for _ in range(1 + number % 2):
                    at = draw.randrange(len(message))
                    message[at : at + draw.randrange(2)] = draw.randbytes(draw.randrange(2))
                client._write(bytes(message))
                await asyncio.sleep(0.005)
                num_over += client.over.done()
            assert num_over > 10
            assert engines[0].supervisor.pid == pid
            await until(lambda: engines[0].num_open == 0)
            await until(lambda: of(service).state is State.READY)
            assert await answer(service, PROMPTS[0], PARAMS[0])

    shared(play)


def test_reports_that_no_engine_sends_end_the_connection_only(shared: Shared, folder: Path) -> None:
    """To a server: noise, a second Ready, the answer to nothing that was asked."""

    async def play(engines: Engines) -> None:
        import msgspec

        from specserve.server.engine.messages import AdapterChanged, Stop

        encode = msgspec.msgpack.encode
        async with served(folder, [each.address for each in engines]) as service:
            ready = of(service)._replicas[0].ready
            assert ready is not None
            for number, message in enumerate(
                (b"\xff" * 100, encode(Stop()), encode(AdapterChanged(77, None)), encode(ready))
            ):
                session = engines[0]._session
                assert session is not None
                session.connection.send(message)
                await until(lambda: of(service).num_restarts > number)  # noqa: B023
                assert of(service).state is State.READY, "the other one serves"
                await until(lambda: [each.state for each in of(service).replicas] == ["ready"] * 2)
            assert await answer(service, PROMPTS[0], PARAMS[0])

    shared(play)


def test_a_digest_is_of_what_the_model_computes(tmp_path: Path) -> None:
    one, two = (write_tiny_model(tmp_path / name, "llama") for name in ("one", "two"))
    assert model_digest(one) == model_digest(two) != model_digest(write_tiny_model(tmp_path / "3", "llama", seed=1))
    (two / "generation_config.json").write_text("{}", "utf-8")
    assert model_digest(one) == model_digest(two)
    weights = next(two.glob("*.safetensors"))
    with weights.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        byte = file.read(1)
        file.seek(-100, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    assert model_digest(one) != model_digest(two)
