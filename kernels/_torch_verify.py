"""Verification in torch: how a target's distributions judge drafts, exactly. What the reference kernels do once a step
has scores, and what faster ones are tested against.

The words. A *draft* is a guess at the next tokens, a chain or a tree; to *propose* is to make one. To *verify* is to
let the target judge it: a draft token the target agrees with is *accepted*; at the first disagreement the target's own
token is the *replacement*; after a draft accepted whole comes the *bonus*. To *commit* is to append accepted tokens to
the sequence, to *keep* is to leave their KV valid, and *cached* counts the tokens with valid KV.

p is the target's distribution in a row after all processing, q what a draft token was sampled from: one-hot for a
deterministic node; for siblings sampled without replacement each node's own q, renormalised without its elder siblings.

A row whose logits cannot be used is *bad*. It judges nothing, so nodes below it do not exist. A walk that ends on a bad
row emits that node's token as the last one of its verdict, unkept: the next step meets the row again at its root, and
fails there just as plain decoding would, or never, if that token ended the sequence.

Where nodes are compared, a device says which token each row chooses, and the host walks. Where they are tried, a device
is asked for nothing but the result: what decides is only known to it. Nodes of all drafts that may be tried at the same
time are a round.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.kernels._torch_sampling import SamplingArrays, probabilities, sample
from specserve.ops import DraftArrays, Verified
from specserve.ops.fixed_point import row_total
from specserve.sampling import noise
from specserve.sampling.noise import Purpose
from specserve.types import Ids


@dataclass(frozen=True, slots=True)
class Round:
    """Nodes that are tried at the same time: one depth, one place among their siblings, all one-hot or all dense."""

    parents: Tensor  # int64 [nodes] row that judges the node
    rows: Tensor  # int64 [nodes] the node's own row
    tokens: Tensor  # int64 [nodes]
    q: Tensor | None  # float64 [nodes, vocab], rows sum to 1; None is one-hot


class _Part(NamedTuple):
    """Some of a step's sequences, as if there were no others."""

    drafts: DraftArrays
    at: NDArray[np.int64]  # [rows] which of the step's rows each is
    owners: NDArray[np.int64]  # [rows] whose it is


Sample = Callable[[Tensor, SamplingArrays, Tensor, Ids | None], Tensor]


def verify(
    scores: Tensor,
    best: Tensor,
    drafts: DraftArrays,
    hashed: Tensor,
    masks: Ids | None,
    verification: str,
    sample: Sample = sample,
) -> Verified:
    """As Ops.verify; `sample` is a backend's own."""
    tried = drafts.is_tried(verification)
    said = np.zeros((2, drafts.rows.shape[1]), np.int64)
    counts = np.zeros(len(tried), np.int64)
    if tried.any():
        part = _part(drafts, tried, is_tried=True)
        rounds = plan(part.drafts, scores.device)
        tokens = _choose(scores, best, part, hashed, masks, verification, sample)
        end, extra = _accept_or_reject(scores, tokens < 0, part, rounds, hashed, masks, verification == "block")
        tokens[end] = torch.where(tokens[end] < 0, tokens[end], extra)
        numbers, num_rows = emitted(part.drafts, end, tokens).cpu().numpy(), len(part.at)
        said[:, part.at], counts[tried] = numbers[: 2 * num_rows].reshape(2, -1), numbers[2 * num_rows :]
    if not tried.all():
        part = _part(drafts, ~tried, is_tried=False)
        chosen = _choose(scores, best.cpu(), part, hashed, masks, verification, sample)
        said[:, part.at], counts[~tried] = compared(part.drafts, chosen.tolist())
    return Verified(said[0], said[1], counts)


def compared(drafts: DraftArrays, chosen: list[int]) -> tuple[list[list[int]], list[int]]:
    """The arrays of Verified where a node stands that is the token its row chooses: tokens and nodes of each row, and
    counts. On the host, where that takes a device's few numbers and none of its calls."""
    tokens, parents, starts = drafts.tokens.tolist(), drafts.parents.tolist(), drafts.starts.tolist()
    said, nodes, counts = [0] * len(chosen), [0] * len(chosen), []
    for first, stop in itertools.pairwise(starts):
        row, count = first, 0
        for node in range(first + 1, stop):  # children come after their parent, and siblings differ
            if parents[node] == row and tokens[node] == chosen[row]:
                said[first + count], nodes[first + count] = tokens[node], node - first - 1
                row, count = node, count + 1
        if chosen[row] >= 0 or not count:
            said[first + count] = chosen[row]
        else:
            nodes[first + count - 1] = 0  # the last token is not kept
        counts.append(count + (chosen[row] >= 0))
    return [said, nodes], counts


def _to(array: NDArray[np.int64] | NDArray[np.bool_], like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)


