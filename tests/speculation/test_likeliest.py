"""The likeliest tree against all trees that there are."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specserve.errors import ConfigError
from specserve.speculation.draft_sampler import ChainDraft
from specserve.speculation.likeliest import ROOT, LikeliestTree, checked_top_k

WIDTH = 4


def said(path: tuple[int, ...], seed: int, sharpness: float) -> list[float]:
    """The chance of each of WIDTH tokens behind a path, the likeliest first."""
    generator = np.random.default_rng([seed, *path, 99])
    return sorted(generator.dirichlet([sharpness] * WIDTH).tolist(), reverse=True)


@pytest.mark.parametrize("least", [0.0, 0.05])
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("most", [1, 2, 5, 9])
def test_no_tree_is_likelier(most: int, sharpness: float, least: float) -> None:
    for seed in range(20):
        seq: Any = SimpleNamespace()
        tree, num_passes = LikeliestTree(seq, most, least), 0
        while wanted := tree.wanted():
            num_passes += 1
            assert len(wanted) <= most
            for node in wanted:
                path = tree.tokens(node)
                assert [tree.node(each)[0] for each in tree.path(node)] == path
                tree.open(node, range(WIDTH), said(tuple(path), seed, sharpness))
        assert num_passes <= most
        draft = tree.draft()
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
            assert parent < len(paths)
            paths.append((*(paths[parent] if parent != ROOT else ()), token))
        found = {path: chance_of(path, seed, sharpness) for path in paths}
        assert np.allclose(draft.confidence, [said(path[:-1], seed, sharpness)[path[-1]] for path in paths])
        best = likeliest(most, seed, sharpness, least)
        assert sorted(found.values(), reverse=True) == pytest.approx(best)
        assert list(found.values()) == sorted(found.values(), reverse=True), "the likeliest are first"


def chance_of(path: tuple[int, ...], seed: int, sharpness: float) -> float:
    return float(np.prod([said(path[:i], seed, sharpness)[token] for i, token in enumerate(path)]))


def likeliest(most: int, seed: int, sharpness: float, least: float) -> list[float]:
    """Of all paths, depth after depth; what is no longer than `most` likeliest of a depth leads to none of them."""
    all_chances: list[float] = []
    paths: list[tuple[int, ...]] = [()]
    for _ in range(most):
        longer = [(*path, token) for path, token in itertools.product(paths, range(WIDTH))]
        chances = {path: chance_of(path, seed, sharpness) for path in longer}
        paths = sorted(longer, key=lambda path: -chances[path])[:most]
        all_chances += [chances[path] for path in paths]
    return [chance for chance in sorted(all_chances, reverse=True)[:most] if chance >= least]


def test_what_is_sure_needs_no_more_passes_than_nodes() -> None:
    """Chances of 1, as behind what a grammar forces, make a chain."""
    seq: Any = SimpleNamespace()
    tree, num_passes = LikeliestTree(seq, 4), 0
    while wanted := tree.wanted():
        num_passes += 1
        for node in wanted:
            tree.open(node, [7, 8], [1.0, 0.0])
    assert tree.draft().tokens.tolist() == [7, 7, 7, 7]
    assert tree.draft().is_chain
    assert num_passes <= 5


@pytest.mark.parametrize("value", [0, 11, True, 2.0, "2"])
def test_candidates_are_a_small_number(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"top_k is .*; it must be a whole number from 1 to 10"):
        checked_top_k(value)


@pytest.mark.parametrize("least", [0.0, 0.05])
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("most", [1, 2, 5, 9])
def test_no_comb_is_likelier(most: int, sharpness: float, least: float) -> None:
    """Of a chain, and of the second best beside each of its tokens; and it is asked for no token in vain."""
    for seed in range(20):
        seq: Any = SimpleNamespace(tokens=[7])
        comb, wants = ChainDraft(seq, most, least, second_best=True), True
        while wants:
            first, second = said(tuple(comb.tokens), seed, sharpness)[:2]
            wants = comb.take(0, first, (1, second))
        possible, chain = list[float](), list[float]()
        for depth in range(most):
            first, second = said((0,) * depth, seed, sharpness)[:2]
            before = chain[-1] if chain else 1.0
            if first < least:
                break
            chain.append(before * first)
            possible += [chain[-1], *([before * second] if second >= least else [])]
        best = sorted(possible, reverse=True)[:most]
        draft = comb.draft()
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
            assert parent < len(paths)
            paths.append((*(paths[parent] if parent != ROOT else ()), token))
        assert sorted((chance_of(path, seed, sharpness) for path in paths), reverse=True) == pytest.approx(best)
        assert len(set(paths)) == len(paths)
        assert np.allclose(draft.confidence, [said(path[:-1], seed, sharpness)[path[-1]] for path in paths])
        assert all(token == 0 for path in paths for token in path[:-1])
        needed = sum(each in best for each in chain)
        assert len(comb.tokens) <= needed + 1, "one shows that no more are needed"


def test_a_chain_alone_has_no_second_best() -> None:
    seq: Any = SimpleNamespace(tokens=[7])
    for most, least, wanted in ((3, 0.0, [1, 2, 3]), (3, 0.35, [1, 2]), (2, 0.0, [1, 2])):
        chain = ChainDraft(seq, most, least)
        shares = iter((0.5, 0.4, 0.3, 0.2))
        while chain.take(len(chain.tokens) + 1, next(shares), (9, 0.25)):
            assert chain.last == len(chain.tokens)
        draft = chain.draft()
        assert draft.tokens.tolist() == wanted
        assert draft.parents.tolist() == [i - 1 for i in range(len(wanted))]
