"""Mixtures of experts on the native kernels: all experts' weights lie in one piece of memory, of which a step reads
those that its rows go to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import specserve.kernels._native as _native
from specserve.kernels._cpu_adapters import NO_ADAPTERS
from specserve.kernels._cpu_base import ACTIVATIONS, Activation, Base
from specserve.kernels._cpu_cache import zeros
from specserve.kernels._cpu_peers import CpuExpertPeers
from specserve.kernels._cpu_rows import TILE, alternating, at, pad, padded
from specserve.kernels._cpu_weights import FLOAT32, PackedWeight, pack_tiles
from specserve.ops.packing import Lazy, PackedCache, Source, Weight, by_rows, loaded, uncached
from specserve.ops.peers import ExpertPeers


@dataclass(frozen=True, slots=True)
class _Experts:
    gate_up: _native.Weight  # of the first expert, which those of the others follow
    down: _native.Weight
    memory: tuple[Tensor, Tensor]  # uint8, what these point to
    number: int
    size: int  # features between
    outputs: int


@dataclass(frozen=True, slots=True)
class _Routing:
    chosen: Tensor  # int32 [rows, per_token] experts, the best score first
    weights: Tensor  # float32 [rows, per_token]
    share: Tensor | None  # float32 [rows, 1], a shared expert's


class Experts(Base):
    """The ops of experts."""

    def pack_router(self, weight: Source, cached: PackedCache = uncached) -> PackedWeight:
        memory, (outputs, inputs) = self._tiles("router", FLOAT32, [weight], cached), weight.shape
        return PackedWeight(_native.weight(FLOAT32, outputs, inputs, memory.data_ptr()), memory, None, outputs)

    def pack_experts(
        self, gates: Sequence[Source], ups: Sequence[Source], downs: Sequence[Source], cached: PackedCache = uncached
    ) -> _Experts:
        (size, inputs), (outputs, _) = gates[0].shape, downs[0].shape
        pairs = [
            Lazy((2 * pad(size), inputs), partial(_alternating, gate, up)) for gate, up in zip(gates, ups, strict=True)
        ]
        gated = self._tiles("gated", self._format, pairs, cached)
        down = self._tiles("down", self._format, downs, cached)
        return _Experts(
            _native.weight(self._format, 2 * pad(size), inputs, gated.data_ptr()),
            _native.weight(self._format, outputs, size, down.data_ptr()),
            (gated, down),
            len(gates),
            size,
            outputs,
        )

    def some_experts(self, weights: _Experts, own: range) -> _Experts:
        gated, down = (each.view(weights.number, -1)[own.start : own.stop] for each in weights.memory)
        inputs, size = weights.gate_up.inputs, weights.size
        return _Experts(
            _native.weight(self._format, 2 * pad(size), inputs, gated.data_ptr()),
            _native.weight(self._format, weights.outputs, size, down.data_ptr()),
            (gated, down),
            len(own),
            size,
            weights.outputs,
        )

    def _tiles(self, kind: str, form: int, weights: Sequence[Source], cached: PackedCache) -> Tensor:
        """Of weights of one shape, one after the other."""
        outputs, inputs = weights[0].shape
        each = pad(outputs) // TILE * _native.tile_bytes(form, inputs)

        def packed() -> Tensor:
            tiles: Tensor = zeros((len(weights) * each,), torch.uint8)
            for i, weight in enumerate(weights):
                pack_tiles(form, loaded(weight), tiles[i * each : (i + 1) * each])
            return tiles

        return cached(kind, (len(weights) * each,), torch.uint8, packed)

    def router_scores(self, x: Tensor, router: PackedWeight) -> Tensor:
        rows, x = len(x), padded(x)
        scores = self._floats("scores", rows, router.outputs)
        read = _native.activation(FLOAT32, x.shape[1], x.data_ptr(), 0, 0)
        with self._program(rows, x, router, scores) as program:
            program.linear(router.native, read, 0, scores.data_ptr(), NO_ADAPTERS.native)
        return scores[:, : router.outputs]

    def routed(self, chosen: Tensor, weights: Tensor) -> _Routing:
        return _Routing(chosen, weights, None)

    def route(self, x: Tensor, router: PackedWeight, num_experts: int, per_token: int, is_normalized: bool) -> _Routing:
        rows, x = len(x), padded(x)
        has_share = router.outputs > num_experts
        scores = self._floats("scores", rows, router.outputs)
        chosen = self._buffer("chosen experts", rows, per_token, torch.int32)
        weights = self._buffer("weights of experts", rows, per_token, torch.float32)
        share = self._buffer("share", rows, 1, torch.float32) if has_share else None
        read = _native.activation(FLOAT32, x.shape[1], x.data_ptr(), 0, 0)
        with self._program(rows, x, router) as program:
            program.linear(router.native, read, 0, scores.data_ptr(), NO_ADAPTERS.native)
            program.route(
                scores.data_ptr(), num_experts, has_share, per_token, is_normalized,
                chosen.data_ptr(), weights.data_ptr(), 0 if share is None else share.data_ptr(),
            )  # fmt: skip
        return _Routing(chosen, weights, share)

    def experts(
        self, x: Activation, weights: _Experts, routing: _Routing, activation: str, shared: Tensor | None
    ) -> Tensor:
        rows, per_token = routing.chosen.shape
        num_pairs = rows * per_token
        by_pair = self._activation("pairs", num_pairs, x.width, self._kind)
        between = self._activation("between", num_pairs, weights.size, self._kind)
        found = self._floats("pairs out", num_pairs, weights.outputs)
        out = self._floats("experts", rows, weights.outputs)
        num_active = self._buffer("active experts", 1, 1, torch.int64)
        order = self._buffer("order of pairs", 1, 2 * weights.number + 1 + 2 * num_pairs, torch.int32)
        share = 0 if routing.share is None else routing.share.data_ptr()
        with self._program(rows, x, weights, routing, shared, by_pair, between, found, num_active, order) as program:
            program.experts(
                routing.chosen.data_ptr(), routing.weights.data_ptr(), share, at(shared),
                weights.number, per_token, rows, num_active.data_ptr(), order.data_ptr(),
                x.native, by_pair.native, weights.gate_up,
                ACTIVATIONS[activation], between.native, weights.down, found.data_ptr(), out.data_ptr(),
            )  # fmt: skip
        return out[:, : weights.outputs]

    def peer_experts(
        self, x: Activation, weights: _Experts, routing: _Routing, activation: str, shared: Tensor | None,
        first: int, peers: ExpertPeers,
    ) -> Tensor:  # fmt: skip
        assert isinstance(peers, CpuExpertPeers), "made by these kernels"
        rows, per_token = routing.chosen.shape
        most_pairs = peers.count * peers.most_pairs  # that may all be of these experts
        by_pair = self._activation("pairs of all", most_pairs, x.width, self._kind)
        between = self._activation("between of all", most_pairs, weights.size, self._kind)
        found = self._floats("pairs of all out", most_pairs, weights.outputs)
        out = self._floats("experts", rows, weights.outputs)
        counts = self._buffer("active experts and pairs", 1, 2, torch.int64)
        start = 2 * weights.number + 1 + most_pairs  # of where the pairs of this replica's rows are: in their order
        order = self._buffer("order of pairs of all", 1, start + rows * per_token, torch.int32)
        torch.arange(rows * per_token, dtype=torch.int32, out=order[0, start:])
        share = 0 if routing.share is None else routing.share.data_ptr()
        with self._program(rows, x, weights, routing, shared, peers, by_pair, between, found, counts, order) as program:
            program.peer_experts(
                peers.native, routing.chosen.data_ptr(), routing.weights.data_ptr(), share, at(shared),
                first, weights.number, per_token,
                counts.data_ptr(), counts[0, 1:].data_ptr(), order.data_ptr(), most_pairs,
                x.native, by_pair.native, weights.gate_up,
                ACTIVATIONS[activation], between.native, weights.down, found.data_ptr(), out.data_ptr(),
            )  # fmt: skip
        return out[:, : weights.outputs]


def _alternating(gate: Source, up: Source) -> Weight:
    return by_rows((loaded(gate), loaded(up)), alternating)
