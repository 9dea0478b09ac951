"""Several engines behind one server: the same answers from each, and what happens when one of them dies."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from specserve.adapters import AdapterSource
from specserve.checkpoint.weights import Weights
from specserve.config import EngineConfig
from specserve.engine.request import Request
from specserve.errors import CapacityError, ConfigError, EngineError, InputError
from specserve.llm import LLM
from specserve.machine.cores import usable_cores
from specserve.server.answers import Answers, Prepared
from specserve.server.chats import Chats
from specserve.server.engine.client import UnknownAdapterError
from specserve.server.engine.keeper import State
from specserve.server.engine.process import check_shared
from specserve.server.engine.replicas import Replicas
from specserve.server.grammar_validator import GrammarValidator
from specserve.server.metrics import Metrics
from specserve.server.service import Service
from specserve.testing import fake_cuda, write_adapter, write_tiny_model
from specserve.text.tokenizer import Tokenizer
from specserve.types import SamplingParams

OPTIONS: dict[str, Any] = {
    "threads": 1, "max_num_seqs": 4, "kv_cache_gib": 0.01, "max_model_len": 256, "drafter": "ngram", "max_loras": 2,
    "adaptive": False,
}  # fmt: skip
PROMPTS = [[5, 6, 7, 8] * 8, [9, 10, 11] * 12, *([number, 3, number, 4] * 5 for number in range(20, 26))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1, seed=7, n=2, max_tokens=24, ignore_eos=True),
]
ENDLESS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
Texts = list[list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[SamplingParams, list[Texts]]:
    """By parameters, of each prompt: what one engine says without drafts."""
    with LLM(str(folder), **OPTIONS | {"drafter": "none"}) as llm:
        return {
            params: [[each.token_ids for each in out.outputs] for out in llm.generate(PROMPTS, params)]
            for params in (*PARAMS, ENDLESS)
        }


@asynccontextmanager
async def replicated(folder: Path, size: int = 2, **options: Any) -> AsyncIterator[Service]:
    metrics = Metrics("tiny")
    replicas = Replicas({"model": str(folder), **OPTIONS, **options}, metrics.of_replica, size)
    service = Service(replicas, Tokenizer(folder), metrics, GrammarValidator(folder), Chats(folder), 2**20)
    try:
        await replicas.wait_until_ready()
        await all_ready(replicas, size)
        yield service
    finally:
        await replicas.close()
        service.close()


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def all_ready(replicas: Replicas, size: int = 2) -> None:
    await until(lambda: [each.state for each in replicas.replicas] == ["ready"] * size)


def of(service: Service) -> Replicas:
    assert isinstance(service.supervisor, Replicas)
    return service.supervisor


Play = Callable[[Service], Coroutine[Any, Any, None]]
Shared = Callable[[Play], None]


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Shared]:
    """`shared(play)`: a play on two replicas that tests share. Both are ready before it and after it, and idle."""
    with asyncio.Runner() as runner:
        lasting = replicated(folder)
        service = runner.run(lasting.__aenter__())

        async def played(play: Play) -> None:
            await play(service)
            await all_ready(of(service))
            assert of(service).state is State.READY
            await until(lambda: of(service).gauges.num_free_blocks == of(service).gauges.num_blocks)

        yield lambda play: runner.run(played(play))
        runner.run(lasting.__aexit__(None, None, None))


def start(service: Service, prompt: list[int], params: SamplingParams, **fields: Any) -> Answers:
    return service.start([Prepared(Request(id=service.new_id(), prompt_ids=prompt, params=params, **fields))])


async def answer(service: Service, prompt: list[int], params: SamplingParams, **fields: Any) -> Texts:
    with start(service, prompt, params, **fields) as running:
        return [each.token_ids for each in (await running.whole())[0].outputs]


def requests_of(service: Service) -> list[int]:
    return [each.num_requests for each in of(service).replicas]


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "seeded"])
def test_the_same_bits_whichever_replica_answers(
    shared: Shared, expected: dict[SamplingParams, list[Texts]], params: SamplingParams
) -> None:
    """At once and one after another; both have some of them."""

    async def play(service: Service) -> None:
        before = requests_of(service)
        for _ in range(2):
            at_once = await asyncio.gather(*(answer(service, prompt, params) for prompt in PROMPTS))
            assert at_once == expected[params]
        assert [await answer(service, prompt, params) for prompt in PROMPTS] == expected[params]
        assert min(now - then for now, then in zip(requests_of(service), before, strict=True)) >= 8

    shared(play)


def test_requests_are_spread_by_what_runs(shared: Shared) -> None:
    """Eight that do not end: each has some, more or fewer as their steps were measured."""

    async def play(service: Service) -> None:
        running = [start(service, prompt, ENDLESS) for prompt in PROMPTS]
        assert min(each.client.num_open for each in of(service)._replicas) >= 1
        for answers in running:
            with answers:
                await anext(aiter(answers))
        assert of(service).gauges.num_preemptions == 0

    shared(play)


def test_what_all_replicas_did_is_summed_and_told_of_each(shared: Shared) -> None:
    async def play(service: Service) -> None:
        replicas = of(service)
        await asyncio.gather(*(answer(service, prompt, PARAMS[0]) for prompt in PROMPTS))  # by both of them
        stats = service.metrics.stats(replicas.gauges, replicas.num_restarts, "ready", replicas.replicas)
        assert [each["state"] for each in stats["replicas"]] == ["ready", "ready"]
        assert stats["steps"]["num_steps"] == sum(each["num_steps"] for each in stats["replicas"]) > 0
        assert stats["kv_cache"]["num_blocks"] == 2 * replicas._replicas[0].client.gauges.num_blocks  # type: ignore[union-attr]
        text = service.metrics.exposition(replicas.gauges, 0, True, replicas.replicas).decode()
        counts = requests_of(service)
        for number in range(2):
            labels = f'{{model_name="tiny",replica="{number}"}}'
            assert f"specserve:replica_ready{labels} 1.0\n" in text
            assert f"specserve:replica_requests_total{labels} {counts[number]:.1f}\n" in text

    shared(play)


def test_a_replica_that_dies_ends_its_own_requests_only(
    shared: Shared, expected: dict[SamplingParams, list[Texts]]
) -> None:
    """In mid-stream: they are told at once, the others' answers are whole, new requests are taken all the time,
    and another engine takes its place, which gives the same answers. Nothing is left of the old one."""

    async def play(service: Service) -> None:
        replicas = of(service)
        before, restarts, (kept, dying) = leftovers(), replicas.num_restarts, replicas.pids
        assert dying is not None
        running = [start(service, prompt, ENDLESS) for prompt in PROMPTS[:6]]
        for answers in running:
            await anext(aiter(answers))
        theirs = [answers.outputs[0].request_id in replicas._replicas[1].client._open for answers in running]
        assert 0 < sum(theirs) < len(theirs), "each has some"
        begun = time.monotonic()
        os.kill(dying, signal.SIGKILL)

        async def end(answers: Answers) -> list[int] | tuple[float, str]:
            """The tokens, or when it was told what."""
            try:
                return (await answers.whole())[0].outputs[0].token_ids
            except EngineError as error:
                return time.monotonic(), str(error)

        ends = await asyncio.gather(*map(end, running))
        for is_lost, found, (whole,) in zip(theirs, ends, expected[ENDLESS], strict=False):
            if is_lost:
                told, words = found
                assert told - begun < 3
                assert re.search("status -9.* send it again", words)
            else:
                assert found == whole
        assert replicas.state is State.READY
        assert await answer(service, PROMPTS[0], PARAMS[0]) == expected[PARAMS[0]][0]
        await all_ready(replicas)
        assert (replicas.num_restarts, replicas.pids[0]) == (restarts + 1, kept)
        found = await asyncio.gather(*(answer(service, prompt, PARAMS[1]) for prompt in PROMPTS))
        assert found == expected[PARAMS[1]]
        assert leftovers() == before
        assert service.metrics.ended["error"] == sum(theirs)
        assert not service.metrics._open, "nothing counts as running that has ended"

    shared(play)


def test_one_that_cannot_be_started_again_is_tried_again(shared: Shared) -> None:
    """While the other takes requests, whatever it fails with; it comes back once nothing is in its way."""

    async def play(service: Service) -> None:
        replicas = of(service)
        options, restarts = replicas._replicas[0]._options, replicas.num_restarts
        model, options["model"] = options["model"], "/nothing"
        os.kill(replicas.pids[0] or 0, signal.SIGKILL)
        await until(lambda: replicas.num_restarts == restarts + 2)
        options["model"] = model
        assert [each.state for each in replicas.replicas] == ["restarting", "ready"]
        assert replicas.state is State.READY
        before = requests_of(service)
        for prompt in PROMPTS:
            await answer(service, prompt, PARAMS[0])
        assert [now - then for now, then in zip(requests_of(service), before, strict=True)] == [0, len(PROMPTS)]
        await all_ready(replicas)
        assert not replicas.finished.done()

    shared(play)


def test_a_prompt_goes_where_its_beginning_is_cached(shared: Shared) -> None:
    """As long as nothing else is to be done there."""

    async def play(service: Service) -> None:
        for prompt in PROMPTS:  # so that both have measured what a prompt costs
            await answer(service, prompt, PARAMS[0])
        before, hits = requests_of(service), of(service).gauges.num_prefix_hit_tokens
        for last in range(6):
            await answer(service, [*range(30, 130), last], PARAMS[0])
        gained = [now - then for now, then in zip(requests_of(service), before, strict=True)]
        assert sorted(gained) == [0, 6]
        assert of(service).gauges.num_prefix_hit_tokens - hits == 5 * 96

    shared(play)


def leftovers() -> tuple[int, int]:
    """Descriptors and child processes."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text("ascii").split()
    return len(os.listdir("/proc/self/fd")), len(children)


