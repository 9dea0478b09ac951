"""Requests whose KV comes from another engine: the text, the drafts and the invariants of one engine, whatever comes,
whenever, or does not."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve.checkpoint.weights import Weights
from specserve.config import EngineConfig
from specserve.engine.build import Built, build
from specserve.engine.compiling import Compiling
from specserve.engine.engine import Engine
from specserve.engine.port import LocalPort, QueueTimeoutError
from specserve.engine.request import Request
from specserve.errors import SpecserveError
from specserve.models.decoder import Decoder
from specserve.models.heads.formats import write_head
from specserve.models.heads.speculators import Verifier
from specserve.models.loader import load_model
from specserve.ops.choice import choose_ops
from specserve.parallel.awaiting import Awaiting
from specserve.parallel.connector import Arrival, Failed, News, NoConnector
from specserve.parallel.kv_transfer import PrefixTransfer
from specserve.parallel.prefix_connector import PrefixConnector
from specserve.structured.spec import Structured
from specserve.testing import check_integrity, write_adapter, write_tiny_model
from specserve.testing.heads import trained_block, trained_eagle, trained_medusa
from specserve.types import BlockTable, Event, SamplingParams, Sequence, SequenceStats

BLOCK = 16
BLOCK_GIB = 3 * 2 * BLOCK * 2 * 16 * 4 / 2**30  # of the tiny model's layers in float32
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=11, max_tokens=24, ignore_eos=True)
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
PROMPT = [(7 * i + 3 * i * i) % 280 for i in range(5 * BLOCK + 7)]
WORDS = Structured.regex(r"(the|and) [a-z ]{3,40}(other stone|thing)\.")
_ids = itertools.count()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


@pytest.fixture(scope="module")
def heads(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """That learned what the model says after the prompt; "other" is an EAGLE head that learned less."""
    target = load_model(tiny, choose_ops(torch.device("cpu"), "float32", "none", 1))
    assert isinstance(target, Decoder)
    texts = [PROMPT[:stop] + tokens_of(make(tiny), PROMPT[:stop]) for stop in (30, 50, len(PROMPT))]
    trained = {
        "eagle": trained_eagle(target, texts, 3, 40),
        "other": trained_eagle(target, texts, 3, 5),
        "block": trained_block(target, texts, 60, has_anchor_inputs=True),
        "medusa": trained_medusa(target, texts, 40),
    }
    found = {}
    for name, (spec, weights, d2t) in trained.items():
        found[name] = tmp_path_factory.mktemp(name)
        write_head(found[name], spec, weights, d2t, Verifier(str(tiny)))
    return found


def make(model: Path, **options: Any) -> Built:
    usual: dict[str, Any] = {"max_model_len": 160, "max_step_ms": 1e9, "adaptive": False, "threads": 1}
    usual |= {"dtype": "float32", "drafter": "none", "block_size": BLOCK, "kv_cache_gib": 60 * BLOCK_GIB}
    return build(EngineConfig(model=str(model), **{**usual, **options}))


class Link:
    """Two engines in this process: one computes prompts, the other asks it for their KV. `reply` makes of a frame what
    arrives; None: nothing does."""

    def __init__(
        self, source: Built, target: Built, reply: Callable[[bytes], bytes | None] = lambda frame: frame
    ) -> None:
        self.source, self.target, self.reply = source, target, reply
        self.now = 0.0
        self.done: list[tuple[int, str]] = []
        self._requests: dict[str, Request] = {}
        self._giving, taking = source.prefix_transfer(), target.prefix_transfer()
        self.connector = PrefixConnector(taking, BLOCK, self._give, self._end, 10.0, lambda: self.now)
        target.engine.scheduler.awaiting.connector = self.connector

    def send(self, prompt: list[int], params: SamplingParams, prefill: bool = True, **fields: Any) -> str:
        """A request for the second engine, whose prompt the first one computes."""
        name = f"r{next(_ids)}"
        drafter = {"drafter": fields["drafter"]} if "drafter" in fields else {}
        first = {key: value for key, value in fields.items() if key in ("salt", "adapter")} | drafter
        if prefill:
            tokens_of(self.source, prompt, ONE, **first)
        grammar = None
        if params.structured is not None:
            grammar = self.target.compiler.compile(params.structured)
        request = Request(id=name, prompt_ids=prompt, params=params, num_elsewhere=len(prompt), **fields)
        self._requests[name] = request
        self.target.engine.add(request, grammar)
        return name

    def _give(self, name: str, first: int) -> None:
        request = self._requests[name]
        pieces = self._giving.export_parts(request.prompt_ids, request.salt, request.adapter, first)
        if pieces is None:
            self.connector.refuse(name, "It is not cached any more.")
        elif (frame := self.reply(b"".join(pieces))) is not None:
            self.connector.take(name, lambda: memoryview(frame))

    def _end(self, name: str, num_tokens: int, reason: str) -> None:
        self.done.append((num_tokens, reason))


def drive(engine: Engine, check: bool = True) -> dict[tuple[str, int], tuple[list[int], SequenceStats]]:
    """Until all have ended: the tokens and the counts of each completion."""
    tokens: dict[tuple[str, int], list[int]] = {}
    stats: dict[tuple[str, int], SequenceStats] = {}
    while engine.requests:
        engine.receive()
        events = engine.step() if engine.has_work else []
        for event in events:
            assert event.error is None
            tokens.setdefault((event.request_id, event.index), []).extend(event.tokens)
            if event.stats is not None:
                stats[event.request_id, event.index] = event.stats
        if check:
            check_all(engine)
    assert engine.cache.num_free == engine.cache.num_blocks
    assert not engine.scheduler.awaiting.seqs
    return {name: (tokens[name], stats[name]) for name in tokens}


def viewed(frame: bytes) -> memoryview:
    return memoryview(frame)


def check_all(engine: Engine) -> None:
    scheduler = engine.scheduler
    check_integrity(engine.cache, [*scheduler.running, *scheduler.waiting], scheduler.awaiting.seqs)


def tokens_of(built: Built, prompt: list[int], params: SamplingParams = GREEDY, **fields: Any) -> list[int]:
    """What one engine says by itself."""
    return alone(built, prompt, params, **fields)[0][0]


def alone(
    built: Built, prompt: list[int], params: SamplingParams = GREEDY, **fields: Any
) -> list[tuple[list[int], SequenceStats]]:
    grammar = None if params.structured is None else built.compiler.compile(params.structured)
    built.engine.add(Request(id=f"r{next(_ids)}", prompt_ids=prompt, params=params, **fields), grammar)
    return [*drive(built.engine, check=False).values()]


def drafts(stats: SequenceStats) -> tuple[Any, ...]:
    return stats.num_steps, stats.drafted_by_position, stats.accepted_by_position, stats.by_source


def drafting(kind: str, tiny: Path, heads: dict[str, Path]) -> dict[str, Any]:
    if kind == "draft_model":
        return {"drafter": kind, "draft_model": str(tiny)}
    if kind in heads:
        return {"drafter": "eagle" if kind == "other" else kind, "drafter_options": {"head": str(heads[kind])}}
    return {"drafter": kind}


KINDS = ("none", "ngram", "suffix", "prediction", "draft_model", "eagle", "block", "medusa")


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("kind", KINDS)
def test_text_and_drafts_are_those_of_one_engine(
    tiny: Path, heads: dict[str, Path], kind: str, params: SamplingParams
) -> None:
    options = drafting("none" if kind == "prediction" else kind, tiny, heads)
    fields: dict[str, Any] = {"private": True}  # a store would learn in one engine what it does not in the other
    if kind == "prediction":
        fields["prediction"] = tuple(tokens_of(make(tiny), PROMPT, params))
    ((expected, one),) = alone(make(tiny, **options), PROMPT, params, **fields)
    link = Link(make(tiny, **options), make(tiny, **options))
    link.send(PROMPT, params, **fields)
    ((tokens, stats),) = drive(link.target.engine).values()
    assert tokens == expected
    assert drafts(stats) == drafts(one)
    assert stats.num_received_tokens == 5 * BLOCK
    assert stats.num_prefix_cached_tokens == 0, "nobody had asked this before"
    assert link.done == [(5 * BLOCK, "")]
    awaiting = link.target.engine.scheduler.awaiting
    assert (awaiting.num_prompts, awaiting.num_tokens, awaiting.num_failures) == (1, 5 * BLOCK, 0)
    if kind in ("prediction", "draft_model", "eagle", "block", "medusa") and params is GREEDY:
        assert stats.num_accepted_tokens > 0


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_grammars_completions_beams_and_adapters(tiny: Path, params: SamplingParams, tmp_path: Path) -> None:
    shapes = {name: info.shape for name, info in Weights(tiny).infos.items()}
    options = {"lora": (f"x={write_adapter(tmp_path / 'x', shapes, seed=1)}",), "drafter": "ngram"}
    single, link = make(tiny, **options), Link(make(tiny, **options), make(tiny, **options))
    asked: list[tuple[SamplingParams, dict[str, Any]]] = [
        (dataclasses.replace(params, structured=WORDS, ignore_eos=False), {"salt": b"a"}),
        (dataclasses.replace(params, n=3), {"salt": b"b"}),
        (params, {"adapter": "x", "salt": b"c"}),
        (SamplingParams(beam_width=3, max_tokens=10), {"salt": b"d"}),
    ]
    for wanted, fields in asked:
        expected = alone(single, PROMPT, wanted, **fields)
        link.send(PROMPT, wanted, **fields)
        found = [*drive(link.target.engine).values()]
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        assert link.done.pop() == (5 * BLOCK, ""), "beams and completions share what came for one of them"
    assert link.target.engine.scheduler.awaiting.num_failures == 0


def test_experts(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "mixtral", "mixtral", seed=3)
    expected = tokens_of(make(folder), PROMPT)
    link = Link(make(folder), make(folder))
    link.send(PROMPT, GREEDY)
    ((tokens, stats),) = drive(link.target.engine).values()
    assert (tokens, stats.num_received_tokens) == (expected, 5 * BLOCK)


def test_only_blocks_that_the_other_side_lacks_are_sent(tiny: Path) -> None:
    frames: list[int] = []

    def measure(frame: bytes) -> bytes:
        frames.append(len(frame))
        return frame

    link = Link(make(tiny), make(tiny), measure)
    tokens_of(link.target, PROMPT[: 3 * BLOCK + 1], ONE)
    expected = tokens_of(make(tiny), PROMPT)
    link.send(PROMPT, GREEDY)
    ((tokens, stats),) = drive(link.target.engine).values()
    assert tokens == expected
    assert (stats.num_prefix_cached_tokens, stats.num_received_tokens) == (3 * BLOCK, 2 * BLOCK)
    per_block = BLOCK_GIB * 2**30
    assert 2 * per_block < frames[0] < 3 * per_block
    link.send(PROMPT, GREEDY)
    drive(link.target.engine)
    assert len(frames) == 1, "nothing is asked for that is here"


@pytest.mark.parametrize(
    ("source", "target"), [("none", "eagle"), ("other", "eagle"), ("eagle", "none"), ("eagle", "block")]
)
def test_a_head_has_no_kv_of_another(tiny: Path, heads: dict[str, Path], source: str, target: str) -> None:
    link = Link(make(tiny, **drafting(source, tiny, heads)), make(tiny, **drafting(target, tiny, heads)))
    expected = tokens_of(make(tiny), PROMPT)
    link.send(PROMPT, GREEDY)
    ((tokens, stats),) = drive(link.target.engine).values()
    assert (tokens, stats.num_received_tokens) == (expected, 5 * BLOCK)
    assert not any(link.target.engine.cache.pool.drafted[: 5 * BLOCK // BLOCK + 1])


def logged(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (lambda frame: frame[:-1], "The frame is cut: 1 of"),
        (lambda frame: frame[:200] + b"\xff\0" + frame[202:], "checksum"),
        (lambda frame: b"", "ends after 0 bytes"),
    ],
)
def test_what_cannot_be_read_is_computed(
    tiny: Path, reply: Callable[[bytes], bytes], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = tokens_of(make(tiny), PROMPT)
    link = Link(make(tiny), make(tiny), reply)
    link.send(PROMPT, GREEDY)
    ((tokens, stats),) = drive(link.target.engine).values()
    assert (tokens, stats.num_received_tokens) == (expected, 0)
    assert link.target.engine.scheduler.awaiting.num_failures == 1
    assert says in logged(caplog)
    assert "it is computed" in logged(caplog)


def test_kv_of_another_model_or_prompt_is_not_taken(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = tokens_of(make(tiny), PROMPT)
    other = Link(make(write_tiny_model(tmp_path / "other", "llama", seed=4)), make(tiny))
    other.send(PROMPT, GREEDY)
    ((tokens, _),) = drive(other.target.engine).values()
    assert tokens == expected
    assert "The frame's model" in logged(caplog)
    source = make(tiny)
    wrong = [(5 * i + 1) % 280 for i in range(len(PROMPT))]
    tokens_of(source, wrong, ONE)
    frame = source.prefix_transfer().export_prefix(wrong)
    link = Link(source, make(tiny), lambda _: frame)
    link.send(PROMPT, GREEDY)
    ((tokens, _),) = drive(link.target.engine).values()
    assert tokens == expected
    assert "of other tokens" in logged(caplog)


def test_who_has_forgotten_says_so(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    link = Link(make(tiny), make(tiny))
    link.send(PROMPT, GREEDY, prefill=False)
    ((tokens, _),) = drive(link.target.engine).values()
    assert tokens == tokens_of(make(tiny), PROMPT)
    assert "not cached any more" in logged(caplog)


def test_silence_ends_after_its_time_and_holds_up_nobody(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    link = Link(make(tiny), make(tiny), lambda frame: None)
    engine = link.target.engine
    name = link.send(PROMPT, GREEDY)
    other = [5, 6, 7] * 4
    engine.add(Request(id="other", prompt_ids=other, params=GREEDY))
    ended: list[str] = []
    while "other" not in ended:
        engine.receive()
        ended += [event.request_id for event in engine.step() if event.finish_reason]
        check_all(engine)
    assert [seq.request_id for seq in engine.scheduler.awaiting.seqs] == [name]
    assert not engine.has_work
    link.now = 9.9
    engine.receive()
    assert not engine.has_work
    link.now = 10.1
    assert drive(engine)[name, 0][0] == tokens_of(make(tiny), PROMPT)
    assert "not there after 10 s" in logged(caplog)
    assert link.done == [(0, "It was not there after 10 s.")]


def test_one_that_awaits_can_be_aborted_or_expire(tiny: Path) -> None:
    held: list[bytes] = []
    link = Link(make(tiny), make(tiny), held.append)
    engine = link.target.engine
    port = LocalPort(engine, Compiling(link.target.compiler, None))
    got: list[Event | SpecserveError] = []
    request = Request(id="first", prompt_ids=PROMPT, params=GREEDY, num_elsewhere=len(PROMPT))
    tokens_of(link.source, PROMPT, ONE)
    for name in ("aborted", "expired"):
        link._requests[name] = request
        renamed = Request(id=name, prompt_ids=PROMPT, params=GREEDY, num_elsewhere=len(PROMPT))
        port.submit(renamed, got.append)
        assert not port.step() or port.step() is False
        assert engine.scheduler.awaiting.seqs
        assert port.wait_s == 0.001, "it looks again, and does not spin"
        check_all(engine)
        (port.abort if name == "aborted" else port.expire)(name)
        assert not engine.requests
        assert engine.cache.num_free == engine.cache.num_blocks
        frame = held[-1]
        link.connector.take(name, partial(viewed, frame))  # comes too late
        engine.receive()
        check_all(engine)
    aborted, expired = got
    assert isinstance(aborted, Event)
    assert aborted.finish_reason == "abort"
    assert isinstance(expired, QueueTimeoutError)
    assert [reason for _, reason in link.done] == ["It is not awaited any more."] * 2
    assert port.wait_s is None
    port.close()


def test_its_blocks_are_for_who_runs_and_needs_them(tiny: Path) -> None:
    """It waits then, and tries again."""
    small = {"max_model_len": 112, "kv_cache_gib": 8.5 * BLOCK_GIB}
    held: list[bytes] = []
    link = Link(make(tiny), make(tiny, **small), held.append)
    engine = link.target.engine
    assert engine.cache.num_blocks == 7
    other = [5, 6, 7] * 4
    engine.add(Request(id="other", prompt_ids=other, params=dataclasses.replace(GREEDY, max_tokens=60)))
    texts = {"other": [token for event in engine.step() for token in event.tokens]}
    name = link.send(PROMPT, dataclasses.replace(GREEDY, max_tokens=4))
    was_withdrawn = False
    while engine.requests:
        engine.receive()
        for event in engine.step() if engine.has_work else []:
            texts.setdefault(event.request_id, []).extend(event.tokens)
        check_all(engine)
        was_withdrawn |= bool(link.done)
        if "other" not in engine.requests and engine.scheduler.awaiting.seqs:
            link.reply = lambda frame: frame
            frame = held[-1]
            link.connector.take(name, partial(viewed, frame))
    assert was_withdrawn
    assert len(held) > 1
    assert texts["other"] == tokens_of(make(tiny), other, dataclasses.replace(GREEDY, max_tokens=60))
    assert texts[name] == tokens_of(make(tiny), PROMPT, dataclasses.replace(GREEDY, max_tokens=4))
    assert link.done[-1] == (5 * BLOCK, "")


class Scripted:
    """A connector that brings what its luck says, when it says: all, some blocks, or nothing. It writes what `right`,
    an engine's own cache, has of the same tokens."""

    def __init__(self, engine: Engine, right: PrefixTransfer, seed: int) -> None:
        self._engine, self._right, self._luck = engine, right, random.Random(seed)
        self._taking = engine_transfer(engine)
        self.open: list[Sequence] = []
        self.outcomes: set[str] = set()

    def num_available(self, seq: Sequence) -> int:
        return max(0, min(seq.num_elsewhere, len(seq.tokens) - 1) // BLOCK * BLOCK - seq.cached)

    def begin(self, seq: Sequence) -> None:
        assert seq not in self.open
        self.open.append(seq)

    def end(self, seq: Sequence) -> None:
        self.open.remove(seq)
        self.outcomes.add("aborted" if seq.finished else "withdrawn")

    def poll(self) -> News:
        news = News()
        for seq in self.open[:]:
            luck = self._luck.random()
            if luck < 0.03:
                self.open.remove(seq)
                news.failures.append(Failed(seq, "bad luck"))
                self.outcomes.add("failed")
            elif luck < 0.15:
                self.open.remove(seq)
                news.arrivals.append(self._bring(seq))
                self.outcomes.add("arrived")
        return news

    def _bring(self, seq: Sequence) -> Arrival:
        first = seq.cached // BLOCK
        last = self._luck.randrange(first, len(seq.blocks.ids)) + 1
        pieces = self._right.export_parts(seq.tokens[: last * BLOCK], first_block=first)
        assert pieces is not None
        header, data = self._taking.opened(b"".join(pieces))
        self._taking.write(seq.blocks.ids[first:last], self._taking.fitting(header, data, seq))
        return Arrival(seq, last * BLOCK, 0)


def engine_transfer(engine: Engine) -> PrefixTransfer:
    """That of an engine in `_built`."""
    return _built[id(engine)].prefix_transfer()


_built: dict[int, Built] = {}


def play(small: Built, right: Built, seed: int) -> set[str]:
    """Many requests in a cache that is too small for them, some of which are aborted. Checks everything after each
    step; returns what happened."""
    engine, luck = small.engine, random.Random(seed)
    engine.cache.reset_prefix_cache()
    connector = Scripted(engine, right.prefix_transfer(), seed)
    engine.scheduler.awaiting.connector = connector
    expected: dict[str, list[int]] = {}
    for i in range(10):
        prompt = PROMPT[: luck.randrange(10, len(PROMPT))]
        prompt = [*prompt[: luck.randrange(1, len(prompt))], *(luck.randrange(280) for _ in range(20))]
        params = dataclasses.replace(SEEDED, max_tokens=luck.randrange(1, 40), seed=i, n=1 + (i == 3))
        name = f"s{next(_ids)}"
        expected[name] = tokens_of(right, prompt, dataclasses.replace(params, n=1))
        elsewhere = len(prompt) if luck.random() < 0.8 else 0
        engine.add(Request(id=name, prompt_ids=prompt, params=params, num_elsewhere=elsewhere))
    texts: dict[str, list[int]] = {name: [] for name in expected}
    aborted = set[str]()
    for _ in range(3000):
        if not engine.requests:
            break
        engine.receive()
        for event in engine.step() if engine.has_work else []:
            assert event.error is None
            if event.index == 0:
                texts[event.request_id] += event.tokens
        if engine.requests and luck.random() < 0.02:
            aborted.add(name := luck.choice(list(engine.requests)))
            engine.abort(name)
        check_all(engine)
        assert {seq.request_id for seq in connector.open} == {s.request_id for s in engine.scheduler.awaiting.seqs}
    assert not engine.requests, "all end"
    for name in expected.keys() - aborted:
        assert texts[name] == expected[name]
    assert engine.cache.num_free == engine.cache.num_blocks
    assert not connector.open
    return connector.outcomes


@pytest.fixture(scope="module")
def pair(tiny: Path) -> tuple[Built, Built]:
    """A small engine and a large one."""
    small = make(tiny, max_model_len=128, kv_cache_gib=12.5 * BLOCK_GIB, max_num_seqs=3)
    _built[id(small.engine)] = small
    return small, make(tiny)


def test_whatever_comes_whenever(pair: tuple[Built, Built]) -> None:
    outcomes = set[str]().union(*(play(*pair, seed) for seed in range(12)))
    assert outcomes == {"arrived", "failed", "aborted", "withdrawn"}


def _discard_without_end(self: Awaiting, seq: Sequence) -> bool:
    if seq not in self.seqs:
        return False
    self.seqs.remove(seq)
    return True


def _withdraw_and_keep_blocks(self: Awaiting) -> Sequence | None:
    if not self.seqs:
        return None
    last = self.seqs[-1]
    self.discard(last)
    return last


def _receive_too_much(self: Awaiting) -> list[Sequence]:
    """All blocks count as arrived."""
    news = self.connector.poll()
    for seq in news.seqs:
        seq.cached = len(seq.blocks.ids) * BLOCK
        self.seqs.remove(seq)
        self._cache.keep(seq, 0)
        seq.num_elsewhere = 0
        self._cache.free(seq)
    return news.seqs


def _receive_and_keep_blocks(self: Awaiting) -> list[Sequence]:
    news = self.connector.poll()
    for seq in news.seqs:
        self.seqs.remove(seq)
        seq.num_elsewhere = 0
        seq.blocks, seq.cached, seq.draft_cached = BlockTable(), 0, 0
    return news.seqs


def _reserve_and_publish(self: Awaiting, seq: Sequence) -> bool | None:
    """Blocks are found before anything is in them."""
    begun = _reserve(self, seq)
    if begun:
        first = seq.cached // BLOCK
        if first < len(seq.digests) and self._cache.pool.find(seq.digests[first]) is None:
            self._cache.pool.publish(seq.blocks.ids[first], seq.digests[first])
    return begun


def _reserve_shared(self: Awaiting, seq: Sequence) -> bool | None:
    """Blocks that are awaited have another reference."""
    begun = _reserve(self, seq)
    if begun:
        self._cache.pool.take(seq.blocks.ids[-1])
    return begun


def _reserve_and_stay(self: Awaiting, seq: Sequence) -> bool | None:
    """It waits for a seat, too."""
    begun = _reserve(self, seq)
    return None if begun else begun


_reserve = Awaiting.reserve


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("discard", _discard_without_end),
        ("withdraw", _withdraw_and_keep_blocks),
        ("receive", _receive_too_much),
        ("receive", _receive_and_keep_blocks),
        ("reserve", _reserve_and_publish),
        ("reserve", _reserve_shared),
        ("reserve", _reserve_and_stay),
    ],
)
def test_mutants_are_caught(tiny: Path, name: str, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small = make(tiny, max_model_len=128, kv_cache_gib=12.5 * BLOCK_GIB, max_num_seqs=3)
    _built[id(small.engine)] = small
    right = make(tiny)
    monkeypatch.setattr(Awaiting, name, mutant)
    with pytest.raises(AssertionError):
        for seed in range(12):
            play(small, right, seed)


def test_nothing_is_asked_of_an_engine_without_a_connector(tiny: Path) -> None:
    built = make(tiny)
    assert isinstance(built.engine.scheduler.awaiting.connector, NoConnector)
    built.engine.add(Request(id="r", prompt_ids=PROMPT, params=GREEDY, num_elsewhere=len(PROMPT)))
    ((tokens, _),) = drive(built.engine).values()
    assert tokens == tokens_of(make(tiny), PROMPT)


def test_prompts_whose_tokens_are_scored_are_computed(tiny: Path) -> None:
    """Their log-probabilities come of the computation."""
    link = Link(make(tiny), make(tiny))
    link.send(PROMPT, dataclasses.replace(GREEDY, prompt_logprobs=1))
    ((_, stats),) = drive(link.target.engine).values()
    assert stats.num_received_tokens == 0
    assert link.done == []
