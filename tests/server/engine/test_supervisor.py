"""The engine in a process of its own: what it says, and what happens when it dies, hangs or cannot start."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from specserve.engine.request import Request
from specserve.errors import EngineError
from specserve.llm import LLM
from specserve.server.engine.supervisor import Patience, State, Supervisor
from specserve.server.metrics import Metrics
from specserve.server.service import Answers, Prepared, Service
from specserve.server.trials import Trials
from specserve.server.wire.errors import WireError
from specserve.testing import write_tiny_model
from specserve.text.tokenizer import Tokenizer
from specserve.types import SamplingParams

OPTIONS: dict[str, Any] = {"threads": 1, "max_num_seqs": 4, "kv_cache_gib": 0.01, "max_model_len": 256}
PATIENCE = Patience(stall_s=1.5)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    with LLM(str(folder), **OPTIONS) as llm:
        return llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids


@asynccontextmanager
async def running(folder: Path, patience: Patience = PATIENCE, **options: Any) -> AsyncIterator[Service]:
    metrics = Metrics("tiny")
    supervisor = Supervisor({"model": str(folder), **OPTIONS, **options}, metrics, patience)
    service = Service(supervisor, Tokenizer(folder), metrics, Trials(folder))
    try:
        await supervisor.wait_until_ready()
        yield service
    finally:
        await supervisor.close()
        service.close()


Play = Callable[[Service], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def on_one_engine(folder: Path) -> Iterator[Callable[[Play], None]]:
    """Runs what leaves its engine as it was, on one that such tests share."""
    with asyncio.Runner() as runner:
        lasting = running(folder)
        service = runner.run(lasting.__aenter__())

        def run(play: Play) -> None:
            before = service.supervisor.pid, service.supervisor.num_restarts
            runner.run(play(service))
            assert (service.supervisor.pid, service.supervisor.num_restarts) == before

        yield run
        runner.run(lasting.__aexit__(None, None, None))


def start(service: Service, prompt_ids: list[int], params: SamplingParams) -> Answers:
    request = Request(id=service.new_id(), prompt_ids=prompt_ids, params=params)
    return service.start([Prepared(request)])


async def answer(service: Service, params: SamplingParams = GREEDY) -> list[int]:
    with start(service, PROMPT, params) as running:
        return (await running.whole())[0].outputs[0].token_ids


def processor_s(pid: int | None) -> float:
    """Seconds that a process has computed."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, after_name[11:13])) / os.sysconf("SC_CLK_TCK")


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def running_again(service: Service, pid: int | None) -> None:
    supervisor = service.supervisor
    await until(lambda: supervisor.state is State.READY and supervisor.pid not in (pid, None))


def test_answers_are_those_of_the_sdk(on_one_engine: Callable[[Play], None], expected: list[int]) -> None:
    async def play(service: Service) -> None:
        many = [answer(service) for _ in range(6)]
        assert await asyncio.gather(*many) == [expected] * 6
        gauges = service.supervisor.client.gauges
        assert gauges is not None
        assert (gauges.num_running, gauges.num_waiting, gauges.num_free_blocks) == (0, 0, gauges.num_blocks)
        assert service.supervisor.client.num_open == 0

    on_one_engine(play)


def test_a_request_that_is_wrong_is_refused_alone(on_one_engine: Callable[[Play], None], expected: list[int]) -> None:
    async def play(service: Service) -> None:
        good = asyncio.create_task(answer(service))
        with pytest.raises(WireError, match="token id 100000") as caught:
            await start(service, [100_000], GREEDY).whole()
        assert caught.value.param == "prompt"
        assert await good == expected
        assert service.supervisor.num_restarts == 0

    on_one_engine(play)


