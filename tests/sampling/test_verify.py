"""Verification is exact: every draft, every outcome and every law enumerated in float64, with the real functions.

A case fixes a target (a table of conditional laws), a drafter's shape and laws, and which rows are bad. The joint law
of what is emitted, extended by plain sampling to a fixed length, must be the target's to 1e-12.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import pytest
import torch

from specserve.sampling import verify
from specserve.speculation import grammar
from specserve.speculation.tree import Proposals
from specserve.types import Draft, SamplingParams, Sequence

MODES = ("coupled", "rejection", "block")
KINDS = {  # what is judged by comparing samples is judged alike whatever law it was drawn from
    "coupled": ("coupled", False),
    "one-hot-rejection": ("rejection", False),
    "dense-rejection": ("rejection", True),
    "one-hot-block": ("block", False),
    "dense-block": ("block", True),
}
CHAINS = {"chain1": [-1], "chain2": [-1, 0], "chain3": [-1, 0, 1]}
TREES = {
    "fork": [-1, -1],
    "trident": [-1, -1, -1],
    "late fork": [-1, 0, 0],
    "two deep": [-1, -1, 0, 0],
    "crossed": [-1, -1, 1, 0],
    "ladder": [-1, 0, -1, 1],
}
SHAPES = CHAINS | TREES


@dataclass(frozen=True)
class Table:
    """A conditional law for every prefix, random but fixed. `zeros`: how many tokens of each law are impossible."""

    seed: int
    vocab: int
    zeros: int = 0
    sharp: float = 1.0

    def __call__(self, prefix: tuple[int, ...]) -> np.ndarray:
        return _table_law(self, prefix)


@cache
def _table_law(table: Table, prefix: tuple[int, ...]) -> np.ndarray:
    random = np.random.default_rng([table.seed, table.vocab, len(prefix), *prefix])
    law = random.dirichlet(np.full(table.vocab, table.sharp))
    law[random.permutation(table.vocab)[: table.zeros]] = 0.0
    return np.asarray(law / law.sum())


@dataclass(frozen=True)
class Case:
    mode: str
    parents: tuple[int, ...]
    target: Table
    drafter: Table | None  # None: every draft is tried on its own, one-hot
    bad: frozenset[int] = frozenset()
    shorten: Callable[[Draft], Draft] = lambda draft: draft  # what is verified of a draft

    @cached_property
    def length(self) -> int:
        depths = Draft(np.zeros(len(self.parents), np.int32), np.array(self.parents, np.int32)).depths
        return 2 + int(depths.max())


def every_draft(case: Case) -> Iterator[tuple[Draft, float]]:
    """All drafts of the case's shape, siblings different, each with the probability that its drafter draws it."""
    nodes = range(len(case.parents))
    for tokens in itertools.product(range(case.target.vocab), repeat=len(nodes)):
        elders = [[tokens[i] for i in range(j) if case.parents[i] == case.parents[j]] for j in nodes]
        if any(tokens[j] in elders[j] for j in nodes):
            continue
        draft = Draft(np.array(tokens, np.int32), np.array(case.parents, np.int32))
        if case.drafter is None:
            yield draft, 1.0
            continue
        laws = [_without(case.drafter(_prefix(draft, case.parents[j])), elders[j]) for j in nodes]
        probability = float(np.prod([law[token] for law, token in zip(laws, tokens, strict=True)]))
        if probability > 0:
            yield Draft(draft.tokens, draft.parents, torch.tensor(np.array(laws))), probability


def _without(law: np.ndarray, tokens: list[int]) -> np.ndarray:
    left = law.copy()
    left[tokens] = 0.0
    return np.asarray(left / left.sum())


def _prefix(draft: Draft, node: int) -> tuple[int, ...]:
    return tuple(int(draft.tokens[i]) for i in draft.path_to(node))


def outcomes(case: Case, draft: Draft) -> Iterator[tuple[tuple[int, ...], float]]:
    """Everything a verdict on this draft can say, with its probability."""
    laws = torch.tensor(np.array([case.target(_prefix(draft, row - 1)) for row in range(len(draft) + 1)]))
    bad = [row in case.bad for row in range(len(laws))]
    if case.mode == "coupled":
        yield from _coupled_outcomes(draft, laws.numpy(), bad)
    else:
        yield from _tried_outcomes(draft, laws, bad, case.mode == "block")


