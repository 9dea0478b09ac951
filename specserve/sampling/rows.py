"""The rows that a sampler looks at."""

from __future__ import annotations

from dataclasses import dataclass

from specserve.types import Draft, Sequence


@dataclass(slots=True)
class Rows:
    """The rows to be judged, flattened: sequence i owns logits rows [starts[i], starts[i] + len(drafts[i])].

    The first of them judges the token after the last committed one, row starts[i] + 1 + j what follows draft node j.
    """

    seqs: list[Sequence]
    drafts: list[Draft]
    starts: list[int]

    @property
    def num_rows(self) -> int:
        return sum(len(draft) + 1 for draft in self.drafts)
