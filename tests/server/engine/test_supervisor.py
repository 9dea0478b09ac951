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
from specserve.errors import EngineError, ModelError
from specserve.llm import LLM
from specserve.outputs import CompletionOutput
from specserve.server.answers import Answers, Prepared
from specserve.server.chats import Chats
from specserve.server.engine.keeper import State, Timeouts
from specserve.server.engine.spawn import EngineSpawner
from specserve.server.engine.supervisor import Supervisor
from specserve.server.grammar_validator import GrammarValidator
from specserve.server.metrics import Metrics
from specserve.server.service import Service
from specserve.server.wire.errors import WireError
from specserve.testing import write_tiny_model
from specserve.text.tokenizer import Tokenizer
from specserve.types import SamplingParams

OPTIONS: dict[str, Any] = {"threads": 1, "max_num_seqs": 4, "kv_cache_gib": 0.01, "max_model_len": 256}
TIMEOUTS = Timeouts(stall_s=1.5)
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
async def running(folder: Path, timeouts: Timeouts = TIMEOUTS, **options: Any) -> AsyncIterator[Service]:
    metrics = Metrics("tiny")
    supervisor = Supervisor({"model": str(folder), **OPTIONS, **options}, metrics, timeouts)
    service = Service(supervisor, Tokenizer(folder), metrics, GrammarValidator(folder), Chats(folder), 2**20)
    try:
        await supervisor.wait_until_ready()
        yield service
    finally:
        await supervisor.close()
        service.close()


Play = Callable[[Service], Coroutine[Any, Any, None]]
Shared = Callable[..., None]


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Shared]:
    """`shared(play, restarts=1)`: a play on a service that tests share. An engine runs before it and after it: the
    same one, or the last of as many as were started again."""
    with asyncio.Runner() as runner:
        lasting = running(folder)
        service = runner.run(lasting.__aenter__())
        supervisor = service.supervisor

        def run(play: Play, restarts: int = 0) -> None:
            pid, before = supervisor.pid, supervisor.num_restarts
            runner.run(play(service))
            assert (supervisor.num_restarts - before, supervisor.state) == (restarts, State.READY)
            assert (supervisor.pid == pid) == (restarts == 0)

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


async def replaced(service: Service, pid: int | None) -> None:
    """Another engine is started, which need not be ready."""
    await until(lambda: service.supervisor.pid not in (pid, None))
    assert service.supervisor.num_restarts == 1


async def running_again(service: Service, pid: int | None) -> None:
    supervisor = service.supervisor
    await until(lambda: supervisor.state is State.READY and supervisor.pid not in (pid, None))


def test_answers_are_those_of_the_sdk(shared: Shared, expected: list[int]) -> None:
    async def play(service: Service) -> None:
        many = [answer(service) for _ in range(6)]
        assert await asyncio.gather(*many) == [expected] * 6
        gauges = service.supervisor.client.gauges
        assert gauges is not None
        assert (gauges.num_running, gauges.num_waiting, gauges.num_free_blocks) == (0, 0, gauges.num_blocks)
        assert service.supervisor.client.num_open == 0

    shared(play)


def test_a_request_that_is_wrong_is_refused_alone(shared: Shared, expected: list[int]) -> None:
    async def play(service: Service) -> None:
        good = asyncio.create_task(answer(service))
        with pytest.raises(WireError, match="token id 100000") as caught:
            await start(service, [100_000], GREEDY).whole()
        assert caught.value.param == "prompt"
        assert await good == expected

    shared(play)


def test_what_a_drafter_learned_outlives_the_engine(folder: Path, expected: list[int], tmp_path: Path) -> None:
    """An engine that is asked to end closes its drafter, which saves; the next one begins with that."""
    options: dict[str, Any] = {"drafter_options": {"store_path": str(tmp_path / "texts")}, "adaptive": False}

    async def play() -> CompletionOutput:
        async with running(folder, **options) as service:
            with start(service, PROMPT, GREEDY) as answers:
                return (await answers.whole())[0].outputs[0]

    first = asyncio.run(play())
    with LLM(str(folder), **OPTIONS, **options) as llm:
        second = llm.generate([PROMPT], GREEDY)[0].outputs[0]
    assert first.token_ids == second.token_ids == expected
    assert second.stats.mean_acceptance_length > first.stats.mean_acceptance_length + 0.5