def _coupled_outcomes(draft: Draft, laws: np.ndarray, bad: list[bool]) -> Iterator[tuple[tuple[int, ...], float]]:
    """Gumbel noise decides which token wins in each row; one row per position is visited, so rows are independent."""
    possible = [[(token, p) for token, p in enumerate(law) if p > 0] for law in laws.tolist()]
    for each in itertools.product(*possible):
        winners, probability = [token for token, _ in each], math.prod(p for _, p in each)
        path = verify.walk_coupled(draft, winners, bad)
        yield tuple(verify.make_verdict(draft, path, bad, winners[verify.last_row(path)])[0]), probability


def _tried_outcomes(
    draft: Draft, laws: torch.Tensor, bad: list[bool], block: bool
) -> Iterator[tuple[tuple[int, ...], float]]:
    rounds = verify.plan([draft], [0], torch.device("cpu"))
    chances = verify.judge(laws, rounds, torch.tensor(bad), block).clamp(0, 1).tolist()  # P(uniform <= chance)
    walk = verify.walk_block if block else verify.walk_rejection
    for stands in itertools.product((False, True), repeat=len(draft)):
        probability = np.prod([chances[i + 1] if s else 1 - chances[i + 1] for i, s in enumerate(stands)])
        if probability == 0:
            continue
        path = walk(draft, [True, *stands], bad)
        for extra, p in enumerate(laws[verify.last_row(path)].tolist()):
            if p > 0:
                yield tuple(verify.make_verdict(draft, path, bad, extra)[0]), float(probability * p)


def target_law(case: Case, given: tuple[int, ...] = ()) -> np.ndarray:
    """The joint law [vocab] * length of plain sampling that has already said `given`."""
    return _plain(case.target, given, case.length)


@cache
def _plain(target: Table, given: tuple[int, ...], length: int) -> np.ndarray:
    joint = np.zeros((target.vocab,) * length)
    for rest in itertools.product(range(target.vocab), repeat=length - len(given)):
        text = given + rest
        joint[text] = np.prod([target(text[:i])[text[i]] for i in range(len(given), length)])
    return joint


def joint_law(case: Case, draft: Draft) -> np.ndarray:
    """Of what a verdict on this draft says and plain sampling adds, [vocab] * length."""
    said: dict[tuple[int, ...], float] = defaultdict(float)
    for tokens, probability in outcomes(case, draft):
        said[tokens] += probability
    return sum((p * target_law(case, tokens) for tokens, p in said.items()), np.zeros_like(target_law(case)))


def check(case: Case) -> None:
    """What the suite demands of a case; it has to fail on every fault planted below."""
    target = target_law(case)
    total = np.zeros_like(target)
    for draft, weight in every_draft(case):
        joint = joint_law(case, case.shorten(draft))
        if case.drafter is None:
            assert np.abs(joint - target).max() < 1e-12, f"{case} {draft.tokens}"
        total += weight * joint
    if case.drafter is not None:
        assert np.abs(total - target).max() < 1e-12, case


def _cases(mode: str, dense: bool, names: dict[str, list[int]]) -> Iterator[Case]:
    for index, parents in enumerate(names.values()):
        vocab = 5 if len(parents) < 3 else 4 if len(parents) < 4 else 3
        widest = max(parents.count(p) for p in parents)
        for target_zeros, draft_zeros in ((0, 0), (2, 0), (0, 1), (1, 1)) if dense else ((0, 0), (1, 0), (2, 0)):
            drafter = Table(50 + index, vocab, min(draft_zeros, vocab - widest)) if dense else None
            yield Case(mode, tuple(parents), Table(index, vocab, min(target_zeros, vocab - 1)), drafter)


@pytest.mark.parametrize("mode", MODES)
def test_merged_proposals_bend_no_law_whatever_is_taken_of_them(mode: str) -> None:
    """Chains of three drafters made one tree, of which a step verifies some nodes, each with its parent."""
    random = np.random.default_rng(5)
    case = Case(mode, (-1, 0, 1), Table(6, 3), None)
    for _ in range(30):
        chains = [random.integers(0, 3, random.integers(1, 4)).tolist() for _ in range(3)]
        merged = Proposals([(str(i), Draft.chain(chain)) for i, chain in enumerate(chains)])
        taken: list[int] = []
        for node, parent in enumerate(merged.parents):
            if (parent < 0 or parent in taken) and random.random() < 0.8:
                taken.append(node)
        assert np.abs(joint_law(case, merged.draft(taken)) - target_law(case)).max() < 1e-12


def _first(draft: Draft, count: int) -> Draft:
    return Draft(draft.tokens[:count], draft.parents[:count], None if draft.q is None else draft.q[:count])


def _by_what_was_drawn(draft: Draft) -> Draft:
    """As long as all tokens are even: whether a token is tried hangs on that token."""
    return _first(draft, next((i for i, token in enumerate(draft.tokens) if token % 2), len(draft)))


