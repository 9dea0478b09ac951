"""Who drafts for whom, how much, what a request may bring about, and that no drafter costs others their drafts."""

from __future__ import annotations

import importlib
import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import specserve.drafters
from specserve import registry
from specserve.bench.drive import NoTarget
from specserve.cache.cache import KVCache
from specserve.cache.storage import KVShape, KVStorage
from specserve.drafters.ngram import NgramDrafter
from specserve.errors import InputError
from specserve.registry import DRAFTERS, NONE
from specserve.runtime.cost import ROWS, DecodeCost
from specserve.runtime.pack import Step
from specserve.speculation.base import DraftRequest, Needs, SequenceView, StepReport
from specserve.speculation.constants import SELDOM, SILENT
from specserve.speculation.controller import DraftController
from specserve.speculation.host import DraftHost
from specserve.speculation.lookup import prepare
from specserve.speculation.policy import Policy
from specserve.speculation.sources import LOOKUPS
from specserve.speculation.tree import Proposals
from specserve.speculation.weighing import Weighing
from specserve.structured.base import Guarded
from specserve.testing import LanguageGrammar
from specserve.types import Draft, SamplingParams, ScheduledSeq, Sequence, Verdict

VOCABULARY = 50
NO_TARGET: Any = NoTarget()

# A drafter that drafts its own token as often as it is asked to, and remembers what it heard.
RECORDER = """
from specserve.speculation.base import Needs
from specserve.types import Draft

class RecordingDrafter:
    needs = Needs(hidden_layers={layers})
    made = []

    def __init__(self, context, token={token}):
        self.token, self.heard = token, []
        self.made.append(self)

    def begin(self, seq):
        self.heard.append(("begin", seq._seq))

    def propose(self, requests):
        self.heard.append(("propose", [seq._seq for seq, _ in requests], [most for _, most in requests]))
        return [Draft.chain([self.token] * most) for _, most in requests]

    def observe(self, step):
        self.heard.append(("observe", [each.seq._seq for each in step.seqs], [each.verdict for each in step.seqs]))
        self.rows, self.hidden = [each.kept_rows for each in step.seqs], dict(step.hidden)
        self.preempted = [seq._seq for seq in step.preempted]

    def end(self, seq):
        self.heard.append(("end", seq._seq))
"""
FAILING = "    def propose(self, requests):\n        raise RuntimeError('planted')\n"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A further folder of drafters, with three recorders; the third needs the hidden states of two layers."""
    for name, token in (("one", 1), ("two", 2), ("three", 3)):
        text = RECORDER.format(token=token, layers="(0, 2)" if name == "three" else "()")
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "failing.py").write_text(RECORDER.format(token=9, layers="()") + "\n" + FAILING)
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(specserve.drafters, "__path__", [*specserve.drafters.__path__, str(tmp_path)])
        yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("specserve.drafters."):
            del sys.modules[name]
            vars(specserve.drafters).pop(name.rpartition(".")[2], None)


def make_seq(params: SamplingParams | None = None, **more: Any) -> Sequence:
    """One that decodes: its first token has come."""
    return Sequence(
        request_id="r", index=0, tokens=[1, 2, 3], num_prompt=2,
        params=params or SamplingParams(), seed=0, max_tokens=99, **more,
    )  # fmt: skip


class Roomy:
    """A cache that has blocks for `most` tokens of a sequence."""

    most = 10**6

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        return num_tokens <= self.most


def policy(
    own: DraftHost | None = None, k: int = 5, max_model_len: int = 10**6, weighing: Weighing | None = None
) -> DraftController:
    host = own or DraftHost(None, VOCABULARY, 5.0)
    who = Policy(host, k, max_model_len, NO_TARGET, lambda phase: nullcontext())
    return DraftController(who, cast(Any, Roomy()), lambda phase: nullcontext(), weighing)


def begun(policy: DraftController, *names: str | None) -> list[Sequence]:
    seqs = [make_seq() for _ in names]
    for seq, name in zip(seqs, names, strict=True):
        policy.begin([seq], name)
    propose(policy, seqs, [0] * len(seqs))  # as in a step with their prompts
    return seqs


def scheduled(batch: list[Sequence]) -> Step:
    rows = enumerate(batch)
    step = [ScheduledSeq(seq, len(seq.tokens) - 1, 1, True, first_row=row) for row, seq in rows]
    return Step(step, 10**6, 10**6)


def propose(policy: DraftController, batch: list[Sequence], limits: list[int]) -> list[list[int]]:
    for seq, limit in zip(batch, limits, strict=True):
        seq.draft_limit = limit
    step = scheduled(batch)
    policy.draft(step)
    return [each.draft.tokens.tolist() for each in step.seqs]


def observe(policy: DraftController, batch: list[Sequence], verdicts: list[Verdict], hidden: Any = None) -> None:
    shown = hidden or {layer: torch.zeros(1, 1) for layer in range(3)}
    policy.observe(scheduled(batch), dict(zip(batch, verdicts, strict=True)), shown)


def recorder(name: str) -> Any:
    """The only instance of a planted drafter."""
    (made,) = importlib.import_module(f"specserve.drafters.{name}").RecordingDrafter.made
    return made


def test_each_drafter_is_called_once_with_its_own_and_drafts_come_in_the_batchs_order(folder: Path) -> None:
    drafters = policy()
    a, b, c, d, e, f = begun(drafters, "one", "two", None, "one", NONE, "two")
    batch = [f, a, c, d, e, b]
    assert propose(drafters, batch, [1, 2, 3, 4, 5, 0]) == [[2], [1, 1], [], [1, 1, 1, 1], [], []]
    verdicts = [Verdict([i], []) for i in range(6)]
    observe(drafters, batch, verdicts)
    for seq in batch:
        drafters.end(seq)
    assert recorder("one").heard == [
        ("begin", a), ("begin", d), ("propose", [a, d], [2, 4]),
        ("observe", [a, d], [verdicts[1], verdicts[3]]), ("end", a), ("end", d),
    ]  # fmt: skip
    assert recorder("two").heard == [
        ("begin", b), ("begin", f), ("propose", [f], [1]),
        ("observe", [f, b], [verdicts[0], verdicts[5]]), ("end", f), ("end", b),
    ]  # fmt: skip


class SamplingDrafter:
    """Says that it drew its own token from a uniform law, and how sure it is of it."""

    token, confidence = 1, 1.0

    def __init__(self) -> None:
        self.asked: list[int] = []

    def begin(self, seq: SequenceView) -> None: ...

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        self.asked += [most for _, most in requests]
        return [
            Draft.chain(
                [self.token] * most,
                torch.full((most, VOCABULARY), 1 / VOCABULARY),
                confidence=np.full(most, self.confidence, np.float32),
            )
            for _, most in requests
        ]

    def observe(self, step: StepReport) -> None: ...

    def end(self, seq: SequenceView) -> None: ...


@pytest.mark.parametrize("is_accepted", [True, False])
def test_how_much_of_a_sampled_draft_is_verified_does_not_hang_on_what_is_in_it(
    is_accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on its tokens nor on what its drafter says of them: by what earlier drafts were worth alone."""
    monkeypatch.setattr(time, "perf_counter", itertools.count(step=1e-5).__next__)
    lengths: list[list[int]] = []
    for token, confidence in itertools.product([1, 2], [0.0, 1.0]):
        cost = DecodeCost()
        cost.begin(np.array([0.01 + 0.001 * rows for rows in ROWS]))
        drafter = SamplingDrafter()
        drafter.token, drafter.confidence = token, confidence
        weighing = Weighing(cost)
        drafters = policy(DraftHost(drafter, VOCABULARY, 5.0, "sampling"), weighing=weighing)
        (seq,) = begun(drafters, None)
        lengths.append([])
        for _ in range(40):
            seq.draft_limit = 5
            step = scheduled([seq])
            drafters.draft(step)
            draft = step.seqs[0].draft
            lengths[-1].append(len(draft))
            assert draft.tokens.tolist() == [token] * len(draft)
            assert draft.q is not None or not len(draft)
            accepted = len(draft) if is_accepted else 0
            drafters.observe(step, {seq: Verdict([token] * accepted + [9], list(range(accepted)))}, {})
            drafters.end_step(len(draft), 0.011 + 0.001 * len(draft))
        assert drafter.asked == [length for length in lengths[-1] if length]
    assert all(each == lengths[0] for each in lengths)
    assert (lengths[0][-1] == 5) == is_accepted


