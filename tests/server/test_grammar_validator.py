"""Constraints are tried where nothing is lost: once each, in turn, cheap ones before expensive ones, for as long as
somebody waits, and remembered."""

from __future__ import annotations

import asyncio
import os
import signal
import tracemalloc
from collections.abc import Callable, Coroutine, Iterator
from itertools import starmap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from specserve.server import grammar_validator as module
from specserve.server.grammar_validator import GrammarValidator
from specserve.server.tenant_queues import Job
from specserve.server.wire.errors import WireError
from specserve.structured.base import RefusedError
from specserve.structured.spec import Structured
from specserve.structured.trial import Outcome
from specserve.testing import tiny_tokenizer, write_tiny_model

SIZE = tiny_tokenizer().get_vocab_size()


def endless(letter: str) -> Structured:
    """500 characters that take minutes to compile."""
    return Structured.json({"allOf": [{"type": "string", "pattern": f".*{letter}{i}.*"} for i in range(16)]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture
def validator(folder: Path) -> Iterator[GrammarValidator]:
    made = GrammarValidator(folder, "llguidance", limit_s=30)
    yield made
    made.close()


def tried(validator: GrammarValidator, monkeypatch: pytest.MonkeyPatch) -> list[Structured]:
    """What is tried from now on."""
    found: list[Structured] = []
    run = module.Trial.run

    def counted(self: Any, structured: Structured, **how: Any) -> Any:
        found.append(structured)
        return run(self, structured, **how)

    monkeypatch.setattr(module.Trial, "run", counted)
    return found


def test_each_is_tried_once(validator: GrammarValidator, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tried(validator, monkeypatch)
    good, bad = Structured.regex("a+"), Structured.regex("a(?=b)")

    async def run() -> None:
        for _ in range(3):
            await asyncio.gather(*(validator.check(good, SIZE) for _ in range(5)))
            results = await asyncio.gather(*(validator.check(bad, SIZE) for _ in range(5)), return_exceptions=True)
            assert {str(error) for error in results} == {
                "structured: look-around, including look-ahead and look-behind, is not supported."
            }
            assert all(isinstance(error, RefusedError) for error in results)

    asyncio.run(run())
    assert found == [good, bad]


def test_who_leaves_takes_nothing_from_the_others(validator: GrammarValidator, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tried(validator, monkeypatch)

    async def run() -> None:
        structured = Structured.regex("b+")
        first, second = (asyncio.create_task(validator.check(structured, SIZE)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await second
        await validator.check(structured, SIZE)

    asyncio.run(run())
    assert len(found) == 1


def test_what_is_remembered_is_bounded(validator: GrammarValidator, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tried(validator, monkeypatch)
    first, second, third = (Structured.regex(letter * 15) for letter in "abc")
    monkeypatch.setattr(module, "_MAX_BYTES", 5 * module._size(first, module.CachedOutcome(None, 0, 0.0)) // 2)

    async def run() -> None:
        for structured in (first, second, first, third, first, second):
            await validator.check(structured, SIZE)

    asyncio.run(run())
    assert found == [first, second, third, second], "the one that was not used for longest is forgotten"


@pytest.mark.parametrize("refused", [None, "because {}"])
def test_small_ones_are_counted_with_all_that_they_take(
    folder: Path, monkeypatch: pytest.MonkeyPatch, refused: str | None
) -> None:
    monkeypatch.setattr(module, "_MAX_BYTES", most := 2**21)
    validator = GrammarValidator(folder)

    async def run() -> None:
        for i in range(20_000):
            structured = Structured.choice([f"{i}é"])
            job = validator._jobs[structured] = Job(structured, SIZE, asyncio.get_running_loop().create_future())
            validator._end(job, Outcome(refused=refused and refused.format(i)))

    tracemalloc.start()
    try:
        asyncio.run(run())
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        validator.close()
    assert 0.8 * most < validator._num_bytes <= most
    assert held <= 1.2 * most


def test_a_worker_that_hangs_costs_time_only(folder: Path) -> None:
    """It is replaced, and what it had is tried again, whether the other one hangs as well."""
    validator = GrammarValidator(folder)

    async def run() -> None:
        await validator.check(Structured.regex("a"), SIZE)
        await validator.check(Structured.regex("a" * 9000), SIZE)  # long, so that both are ready
        processes = [process.trial._process for process in validator.processes if process.trial]
        for process in processes:
            assert process is not None
            os.kill(process.pid, signal.SIGSTOP)
        await validator.check(Structured.regex("b"), SIZE)
        first, second = validator.processes
        assert second.is_ready and not first.is_ready
        assert all(process is not None and process.poll() is not None for process in processes)

    asyncio.run(run())
    validator.close()


def test_what_takes_too_long_is_refused(folder: Path) -> None:
    validator = GrammarValidator(folder, limit_s=0.2)

    async def run() -> None:
        await validator.check(Structured.regex("a"), SIZE)
        for _ in range(2):  # the second is told from memory
            with pytest.raises(RefusedError, match=r"takes longer than 0\.2 s, the most that is allowed"):
                await validator.check(endless("w"), SIZE)

    asyncio.run(run())
    validator.close()


def test_who_leaves_ends_the_trial_at_once(folder: Path) -> None:
    """The work as well as the waiting, and the process is there for the next one."""
    validator = GrammarValidator(folder, limit_s=1000.0)

    async def run() -> None:
        await validator.check(Structured.regex("a"), SIZE)
        await validator.check(Structured.regex("b" * 9000), SIZE)  # long, so that both are ready
        asking = [asyncio.create_task(validator.check(endless(letter), SIZE)) for letter in "abcd"]
        await asyncio.sleep(0.3)
        workers = [process.trial._process for process in validator.processes if process.trial]
        copies = [process.trial.process_id for process in validator.processes if process.trial]
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        await validator.check(Structured.regex("c"), SIZE)
        await validator.check(Structured.regex("d" * 9000), SIZE)
        assert [process.trial._process for process in validator.processes if process.trial] == workers, (
            "none had to start"
        )
        assert validator.processes[1].trial is not None
        assert validator.processes[1].trial.process_id != copies[1], "the one that was busy was killed"
        assert not validator._busy and not validator._jobs

    asyncio.run(run())
    validator.close()


def test_closing_ends_all_workers(folder: Path) -> None:
    validator = GrammarValidator(folder)
    validator.prepare(SIZE)
    validator.close()
    (trial,) = [process.trial for process in validator.processes if process.trial]
    assert trial._process is None


# --- who is tried when, in virtual time -------------------------------------------------------------------------------


class Worker:
    """Takes as many seconds for a constraint as its text says."""

    is_ready = True

    def __init__(self) -> None:
        self.begun: list[tuple[str, float]] = []

    async def run(self, job: Job, seconds: float) -> Outcome:
        self.begun.append((job.structured.text, asyncio.get_running_loop().time()))
        cost = float(job.structured.text.partition(" ")[0])
        await asyncio.sleep(min(cost, seconds))
        return Outcome(timed_out=cost > seconds)

    def close(self) -> None:
        pass


CHEAP, EXPENSIVE, ENDLESS = "0.01", "1.5", "1000"
InVirtualTime = Callable[[Coroutine[Any, Any, Any]], Any]


def costing(seconds: str, name: object = "") -> Structured:
    return Structured.regex(f"{seconds} {name}")


class Tried:
    """A validator with workers that only sleep; `ended` says when each request was answered."""

    def __init__(self) -> None:
        self.validator = GrammarValidator(Path("nowhere"))
        self.workers = [Worker(), Worker()]
        self.validator._for_cheap, self.validator._for_all = self.workers
        self.ended: dict[str, float] = {}

    async def ask(self, structured: Structured, tenant: bytes = b"") -> bool | Exception:
        try:
            return await self.validator.check(structured, SIZE, tenant)
        except (RefusedError, WireError) as error:
            return error
        finally:
            self.ended[structured.text] = asyncio.get_running_loop().time()

    def begin(self, structured: Structured, tenant: bytes = b"") -> asyncio.Task[bool | Exception]:
        return asyncio.create_task(self.ask(structured, tenant))

    @property
    def num_begun(self) -> int:
        return sum(len(worker.begun) for worker in self.workers)

    def is_idle(self) -> bool:
        return not (self.validator._busy or self.validator._jobs or self.validator._queues._queues)


def test_cheap_ones_do_not_wait_for_expensive_ones(in_virtual_time: InVirtualTime) -> None:
    """Whatever they look like: nobody knows before how long one takes."""

    async def run() -> None:
        tried = Tried()
        expensive = [tried.begin(costing(ENDLESS, i)) for i in range(10)]
        await asyncio.sleep(0)
        assert await tried.ask(costing(CHEAP, "first")) is False
        assert tried.ended["0.01 first"] <= 10 * 0.05 + 0.01
        await asyncio.sleep(5)
        begun = asyncio.get_running_loop().time()
        assert await tried.ask(costing(CHEAP, "second")) is False
        assert tried.ended["0.01 second"] == pytest.approx(begun + 0.01), "now they are known for what they are"
        answers = await asyncio.gather(*expensive)
        assert all("longer than 2 s" in str(answer) for answer in answers)
        assert tried.is_idle()

    in_virtual_time(run())


def test_tenants_take_turns(in_virtual_time: InVirtualTime) -> None:
    async def run() -> None:
        tried = Tried()
        for i in range(50):
            tried.begin(costing(EXPENSIVE, i), b"first")
            tried.begin(costing("0.04", i), b"first")
        await asyncio.sleep(10)
        begun = asyncio.get_running_loop().time()
        cheap, expensive = costing(CHEAP, "mine"), costing(EXPENSIVE, "mine")
        answers = await asyncio.gather(tried.ask(cheap, b"second"), tried.ask(expensive, b"second"))
        assert answers == [False, True]
        assert tried.ended[cheap.text] <= begun + 0.05 + 0.01
        assert tried.ended[expensive.text] <= begun + 0.05 + 0.01 + 0.05 + 2 * (2 + 2), (
            "behind one of the first's each time"
        )

    in_virtual_time(run())


def test_who_joins_is_in_its_own_line(in_virtual_time: InVirtualTime) -> None:
    """A constraint that somebody with many others waits for is tried when it is the turn of the other one."""

    async def run() -> None:
        tried = Tried()
        for i in range(40):
            tried.begin(costing(EXPENSIVE, i), b"first")
        await asyncio.sleep(4)
        shared = costing(EXPENSIVE, 39)
        assert shared.text not in tried.ended
        begun = asyncio.get_running_loop().time()
        assert await tried.ask(shared, b"second") is True
        assert asyncio.get_running_loop().time() - begun <= 2 * (2 + 2)

    in_virtual_time(run())


def test_nothing_is_tried_for_who_has_left(in_virtual_time: InVirtualTime) -> None:
    async def run() -> None:
        tried = Tried()
        dropped = [tried.begin(costing(ENDLESS, i)) for i in range(300)]
        await asyncio.sleep(1)
        staying = tried.begin(costing(ENDLESS, 7))
        await asyncio.sleep(0)
        for task in dropped:
            task.cancel()
        await asyncio.wait(dropped)
        begun, before = asyncio.get_running_loop().time(), tried.num_begun
        assert "longer than 2 s" in str(await staying)
        assert asyncio.get_running_loop().time() - begun <= 0.4 + 2 + 0.01
        assert tried.num_begun - before <= 2, "only what somebody waits for"
        assert tried.is_idle()

    in_virtual_time(run())


def test_one_that_is_left_before_it_begins_frees_its_worker(in_virtual_time: InVirtualTime) -> None:
    async def run() -> None:
        tried = Tried()
        for _ in range(3):
            task = tried.begin(costing(CHEAP))
            await asyncio.sleep(0)  # it has asked, and its trial has not begun
            task.cancel()
            await asyncio.wait([task])
        assert await tried.ask(costing(CHEAP, "next")) is False
        assert tried.is_idle()

    in_virtual_time(run())


def test_too_many_expensive_ones_are_told_to_come_again(in_virtual_time: InVirtualTime) -> None:
    async def run() -> None:
        tried = Tried()
        asking = [tried.begin(costing(EXPENSIVE, i), b"first") for i in range(70)]
        await asyncio.sleep(4)
        told = [task.result() for task in asking if task.done()]
        refused = [answer for answer in told if isinstance(answer, WireError)]
        assert {(answer.status, answer.code, answer.headers["Retry-After"]) for answer in refused} == {
            (429, "overloaded", "1")
        }
        assert len(refused) >= 70 - 64 - 2
        waiting = tried.validator._queues.num_expensive(b"first")
        assert waiting <= 64
        assert await tried.ask(costing(CHEAP), b"first") is False, "what is cheap has room"
        assert await tried.ask(costing(EXPENSIVE, "mine"), b"second") is True, "and so has somebody else"
        await asyncio.gather(*asking)
        assert tried.is_idle()

    in_virtual_time(run())


def test_a_failure_is_not_remembered_for_ever(in_virtual_time: InVirtualTime) -> None:
    """A moment in which the machine was busy condemns nothing."""

    async def run() -> None:
        tried, structured = Tried(), costing(ENDLESS)
        for _ in range(2):
            assert "longer than 2 s" in str(await tried.ask(structured))
            before = tried.num_begun
            await asyncio.sleep(59)
            assert "longer than 2 s" in str(await tried.ask(structured))
            assert tried.num_begun == before
            await asyncio.sleep(2)
        assert await tried.ask(costing(CHEAP)) is False
        before = tried.num_begun
        await asyncio.sleep(1e6)
        assert await tried.ask(costing(CHEAP)) is False
        assert tried.num_begun == before, "what is right stays so"
        assert tried.validator._num_bytes == sum(starmap(module._size, tried.validator._known.items()))

    in_virtual_time(run())


def test_long_ones_do_not_begin_with_the_cheap(in_virtual_time: InVirtualTime) -> None:
    async def run() -> None:
        tried = Tried()
        assert await tried.ask(costing(CHEAP, "x" * 2**13)) is True
        assert [len(worker.begun) for worker in tried.workers] == [0, 1]

    in_virtual_time(run())


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])  # it keeps no state
@given(
    st.lists(
        st.tuples(
            st.sampled_from([CHEAP, "0.2", EXPENSIVE, ENDLESS]),
            st.integers(0, 5),  # which of that cost
            st.sampled_from([b"a", b"b"]),
            st.floats(0, 3),  # comes
            st.none() | st.floats(0, 6),  # leaves after
        ),
        max_size=12,
    )
)
def test_everybody_is_answered_and_nothing_stays(
    in_virtual_time: InVirtualTime, requests: list[tuple[str, int, bytes, float, float | None]]
) -> None:
    async def one(tried: Tried, cost: str, which: int, tenant: bytes, comes: float, stays: float | None) -> None:
        await asyncio.sleep(comes)
        try:
            async with asyncio.timeout(stays):
                answer = await tried.ask(costing(cost, which), tenant)
            assert isinstance(answer, RefusedError if cost == ENDLESS else bool)
        except TimeoutError:
            assert stays is not None

    async def run() -> None:
        tried = Tried()
        await asyncio.gather(*(one(tried, *request) for request in requests))
        await asyncio.sleep(0.01)
        assert tried.is_idle()

    in_virtual_time(run())
