"""The noise is uniform, unrelated from one argument to the next, and the same bits wherever it is made."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from specserve.sampling import noise
from specserve.sampling.noise import Purpose, fold, gumbel, hash_tokens, row_keys, sample, uniform, unit

MANY = 20_000


def _along(axis: str) -> torch.Tensor:
    """Numbers that differ in one argument alone, from neighbour to neighbour."""
    steps, zeros = range(MANY), [0] * MANY
    token = hash_tokens(torch.tensor([7]))
    if axis == "token":
        return uniform(row_keys([3], [5], [Purpose.SAMPLE]), hash_tokens(torch.arange(MANY)))
    seeds, positions = (steps, zeros) if axis == "seed" else (zeros, steps)
    return uniform(row_keys(seeds, positions, zeros), token)


AXES = ("seed", "position", "token")


@pytest.mark.parametrize("axis", AXES)
def test_uniform_along_each_argument(axis: str) -> None:
    counts = np.histogram(_along(axis).numpy(), bins=64, range=(0, 1))[0]
    assert stats.chisquare(counts).pvalue > 1e-4
    low_bits = ((_along(axis) * 2.0**40) % 64).floor().numpy()
    assert stats.chisquare(np.bincount(low_bits.astype(int), minlength=64)).pvalue > 1e-4


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("lag", [1, 2, 8])
def test_neighbours_are_independent(axis: str, lag: int) -> None:
    values = _along(axis).numpy()
    assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 5 / np.sqrt(MANY)
    table = np.histogram2d(values[:-lag], values[lag:], bins=8, range=((0, 1), (0, 1)))[0]
    assert stats.chi2_contingency(table).pvalue > 1e-4


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(Purpose, 2)))
def test_purposes_are_independent(one: Purpose, other: Purpose) -> None:
    token = hash_tokens(torch.tensor([11]))
    pair = [uniform(row_keys([9] * MANY, range(MANY), [kind] * MANY), token).numpy() for kind in (one, other)]
    table = np.histogram2d(pair[0], pair[1], bins=8, range=((0, 1), (0, 1)))[0]
    assert stats.chi2_contingency(table).pvalue > 1e-4
    # Nor is one purpose's number another's at a position beside it.
    assert not set(pair[0].tolist()) & set(pair[1].tolist())


def test_a_path_is_independent_of_its_prefix_and_its_siblings() -> None:
    keys = row_keys([1] * MANY, range(MANY), [Purpose.ACCEPT] * MANY)
    first, second = hash_tokens(torch.tensor([4])), hash_tokens(torch.tensor([5]))
    parent, sibling = fold(keys, first), fold(keys, second)
    for one, other in ((parent, sibling), (parent, fold(parent, first)), (fold(parent, first), fold(sibling, first))):
        table = np.histogram2d(unit(one).numpy(), unit(other).numpy(), bins=8, range=((0, 1), (0, 1)))[0]
        assert stats.chi2_contingency(table).pvalue > 1e-4


def test_the_ends_are_out_of_reach() -> None:
    extremes = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    values = unit(extremes)
    assert (values > 0).all()
    assert (values < 1).all()
    assert values[0] + values[1] == 1  # the lowest and the highest are symmetric
    assert values.log().neg().log().isfinite().all()


def test_gumbel_has_its_law() -> None:
    values = gumbel(row_keys(range(MANY), [0] * MANY, [0] * MANY), hash_tokens(torch.tensor([1])))
    assert stats.kstest(values.numpy(), "gumbel_r").pvalue > 1e-4


def test_a_seed_is_modulo_two_to_the_64() -> None:
    same = row_keys([-1, 2**64 - 1], [3, 3], [0, 0])
    assert same[0] == same[1]
    assert len(set(row_keys([0, 1, 2**63, -(2**63) + 1, 2**64 - 1], [0] * 5, [0] * 5).tolist())) == 5


def test_the_mixer_is_splitmix64() -> None:
    """Reference values of the splitmix64 generator started from 1234567 (its first outputs, as published)."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    states = [(1234567 + (i + 1) * 0x9E3779B97F4A7C15) % 2**64 for i in range(5)]
    made = noise._mix(torch.tensor([noise._signed(state) for state in states]))
    assert [value % 2**64 for value in made.tolist()] == expected


def test_samples_follow_the_scores() -> None:
    law = np.array([0.5, 0.0, 0.2, 0.05, 0.25])
    scores = torch.tensor(law).log().repeat(MANY, 1)
    drawn = sample(scores, row_keys(range(MANY), [2] * MANY, [0] * MANY), hash_tokens(torch.arange(5)))
    counts = np.bincount(drawn.numpy(), minlength=5)
    assert counts[1] == 0
    assert stats.chisquare(counts[law > 0], law[law > 0] * MANY).pvalue > 1e-4


@pytest.mark.parametrize("vocab", [1, 7, 33, 1000, 4099])
def test_few_possible_tokens_sample_the_same_bits(vocab: int) -> None:
    """The path that makes noise for possible tokens alone has to meet the plain one in every bit."""
    keys, hashed = row_keys(range(40), range(40), [0] * 40), hash_tokens(torch.arange(vocab))
    generator = torch.Generator().manual_seed(vocab)
    scores = torch.randn(40, vocab, generator=generator, dtype=torch.float64)
    scores[torch.rand(40, vocab, generator=generator) < 0.95] = -torch.inf
    scores[:, vocab // 2] = 0.5
    rows, tokens = (scores > -torch.inf).nonzero(as_tuple=True)
    assert torch.equal(gumbel(keys[rows], hashed[tokens]), gumbel(keys[:, None], hashed)[rows, tokens])
    few = noise._sample_few(scores, keys, hashed, scores > -torch.inf)
    assert torch.equal(few, (gumbel(keys[:, None], hashed) + scores).argmax(-1))
    assert torch.equal(few, sample(scores, keys, hashed))
