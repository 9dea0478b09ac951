"""Medusa heads guess the tokens behind the next one, each its own place, all from one hidden state of the target; see
arXiv 2401.10774."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from specserve.errors import ConfigError
from specserve.speculation.base import DraftContext, DraftRequest, Needs, SequenceView, StepReport
from specserve.speculation.drawing import checked_probability
from specserve.types import Draft

_MOST_CANDIDATES = 10  # tokens of a place, as the published trees have them
RUNS_MODEL = True


class MedusaDrafter:
    """Drafts with `head`, a folder or repository of Medusa heads that were made for the target; by default those that
    come along in the zoo, where there are some for it.

    A draft is the likeliest tree: a node's probability is the product of what the heads give to the tokens on its path,
    and as many of the likeliest are taken as the draft may have, of at most `top_k` tokens in each place, none below
    `min_probability`. Raises ModelError for heads that cannot be run or were made for another target.
    """

    def __init__(
        self, context: DraftContext, head: str | None = None, top_k: int = 4, min_probability: float = 0.0
    ) -> None:
        if not isinstance(top_k, int) or isinstance(top_k, bool) or not 1 <= top_k <= _MOST_CANDIDATES:
            raise ConfigError(f"top_k is {top_k!r}; it must be a whole number from 1 to {_MOST_CANDIDATES}.")
        self._min_probability, self._context = checked_probability(min_probability), context
        self._heads = context.load_head(head, "medusa")
        self._top_k = min(top_k, self._heads.head.draft_vocab_size)
        self.needs = Needs(hidden_layers=(context.num_layers - 1,), cost_class="pass")
        self._last: dict[SequenceView, Tensor] = {}  # what the heads read of each sequence, float32 [hidden]

    def begin(self, seq: SequenceView) -> None: ...

    def end(self, seq: SequenceView) -> None:
        self._last.pop(seq, None)

    def observe(self, step: StepReport) -> None:
        for seq in step.preempted:
            self._last.pop(seq, None)
        judged = [report for report in step.seqs if report.verdict is not None]
        if judged:
            (hidden,) = step.hidden.values()
            states = self._context.final_norm(hidden[[report.kept_rows[-1] for report in judged]])
            for report, state in zip(judged, states.clone(), strict=True):
                self._last[report.seq] = state

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        known = [each for each in requests if each.num_tokens and each.seq in self._last]
        if not known:
            return [Draft.empty()] * len(requests)
        places = min(self._heads.head.num_heads, max(each.num_tokens for each in known))
        logits = self._heads.logits(torch.stack([self._last[each.seq] for each in known]), places)
        best = logits.topk(self._top_k)
        chances = (best.values - logits.logsumexp(-1, keepdim=True)).exp()
        ids = best.indices if self._heads.ids is None else self._heads.ids[best.indices]
        rows = zip(ids.transpose(0, 1).tolist(), chances.transpose(0, 1).tolist(), strict=True)
        trees = {each.seq: self._tree(*row, each.num_tokens) for each, row in zip(known, rows, strict=True)}
        return [trees.get(each.seq, Draft.empty()) for each in requests]

    def _tree(self, tokens: Many[Many[int]], chances: Many[Many[float]], most: int) -> Draft:
        """The `most` likeliest nodes of what each place's best tokens and their chances, [places, top_k], come to."""
        nodes: list[tuple[int, int, float]] = []  # token, parent, its chance if its parent is right
        waiting = [(-chances[0][0], 0, 0, -1)]  # of each: its chance, place, rank, parent; after it its siblings come
        while waiting and len(nodes) < most:
            chance, place, rank, parent = heapq.heappop(waiting)
            if -chance < self._min_probability:
                break
            own = chances[place][rank]
            nodes.append((tokens[place][rank], parent, own))
            if rank + 1 < self._top_k and own > 0:
                heapq.heappush(waiting, (chance * chances[place][rank + 1] / own, place, rank + 1, parent))
            if place + 1 < len(tokens):
                heapq.heappush(waiting, (chance * chances[place + 1][0], place + 1, 0, len(nodes) - 1))
        ids, parents, confidence = zip(*nodes, strict=True) if nodes else ((), (), ())
        return Draft(
            np.array(ids, np.int32),
            np.array(parents, np.int32),
            confidence=np.minimum(np.array(confidence, np.float32), 1),
        )
