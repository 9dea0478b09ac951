"""Builds an engine from its configuration: device, kernels, weights, cache, sampler, drafter, each from its own place.
The only function that sees all the parts."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from specserve.cache.cache import KVCache
from specserve.cache.sizing import free_memory, plan_blocks
from specserve.cache.storage import KVStorage
from specserve.config import EngineConfig
from specserve.engine.engine import Engine
from specserve.engine.request import Limits
from specserve.engine.scheduler import Scheduler
from specserve.errors import ConfigError
from specserve.models import catalog
from specserve.models.loader import load_model
from specserve.models.tokenizer import Tokenizer
from specserve.ops import Ops
from specserve.runtime.runner import Runner
from specserve.sampling.sampler import Sampler
from specserve.speculation.base import DraftHost, create


@dataclass(slots=True)
class Built:
    """A ready engine, and what was chosen for it."""

    engine: Engine
    tokenizer: Tokenizer
    device: str
    dtype: str
    threads: int
    summary: str  # one line for people


def build(config: EngineConfig, *, progress: bool = False) -> Built:
    """Load everything a configuration names. Raises ConfigError, ModelError or CapacityError before any request."""
    drafter = create(config.drafter, config.drafter_options)  # a wrong name must not cost a model load
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    ops = choose_ops(choose_device(config.device), config.dtype)
    folder = catalog.resolve(config.model, progress=progress)
    tokenizer = Tokenizer(folder)
    model = load_model(folder, ops, config.max_model_len)
    spec = model.spec
    per_block = KVStorage.bytes_per_block(
        spec.num_layers, config.block_size, spec.num_kv_heads, spec.head_dim, ops.dtype
    )
    num_blocks, chosen = plan_blocks(
        free_memory(ops.device), per_block, config.block_size, spec.max_len, config.max_num_seqs, config.kv_cache_gib
    )
    storage = KVStorage(
        spec.num_layers, num_blocks, config.block_size, spec.num_kv_heads, spec.head_dim, ops.dtype, ops.device
    )
    cache = KVCache(storage, config.prefix_caching)
    engine = Engine(
        Runner(model, ops, storage),
        cache,
        Scheduler(cache, config.max_num_seqs, config.max_num_batched_tokens, spec.max_len),
        Sampler(spec.vocab_size, config.verification, ops.device),
        DraftHost(drafter, spec.vocab_size, config.drafter_timeout_s),
        Limits(spec.vocab_size, spec.max_len, tokenizer.eos_ids),
        config.num_speculative_tokens,
    )
    dtype = str(ops.dtype).removeprefix("torch.")
    summary = f"{config.model} in {dtype} on {ops.device} ({ops.name} kernels); {chosen}"
    return Built(engine, tokenizer, str(ops.device), dtype, torch.get_num_threads(), summary)


def choose_device(name: str) -> torch.device:
    """The device a name stands for, "auto" too. Raises ConfigError for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device {name!r} is not a device. Use auto, cpu, cuda or cuda:N.") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name!r} is not supported. Use auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda was asked for, but torch sees no CUDA device here. Use --device cpu.")
    return device


def choose_ops(device: torch.device, dtype: str) -> Ops:
    """The kernels that serve a device, in the asked dtype or the fastest one."""
    backend: Any = importlib.import_module("specserve.kernels.reference")
    chosen = getattr(torch, dtype if dtype != "auto" else auto_dtype(device))
    ops: Ops = backend.Kernels(device, chosen)
    return ops


def auto_dtype(device: torch.device) -> str:
    """bfloat16 where the device multiplies it natively, else float32: an emulated bfloat16 is slower than float32."""
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"