@pytest.mark.parametrize("cost_class", ["free", "pass", "passes", "model"])
@pytest.mark.parametrize("is_fixed", [True, False])
def test_a_source_of_any_cost_class_is_one_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cost_class: str, is_fixed: bool
) -> None:
    """Where its drafts are right they are soon made at full length, and where they are wrong hardly any, whether they
    may be cut or not."""
    monkeypatch.setattr(time, "perf_counter", itertools.count(step=1e-5).__next__)
    (folder / "source.py").write_text(RECORDER.format(token=1, layers=f"(), cost_class={cost_class!r}"))
    make = prepare("source", {})
    assert make is not None
    drafted = {}
    for said in (1, 2):
        cost = DecodeCost()
        cost.begin(np.array([0.01 + 0.0005 * rows for rows in ROWS]))
        host = DraftHost(make(NO_TARGET), VOCABULARY, 5.0, "source", is_fixed=is_fixed)
        drafters = policy(host, weighing=Weighing(cost))
        (seq,) = begun(drafters, None)
        seq.draft_limit, seq.max_tokens = 5, 10**6
        lengths = []
        for _ in range(120):
            step = scheduled([seq])
            drafters.draft(step)
            lengths.append(len(step.seqs[0].draft))
            accepted = lengths[-1] if said == 1 else 0
            drafters.observe(step, {seq: Verdict([1] * accepted + [said], list(range(accepted)))}, {})
            seq.tokens += [1] * accepted + [said]
            seq.cached = len(seq.tokens) - 1
            drafters.end_step(lengths[-1], 0.0105 + 0.0005 * lengths[-1])
        drafted[said] = lengths
    assert sum(length == 5 for length in drafted[1][40:]) > 70
    assert sum(drafted[2][40:]) <= 8


