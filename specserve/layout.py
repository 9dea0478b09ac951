"""Whether replicas and a model's processes suit this machine and a model: cores, memory, heads. Reads no weights."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from specserve.cache.sizing import GIB, MAX_SHARE
from specserve.checkpoint.entries import WEIGHT_BITS
from specserve.checkpoint.fitting import WORK_BYTES
from specserve.errors import CapacityError, ConfigError, SpecserveError
from specserve.machine.cores import THREADS, default_threads, usable_cores
from specserve.models.loader import native_spec
from specserve.models.sharding import Shard, divided_experts, sharded
from specserve.models.spec import DecoderSpec
from specserve.models.stages import divided
from specserve.ops import Ops

Row = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Layout:
    """`num_replicas` engines, each of `num_ranks` processes that compute at the same time with `threads` threads; None:
    a share of the cores. A model's layers are in `num_stages`, each of so many processes; stages share cores. With
    `divides_experts` each engine has some of the experts."""

    num_replicas: int = 1
    num_ranks: int = 1
    threads: int | None = None
    num_stages: int = 1
    divides_experts: bool = False

    @property
    def num_processes(self) -> int:
        """That compute at the same time."""
        return self.num_replicas * self.num_ranks

    @property
    def is_divided(self) -> bool:
        return self.num_processes * self.num_stages > 1


def check(
    layout: Layout, folder: Path | None, ops: Ops, device: str, free: int
) -> tuple[list[Row], list[SpecserveError]]:
    """What there is to say of it, line by line, and what keeps it from starting. `folder` is the model's, None: it is
    not here. `ops` are those that an engine on `device` takes, `free` its free bytes."""
    rows = [("processes", _processes(layout))]
    faults: list[SpecserveError] = []
    if layout.is_divided and not device.startswith("cpu"):
        faults.append(
            ConfigError(
                f"Replicas and divided models share a CPU, and an engine here takes {device}: start with --device cpu."
            )
        )
    if folder is None:
        return [*rows, ("model", "not here, so heads and memory are not looked at; specserve pull fetches it")], faults
    try:
        spec = native_spec(folder)
    except SpecserveError as error:
        if layout.num_ranks * layout.num_stages > 1 or layout.divides_experts:
            faults.append(error)
        return [*rows, ("model", f"not looked at: {error}")], faults
    parts: list[tuple[str, bool, Callable[[], str]]] = [
        ("KV heads", layout.num_ranks > 1, lambda: _heads(spec, layout.num_ranks)),
        ("layers", layout.num_stages > 1, lambda: _stages(spec, layout.num_stages)),
        ("experts", layout.divides_experts, lambda: _experts(spec, layout.num_replicas)),
    ]
    for name, is_asked, divide in parts:
        try:
            rows += [(name, divide())] if is_asked else []
        except SpecserveError as error:
            rows.append((name, str(error)))
            faults.append(error)
    line, too_large = _memory(layout, spec, ops, free)
    return [*rows, ("memory", line)], [*faults, *([] if too_large is None else [too_large])]


def _processes(layout: Layout) -> str:
    cores, number = usable_cores(), layout.num_processes
    share = max(1, cores // number)
    threads = layout.threads or (default_threads() if os.environ.get(THREADS) else share)
    each = f"{layout.num_ranks} of each model" if layout.num_ranks > 1 else "one of each model"
    plural = "s" if threads > 1 else ""
    what = (
        f"{number} ({layout.num_replicas} replicas, {each}) with {threads} thread{plural} each, on {cores} usable cores"
    )
    if threads * number <= cores:
        return what
    if number > cores:
        return f"{what}: more processes than cores, which slow each other down; start at most {cores}"
    return f"{what}: more threads than cores, which slow each other down; --threads {share} is each one's share"


def _heads(spec: DecoderSpec, num_ranks: int) -> str:
    """How they are divided. Raises ConfigError where they cannot be."""
    shards = [Shard(rank, num_ranks) for rank in range(num_ranks)]
    for shard in shards:
        sharded(spec, shard)
    kinds = dict.fromkeys(layer.attention for layer in spec.layers)
    return "; ".join(" + ".join(str(len(shard.heads(kind)[1])) for shard in shards) for kind in kinds)


def _stages(spec: DecoderSpec, num_stages: int) -> str:
    """Raises ConfigError where there are too few layers."""
    return f"{spec.num_layers} in {len(divided([1] * spec.num_layers, 0, num_stages))} stages"


def _experts(spec: DecoderSpec, num_replicas: int) -> str:
    """Of each layer, by replica. Raises ConfigError where they cannot be divided."""
    numbers = dict.fromkeys(mlp.num_experts for mlp in divided_experts(spec, num_replicas))
    shards = [Shard(rank, num_replicas) for rank in range(num_replicas)]
    return "; ".join(" + ".join(str(len(shard.of(number))) for shard in shards) for number in numbers)


def _memory(layout: Layout, spec: DecoderSpec, ops: Ops, free: int) -> tuple[str, CapacityError | None]:
    """An estimate: what weights take, and how many tokens are left for each engine's KV cache."""
    copies = 1 if ops.quantization != "none" else layout.num_replicas  # packed weights are mapped by all
    weights = copies * sum(_weight_bytes(spec, ops, layout.num_ranks))
    per_token = sum(2 * heads * width * ops.kv_dtype.itemsize for heads, width in spec.kv_shapes)
    shared = max(
        1, math.ceil(layout.num_ranks / min(each[0] for each in spec.kv_shapes))
    )  # ranks with the same KV head
    left = (free - weights) / layout.num_replicas - WORK_BYTES
    tokens = max(0, int(left * MAX_SHARE / (per_token * shared)))
    line = (
        f"weights take about {weights / GIB:.1f} GiB in all, of {free / GIB:.1f} GiB that are free; each engine's KV "
        f"cache has {max(0.0, left * MAX_SHARE) / GIB:.1f} GiB, {tokens:,} tokens"
    )
    if tokens >= spec.max_len:
        return line, None
    if tokens == 0:
        what = "Start fewer replicas, free some memory, or take a smaller model or --quantization int4."
    else:
        what = f"Start with --max-model-len {tokens // 16 * 16 or 16}, or fewer replicas."
    return line, CapacityError(f"One context of {spec.max_len:,} tokens does not fit: {line}. {what}")


def _weight_bytes(spec: DecoderSpec, ops: Ops, num_ranks: int) -> Iterator[float]:
    """Of each tensor, in all processes of a model: tables are in each, products divided among them."""
    dtype = str(ops.dtype).removeprefix("torch.")
    kind = dtype if ops.quantization == "none" else ops.quantization
    for name, shape in spec.shapes().items():
        count = math.prod(shape)
        if not name.startswith("model.layers."):
            yield count * WEIGHT_BITS[dtype] / 8 * num_ranks
            if "embed_tokens" in name and spec.tied_embeddings:  # the LM head has them packed
                yield count * WEIGHT_BITS[kind] / 8
        else:
            yield count * WEIGHT_BITS[kind if len(shape) > 1 else dtype] / 8