def _part(drafts: DraftArrays, which: NDArray[np.bool_], is_tried: bool) -> _Part:
    sizes = np.diff(drafts.starts)
    chosen = np.repeat(which, sizes)
    at, places = np.flatnonzero(chosen), np.cumsum(chosen) - 1
    starts = np.concatenate(([0], np.cumsum(sizes[which])))
    rows = drafts.rows[:, at]
    rows[1] = np.where(rows[1] < 0, -1, places[rows[1]])
    q = {i: drafts.q[s] for i, s in enumerate(np.flatnonzero(which).tolist()) if s in drafts.q and is_tried}
    own = DraftArrays(starts, rows, drafts.seqs[:, which], drafts.laws[:, which], q)
    owners = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return _Part(own, at, owners)


def plan(drafts: DraftArrays, device: torch.device) -> list[Round]:
    """The rounds in which nodes are tried, parents before children and siblings in order."""
    groups: dict[tuple[int, int, bool], list[tuple[int, int]]] = {}
    parents, positions, starts = (x.tolist() for x in (drafts.parents, drafts.positions, drafts.starts))
    num_children = [0] * len(parents)
    for index, (start, stop) in enumerate(itertools.pairwise(starts)):
        for row in range(start + 1, stop):
            place, depth = num_children[parents[row]], positions[row] - positions[start]
            num_children[parents[row]] += 1
            groups.setdefault((depth, place, index in drafts.q), []).append((index, row))
    return [_round(drafts, groups[key], device) for key in sorted(groups)]


def _round(drafts: DraftArrays, nodes: list[tuple[int, int]], device: torch.device) -> Round:
    rows = np.array([row for _, row in nodes])
    numbers = np.array([drafts.parents[rows], rows, drafts.tokens[rows]])
    parents, own, tokens = torch.from_numpy(numbers).to(device).unbind()
    dense = [drafts.q[i][row - drafts.starts[i] - 1].to(device, torch.float64) for i, row in nodes if i in drafts.q]
    if not dense:
        return Round(parents, own, tokens, None)
    q = torch.stack(dense)
    return Round(parents, own, tokens, q / row_total(q, 2)[:, None])  # sums of float32 miss 1 by 1e-7


def _choose(
    scores: Tensor,
    best: Tensor,
    part: _Part,
    hashed: Tensor,
    masks: Ids | None,
    verification: str,
    sample: Sample,
) -> Tensor:
    """A token of each row, or why it has none, int64 [rows]. Greedy rows mostly keep the best by raw logits; so do
    those of tried drafts, to see whether any token may come."""
    drafts, owners = part.drafts, part.owners
    temperature = np.where(drafts.is_tried(verification), 0.0, drafts.laws[0])[owners]
    is_searched = (temperature > 0) | (drafts.seqs[2, owners] > 0)
    if masks is not None:
        is_searched |= (masks[part.at] != -1).any(1)
    tokens = best[_to(part.at, best)]
    if is_searched.any():
        at = np.flatnonzero(is_searched)
        arrays = _sampling_arrays(part, at, temperature)
        known, found = tokens[_to(at, best)], sample(scores, arrays, hashed, masks).to(best.device)
        tokens[_to(at, best)] = torch.where(known < 0, known, found)
    return tokens


def _sampling_arrays(part: _Part, rows: NDArray[np.int64], temperature: NDArray[np.float64]) -> SamplingArrays:
    drafts, owners = part.drafts, part.owners[rows]
    _, min_p, top_p = drafts.laws[:, owners]
    keys = _keys(part, [Purpose.SAMPLE] * len(part.at))[rows]
    return SamplingArrays(part.at[rows], temperature[rows], min_p, top_p, drafts.seqs[1, owners], keys)


def _keys(part: _Part, purposes: Sequence[int]) -> NDArray[np.int64]:
    """For the token that follows each row, int64 [rows]."""
    seeds, positions = part.drafts.seqs[0, part.owners].tolist(), part.drafts.positions.tolist()
    return noise.row_keys(seeds, positions, purposes).numpy()


def _accept_or_reject(
    scores: Tensor,
    bad: Tensor,
    part: _Part,
    rounds: Sequence[Round],
    hashed: Tensor,
    masks: Ids | None,
    block: bool,
) -> tuple[Tensor, Tensor]:
    """The last row of each accepted path, int64 [n], and the token after it: a bonus from p, a replacement from what
    the rejected children left of it, with noise that neither their trial nor their drafter has used."""
    drafts, owners = part.drafts, _to(part.owners, bad)
    rows = np.arange(len(part.at))
    left = probabilities(scores, _sampling_arrays(part, rows, drafts.laws[0, part.owners]), masks)
    accepts = uniforms(part.drafts, rounds, hashed) <= judge(left, rounds, bad, block)
    first_rows = _to(drafts.starts[:-1], bad)
    if block:
        end = first_accepted(drafts, rounds, accepts, bad, first_rows, owners)
    else:
        end = descend(rounds, accepts, bad, first_rows, owners)
    has_children = np.isin(rows, drafts.parents)
    keys = _to(_keys(part, np.where(has_children, Purpose.RESAMPLE, Purpose.SAMPLE).tolist()), bad)
    return end, noise.sample(left[end].log_(), keys[end], hashed)


