"""Draws the tokens of heads' drafts from their logits, captured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.ops import DrawArrays, Ops
from specserve.ops.capture import Captured


class HeadDraws:
    """Draws of a head whose draft vocabulary is `ids`, and which says by `bias` what tokens add to the logits after
    them; `hashed` int64 [draft vocabulary] are the ids as noise.hash_tokens has them."""

    def __init__(self, bias: Callable[[Tensor], Tensor | None], ids: Tensor | None, hashed: Tensor, ops: Ops) -> None:
        self._bias, self._ids, self._hashed, self._ops = bias, ids, hashed, ops
        self._captured: dict[int, Captured[list[NDArray[Any]]]] = {}  # by depth
        self._logits = 0  # where these lie

    def draw(
        self,
        logits: Tensor,
        before: NDArray[np.int64],
        rows: NDArray[np.int64],
        temperature: NDArray[np.float64],
        keys: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens and their confidence, as Ops.draw has them, int64 and float32 [depth, n]: of rows int64 [depth, n] of
        logits float32 [any, draft vocabulary], after the tokens `before` int64 [n] and those that are drawn, at
        temperatures float64 [n], with the noise of keys int64 [depth, n]."""
        depth, n = rows.shape
        if logits.data_ptr() != self._logits or not self._ops.records:
            self._captured.clear()
            self._logits = logits.data_ptr()
        if depth not in self._captured:
            buffers = partial(_buffers, depth)
            self._captured[depth] = Captured(self._ops, partial(self._drawn, logits, depth), buffers)
        found = self._captured[depth]((before, temperature, *rows, *keys), n)
        return np.stack([each[:n] for each in found[:depth]]), np.stack([each[:n] for each in found[depth:]])

    def _drawn(
        self, logits: Tensor, depth: int, plan: None, before: Tensor, temperature: Tensor, *rows_and_keys: Tensor
    ) -> list[NDArray[Any]]:
        """The tokens of each depth, then their confidence."""
        found = []
        for i in range(depth):
            how = DrawArrays(rows_and_keys[i], temperature, rows_and_keys[depth + i])
            found.append(self._ops.draw(i, logits, self._bias(before), how, self._ids, self._hashed))
            before = found[-1][0]
        return [each.cpu().numpy() for each in (*(tokens for tokens, _ in found), *(chance for _, chance in found))]


def _buffers(depth: int, most: int) -> list[Tensor]:
    before, temperature = torch.zeros(most, dtype=torch.int64), torch.zeros(most, dtype=torch.float64)
    return [before, temperature, *torch.zeros((2 * depth, most), dtype=torch.int64)]