def test_all_replicas_have_an_adapter_or_none(shared: Shared, folder: Path, tmp_path: Path) -> None:
    """One that is loaded, refused by one replica, replaced, missing in a replica that was started meanwhile, and
    unloaded."""
    shapes = {name: info.shape for name, info in Weights(folder).infos.items()}
    first, second = (write_adapter(tmp_path / str(seed), shapes, seed=seed, size=0.5) for seed in range(2))
    prompt, params = PROMPTS[0], PARAMS[0]

    async def both(service: Service, name: str | None) -> Texts:
        """What both replicas say, which is the same. With salts of their own no prefix is cached for any."""
        running = [start(service, prompt, params, adapter=name, salt=b"%d" % number) for number in range(8)]
        assert min(each.client.num_open for each in of(service)._replicas) >= 1
        texts = [(await each.whole())[0].outputs[0].token_ids for each in running]
        assert texts == [texts[0]] * 8
        return texts[0]

    async def play(service: Service) -> None:
        replicas = of(service)
        plain = await both(service, None)
        await replicas.load_adapter(AdapterSource("fr", str(first)), False)
        french = await both(service, "fr")
        assert french != plain

        # Only one has "de": the other refuses to be without it, and then none is loaded anew.
        await replicas._replicas[1].load_adapter(AdapterSource("de", str(second)), False)
        with pytest.raises(InputError, match="is loaded"):
            await replicas.load_adapter(AdapterSource("de", str(second)), False)
        assert [set(each.adapters) for each in replicas._replicas] == [{"fr"}, {"fr", "de"}]
        assert set(replicas.adapters) == {"fr"}

        # While one is started again, one adapter is replaced and another comes.
        os.kill(replicas.pids[1] or 0, signal.SIGKILL)
        await until(lambda: replicas._replicas[1].state is not State.READY)
        await replicas.load_adapter(AdapterSource("fr", str(second)), True)
        await replicas.load_adapter(AdapterSource("it", str(first)), False)
        alone = await answer(service, prompt, params, adapter="fr")
        await until(lambda: all(replicas._replicas[1].has(info) for info in replicas.adapters.values()))
        await until(lambda: set(replicas._replicas[1].adapters) == {"fr", "it"})
        assert await both(service, "fr") == alone[0] != french
        assert await both(service, "it") == french

        for name in ("fr", "it"):
            await replicas.unload_adapter(name)
        with pytest.raises(UnknownAdapterError, match="fr"):
            await replicas.unload_adapter("fr")
        assert [set(each.adapters) for each in replicas._replicas] == [set(), set()]
        assert await both(service, None) == plain

    shared(play)


