"""Hostile drafters: whatever they do, the engine gets drafts it may verify, and a counter says what was lost."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from specserve.bench.drive import Driver, NoTarget, fault
from specserve.drafters.ngram import NgramDrafter
from specserve.speculation.base import DraftRequest, Needs, SequenceView, StepReport
from specserve.speculation.host import DraftHost
from specserve.types import Draft, SamplingParams, ScheduledSeq, Sequence, Verdict

VOCABULARY = 8
HIDDEN = {1: torch.ones(2, 3), 2: torch.zeros(2, 3)}  # of layers
NO_TARGET: Any = NoTarget()
LONG = 30.0  # seconds; no test waits for it


def make_seq(tokens: list[int] | None = None) -> Sequence:
    tokens = tokens or [1, 2, 3]
    return Sequence(
        request_id="r", index=0, tokens=tokens, num_prompt=len(tokens),
        params=SamplingParams(), seed=0, max_tokens=99,
    )  # fmt: skip


def _lists(hidden: Mapping[int, torch.Tensor]) -> dict[int, Any]:
    return {layer: rows.tolist() for layer, rows in hidden.items()}


class Scripted:
    """A drafter whose verbs are given, in terms of the sequences themselves."""

    needs = Needs(hidden_layers=(1,))

    def __init__(self, **verbs: Callable[..., Any]) -> None:
        self.verbs = verbs
        self.heard: list[tuple[Any, ...]] = []
        self.threads: set[int] = set()

    def _hear(self, verb: str, *args: Any) -> Any:
        self.heard.append((verb, *args))
        self.threads.add(threading.get_ident())
        return self.verbs[verb](*args) if verb in self.verbs else None

    def begin(self, seq: SequenceView) -> None:
        self._hear("begin", seq._seq)

    def propose(self, requests: list[DraftRequest]) -> Any:
        return self._hear("propose", [seq._seq for seq, _ in requests], [most for _, most in requests])

    def observe(self, step: StepReport) -> None:
        self._hear("observe", [r.seq._seq for r in step.seqs], [r.verdict for r in step.seqs], _lists(step.hidden))

    def end(self, seq: SequenceView) -> None:
        self._hear("end", seq._seq)


def observe(host: DraftHost, seqs: list[Sequence], verdicts: list[Verdict]) -> None:
    step = [ScheduledSeq(seq, len(seq.tokens) - 1, 1, True, first_row=row) for row, seq in enumerate(seqs)]
    host.observe(step, dict(zip(seqs, verdicts, strict=True)), HIDDEN, [])


@pytest.fixture
def make_host() -> Iterator[Callable[..., DraftHost]]:
    hosts: list[DraftHost] = []

    def make(drafter: Any, timeout_s: float = LONG) -> DraftHost:
        hosts.append(DraftHost(drafter, VOCABULARY, timeout_s))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


def uniform(n: int) -> torch.Tensor:
    return torch.full((n, VOCABULARY), 1 / VOCABULARY)


def raw(tokens: Any, parents: Any, q: Any = None) -> Draft:
    return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), q)


def q_with(value: float) -> Draft:
    q = uniform(2)
    q[1, 5] = value
    return Draft.chain([1, 2], q)


def q_of_zero_at_the_token() -> Draft:
    q = torch.zeros(1, VOCABULARY)
    q[0, 3] = 1.0
    return Draft.chain([2], q)


def changed_in_place() -> Draft:
    draft = Draft.chain([1, 2])
    draft.parents[1] = -1
    return draft


def sure(*values: float, dtype: Any = np.float32) -> Draft:
    return Draft(np.array([1, 2], np.int32), np.array([-1, -1], np.int32), confidence=np.array(values, dtype))


HOSTILE = {
    "a chain made a tree in place": (changed_in_place(), "parents"),
    "a list": ([1, 2], "type"),
    "None": (None, "type"),
    "tokens are a list": (Draft([1], [-1]), "type"),  # type: ignore[arg-type]
    "tokens are int64": (Draft(np.array([1]), np.array([-1])), "dtype"),
    "tokens are floats": (Draft(np.array([1.5]), np.array([-1.0])), "dtype"),
    "a matrix": (raw([[1, 2]], [[-1, 0]]), "shape"),
    "a parent too few": (raw([1, 2], [-1]), "shape"),
    "no dimension": (raw(1, -1), "shape"),
    "too many tokens": (Draft.chain([1] * 6), "budget"),
    "-1 as padding": (Draft.chain([1, -1, -1]), "vocabulary"),
    "an id of the vocabulary's size": (Draft.chain([VOCABULARY]), "vocabulary"),
    "a node that is its own parent": (raw([1, 2], [-1, 1]), "parents"),
    "a parent that comes later": (raw([1, 2], [1, -1]), "parents"),
    "a parent below -1": (raw([1, 2], [-1, -2]), "parents"),
    "equal siblings": (raw([1, 2, 2], [-1, 0, 0]), "siblings"),
    "q is an array": (Draft.chain([1], np.ones((1, VOCABULARY))), "type"),  # type: ignore[arg-type]
    "q is integer": (Draft.chain([1], torch.ones(1, VOCABULARY, dtype=torch.int64)), "dtype"),
    "q of another vocabulary": (Draft.chain([1], torch.full((1, 4), 0.25)), "shape"),
    "q has a row too few": (Draft.chain([1, 2], uniform(1)), "shape"),
    "q is NaN": (q_with(float("nan")), "q"),
    "q is infinite": (q_with(float("inf")), "q"),
    "q is negative": (q_with(-0.1), "q"),
    "q sums to 2": (Draft.chain([1], uniform(1) * 2), "q"),
    "q sums to 0": (Draft.chain([1], uniform(1) * 0), "q"),
    "q says the token was impossible": (q_of_zero_at_the_token(), "q"),
    "confidence is a list": (Draft.chain([1], confidence=[0.5]), "confidence"),  # type: ignore[arg-type]
    "confidence is float64": (sure(0.5, 0.5, dtype=np.float64), "confidence"),
    "confidence has a node too few": (sure(0.5), "confidence"),
    "confidence has a node too many": (sure(0.5, 0.5, 0.5), "confidence"),
    "confidence is NaN": (sure(0.5, float("nan")), "confidence"),
    "confidence is infinite": (sure(float("inf"), 0.5), "confidence"),
    "confidence is above 1": (sure(0.5, 1.001), "confidence"),
    "confidence is below 0": (sure(-0.001, 0.5), "confidence"),
}


def test_confidence_from_0_to_1_may_be_said(make_host: Callable[..., DraftHost]) -> None:
    host, seq = make_host(Scripted(propose=lambda seqs, budget: [sure(0.0, 1.0)])), make_seq()
    host.begin(seq)
    (draft,) = host.propose([seq], [2])
    assert draft.confidence is not None
    assert draft.confidence.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_bad_draft_is_dropped_alone(name: str, make_host: Callable[..., DraftHost]) -> None:
    bad, reason = HOSTILE[name]
    host = make_host(Scripted(propose=lambda seqs, budget: [Draft.chain([4]), bad, Draft.chain([5, 6])]))
    seqs = [make_seq() for _ in range(3)]
    for seq in seqs:
        host.begin(seq)
    drafts = host.propose(seqs, [5, 5, 5])
    assert [draft.tokens.tolist() for draft in drafts] == [[4], [], [5, 6]]
    assert host.dropped == {reason: 1}
    assert host.num_dropped == 1
    assert host.active


def _raise(error: BaseException) -> Callable[..., Any]:
    def verb(*args: Any) -> Any:
        raise error

    return verb


class Explosive(Draft):
    """A draft whose very inspection fails."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("boom")