def test_an_answer_that_is_left_is_aborted(shared: Shared) -> None:
    async def play(service: Service) -> None:
        client = service.supervisor.client
        with start(service, PROMPT, ENDLESS) as left:
            async for _ in left:
                break
        assert client.num_open == 0
        await until(lambda: client.gauges is not None and client.gauges.num_free_blocks == client.gauges.num_blocks)

    shared(play)


def test_a_request_that_was_told_of_and_never_comes(shared: Shared, expected: list[int]) -> None:
    """The engine waits for it awake for a moment, and then rests as before: one that has nothing to do is never thought
    to hang."""

    async def play(service: Service) -> None:
        pid = service.supervisor.pid
        assert await answer(service) == expected
        await asyncio.sleep(2 * TIMEOUTS.stall_s)  # in which it makes use of its first pause
        for _ in range(5):
            service.wake_engine()
        await asyncio.sleep(0.1)
        before = processor_s(pid)
        await asyncio.sleep(1)
        assert processor_s(pid) - before <= 0.05
        service.wake_engine()
        assert await answer(service) == expected

    shared(play)


async def _kill(service: Service) -> None:
    os.kill(service.supervisor.pid or 0, signal.SIGKILL)


async def _hang(service: Service) -> None:
    os.kill(service.supervisor.pid or 0, signal.SIGSTOP)


@pytest.mark.parametrize(("fault", "words"), [(_kill, "status -9"), (_hang, "no progress")])
def test_a_lost_engine_is_told_and_replaced(
    shared: Shared, expected: list[int], fault: Callable[[Service], Awaitable[None]], words: str
) -> None:
    """Everybody who waits hears of it, and the next engine gives the same answers."""

    async def play(service: Service) -> None:
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

    shared(play, restarts=1)


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with room for prompts that take seconds."""
    folder = tmp_path_factory.mktemp("long")
    return write_tiny_model(folder, "llama", max_position_embeddings=16384, num_hidden_layers=8)


@asynccontextmanager
async def patient(folder: Path, timeouts: Timeouts, **options: Any) -> AsyncIterator[Service]:
    """A server for long prompts that is as patient as it is told to be."""
    async with running(folder, timeouts, max_model_len=16384, kv_cache_gib=0.3, **options) as service:
        yield service


def livelock(folder: Path, file: Path) -> None:
    """Makes `folder` one from which engines get a fault while `file` is there: their schedulers drop in each step what
    the one before has computed."""
    fault = (
        "import os, sys\n"
        "if 'specserve.server.engine.process' in sys.orig_argv:\n"
        "    from specserve.engine import scheduler\n"
        "    pick = scheduler.Scheduler.pick\n"
        "    def livelock(self):\n"
        f"        for seq in list(self.running) if os.path.exists({str(file)!r}) else []:\n"
        "            self._preempt(seq)\n"
        "        return pick(self)\n"
        "    scheduler.Scheduler.pick = livelock\n"
    )
    (folder / "sitecustomize.py").write_text(fault, "utf-8")


def test_steps_that_lead_nowhere_are_told_from_many_silent_ones(
    long_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt's steps say nothing for longer than a livelock may last, and are none. One is noticed, however
    quick its steps are, and its engine replaced."""
    file = tmp_path / "fault"
    livelock(tmp_path, file)

    async def play() -> None:
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        timeouts = Timeouts(loop_s=0.3)
        options = {"max_num_batched_tokens": 4, "prefix_caching": False}
        async with patient(long_folder, timeouts, **options) as service:
            pid, begun = service.supervisor.pid, time.monotonic()
            await start(service, PROMPT * 1000, GREEDY).whole()
            assert time.monotonic() - begun > 2 * timeouts.loop_s, "or it was not silent for long"
            assert service.supervisor.num_restarts == 0
            file.touch()
            with pytest.raises(EngineError, match="brought no request further"):
                await start(service, PROMPT * 100, GREEDY).whole()
            await replaced(service, pid)

    asyncio.run(play())


