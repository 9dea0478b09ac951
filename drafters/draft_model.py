"""A smaller model of the same vocabulary writes ahead, token by token, and the target verifies what it wrote."""

from __future__ import annotations

import torch
from torch import Tensor

from specserve.speculation.base import DraftContext, DraftRequest, Needs, SequenceView, StepReport
from specserve.speculation.drawing import Drawing, checked_probability
from specserve.speculation.likeliest import Passes, checked_top_k
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

    def __init__(self, context: DraftContext, model: str, min_probability: float = 0.0, top_k: int = 1) -> None:
        self._min_probability, self._top_k = checked_probability(min_probability), checked_top_k(top_k)
        loaded, self._shared = context.load(model)
        self._max_len: int = loaded.spec.max_len
        self._drawing = Drawing(context.verification, context.vocab_size, context.ops)
        self._runner = context.runner(loaded)

    def begin(self, seq: SequenceView) -> None: ...

    def observe(self, step: StepReport) -> None: ...

    def end(self, seq: SequenceView) -> None: ...

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        fitting = [DraftRequest(seq, min(most, self._max_len - len(seq.tokens))) for seq, most in requests]
        fitting = [each for each in fitting if each.num_tokens > 0]
        if not fitting:
            return [Draft.empty()] * len(requests)
        passes = Passes(self._drawing, fitting, self._top_k, self._min_probability)
        out = self._runner.read(passes.seqs)
        while inputs := passes.after(out._replace(logits=self._known(out.logits))):
            out = self._runner.run(inputs)
        drafts = passes.drafts()
        return [drafts.get(seq, Draft.empty()) for seq, _ in requests]

    def _known(self, logits: Tensor) -> Tensor:
        """The logits of ids that the target knows."""
        if isinstance(self._shared, int):
            return logits[:, : self._shared]
        return logits[:, : len(self._shared)].masked_fill(~self._shared, -torch.inf)
