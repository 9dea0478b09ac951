"""Headless engines of which some compute prompts for others, over TCP: the text and the acceptance of one engine, and
what happens when one of them, or the way between them, fails."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from msgspec import structs

from specserve.checkpoint.identity import model_digest
from specserve.cluster import kv_link
from specserve.cluster.kv_link import Fetcher
from specserve.engine.request import Request
from specserve.errors import ConfigError, EngineError
from specserve.llm import LLM
from specserve.models.decoder import Decoder
from specserve.models.heads.formats import write_head
from specserve.models.heads.speculators import Verifier
from specserve.models.loader import load_model
from specserve.ops.choice import choose_ops
from specserve.outputs import CompletionOutput
from specserve.parallel.handshake import LinkError
from specserve.server.answers import Answers, Prepared
from specserve.server.chats import Chats
from specserve.server.engine.client import EngineClient
from specserve.server.engine.headless import HeadlessEngine
from specserve.server.engine.keeper import State, Timeouts
from specserve.server.engine.listen_options import EngineListenOptions
from specserve.server.engine.messages import ImportKV, Ready
from specserve.server.engine.remote import Dialer
from specserve.server.engine.remote_engines import RemoteEngines
from specserve.server.grammar_validator import GrammarValidator
from specserve.server.metrics import Metrics
from specserve.server.service import Service
from specserve.testing import write_tiny_model
from specserve.testing.heads import trained_eagle
from specserve.text.tokenizer import Tokenizer
from specserve.types import SamplingParams

BLOCK = 16
OPTIONS: dict[str, Any] = {
    "threads": 1, "max_num_seqs": 4, "kv_cache_gib": 0.005, "max_model_len": 256, "adaptive": False, "dtype": "float32",
    "block_size": BLOCK,
}  # fmt: skip
SECRET = b"0123456789abcdef0123456789abcdef"
PROMPT = [(7 * i + 3 * i * i) % 280 for i in range(5 * BLOCK + 7)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=11, max_tokens=24, ignore_eos=True)
PROMPTS = [[*PROMPT[: 20 + 6 * i], *range(i, i + 9)] for i in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_bytes(SECRET)
    return path


@pytest.fixture(scope="module")
def eagle(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of engines with a head."""
    target = load_model(folder, choose_ops(torch.device("cpu"), "float32", "none", 1))
    assert isinstance(target, Decoder)
    with LLM(str(folder), **OPTIONS, drafter="none") as llm:
        texts = [PROMPT + llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids]
    path = tmp_path_factory.mktemp("eagle")
    write_head(path, *trained_eagle(target, texts, 3, 30), Verifier(str(folder)))
    return {"drafter": "eagle", "drafter_options": {"head": str(path)}}


Outputs = dict[tuple[int, ...], list[CompletionOutput]]


@pytest.fixture(scope="module")
def expected(folder: Path, eagle: dict[str, Any]) -> dict[SamplingParams, Outputs]:
    """What one engine of this process says, with its head."""
    found: dict[SamplingParams, Outputs] = {}
    for params in (GREEDY, SEEDED):
        with LLM(str(folder), **OPTIONS, **eagle) as llm:
            outs = [llm.generate([prompt], params)[0] for prompt in (PROMPT, *PROMPTS)]
        found[params] = {tuple(prompt): out.outputs for prompt, out in zip((PROMPT, *PROMPTS), outs, strict=True)}
    return found