def test_a_hang_is_told_from_a_long_step(long_folder: Path) -> None:
    """All but the first tokens of a prompt in one step, which takes longer than an engine may stand still, and is no
    hang. One inside of it is noticed, and its engine replaced."""
    timeouts = Timeouts(stall_s=1.2)

    async def play() -> None:
        options = {"max_num_batched_tokens": 16384, "max_step_ms": 1e6}
        async with patient(long_folder, timeouts, **options) as service:
            pid, begun, before = service.supervisor.pid, time.monotonic(), processor_s(service.supervisor.pid)
            long = start(service, PROMPT * 4000, GREEDY)
            await until(lambda: time.monotonic() - begun > 1.5 * timeouts.stall_s)
            await until(lambda: processor_s(pid) > before + 0.3)
            gauges = service.supervisor.client.gauges
            assert gauges is None or gauges.num_steps < 2, "or the step was not long"
            assert (service.supervisor.pid, service.supervisor.num_restarts) == (pid, 0)
            await _hang(service)
            begun = time.monotonic()
            with pytest.raises(EngineError, match="no progress"):
                await long.whole()
            assert time.monotonic() - begun < 10
            await replaced(service, pid)

    asyncio.run(play())


def test_a_pause_of_everything_is_no_hang(shared: Shared) -> None:
    """As when a virtual machine is suspended: the engine stands still, and so does who watches it."""

    async def play(service: Service) -> None:
        pid = service.supervisor.pid
        with start(service, PROMPT, ENDLESS) as paused:
            async for _ in paused:
                break
            os.kill(pid or 0, signal.SIGSTOP)
            await asyncio.sleep(0.3)  # in which its last beat is seen
            time.sleep(TIMEOUTS.stall_s + 0.25)
            os.kill(pid or 0, signal.SIGCONT)
            assert len((await paused.whole())[0].outputs[0].token_ids) == 200

    shared(play)


def test_an_engine_that_cannot_be_understood_is_replaced(shared: Shared, expected: list[int]) -> None:
    """Whatever keeps the messages from being heard: nobody waits for what will never come."""

    async def play(service: Service) -> None:
        pid, client = service.supervisor.pid, service.supervisor.client

        def garbled(message: bytes) -> Any:
            raise ValueError("garbled")

        client._decode = garbled
        with pytest.raises(EngineError, match="cannot be read"):
            await start(service, PROMPT, ENDLESS).whole()
        await running_again(service, pid)
        assert await answer(service) == expected

    shared(play, restarts=1)


class Barren(EngineSpawner):
    """Has no process to give."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error, self.num_asked = error, 0

    def take(self) -> Any:
        self.num_asked += 1
        raise self._error


@pytest.mark.parametrize(
    ("error", "attempts", "words"),
    [
        pytest.param(OSError(24, "Too many open files"), TIMEOUTS.attempts, "Too many open files", id="without-means"),
        pytest.param(ZeroDivisionError("a slip"), 1, "ZeroDivisionError: a slip", id="a-slip"),
    ],
)
def test_a_start_that_fails(error: Exception, attempts: int, words: str) -> None:
    """Without means for it, it is tried again; nothing makes who looks after engines die in silence."""

    async def play() -> None:
        spawner = Barren(error)
        supervisor = Supervisor(OPTIONS, Metrics("none"), TIMEOUTS, spawner)
        with pytest.raises(EngineError, match=words):
            await asyncio.wait_for(asyncio.shield(supervisor.finished), 60)
        with pytest.raises(EngineError, match=words):
            await supervisor.wait_until_ready()
        assert (supervisor.state, spawner.num_asked) == (State.FAILED, attempts)
        assert supervisor.num_restarts == attempts - 1
        await supervisor.close()

    asyncio.run(play())


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    """It may name files: the one who started the server hears it, and no client."""

    async def play() -> None:
        supervisor = Supervisor({"model": str(tmp_path / "nothing"), **OPTIONS}, Metrics("none"), TIMEOUTS)
        client = supervisor._client
        while client is None:
            await asyncio.sleep(0.01)
            client = supervisor._client
        with pytest.raises(EngineError) as told:
            await client.ready
        with pytest.raises(ModelError, match="nothing"):
            await supervisor.wait_until_ready()
        assert "nothing" not in str(told.value)
        assert supervisor.state is State.FAILED
        assert supervisor.num_restarts == 0, "another start would fail the same way"
        await supervisor.close()

    asyncio.run(play())


def test_bytes_that_are_no_message_are_dropped(shared: Shared, expected: list[int]) -> None:
    async def play(service: Service) -> None:
        pipe = service.supervisor.client._pipe
        for junk in (b"", b"\x80\x04\x95.", b"\xff" * 100, b"\x81\xa4type\xa5eval!"):
            pipe.send(junk)
        assert await answer(service) == expected

    shared(play)


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
        await until(lambda: _is_gone(pid), 5)

    asyncio.run(play())


def _is_gone(pid: int) -> bool:
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text("utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return True
