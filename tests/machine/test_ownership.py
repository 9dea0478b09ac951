"""Who may use an LLM: several threads at once, no process but its own; and what it does to torch's threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from specserve import LLM, SamplingParams
from specserve.errors import ConfigError, EngineError
from specserve.machine.ownership import Ownership
from specserve.outputs import Collector
from specserve.runtime.executor import local
from specserve.testing import write_tiny_model
from specserve.types import Event

NUM_THREADS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FORKS = """
import asyncio, os, sys
from specserve import LLM, AsyncLLM, SamplingParams
from specserve.errors import EngineError

params = SamplingParams(max_tokens=8, n=4, ignore_eos=True)
llm = LLM(sys.argv[1], threads=2, max_model_len=128)
served = AsyncLLM(sys.argv[1], threads=2, max_model_len=128)
llm.generate([5, 6, 7], params)
asyncio.run(served.generate([5, 6, 7], params))
stream = llm.stream([5, 6, 7], params)
next(stream)


def said(call):
    try:
        return str(call())
    except EngineError as error:
        return str(error)


child = os.fork()
if child == 0:
    print(said(lambda: llm.generate([5, 6, 7], params)))
    print(said(lambda: next(stream)))
    print(said(lambda: llm.use_drafter("ngram")))
    print(said(lambda: asyncio.run(served.generate([5, 6, 7], params))))
    stream.close()
    llm.close()
    asyncio.run(served.close())
    sys.exit(0)  # lets go of everything
_, status = os.waitpid(child, 0)
print("child", os.waitstatus_to_exitcode(status))
print("parent", sum(len(output.token_ids) for output in llm.generate([5, 6, 7], params)[0].outputs))
llm.close()
asyncio.run(served.close())
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


@pytest.fixture
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), dtype="float32", threads=2, max_model_len=256, drafter="ngram") as llm:
        yield llm


def test_threads_get_what_each_gets_alone(llm: LLM) -> None:
    prompts = [[[5 + i, 6, 7] * 4, [9, 8 + i]] for i in range(NUM_THREADS)]
    alone = [[r.outputs[0].token_ids for r in llm.generate(both, GREEDY)] for both in prompts]
    texts = ["".join(chunk.text for chunk in llm.stream(first, GREEDY)) for first, _ in prompts]
    ready = threading.Barrier(NUM_THREADS)

    def work(i: int) -> None:
        ready.wait()
        for _ in range(3):
            assert [r.outputs[0].token_ids for r in llm.generate(prompts[i], GREEDY)] == alone[i]
            chunks = list(llm.stream(prompts[i][0], GREEDY))
            assert "".join(chunk.text for chunk in chunks) == texts[i]
            assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
            assert llm.counters().num_steps > 0

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(work, range(NUM_THREADS)))
    assert not llm.engine.has_work
    assert llm.engine.cache.num_free == llm.engine.cache.num_blocks


