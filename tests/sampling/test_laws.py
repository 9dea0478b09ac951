"""The real vectorised sampler emits the target's law: G-tests of whole texts, per cell of parameters, draft and mode.

A model is a table of logits per prefix. Every cell generates the same few tokens for many seeds, drafting anew in every
step, and compares how often each text came with what the naive oracle says. Seeds are fixed; Bonferroni over cells.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from specserve.kernels import _torch_sampling, _torch_verify, reference
from specserve.ops import fixed_point
from specserve.sampling import edits, noise, sampler as sampler_file
from specserve.sampling.noise import Purpose, fold, hash_tokens, row_keys, sample
from specserve.sampling.sampler import Sampler
from specserve.speculation.tree import Proposals
from specserve.testing import sampled
from specserve.types import Draft, Failure, Ids, Sequence

cpu = pytest.importorskip("specserve.kernels.cpu", exc_type=ImportError)
OPS = reference.Kernels(torch.device("cpu"), torch.float32)
KERNELS = {"torch": OPS, "native": cpu.Kernels(torch.float32, "none", 1)}
VOCAB, LENGTH = 4, 3  # texts of LENGTH tokens are compared
CONTEXT = [1, 2, 0, 2]  # two of prompt, two of output
HASHED = hash_tokens(torch.arange(VOCAB))
Text = tuple[int, ...]
Oracle = Callable[..., np.ndarray]

TEMPERATURES = (0.6, 1.5)
FILTERS: tuple[dict[str, Any], ...] = ({}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2})
PENALISED = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.6}
PENALTIES: tuple[dict[str, Any], ...] = ({}, PENALISED)
DRAFTS = ("one-hot", "dense", "tree", "dense tree")
MODES = ("coupled", "rejection", "block")
MERGED = Proposals([("a", Draft.chain([2, 1])), ("b", Draft.chain([0, 3])), ("c", Draft.chain([0, 0]))])
FIXED = {"one-hot": Draft.chain([2, 2]), "tree": MERGED.draft(range(len(MERGED)))}
PARENTS = {"dense": [-1, 0], "dense tree": [-1, -1, 0, 1, 0]}


@cache
def _logits(text: Text) -> np.ndarray:
    return np.random.default_rng([7, len(text), *text]).normal(0, 1.5, VOCAB).astype(np.float32)


@cache
def _allowed(text: Text) -> tuple[bool, ...]:
    """A grammar of sorts: after each text one token is out."""
    return tuple(token != (sum(text) + len(text)) % VOCAB for token in range(VOCAB))


@cache
def _word(text: Text) -> int:
    return sum(ok << token for token, ok in enumerate(_allowed(text)))


@dataclass(frozen=True)
class Cell:
    mode: str
    draft: str
    masked: bool
    options: dict[str, Any] = field(hash=False)

    def __str__(self) -> str:
        return f"{self.mode} {self.draft} {'masked' if self.masked else 'free'} {self.options}"


def _propose(cell: Cell, seqs: list[Sequence]) -> list[Draft]:
    """Fixed tokens for deterministic drafts; draws from a law of the drafter's own for dense ones, with the noise that
    a drafter is told to use."""
    if cell.draft in PARENTS:
        return _draw_drafts(cell, seqs, np.array(PARENTS[cell.draft], np.int32))
    return [FIXED.get(cell.draft, Draft.empty())] * len(seqs)


def _draw_drafts(cell: Cell, seqs: list[Sequence], parents: np.ndarray) -> list[Draft]:
    kind = Purpose.SAMPLE if cell.mode == "coupled" else Purpose.DRAFT
    positions = np.array([len(seq.tokens) for seq in seqs])
    seeds = [seq.seed for seq in seqs]
    keys = [row_keys(seeds, positions.tolist(), [kind] * len(seqs))]
    laws: list[torch.Tensor] = []
    tokens: list[torch.Tensor] = []
    depths = Draft(np.zeros_like(parents), parents).depths.tolist()
    for node, parent in enumerate(parents.tolist()):
        law = torch.tensor(np.random.default_rng([parent + 1]).dirichlet(np.ones(VOCAB), VOCAB))
        law = law[tokens[parent]] if parent >= 0 else law[:1].repeat(len(seqs), 1)
        for elder in range(node):
            if parents[elder] == parent:
                law = law.scatter(1, tokens[elder][:, None], 0.0)
        laws.append(law / law.sum(-1, keepdim=True))
        if cell.mode == "coupled":
            own = row_keys(seeds, (positions + depths[node]).tolist(), [kind] * len(seqs))
        else:
            own = keys[parent + 1]
        tokens.append(sample(laws[-1].log(), own, HASHED))
        keys.append(fold(own, HASHED[tokens[-1]]))
    every, q = torch.stack(tokens, 1).int().numpy(), torch.stack(laws, 1)
    return [Draft(every[i], parents, q[i]) for i in range(len(seqs))]


def _inputs(cell: Cell, texts: list[Text], drafts: list[Draft]) -> tuple[torch.Tensor, Ids | None]:
    prefixes: list[Text] = []
    for text, draft in zip(texts, drafts, strict=True):
        own = [text]
        for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
            own.append((*own[parent + 1], token))
        prefixes += own
    logits = torch.from_numpy(np.stack([_logits(prefix) for prefix in prefixes]))
    return logits, np.array([[_word(prefix)] for prefix in prefixes], np.int32) if cell.masked else None


def _step(cell: Cell, judge: Sampler, seqs: list[Sequence], texts: list[Text]) -> list[Text]:
    """The texts, each longer by what one step said."""
    drafts = _propose(cell, seqs)
    starts = np.cumsum([0, *(len(draft) + 1 for draft in drafts)])[:-1].tolist()
    logits, masks = _inputs(cell, texts, drafts)
    longer, best = [], logits.argmax(-1)
    for text, said in zip(texts, judge.verdicts(logits, sampled(seqs, drafts, starts), masks, best), strict=True):
        assert not isinstance(said, Failure)
        assert len(said.tokens) == len(said.path) + 1
        longer.append((*text, *said.tokens))
    return longer


def generate(cell: Cell, sequence: Callable[..., Sequence], seeds: range, kernels: str = "torch") -> list[Text]:
    """The first LENGTH tokens for every seed."""
    judge = Sampler(VOCAB, cell.mode, KERNELS[kernels])
    params = sequence(CONTEXT, 2, **cell.options).params
    seqs = [Sequence("r", 0, CONTEXT[:], 2, params, seed, 99) for seed in seeds]
    texts: list[Text] = [()] * len(seeds)
    while unfinished := [i for i, text in enumerate(texts) if len(text) < LENGTH]:
        longer = _step(cell, judge, [seqs[i] for i in unfinished], [texts[i] for i in unfinished])
        for i, text in zip(unfinished, longer, strict=True):
            texts[i], seqs[i].tokens = text, [*CONTEXT, *text]
    return [text[:LENGTH] for text in texts]


def expected_law(cell: Cell, sequence: Callable[..., Sequence], oracle: Oracle) -> np.ndarray:
    """The probability of every text, [VOCAB] * LENGTH."""
    joint = np.ones((VOCAB,) * LENGTH)
    seq = sequence(CONTEXT, 2, **cell.options)
    for depth in range(LENGTH):
        for text in itertools.product(range(VOCAB), repeat=depth):
            law = oracle(_logits(text).tolist(), seq, list(text), list(_allowed(text)) if cell.masked else None)
            joint[text] *= law.reshape(-1, *[1] * (LENGTH - depth - 1))
    return joint


def _pool(counts: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Texts that should come fewer than five times are counted together."""
    rare = expected < 5
    pooled = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    return pooled if pooled[1][-1] >= 5 else (pooled[0][:-1], pooled[1][:-1])