@pytest.mark.parametrize(
    ("propose", "reason"),
    [
        (lambda seqs, budget: [Draft.chain([1])], "count"),
        (lambda seqs, budget: [Draft.chain([1])] * 3, "count"),
        (lambda seqs, budget: [], "count"),
        (lambda seqs, budget: None, "type"),
        (lambda seqs, budget: Draft.chain([1, 2]), "type"),
        (lambda seqs, budget: [object.__new__(Explosive)] * 2, "exception"),
        (_raise(RuntimeError("boom")), "exception"),
        (_raise(TimeoutError("its own")), "exception"),
        (_raise(SystemExit(3)), "exception"),
        (_raise(KeyboardInterrupt()), "exception"),
        (_raise(RecursionError()), "exception"),
    ],
)
def test_a_bad_answer_costs_every_draft_of_the_step(
    propose: Callable[..., Any], reason: str, make_host: Callable[..., DraftHost]
) -> None:
    host = make_host(Scripted(propose=propose))
    seqs = [make_seq(), make_seq()]
    for seq in seqs:
        host.begin(seq)
    for step in (1, 2):
        assert [len(draft) for draft in host.propose(seqs, [3, 3])] == [0, 0]
        assert host.dropped == {reason: 2 * step}
    assert host.active, "an exception is not the end of a drafter"


