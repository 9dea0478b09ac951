"""A smaller model writes ahead, token by token, and the target verifies what it wrote."""

from __future__ import annotations

from torch import Tensor

from specserve.speculation.base import DraftRequest, Needs, SequenceView, StepReport
from specserve.speculation.draft_sampler import DraftSampler, checked_probability
from specserve.speculation.likeliest import Passes, checked_top_k
from specserve.speculation.models import ModelContext
from specserve.types import Draft

RUNS_MODEL = True


class DraftModelDrafter:
    """Drafts with `model`: a name of the catalog, a GGUF file, a folder or a repository, as the target's.

    Each token is one pass of the model over all sequences that still want one, so a draft of five takes five. Its KV
    lies in layers beside the target's; what it has not seen of a sequence, the prompt for one, it reads before a draft.
    It runs in the target's dtype and quantization, and sequences longer than it was made for get no drafts. A draft
    ends before a token to which the model gives less than `min_probability`. A model of another vocabulary proposes the
    tokens that both have, by their bytes. Raises ConfigError where these are few.
    """

    needs = Needs(cost_class="model", observes=False)

    def __init__(self, context: ModelContext, model: str, min_probability: float = 0.0, top_k: int = 1) -> None:
        self._min_probability, self._top_k = checked_probability(min_probability), checked_top_k(top_k)
        loaded, shared = context.load(model)
        self._max_len: int = loaded.spec.max_len
        self._sampler = DraftSampler(context.verification, context.vocab_size, context.ops)
        self._runner = context.runner(loaded, shared.reads)
        self._rows: Tensor | slice = slice(shared.size) if shared.rows is None else shared.rows.to(context.ops.device)
        self._ids: Tensor | None = None if shared.ids is None else shared.ids.to(context.ops.device)

    def begin(self, seq: SequenceView) -> None: ...

    def observe(self, step: StepReport) -> None: ...

    def end(self, seq: SequenceView) -> None: ...

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        fitting = [DraftRequest(seq, min(most, self._max_len - len(seq.tokens))) for seq, most in requests]
        fitting = [each for each in fitting if each.num_tokens > 0]
        if not fitting:
            return [Draft.empty()] * len(requests)
        passes = Passes(self._sampler, fitting, self._top_k, self._min_probability, self._ids)
        out = self._runner.read(passes.seqs)
        while inputs := passes.after(out._replace(logits=out.logits[:, self._rows])):
            out = self._runner.run(inputs)
        drafts = passes.drafts()
        return [drafts.get(seq, Draft.empty()) for seq, _ in requests]