def compare(counts: np.ndarray, law: np.ndarray, what: object) -> tuple[float, float, int]:
    """p-value of the G-test, Pearson's statistic and the degrees of freedom. Impossible texts must not have come."""
    assert counts[law < 1e-12].sum() == 0, f"impossible text: {what}"
    seen, expected = _pool(counts.ravel(), law.ravel() * counts.sum())
    terms = np.where(seen > 0, seen * np.log(np.maximum(seen, 1) / expected), 0) - (seen - expected)
    freedom = max(len(seen) - 1, 1)
    return float(stats.chi2.sf(2 * terms.sum(), freedom)), float(((seen - expected) ** 2 / expected).sum()), freedom


def _counts(texts: list[Text]) -> np.ndarray:
    counts = np.zeros((VOCAB,) * LENGTH)
    np.add.at(counts, tuple(np.array(texts).T), 1)
    return counts


GROUPS = [("coupled", "none"), *itertools.product(MODES, DRAFTS)]


def _cells(group: int) -> list[Cell]:
    """Eight, in which any two of filter, temperature, penalties and mask come in every combination; with the other
    groups, all four do. Eight with 400 seeds each tell a fault that all of them share as surely as 32 with 200 would:
    half the texts, a quarter of the degrees of freedom."""
    cells = []
    for kind, hot in itertools.product(range(4), range(2)):
        penalised, masked = (hot + kind + group) % 2, (hot + kind // 2 + group // 2) % 2
        options = {"temperature": TEMPERATURES[hot]} | FILTERS[kind] | PENALTIES[penalised]
        cells.append(Cell(*GROUPS[group], bool(masked), options))
    return cells


CELLS = [cell for group in range(len(GROUPS)) for cell in _cells(group)]
SEEDS_PER_CELL = 400


@pytest.mark.each_choice
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("mode", "draft"), GROUPS)
def test_every_cell_has_the_targets_law(
    mode: str, draft: str, kernels: str, sequence: Callable[..., Sequence], oracle: Oracle
) -> None:
    """Each cell on its own, and all cells of a mode and draft together, which sees smaller faults than any one."""
    statistic, freedom = 0.0, 0
    for index, cell in enumerate(CELLS):
        if (cell.mode, cell.draft) == (mode, draft):
            seeds = range(index * SEEDS_PER_CELL, (index + 1) * SEEDS_PER_CELL)
            counts = _counts(generate(cell, sequence, seeds, kernels))
            p_value, pearson, cell_freedom = compare(counts, expected_law(cell, sequence, oracle), cell)
            assert p_value > 0.001 / len(CELLS), cell
            statistic, freedom = statistic + pearson, freedom + cell_freedom
    assert stats.chi2.sf(statistic, freedom) > 0.001 / len(GROUPS), (mode, draft)


