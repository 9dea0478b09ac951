"""Whether replicas and a model's processes suit this machine and a model: cores, memory, heads. Reads no weights."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from specserve.cache.sizing import GIB, logit_rows, own_memory, plan_blocks, step_bytes
from specserve.cache.storage import KVShape, KVStorage
from specserve.config import EngineConfig
from specserve.errors import CapacityError, ConfigError, SpecserveError
from specserve.machine.cores import THREADS, default_threads, usable_cores
from specserve.models.loader import check_tensors, native_spec, part_bytes
from specserve.models.sharding import Shard, divided_experts, sharded
from specserve.models.spec import DecoderSpec, shorten
from specserve.ops import Ops
from specserve.parallel.layout import Layout as Parts
from specserve.parallel.start import check_gpus, stages_of

Row = tuple[str, str]

# Of processes beside the engines, without torch, as measured with SmolLM2 and with a model of few tokens.
_API_BYTES = 95 * 2**20  # one that answers HTTP, with those that render chat templates
_COORDINATOR_BYTES = 60 * 2**20  # of several such
_TOKENIZER_BYTES = 600  # of a token of the vocabulary, in each process that tokenizes
_TOKENIZERS_OF_API = 2  # its own, and what its copies do not share
_LIBRARY_BYTES = 105 * 2**20  # torch's, which all engines map


@dataclass(frozen=True, slots=True)
class Layout:
    """`num_replicas` engines as `config` says, of which the last `num_prefill` compute prompts for the others, or in
    their place `num_elsewhere` at other addresses; and `num_api_processes` that answer HTTP. With `divides_experts`
    each engine has some of the experts."""

    config: EngineConfig
    num_replicas: int = 1
    num_prefill: int = 0
    num_api_processes: int = 1
    num_elsewhere: int = 0
    divides_experts: bool = False

    @property
    def num_ranks(self) -> int:
        """Processes of a model that compute at the same time."""
        return self.config.tensor_parallel_size

    @property
    def num_stages(self) -> int:
        return self.config.pipeline_parallel_size

    @property
    def is_apart(self) -> bool:
        """Whether each process of the model is on a host of its own."""
        return self.config.ranks_listen is not None

    @property
    def num_here(self) -> int:
        """Processes of engines on this machine that compute at the same time."""
        return self.num_replicas * (1 if self.is_apart else self.num_ranks)

    @property
    def is_divided(self) -> bool:
        sizes = self.num_replicas, self.num_ranks, self.num_stages, self.num_api_processes
        return max(sizes) > 1 or self.num_elsewhere > 0


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes on this machine: `weights` of all processes, what several map counted once; what `processes` take besides;
    `step` that steps work on at most, and the `kv` cache of each engine, and `why` so much."""

    weights: int
    processes: int
    step: int
    kv: int
    why: str


def check(
    layout: Layout, folder: Path | None, ops: Ops, device: str, free: int
) -> tuple[list[Row], list[SpecserveError]]:
    """What there is to say of it, line by line, and what keeps it from starting. `folder` is the model's, None: it is
    not here. `ops` are those that an engine on `device` takes, `free` its free bytes."""
    if layout.num_elsewhere:
        return [("processes", _elsewhere(layout))], []
    rows = [("processes", _processes(layout))]
    faults: list[SpecserveError] = []
    if not device.startswith("cpu"):
        faults += _gpu_faults(layout, device)
    if layout.num_ranks * layout.num_stages > 1:
        try:
            ops.peers(mmap.mmap(-1, mmap.PAGESIZE), 0, 1)
        except ConfigError as error:  # kernels that compute no model in several processes
            faults.append(error)
    if folder is None:
        return [*rows, ("model", "not here, so heads and memory are not looked at; specserve pull fetches it")], faults
    try:
        spec = native_spec(folder)
    except SpecserveError as error:
        if layout.num_ranks * layout.num_stages > 1 or layout.divides_experts:
            faults.append(error)
        return [*rows, ("model", f"not looked at: {error}")], faults
    if not faults:
        found, faults = _divided(layout, spec, ops)
        rows += found
    if faults:  # there are no parts whose memory could be told
        return rows, faults
    try:
        rows += _memory(estimate(layout, folder, ops, free), layout, free, ops.device.type != "cpu")
        if layout.is_apart:
            rows.append(("other hosts", _other_hosts(layout, folder, ops)))
    except CapacityError as error:
        rows.append(("memory", str(error)))
        faults.append(error)
    return rows, faults