def test_what_a_drafter_learned_outlives_the_engine(folder: Path, expected: list[int], tmp_path: Path) -> None:
    """An engine that is asked to end closes its drafter, which saves; the next one begins with that."""
    options: dict[str, Any] = {"drafter_options": {"store_path": str(tmp_path / "texts")}, "adaptive": False}

    async def play() -> float:
        async with running(folder, **options) as service:
            with start(service, PROMPT, GREEDY) as answers:
                found = (await answers.whole())[0].outputs[0]
            assert found.token_ids == expected
            return found.stats.mean_acceptance_length

    first, second = asyncio.run(play()), asyncio.run(play())
    assert second > first + 0.5


def test_an_answer_that_is_left_is_aborted(on_one_engine: Callable[[Play], None]) -> None:
    async def play(service: Service) -> None:
        client = service.supervisor.client
        with start(service, PROMPT, ENDLESS) as left:
            async for _ in left:
                break
        assert client.num_open == 0
        await until(lambda: client.gauges is not None and client.gauges.num_free_blocks == client.gauges.num_blocks)

    on_one_engine(play)


def test_a_request_that_was_told_of_and_never_comes(on_one_engine: Callable[[Play], None], expected: list[int]) -> None:
    """The engine waits for it awake for a moment, and then rests as before."""

    async def play(service: Service) -> None:
        pid = service.supervisor.pid
        assert await answer(service) == expected
        await asyncio.sleep(2.5)  # in which it makes use of its first pause
        for _ in range(5):
            service.expect()
        await asyncio.sleep(0.1)
        before = processor_s(pid)
        await asyncio.sleep(1)
        assert processor_s(pid) - before <= 0.05
        service.expect()
        assert await answer(service) == expected

    on_one_engine(play)


async def _kill(service: Service) -> None:
    os.kill(service.supervisor.pid or 0, signal.SIGKILL)


async def _hang(service: Service) -> None:
    os.kill(service.supervisor.pid or 0, signal.SIGSTOP)


@pytest.mark.parametrize(("fault", "words"), [(_kill, "status -9"), (_hang, "no progress")])
def test_a_lost_engine_is_told_and_replaced(
    folder: Path, expected: list[int], fault: Callable[[Service], Awaitable[None]], words: str
) -> None:
    """Everybody who waits hears of it, and the next engine gives the same answers."""

    async def play() -> None:
        async with running(folder) as service:
            pid = service.supervisor.pid
            open_ = [start(service, PROMPT, ENDLESS) for i in range(6)]
            async for _ in open_[0]:
                break
            await fault(service)
            for result in await asyncio.gather(*(each.whole() for each in open_), return_exceptions=True):
                assert isinstance(result, EngineError)
                assert words in str(result)
            with pytest.raises(WireError, match="being started again"):
                start(service, PROMPT, GREEDY)
            await running_again(service, pid)
            assert await answer(service) == expected
            assert service.supervisor.num_restarts == 1

    asyncio.run(play())


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with room for prompts that take seconds."""
    folder = tmp_path_factory.mktemp("long")
    return write_tiny_model(folder, "llama", max_position_embeddings=16384, num_hidden_layers=8)


@asynccontextmanager
async def patient(folder: Path, patience: Patience, **options: Any) -> AsyncIterator[Service]:
    """A server for long prompts that is as patient as it is told to be."""
    async with running(folder, patience, max_model_len=16384, kv_cache_gib=0.3, **options) as service:
        yield service


def test_an_engine_whose_steps_lead_nowhere_is_replaced(
    long_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that drops in each step what the one before has computed livelocks; its steps are quick."""
    fault = (
        "import sys\n"
        "if 'specserve.server.engine.process' in sys.orig_argv:\n"
        "    from specserve.engine import scheduler\n"
        "    pick = scheduler.Scheduler.pick\n"
        "    def livelock(self):\n"
        "        for seq in list(self.running):\n"
        "            self._preempt(seq)\n"
        "        return pick(self)\n"
        "    scheduler.Scheduler.pick = livelock\n"
    )
    (tmp_path / "sitecustomize.py").write_text(fault, "utf-8")

    async def play() -> None:
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        options = {"max_num_batched_tokens": 16, "prefix_caching": False}
        async with patient(long_folder, Patience(loop_s=1.0), **options) as service:
            pid = service.supervisor.pid
            monkeypatch.delenv("PYTHONPATH")
            with pytest.raises(EngineError, match="brought no request further"):
                await start(service, PROMPT * 100, GREEDY).whole()
            await running_again(service, pid)

    asyncio.run(play())


