"""Draws the tokens of heads' drafts from their logits, captured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.ops import DrawArrays, Drawn, Input, Ops
from specserve.ops.capture import Captured

_MOST_CAPTURED = 64  # a few numbers of rows, each with a few depths


class HeadDraws:
    """Draws of a head whose draft vocabulary is `ids`, and which says by `bias` what tokens add to the logits after
    them; `hashed` int64 [draft vocabulary] are the ids as noise.hash_tokens has them."""

    def __init__(self, bias: Callable[[Tensor], Tensor | None], ids: Tensor | None, hashed: Tensor, ops: Ops) -> None:
        self._bias, self._ids, self._hashed, self._ops = bias, ids, hashed, ops
        self._captured: dict[tuple[int, int], Captured[list[Tensor]]] = {}  # by where logits lie, and depth

    def draw(
        self,
        logits: Tensor,
        before: NDArray[np.int64],
        rows: NDArray[np.int64],
        temperature: NDArray[np.float64],
        keys: NDArray[np.int64],
        is_replayed: bool,
    ) -> list[NDArray[Any]]:
        """What Ops.draw says of each depth, [depth, n] of each field of ops.Drawn: of rows int64 [depth, n] of logits
        float32 [any, draft vocabulary], after the tokens `before` int64 [n] and those that are drawn, at temperatures
        float64 [n], with the noise of keys int64 [depth, n]. `is_replayed`: whether the next logits lie where these do,
        so that it is worth recording what reads them."""
        depth, n = rows.shape
        key = logits.data_ptr(), depth
        if (captured := self._captured.get(key)) is None:
            types = [torch.int64, torch.float64, *[torch.int64] * (2 * depth)]
            captured = Captured(self._ops, partial(self._drawn, logits, depth), [Input(each) for each in types])
            if is_replayed:
                if len(self._captured) == _MOST_CAPTURED:
                    self._captured.clear()
                self._captured[key] = captured
        run = captured if is_replayed else captured.op_by_op
        found = [each.cpu().numpy()[:n] for each in run((before, temperature, *rows, *keys), n)]
        return [np.stack(found[i * depth : (i + 1) * depth]) for i in range(len(Drawn._fields))]

    def _drawn(
        self, logits: Tensor, depth: int, plan: None, before: Tensor, temperature: Tensor, *rows_and_keys: Tensor
    ) -> list[Tensor]:
        """By field of ops.Drawn, then by depth."""
        found: list[Drawn] = []
        for i in range(depth):
            how = DrawArrays(rows_and_keys[i], temperature, rows_and_keys[depth + i])
            found.append(self._ops.draw(i, logits, self._bias(before), how, self._ids, self._hashed))
            before = found[-1].tokens
        return [each for field in zip(*found, strict=True) for each in field]