def _elsewhere(layout: Layout) -> str:
    return (
        f"{_api(layout)}; no engine here, {layout.num_elsewhere} at other addresses: run specserve doctor on their "
        "machines, with their options"
    )


def _api(layout: Layout) -> str:
    several = layout.num_api_processes > 1
    return f"{layout.num_api_processes} that answer HTTP, and a coordinator" if several else "1 that answers HTTP"


def _processes(layout: Layout) -> str:
    cores, number = usable_cores(), layout.num_here
    share = max(1, cores // number)
    threads = layout.config.threads or (default_threads() if os.environ.get(THREADS) else share)
    kinds = f"{layout.num_replicas} replicas" if layout.num_replicas > 1 else "one engine"
    if layout.num_prefill:
        kinds += f", {layout.num_prefill} of which compute prompts for the others"
    if layout.is_apart:
        kinds = f"of the {layout.num_ranks} of the model, each on a host of its own"
    else:
        kinds += f", {layout.num_ranks} of each model" if layout.num_ranks > 1 else ", one of each model"
    what = f"{number} ({kinds}) with {threads} thread{'s' if threads > 1 else ''} each, on {cores} usable cores"
    if layout.num_api_processes > 1:
        what += f"; {_api(layout)}"
    if threads * number <= cores:
        return what
    if number > cores:
        return f"{what}: more processes than cores, which slow each other down; start at most {cores}"
    return f"{what}: more threads than cores, which slow each other down; --threads {share} is each one's share"


def _gpu_faults(layout: Layout, device: str) -> list[SpecserveError]:
    """Why these processes do not compute on GPUs from this one on."""
    if layout.num_replicas > 1:
        said = f"Replicas share a CPU, and an engine here takes {device}: start with --device cpu, or one server a GPU."
        return [ConfigError(said)]
    try:
        if layout.num_ranks * layout.num_stages > 1:
            check_gpus(layout.config, torch.device(device))
    except ConfigError as error:
        return [error]
    return []


def _divided(layout: Layout, spec: DecoderSpec, ops: Ops) -> tuple[list[Row], list[SpecserveError]]:
    """How heads, layers and experts are, and why they cannot be."""
    rows, faults = list[Row](), list[SpecserveError]()
    parts: list[tuple[str, bool, Callable[[], str]]] = [
        ("KV heads", layout.num_ranks > 1, lambda: _heads(spec, layout.num_ranks)),
        ("layers", layout.num_stages > 1, lambda: _layers(layout, spec, ops)),
        ("experts", layout.divides_experts, lambda: _experts(spec, layout.num_replicas)),
    ]
    for name, is_asked, divide in parts:
        try:
            rows += [(name, divide())] if is_asked else []
        except SpecserveError as error:
            rows.append((name, str(error)))
            faults.append(error)
    return rows, faults


def _layers(layout: Layout, spec: DecoderSpec, ops: Ops) -> str:
    """Of each stage. Raises ConfigError where there are too few."""
    stages = _whole(layout, spec, ops).stages
    return f"{' + '.join(str(len(stage)) for stage in stages)} in {len(stages)} stages"


def _heads(spec: DecoderSpec, num_ranks: int) -> str:
    """How they are divided. Raises ConfigError where they cannot be."""
    shards = [Shard(rank, num_ranks) for rank in range(num_ranks)]
    for shard in shards:
        sharded(spec, shard)
    kinds = dict.fromkeys(layer.attention for layer in spec.layers)
    return "; ".join(" + ".join(str(len(shard.heads(kind)[1])) for shard in shards) for kind in kinds)


def _experts(spec: DecoderSpec, num_replicas: int) -> str:
    """Of each layer, by replica. Raises ConfigError where they cannot be divided."""
    numbers = dict.fromkeys(mlp.num_experts for mlp in divided_experts(spec, num_replicas))
    shards = [Shard(rank, num_replicas) for rank in range(num_replicas)]
    return "; ".join(" + ".join(str(len(shard.of(number))) for shard in shards) for number in numbers)


def estimate(layout: Layout, folder: Path, ops: Ops, free: int) -> Estimate:
    """What engines of a native model take that are started with so many bytes free, and the processes beside them; on
    GPUs that have so many free each, what the fullest of them holds. Drafters that run models, and adapters, are not in
    it. Raises CapacityError where it is not there."""
    config, number = layout.config, layout.num_replicas
    tensors, spec = check_tensors(folder), _spec(layout, folder)
    whole = _whole(layout, spec, ops)
    ranks = range(1 if layout.is_apart else whole.size)
    parts = [part_bytes(tensors, spec, ops, whole.shard(rank), whole.layers(rank)) for rank in ranks]
    is_on_gpu = ops.device.type != "cpu"
    weights = (max if is_on_gpu else sum)([part.mapped + number * part.own for part in parts])
    tokenizer = _TOKENIZER_BYTES * spec.vocab_size
    # A process of an engine has for itself what this one has: the interpreter, torch and the modules of an engine.
    processes = number * (len(ranks) * own_memory() + tokenizer) + _LIBRARY_BYTES + _beside(layout, tokenizer)
    processes = 0 if is_on_gpu else processes
    rows = config.max_num_batched_tokens
    step = step_bytes(rows, spec.step_width, logit_rows(spec.vocab_size, config.max_num_seqs, rows), spec.vocab_size)
    left = free - weights - processes - number * step
    if left <= 0:
        raise CapacityError(
            f"Weights take {_gib(weights)}, processes {_gib(processes)} and steps {_gib(number * step)}, and "
            f"{_gib(free)} are free. {_less(layout)}."
        )
    shapes = [_kv_shapes(spec, whole, rank) for rank in ranks]
    per_block = (max if is_on_gpu else sum)(
        [KVStorage.bytes_per_block(each, config.block_size, ops.kv_dtype) for each in shapes]
    )
    limits = config.block_size, spec.max_len, config.max_num_seqs, config.kv_cache_gib
    try:
        num_blocks, why = plan_blocks(left // number, per_block, *limits)
    except CapacityError as error:
        raise CapacityError(f"{error} Or: {_less(layout)}.") from error
    return Estimate(weights, processes, number * step, num_blocks * per_block, why.rpartition(", ")[0])


def _spec(layout: Layout, folder: Path) -> DecoderSpec:
    spec, max_len = native_spec(folder), layout.config.max_model_len
    return spec if max_len is None else shorten(spec, max_len)


def _whole(layout: Layout, spec: DecoderSpec, ops: Ops) -> Parts:
    return Parts(layout.num_ranks, stages_of(spec, layout.num_ranks, layout.num_stages, ops))


def _kv_shapes(spec: DecoderSpec, whole: Parts, rank: int) -> list[KVShape]:
    layers = whole.layers(rank)
    return sharded(spec, whole.shard(rank)).kv_shapes[layers.start : layers.stop]


def _beside(layout: Layout, tokenizer: int) -> int:
    """Of the processes beside engines."""
    number = layout.num_api_processes
    coordinator = _COORDINATOR_BYTES if number > 1 else 0
    return coordinator + number * (_API_BYTES + _TOKENIZERS_OF_API * tokenizer)


def _less(layout: Layout) -> str:
    few = "fewer replicas, " if layout.num_replicas > 1 else ""
    return f"Start {few}a smaller model or --quantization int4, or free some memory"


def _memory(found: Estimate, layout: Layout, free: int, is_on_gpu: bool) -> list[Row]:
    where = "on each GPU" if is_on_gpu else "on this host" if layout.is_apart else "in all"
    beside = f"weights {_gib(found.weights)}, processes {_gib(found.processes)}, steps up to {_gib(found.step)} {where}"
    caches = "of each engine" if layout.num_replicas > 1 else "of the engine"
    if layout.num_ranks * layout.num_stages > 1:
        part = "each process's part" if is_on_gpu else "this process's part"
        caches += f", {part}" if is_on_gpu or layout.is_apart else ", all its processes together"
    return [
        ("memory", f"{beside}, of {_gib(free)} that are free, without drafters' models and adapters"),
        ("KV cache", f"{caches}: {found.why.removeprefix('KV cache: ')}"),
    ]


def _other_hosts(layout: Layout, folder: Path, ops: Ops) -> str:
    """What each needs where it has a cache of as many tokens as this one."""
    tensors, spec = check_tensors(folder), _spec(layout, folder)
    whole = _whole(layout, spec, ops)
    parts = [part_bytes(tensors, spec, ops, whole.shard(rank), whole.layers(rank)) for rank in range(1, whole.size)]
    shapes = [_kv_shapes(spec, whole, rank) for rank in range(whole.size)]
    kv = [KVStorage.bytes_per_block(each, 1, ops.kv_dtype) for each in shapes]
    return (
        f"{whole.size - 1}, each with specserve rank --join {layout.config.ranks_listen}: weights up to "
        f"{_gib(max(sum(part) for part in parts))}, the process {_gib(own_memory() + _LIBRARY_BYTES)}, and for the KV "
        f"cache up to {max(kv[1:]) / kv[0]:.2f} of what this host's takes"
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
