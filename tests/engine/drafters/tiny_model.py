"""A drafter that runs a model of its own over the target's slots, and keeps what that model said, to be checked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor

from specserve.models.loader import load_model
from specserve.speculation.base import DraftRequest, Needs, SequenceView, StepReport
from specserve.speculation.models import DraftInput, ModelContext
from specserve.types import Draft


class TinyModelDrafter:
    """Chains of its model's best tokens or, with `tree`, that chain with the second best beside each of its nodes.

    `said` has, for each row that a draft was made from, the tokens up to it and its logits. With `eager` its KV is
    computed with every step of the target, else only when it drafts.
    """

    needs = Needs(cost_class="model")

    def __init__(self, context: ModelContext, model: str, tree: bool = False, eager: bool = False) -> None:
        self.model = load_model(Path(model), context.ops)
        self.runner = context.runner(self.model)
        self.tree, self.eager = tree, eager
        self.said: list[tuple[list[int], Tensor]] = []
        self.first_cached: list[tuple[int, int]] = []  # of sequences as they begin: by the target, by this model
        self.num_kept_beside = 0  # nodes that were kept though they had not been the first of their level
        self.live: set[SequenceView] = set()

    def begin(self, seq: SequenceView) -> None:
        self.live.add(seq)
        self.first_cached.append((seq.num_cached, seq.num_draft_cached))

    def end(self, seq: SequenceView) -> None:
        self.live.remove(seq)

    def observe(self, step: StepReport) -> None:
        for each in step.seqs:
            path = [] if each.verdict is None else each.verdict.path
            self.num_kept_beside += sum(node != depth for depth, node in enumerate(path))
        if self.eager:
            self.runner.catch_up([each.seq for each in step.seqs])
            assert all(each.seq.num_draft_cached == each.seq.num_cached for each in step.seqs)
        assert all(seq.num_draft_cached == 0 for seq in step.preempted)

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        seqs = [seq for seq, _ in requests]
        self.runner.catch_up(seqs)
        best = self._run(
            [DraftInput(seq, seq.num_cached, seq.tokens[seq.num_cached :]) for seq in seqs], [[]] * len(seqs)
        )
        nodes: list[list[tuple[int, int]]] = [[] for _ in seqs]  # token and parent
        paths: list[list[int]] = [[] for _ in seqs]  # nodes of the main chain
        while growing := [i for i, (_, most) in enumerate(requests) if len(nodes[i]) < most]:
            for i in growing:
                parent = paths[i][-1] if paths[i] else -1
                paths[i].append(len(nodes[i]))
                nodes[i] += [(int(token), parent) for token in best[i][: requests[i].num_tokens - len(nodes[i])]]
            inputs, texts = [], []
            for i in growing:
                tokens, parents = [token for token, _ in nodes[i]], [parent for _, parent in nodes[i]]
                inputs.append(DraftInput(seqs[i], len(seqs[i].tokens), tokens, parents if self.tree else None, 0))
                texts.append([tokens[node] for node in paths[i]])
            last = [paths[i][-1] for i in growing]
            inputs = [each._replace(num_logits=len(each.tokens) - at) for each, at in zip(inputs, last, strict=True)]
            best |= dict(zip(growing, self._run(inputs, texts).values(), strict=True))
        return [
            Draft(np.array([t for t, _ in each], np.int32), np.array([p for _, p in each], np.int32)) for each in nodes
        ]

    def _run(self, inputs: list[DraftInput], texts: list[list[int]]) -> dict[int, list[int]]:
        """The best tokens behind the first row that each input has logits of, which ends a text behind the sequence."""
        out, row, best = self.runner.run(inputs), 0, {}
        for i, (each, text) in enumerate(zip(inputs, texts, strict=True)):
            logits = out.logits[row].clone()
            self.said.append(([*each.seq.tokens, *text], logits))
            best[i] = logits.topk(2 if self.tree else 1).indices.tolist()
            assert int(out.best[row]) == best[i][0]
            row += each.num_logits
        return best