def _by_what_came_before(draft: Draft) -> Draft:
    """As long as the tokens before are even: whether a token is tried hangs on those in front of it."""
    return _first(draft, next((i + 1 for i, token in enumerate(draft.tokens) if token % 2), len(draft)))


TRAP = [Case(mode, (-1, 0), Table(8, 4), Table(9, 4)) for mode in ("rejection", "block")]


@pytest.mark.parametrize("case", TRAP, ids=lambda case: case.mode)
def test_who_shortens_a_sampled_draft_by_what_is_in_it_changes_the_law(case: Case) -> None:
    check(replace(case, shorten=lambda draft: _first(draft, 1)))
    check(replace(case, shorten=_by_what_came_before))
    with pytest.raises(AssertionError):
        check(replace(case, shorten=_by_what_was_drawn))


@pytest.mark.parametrize("shorten", [_by_what_was_drawn, _by_what_came_before])
@pytest.mark.parametrize(
    "case",
    [Case("coupled", (-1, 0), Table(8, 4), Table(9, 4)), *(replace(case, drafter=None) for case in TRAP)],
    ids=["coupled", "one-hot, rejection", "one-hot, block"],
)
def test_coupled_and_one_hot_drafts_may_be_shortened_by_anything(case: Case, shorten: Callable[[Draft], Draft]) -> None:
    check(replace(case, shorten=shorten))


class PossibleState:
    """A grammar that allows what a target can say."""

    def __init__(self, target: Table) -> None:
        self.target = target
        self.said: list[int] = []

    def advance(self, token: int) -> bool:
        if self.target(tuple(self.said))[token] == 0:
            return False
        self.said.append(token)
        return True

    def rollback(self, n: int) -> None:
        del self.said[len(self.said) - n :]

    def jump_forward(self) -> list[int]:
        return []


def _guided(case: Case) -> Case:
    seq = Sequence("", 0, [0], 1, SamplingParams(), 0, 99)
    seq.grammar = PossibleState(case.target)  # type: ignore[assignment]
    return replace(case, shorten=lambda draft: grammar.guide(seq, draft, len(draft)))


@pytest.mark.parametrize("dense", [False, True], ids=["one-hot", "dense"])
@pytest.mark.parametrize("shape", ["chain2", "fork", "late fork", "two deep"])
@pytest.mark.parametrize("mode", MODES)
def test_a_draft_that_a_grammar_shortened_bends_no_law(mode: str, shape: str, dense: bool) -> None:
    check(_guided(Case(mode, tuple(SHAPES[shape]), Table(3, 4, zeros=2), Table(4, 4) if dense else None)))


@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_a_grammar_that_took_out_what_was_drawn_would_be_caught(mode: str, planted: Callable[..., Any]) -> None:
    case = Case(mode, (-1, 0), Table(3, 4, zeros=2), Table(4, 4))
    with planted(grammar, "_walk", "            if is_drawn:", "            if False:"), pytest.raises(AssertionError):
        check(_guided(case))


