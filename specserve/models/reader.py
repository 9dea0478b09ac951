"""Packs a model's tensors by their names, or takes what was packed of them from a cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from specserve.models.product import Product
from specserve.models.spec import LayerNorm, Norm
from specserve.ops import Ops, Peers
from specserve.ops.packing import Lazy, PackedCache, Weight, below, cut, reordered, scaled, stacked, uncached
from specserve.ops.peers import ExpertPeers


class WeightReader:
    """Reads tensors that are named as in `shapes`, which has all that the model has. In the cache what is fused has the
    names of all its parts. With `peers` these are one process's parts of the tensors, and so is what layers compute;
    `expert_peers` have some of the experts of each layer each."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        weights: Mapping[str, Weight],
        ops: Ops,
        cached: PackedCache = uncached,
        peers: Peers | None = None,
        expert_peers: ExpertPeers | None = None,
    ) -> None:
        self.ops, self.peers, self.expert_peers = ops, peers, expert_peers
        self._weights = weights
        self._shapes = shapes
        self._cached = cached
        self.products: list[Product] = []  # that were read, but for those of experts

    def named(self, name: str, times: float = 1.0) -> tuple[Lazy, PackedCache]:
        weight = f"{name}.weight"
        return Lazy(self._shapes[weight], lambda: scaled(self._weights[weight], times)), below(self._cached, name)

    def norm(self, name: str | None, spec: Norm, order: Tensor | None = None) -> Any:
        """None where there is none. `order`: its numbers as this lists them."""
        if name is None or f"{name}.weight" not in self._shapes:
            return None
        weight, cached = self.named(name)
        if isinstance(spec, LayerNorm):
            assert order is None, "only RMS norms are those of heads"
            return self.ops.pack_layer_norm(weight, self._bias(name), cached)
        values = Lazy(weight.shape, lambda: reordered(weight[:].float() + spec.offset, order))
        return self.ops.pack_vector(values, cached)

    def head(self, name: str, times: float, is_normed: bool = False, rows: range | None = None) -> Product:
        """The LM head, with the bias that lm_head has, multiplied; its rows are divided by their lengths first where it
        is normed. Some of its `rows`, or all."""
        weight, cached = self.named(name, 1.0 if is_normed else times)
        bias = self._bias("lm_head")
        if rows is not None:
            weight, bias = _cut(weight, rows), bias and _cut(bias, rows)
        if is_normed:
            stored = weight
            weight = Lazy(stored.shape, lambda: torch.nn.functional.normalize(stored[:].float()) * times)
        packed = self.ops.pack_head(weight, bias and Lazy(bias.shape, lambda: scaled(bias.read(), times)), cached)
        return self._kept(Product(packed, ("lm_head",), (weight.shape[0],), weight.shape[1], times))

    def linear(self, *names: str, times: float = 1.0, order: Tensor | None = None) -> Product:
        """One product for several layers that read the same input; all have a bias or none. Its outputs are multiplied,
        and as `order` lists them."""
        weight, bias = self._stacked("weight", *names), self._bias(*names)

        def changed(source: Lazy) -> Lazy:
            return Lazy(source.shape, lambda: reordered(scaled(source.read(), times), order))

        packed = self.ops.pack(changed(weight), bias and changed(bias), below(self._cached, "+".join(names)))
        return self._product(names, packed, times, order)

    def gated(self, gate: str, up: str) -> Product:
        weights = self._stacked("weight", gate), self._stacked("weight", up)
        cached = below(self._cached, f"{gate}+{up}")
        packed = self.ops.pack_gated(*weights, self._bias(gate), self._bias(up), cached)
        return self._product((gate, up), packed, is_gated=True)

    def router(self, *names: str) -> Any:
        return self.ops.pack_router(self._stacked("weight", *names), below(self._cached, "+".join(names)))

    def experts(self, name: str, number: int, own: range, times: float = 1.0) -> Any:
        """Of so many gated MLPs of one size, `name`.N each, its `own`. Their outputs are multiplied. The cache has all
        of them."""
        if len(own) == number or self._cached is uncached:
            return self._experts(name, own, times)
        return self.ops.some_experts(self._experts(name, range(number), times), own)

    def _experts(self, name: str, numbers: Iterable[int], times: float) -> Any:
        numbered = [f"{name}.{number}" for number in numbers]
        gates, ups, downs = (
            [self._stacked("weight", f"{each}.{part}_proj") for each in numbered] for part in ("gate", "up", "down")
        )
        scaled_downs = [self._scaled(down, times) for down in downs]
        return self.ops.pack_experts(gates, ups, scaled_downs, below(self._cached, name))

    def _product(self, names: tuple[str, ...], packed: Any, *more: Any, **named: Any) -> Product:
        shapes = [self._shapes[f"{name}.weight"] for name in names]
        return self._kept(Product(packed, names, tuple(shape[0] for shape in shapes), shapes[0][1], *more, **named))

    def _kept(self, product: Product) -> Product:
        self.products.append(product)
        return product

    def _scaled(self, source: Lazy, times: float) -> Lazy:
        return Lazy(source.shape, lambda: scaled(source.read(), times))

    def _bias(self, *names: str) -> Lazy | None:
        return self._stacked("bias", *names) if f"{names[0]}.bias" in self._shapes else None

    def _stacked(self, kind: str, *names: str) -> Lazy:
        """A copy even of a single tensor: file mappings are not aligned as kernels like it, and may be closed."""
        full = [f"{name}.{kind}" for name in names]
        shape = (sum(self._shapes[name][0] for name in full), *self._shapes[full[0]][1:])
        return Lazy(shape, lambda: stacked([self._weights[name] for name in full]))


def _cut(source: Lazy, rows: range) -> Lazy:
    return Lazy((len(rows), *source.shape[1:]), lambda: cut(source.read(), 0, rows))
