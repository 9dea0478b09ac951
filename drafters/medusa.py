"""Medusa heads guess the tokens behind the next one, each its own place, all from one hidden state of the target; see
arXiv 2401.10774."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from specserve.speculation.base import DraftRequest, Needs, SequenceView, StepReport
from specserve.speculation.draft_sampler import DraftSampler, checked_probability, named_for_auto
from specserve.speculation.likeliest import LikeliestTree, checked_top_k
from specserve.speculation.models import ModelContext
from specserve.types import Draft

PRIORITY = 4
RUNS_MODEL = "no KV"


class MedusaDrafter:
    """Drafts with `head`, a folder or repository of Medusa heads that were made for the target; by default those that
    come along in the zoo, where there are some for it.

    A draft is the likeliest tree: a node's probability is the product of what the heads give to the tokens on its path,
    and as many of the likeliest are taken as the draft may have, of at most `top_k` tokens in each place, none below
    `min_probability`. Raises ModelError for heads that cannot be run or were made for another target.
    """

    def __init__(
        self, context: ModelContext, head: str | None = None, top_k: int = 4, min_probability: float = 0.0
    ) -> None:
        self._min_probability = checked_probability(min_probability)
        self._heads = context.load_head(head, "medusa")
        self._top_k = min(checked_top_k(top_k), self._heads.head.draft_vocab_size)
        self.needs = Needs(hidden_layers=(context.num_layers - 1,), cost_class="pass")
        self._sampler = DraftSampler(context.verification, context.vocab_size, context.ops)
        self._last: dict[SequenceView, Tensor] = {}  # what the target says of each sequence, float32 [hidden]

    @staticmethod
    def suits(context: ModelContext, head: str | None = None, top_k: int = 4, min_probability: float = 0.0) -> bool:
        return named_for_auto(context, head, "medusa")

    def begin(self, seq: SequenceView) -> None: ...

    def end(self, seq: SequenceView) -> None:
        self._last.pop(seq, None)

    def observe(self, step: StepReport) -> None:
        for seq in step.preempted:
            self._last.pop(seq, None)
        for report in step.seqs:
            if report.verdict is not None:
                (hidden,) = step.hidden.values()
                self._last[report.seq] = hidden[report.kept_rows[-1]].clone()

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        known = [each for each in requests if each.num_tokens and each.seq in self._last]
        if not known:
            return [Draft.empty()] * len(requests)
        places = min(self._heads.head.num_heads, max(each.num_tokens for each in known))
        logits = self._heads.logits(torch.stack([self._last[each.seq] for each in known]), places)
        trees = [LikeliestTree(each.seq, each.num_tokens, self._min_probability) for each in known]
        depths = [place for place in range(places) for _ in known]
        noisy = self._sampler.noisy(
            [each.seq for each in known] * places, depths, logits.flatten(0, 1), self._heads.ids
        )
        self._grow(trees, noisy.view_as(logits))
        drafts = {tree.seq: tree.draft() for tree in trees}
        return [drafts.get(each.seq, Draft.empty()) for each in requests]

    def _grow(self, trees: list[LikeliestTree], logits: Tensor) -> None:
        """Open what is wanted, of what the heads say, with noise: float32 [places, trees, ids]."""
        best = partial(self._sampler.best, count=self._top_k, ids=self._heads.ids)
        tokens, chances = best(logits)
        for row, tree in enumerate(trees):
            while wanted := tree.wanted():
                for node in wanted:
                    path = tree.path(node)
                    place = len(path)
                    if place == len(logits):
                        tree.open(node, (), ())
                    elif tree.seq.has_grammar:
                        own = logits[place, row : row + 1]
                        behind = [(tree.seq, tree.tokens(node))]
                        (token,), (chance,) = best(self._sampler.allowed_logits(behind, own, self._heads.ids))
                        tree.open(node, token, chance)
                    else:
                        tree.open(node, tokens[place][row], chances[place][row])