def check(cell: Cell, sequence: Callable[..., Sequence], oracle: Oracle) -> None:
    """One cell with some seeds, which tell gross faults, and with many: what every fault below has to fail. With
    penalties, which take long, faults are all gross: with other seeds, too, 400 miss one in less than 1 of 1,000 runs.
    """
    texts: list[Text] = []
    for num_seeds in (400,) if any("penalty" in name for name in cell.options) else (400, 3000):
        texts += generate(cell, sequence, range(2**32 + len(texts), 2**32 + num_seeds))
        assert compare(_counts(texts), expected_law(cell, sequence, oracle), cell)[0] > 1e-5, cell


def _home(name: str) -> tuple[ModuleType, str]:
    """Where a function is looked up by its callers."""
    if name in vars(Sampler):
        return sampler_file, f"Sampler.{name}"
    first, files = name.partition(".")[0], (sampler_file, edits, _torch_sampling, _torch_verify, noise, fixed_point)
    return next(module for module in files if first in vars(module)), name


_, _, TOP_P, MIN_P = FILTERS
at = partial(Cell, masked=False, options={})
ENVELOPE = Cell("coupled", "one-hot", True, {"repetition_penalty": 0.3, "temperature": 0.6, "top_k": 3})
REPEATING, BRANCHING = (
    Cell("coupled", draft, False, {"frequency_penalty": -2.0, "presence_penalty": 1.0}) for draft in ("one-hot", "tree")
)
FAULTS: list[tuple[str, str, str, str, Cell]] = [
    ("one uniform for all nodes", "uniforms", "keys[trial.parents]", "keys[:1] * 0", at("rejection", "tree")),
    (
        "siblings share a uniform",
        "uniforms",
        "noise.fold(keys[trial.parents], hashed[trial.tokens])",
        "noise.fold(keys[trial.parents], hashed[trial.tokens * 0])",
        at("rejection", "tree"),
    ),
    (
        "a parent's uniform used again",
        "uniforms",
        "noise.fold(keys[trial.parents], hashed[trial.tokens])",
        "keys[trial.parents]",
        at("rejection", "one-hot"),
    ),
    (
        "a uniform of another step",
        "uniforms",
        "[drafts.starts[:-1]].tolist()",
        "[drafts.starts[:-1]].clip(0, 0).tolist()",
        at("block", "one-hot"),
    ),
    (
        "a node's uniform keyed by its own position and token alone",
        "uniforms",
        "keys[trial.rows] = noise.fold(keys[trial.parents], hashed[trial.tokens])",
        "\n".join(
            (
                "origin = torch.zeros_like(keys) if trial is rounds[0] else origin",
                "        origin[drafts.starts[:-1]] = torch.arange(len(seeds))",
                "        own = [seeds[i] for i in origin[trial.parents].tolist()]",
                "        origin[trial.rows] = origin[trial.parents]",
                "        place = drafts.positions[trial.parents].tolist()",
                "        own = noise.row_keys(own, place, [Purpose.ACCEPT] * len(own))",
                "        keys[trial.rows] = noise.fold(own, hashed[trial.tokens])",
            )
        ),
        Cell("block", "one-hot", False, {"logit_bias": {2: 1.0}}),
    ),
    ("accepting above the chance", "_accept_or_reject", "<= judge(", ">= judge(", at("rejection", "dense")),
    ("accepting at even odds", "_accept_or_reject", "<= judge(", "<= 0.5 + 0 * judge(", at("block", "dense")),
    (
        "recovery with the drafter's noise",
        "_accept_or_reject",
        "Purpose.RESAMPLE",
        "Purpose.DRAFT",
        Cell("rejection", "dense", False, {"logit_bias": {1: 1.0}}),
    ),
    ("recovery from the root", "_accept_or_reject", "left[end]", "left[first_rows]", at("rejection", "one-hot")),
    (
        "recovery with one position for all",
        "_accept_or_reject",
        "keys[end]",
        "keys[first_rows * 0]",
        at("rejection", "one-hot"),
    ),
    (
        "judged without a mask",
        "_accept_or_reject",
        "drafts.laws[0, part.owners]), masks)",
        "drafts.laws[0, part.owners]), None)",
        Cell("rejection", "dense", True, {}),
    ),
    (
        "judged before it is edited",
        "verdicts",
        "verify(edited(logits, asked)",
        "verify(logits",
        Cell("rejection", "dense", False, PENALISED),
    ),
    ("sampled before it is edited", "verdicts", "verify(edited(logits, asked)", "verify(logits", ENVELOPE),
    ("sampled without a mask", "_choose", "hashed, masks)", "hashed, None)", ENVELOPE),
    (
        "all of a text with one position",
        "_keys",
        "positions.tolist()",
        "positions.clip(0, 0).tolist()",
        at("coupled", "one-hot"),
    ),
    ("seed left out", "_keys", "part.owners]", "part.owners * 0]", at("coupled", "none")),
    (
        "rows of another sequence",
        "_sampling_arrays",
        "(part.at[rows]",
        "(part.at[rows - 1]",
        at("block", "dense"),
    ),
    ("extra token of the wrong row", "compared", "] = chosen[row]", "] = chosen[first]", at("coupled", "one-hot")),
    ("what differs stands", "compared", "== chosen[row]:", "!= chosen[row]:", at("coupled", "one-hot")),
    ("one token too many", "compared", "+ (chosen[row] >= 0)", "+ 2", at("coupled", "one-hot")),
    ("residual of another law", "_subtract", "trial.q).clamp_(min=0.0)", "trial.q * 0)", at("rejection", "dense")),
    ("mask at the root alone", "_masked", "masks[rows]", "masks[rows * 0]", ENVELOPE),
    ("mask of another bit order", "_masked", 'bitorder="little"', 'bitorder="big"', ENVELOPE),
    ("drafts not penalised", "_Occurrences.drafted", "added[node + 1, columns[token]] += 1", "pass", REPEATING),
    (
        "siblings penalised",
        "_Occurrences.drafted",
        "added[node + 1] = added[parent + 1]",
        "added[node + 1] = added[node]",
        BRANCHING,
    ),
    (
        "prompt not repeated",
        "_Occurrences.__init__",
        "prompt = shared.prompt_ids",
        "prompt = shared.prompt_ids[:0]",
        ENVELOPE,
    ),
    ("repetition always divides", "_penalised", "logits * repetition", "logits / repetition", ENVELOPE),
    ("presence once per occurrence", "_penalised", "(counts > 0)", "counts", REPEATING),
    ("no temperature", "filtered", ".div_(_column(sampling.temperature, scores.device))", "", ENVELOPE),
    (
        "top-p one token short",
        "_nucleus",
        "mass - weights < enough",
        "mass < enough",
        Cell("coupled", "none", False, TOP_P),
    ),
    (
        "top-p of the absolute mass",
        "_nucleus",
        "weights.sum(-1, keepdim=True) * top_p",
        "top_p * 2.0**60",
        Cell("coupled", "none", False, TOP_P),
    ),
    ("top-k one short", "_keep_top_k", "widths[:, None] - 1", "widths[:, None] - 2", ENVELOPE),
    (
        "min-p absolute",
        "_keep_min_p",
        "math.log(p)",
        "-p",
        Cell("coupled", "none", False, MIN_P),
    ),
    ("law not normalised", "row_total", "/ scale_of(most)", "/ scale_of(2 * most)", at("rejection", "one-hot")),
    (
        "uniform in one half",
        "uniform",
        "unit(fold(keys, hashed))",
        "unit(fold(keys, hashed)) / 2",
        at("coupled", "none"),
    ),
    ("exponential, not Gumbel", "gumbel", ".log_().neg_().log_().neg_()", ".log_().neg_()", at("coupled", "none")),
]


