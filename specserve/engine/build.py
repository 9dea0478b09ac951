"""Builds an engine from its configuration: device, kernels, weights, cache, sampler, drafter, each from its own place.
The only function that sees all the parts."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from specserve.cache.cache import KVCache
from specserve.cache.sizing import free_memory, logit_rows, plan_blocks, step_bytes
from specserve.cache.storage import KVStorage
from specserve.checkpoint import catalog
from specserve.config import EngineConfig
from specserve.engine.engine import Engine
from specserve.engine.request import Limits
from specserve.engine.scheduler import Scheduler
from specserve.errors import ConfigError
from specserve.machine.cores import usable_cores
from specserve.models.loader import load_model
from specserve.ops import Ops
from specserve.ops.isa import choose_isa
from specserve.runtime.runner import Runner
from specserve.sampling.sampler import Sampler
from specserve.speculation.base import DraftHost, create
from specserve.speculation.drafters import Drafters
from specserve.structured.compiler import Compiler, check_backend
from specserve.structured.vocabulary import vocabulary
from specserve.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Built:
    """A ready engine, and what was chosen for it."""

    engine: Engine
    tokenizer: Tokenizer
    compiler: Compiler
    device: str
    dtype: str
    quantization: str
    threads: int
    summary: str  # one line for people


def build(config: EngineConfig, *, progress: bool = False) -> Built:
    """Load everything a configuration names. Raises ConfigError, ModelError or CapacityError before any request."""
    drafter = create(config.drafter, config.drafter_options)  # a wrong name must not cost a model load
    check_backend(config.grammar_backend)
    threads = config.threads or usable_cores()
    ops = choose_ops(choose_device(config.device), config.dtype, config.quantization, threads, config.isa)
    # Native kernels have threads of their own, and torch's would spin beside them for what little is left to torch.
    torch.set_num_threads(1 if ops.can_record and ops.device.type == "cpu" else threads)
    folder = catalog.resolve(config.model, progress=progress)
    tokenizer = Tokenizer(folder)
    model = load_model(folder, ops, config.max_model_len, progress=progress)
    spec = model.spec
    per_block = KVStorage.bytes_per_block(
        spec.num_layers, config.block_size, spec.num_kv_heads, spec.head_dim, ops.dtype
    )
    num_logit_rows = logit_rows(spec.vocab_size, config.max_num_seqs, config.max_num_batched_tokens)
    taken = step_bytes(config.max_num_batched_tokens, spec.step_width, num_logit_rows, spec.vocab_size)
    free = max(0, free_memory(ops.device) - taken - model.num_mapped_bytes)  # mapped weights pass for free memory
    num_blocks, chosen = plan_blocks(
        free, per_block, config.block_size, spec.max_len, config.max_num_seqs, config.kv_cache_gib
    )
    storage = KVStorage(
        spec.num_layers,
        num_blocks,
        config.block_size,
        spec.num_kv_heads,
        spec.head_dim,
        ops.dtype,
        ops.device,
        ops.copy_kv,
    )
    cache = KVCache(storage, config.prefix_caching)
    engine = Engine(
        Runner(model, ops, storage, config.max_num_batched_tokens, num_logit_rows),
        cache,
        Scheduler(
            cache,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            spec.max_len,
            num_logit_rows,
            None if config.max_step_ms is None else config.max_step_ms / 1000,
        ),
        Sampler(spec.vocab_size, config.verification, ops),
        Drafters(DraftHost(drafter, spec.vocab_size, config.drafter_timeout_s, config.drafter)),
        Limits(spec.vocab_size, spec.max_len, tokenizer.eos_ids),
        config.num_speculative_tokens,
    )
    dtype = str(ops.dtype).removeprefix("torch.")
    weights = dtype if ops.quantization == "none" else ops.quantization
    isa = f", {ops.instruction_set}" if ops.instruction_set else ""
    summary = f"{config.model} in {weights} on {ops.device} ({ops.name} kernels{isa}); {chosen}"
    compiler = Compiler(lambda: vocabulary(tokenizer, spec.vocab_size), config.grammar_backend)
    return Built(engine, tokenizer, compiler, str(ops.device), dtype, ops.quantization, threads, summary)


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


def choose_ops(device: torch.device, dtype: str, quantization: str, threads: int, isa: str = "auto") -> Ops:
    """The kernels that serve a device: native ones on a CPU where they are built, else the reference. "auto" is the
    fastest. Raises ConfigError for weights or an instruction set that they do not have."""
    native = _backend("cpu") if device.type == "cpu" else None
    kernels: Any = native or importlib.import_module("specserve.kernels.reference")
    isa = choose_isa(isa, kernels.instruction_sets() if device.type == "cpu" else (), kernels.Kernels.name)
    chosen = getattr(torch, dtype if dtype != "auto" else auto_dtype(device, isa))
    if native is not None:
        wanted = ("int8" if dtype == "auto" else "none") if quantization == "auto" else quantization
        ops: Ops = native.Kernels(chosen, wanted, threads, isa)
        return ops
    if quantization not in ("auto", "none"):
        raise ConfigError(
            f"--quantization {quantization} needs the native kernels for CPUs, and there are none for {device} here. "
            "Use --quantization none, or --device cpu and an installation with a C++ compiler at hand."
        )
    reference: Ops = kernels.Kernels(device, chosen, isa or "auto")
    return reference


def _backend(name: str) -> Any:
    """A module of kernels/, or None where its compiled part is missing."""
    try:
        return importlib.import_module(f"specserve.kernels.{name}")
    except ModuleNotFoundError as error:  # one that is there and cannot be loaded is an error
        if error.name != "specserve.kernels._native":
            raise
        return None


def auto_dtype(device: torch.device, isa: str) -> str:
    """bfloat16 where the device multiplies it natively, on a CPU with the instruction set `isa`, else float32: an
    emulated bfloat16 is slower than float32."""
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    return "bfloat16" if isa == "avx512" and torch.cpu._is_avx512_bf16_supported() else "float32"
