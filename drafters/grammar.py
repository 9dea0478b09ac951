"""What a sequence's grammar forces next, as the tokenizer would split it. Knows grammars' states; free sequences get
nothing from it.

The engine itself puts forced tokens into the drafts of every drafter; this one drafts them and nothing else.
"""

from __future__ import annotations

import torch

from specserve.types import Draft, Sequence, Verdict


class GrammarDrafter:
    """Chains of forced tokens. Right unless the model prefers another spelling of the same text."""

    wants_hidden = False

    def begin(self, seq: Sequence) -> None:
        pass

    def propose(self, seqs: list[Sequence], budget: list[int]) -> list[Draft]:
        return [_forced(seq, limit) for seq, limit in zip(seqs, budget, strict=True)]

    def commit(self, seqs: list[Sequence], verdicts: list[Verdict], hidden: torch.Tensor | None) -> None:
        pass

    def end(self, seq: Sequence) -> None:
        pass


def _forced(seq: Sequence, limit: int) -> Draft:
    forced = [] if seq.grammar is None else seq.grammar.forced()[:limit]
    return Draft.chain(forced) if forced else Draft.empty()
