"""What a step takes, from a table that measure.py has written."""

from __future__ import annotations

import json
from collections.abc import Sequence as Many
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

_MOST_ROWS = 4096  # of decoding, that a step is asked for


@dataclass(frozen=True)
class StepCosts:
    """Milliseconds. Decoding takes `step_ms` by its `rows`, a line between two and beyond the last, and
    `context_token_ms` for each token that its sequences have; a token of a prompt `prompt_token_ms`, and
    `prompt_context_token_ms` for each token that it reads; a step without decoding `prompt_ms` besides.

    Raises ValueError for a table that cannot be one."""

    rows: Many[int]
    step_ms: Many[float]
    context_token_ms: float
    prompt_ms: float
    prompt_token_ms: float
    prompt_context_token_ms: float

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.step_ms) or len(self.rows) < 2 or sorted(set(self.rows)) != list(self.rows):
            raise ValueError("`rows` must rise, at least two of them, and each have one of `step_ms`.")
        if self.rows[0] != 1 or min(self.step_ms) <= 0 or self.prompt_token_ms <= 0:
            raise ValueError("`rows` must begin with 1, and `step_ms` and `prompt_token_ms` be above 0.")
        (before, last), (low, high) = self.rows[-2:], self.step_ms[-2:]
        known = np.interp(range(_MOST_ROWS + 1), [0, *self.rows], [0.0, *self.step_ms])
        known[last:] += max(0.0, high - low) / (last - before) * np.arange(_MOST_ROWS + 1 - last)
        object.__setattr__(self, "_decoding_ms", known.tolist())

    @classmethod
    def of(cls, table: dict[str, Any]) -> StepCosts:
        """Raises ValueError for one that lacks a number."""
        names = [field.name for field in fields(cls)]
        if missing := [name for name in names if name not in table]:
            raise ValueError(f"The table of step costs lacks {', '.join(missing)}: measure.py writes one.")
        return cls(**{name: table[name] for name in names})

    @classmethod
    def read(cls, path: Path) -> StepCosts:
        return cls.of(json.loads(path.read_text("utf-8")))

    def decoding(self, rows: int) -> float:
        """Seconds, without what the context takes."""
        found: float = self._decoding_ms[rows]  # type: ignore[attr-defined]
        return found / 1e3

    def seconds(self, rows: int, context: int, tokens: int, read: float) -> float:
        """Of a step with `rows` of decoding, whose sequences have `context` tokens in all, and `tokens` of prompts that
        read `read` tokens each on average."""
        decoding = self.decoding(rows) + context * self.context_token_ms / 1e3
        fixed = 0.0 if rows else self.prompt_ms / 1e3
        return decoding + fixed + tokens * (self.prompt_token_ms + self.prompt_context_token_ms * read) / 1e3