@pytest.mark.parametrize("fault", FAULTS, ids=[fault[0] for fault in FAULTS])
def test_every_planted_fault_is_caught(
    fault: tuple[str, str, str, str, Cell],
    planted: Callable[..., Any],
    sequence: Callable[..., Sequence],
    oracle: Oracle,
) -> None:
    _, name, old, new, cell = fault
    with planted(*_home(name), old, new), pytest.raises(AssertionError):
        check(cell, sequence, oracle)


def test_without_a_fault_the_same_cells_pass(sequence: Callable[..., Sequence], oracle: Oracle) -> None:
    for cell in {str(fault[-1]): fault[-1] for fault in FAULTS}.values():
        check(cell, sequence, oracle)


def test_drafts_were_accepted_and_rejected(sequence: Callable[..., Sequence]) -> None:
    """The cells above would say nothing about a sampler that refuses every draft, or about drafts that never fail."""
    for mode, draft in GROUPS:
        if draft == "none":
            continue
        cell = Cell(mode, draft, False, {})
        seqs = [sequence(CONTEXT, 2, seed) for seed in range(300)]
        lengths = {len(text) for text in _step(cell, Sampler(VOCAB, mode, OPS), seqs, [()] * 300)}
        assert lengths == {1, 2, 3}, (mode, draft)
