"""Tensor parallelism (arXiv 1909.08053): which heads, features and LM head rows each of several processes has."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specserve.errors import ConfigError
from specserve.models.positions import Alibi
from specserve.models.spec import AttentionSpec, DecoderSpec, ExpertsMlp, LayerSpec
from specserve.ops.packing import Weight, cut

EXPERTS_OPTION = "--enable-expert-parallel"
_OPTION = "--tensor-parallel-size"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(q|k|v|o|gate|up|down)_proj\.(weight|bias)")
_UNITS = (128, 64, 32, 16, 8, 4, 2, 1)  # features that stay together, the largest that divides them fairly


@dataclass(frozen=True, slots=True)
class Shard:
    """One process's part of a model: that of `rank`, of `size`."""

    rank: int
    size: int

    def of(self, count: int) -> range:
        """Its part of so many, where all parts are as even as can be."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def features(self, count: int) -> range:
        """Its part of so many features. Raises ConfigError where there are fewer than processes."""
        if count < self.size:
            raise ConfigError(
                f"{_OPTION} is {self.size}, and the model has an MLP of {count} features: it may be {count}."
            )
        unit = next(each for each in _UNITS if (count % each == 0 and count // each >= 4 * self.size) or each == 1)
        own = self.of(count // unit)
        return range(own.start * unit, own.stop * unit)

    def heads(self, spec: AttentionSpec) -> tuple[range, range]:
        """Its query heads and its KV heads, which several have where there are fewer than processes. Raises ConfigError
        where they do not divide."""
        group, size = spec.num_heads // spec.num_kv_heads, self.size
        if spec.num_kv_heads >= size:
            own = self.of(spec.num_kv_heads)
            return range(own.start * group, own.stop * group), own
        together = size // spec.num_kv_heads  # processes that have the same KV head
        if size % spec.num_kv_heads or group % together:
            fitting = [n for n in range(1, spec.num_heads + 1) if _divides(n, spec)]
            raise ConfigError(
                f"{_OPTION} is {size}, and the model has {spec.num_heads} query heads for {spec.num_kv_heads} KV "
                f"heads; it may be {', '.join(map(str, fitting))}."
            )
        kv, place = divmod(self.rank, together)
        start = kv * group + place * (group // together)
        return range(start, start + group // together), range(kv, kv + 1)


def _divides(size: int, spec: AttentionSpec) -> bool:
    kv, group = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
    return size <= kv or (size % kv == 0 and group % (size // kv) == 0)


def sharded(spec: DecoderSpec, shard: Shard) -> DecoderSpec:
    """What a process computes of a model: its layers with fewer heads and features. Raises ConfigError for what cannot
    be divided."""
    if shard.size == 1:
        return spec
    return dataclasses.replace(spec, layers=tuple(_layer(layer, shard) for layer in spec.layers))


def _layer(layer: LayerSpec, shard: Shard) -> LayerSpec:
    attention, position = layer.attention, layer.position
    if attention.joint_norm is not None:
        raise ConfigError(f"{_OPTION}: models whose query heads are normed together (OLMo 2) run in one process.")
    q, kv = shard.heads(attention)
    if isinstance(position, Alibi):
        position = Alibi(position.slopes[q.start : q.stop])
    mlp = layer.mlp
    if isinstance(mlp, ExpertsMlp):
        shared = mlp.shared and dataclasses.replace(mlp.shared, size=len(shard.features(mlp.shared.size)))
        mlp = dataclasses.replace(mlp, size=len(shard.features(mlp.size)), shared=shared)
    else:
        mlp = dataclasses.replace(mlp, size=len(shard.features(mlp.size)))
    own = dataclasses.replace(attention, num_heads=len(q), num_kv_heads=len(kv))
    return dataclasses.replace(layer, attention=own, position=position, mlp=mlp)


def sharded_part(spec: DecoderSpec, name: str, shard: Shard) -> tuple[int, range] | None:
    """Of which axis of a tensor a process has which part: rows of what queries, keys, values, gates, ups and the LM
    head's scores come from, columns of what reads those. None: it has all of it. `spec` is that of the whole model."""
    if name == "lm_head.weight":
        return 0, shard.features(spec.vocab_size)
    found = _LAYER.fullmatch(name)
    if found is None:
        return None
    layer, within = spec.layers[int(found[1])], found[2]
    axis = 1 if found[3] in ("o", "down") else 0
    if within == "self_attn":
        q, kv = shard.heads(layer.attention)
        own, d = (kv if found[3] in ("k", "v") else q), layer.attention.head_dim
        return axis, range(own.start * d, own.stop * d)
    mlp = layer.mlp
    shared = mlp.shared if isinstance(mlp, ExpertsMlp) and "shared" in within else None
    return axis, shard.features(mlp.size if shared is None else shared.size)


def divided_experts(spec: DecoderSpec, size: int) -> list[ExpertsMlp]:
    """The MLPs whose experts so many replicas of a model have some of each, as Shard.of says. Raises ConfigError for a
    model that has none, or fewer than replicas."""
    mlps = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, ExpertsMlp)]
    if not mlps:
        raise ConfigError(f"{EXPERTS_OPTION}: this model has no experts to divide. Leave the option out.")
    fewest = min(mlp.num_experts for mlp in mlps)
    if size > fewest:
        raise ConfigError(
            f"--data-parallel-size is {size}, and the model has {fewest} experts in a layer: with {EXPERTS_OPTION} it "
            f"may be at most {fewest}."
        )
    return mlps


class ShardedWeights(Mapping[str, Weight]):
    """The part of the tensors of a model's layers that a process has, under the same names. The bias of a product whose
    columns are divided has the first process alone; the LM head's rows a Decoder takes itself."""

    def __init__(self, spec: DecoderSpec, weights: Mapping[str, Weight], shard: Shard) -> None:
        self._spec, self._weights, self._shard = spec, weights, shard

    def __getitem__(self, name: str) -> Weight:
        weight = self._weights[name]
        part = None if name.startswith("lm_head") else sharded_part(self._spec, name, self._shard)
        if part is None:
            return weight
        axis, own = part
        if name.endswith(".bias") and axis == 1:
            assert isinstance(weight, Tensor), "a bias is not quantised"
            return weight if self._shard.rank == 0 else torch.zeros_like(weight)
        return cut(weight, axis, own)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