def test_a_prompt_of_many_silent_steps_is_no_livelock(long_folder: Path) -> None:
    async def play() -> None:
        options = {"max_num_batched_tokens": 4}
        async with patient(long_folder, Patience(loop_s=0.3), **options) as service:
            begun = time.monotonic()
            await start(service, PROMPT * 1000, GREEDY).whole()
            assert time.monotonic() - begun > 0.6, "it is silent for longer than a livelock may be"
            assert service.supervisor.num_restarts == 0

    asyncio.run(play())


def test_a_long_step_is_no_hang(long_folder: Path) -> None:
    """All but the first tokens of a prompt in one step, which takes longer than an engine may stand still."""
    patience = Patience(stall_s=1.2)

    async def play() -> None:
        options = {"max_num_batched_tokens": 16384, "max_step_ms": 1e6}
        async with patient(long_folder, patience, **options) as service:
            begun, pid = time.monotonic(), service.supervisor.pid
            params = SamplingParams(temperature=0, max_tokens=1)
            await start(service, PROMPT * 4000, params).whole()
            gauges = service.supervisor.client.gauges
            assert gauges is not None
            assert gauges.num_steps <= 3
            assert time.monotonic() - begun > 1.5 * patience.stall_s, "or the step was not long"
            assert (service.supervisor.pid, service.supervisor.num_restarts) == (pid, 0)

    asyncio.run(play())


def test_a_hang_inside_a_long_step_is_noticed(long_folder: Path) -> None:
    async def play() -> None:
        options = {"max_num_batched_tokens": 16384, "max_step_ms": 1e6}
        async with patient(long_folder, PATIENCE, **options) as service:
            pid = service.supervisor.pid
            long = start(service, PROMPT * 4000, GREEDY)
            before = processor_s(pid)
            await until(lambda: processor_s(pid) > before + 0.3)
            await _hang(service)
            begun = time.monotonic()
            with pytest.raises(EngineError, match="no progress"):
                await long.whole()
            assert time.monotonic() - begun < 10
            await running_again(service, pid)

    asyncio.run(play())


def test_a_pause_of_everything_is_no_hang(on_one_engine: Callable[[Play], None]) -> None:
    """As when a virtual machine is suspended: the engine stands still, and so does who watches it."""

    async def play(service: Service) -> None:
        pid = service.supervisor.pid
        with start(service, PROMPT, ENDLESS) as paused:
            async for _ in paused:
                break
            os.kill(pid or 0, signal.SIGSTOP)
            time.sleep(2 * PATIENCE.stall_s)
            os.kill(pid or 0, signal.SIGCONT)
            assert len((await paused.whole())[0].outputs[0].token_ids) == 200
        assert (service.supervisor.pid, service.supervisor.num_restarts) == (pid, 0)

    on_one_engine(play)


def test_an_engine_that_cannot_be_understood_is_replaced(folder: Path, expected: list[int]) -> None:
    """Whatever keeps the messages from being heard: nobody waits for what will never come."""

    async def play() -> None:
        async with running(folder) as service:
            pid, client = service.supervisor.pid, service.supervisor.client

            def garbled(message: bytes) -> Any:
                raise ValueError("garbled")

            client._decode = garbled
            with pytest.raises(EngineError, match="cannot be read"):
                await start(service, PROMPT, ENDLESS).whole()
            await running_again(service, pid)
            assert await answer(service) == expected

    asyncio.run(play())