def uniforms(drafts: DraftArrays, rounds: Sequence[Round], hashed: Tensor) -> Tensor:
    """The uniform of each node at its row, keyed by the step's first position and the node's whole path. Keyed by its
    own position and token alone, a node that `block` tried in vain would meet the same number a step later."""
    keys = torch.zeros(drafts.rows.shape[1], dtype=torch.int64, device=hashed.device)
    first, seeds = drafts.positions[drafts.starts[:-1]].tolist(), drafts.seqs[0].tolist()
    roots = noise.row_keys(seeds, first, [Purpose.ACCEPT] * len(seeds))
    keys[_to(drafts.starts[:-1], hashed)] = roots.to(hashed.device)
    for trial in rounds:
        keys[trial.rows] = noise.fold(keys[trial.parents], hashed[trial.tokens])
    return noise.unit(keys)


def judge(p: Tensor, rounds: Sequence[Round], bad: Tensor, block: bool) -> Tensor:
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


def descend(rounds: Sequence[Round], accepts: Tensor, bad: Tensor, first_rows: Tensor, owners: Tensor) -> Tensor:
    """The last row of each accepted path, int64 [n]: down to the first child that is accepted, while there is one.
    accepts, bad: bool [rows]."""
    stands = torch.zeros_like(bad)
    stands[first_rows] = True
    is_done = bad.clone()  # rows that judge no further node
    for trial in rounds:
        taken = stands[trial.parents] & ~is_done[trial.parents] & accepts[trial.rows]
        stands[trial.rows] = taken
        is_done[trial.parents] |= taken
    return _last(torch.arange(len(bad), device=bad.device), stands, first_rows, owners)


def first_accepted(
    drafts: DraftArrays, rounds: Sequence[Round], accepts: Tensor, bad: Tensor, first_rows: Tensor, owners: Tensor
) -> Tensor:
    """The last row of each accepted path, int64 [n]: the first node that is accepted, each tried after its children,
    siblings in order. That is the last one in a walk from the root that turns to the youngest child first."""
    exists = torch.zeros_like(bad)
    exists[first_rows] = True
    for trial in rounds:
        exists[trial.rows] = exists[trial.parents] & ~bad[trial.parents]
    order = youngest_first(drafts)
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return _to(order, bad)[_last(_to(places, bad), exists & accepts, first_rows, owners)]


def youngest_first(drafts: DraftArrays) -> NDArray[np.int64]:
    """The rows of each draft, root first, then each child with all below it, the youngest first."""
    below: list[list[int]] = [[] for _ in drafts.parents]
    for row, parent in enumerate(drafts.parents.tolist()):
        if parent >= 0:
            below[parent].append(row)
    order: list[int] = []
    for start in drafts.starts[:-1].tolist():
        ahead = [start]
        while ahead:
            order.append(ahead.pop())
            ahead.extend(below[order[-1]])
    return np.array(order, np.int64)


def _last(places: Tensor, chosen: Tensor, first_rows: Tensor, owners: Tensor) -> Tensor:
    """The highest place among the chosen rows of each sequence, at least its first row's, int64 [n]."""
    return first_rows.scatter_reduce(0, owners, torch.where(chosen, places, 0), "amax")


def emitted(drafts: DraftArrays, end: Tensor, tokens: Tensor) -> Tensor:
    """The arrays of Verified, one after the other: paths to the rows `end` and the tokens chosen there; or, where there
    is none, the accepted tokens alone, the last of them unkept."""
    first, parents, own = (_to(x, end) for x in (drafts.starts[:-1], drafts.parents, drafts.tokens))
    positions = _to(drafts.positions, end)
    num_rows = len(own)
    depths = positions[end] - positions[first]
    is_bad = tokens[end] < 0
    counts = depths + ~is_bad
    said, nodes = own.new_zeros(2, num_rows + 1).unbind()  # the last place is for what is nowhere
    first_positions = np.repeat(drafts.positions[drafts.starts[:-1]], np.diff(drafts.starts))
    row = end
    for _ in range(int((drafts.positions - first_positions).max())):
        is_node = parents[row] >= 0
        place = torch.where(is_node, first + positions[row] - positions[first] - 1, num_rows)
        said[place] = own[row]
        nodes[place] = row - first - 1
        row = torch.where(is_node, parents[row], row)
    said[torch.where(is_bad & (depths > 0), num_rows, first + depths)] = tokens[end]
    nodes[first + (counts - 1).clamp(min=0)] = 0
    return torch.cat([said[:num_rows], nodes[:num_rows], counts])
