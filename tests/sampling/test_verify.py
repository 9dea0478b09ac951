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

from specserve.kernels import _torch_verify as verify
from specserve.ops import DraftArrays
from specserve.sampling.inputs import SampledSeq
from specserve.sampling.sampler import draft_arrays
from specserve.speculation.tree import Proposals
from specserve.structured import constrain as fitting
from specserve.testing import path_to
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
NEVER = 99  # no token of these vocabularies


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
    return tuple(int(draft.tokens[i]) for i in path_to(draft, node))


def outcomes(case: Case, draft: Draft) -> Iterator[tuple[tuple[int, ...], float]]:
    """Everything a verdict on this draft can say, with its probability."""
    laws = torch.tensor(np.array([case.target(_prefix(draft, row - 1)) for row in range(len(draft) + 1)]))
    bad = [row in case.bad for row in range(len(laws))]
    if case.mode == "coupled":
        yield from _coupled_outcomes(draft, laws.numpy(), bad)
    else:
        yield from _tried_outcomes(draft, laws, bad, case.mode == "block")


def arrays_of(drafts: list[Draft]) -> DraftArrays:
    starts = np.cumsum([0, *(len(draft) + 1 for draft in drafts)]).tolist()
    pairs = zip(drafts, starts, strict=False)
    return draft_arrays([SampledSeq(draft, SamplingParams(), 0, 5, start, None) for draft, start in pairs])


def rounds_of(*drafts: Draft) -> list[verify.Round]:
    return verify.plan(arrays_of([*drafts]), torch.device("cpu"))


def said(
    draft: Draft, accepts: np.ndarray, chosen: np.ndarray, block: bool = False
) -> list[tuple[tuple[int, ...], list[int]]]:
    """What is emitted and kept of a draft, once for each row of accepts bool [n, rows] and chosen int64 [n, rows], the
    rows' tokens, which are negative where a row is bad."""
    copies = Draft(draft.tokens, draft.parents)
    arrays, bad = arrays_of([copies] * len(accepts)), torch.from_numpy(chosen.reshape(-1) < 0)
    rounds = verify.plan(arrays, bad.device)
    first = torch.from_numpy(arrays.starts[:-1])
    owners = torch.arange(len(accepts)).repeat_interleave(len(draft) + 1)
    given = torch.from_numpy(accepts.reshape(-1)), bad, first, owners
    end = verify.first_accepted(arrays, rounds, *given) if block else verify.descend(rounds, *given)
    found = verify.emitted(arrays, end, torch.from_numpy(chosen.reshape(-1)))
    tokens, nodes, counts = (each.tolist() for each in found.split([len(bad), len(bad), len(accepts)]))
    return [
        (tuple(tokens[start : start + count]), nodes[start : start + count - 1])
        for start, count in zip(first.tolist(), counts, strict=True)
    ]


def _coupled_outcomes(draft: Draft, laws: np.ndarray, bad: list[bool]) -> Iterator[tuple[tuple[int, ...], float]]:
    """Gumbel noise decides which token wins in each row; one row per position is visited, so rows are independent."""
    possible = [[(token, p) for token, p in enumerate(law) if p > 0] for law in laws.tolist()]
    each = [*itertools.product(*possible)]
    winners = np.array([[token for token, _ in one] for one in each])
    accepts = winners[:, [0, *(draft.parents + 1)]] == np.array([-1, *draft.tokens])
    for (tokens, _), one in zip(said(draft, accepts, np.where(bad, -1, winners)), each, strict=True):
        yield tokens, math.prod(p for _, p in one)


def _tried_outcomes(
    draft: Draft, laws: torch.Tensor, bad: list[bool], block: bool
) -> Iterator[tuple[tuple[int, ...], float]]:
    rounds = rounds_of(draft)
    chances = verify.judge(laws, rounds, torch.tensor(bad), block).clamp(0, 1).tolist()  # P(uniform <= chance)
    stands = np.array([*itertools.product((False, True), repeat=len(draft))], np.bool_)
    accepts = np.concatenate([np.ones((len(stands), 1), np.bool_), stands], 1)
    probabilities = np.where(stands, chances[1:], 1 - np.array(chances[1:])).prod(1)
    chosen = np.where(bad, -1, np.full((len(stands), len(bad)), NEVER))
    for (tokens, path), probability in zip(said(draft, accepts, chosen, block), probabilities, strict=True):
        if probability == 0:
            continue
        if tokens[-1] != NEVER:  # it ends on a bad row
            yield tokens, float(probability)
            continue
        for extra, p in enumerate(laws[path[-1] + 1 if path else 0].tolist()):
            if p > 0:
                yield (*tokens[:-1], extra), float(probability * p)


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
    return replace(case, shorten=lambda draft: fitting.constrain(seq, draft, len(draft)))


