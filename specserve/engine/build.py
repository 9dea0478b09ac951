"""Builds an engine from its configuration: device, kernels, weights, cache, sampler, drafter, each from its own place.
The only function that sees all the parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specserve.cache.cache import KVCache
from specserve.cache.sizing import free_memory, logit_rows, plan_blocks, step_bytes
from specserve.cache.storage import KVStorage
from specserve.checkpoint import catalog
from specserve.config import EngineConfig
from specserve.engine.counters import Counters
from specserve.engine.engine import Engine
from specserve.engine.request import Limits
from specserve.engine.scheduler import Scheduler
from specserve.errors import ConfigError
from specserve.machine.cores import default_threads
from specserve.models.heads.loading import HeadLoader
from specserve.models.loader import load_model
from specserve.ops import MOST_TOP_K, Ops
from specserve.ops.backend import KernelBackend, KernelOptions
from specserve.registry import KERNELS
from specserve.runtime.runner import Runner
from specserve.runtime.timing import step_seconds
from specserve.sampling.sampler import Sampler
from specserve.speculation.adaptive import Adaptive
from specserve.speculation.context import TargetContext
from specserve.speculation.cost import ROWS
from specserve.speculation.host import DraftHost
from specserve.speculation.lookup import makers
from specserve.speculation.policy import Policy
from specserve.structured.compiler import Compiler, check_backend
from specserve.structured.vocabulary import vocabulary
from specserve.text.tokenizer import Tokenizer

_TIMING_S = 0.4  # for measuring what steps take, so that drafts can be weighed


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
    drafters = makers(config.drafter, config.drafter_options)  # a wrong name must not cost a model load
    check_backend(config.grammar_backend)
    threads = config.threads or default_threads()
    ops = choose_ops(choose_device(config.device), config.dtype, config.quantization, threads, config.isa)
    torch.set_num_threads(1 if ops.has_own_threads else threads)
    folder = catalog.resolve(config.model, progress=progress)
    tokenizer = Tokenizer(folder)
    model = load_model(folder, ops, config.max_model_len, progress=progress)
    spec, block_size, max_rows = model.spec, config.block_size, config.max_num_batched_tokens
    max_logit_rows = logit_rows(spec.vocab_size, config.max_num_seqs, max_rows)
    heads = HeadLoader(folder, model, ops)
    context = TargetContext(model, tokenizer, heads, ops, config.verification, max_rows, max_logit_rows)
    host = DraftHost.of(config.drafter, drafters, context, spec.vocab_size, config.drafter_timeout_s)
    taps, top_k = host.needs.hidden_layers, host.needs.top_k
    if wrong := [layer for layer in taps if layer not in range(spec.num_layers)]:
        raise ConfigError(f"--drafter {config.drafter} reads layers {wrong}; the model has 0 to {spec.num_layers - 1}.")
    if not 0 <= top_k <= min(MOST_TOP_K, spec.vocab_size):
        most = min(MOST_TOP_K, spec.vocab_size)
        raise ConfigError(
            f"--drafter {config.drafter} needs the {top_k} best tokens of a row; there are {most} at most."
        )
    shapes = spec.kv_shapes + context.kv_shapes
    width = spec.step_width + len(taps) * spec.hidden_size
    taken = step_bytes(max_rows, width, max_logit_rows, spec.vocab_size)
    taken += model.num_mapped_bytes + host.needs.memory_bytes  # mapped weights pass for free memory
    free = max(0, free_memory(ops.device) - taken)
    per_block = KVStorage.bytes_per_block(shapes, block_size, ops.kv_dtype)
    num_blocks, chosen = plan_blocks(
        free, per_block, block_size, spec.max_len, config.max_num_seqs, config.kv_cache_gib
    )
    storage = KVStorage(shapes, num_blocks, block_size, ops.kv_dtype, ops.device, ops.copy_kv)
    context.bind(storage.layers[spec.num_layers :], block_size)
    cache, counters = KVCache(storage, config.prefix_caching), Counters()
    cache.reads_next = host.needs.reads_next
    max_step_s = None if config.max_step_ms is None else config.max_step_ms / 1000
    scheduler = Scheduler(cache, config.max_num_seqs, max_rows, spec.max_len, max_logit_rows, max_step_s)
    adaptive = Adaptive(scheduler.cost.decoding) if config.adaptive else None
    engine = Engine(
        Runner(model, ops, storage.layers[: spec.num_layers], block_size, max_rows, max_logit_rows, taps, top_k),
        cache,
        scheduler,
        Sampler(spec.vocab_size, config.verification, ops),
        Policy(host, config.num_speculative_tokens, cache, spec.max_len, context, counters.timed, adaptive),
        Limits(spec.vocab_size, spec.max_len, tokenizer.eos_ids_below(spec.vocab_size)),
        counters,
    )
    if adaptive is not None:  # for drafters that requests name, too
        scheduler.cost.decoding.begin(step_seconds(engine.runner, ROWS, _TIMING_S))
    dtype = str(ops.dtype).removeprefix("torch.")
    weights = dtype if ops.quantization == "none" else ops.quantization
    isa = f", {ops.instruction_set}" if ops.instruction_set else ""
    summary = f"{config.model} in {weights} on {ops.device} ({ops.name} kernels{isa}); {chosen}"
    compiler = Compiler(
        lambda: vocabulary(tokenizer, spec.vocab_size), config.grammar_backend, max_digits=config.max_number_digits
    )
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
    """The kernels that serve a device, of the first backend in kernels/ that can; "auto" is what is fastest with them.
    Raises ConfigError for what no backend can serve, and for an instruction set that the kernels do not have."""
    asked = KernelOptions(device, dtype, quantization, threads, isa)
    backend: KernelBackend = KERNELS.choose(asked)
    return backend.create(asked)