@pytest.mark.parametrize(("mode", "dense"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_joint_law_is_the_targets(mode: str, shape: str, dense: bool) -> None:
    for case in _cases(mode, dense, {shape: SHAPES[shape]}):
        check(case)


@pytest.mark.parametrize(("mode", "dense"), KINDS.values(), ids=KINDS)
def test_bad_rows_shorten_a_verdict_and_do_not_bend_it(mode: str, dense: bool) -> None:
    for parents in ([-1, 0], [-1, 0, 1], [-1, -1, 0], [-1, -1, 0, 0]):
        rows = range(1, len(parents) + 1)
        for bad in [*({row} for row in rows), {1, 2}, set(rows)]:
            check(Case(mode, tuple(parents), Table(3, 3), Table(4, 3) if dense else None, frozenset(bad)))


@pytest.mark.parametrize("mode", ["rejection", "block"])
@pytest.mark.parametrize("shape", ["chain3", "trident", "two deep"])
def test_extreme_pairs_of_laws(mode: str, shape: str) -> None:
    """A drafter that is the target (nothing may be rejected on a chain), one that draws all but what the target wants,
    and a target that wants one token alone."""
    parents = tuple(SHAPES[shape])
    same = Table(8, 3)
    check(Case(mode, parents, same, same))
    check(Case(mode, parents, Table(8, 3, zeros=2), Table(9, 3)))
    check(Case(mode, parents, Table(8, 3, sharp=0.02), Table(9, 3, sharp=0.3)))
    check(Case(mode, parents, Table(8, 3, zeros=2), None))


@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_a_perfect_drafter_is_always_accepted(mode: str) -> None:
    case = Case(mode, (-1, 0, 1), Table(5, 4), Table(5, 4))
    for draft, _ in every_draft(case):
        assert all(len(tokens) == 4 for tokens, probability in outcomes(case, draft) if probability > 1e-12)


def _mean_accepted(mode: str, seed: int) -> float:
    case = Case(mode, (-1, 0, 1), Table(seed, 4), Table(seed + 100, 4))
    pairs = [(w, t, p) for draft, w in every_draft(case) for t, p in outcomes(case, draft)]
    return sum(weight * probability * (len(tokens) - 1) for weight, tokens, probability in pairs)


def test_acceptance_is_what_theory_says() -> None:
    """Rejection accepts a first token with the overlap of p and q; block verification never accepts fewer tokens than
    rejection (its theorem), and on these tables more."""
    gains = [_mean_accepted("block", seed) - _mean_accepted("rejection", seed) for seed in range(6)]
    assert min(gains) > -1e-12
    assert max(gains) > 0.01
    target, drafter = Table(1, 5), Table(2, 5)
    case = Case("rejection", (-1,), target, drafter)
    accepted = sum(w * p for draft, w in every_draft(case) for t, p in outcomes(case, draft) if len(t) == 2)
    assert accepted == pytest.approx(np.minimum(target(()), drafter(())).sum(), abs=1e-12)


def test_one_hot_drafts_are_accepted_alike_by_coupled_and_rejection() -> None:
    for parents in SHAPES.values():
        vocab = 4 if parents.count(-1) == 3 else 3
        cases = [Case(mode, tuple(parents), Table(6, vocab), None) for mode in ("coupled", "rejection")]
        for draft, _ in every_draft(cases[0]):
            means = [sum(p * len(tokens) for tokens, p in outcomes(case, draft)) for case in cases]
            assert means[0] == pytest.approx(means[1], abs=1e-12)


def test_a_token_the_target_cannot_say_never_stands() -> None:
    """Even where its drafter claims q = 0 for what it drew."""
    for q in (None, torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[0.2, 0.3, 0.5]])):
        laws = torch.tensor([[0.0, 0.4, 0.6], [0.3, 0.3, 0.4]], dtype=torch.float64)
        draft = Draft.chain([0], q)
        for block in (False, True):
            rounds = verify.plan([draft], [0], torch.device("cpu"))
            assert verify.judge(laws.clone(), rounds, torch.zeros(2, dtype=torch.bool), block)[1] == 0


def test_a_float32_q_counts_as_normalised() -> None:
    q = torch.rand(1, 5000, generator=torch.Generator().manual_seed(0)).softmax(-1)
    (trial,) = verify.plan([Draft.chain([3], q)], [0], torch.device("cpu"))
    assert trial.q is not None
    assert abs(trial.q.sum().item() - 1) < 1e-12
    laws = torch.cat([q, q]).double()
    laws /= laws.sum(-1, keepdim=True)
    assert verify.judge(laws, [trial], torch.zeros(2, dtype=torch.bool), False)[1] > 1 - 1e-11


@pytest.mark.parametrize("block", [False, True])
def test_a_draft_is_judged_alike_alone_and_among_others(block: bool) -> None:
    """Bit for bit, and each with its own rows."""
    random = np.random.default_rng(0)
    drafts = []
    for parents in SHAPES.values():
        for dense in (False, True):
            q = torch.tensor(random.dirichlet(np.ones(37), len(parents))) if dense else None
            tokens = random.permutation(37)[: len(parents)].astype(np.int32)
            drafts.append(Draft(tokens, np.array(parents, np.int32), q))
    starts = np.cumsum([0, *(len(d) + 1 for d in drafts)]).tolist()
    laws = torch.tensor(random.dirichlet(np.ones(37), starts[-1]))
    bad = torch.zeros(len(laws), dtype=torch.bool)
    together = laws.clone()
    chances = verify.judge(together, verify.plan(drafts, starts[:-1], laws.device), bad, block)
    for draft, first, end in zip(drafts, starts, starts[1:], strict=False):
        alone = laws[first:end].clone()
        own = verify.judge(alone, verify.plan([draft], [0], laws.device), bad[first:end], block)
        assert torch.equal(own, chances[first:end])
        assert torch.equal(alone, together[first:end])


def test_siblings_are_tried_in_order_and_children_first() -> None:
    draft = Draft(np.arange(6, dtype=np.int32), np.array([-1, -1, 0, 0, 1, 2], np.int32))
    good = [False] * 7
    assert verify._leaves_first(draft, good) == [5, 2, 3, 0, 4, 1]
    assert verify.walk_block(draft, [False, True, True, False, True, True, False], good) == [0, 3]
    assert verify.walk_rejection(draft, [False, False, True, True, True, True, True], good) == [1, 4]
    assert verify.walk_coupled(draft, [1, 9, 4, 9, 9, 7, 9], good) == [1, 4]
    assert verify._leaves_first(draft, [True, *good[1:]]) == []


