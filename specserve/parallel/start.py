"""Starts a model in several processes, as a configuration says."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

from specserve.cache.sizing import free_memory
from specserve.checkpoint.identity import model_digest
from specserve.config import EngineConfig
from specserve.errors import ConfigError
from specserve.models.loader import check_memory, native_spec, outline
from specserve.models.sharding import sharded
from specserve.models.spec import DecoderSpec, shorten
from specserve.models.stages import divided
from specserve.ops import Ops
from specserve.ops.device import check_number
from specserve.parallel.address import Address
from specserve.parallel.hosts import Gate
from specserve.parallel.joined_ranks import JoinedRanks
from specserve.parallel.layout import Layout
from specserve.parallel.ranks import Ranks
from specserve.parallel.security import read_secret


def start_ranks(config: EngineConfig, folder: Path, ops: Ops, threads: int, pulse: int = -1) -> Ranks | None:
    """The other processes of the model in `folder`, which load their parts while this one loads its own; None: it has
    no others. `pulse` is as EngineSpawner has it, or -1. Raises ConfigError for a model, or for kernels, that cannot be
    divided so, and CapacityError."""
    size, num_stages, max_len = config.tensor_parallel_size, config.pipeline_parallel_size, config.max_model_len
    if size * num_stages == 1:
        return None
    ops.peers(mmap.mmap(-1, mmap.PAGESIZE), 0, 1)  # kernels that have none say so before anything is begun
    if is_on_gpu := ops.device.type != "cpu":
        check_gpus(config, ops.device)
    spec = native_spec(folder)
    spec = spec if max_len is None else shorten(spec, max_len)
    layout = Layout(size, stages_of(spec, size, num_stages, ops))
    for rank in range(size):
        sharded(spec, layout.shard(rank))
    if config.ranks_listen is None:  # else each loads on a host of its own, and looks itself
        check_memory(spec, ops, free_memory(ops.device) * (size if is_on_gpu else 1))
    ranks = _begun(config, folder, layout, spec, ops, pulse)
    try:
        ranks.load(folder, config.dtype, max_len, threads)
    except BaseException:
        ranks.close()
        raise
    return ranks


def check_gpus(config: EngineConfig, device: torch.device) -> None:
    """Raises ConfigError for what processes with a GPU each do not do, and where there are too few of these."""
    on_gpus = "processes with a GPU each divide layers, with --tensor-parallel-size, on one host."
    if config.pipeline_parallel_size > 1:
        raise ConfigError(f"--pipeline-parallel-size: {on_gpus}")
    if config.ranks_listen is not None:
        raise ConfigError(f"--ranks-listen: {on_gpus}")
    if config.attention == "flash":
        raise ConfigError(
            "--attention flash: several GPUs compute it exactly, as all have to do it alike. Leave it out."
        )
    check_number(device, config.tensor_parallel_size)


def _begun(config: EngineConfig, folder: Path, layout: Layout, spec: DecoderSpec, ops: Ops, pulse: int) -> Ranks:
    if config.ranks_listen is None:
        return Ranks(layout, spec, ops, config.max_num_batched_tokens, pulse)
    address = Address.parse(config.ranks_listen, "--ranks-listen")
    secret = read_secret(Path(config.ranks_secret_file or ""), "--ranks-secret-file")
    return JoinedRanks(layout, spec, ops, Gate(address, secret, config.model, model_digest(folder)))


def stages_of(spec: DecoderSpec, size: int, num_stages: int, ops: Ops) -> tuple[range, ...]:
    """Which layers each stage has, so that the one that reads most weights in a step reads few. Raises ConfigError
    where there are more stages than layers."""
    if num_stages == 1:
        return (range(spec.num_layers),)
    found = outline(spec, ops)
    read = found.other_bytes - found.table_bytes
    return tuple(divided([each // size for each in found.layer_bytes], read // size, num_stages))
