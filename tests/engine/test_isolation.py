"""Drafters of other packages that misuse what they are shown: views, arrays, grammars, from their own thread, from
others, and after they were given up on. Outputs are what they are without drafts, and no request fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from specserve.config import EngineConfig
from specserve.engine.build import Built, build
from specserve.engine.request import Request
from specserve.speculation.base import DraftRequest, Needs, SequenceView, StepReport
from specserve.speculation.host import DraftHost
from specserve.structured.spec import Structured
from specserve.testing import check_integrity, write_tiny_model
from specserve.types import Draft, SamplingParams, ScheduledSeq, Sequence, Verdict

Outputs = dict[tuple[str, int], list[int]]
LONG = 30.0  # seconds; no test waits for it
WORDS = Structured.regex(r"(the|and) [a-z ]{3,20}(other stone|thing)\.")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)
    options: dict[str, Any] = {"drafter": "none", "adaptive": False, "max_step_ms": 1e9}
    return build(EngineConfig(model=str(folder), dtype="float32", max_model_len=160, **options))


def drive(built: Built, drafter: Any, timeout_s: float = LONG) -> Outputs:
    """Constrained and free requests, greedy and seeded, one of two completions."""
    engine = built.engine
    engine.use(DraftHost(drafter, engine.limits.vocab_size, timeout_s), 4)
    for i in range(6):
        asked = WORDS if i % 3 else None
        params = SamplingParams(temperature=i % 2, seed=i, max_tokens=30, n=1 + (i == 4), structured=asked)
        ids = [(7 * i + 3 * j * j + j) % 280 for j in range(5 + i)]
        grammar = None if asked is None else built.compiler.compile(asked)
        engine.add(Request(id=f"r{i}", prompt_ids=ids, params=params), grammar)
    outputs: Outputs = {}
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            outputs.setdefault((event.request_id, event.index), []).extend(event.tokens)
        check_integrity(engine.cache, engine.scheduler.running)
    return outputs


@pytest.fixture(scope="module")
def plain(built: Built) -> Outputs:
    return drive(built, None)


class Misuser:
    """Does `misuse` with every view that it is asked for, and drafts nothing."""

    needs = Needs(hidden_layers=(0, 1), top_k=4)

    def __init__(self, misuse: Callable[[SequenceView], object]) -> None:
        self.misuse = misuse
        self.num_done = 0

    def begin(self, seq: SequenceView) -> None: ...
    def observe(self, step: StepReport) -> None: ...
    def end(self, seq: SequenceView) -> None: ...

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        for seq, _ in requests:
            self.misuse(seq)
            self.num_done += 1
        return [Draft.empty()] * len(requests)


class Breaking:
    """Tokens that fail to come after the first ones."""

    def __init__(self, tokens: list[int], then: Callable[[], object]) -> None:
        self.tokens, self.then = tokens, then

    def __iter__(self) -> Iterator[int]:
        yield from self.tokens
        self.then()


def _fail() -> None:
    raise ValueError("planted")


def _scribble(seq: SequenceView) -> None:
    """Change all that can be changed of it."""
    seq.jump_forward().extend([0] * 9)
    seq.jump_forward().clear()
    seq.tokens.clear()
    seq.tokens.extend([1, 2, 3])
    seq.num_prompt, seq.seed, seq.temperature, seq.salt = 0, 0, 9.0, b"other"


def _first_words(seq: SequenceView) -> list[int]:
    """Some tokens that its grammar lets follow."""
    tokens: list[int] = []
    while seq.has_grammar and len(tokens) < 3:
        bits = np.unpackbits(seq.allowed(tokens, is_forced=False).view(np.uint8), bitorder="little")
        if not bits.any():
            break
        tokens.append(int(bits.argmax()))
    return tokens


def _walk_wrongly(seq: SequenceView) -> None:
    if seq.has_grammar:
        words = _first_words(seq)
        for tokens in ([2**40], [-1], ["x"], [None], [*words, 2.5], [[]], Breaking(words, _fail)):
            seq.allowed(tokens, is_forced=True)


@pytest.mark.parametrize("misuse", [_scribble, _walk_wrongly, lambda seq: _walk_wrongly(seq) or _fail()])
def test_what_a_drafter_does_to_its_views_reaches_nobody(
    built: Built, plain: Outputs, misuse: Callable[[SequenceView], object]
) -> None:
    drafter = Misuser(misuse)
    assert drive(built, drafter) == plain
    assert drafter.num_done > 10 or misuse is not _scribble


def test_a_grammar_is_walked_by_other_threads(built: Built, plain: Outputs) -> None:
    """Which go on while the engine fills masks of the same sequences."""
    views: list[SequenceView] = []
    stop, num_walks = threading.Event(), 0

    def walk() -> None:
        nonlocal num_walks
        while not stop.is_set():
            for seq in views[-6:]:
                _first_words(seq)
                seq.jump_forward()
                num_walks += 1

    threads = [threading.Thread(target=walk) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            assert drive(built, Misuser(views.append)) == plain
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert num_walks > 100


def test_a_drafter_given_up_on_amid_a_walk_holds_nobody_up(built: Built, plain: Outputs) -> None:
    """It hangs after tokens of a draft that it has walked over, and goes on when its sequences have ended."""
    release, seen = threading.Event(), list[SequenceView]()
    after: list[BaseException | list[int]] = []

    def hang(seq: SequenceView) -> None:
        if not seq.has_grammar:
            return
        seen.append(seq)
        seq.allowed(Breaking(_first_words(seq), release.wait), is_forced=False)
        for look in (lambda: seq.num_cached, lambda: seq._seq.tokens):
            try:
                after.append(look())
            except RuntimeError as error:
                after.append(error)

    before = set(threading.enumerate())
    assert drive(built, Misuser(hang), timeout_s=0.3) == plain
    assert built.engine.policy.own.num_dropped > 0
    release.set()
    for thread in set(threading.enumerate()) - before:  # drafters of other tests may wait for their next call
        thread.join(LONG)
        assert not thread.is_alive()
    assert seen
    assert {type(each) for each in after} == {RuntimeError}, "its views are dead"


class Endless(Exception):
    """One that does not come back when it is looked at."""

    def __init__(self, release: threading.Event) -> None:
        self.release = release

    def __str__(self) -> str:
        self.release.wait(LONG)
        return "at last"


def test_an_exception_is_looked_at_where_it_may_hang(built: Built, plain: Outputs) -> None:
    release = threading.Event()

    def fail(seq: SequenceView) -> None:
        raise Endless(release)

    assert drive(built, Misuser(fail), timeout_s=0.3) == plain
    assert set(built.engine.policy.own.dropped) == {"timeout"}
    release.set()


def test_a_view_tells_no_more_after_the_end(built: Built, plain: Outputs) -> None:
    views: list[SequenceView] = []
    assert drive(built, Misuser(views.append)) == plain
    for view in views:
        with pytest.raises(RuntimeError, match="has ended, or its drafter was switched off"):
            _ = view.num_draft_cached
    by_request: dict[object, set[SequenceView]] = {}
    for view in views:
        by_request.setdefault(view.request, set()).add(view)
    assert sorted(map(len, by_request.values())) == [1, 1, 1, 1, 1, 2], "completions of a request, and nobody else"
    assert not any(isinstance(request, Sequence) for request in by_request)


class Keeper:
    """Drafts the tokens that are always right to propose, keeps its arrays, and changes them when they were taken."""

    needs = Needs()

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        self.drafts: list[Draft] = []

    def begin(self, seq: SequenceView) -> None: ...
    def end(self, seq: SequenceView) -> None: ...
    def observe(self, step: StepReport) -> None: ...

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        self.drafts = [self.draft(most) for _, most in requests]
        return self.drafts

    def draft(self, most: int) -> Draft:
        confidence = np.full(2, 0.5, np.float32)
        q = torch.full((2, 280), 1 / 280)
        return Draft(np.array([1, 2], np.int32), np.array([-1, -1], np.int32), q, confidence=confidence, **self.fields)


def test_drafts_are_taken_as_copies() -> None:
    drafter = Keeper(sources=[["x"], 7], jump_forward={99})
    host = DraftHost(drafter, 280, LONG)
    seq = Sequence(
        request_id="r", index=0, tokens=[1, 2], num_prompt=2, params=SamplingParams(), seed=0, max_tokens=9
    )  # fmt: skip
    host.begin(seq)
    (draft,) = host.propose([seq], [4])
    (own,) = drafter.drafts
    own.tokens[:], own.parents[:], own.confidence[:] = 2**31 - 1, 5, np.nan  # type: ignore[index]
    own.q.fill_(np.nan)  # type: ignore[union-attr]
    assert (draft.tokens.tolist(), draft.parents.tolist()) == ([1, 2], [-1, -1])
    assert draft.confidence is not None
    assert draft.confidence.tolist() == [0.5, 0.5]
    assert draft.q is not None
    assert bool((draft.q > 0).all())
    assert (draft.sources, draft.jump_forward) == ((), frozenset())
    host.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"sources": [["x"], 7]},
        {"sources": 5},
        {"sources": [["x"]]},
        {"jump_forward": frozenset({99})},
        {"jump_forward": None},
    ],
)
def test_what_a_drafter_says_in_the_engines_place_is_not_read(
    built: Built, plain: Outputs, fields: dict[str, Any]
) -> None:
    class Sourced(Keeper):
        def draft(self, most: int) -> Draft:
            return Draft.chain([4, 5][:most], **self.fields)

    assert drive(built, Sourced(**fields)) == plain
    assert built.engine.policy.own.num_dropped == 0


def test_arrays_that_another_thread_changes_all_the_time(built: Built, plain: Outputs) -> None:
    """What was checked is what is verified: else ids and parents beyond all bounds would reach native code."""
    kept: list[Draft] = []
    stop = threading.Event()

    class Racing(Keeper):
        def draft(self, most: int) -> Draft:
            kept.append(Draft(np.zeros(most, np.int32), np.arange(-1, most - 1, dtype=np.int32)))
            return kept[-1]

    def change() -> None:
        while not stop.is_set():
            for draft in kept[-8:]:
                draft.tokens[:], draft.parents[:] = 2**31 - 1, 2**30
                draft.tokens[:], draft.parents[:] = 3, np.arange(-1, len(draft) - 1)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(3):
            assert drive(built, Racing()) == plain
    finally:
        stop.set()
        thread.join()


def test_what_a_step_is_told_with_is_the_drafters_own() -> None:
    """It keeps all of it, and writes to it while a later step would use the same memory."""

    class Scribbler(Misuser):
        def observe(self, step: StepReport) -> None:
            (report,) = step.seqs
            assert report.verdict is not None
            assert step.top is not None
            report.verdict.tokens.clear()
            report.verdict.path.append(9)
            report.draft.tokens[:], report.draft.parents[:] = 9, 9
            step.top[:] = 9
            for rows in step.hidden.values():
                rows.fill_(9.0)

    host = DraftHost(Scribbler(lambda seq: None), 280, LONG)
    seq = Sequence(
        request_id="r", index=0, tokens=[1, 2], num_prompt=2, params=SamplingParams(), seed=0, max_tokens=9
    )  # fmt: skip
    host.begin(seq)
    host.propose([seq], [4])
    draft, verdict = Draft.chain([5, 6]), Verdict([5, 6, 7], [0, 1])
    hidden, top = {0: torch.zeros(3, 2), 1: torch.zeros(3, 2)}, np.zeros((3, 4), np.int32)
    host.observe([ScheduledSeq(seq, 1, 1, True, draft)], {seq: verdict}, hidden, [], top)
    assert host.num_dropped == 0
    assert verdict == Verdict([5, 6, 7], [0, 1])
    assert (draft.tokens.tolist(), draft.parents.tolist()) == ([5, 6], [-1, 0])
    assert not top.any()
    assert not any(bool(rows.any()) for rows in hidden.values())
    host.close()


@pytest.mark.parametrize("wrong", [np.array([1, 2], np.int32).view(np.matrix), np.ma.array([1, 2], dtype=np.int32)])
def test_arrays_of_other_kinds_are_refused(built: Built, plain: Outputs, wrong: Any) -> None:
    class Odd(Keeper):
        def draft(self, most: int) -> Draft:
            return Draft(wrong, np.array([-1, 0], np.int32))

    assert drive(built, Odd()) == plain
    assert set(built.engine.policy.own.dropped) == {"type"}
