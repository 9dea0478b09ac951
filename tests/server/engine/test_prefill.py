"""Engines that compute prompts for others: the text of one engine, and what happens when one of them dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve.adapters import AdapterSource
from specserve.checkpoint.weights import Weights
from specserve.config import EngineConfig
from specserve.engine.request import Request
from specserve.errors import ConfigError
from specserve.llm import LLM
from specserve.models.decoder import Decoder
from specserve.models.heads.formats import write_head
from specserve.models.heads.speculators import Verifier
from specserve.models.loader import load_model
from specserve.ops.choice import choose_ops
from specserve.server.answers import Answers, Prepared
from specserve.server.chats import Chats
from specserve.server.engine.client import EngineClient
from specserve.server.engine.keeper import Timeouts
from specserve.server.engine.replicas import Replicas, check_prefill
from specserve.server.grammar_validator import GrammarValidator
from specserve.server.metrics import Metrics
from specserve.server.service import Service
from specserve.structured.spec import Structured
from specserve.testing import write_adapter, write_tiny_model
from specserve.testing.heads import trained_eagle
from specserve.text.tokenizer import Tokenizer
from specserve.types import SamplingParams, SequenceStats

BLOCK = 16
OPTIONS: dict[str, Any] = {
    "threads": 1, "max_num_seqs": 4, "kv_cache_gib": 0.005, "max_model_len": 256, "drafter": "none", "adaptive": False,
    "block_size": BLOCK,
}  # fmt: skip
PROMPT = [(7 * i + 3 * i * i) % 280 for i in range(5 * BLOCK + 7)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=11, max_tokens=24, ignore_eos=True)
WORDS = Structured.regex(r"(the|and) [a-z ]{3,40}(other stone|thing)\.")
PROMPTS = [[*PROMPT[: 20 + 6 * i], *range(i, i + 9)] for i in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


@asynccontextmanager
async def divided(folder: Path, **options: Any) -> AsyncIterator[Service]:
    """Engines of which the last one computes prompts for the others."""
    metrics = Metrics("tiny")
    started = {"model": str(folder), **OPTIONS, **options}
    timeouts = Timeouts(kv_s=1.0)
    replicas = Replicas(started, metrics.of_replica, 2, timeouts, num_prefill=1, least_tokens=1)
    service = Service(replicas, Tokenizer(folder), metrics, GrammarValidator(folder), Chats(folder), 2**20)
    try:
        await replicas.wait_until_ready()
        await all_ready(service)
        yield service
    finally:
        await replicas.close()
        service.close()


def of(service: Service) -> Replicas:
    assert isinstance(service.supervisor, Replicas)
    return service.supervisor


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def all_ready(service: Service) -> None:
    await until(lambda: {each.state for each in of(service).replicas} == {"ready"})


Play = Callable[[Service], Coroutine[Any, Any, None]]
Shared = Callable[[Play], None]


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Shared]:
    """`shared(play)`: a play on two engines that tests share. Both are ready before it and after it, idle, and hold
    nothing for each other."""
    with asyncio.Runner() as runner:
        lasting = divided(folder, drafter="ngram", max_loras=2)
        service = runner.run(lasting.__aenter__())

        async def played(play: Play) -> None:
            await play(service)
            await all_ready(service)
            await until(lambda: of(service).gauges.num_free_blocks == of(service).gauges.num_blocks)
            await until(lambda: not frames(service))

        yield lambda play: runner.run(played(play))
        runner.run(lasting.__aexit__(None, None, None))


def frames(service: Service) -> list[str]:
    """Memory for KV that the engines' processes have open or mapped."""
    found = []
    for pid in of(service).pids:
        paths = [*Path(f"/proc/{pid}/fd").iterdir(), *Path(f"/proc/{pid}/map_files").iterdir()]
        for path in paths:
            try:
                found.append(os.readlink(path))
            except OSError:  # closed meanwhile
                continue
    return [name for name in found if "specserve-kv" in name]


def start(service: Service, prompt: list[int], params: SamplingParams, **fields: Any) -> Answers:
    return service.start([Prepared(Request(id=service.new_id(), prompt_ids=prompt, params=params, **fields))])


async def answer(service: Service, prompt: list[int], params: SamplingParams, **fields: Any) -> list[list[int]]:
    with start(service, prompt, params, **fields) as running:
        return [each.token_ids for each in (await running.whole())[0].outputs]


async def counted(service: Service, prompt: list[int], params: SamplingParams) -> tuple[list[int], SequenceStats]:
    with start(service, prompt, params) as running:
        (output,) = (await running.whole())[0].outputs
        return output.token_ids, output.stats


