"""Verification: how a target's distributions judge a draft, exactly. Pure functions of probabilities and outcomes.

The words. A *draft* is a guess at the next tokens, a chain or a tree; to *propose* is to make one. To *verify* is to
let the target judge it: a draft token the target agrees with is *accepted*; at the first disagreement the target's own
token is the *replacement*; after a draft accepted whole comes the *bonus*. To *commit* is to append accepted tokens to
the sequence, to *keep* is to leave their KV valid, and *cached* counts the tokens with valid KV.

Row 0 judges what follows the last committed token, row j + 1 what follows draft node j. p is the target's distribution
in a row after all processing, q what a draft token was sampled from: one-hot for a deterministic node; for siblings
sampled without replacement each node's own q, renormalised without its elder siblings.

A row whose logits cannot be used is *bad*. It judges nothing, so nodes below it do not exist. A walk that ends on a bad
row emits that node's token as the last one of its verdict, unkept: the next step meets the row again at its root, and
fails there just as plain decoding would, or never, if that token ended the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from specserve.ops.fixed_point import row_total
from specserve.types import Draft


@dataclass(frozen=True, slots=True)
class Round:
    """Nodes that are tried at the same time: one depth, one place among their siblings, all one-hot or all dense."""

    parents: Tensor  # int64 [nodes] row that judges the node
    rows: Tensor  # int64 [nodes] the node's own row
    tokens: Tensor  # int64 [nodes]
    q: Tensor | None  # float64 [nodes, vocab], rows sum to 1; None is one-hot


def children(draft: Draft) -> list[list[int]]:
    """The child nodes of each row, in order."""
    if draft.is_chain:
        return [*([node] for node in range(len(draft))), []]
    found: list[list[int]] = [[] for _ in range(len(draft) + 1)]
    for node, parent in enumerate(draft.parents.tolist()):
        found[parent + 1].append(node)
    return found


def plan(drafts: Many[Draft], starts: Many[int], device: torch.device) -> list[Round]:
    """The rounds in which the nodes of several drafts are tried; draft i's rows begin at starts[i]."""
    groups: dict[tuple[int, int, bool], list[tuple[int, int]]] = {}
    for index, draft in enumerate(drafts):
        depths = draft.depths.tolist()
        for siblings in children(draft):
            for place, node in enumerate(siblings):
                groups.setdefault((depths[node], place, draft.q is not None), []).append((index, node))
    return [_round(drafts, starts, groups[key], device) for key in sorted(groups)]


def _round(drafts: Many[Draft], starts: Many[int], nodes: list[tuple[int, int]], device: torch.device) -> Round:
    numbers = [
        (starts[i] + 1 + int(drafts[i].parents[j]), starts[i] + 1 + j, int(drafts[i].tokens[j])) for i, j in nodes
    ]
    parents, rows, tokens = torch.tensor(numbers, device=device).unbind(1)
    dense = [q[j].to(device, torch.float64) for i, j in nodes if (q := drafts[i].q) is not None]
    if not dense:
        return Round(parents, rows, tokens, None)
    q = torch.stack(dense)
    return Round(parents, rows, tokens, q / row_total(q, 2)[:, None])  # sums of float32 miss 1 by 1e-7


