"""A sparse mixture of experts on the op contract: a router in float32, and of the experts those that rows go to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from specserve.models.reader import WeightReader
from specserve.models.sharding import Shard
from specserve.models.spec import ExpertsMlp, LayerSpec
from specserve.ops import Ops


class _Mlp(Protocol):
    def run(self, ops: Ops, x: Any, normed: Callable[[], Tensor], slots: Tensor | None) -> Tensor: ...


class Experts:
    """The MLP of a layer that has several. `shared` is what every row goes through besides, if there is one. Where
    other replicas have some of them, `weights` are this one's."""

    def __init__(self, read: WeightReader, name: str, layer: LayerSpec, shared: _Mlp | None) -> None:
        assert isinstance(layer.mlp, ExpertsMlp)
        self.spec = layer.mlp
        gate = [f"{name}.shared_expert_gate"] if self.spec.has_shared_gate else []
        self.router = read.router(f"{name}.gate", *gate)  # the gate is one more product with the same rows
        self._peers, number = read.expert_peers, self.spec.num_experts
        own = range(number) if self._peers is None else Shard(self._peers.rank, self._peers.count).of(number)
        self._first = own.start
        self.weights = read.experts(f"{name}.experts", number, own, times=layer.residual.multiplier)
        self.shared = shared

    def run(self, ops: Ops, x: Any, normed: Callable[[], Tensor], slots: Tensor | None) -> Tensor:
        """Of what a linear layer reads, float32 [rows, hidden]. `normed` returns the same rows, not rounded, float32
        [rows, hidden]: on them depends where rows go, and a rounding could send them elsewhere."""
        spec = self.spec
        routing = ops.route(normed(), self.router, spec.num_experts, spec.per_token, spec.is_normalized)
        shared = None if self.shared is None else self.shared.run(ops, x, normed, slots)
        if self._peers is None:
            return ops.experts(x, self.weights, routing, spec.activation, shared)
        return ops.peer_experts(x, self.weights, routing, spec.activation, shared, self._first, self._peers)