async def until(condition: Callable[[], object], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def headless(folder: Path, secret: Path, role: Any, **options: Any) -> AsyncIterator[HeadlessEngine]:
    listen = EngineListenOptions(listen="127.0.0.1:0", secret_file=secret, role=role)
    engine = HeadlessEngine({"model": str(folder), **OPTIONS, **options}, listen, Timeouts(stall_s=2.0, kv_s=2.0))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


Engines = list[HeadlessEngine]
Play = Callable[[Engines], Coroutine[Any, Any, None]]
Shared = Callable[[Play], None]


@pytest.fixture(scope="module")
def shared(folder: Path, secret: Path, eagle: dict[str, Any]) -> Iterator[Shared]:
    """`shared(play)`: a play on engines that tests share: one computes prompts and two answer, the last of which has
    no head. All are ready, without a server, and hold no KV for each other before and after it."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()

        async def started() -> Engines:
            kinds: list[tuple[str, dict[str, Any]]] = [("prefill", eagle), ("decode", eagle)]
            kinds.append(("decode", {"drafter": "ngram"}))
            return [await stack.enter_async_context(headless(folder, secret, *kind[:1], **kind[1])) for kind in kinds]

        engines = runner.run(started())

        async def played(play: Play) -> None:
            async with asyncio.timeout(100):
                await until(lambda: all(each.supervisor.state is State.READY for each in engines))
                await play(engines)
                await until(lambda: not any(each.is_connected or each.num_open or each.kv.num_held for each in engines))
                await until(lambda: not any(map(shared_memory, engines)))
                await until(lambda: all(each.supervisor.state is State.READY for each in engines))

        yield lambda play: runner.run(played(play))
        runner.run(stack.aclose())


def shared_memory(engine: HeadlessEngine) -> list[str]:
    """Memory for KV that the engine's process and this one have open or mapped."""
    found = []
    for pid in (engine.supervisor.pid, os.getpid()):
        for path in (*Path(f"/proc/{pid}/fd").iterdir(), *Path(f"/proc/{pid}/map_files").iterdir()):
            try:
                found.append(os.readlink(path))
            except OSError:  # closed meanwhile
                continue
    return [name for name in found if "specserve-kv" in name]


_BEFORE: dict[RemoteEngines, tuple[int, int]] = {}  # of engines that had other servers


@asynccontextmanager
async def served(folder: Path, *engines: HeadlessEngine) -> AsyncIterator[Service]:
    """A server of these engines, all of which are ready."""
    metrics = Metrics("tiny")
    dialer = Dialer(SECRET, "tiny", model_digest(folder))
    group = RemoteEngines([str(each.address) for each in engines], dialer, metrics.of_replica, least_tokens=1)
    service = Service(group, Tokenizer(folder), metrics, GrammarValidator(folder), Chats(folder), 2**20)
    try:
        await until(lambda: all(each.state == "ready" for each in group.replicas))
        await group.reset_prefix_cache()
        known = [each.supervisor.gauges for each in engines]
        before = [(each.num_prompts_received, each.num_transfer_failures) for each in known if each is not None]
        _BEFORE[group] = sum(one for one, _ in before), sum(one for _, one in before)
        yield service
    finally:
        await group.close()
        service.close()


def of(service: Service) -> RemoteEngines:
    assert isinstance(service.supervisor, RemoteEngines)
    return service.supervisor


def start(service: Service, prompt: list[int], params: SamplingParams, **fields: Any) -> Answers:
    return service.start([Prepared(Request(id=service.new_id(), prompt_ids=prompt, params=params, **fields))])


async def answer(service: Service, prompt: list[int], params: SamplingParams, **fields: Any) -> CompletionOutput:
    with start(service, prompt, params, **fields) as running:
        return (await running.whole())[0].outputs[0]


def counts(service: Service) -> tuple[int, int]:
    """Prompts of which KV came, and of which it did not, since the server is there."""
    gauges, before = of(service).gauges, _BEFORE[of(service)]
    return gauges.num_prompts_received - before[0], gauges.num_transfer_failures - before[1]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_text_and_the_acceptance_of_one_engine(
    shared: Shared, folder: Path, expected: dict[SamplingParams, Outputs], params: SamplingParams
) -> None:
    """The KV of a head comes over the wire; one prompt after another, and many at once."""

    async def play(engines: Engines) -> None:
        async with served(folder, *engines[:2]) as service:
            one = expected[params][tuple(PROMPT)][0]
            found = await answer(service, PROMPT, params)
            assert found.token_ids == one.token_ids
            assert found.stats.num_received_tokens == 5 * BLOCK
            assert found.stats.num_accepted_tokens == one.stats.num_accepted_tokens
            assert params is SEEDED or found.stats.num_accepted_tokens > 0
            assert found.stats.accepted_by_position == one.stats.accepted_by_position
            assert found.stats.drafted_by_position == one.stats.drafted_by_position
            assert counts(service) == (1, 0)
            at_once = await asyncio.gather(*(answer(service, prompt, params) for prompt in PROMPTS))
            assert [each.token_ids for each in at_once] == [
                expected[params][tuple(prompt)][0].token_ids for prompt in PROMPTS
            ]
            assert counts(service)[0] > 1 and counts(service)[1] == 0
            assert [each.role for each in of(service).replicas] == ["prefill", "decode"]
            assert of(service).num_places == OPTIONS["max_num_seqs"]

    shared(play)


def test_an_engine_without_the_head_drops_its_kv(
    shared: Shared, folder: Path, expected: dict[SamplingParams, Outputs]
) -> None:
    async def play(engines: Engines) -> None:
        async with served(folder, engines[0], engines[2]) as service:
            found = await answer(service, PROMPT, SEEDED)
            assert found.token_ids == expected[SEEDED][tuple(PROMPT)][0].token_ids
            assert found.stats.num_received_tokens == 5 * BLOCK
            assert counts(service) == (1, 0)

    shared(play)


@pytest.mark.parametrize(
    ("moment", "number"),
    [("prompt", signal.SIGSTOP), ("export", signal.SIGKILL), ("export", signal.SIGSTOP)],
    ids=["stopped-with-a-prompt", "killed-at-its-export", "stopped-at-its-export"],
)
def test_an_engine_that_fails_leaves_its_prompts_to_the_other(
    shared: Shared,
    folder: Path,
    expected: dict[SamplingParams, Outputs],
    moment: str,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the other one answers meanwhile goes on. One that stands still with a prompt is killed in time."""

    async def play(engines: Engines) -> None:
        pid = engines[0].supervisor.pid
        assert pid is not None
        async with served(folder, *engines[:2]) as service:
            with monkeypatch.context() as patch:
                if moment == "export":
                    told = EngineClient.export_kv

                    def export_kv(self: EngineClient, *arguments: Any) -> None:
                        os.kill(pid, number)
                        told(self, *arguments)

                    patch.setattr(EngineClient, "export_kv", export_kv)
                else:
                    os.kill(pid, number)
                asking = asyncio.create_task(answer(service, PROMPT, GREEDY))
                await until(lambda: of(service).replicas[0].num_requests == 1)
                short = await answer(service, PROMPT[:BLOCK], GREEDY)
                assert len(short.token_ids) == GREEDY.max_tokens
                found = await asyncio.wait_for(asking, 20)
            assert found.token_ids == expected[GREEDY][tuple(PROMPT)][0].token_ids
            assert found.stats.num_received_tokens == 0
            assert counts(service) == (0, 1)
            if moment == "export" and number == signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)
            else:
                alone = await answer(service, PROMPT[::-1], GREEDY)  # where nobody else computes prompts
                assert alone.stats.num_received_tokens == 0
            await until(lambda: [each.state for each in of(service).replicas] == ["ready"] * 2)
            assert (await answer(service, PROMPTS[7], GREEDY)).stats.num_received_tokens > 0

    shared(play)


def test_what_cannot_be_fetched_is_computed(
    shared: Shared, folder: Path, expected: dict[SamplingParams, Outputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody at the address, a connection that breaks in the middle, another frame, one that is too large. A way that
    failed several times is left alone."""
    tokens = expected[GREEDY][tuple(PROMPT)][0].token_ids

    async def play(engines: Engines) -> None:
        monkeypatch.setattr(engines[0], "kv_address", "127.0.0.1:1")
        async with served(folder, *engines[:2]) as service:
            for i in range(3):
                found = await answer(service, PROMPT, GREEDY, salt=b"nobody%d" % i)
                assert (found.token_ids, found.stats.num_received_tokens) == (tokens, 0)
            assert counts(service) == (0, 2), "the third one was not sent"
            assert of(service).replicas[0].num_requests == 2
        monkeypatch.undo()
        monkeypatch.setattr(kv_link, "PIECE_BYTES", 1000)
        pieces = 0

        def cut(message: bytes, frames: Any) -> bytes:
            nonlocal pieces
            pieces += 1
            if pieces == 3:
                for session in engines[0]._engines:
                    session.connection.cut(LinkError("cut"))
            return told(message, frames)

        told = kv_link.answer
        flipped = bytearray(range(256))
        flipped[0] = 1

        def changed(message: bytes, frames: Any) -> bytes:
            return told(message, {name: memoryview(bytes(frame).translate(flipped)) for name, frame in frames.items()})

        for number, wrong in enumerate((cut, changed)):
            with monkeypatch.context() as patch:
                patch.setattr("specserve.server.engine.kv_relay.answer", wrong)
                async with served(folder, *engines[:2]) as service:
                    found = await answer(service, PROMPT, GREEDY, salt=b"wrong%d" % number)
                    assert (found.token_ids, found.stats.num_received_tokens) == (tokens, 0)
                    assert counts(service) == (0, 1)
        async with served(folder, *engines[:2]) as service:
            monkeypatch.setattr(engines[1].kv, "most_bytes", -(2**26))
            found = await answer(service, PROMPT, GREEDY, salt=b"large")
            assert (found.token_ids, counts(service)) == (tokens, (0, 1))
            monkeypatch.undo()
            found = await answer(service, PROMPT, GREEDY, salt=b"fine")
            assert (found.token_ids, counts(service)) == (tokens, (1, 1))

    shared(play)


def test_a_server_that_goes_leaves_nothing(shared: Shared, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a transfer, at which it then hangs; and requests that are aborted then."""

    async def play(engines: Engines) -> None:
        fetching = asyncio.Event()

        async def hang(*arguments: Any) -> None:
            fetching.set()
            await asyncio.sleep(100)

        monkeypatch.setattr(Fetcher, "fetch", hang)
        for goes in (True, False):
            fetching.clear()
            async with served(folder, *engines[:2]) as service:
                running = start(service, PROMPT, GREEDY, salt=b"goes%d" % goes)
                await fetching.wait()
                assert engines[0].kv.num_held and engines[1].kv.num_held
                if not goes:
                    with running:
                        pass
                    await until(lambda: not any(each.kv.num_held or each.num_open for each in engines))
        monkeypatch.undo()

    shared(play)


def test_engines_that_only_compute_prompts_answer_nobody(shared: Shared, folder: Path) -> None:
    async def play(engines: Engines) -> None:
        group = RemoteEngines(
            [str(engines[0].address)], Dialer(SECRET, "tiny", model_digest(folder)), Metrics("tiny").of_replica
        )
        with pytest.raises(
            ConfigError, match=r"no engine answers: those that are ready have --role prefill\. Start one"
        ):
            await asyncio.wait_for(group.wait_until_ready(), 30)
        await group.close()
        async with served(folder, *engines[:2]) as service:
            await of(service).remove_engine(str(engines[1].address), 0)
            assert of(service).state is State.RESTARTING
            with pytest.raises(EngineError, match="--role prefill"):
                of(service).place(Request(id="x", prompt_ids=PROMPT, params=GREEDY))
            with pytest.raises(EngineError, match="--role prefill"):
                of(service).wake_engine()

    shared(play)


def test_whoever_is_no_engine_gets_no_kv(shared: Shared, folder: Path) -> None:
    """Another secret; an engine that has none to give; a server that wants some of an engine with both roles."""

    async def play(engines: Engines) -> None:
        digest = model_digest(folder)
        for engine, secret, says in (
            (engines[0], b"another secret, long enough", "another secret"),
            (engines[1], SECRET, "--role decode, and hands on no KV"),
            (engines[0], SECRET, "does not hold that KV any more"),
        ):
            fetcher = Fetcher(secret, digest, None, lambda address: None)
            with pytest.raises(LinkError, match=says):
                await fetcher.fetch(engine.address, "nothing", 10, lambda start, piece: None)
        async with served(folder, engines[1]) as service:
            client: Any = of(service)._replicas[0].client
            engines[1].exchanges_kv = False
            client._write(msgspec.msgpack.encode(ImportKV("x", "", 10, "", "127.0.0.1:1")))
            await until(client.over.done)
            engines[1].exchanges_kv = True

    shared(play)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"role": "some"}, "--role: .*some"),
        ({"kv_address": "10.0.0.1:7000"}, "--kv-address .* --role prefill"),
        ({"kv_address": "nowhere", "role": "prefill"}, "--kv-address is 'nowhere'; it must be HOST:PORT"),
        ({"peer_ca": Path("ca.pem"), "role": "prefill"}, "--peer-ca .* --role decode"),
        ({"tls_cert": Path("c.pem"), "tls_key": Path("k.pem"), "role": "decode"}, "Give --peer-ca"),
    ],
)
def test_options_of_roles(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineListenOptions(**options)


def test_a_role_needs_a_prefix_cache(folder: Path, secret: Path) -> None:
    listen = EngineListenOptions(listen="127.0.0.1:0", secret_file=secret, role="decode")
    with pytest.raises(ConfigError, match=r"--role decode: .* prefix cache"):
        HeadlessEngine({"model": str(folder), "prefix_caching": False}, listen)


def test_engines_whose_kv_differs_do_not_serve_together(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another drafter is no reason, where one of the two only computes prompts."""
    prefill = Ready(300, 256, 4, "eagle", ["eagle"], {}, "", {}, {}, role="prefill", numerics="native avx2 float32")
    decode = structs.replace(prefill, role="decode", drafter="ngram", drafters=["ngram"])

    async def play() -> None:
        group = RemoteEngines([], Dialer(SECRET, "tiny", ""), Metrics("tiny").of_replica, membership=never)
        group._taking = lambda: [SimpleNamespace(ready=prefill, role="prefill")]  # type: ignore[method-assign,list-item]
        group.check_alike(decode)
        assert "compute prompts draft with eagle, and those that answer with ngram" in caplog.text
        with pytest.raises(LinkError, match=r"computed with native avx512 float32, and .* with native avx2 float32"):
            group.check_alike(structs.replace(decode, numerics="native avx512 float32"))
        with pytest.raises(LinkError, match="Its drafter is ngram"):
            group.check_alike(structs.replace(decode, role="prefill"))
        await group.close()

    async def never(group: RemoteEngines) -> None:
        await asyncio.Event().wait()

    asyncio.run(play())
