"""Mixtures of experts in torch: what decides where rows go, and the experts one after the other, each with its rows.

A row's bits do not depend on where the others go: an expert's rows are padded as all rows of a step are, and a row's
sum over its experts goes from its best score down.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve.ops.adapters import RowAdapters
from specserve.ops.fixed_point import row_total
from specserve.ops.packing import PackedCache, Source, uncached


@dataclass(frozen=True, slots=True)
class _Expert:
    gate_up: Any  # as `gated` wants it
    down: Any  # as `linear` wants it


@dataclass(frozen=True, slots=True)
class _Routing:
    experts: Tensor  # int64 [rows, per_token], the best score first
    weights: Tensor  # float32 [rows, per_token]
    share: Tensor | None  # float32 [rows, 1], the shared expert's; None: 1


class Experts(ABC):
    """The ops of experts, made of others."""

    row_multiple: int

    @abstractmethod
    def pack(self, weight: Source, bias: Source | None = None, cached: PackedCache = uncached) -> Any: ...
    @abstractmethod
    def pack_gated(
        self, gate: Source, up: Source, gate_bias: Source | None, up_bias: Source | None, cached: PackedCache = uncached
    ) -> Any: ...
    @abstractmethod
    def linear(self, x: Tensor, weight: Any, adapters: RowAdapters | None = None) -> Tensor: ...
    @abstractmethod
    def gated(self, x: Tensor, weight: Any, activation: str, adapters: RowAdapters | None = None) -> Tensor: ...
    @abstractmethod
    def packed_as(self, weight: Source, bias: Source | None, dtype: torch.dtype) -> Any:
        """As `pack`, in this dtype."""

    @abstractmethod
    def product(self, x: Tensor, weight: Any) -> Tensor:
        """x [rows, in] times packed weight^T, in their dtype."""

    def pack_router(self, weight: Source, cached: PackedCache = uncached) -> Any:
        return self.packed_as(weight, None, torch.float32)

    def pack_experts(
        self, gates: Sequence[Source], ups: Sequence[Source], downs: Sequence[Source], cached: PackedCache = uncached
    ) -> list[_Expert]:
        parts = zip(gates, ups, downs, strict=True)
        return [_Expert(self.pack_gated(gate, up, None, None), self.pack(down)) for gate, up, down in parts]

    def route(self, x: Tensor, router: Any, num_experts: int, per_token: int, is_normalized: bool) -> _Routing:
        scores = self.product(x, router)
        sorted_scores, experts = scores[:, :num_experts].sort(descending=True, stable=True)
        weights = (sorted_scores - sorted_scores[:, :1]).exp_()
        chosen = weights[:, :per_token]
        total = row_total((chosen if is_normalized else weights).double(), num_experts).float()
        has_gate = scores.shape[1] > num_experts
        share = 1 / (1 + scores[:, num_experts:].neg().exp_()) if has_gate else None
        return _Routing(experts[:, :per_token], chosen / total[:, None], share)

    def router_scores(self, x: Tensor, router: Any) -> Tensor:
        return self.product(x, router)

    def routed(self, chosen: Tensor, weights: Tensor) -> _Routing:
        return _Routing(chosen.long(), weights, None)

    def experts(
        self, x: Tensor, weights: list[_Expert], routing: _Routing, activation: str, shared: Tensor | None
    ) -> Tensor:
        parts: Tensor | None = None  # [rows, per_token, out]
        for number in torch.unique(routing.experts).tolist():
            rows, places = (routing.experts == number).nonzero(as_tuple=True)
            expert, padding = weights[number], -len(rows) % self.row_multiple
            own = x.index_select(0, F.pad(rows, (0, padding)))
            found = self.linear(self.gated(own, expert.gate_up, activation), expert.down)[: len(rows)].float()
            if parts is None:
                parts = found.new_empty(*routing.experts.shape, found.shape[1])
            parts[rows, places] = found
        assert parts is not None, "a step has rows"
        parts *= routing.weights[..., None]
        total = parts[:, 0]
        for place in range(1, parts.shape[1]):
            total = total + parts[:, place]
        if shared is None:
            return total
        return total + (shared.float() if routing.share is None else shared.float() * routing.share)