def test_the_first_loss_of_each_kind_is_logged_with_its_traceback(
    make_host: Callable[..., DraftHost], caplog: pytest.LogCaptureFixture
) -> None:
    host = make_host(Scripted(propose=_raise(RuntimeError("boom in the drafter"))))
    seq = make_seq()
    host.begin(seq)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            host.propose([seq], [3])
    assert len(caplog.records) == 1
    assert "boom in the drafter" in caplog.text


@pytest.mark.parametrize("verb", ["begin", "propose", "observe", "end"])
def test_a_drafter_that_hangs_is_switched_off(
    verb: str, make_host: Callable[..., DraftHost], caplog: pytest.LogCaptureFixture
) -> None:
    release, entered, left = threading.Event(), threading.Event(), threading.Event()

    def hang(*args: Any) -> Any:
        entered.set()
        release.wait()
        left.set()
        return [Draft.chain([1])]

    drafter = Scripted(**{"propose": lambda seqs, budget: [Draft.chain([1])], verb: hang})
    earlier = set(threading.enumerate())
    host = make_host(drafter, timeout_s=0.05)
    threads = [thread for thread in threading.enumerate() if thread not in earlier]
    assert len(threads) == 1
    assert all(thread.daemon for thread in threads)
    seq, verdict = make_seq(), Verdict([1], [])

    def step() -> list[Draft]:
        host.begin(seq)
        drafts = host.propose([seq], [3])
        observe(host, [seq], [verdict])
        host.end(seq)
        return drafts

    with caplog.at_level(logging.WARNING):
        step()
        assert entered.is_set()
        assert not host.active
        num_heard = len(drafter.heard)
        assert [len(draft) for draft in step()] == [0]
    assert len(drafter.heard) == num_heard, "never called again"
    assert host.dropped == {"timeout": 1}
    assert len(caplog.records) == 1
    assert "switched off" in caplog.text
    release.set()
    assert left.wait(LONG)
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive(), "a thread that comes back after all ends"
    assert host.dropped == {"timeout": 1}, "its late answer reaches nobody"


def test_calls_arrive_in_order_on_one_other_thread(make_host: Callable[..., DraftHost]) -> None:
    drafter = Scripted(propose=lambda seqs, budget: [Draft.chain([1])] * len(seqs))
    host = make_host(drafter)
    first, second = make_seq(), make_seq()
    host.begin(first)
    host.begin(second)
    host.propose([first, second], [2, 3])
    verdicts = [Verdict([1, 2], [0]), Verdict([4], [])]
    observe(host, [first, second], verdicts)
    host.end(first)
    host.propose([second], [1])
    host.end(second)
    assert drafter.heard == [
        ("begin", first),
        ("begin", second),
        ("propose", [first, second], [2, 3]),
        ("observe", [first, second], verdicts, _lists({1: HIDDEN[1]})),
        ("end", first),
        ("propose", [second], [1]),
        ("end", second),
    ]
    assert len(drafter.threads) == 1
    assert threading.get_ident() not in drafter.threads
    assert host.needs.hidden_layers == (1,), "and of the layers it needs alone"


