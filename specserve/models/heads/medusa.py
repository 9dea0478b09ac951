"""Runs Medusa heads (MedusaSpec) on the op contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from specserve.models.heads.spec import MedusaSpec
from specserve.ops import Ops


class MedusaHead:
    """Heads for a target, with the tensors of spec.shapes(). `ids` are those that their logits are of, int64 [draft
    vocabulary], ascending; None: all of the target's."""

    def __init__(self, head: MedusaSpec, weights: Mapping[str, Tensor], d2t: Tensor | None, ops: Ops) -> None:
        self.head, self.ops = head, ops
        self.ids = None if d2t is None else (torch.arange(len(d2t)) + d2t.cpu()).to(ops.device)
        self._layers: list[list[Any]] = [
            [
                ops.pack(weights[f"{j}.{i}.linear.weight"], weights[f"{j}.{i}.linear.bias"])
                for i in range(head.num_layers)
            ]
            for j in range(head.num_heads)
        ]
        self._lm_heads = [ops.pack_head(weights[f"{j}.{head.num_layers}.weight"]) for j in range(head.num_heads)]

    @torch.inference_mode()
    def logits(self, hidden: Tensor, count: int) -> Tensor:
        """Of the first `count` heads, float32 [count, rows, draft vocabulary], from hidden states behind the target's
        final norm, float32 [rows, hidden]."""
        ops, rows, found = self.ops, len(hidden), []
        hidden = pad(hidden, (0, 0, 0, -rows % ops.row_multiple))
        for layers, lm_head in zip(self._layers[:count], self._lm_heads, strict=False):
            x = hidden
            for layer in layers:
                x = x + silu(ops.linear(ops.quantize_activation(x), layer).float())
            found.append(ops.linear(ops.quantize_activation(x), lm_head).float()[:rows])
        return torch.stack(found)