def test_hidden_states_go_to_who_needs_them_with_the_rows_of_its_own(folder: Path) -> None:
    make = prepare("three", {})
    assert make is not None
    drafters = policy(DraftHost(make(NO_TARGET), VOCABULARY, 5.0, "three"))
    seqs = begun(drafters, None, "one", "three")
    step = scheduled(seqs)
    step.seqs[2].draft, step.seqs[2].num_new, step.seqs[2].first_row = Draft.chain([7, 8]), 2, 5
    verdicts = dict(zip(seqs, [Verdict([4], []), Verdict([4], []), Verdict([7, 4], [0])], strict=True))
    hidden = {layer: torch.full((9, 2), float(layer)) for layer in range(3)}
    step.preempted = [seqs[1]]
    drafters.observe(step, verdicts, hidden)
    told = recorder("three")
    assert told.rows == [[0], [5, 6, 7]], "the last node was rejected"
    assert sorted(told.hidden) == [0, 2]
    assert told.hidden[2] is hidden[2]
    assert (told.preempted, recorder("one").preempted, recorder("one").hidden) == ([], [seqs[1]], {})


def test_chunks_are_told_and_what_failed_is_not(folder: Path) -> None:
    drafters = policy()
    chunk, failed = begun(drafters, "one", "one")
    step = scheduled([chunk, failed])
    step.seqs[0].sampled = False
    drafters.observe(step, {}, {})
    assert recorder("one").heard[-1] == ("observe", [chunk], [None])


def test_a_drafter_that_fails_loses_its_own_drafts_only(folder: Path) -> None:
    drafters = policy()
    seqs = begun(drafters, "one", "failing", "two", "failing")
    assert propose(drafters, seqs, [1, 1, 1, 1]) == [[1], [], [2], []]
    assert drafters.policy.num_dropped == 2


def test_a_drafter_that_breaks_the_contract_loses_its_own_drafts_only(folder: Path) -> None:
    drafters = policy()
    seqs = begun(drafters, "one", "two", "one", "two")
    recorder("two").token = VOCABULARY
    assert propose(drafters, seqs, [2, 2, 2, 2]) == [[1, 1], [], [1, 1], []]
    assert drafters.policy.num_dropped == 2