def test_only_sequences_with_a_budget_are_asked_for(make_host: Callable[..., DraftHost]) -> None:
    drafter = Scripted(propose=lambda seqs, budget: [Draft.chain([b]) for b in budget])
    host = make_host(drafter)
    seqs = [make_seq() for _ in range(4)]
    for seq in seqs:
        host.begin(seq)
    drafts = host.propose(seqs, [0, 2, 0, 4])
    assert [draft.tokens.tolist() for draft in drafts] == [[], [2], [], [4]]
    drafter.heard.clear()
    assert [len(draft) for draft in host.propose(seqs, [0] * 4)] == [0] * 4
    assert drafter.heard == []


def test_lists_of_the_engine_cannot_be_changed(make_host: Callable[..., DraftHost]) -> None:
    class Thief(Scripted):
        def propose(self, requests: list[DraftRequest]) -> list[Draft]:
            requests[0] = requests[0]._replace(num_tokens=99)
            return [Draft.chain([1] * 50)]

    host = make_host(Thief())
    seq = make_seq()
    host.begin(seq)
    seqs, budget = [seq], [3]
    assert len(host.propose(seqs, budget)[0]) == 0
    assert (seqs, budget) == ([seq], [3])
    assert host.dropped == {"budget": 1}


def test_a_sequence_whose_begin_failed_is_left_alone(make_host: Callable[..., DraftHost]) -> None:
    bad, good = make_seq(), make_seq()

    def begin(seq: Sequence) -> None:
        if seq is bad:
            raise ValueError("not this one")

    drafter = Scripted(begin=begin, propose=lambda seqs, budget: [Draft.chain([1])] * len(seqs))
    host = make_host(drafter)
    host.begin(bad)
    host.begin(good)
    assert [len(draft) for draft in host.propose([bad, good], [3, 3])] == [0, 1]
    observe(host, [bad, good], [Verdict([1], []), Verdict([2], [])])
    host.end(bad)
    host.end(good)
    assert host.dropped == {"exception": 1}
    assert all(bad not in (args[0] if isinstance(args[0], list) else args) for _, *args in drafter.heard[2:])


@pytest.mark.parametrize("verb", ["observe", "end"])
def test_failures_outside_a_proposal_are_counted(verb: str, make_host: Callable[..., DraftHost]) -> None:
    host = make_host(Scripted(**{verb: _raise(ValueError("boom"))}))
    seq = make_seq()
    host.begin(seq)
    host.propose([seq], [0])
    observe(host, [seq], [Verdict([1], [])])
    host.end(seq)
    assert host.dropped == {"exception": 1}
    assert host.active


def test_a_sequence_begins_with_its_first_step(make_host: Callable[..., DraftHost]) -> None:
    """One that waits costs a drafter nothing, and one that ends while it waits is never spoken of."""
    drafter = Scripted()
    host = make_host(drafter)
    seqs = [make_seq() for _ in range(3)]
    for seq in seqs:
        host.begin(seq)
    assert drafter.heard == []
    host.end(seqs[0])
    host.propose([seqs[1]], [0])
    assert drafter.heard == [("begin", seqs[1])], "a prompt is computed, and nothing can be drafted yet"
    host.propose([seqs[1]], [0])
    host.end(seqs[2])
    host.end(seqs[1])
    assert drafter.heard == [("begin", seqs[1]), ("end", seqs[1])]