def test_a_start_without_means_is_tried_again(folder: Path, expected: list[int]) -> None:
    async def play() -> None:
        async with running(folder) as service:
            pid, nest = service.supervisor.pid, service.supervisor._nest
            take, failures = nest.take, iter([OSError(24, "Too many open files")])

            def poor() -> Any:
                for failure in failures:
                    raise failure
                return take()

            nest.take = poor  # type: ignore[method-assign]
            await _kill(service)
            await running_again(service, pid)
            assert await answer(service) == expected
            assert service.supervisor.num_restarts == 2

    asyncio.run(play())


def test_who_looks_after_engines_does_not_die_in_silence(folder: Path) -> None:
    async def play() -> None:
        async with running(folder) as service:
            supervisor = service.supervisor

            def wrong() -> Any:
                raise ZeroDivisionError("a slip")

            supervisor._nest.take = wrong  # type: ignore[method-assign]
            await _kill(service)
            with pytest.raises(EngineError, match="ZeroDivisionError: a slip"):
                await asyncio.wait_for(asyncio.shield(supervisor.finished), 60)
            assert supervisor.state is State.FAILED

    asyncio.run(play())


def test_clients_are_not_told_what_an_engine_said_at_its_end(tmp_path: Path) -> None:
    """It may name files; the one who started the server hears it."""

    async def play() -> None:
        supervisor = Supervisor({"model": str(tmp_path / "nothing"), **OPTIONS}, Metrics("tiny"), PATIENCE)
        client = supervisor._client
        while client is None:
            await asyncio.sleep(0.01)
            client = supervisor._client
        with pytest.raises(EngineError) as told:
            await client.ready
        with pytest.raises(EngineError, match="nothing"):
            await supervisor.wait_until_ready()
        assert "nothing" not in str(told.value)
        await supervisor.close()

    asyncio.run(play())


def test_an_idle_engine_is_never_thought_to_hang(on_one_engine: Callable[[Play], None], expected: list[int]) -> None:
    async def play(service: Service) -> None:
        pid = service.supervisor.pid
        await asyncio.sleep(2 * PATIENCE.stall_s)
        assert service.supervisor.pid == pid
        assert await answer(service) == expected

    on_one_engine(play)


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    async def play() -> None:
        supervisor = Supervisor({"model": str(tmp_path / "nothing"), **OPTIONS}, Metrics("none"), PATIENCE)
        with pytest.raises(EngineError, match="nothing"):
            await supervisor.wait_until_ready()
        assert supervisor.state is State.FAILED
        assert supervisor.num_restarts == 0, "another start would fail the same way"
        await supervisor.close()

    asyncio.run(play())


def test_bytes_that_are_no_message_are_dropped(on_one_engine: Callable[[Play], None], expected: list[int]) -> None:
    async def play(service: Service) -> None:
        pipe = service.supervisor.client._pipe
        for junk in (b"", b"\x80\x04\x95.", b"\xff" * 100, b"\x81\xa4type\xa5eval!"):
            pipe.send(junk)
        assert await answer(service) == expected

    on_one_engine(play)


def test_the_engine_ends_with_its_parent(folder: Path) -> None:
    """Even when that is killed and can tell nobody."""
    program = (
        "import asyncio, sys\n"
        "from specserve.server.engine.supervisor import Supervisor\n"
        "from specserve.server.metrics import Metrics\n"
        "async def main():\n"
        "    s = Supervisor(eval(sys.argv[1]), Metrics('tiny'))\n"
        "    await s.wait_until_ready()\n"
        "    print(s.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )

    async def play() -> None:
        import sys

        options = repr({"model": str(folder), **OPTIONS})
        parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, options, stdout=-1)
        assert parent.stdout is not None
        pid = int(await parent.stdout.readline())
        parent.kill()
        await parent.wait()
        await until(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid), 5)

    asyncio.run(play())


def _is_zombie(pid: int) -> bool:
    return " Z " in Path(f"/proc/{pid}/stat").read_text("utf-8")