def test_a_drafter_that_is_switched_off_leaves_the_others_and_takes_no_slots(folder: Path) -> None:
    drafters = policy()
    one, two, none = begun(drafters, "one", "two", None)
    drafters.policy.hosts["one"].close()
    step = scheduled([one, two, none])
    drafters.draft(step)
    assert [len(each.draft) for each in step.seqs] == [0, 0, 0], "limits are those of the last step"
    assert propose(drafters, [one, two, none], [1, 1, 1]) == [[], [2], []]
    two.draft_limit = one.draft_limit = 3
    step = scheduled([one, two])
    drafters.draft(step)
    assert step.num_tokens_left == 10**6 - 3
    for seq in (one, two, none):
        drafters.end(seq)


def test_the_engines_own_drafter_answers_to_its_name(folder: Path) -> None:
    own = NgramDrafter(NO_TARGET, prompt_lookup_max=2)
    drafters = policy(DraftHost(own, VOCABULARY, 5.0, "ngram"))
    seqs = begun(drafters, None, "ngram")
    assert {view._seq for view in own._indexes} == set(seqs), "one drafter, with the engine's options"


def test_replacing_keeps_what_was_counted_and_forgets_the_rest(folder: Path) -> None:
    drafters = policy()
    (seq,) = begun(drafters, "failing")
    propose(drafters, [seq], [3])
    own = DraftHost(NgramDrafter(NO_TARGET), VOCABULARY, 5.0, "ngram")
    with pytest.raises(AssertionError):
        drafters.policy.replace(own, 5)
    drafters.end(seq)
    first, old = recorder("failing"), drafters.policy.hosts["failing"]
    drafters.policy.replace(own, 5)
    assert drafters.policy.num_dropped == 1
    assert not old.active
    (seq,) = begun(drafters, "failing")
    propose(drafters, [seq], [3])
    assert drafters.policy.num_dropped == 2
    assert recorder_count("failing") == 2
    assert len(first.heard) == 2, "begin and end"
    drafters.end(seq)
    drafters.policy.replace(DraftHost(None, VOCABULARY, 5.0), 5)
    assert drafters.policy.num_dropped == 2


def recorder_count(name: str) -> int:
    return len(importlib.import_module(f"specserve.drafters.{name}").RecordingDrafter.made)


def test_sequences_may_end_after_the_close(folder: Path) -> None:
    drafters = policy()
    seqs = begun(drafters, "one", None, "two")
    drafters.policy.close()
    assert propose(drafters, seqs, [1, 1, 1]) == [[], [], []]
    for seq in seqs:
        drafters.end(seq)
    assert not drafters.policy._num_seqs


@settings(max_examples=60)
@given(st.data())
def test_any_coming_and_going(data: st.DataObject) -> None:
    """Against drafters that know the answer by themselves: a sequence's draft is its drafter's token, always."""
    hosts = {name: Constant(token) for token, name in enumerate(("a", "b", "c"), 1)}
    drafters = policy(DraftHost(hosts["a"], VOCABULARY, 5.0, "a"))
    for name in ("b", "c"):  # as a request would have had them made from files
        drafters.policy.hosts[name] = DraftHost(hosts[name], VOCABULARY, 5.0, name)
    try:
        live: list[Sequence] = []
        for _ in range(data.draw(st.integers(1, 12))):
            if live and data.draw(st.booleans()):
                drafters.end(live.pop(data.draw(st.integers(0, len(live) - 1))))
            else:
                live += begun(drafters, data.draw(st.sampled_from([None, "a", "b", "c", NONE])))
            batch = data.draw(st.permutations(live))
            limits = [data.draw(st.integers(0, 3)) for _ in batch]
            tokens = {"a": 1, "b": 2, "c": 3, NONE: 0}
            expected = [[tokens[s.drafter]] * n * (s.drafter != NONE) for s, n in zip(batch, limits, strict=True)]
            assert propose(drafters, batch, limits) == expected
        for name, host in hosts.items():
            assert {view._seq for view in host.live} == {seq for seq in live if seq.drafter == name}
        assert drafters.policy.num_dropped == 0
    finally:
        drafters.policy.close()


