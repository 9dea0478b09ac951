"""How many tokens of a draft would be accepted, measured on answers that a head has not seen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specserve.train.batches import Batch
from specserve.train.heads import TrainedHead


@dataclass(slots=True)
class Acceptance:
    """By depth, of drafts that end before an answer does none: how many could be judged, and of how many all tokens up
    to there were right."""

    judged: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)

    def add(self, depth: int, judged: int, right: int) -> None:
        for counts, value in ((self.judged, judged), (self.right, right)):
            counts += [0] * (depth + 1 - len(counts))
            counts[depth] += value

    @property
    def by_depth(self) -> list[float]:
        """The share of drafts that are accepted up to each depth."""
        return [
            round(right / judged, 4) if judged else 0.0 for right, judged in zip(self.right, self.judged, strict=True)
        ]

    @property
    def accepted(self) -> float:
        """Tokens that are accepted of a draft, on average."""
        return round(sum(self.by_depth), 4)


@torch.no_grad()
def measure(head: TrainedHead, batches: Iterable[Batch]) -> dict[str, Acceptance]:
    """Acceptance of greedy drafts by category, and of "all": a draft is accepted as far as its tokens are those of the
    answer. On greedy answers that is what verification does, and from any position, not only from those where a draft
    would begin."""
    found: dict[str, Acceptance] = {"all": Acceptance()}
    for batch in batches:
        alive: Tensor | None = None
        for depth, guesses in enumerate(head.guesses(batch)):
            if alive is None:
                alive = torch.ones(guesses.num_drafts, dtype=torch.bool, device=batch.tokens.device)
            right = (guesses.logits.argmax(-1) == guesses.truth) & alive[guesses.drafts]
            alive = torch.zeros_like(alive)
            alive[guesses.drafts] = right
            answers = (guesses.drafts * len(batch.categories)).div(guesses.num_drafts, rounding_mode="floor")
            for answer, category in enumerate(batch.categories):
                of_it = answers == answer
                counts = int(of_it.sum()), int((of_it & right).sum())
                for name in ("all", category):
                    found.setdefault(name, Acceptance()).add(depth, *counts)
    return found
