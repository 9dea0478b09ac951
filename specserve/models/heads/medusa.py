"""Runs Medusa heads (MedusaSpec) on the op contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from specserve.models.heads.spec import MedusaSpec
from specserve.models.loader import AnyModel
from specserve.ops import Input, Ops
from specserve.ops.capture import Captured


class MedusaHead:
    """Heads for a target, with the tensors of spec.shapes(). `ids` are those that their logits are of, int64 [draft
    vocabulary], ascending; None: all of the target's."""

    def __init__(
        self, head: MedusaSpec, weights: Mapping[str, Tensor], d2t: Tensor | None, ops: Ops, target: AnyModel
    ) -> None:
        self.head, self.ops = head, ops
        self._norm = self._captured(target.final_norm)
        self.ids = None if d2t is None else (torch.arange(len(d2t)) + d2t.cpu()).to(ops.device)
        heads, layers = range(head.num_heads), range(head.num_layers)
        # The first blocks of all heads read the same, so they are one product.
        groups = [[f"{j}.{i}.linear" for j in heads] for i in layers[:1]]
        groups += [[f"{j}.{i}.linear"] for i in layers[1:] for j in heads]
        joined = [
            [torch.cat([weights[f"{name}.{part}"] for name in names]) for part in ("weight", "bias")]
            for names in groups
        ]
        self._blocks = [self._product(ops.pack(weight, bias)) for weight, bias in joined]
        lm_heads = (ops.pack_head(weights[f"{j}.{head.num_layers}.weight"]) for j in heads)
        self._lm_heads = [self._product(each) for each in lm_heads]

    @torch.inference_mode()
    def logits(self, residual: Tensor, count: int) -> Tensor:
        """Of the first `count` heads, float32 [count, rows, draft vocabulary], from the residual stream behind the
        target's last layer, float32 [rows, hidden]."""
        rows = len(residual)
        hidden = self._norm([residual], rows)[:rows]
        states = [hidden] * count
        if self._blocks:
            changes = self._blocks[0]([hidden], rows)[:rows].chunk(self.head.num_heads, -1)
            states = [hidden + silu(change) for change in changes[:count]]
        for i in range(1, self.head.num_layers):
            blocks = self._blocks[1 + (i - 1) * self.head.num_heads :]
            states = [x + silu(block([x], rows)[:rows]) for x, block in zip(states, blocks, strict=False)]
        return torch.stack([lm_head([x], rows)[:rows] for x, lm_head in zip(states, self._lm_heads, strict=False)])

    def _product(self, weight: Any) -> Captured[Tensor]:
        ops = self.ops
        return self._captured(lambda x: ops.linear(ops.quantize_activation(x), weight).float())

    def _captured(self, function: Callable[[Tensor], Tensor]) -> Captured[Tensor]:
        """Of rows as wide as the target's hidden states."""
        inputs = [Input(torch.float32, self.head.target.hidden_size)]
        return Captured(self.ops, lambda plan, x: function(x), inputs)