def test_a_drafter_of_ours_is_called_directly_and_may_still_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own drafters need no thread; what they raise is counted as anybody's, but an interrupt is the user's."""
    threads: list[int] = []

    def propose(self: NgramDrafter, requests: list[DraftRequest]) -> list[Draft]:
        threads.append(threading.get_ident())
        raise (ValueError if len(threads) == 1 else KeyboardInterrupt)

    monkeypatch.setattr(NgramDrafter, "propose", propose)
    before = set(threading.enumerate())
    host, seq = DraftHost(NgramDrafter(NO_TARGET), VOCABULARY, LONG), make_seq()
    host.begin(seq)
    assert set(threading.enumerate()) <= before  # those of other tests may end meanwhile
    assert len(host.propose([seq], [3])[0]) == 0
    assert host.dropped == {"exception": 1}
    with pytest.raises(KeyboardInterrupt):
        host.propose([seq], [3])
    assert set(threads) == {threading.get_ident()}
    host.close()


def test_without_a_drafter_there_is_no_thread() -> None:
    before = set(threading.enumerate())
    host = DraftHost(None, VOCABULARY, LONG)
    seq = make_seq()
    host.begin(seq)
    assert [len(draft) for draft in host.propose([seq], [3])] == [0]
    observe(host, [seq], [Verdict([1], [])])
    host.end(seq)
    host.close()
    assert set(threading.enumerate()) <= before
    assert (host.active, host.needs, host.num_dropped) == (False, Needs(), 0)


def test_a_closed_host_drafts_nothing(make_host: Callable[..., DraftHost]) -> None:
    host = make_host(Scripted(propose=lambda seqs, budget: [Draft.chain([1])]))
    seq = make_seq()
    host.begin(seq)
    thread = host._worker._thread  # type: ignore[union-attr]
    host.close()
    host.close()
    thread.join(LONG)
    assert not thread.is_alive()
    assert [len(draft) for draft in host.propose([seq], [3])] == [0]
    host.end(seq)


class Closing(Scripted):
    def close(self) -> None:
        self._hear("close")


@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize("outcome", ["nothing", "exception", "timeout"])
def test_a_drafter_is_closed_once_and_not_waited_for_in_vain(
    is_ours: bool, outcome: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release, closed = threading.Event(), threading.Event()

    def close() -> None:
        if outcome == "timeout":
            release.wait()
        closed.set()
        if outcome == "exception":
            raise OSError("the disk is full")

    if is_ours:
        monkeypatch.setattr(Closing, "__module__", "specserve.drafters.closing")
    drafter = Closing(close=close, propose=lambda seqs, budget: [Draft.chain([1])])
    before = set(threading.enumerate())
    host = DraftHost(drafter, VOCABULARY, 0.05 if outcome == "timeout" else LONG)
    seq = make_seq()
    host.begin(seq)
    host.propose([seq], [3])
    for _ in range(2):
        host.close()
    assert not host.active
    assert len(host.propose([seq], [3])[0]) == 0
    assert host.dropped == ({} if outcome == "nothing" else {outcome: 1})
    assert len(caplog.records) == (outcome != "nothing")
    release.set()
    assert closed.wait(LONG)
    assert [verb for verb, *_ in drafter.heard] == ["begin", "propose", "close"], "no end comes behind it"
    for thread in set(threading.enumerate()) - before:
        thread.join(LONG)
        assert not thread.is_alive()


def test_a_drafter_that_was_switched_off_is_not_closed(make_host: Callable[..., DraftHost]) -> None:
    """It may still be in the call that it did not come back from."""
    release = threading.Event()
    drafter = Closing(propose=lambda seqs, budget: release.wait())
    host = make_host(drafter, timeout_s=0.05)
    seq = make_seq()
    host.begin(seq)
    host.propose([seq], [3])
    host.close()
    release.set()
    assert [verb for verb, *_ in drafter.heard] == ["begin", "propose"]
    assert host.dropped == {"timeout": 1}


def test_no_gradients_are_recorded_on_the_thread(make_host: Callable[..., DraftHost]) -> None:
    weight = torch.ones(1, VOCABULARY, requires_grad=True)
    host = make_host(Scripted(propose=lambda seqs, budget: [Draft.chain([1], (weight * 3).softmax(-1))]))
    seq = make_seq()
    host.begin(seq)
    q = host.propose([seq], [3])[0].q
    assert q is not None
    assert not q.requires_grad


def test_the_real_drafter_through_the_host_is_the_real_drafter(make_host: Callable[..., DraftHost]) -> None:
    direct, host = Driver(NgramDrafter(NO_TARGET)), make_host(NgramDrafter(NO_TARGET))
    seq = make_seq([1, 2, 3, 4, 1, 2])
    direct.begin(seq)
    host.begin(seq)
    for _ in range(5):
        expected = direct.propose([seq], [3])[0].tokens.tolist()
        assert host.propose([seq], [3])[0].tokens.tolist() == expected != []
        seq.tokens += expected
        direct.observe([seq], [Verdict(expected, [0, 1])])
        observe(host, [seq], [Verdict(expected, [0, 1])])
    assert host.num_dropped == 0


# --- the check alone ------------------------------------------------------------------------------------------------


@given(st.data())
def test_a_fault_is_exactly_a_broken_rule(data: st.DataObject) -> None:
    """Random small trees, right and wrong, against the rules written out one by one."""
    length = data.draw(st.integers(0, 5))
    tokens = data.draw(st.lists(st.integers(-1, 4), min_size=length, max_size=length))
    parents = [data.draw(st.integers(-2, max(i, 0))) for i in range(length)]
    budget, vocab_size = data.draw(st.integers(0, 5)), 4
    rules = {
        "budget": length <= budget,
        "vocabulary": all(0 <= token < vocab_size for token in tokens),
        "parents": all(-1 <= parent < i for i, parent in enumerate(parents)),
        "siblings": all((parents[i], tokens[i]) != (parents[j], tokens[j]) for i in range(length) for j in range(i)),
    }
    broken = [name for name, holds in rules.items() if not holds]
    assert fault(raw(tokens, parents), budget, vocab_size) == (broken[0] if broken else None)


@given(st.integers(1, 5), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.integers(0, 2**32 - 1))
def test_real_distributions_pass(length: int, dtype: torch.dtype, seed: int) -> None:
    """Softmax over a large vocabulary in any float dtype that a drafter would compute with."""
    vocab_size = 5000
    generator = torch.Generator().manual_seed(seed)
    q = (torch.randn(length, vocab_size, generator=generator, dtype=torch.float64) * 4).softmax(-1)
    draft = Draft.chain(q.multinomial(1, generator=generator)[:, 0].tolist(), q.to(dtype))
    tolerable = dtype != torch.bfloat16 or bool(((q.to(dtype).float().sum(1) - 1).abs() <= 1e-3).all())
    assert (fault(draft, length, vocab_size) is None) == tolerable


def test_a_forgotten_host_leaves_no_thread() -> None:
    earlier = set(threading.enumerate())
    host = DraftHost(Scripted(propose=lambda seqs, budget: [Draft.chain([1])]), 10, 5.0)
    (thread,) = set(threading.enumerate()) - earlier
    del host
    gc.collect()
    thread.join(LONG)
    assert not thread.is_alive()


def test_a_host_has_a_name_for_requests_and_logs(
    make_host: Callable[..., DraftHost], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert DraftHost(None, VOCABULARY, LONG).name == "none"
    assert make_host(Scripted()).name == "Scripted"
    host, seq = DraftHost(NgramDrafter(NO_TARGET), VOCABULARY, LONG, "ngram"), make_seq()
    host.begin(seq)
    monkeypatch.setattr(NgramDrafter, "propose", _raise(RuntimeError("planted")))
    with caplog.at_level(logging.WARNING):
        host.propose([seq], [3])
    assert "Drafter ngram, draft dropped (exception)" in caplog.text