class Constant:
    """Drafts one token; asserts that it hears of its own sequences only."""

    needs = Needs()

    def __init__(self, token: int) -> None:
        self.token = token
        self.live: set[SequenceView] = set()

    def begin(self, seq: SequenceView) -> None:
        assert seq not in self.live
        self.live.add(seq)

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        assert self.live.issuperset(seq for seq, _ in requests)
        return [Draft.chain([self.token] * most) for _, most in requests]

    def observe(self, step: StepReport) -> None: ...

    def end(self, seq: SequenceView) -> None:
        self.live.remove(seq)


# --- how much ---------------------------------------------------------------------------------------------------------


def constant(k: int = 5, **more: Any) -> DraftController:
    return policy(DraftHost(Constant(1), VOCABULARY, 5.0, "own"), k, **more)


def length(drafters: DraftController, seq: Sequence, step: Step | None = None) -> int:
    step = step or scheduled([seq])
    drafters.draft(step)
    return len(step.seqs[0].draft)


@pytest.mark.parametrize(
    ("k", "asked", "params", "expected"),
    [
        (5, None, {}, 5),
        (5, None, {"num_speculative_tokens": 2}, 2),
        (5, None, {"num_speculative_tokens": 9}, 5),
        (5, None, {"num_speculative_tokens": 0}, 0),
        (0, None, {}, 0),  # the engine's number is for those that name no drafter
        (0, "own", {}, 5),
        (3, "own", {}, 3),
        (5, NONE, {}, 0),
    ],
)
def test_how_many_tokens_a_draft_has(k: int, asked: str | None, params: dict[str, Any], expected: int) -> None:
    drafters, seq = constant(k), make_seq(SamplingParams(**params))
    drafters.begin([seq], asked)
    assert length(drafters, seq) == expected


def test_a_draft_ends_where_the_output_or_the_context_does() -> None:
    drafters, seq = constant(), make_seq()
    drafters.begin([seq], None)
    seq.max_tokens = 4  # one has come; a step says one more than its draft
    assert length(drafters, seq) == 2
    short = constant(max_model_len=5)
    short.begin([seq], None)
    assert length(short, seq) == 1


def test_drafts_take_what_is_left_of_the_step_and_of_the_blocks() -> None:
    drafters, seqs = constant(), [make_seq() for _ in range(3)]
    drafters.begin(seqs, None)
    step = scheduled(seqs)
    step.num_tokens_left, step.num_logits_left = 8, 7
    drafters.draft(step)
    assert [len(each.draft) for each in step.seqs] == [5, 2, 0]
    assert (step.num_tokens_left, step.num_logits_left) == (1, 0)
    cast(Any, drafters._cache).most = 3  # its own token, and two more
    assert length(drafters, seqs[0]) == 2, "halved until it fits"


def test_prompts_and_first_tokens_have_no_draft() -> None:
    drafters, seq = constant(), make_seq()
    drafters.begin([seq], None)
    seq.num_prompt = 3
    assert length(drafters, seq) == 0


def test_a_chunk_that_does_not_reach_the_end_has_no_draft_and_does_not_decode() -> None:
    """Also one of a single token, of a sequence that computes again what it said."""
    cost = DecodeCost()
    cost.begin(np.array([0.01 + 0.001 * rows for rows in ROWS]))
    for weighing in (None, Weighing(cost)):
        drafters, seqs = constant(weighing=weighing), [make_seq(), make_seq()]
        drafters.begin(seqs, None)
        step = scheduled(seqs)
        step.seqs[0].start, step.seqs[0].sampled = 0, False
        drafters.draft(step)
        assert len(step.seqs[0].draft) == 0
        if weighing is not None:
            assert (weighing.outlook.load.rows, weighing.outlook.load.tokens) == (1, 1)
        else:
            assert len(step.seqs[1].draft) == 5


def test_heads_that_have_drafted_nothing_for_long_are_weighed_seldom() -> None:
    """Look-ups are asked all the same; a sequence that has a draft again is weighed in every step."""
    cost = DecodeCost()
    cost.begin(np.array([0.01 + 0.001 * rows for rows in ROWS]))
    weighing, seq, weighed = Weighing(cost), make_seq(), list[int]()
    weighing.begin([seq])
    number = 0
    weighing._length = lambda *_: weighed.append(number) or 3  # type: ignore[method-assign,func-returns-value]
    for number in range(1, 100):
        (each,) = scheduled([seq]).seqs
        weighing.start(scheduled([seq]))
        chosen = weighing.choose("head", {each: 4})
        assert chosen == ({each: 3} if weighed and weighed[-1] == number else {})
        assert weighing.choose(LOOKUPS, {each: 4}) == {each: 4}
        if number == 80:
            weighing.verify(seq, Proposals([("head", Draft.chain([5]))]), [0])
    assert weighed == [*range(1, SILENT + 1), *range(40, 81, SELDOM), *range(81, 100)]