def test_a_start_that_fails_ends_all(folder: Path) -> None:
    async def play() -> None:
        options = {"model": str(folder), **OPTIONS, "kv_cache_gib": 1e4}
        replicas = Replicas(options, Metrics("none").of_replica, 2)
        with pytest.raises(CapacityError, match="Replica 0 of 2, which share the memory: kv_cache_gib is 10000"):
            await asyncio.wait_for(asyncio.shield(replicas.finished), 60)
        assert [each.state for each in replicas.replicas] == ["failed", "loading"]
        with pytest.raises(EngineError, match="failed"):
            replicas.place(Request(id="1", prompt_ids=[1], params=PARAMS[0]))
        await replicas.close()

    asyncio.run(play())


def test_memory_cores_and_files_are_shared(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --threads and --kv-cache-gib: caches are of one size, and each engine keeps its texts in a file of its
    own, which is there after the end."""
    monkeypatch.delenv("SPECSERVE_THREADS", raising=False)
    options = {"drafter": "suffix", "drafter_options": {"store_path": str(tmp_path / "texts")}, "threads": None}

    async def play() -> None:
        async with replicated(folder, 2, kv_cache_gib=None, **options) as service:
            await asyncio.gather(*(answer(service, prompt, PARAMS[0]) for prompt in PROMPTS))
            gauges = [each.gauges for each in of(service)._replicas]
            assert gauges[0] is not None
            assert gauges[1] is not None
            assert gauges[0].num_blocks == gauges[1].num_blocks > 0
            about = [each.ready.about["threads"] for each in of(service)._replicas if each.ready is not None]
            assert about == [str(max(1, usable_cores() // 2))] * 2

    asyncio.run(play())
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == ["texts", "texts.1"]


def test_more_threads_than_cores_are_warned_of(caplog: pytest.LogCaptureFixture, folder: Path) -> None:
    async def play() -> None:
        options = {"model": str(folder), **OPTIONS, "threads": usable_cores()}
        await Replicas(options, Metrics("none").of_replica, 2).close(hurried=True)

    asyncio.run(play())
    assert f"2 processes with {usable_cores()} threads each share {usable_cores()} cores" in caplog.text


def test_replicas_do_not_share_a_gpu() -> None:
    with fake_cuda():
        config = EngineConfig(device="cuda")
        check_shared(config, 1)
        with pytest.raises(ConfigError, match="--data-parallel-size is 2, and replicas share a CPU"):
            check_shared(config, 2)
    check_shared(EngineConfig(device="cpu"), 2)


def test_a_wrong_option_is_told_at_once(folder: Path) -> None:
    async def play() -> None:
        with pytest.raises(ConfigError, match="max_num_seqs"):
            Replicas({"model": str(folder), "max_num_seqs": 0}, Metrics("none").of_replica, 2)

    asyncio.run(play())