def received(service: Service) -> int:
    return of(service).gauges.num_prompts_received


def failures(service: Service) -> int:
    return of(service).gauges.num_transfer_failures


def single(folder: Path, prompts: list[list[int]], params: SamplingParams, **options: Any) -> list[list[list[int]]]:
    with LLM(str(folder), **OPTIONS | options) as llm:
        return [[each.token_ids for each in out.outputs] for out in llm.generate(prompts, params)]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_text_of_one_engine(shared: Shared, folder: Path, params: SamplingParams) -> None:
    """At once and one after another; each prompt is computed elsewhere once, and cached then."""
    expected = single(folder, PROMPTS, params)

    async def play(service: Service) -> None:
        await of(service).reset_prefix_cache()
        before, failed = received(service), failures(service)
        at_once = await asyncio.gather(*(answer(service, prompt, params) for prompt in PROMPTS))
        assert at_once == expected
        assert received(service) > before
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            salt = bytes(prompt[-4:])
            assert await answer(service, prompt, params, salt=salt) == tokens
        assert received(service) - before >= len(PROMPTS)
        assert failures(service) == failed
        assert [each.role for each in of(service).replicas] == ["decode", "prefill"]

    shared(play)


def test_every_kind_of_request(shared: Shared, folder: Path) -> None:
    """Grammars, predictions, several completions, beams, suffix drafts: each prompt's KV comes from elsewhere."""
    cases: list[tuple[SamplingParams, dict[str, Any]]] = [
        (SamplingParams(temperature=0, max_tokens=40, structured=WORDS), {}),
        (SamplingParams(temperature=1, seed=3, n=3, max_tokens=12, ignore_eos=True), {}),
        (SamplingParams(beam_width=3, max_tokens=10), {}),
        (GREEDY, {"prediction": tuple(PROMPT)}),
        (SEEDED, {"drafter": "suffix"}),
        (GREEDY, {"drafter": "none"}),
        (SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=2, stop=["zq"]), {}),
    ]
    with LLM(str(folder), **OPTIONS) as llm:
        outs = [llm.generate([PROMPT], params)[0] for params, _ in cases]
    expected = [[each.token_ids for each in out.outputs] for out in outs]

    async def play(service: Service) -> None:
        before = received(service)
        for number, (params, fields) in enumerate(cases):
            assert await answer(service, PROMPT, params, salt=b"case%d" % number, **fields) == expected[number]
            assert received(service) == before + number + 1
        assert failures(service) == 0

    shared(play)


def test_adapters(shared: Shared, folder: Path, tmp_path: Path) -> None:
    shapes = {name: info.shape for name, info in Weights(folder).infos.items()}
    path = write_adapter(tmp_path / "x", shapes, seed=1)
    with LLM(str(folder), **OPTIONS, lora=(f"x={path}",)) as llm:
        expected = llm.generate([PROMPT], GREEDY, adapter="x")[0].outputs[0].token_ids

    async def play(service: Service) -> None:
        await of(service).load_adapter(AdapterSource("x", str(path)), False)
        before = received(service)
        assert await answer(service, PROMPT, GREEDY, adapter="x", salt=b"adapter") == [expected]
        assert received(service) == before + 1
        await of(service).unload_adapter("x")

    shared(play)


def test_models_in_several_processes_and_a_head(folder: Path, tmp_path: Path) -> None:
    """Two stages have the bits of one process; the KV of the head comes along, and its drafts are accepted as by one
    engine."""
    target = load_model(folder, choose_ops(torch.device("cpu"), "float32", "none", 1))
    assert isinstance(target, Decoder)
    texts = [PROMPT + single(folder, [PROMPT], GREEDY)[0][0]]
    write_head(tmp_path, *trained_eagle(target, texts, 3, 30), Verifier(str(folder)))
    options: dict[str, Any] = {"drafter": "eagle", "drafter_options": {"head": str(tmp_path)}, "dtype": "float32"}
    with LLM(str(folder), **OPTIONS | options) as llm:
        one = [llm.generate([PROMPT], params)[0].outputs[0] for params in (GREEDY, SEEDED)]

    async def play() -> None:
        async with divided(folder, **options, pipeline_parallel_size=2) as service:
            tokens, stats = await counted(service, PROMPT, GREEDY)
            assert tokens == one[0].token_ids
            assert stats.num_received_tokens == 5 * BLOCK
            assert stats.num_accepted_tokens > 0
            assert stats.accepted_by_position == one[0].stats.accepted_by_position
            assert stats.drafted_by_position == one[0].stats.drafted_by_position
            assert (await counted(service, PROMPT, SEEDED))[0] == one[1].token_ids
            assert failures(service) == 0

    asyncio.run(play())


