"""Packs a model's tensors by their names, or takes what was packed of them from a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specserve.models.spec import RmsNorm
from specserve.ops import Ops
from specserve.ops.packing import Lazy, PackedCache, Weight, below, stacked, uncached


class WeightReader:
    """Reads tensors that are named as in `shapes`, which has all that the model has. In the cache what is fused has the
    names of all its parts."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        weights: Mapping[str, Weight],
        ops: Ops,
        cached: PackedCache = uncached,
    ) -> None:
        self.ops = ops
        self._weights = weights
        self._shapes = shapes
        self._cached = cached

    def named(self, name: str) -> tuple[Lazy, PackedCache]:
        weight = f"{name}.weight"
        return Lazy(self._shapes[weight], lambda: self._weights[weight]), below(self._cached, name)

    def norm(self, name: str | None, spec: RmsNorm) -> Any:
        """None where there is none."""
        if name is None or f"{name}.weight" not in self._shapes:
            return None
        weight, cached = self.named(name)
        return self.ops.pack_vector(Lazy(weight.shape, lambda: weight[:].float() + spec.offset), cached)

    def linear(self, *names: str) -> Any:
        """One product for several layers that read the same input; all have a bias or none."""
        return self.ops.pack(self._stacked("weight", *names), self._bias(*names), below(self._cached, "+".join(names)))

    def gated(self, gate: str, up: str) -> Any:
        weights = self._stacked("weight", gate), self._stacked("weight", up)
        return self.ops.pack_gated(*weights, self._bias(gate), self._bias(up), below(self._cached, f"{gate}+{up}"))

    def _bias(self, *names: str) -> Lazy | None:
        return self._stacked("bias", *names) if f"{names[0]}.bias" in self._shapes else None

    def _stacked(self, kind: str, *names: str) -> Lazy:
        """A copy even of a single tensor: file mappings are not aligned as kernels like it, and may be closed."""
        full = [f"{name}.{kind}" for name in names]
        shape = (sum(self._shapes[name][0] for name in full), *self._shapes[full[0]][1:])
        return Lazy(shape, lambda: stacked([self._weights[name] for name in full]))