def test_a_thousand_deep_chain_is_walked() -> None:
    draft = Draft.chain([0] * 1024)
    stands = [True] * 1025
    assert verify.walk_block(draft, stands, [False] * 1025) == list(range(1024))
    assert verify.walk_rejection(draft, stands, [False] * 1025) == list(range(1024))


FAULTS = [
    ("judge", "(left + spent * p[trial.parents]) / (total[:, None] + spent)", "left", "residual not renormalised"),
    ("judge", "(left + spent * p[trial.parents]) / (total[:, None] + spent)", "p[trial.parents]", "p resampled"),
    ("judge", "weights[trial.rows] = chances[trial.rows]", "pass", "weight not inherited"),
    ("judge", "total / (total + 1 - weight)", "total / (total + 1)", "wrong weight after a rejection"),
    ("judge", "total / (total + 1 - weight)", "weight", "weight kept after a rejection"),
    ("judge", "torch.where(bad[trial.parents], weight, after)", "after", "children of a bad row rejected"),
    ("judge", "weight[:, None] * p[trial.parents]", "p[trial.parents].clone()", "weight left out"),
    ("_chance", ".clamp(max=1.0)", "", "p / q without min"),
    ("_chance", "target / drafted", "target", "q left out"),
    ("_chance", "(target / drafted).clamp(max=1.0)", "torch.ones_like(target)", "everything accepted"),
    ("_chance", "trial.tokens[:, None]", "trial.rows[:, None]", "wrong token"),
    ("_subtract", "wanted.sub_(trial.q).clamp_(min=0.0)", "wanted", "dense q not subtracted"),
    ("_subtract", "wanted.scatter_(1, trial.tokens[:, None], 0.0)", "pass", "rejected token left in p"),
    ("_subtract", ".clamp_(min=0.0)", ".abs_()", "|p - q| for max(p - q, 0)"),
    ("_round", "starts[i] + 1 + int(drafts[i].parents[j])", "starts[i] + j", "wrong parent row"),
    ("_round", "int(drafts[i].tokens[j])", "int(drafts[i].tokens[0])", "wrong node's token"),
    ("_round", "q[j].to", "q[0].to", "wrong node's q"),
    ("plan", "(depths[node], place, draft.q", "(depths[node], -place, draft.q", "siblings judged in reverse"),
    ("_descend", "row = node + 1", "row = len(bad) - 1", "wrong row after an acceptance"),
    ("_descend", "not bad[row]", "True", "bad rows judge"),
    ("_leaves_first", "order[::-1]", "order", "parents tried before children"),
    ("_leaves_first", "if not bad[node + 1]", "if True", "nodes below a bad row tried"),
    ("walk_rejection", "accepts[node + 1]", "not accepts[node + 1]", "comparison the wrong way round"),
    ("walk_rejection", "accepts[node + 1]", "accepts[node]", "trial of another node"),
    ("walk_block", "accepts[node + 1]", "not accepts[node + 1]", "comparison the wrong way round in block"),
    ("walk_coupled", "sampled[row]", "sampled[0]", "compared with the root's sample"),
    ("walk_coupled", "sampled[row]", "sampled[-1]", "compared with the last row's sample"),
    ("last_row", "path[-1] + 1", "path[-1]", "extra token from the wrong row"),
    ("make_verdict", "if not bad[last_row(path)]", "if True", "a bad row's token emitted"),
]


def _suite() -> Iterator[Case]:
    """A few small cases of every kind."""
    for mode, dense in reversed(KINDS.values()):
        for parents in ((-1, 0), (-1, -1, -1), (-1, -1, 0, 0)):
            drafter = Table(4, 3) if dense else None
            yield Case(mode, parents, Table(2, 3), drafter)
            yield Case(mode, parents, Table(2, 3), drafter, frozenset({1}))


def check_all() -> None:
    for case in _suite():
        check(case)


@pytest.mark.parametrize(("name", "old", "new"), [fault[:3] for fault in FAULTS], ids=[fault[3] for fault in FAULTS])
def test_every_planted_fault_is_caught(name: str, old: str, new: str, planted: Callable[..., Any]) -> None:
    with planted(verify, name, old, new), pytest.raises(AssertionError):
        check_all()


def test_without_a_fault_the_same_suite_passes() -> None:
    check_all()