def test_an_engine_that_dies_with_a_prompt_leaves_it_to_the_other(
    shared: Shared, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = single(folder, PROMPTS, GREEDY)

    async def play(service: Service) -> None:
        failed = failures(service)
        pid = of(service).pids[1]
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        asking = [asyncio.create_task(answer(service, p, GREEDY, salt=b"d%d" % len(p))) for p in PROMPTS[:4]]
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in asking)
        os.kill(pid, signal.SIGKILL)
        assert await asyncio.gather(*asking) == expected[:4]
        assert failures(service) == failed + 4
        assert "is computed where it is answered: The engine's process ended with status -9" in caplog.text
        assert await answer(service, PROMPTS[0], GREEDY, salt=b"meanwhile") == expected[0]
        await all_ready(service)
        before = received(service)
        assert await answer(service, PROMPTS[0], GREEDY, salt=b"again") == expected[0]
        assert received(service) == before + 1

    shared(play)


def hooked(monkeypatch: pytest.MonkeyPatch, name: str, before: Callable[[EngineClient], None]) -> None:
    """Something happens before the first engine is told that."""
    told = getattr(EngineClient, name)

    def tell(self: EngineClient, *arguments: Any) -> None:
        before(self)
        told(self, *arguments)

    monkeypatch.setattr(EngineClient, name, tell)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_engine_that_dies_with_a_transfer_leaves_it_to_the_other(
    shared: Shared, folder: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request goes on meanwhile."""
    expected = single(folder, [PROMPT, [5, 6, 7]], GREEDY)

    async def play(service: Service) -> None:
        pid, failed, salt = of(service).pids[1], failures(service), b"%d" % number
        assert pid is not None
        try:
            with monkeypatch.context() as patch:
                hooked(patch, "export_kv", lambda _: os.kill(pid, number))
                asking = asyncio.create_task(answer(service, PROMPT, GREEDY, salt=salt))
                await until(lambda: number == signal.SIGKILL or of(service).replicas[0].gauges.num_waiting == 1)
                assert await answer(service, [5, 6, 7], GREEDY) == expected[1]
                assert number == signal.SIGKILL or not asking.done()
                assert await asking == expected[0]
            assert failures(service) == failed + 1
        finally:
            if number == signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)

    shared(play)


def test_requests_that_are_aborted_leave_nothing(shared: Shared, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine rounds: while the prompt is computed, while its KV is awaited, and after."""
    expected = single(folder, [PROMPT], GREEDY)[0]

    async def play(service: Service) -> None:
        moment = asyncio.Event()
        hooked(monkeypatch, "export_kv", lambda _: moment.set())
        descriptors = [len(os.listdir(f"/proc/{pid}/fd")) for pid in of(service).pids]
        for i in range(9):
            moment.clear()
            running = start(service, PROMPT, GREEDY, salt=b"round%d" % i)
            if i % 3 == 1:
                await asyncio.wait_for(moment.wait(), 30)
            elif i % 3 == 2:
                await running.whole()
            with running:
                pass
        assert await answer(service, PROMPT, GREEDY, salt=b"end") == expected
        await until(lambda: [len(os.listdir(f"/proc/{pid}/fd")) for pid in of(service).pids] == descriptors)

    shared(play)


def test_engines_that_compute_prompts_answer_where_no_other_can(shared: Shared, folder: Path) -> None:
    expected = single(folder, [PROMPT], GREEDY)[0]

    async def play(service: Service) -> None:
        pid = of(service).pids[0]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: of(service).replicas[0].state != "ready")
        assert await answer(service, PROMPT, GREEDY, salt=b"alone") == expected

    shared(play)


def test_prompts_go_where_it_pays(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short one is computed where it is answered, and so is one that is cached there."""

    async def play(service: Service) -> None:
        monkeypatch.setattr(of(service)._prompts, "_least_tokens", 50)
        await of(service).reset_prefix_cache()
        before = [each.num_requests for each in of(service).replicas]
        for prompt, counts in ((PROMPT[:40], [1, 0]), (PROMPT, [2, 1]), (PROMPT, [3, 1])):
            await answer(service, prompt, GREEDY)
            assert [each.num_requests - b for each, b in zip(of(service).replicas, before, strict=True)] == counts
        scored = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
        await answer(service, PROMPT[::-1], scored)
        assert of(service).replicas[1].num_requests == before[1] + 1

    shared(play)


def test_what_cannot_hand_on_prompts_does_not_start() -> None:
    with pytest.raises(ConfigError, match="prefix cache"):
        check_prefill(EngineConfig(prefix_caching=False), 1)