def test_who_is_asked_for_nothing_is_not_called(folder: Path) -> None:
    """But for who has yet to hear of a sequence."""
    drafters = policy()
    seqs = begun(drafters, "one", "two")
    first, second = recorder("one"), recorder("two")
    before = len(first.heard)
    assert [len(draft) for draft in propose(drafters, seqs, [0, 2])] == [0, 2]
    assert len(first.heard) == before and second.heard[-1][0] == "propose"


def test_a_prediction_is_drafted_unless_another_drafter_is_named() -> None:
    for asked, drafter in ((None, "prediction"), ("own", "own"), (NONE, NONE)):
        drafters, seq = constant(), make_seq(prediction=(4, 5))
        drafters.begin([seq], asked)
        assert (seq.drafter, seq.stats.drafter) == (drafter, drafter)


def jump_forward(params: SamplingParams | None = None) -> Sequence:
    """Its grammar leaves no choice of the next three tokens."""
    language = LanguageGrammar([[4, 5, 6]])
    return make_seq(params, grammar=Guarded(language.start(), language))


@pytest.mark.parametrize(
    ("own", "asked", "params", "expected"),
    [
        (False, None, {}, [4, 5, 6]),  # also where the engine drafts nothing
        (True, None, {}, [4, 5, 6]),  # whoever drafts
        (True, NONE, {}, []),
        (False, None, {"num_speculative_tokens": 2}, [4, 5]),
        (False, None, {"num_speculative_tokens": 0}, []),
    ],
)
def test_jump_forward_tokens_are_drafted_unless_the_request_wants_no_drafts(
    own: bool, asked: str | None, params: dict[str, Any], expected: list[int]
) -> None:
    drafters, seq = (constant(2) if own else policy()), jump_forward(SamplingParams(**params))
    drafters.begin([seq], asked)
    step = scheduled([seq])
    drafters.draft(step)
    assert step.seqs[0].draft.tokens.tolist()[:3] == expected


def test_what_a_drafters_model_computed_of_nodes_that_a_grammar_replaced_is_forgotten() -> None:
    drafters, seq = constant(3), jump_forward()
    drafters.begin([seq], None)
    cache = KVCache(KVStorage([KVShape(1, 2)], 4, 16, torch.float32, "cpu"), prefix_caching=False)
    assert cache.reserve(seq, 9)
    seq.draft_cached = len(seq.tokens) + 3  # as after its model ran along the draft 1, 1, 1
    assert length(drafters, seq) == 3
    assert seq.draft_cached == len(seq.tokens), "4, 5, 6 have none"


# --- what a request may bring about ----------------------------------------------------------------------------------


def refused(drafters: DraftController, name: Any) -> str:
    """The message of a refusal, which names the parameter and leaves everything as it was."""
    before = dict(drafters.policy.hosts)
    with pytest.raises(InputError) as caught:
        drafters.begin([make_seq()], name)
    assert caught.value.param == "drafter"
    assert drafters.policy.hosts == before
    assert not drafters.policy._num_seqs
    return str(caught.value)


def test_an_unknown_name_has_near_misses(folder: Path) -> None:
    message = refused(policy(DraftHost(NgramDrafter(NO_TARGET), VOCABULARY, 5.0, "mine")), "ngrm")
    assert "Unknown drafter 'ngrm'. Did you mean 'ngram'" in message
    assert all(name in message for name in ("mine", "none", "one", "prediction"))
    for name in ("", "../ngram", "ngram.NgramDrafter", "zoo"):
        assert f"Unknown drafter {name!r}" in refused(policy(), name)


def test_a_drafter_that_reads_layers_is_only_the_engines_own(folder: Path) -> None:
    """The steps that run show no layer to it."""
    assert "'three' reads layers of the target: it must be the engine's --drafter" in refused(policy(), "three")


