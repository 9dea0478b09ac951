"""Replicas with some of a model's experts each, in processes of their own: the answers of one engine, and what becomes
of all of them when one dies or stands still."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from specserve.engine.request import Request
from specserve.errors import ConfigError, EngineError
from specserve.llm import LLM
from specserve.server.answers import Answers, Prepared
from specserve.server.chats import Chats
from specserve.server.engine.keeper import Timeouts
from specserve.server.engine.replicas import Replicas
from specserve.server.grammar_validator import GrammarValidator
from specserve.server.metrics import Metrics
from specserve.server.service import Service
from specserve.testing import write_tiny_model
from specserve.text.tokenizer import Tokenizer
from specserve.types import SamplingParams

OPTIONS: dict[str, Any] = {"threads": 1, "max_num_seqs": 4, "max_model_len": 256, "drafter": "ngram"}
PROMPTS = [[5, 6, 7, 8] * 8, [9, 10, 11] * 12, *([number, 3, number, 4] * 5 for number in range(20, 26))]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@asynccontextmanager
async def divided(folder: Path, **timeouts: float) -> AsyncIterator[Service]:
    metrics = Metrics("tiny")
    options = {"model": str(folder), **OPTIONS}
    replicas = Replicas(options, metrics.of_replica, 2, Timeouts(**timeouts), divides_experts=True)
    service = Service(replicas, Tokenizer(folder), metrics, GrammarValidator(folder), Chats(folder), 2**20)
    try:
        await replicas.wait_until_ready()
        await until(lambda: states(service) == ["ready", "ready"])
        yield service
    finally:
        await replicas.close()
        service.close()


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def of(service: Service) -> Replicas:
    assert isinstance(service.supervisor, Replicas)
    return service.supervisor


def states(service: Service) -> list[str]:
    return [each.state for each in of(service).replicas]


def start(service: Service, prompt: list[int], params: SamplingParams) -> Answers:
    return service.start([Prepared(Request(id=service.new_id(), prompt_ids=prompt, params=params))])


async def answer(service: Service, prompt: list[int]) -> list[int]:
    with start(service, prompt, GREEDY) as running:
        return (await running.whole())[0].outputs[0].token_ids


async def check_all_end(service: Service, number: int, with_signal: signal.Signals, within_s: float) -> None:
    """Every client of either replica is told, within so many seconds, and both engines start again."""
    running = [start(service, prompt, ENDLESS) for prompt in PROMPTS[:4]]
    for answers in running:
        await anext(aiter(answers))
    assert min(each.client.num_open for each in of(service)._replicas) >= 1, "each has some"
    pids, restarts = of(service).pids, of(service).num_restarts
    begun = time.monotonic()
    os.kill(pids[number] or 0, with_signal)
    said = []
    for answers in running:
        with answers, pytest.raises(EngineError, match="send it again") as told:
            await answers.whole()
        said.append(str(told.value))
    if with_signal is signal.SIGKILL:  # one that is stopped in a step which all have begun looks like the others
        assert any(f"eplica {number}" in words for words in said), "which one it was"
    assert time.monotonic() - begun < within_s
    await until(lambda: states(service) == ["ready", "ready"])
    assert of(service).num_restarts == restarts + 2
    assert not set(pids) & set(of(service).pids)


def leftovers() -> tuple[int, int]:
    """Descriptors and child processes."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text("ascii").split()
    return len(os.listdir("/proc/self/fd")), len(children)


def test_replicas_share_experts_and_fate(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "qwen2_moe", seed=2)
    with LLM(str(folder), **OPTIONS | {"drafter": "none"}) as llm:
        expected = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, GREEDY)]

    async def play() -> None:
        async with divided(folder, stall_s=4.0) as service:
            assert await asyncio.gather(*(answer(service, prompt) for prompt in PROMPTS)) == expected
            assert [await answer(service, prompt) for prompt in PROMPTS] == expected
            for number, with_signal, within_s in ((1, signal.SIGKILL, 3.5), (0, signal.SIGSTOP, 15.0)):
                before = leftovers()
                await check_all_end(service, number, with_signal, within_s)
                assert await asyncio.gather(*(answer(service, prompt) for prompt in PROMPTS)) == expected
                assert leftovers() == before
            steps = [each.gauges.num_empty_steps for each in of(service).replicas]
            text = service.metrics.exposition(of(service).gauges, 0, True, of(service).replicas).decode()
            assert f'specserve:engine_empty_steps_total{{model_name="tiny"}} {sum(steps):.1f}\n' in text
            assert sum(steps) > 0

    before = leftovers()
    asyncio.run(play())
    assert leftovers()[1] == before[1]
    assert leftovers()[0] <= before[0] + 2


def test_each_replica_is_one_process(tmp_path: Path) -> None:
    async def play() -> None:
        for size in ("tensor_parallel_size", "pipeline_parallel_size"):
            with pytest.raises(ConfigError, match="each replica must be one process"):
                Replicas({"model": str(tmp_path), size: 2}, Metrics("none").of_replica, 2, divides_experts=True)

    asyncio.run(play())