def judge(p: Tensor, rounds: Many[Round], bad: Tensor, block: bool) -> Tensor:
    """How likely each node is to be accepted when it is tried, float64 [rows] at the nodes' rows; `p` [rows, vocab]
    becomes what is left to sample from once all children of a row are rejected.

    `block=False`: rejection sampling (arXiv 2211.17192), siblings in order, each from what its elders left (arXiv
    2305.09781, 2402.14160). Tried once its parent is accepted, a node is accepted with min(1, p / q);
    rejected, it leaves max(p - q, 0), normalised.

    `block=True`: block verification (arXiv 2403.10444), on trees traversal verification (arXiv 2505.12398). A node's
    weight is the share of the probability of its whole prefix that the target can use: min(1, w p / q), w its
    parent's. A rejected child leaves its parent max(w p - q, 0), which sums to s, and the weight s / (s + 1 - w).
    """
    chances = p.new_ones(len(p))
    weights = p.new_ones(len(p))
    for trial in rounds:
        weight = weights[trial.parents]
        wanted = weight[:, None] * p[trial.parents]  # [nodes, vocab]
        chances[trial.rows] = _chance(wanted, trial)
        left = _subtract(wanted, trial)
        total = row_total(left, 2)
        # Nothing left means that the child could not fail (p = q): should rounding get here, p stays as it was.
        spent = (total == 0).double()[:, None]
        p[trial.parents] = (left + spent * p[trial.parents]) / (total[:, None] + spent)
        if block:
            after = torch.where(weight < 1, total / (total + 1 - weight), 1.0)
            weights[trial.parents] = torch.where(bad[trial.parents], weight, after)
            weights[trial.rows] = chances[trial.rows]
    return weights if block else chances


def _chance(wanted: Tensor, trial: Round) -> Tensor:
    """min(1, w p / q) at the tried tokens; 0 where the target cannot emit them, whatever q says."""
    at = trial.tokens[:, None]
    target = wanted.gather(1, at).squeeze(1)
    drafted = 1.0 if trial.q is None else trial.q.gather(1, at).squeeze(1)
    return torch.where(target > 0, (target / drafted).clamp(max=1.0), 0.0)


def _subtract(wanted: Tensor, trial: Round) -> Tensor:
    """max(w p - q, 0), in place."""
    if trial.q is None:
        wanted.scatter_(1, trial.tokens[:, None], 0.0)
        return wanted
    return wanted.sub_(trial.q).clamp_(min=0.0)


def walk_coupled(draft: Draft, sampled: Many[int], bad: Many[bool]) -> list[int]:
    """The accepted path: down to the child that is the row's own sample, while there is one. sampled, bad: [rows]."""
    if not len(draft):
        return []
    tokens = draft.tokens.tolist()
    return _descend(draft, bad, lambda row, node: tokens[node] == sampled[row])


def walk_rejection(draft: Draft, accepts: Many[bool], bad: Many[bool]) -> list[int]:
    """The accepted path: down to the first child whose trial accepts it, while there is one. accepts, bad: [rows]."""
    return _descend(draft, bad, lambda _, node: accepts[node + 1])


def walk_block(draft: Draft, accepts: Many[bool], bad: Many[bool]) -> list[int]:
    """The accepted path: to the first node, each tried after its children, that is accepted. accepts, bad: [rows]."""
    return draft.path_to(next((node for node in _leaves_first(draft, bad) if accepts[node + 1]), -1))


def _descend(draft: Draft, bad: Many[bool], is_accepted: Callable[[int, int], bool]) -> list[int]:
    below = children(draft)
    path: list[int] = []
    row = 0
    while not bad[row]:
        node = next((node for node in below[row] if is_accepted(row, node)), None)
        if node is None:
            break
        path.append(node)
        row = node + 1
    return path


def _leaves_first(draft: Draft, bad: Many[bool]) -> list[int]:
    """Every node after its children, siblings in order: the reverse of a walk from the root that turns to the youngest
    child first. Nothing below a bad row."""
    below = children(draft)
    order: list[int] = []
    ahead = [] if bad[0] else list(below[0])
    while ahead:
        node = ahead.pop()
        order.append(node)
        if not bad[node + 1]:
            ahead.extend(below[node + 1])
    return order[::-1]


def last_row(path: Many[int]) -> int:
    """The row that judges what follows an accepted path."""
    return path[-1] + 1 if path else 0


def make_verdict(draft: Draft, path: list[int], bad: Many[bool], extra: int) -> tuple[list[int], list[int]]:
    """Tokens and path of a verdict: the accepted tokens and `extra`, the bonus or replacement; or, ending on a bad row,
    the accepted tokens alone, the last of them unkept. The root must not be bad."""
    tokens = [int(draft.tokens[node]) for node in path]
    if not bad[last_row(path)]:
        return [*tokens, extra], path
    assert path, "a bad root has no verdict"
    return tokens, path[:-1]
