"""Pipeline parallelism (arXiv 1811.06965): which layers each of several processes has, and models of some layers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from specserve.errors import ConfigError
from specserve.models.adapted import AdaptedModel
from specserve.models.decoder import Decoder
from specserve.models.layers import LayerStack
from specserve.models.product import RowSlots
from specserve.models.reader import WeightReader
from specserve.models.spec import DecoderSpec
from specserve.ops import Ops, Peers
from specserve.ops.packing import PackedCache, Weight, uncached

Computed = tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]  # as Decoder.forward returns it


_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def number_of(name: str) -> int | None:
    """Of the layer that a tensor belongs to; None: it belongs to none."""
    found = _LAYER.match(name)
    return None if found is None else int(found[1])


def divided(costs: Sequence[int], first: int, count: int) -> list[range]:
    """Layers that cost so much each, in so many stages whose most costly one costs least; the first stage has `first`
    to pay besides. Raises ConfigError where there are fewer layers than stages."""
    if count > len(costs):
        raise ConfigError(
            f"--pipeline-parallel-size is {count}, and the model has {len(costs)} layers: it may be at most "
            f"{len(costs)}."
        )
    until = [0, *accumulate(costs)]

    @cache
    def best(stop: int, parts: int) -> tuple[int, int]:
        """The cost of the first `stop` layers in so many stages, and where the last of these begins."""
        if parts == 1:
            return first + until[stop], 0
        return min(
            (max(best(start, parts - 1)[0], until[stop] - until[start]), start) for start in range(parts - 1, stop)
        )

    stages, stop = list[range](), len(costs)
    for parts in range(count, 0, -1):
        start = best(stop, parts)[1]
        stages.append(range(start, stop))
        stop = start
    return stages[::-1]


class FirstStage:
    """The layers of a `decoder` that has the first ones alone, for a Runner: it shows taps, and nothing else."""

    features_width = 0

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self.spec = decoder, decoder.spec
        self.num_adapter_slots = decoder.num_adapter_slots

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        kv: list[Tensor],
        plan: Any,
        taps: tuple[int, ...] = (),
        features: Tensor | None = None,
        slots: RowSlots | None = None,
    ) -> Computed:
        own = None if slots is None else slots.rows
        return *_no_scores(), self._decoder.run_first(token_ids, positions, kv, plan, taps, own)


class LaterStage(AdaptedModel):
    """Layers of a decoder after the first stage's, for a Runner: its features are the residual stream before them,
    float32 [rows, hidden], which is overwritten. It shows taps, and nothing else. `spec`, `weights` and the rest are as
    a Decoder is given them."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Mapping[str, Weight],
        ops: Ops,
        cached: PackedCache = uncached,
        peers: Peers | None = None,
        *,
        layers: range,
    ) -> None:
        read = WeightReader(spec.shapes(), weights, ops, cached, peers)
        self._stack, self.layers = LayerStack(read, spec, "model.", layers), layers
        self.features_width = spec.hidden_size
        super().__init__(spec, ops, read.products, None)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        kv: list[Tensor],
        plan: Any,
        taps: tuple[int, ...] = (),
        features: Tensor | None = None,
        slots: RowSlots | None = None,
    ) -> Computed:
        assert features is not None, "a later stage reads what the one before it computed"
        own = None if slots is None else slots.rows
        return *_no_scores(), self._stack.run_through(self.ops, features, positions, kv, plan, taps, slots=own)[1]


def _no_scores() -> tuple[Tensor, Tensor, Tensor]:
    """Of no rows."""
    return torch.empty(0, 0), torch.empty(0, 0), torch.empty(0, dtype=torch.int64)