def test_what_a_request_brings_about_takes_no_memory_that_the_cache_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store of `suffix` is as large as may be; a drafter that needs more is only the engine's own."""
    large = RECORDER.format(token=4, layers="(), memory_bytes=2**22 + 1")
    (folder / "large.py").write_text(large)
    begun(policy(), "large")
    monkeypatch.setattr(NO_TARGET, "memory_bytes", 2**22)
    message = refused(policy(), "large")
    assert "'large' takes 4194305 bytes beside which the KV cache was not sized: it must be the engine's" in message
    drafters = policy()
    begun(drafters, "suffix")
    assert drafters.policy.hosts["suffix"].needs.memory_bytes == 2**22


@pytest.mark.parametrize("name", [5, ["ngram"], {"name": "ngram"}, b"ngram"])
def test_a_name_is_text(name: Any) -> None:
    assert f"drafter is {name!r}; it must be the name" in refused(policy(), name)


def test_drafters_of_other_packages_are_only_the_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("plugin", "specserve.drafters.ngram:NgramDrafter", DRAFTERS.package)
    monkeypatch.setattr(registry, "declared", lambda group: [point])
    assert "One of another package must be the engine's --drafter" in refused(policy(), "plugin")
    make = prepare("plugin", {})
    assert make is not None
    own = policy(DraftHost(make(NO_TARGET), VOCABULARY, 5.0, "plugin"))
    (seq,) = begun(own, "plugin")
    assert seq.drafter == "plugin"


NEEDY = "class NeedyDrafter:\n    def __init__(self, context, model, head, depth=3, *more, **options): pass\n"
NEEDLESS = "class ADrafter:\n    def __init__(self, context, head=None): pass\n"
VERBS = "".join(f"    def {verb}(self, *args): pass\n" for verb in DRAFTERS.parts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"RUNS_MODEL = True\n{NEEDLESS}{VERBS}", "needs a model of its own, which no request can give"),
        (NEEDY + VERBS, "needs model, head, which no request can give: it must be the engine's --drafter"),
        ("class ADrafter:\n    def begin(self, seq): pass\n", "has no propose, observe, end"),
        ("import a_package_that_is_not_there\n", "needs the package 'a_package_that_is_not_there'"),
        ("raise RuntimeError('planted')\n", "cannot be made: RuntimeError: planted"),
        (f"class ADrafter:\n    def __init__(self, context): 1 / 0\n{VERBS}", "cannot be made: ZeroDivisionError"),
        (f"class ADrafter:\n    def __init__(self): pass\n{VERBS}", "takes no context, the first parameter"),
    ],
)
def test_what_cannot_be_made_is_the_requests_error(folder: Path, text: str, message: str) -> None:
    (folder / "wrong.py").write_text(text)
    assert message in refused(policy(), "wrong")


def test_of_drafters_that_a_request_may_name_none_is_kept(folder: Path) -> None:
    """They are made to find that out; what is in use stays as it is, and the others are closed."""
    (folder / "wrong.py").write_text("raise RuntimeError('planted')\n")
    closing = RECORDER.format(token=1, layers="()") + "\n    def close(self):\n        self.heard.append('close')\n"
    (folder / "one.py").write_text(closing)
    drafters = policy()
    (seq,) = begun(drafters, "two")
    before = dict(drafters.policy.hosts)
    found = drafters.policy.nameable()
    assert "planted" in (found["wrong"] or "")
    assert "reads layers" in (found["three"] or "")
    assert "runs a model" in (found["eagle"] or "")
    assert {name for name in found if found[name] is None} >= {"auto", "none", "one", "two", "ngram", "suffix"}
    assert drafters.policy.hosts == before
    assert recorder("one").heard == ["close"]
    assert propose(drafters, [seq], [3]) == [[2, 2, 2]]


def test_options_with_defaults_are_no_hindrance(folder: Path) -> None:
    drafters = policy()
    begun(drafters, "ngram", "prediction", "one", NONE, None, "one")
    assert recorder_count("one") == 1, "made once"
    assert sorted(drafters.policy.hosts) == ["ngram", "none", "one", "prediction"]