def test_a_thread_joins_what_runs(llm: LLM) -> None:
    """A call made while another thread steps is answered before that one's long request ends, in its steps."""
    long = llm.stream([5, 6, 7], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    got = [next(long)]
    steps = llm.counters().num_steps
    with ThreadPoolExecutor(1) as pool:
        short = pool.submit(llm.generate, [9, 8], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        while not short.done():
            got.append(next(long))
        assert len(short.result()[0].outputs[0].token_ids) == 2
    assert llm.counters().num_steps - steps < 190, "the short one had to wait for the long one's end"
    with pytest.raises(ConfigError, match="no request is running"):
        llm.use_drafter("none")
    long.close()


def test_what_one_call_cannot_take_is_its_own_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the step that brought it was another call's, which lacks nothing and hears nothing of it."""
    alone = llm.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids
    push, first, failed = Collector.push, list[Collector](), list[Event]()

    def fails(self: Collector, event: Event) -> None:
        if not first:
            first.append(self)
        elif self in first and not failed:  # what comes later is taken, and ends the text with a hole
            failed.append(event)
            raise LookupError("no text")
        push(self, event)

    broken = llm.stream([9, 8], GREEDY)
    with monkeypatch.context() as patched:
        patched.setattr(Collector, "push", fails)
        next(broken)
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(llm.generate, [5, 6, 7], GREEDY).result(60)
        assert found[0].outputs[0].token_ids == alone
        with pytest.raises(LookupError):
            next(broken)
    assert not llm.engine.has_work


def test_ctrl_c_ends_its_own_call_and_after_the_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever in the step it comes: another call that is open lacks nothing."""
    whole = "".join(chunk.text for chunk in llm.stream([9, 8], GREEDY))
    pick, forward = llm.engine.scheduler.pick, local(llm.engine.executor).runner.finish

    for owner, name, call in (
        (llm.engine.scheduler, "pick", pick),
        (local(llm.engine.executor).runner, "finish", forward),
    ):

        def interrupted(call: Callable[[], object] = call) -> object:
            signal.raise_signal(signal.SIGINT)
            return call()

        open_ = llm.stream([9, 8], GREEDY)
        text = next(open_).text
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([5, 6, 7], GREEDY)
        assert text + "".join(chunk.text for chunk in open_) == whole
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not llm.engine.has_work
    assert llm.engine.cache.num_free == llm.engine.cache.num_blocks


def test_a_second_ctrl_c_does_not_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the step goes on")

    monkeypatch.setattr(llm.engine, "step", twice)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([5, 6, 7], GREEDY)


@pytest.mark.parametrize("after", [False, True])
def test_a_step_that_fails_leaves_no_answer_with_a_hole(llm: LLM, monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    """Before anything or after everything of it: another call that is open gets an error and not fewer tokens."""
    alone = llm.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids
    open_ = llm.stream([9, 8], GREEDY)
    next(open_)
    step = llm.engine.step

    def interrupted() -> None:
        if after:
            step()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([5, 6, 7], GREEDY)
    with pytest.raises(EngineError, match="KeyboardInterrupt"):
        next(open_)
    assert not llm.engine.has_work
    assert llm.engine.cache.num_free == llm.engine.cache.num_blocks
    assert llm.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids == alone


def test_the_lock_goes_to_who_waits() -> None:
    owner, order = Ownership(), []
    with owner:
        other = threading.Thread(target=lambda: (owner.__enter__(), order.append("other"), owner.__exit__()))
        other.start()
        while owner._queue.acquire(blocking=False):  # until the other waits
            owner._queue.release()
    with owner:
        order.append("first again")
    other.join()
    assert order == ["other", "first again"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_after_a_fork_it_says_so_and_the_child_can_end(tiny: Path) -> None:
    """The sampler of several rows uses the native threads, which a child does not have: it would wait for ever, and so
    would the child's end, for threads to join."""
    done = subprocess.run([sys.executable, "-c", FORKS, str(tiny)], capture_output=True, text=True, timeout=120)
    *refused, child, parent = done.stdout.splitlines()
    assert len(refused) == 4, done
    assert all("before a fork" in line and "spawn" in line for line in refused), refused
    assert (child, parent, done.returncode) == ("child 0", f"parent {4 * 8}", 0), done.stderr


def test_torchs_threads_are_the_callers_own_between_steps(tiny: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with LLM(str(tiny), dtype="float32", threads=2, max_model_len=128) as llm:
            assert torch.get_num_threads() == 3
            step, seen = llm.engine.step, set()
            llm.engine.step = lambda: (seen.add(torch.get_num_threads()), step())[1]  # type: ignore[method-assign]
            llm.generate([5, 6], SamplingParams(max_tokens=3, ignore_eos=True))
            assert torch.get_num_threads() == 3
            next(stream := llm.stream([5, 6], GREEDY))
            assert torch.get_num_threads() == 3
            stream.close()
            assert seen == {1 if local(llm.engine.executor).runner.ops.has_own_threads else 2}
    finally:
        torch.set_num_threads(before)