@pytest.mark.each_choice(rounds=3)
@pytest.mark.parametrize("dense", [False, True], ids=["one-hot", "dense"])
@pytest.mark.parametrize("shape", ["chain2", "fork", "late fork", "two deep"])
@pytest.mark.parametrize("mode", MODES)
def test_a_draft_that_a_grammar_shortened_bends_no_law(mode: str, shape: str, dense: bool) -> None:
    check(_guided(Case(mode, tuple(SHAPES[shape]), Table(3, 4, zeros=2), Table(4, 4) if dense else None)))


@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_a_grammar_that_took_out_what_was_drawn_would_be_caught(mode: str, planted: Callable[..., Any]) -> None:
    case = Case(mode, (-1, 0), Table(3, 4, zeros=2), Table(4, 4))
    with planted(fitting, "_walk", "            if is_drawn:", "            if False:"), pytest.raises(AssertionError):
        check(_guided(case))


@pytest.mark.each_choice(rounds=3)
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
            rounds = rounds_of(draft)
            assert verify.judge(laws.clone(), rounds, torch.zeros(2, dtype=torch.bool), block)[1] == 0


def test_a_float32_q_counts_as_normalised() -> None:
    q = torch.rand(1, 5000, generator=torch.Generator().manual_seed(0)).softmax(-1)
    (trial,) = rounds_of(Draft.chain([3], q))
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
    chances = verify.judge(together, rounds_of(*drafts), bad, block)
    for draft, first, end in zip(drafts, starts, starts[1:], strict=False):
        alone = laws[first:end].clone()
        own = verify.judge(alone, rounds_of(draft), bad[first:end], block)
        assert torch.equal(own, chances[first:end])
        assert torch.equal(alone, together[first:end])


def test_siblings_are_tried_in_order_and_children_first() -> None:
    draft = Draft(np.arange(6, dtype=np.int32), np.array([-1, -1, 0, 0, 1, 2], np.int32))
    assert verify.youngest_first(arrays_of([draft])).tolist() == [0, 2, 5, 1, 4, 3, 6]

    def path(accepted: set[int], block: bool, bad: int = -1) -> list[int]:
        chosen = np.where(np.arange(7) == bad, -1, 9)[None]
        return said(draft, np.array([[row - 1 in accepted for row in range(7)]]), chosen, block)[0][1]

    assert path({0, 1, 3, 4}, block=True) == [0, 3]
    assert path({1, 2, 3, 4, 5}, block=False) == [1, 4]
    assert path({4}, block=True) == [1, 4]
    assert path({0, 4}, block=True) == [0]
    assert path({0, 1, 2, 3, 4, 5}, block=True, bad=1) == [], "node 0 stands, unkept"
    assert path({0, 2, 5}, block=True, bad=3) == [0], "node 2 stands, unkept"
    assert path({0, 2, 5}, block=False, bad=3) == [0]


def test_a_thousand_deep_chain_is_walked() -> None:
    draft = Draft.chain([0] * 1024)
    for block in (False, True):
        ((_, path),) = said(draft, np.ones((1, 1025), np.bool_), np.zeros((1, 1025), np.int64), block)
        assert path == list(range(1024))


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
    ("_round", "[drafts.parents[rows], rows", "[rows - 1, rows", "wrong parent row"),
    ("_round", "drafts.tokens[rows]", "drafts.tokens[rows * 0 + 1]", "wrong node's token"),
    ("_round", "[row - drafts.starts[i] - 1]", "[0]", "wrong node's q"),
    ("plan", "(depth, place, index in", "(depth, -place, index in", "siblings judged in reverse"),
    ("descend", "stands[trial.rows] = taken", "stands[trial.rows] = accepts[trial.rows]", "a rejected node's child"),
    ("descend", "is_done = bad.clone()", "is_done = torch.zeros_like(bad)", "bad rows judge"),
    ("descend", "is_done[trial.parents] |= taken", "pass", "a younger sibling stands too"),
    ("descend", "& accepts[", "& ~accepts[", "comparison the wrong way round"),
    ("descend", "accepts[trial.rows]", "accepts[trial.parents]", "trial of another node"),
    ("youngest_first", "ahead.pop()", "ahead.pop(0)", "the oldest child first"),
    ("youngest_first", "return np.array(order", "return np.array(sorted(order)", "parents tried before children"),
    ("first_accepted", "& ~bad[trial.parents]", "", "nodes below a bad row tried"),
    ("first_accepted", "exists & accepts", "exists & ~accepts", "comparison the wrong way round in block"),
    ("emitted", "tokens[end]\n    nodes", "tokens[first]\n    nodes", "extra token from the wrong row"),
    ("emitted", "depths + ~is_bad", "depths + 1", "a bad row's token emitted"),
    ("emitted", "= own[row]", "= own[end]", "one node's token for all"),
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
