"""A smaller model of the same vocabulary writes ahead, token by token, and the target verifies what it wrote."""

from __future__ import annotations

import torch
from torch import Tensor

from specserve.speculation.base import DraftContext, DraftInput, DraftRequest, Needs, SequenceView, StepReport
from specserve.speculation.drawing import DraftText, Drawing, checked_probability
from specserve.types import Draft

RUNS_MODEL = True


class DraftModelDrafter:
    """Drafts with `model`: a name of the catalog, a GGUF file, a folder or a repository, as the target's.

    Each token is one pass of the model over all sequences that still want one, so a draft of five takes five. Its KV
    lies in layers beside the target's; what it has not seen of a sequence, the prompt for one, it reads before a draft.
    It runs in the target's dtype and quantization, and sequences longer than it was made for get no drafts. A draft
    ends before a token to which the model gives less than `min_probability`. Raises ConfigError for a model whose
    vocabulary is another.
    """

    needs = Needs(cost_class="model", observes=False)

    def __init__(self, context: DraftContext, model: str, min_probability: float = 0.0) -> None:
        self._min_probability = checked_probability(min_probability)
        loaded, self._shared = context.load(model)
        self._max_len: int = loaded.spec.max_len
        self._drawing = Drawing(context.verification, context.vocab_size, context.ops)
        self._runner = context.runner(loaded)

    def begin(self, seq: SequenceView) -> None: ...

    def observe(self, step: StepReport) -> None: ...

    def end(self, seq: SequenceView) -> None: ...

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        texts = [DraftText(seq, min(most, self._max_len - len(seq.tokens))) for seq, most in requests]
        growing = [text for text in texts if text.most > 0]
        if not growing:
            return [text.draft() for text in texts]
        out = self._runner.read([text.seq for text in growing])
        keys, depth = self._drawing.keys([text.seq for text in growing]), 0
        while growing:
            drawn = self._drawing.draw([text.seq for text in growing], self._known(out.logits), keys, depth)
            left = []
            for row, text in enumerate(growing):
                if drawn.confidence[row] >= self._min_probability and text.take(drawn, row):
                    left.append(row)
            growing, keys, depth = [growing[row] for row in left], drawn.keys[left], depth + 1
            if growing:
                out = self._runner.run([_newest(text) for text in growing])
        return [text.draft() for text in texts]

    def _known(self, logits: Tensor) -> Tensor:
        """The logits of ids that the target knows."""
        if isinstance(self._shared, int):
            return logits[:, : self._shared]
        return logits[:, : len(self._shared)].masked_fill(~self._shared, -torch.inf)


def _newest(text: DraftText) -> DraftInput:
    return DraftInput(text.seq, len(text.seq.tokens) + len(text.tokens) - 1, text.tokens[-1:])
