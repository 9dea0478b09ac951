"""Builds an engine from its configuration: device, kernels, weights, cache, sampler, drafter, each from its own place.
The only function that sees all the parts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specserve.adapters import AdapterSource
from specserve.cache.cache import KVCache
from specserve.cache.sizing import free_memory, logit_rows, plan_blocks, share_of, step_bytes
from specserve.cache.storage import MIN_BLOCKS, KVShape, KVStorage
from specserve.checkpoint import catalog
from specserve.config import EngineConfig
from specserve.engine.adapter_loader import AdapterLoader, check_folders
from specserve.engine.adapters import Adapters
from specserve.engine.counters import Counters
from specserve.engine.engine import Engine
from specserve.engine.recall import recall_trials
from specserve.engine.request import Limits
from specserve.engine.scheduler import Scheduler
from specserve.errors import ConfigError
from specserve.machine.cores import default_threads
from specserve.models.decoder import Decoder
from specserve.models.heads.loading import HeadLoader
from specserve.models.loader import AnyModel, load_model
from specserve.models.rounding import as_stored
from specserve.models.spec import ModelSpec
from specserve.models.uses import tested
from specserve.ops import MOST_TOP_K, Ops
from specserve.ops.capture import recorded_bytes, recording_at_start
from specserve.ops.choice import choose_ops, describe, warn_of_lacking
from specserve.ops.device import check_attention, choose_device, within_memory
from specserve.parallel.kv_transfer import KVFormat, PrefixTransfer
from specserve.parallel.lockstep import Lockstep
from specserve.parallel.ranks import Ranks
from specserve.parallel.start import start_ranks
from specserve.runtime.cost import ROWS
from specserve.runtime.executor import Executor, LocalExecutor, StepRunner
from specserve.runtime.runner import Runner
from specserve.runtime.timing import step_seconds
from specserve.sampling.sampler import Sampler
from specserve.speculation.adapter_heads import AdapterHeads
from specserve.speculation.base import Needs
from specserve.speculation.context import TargetContext
from specserve.speculation.controller import DraftController
from specserve.speculation.host import DraftHost
from specserve.speculation.lookup import makers
from specserve.speculation.policy import Policy
from specserve.speculation.weighing import Weighing
from specserve.structured.compiler import Compiler, check_backend
from specserve.structured.vocabulary import vocabulary
from specserve.text.stops import ForkedText
from specserve.text.tokenizer import Tokenizer

Connect = Callable[[LocalExecutor], Executor]
Shapes = list[KVShape]
RunOn = Callable[[KVStorage], StepRunner]

_TIMING_S = 0.4  # for measuring what steps take, so that drafts can be weighed


@dataclass(slots=True)
class Built:
    """A ready engine, and what was chosen for it."""

    engine: Engine
    folder: Path  # the model's
    ops: Ops
    tokenizer: Tokenizer
    compiler: Compiler
    threads: int
    loader: AdapterLoader
    runs: str  # how steps are computed, in words
    num_kv_bytes: int  # of the KV cache, in all processes of the model
    ranks: Ranks | None  # the model's other processes
    summary: str = ""  # one line for people

    @property
    def device(self) -> str:
        return str(self.ops.device)

    @property
    def dtype(self) -> str:
        return str(self.ops.dtype).removeprefix("torch.")

    @property
    def quantization(self) -> str:
        return self.ops.quantization

    def prefix_transfer(self) -> PrefixTransfer:
        """What hands cached prefixes to other engines, and takes theirs. Reads all files of the model and of its draft
        head, to name them, so it is made once, and beside steps. Raises ConfigError where prefix_caching is off."""
        engine, context, own = self.engine, self.engine.policy.context, self.engine.policy.own
        whole, width = (context.spec, 1) if self.ranks is None else (self.ranks.spec, self.ranks.layout.width)
        format = KVFormat.of(self.folder, self.ops, whole, context.kv_shapes, context.sources, width)
        return PrefixTransfer(engine.cache, engine.executor, engine.adapters, format, lambda: engine.policy.own is own)


@within_memory()
def build(
    config: EngineConfig,
    *,
    progress: bool = False,
    connect: Connect = lambda local: local,
    num_engines: int = 1,
    pulse: int = -1,
    lockstep: Lockstep | None = None,
    load: Callable[..., tuple[AnyModel, range, Ranks | None]] | None = None,
) -> Built:
    """Load everything a configuration names. `connect` says what executes steps, given what would in this process;
    `num_engines` are to share the memory; `pulse` is a Pulse's descriptor, for what other processes of the model do
    while this one waits; with `lockstep` it is one of several replicas, whose experts it has some of; `load` makes the
    model, as `_load`. Raises ConfigError, ModelError or CapacityError before any request."""
    drafters = makers(config.drafter, config.drafter_options)  # a wrong name must not cost a model load
    check_backend(config.grammar_backend)
    check_folders(map(AdapterSource.parse, config.lora))
    threads = config.threads or max(1, default_threads() // config.tensor_parallel_size)
    folder, ops = _find(config, threads, progress)
    tokenizer = Tokenizer(folder)
    model, own, ranks = (load or _load)(config, folder, ops, threads, progress, pulse, lockstep)
    spec, ops, max_rows = model.spec, model.ops, config.max_num_batched_tokens
    num_adapters = _hold_adapters(model, config)
    max_logit_rows = logit_rows(spec.vocab_size, config.max_num_seqs, max_rows)
    context = TargetContext(
        model, tokenizer, HeadLoader(folder, model, ops), ops, config.verification, max_rows, max_logit_rows
    )
    host = DraftHost.of(config.drafter, drafters, context, spec.vocab_size, config.drafter_timeout_s)
    _check_needs(config.drafter, host.needs, spec)
    taps, top_k = host.needs.hidden_layers, host.needs.top_k
    shapes = spec.kv_shapes[: len(own)] + context.kv_shapes
    width = spec.step_width + len(taps) * spec.hidden_size + (0 if lockstep is None else lockstep.width)
    taken = step_bytes(max_rows, width, max_logit_rows, spec.vocab_size) + host.needs.memory_bytes
    others = [] if ranks is None else ranks.kv_shapes()  # they are loaded
    mapped = model.num_mapped_bytes + (0 if ranks is None else ranks.num_mapped_bytes)  # counted as free
    free = share_of(free_memory(ops.device) - mapped, taken, num_engines)
    make, counters = Runner if ranks is None else ranks.runner, Counters()
    run_on = partial(_run_on, make, model, ops, len(own), (max_rows, max_logit_rows, taps, top_k))
    with recording_at_start(progress, has_peers=ranks is not None):
        storage, num_kv_bytes, sizing = _make_storage(config, ops, shapes, others, spec.max_len, free, run_on)
        context.bind(storage.layers[len(own) :], storage.block_size)
        runner = run_on(storage)
        policy = Policy(host, config.num_speculative_tokens, spec.max_len, context, counters.timed)
    make_local = LocalExecutor if lockstep is None else lockstep.executor
    local = make_local(runner, Sampler(spec.vocab_size, config.verification, ops), storage, counters.timed)
    executor = connect(local) if ranks is None else ranks.executor(local)
    cache = KVCache(executor, config.prefix_caching)
    cache.reads_next = host.needs.reads_next
    adapters = Adapters(executor, num_adapters, heads := AdapterHeads(policy))
    step_s, most = config.max_step_ms and config.max_step_ms / 1000, executor.most_under_way
    scheduler = Scheduler(cache, config.max_num_seqs, max_rows, spec.max_len, max_logit_rows, step_s, adapters, most)
    drafting = DraftController(policy, cache, counters.timed, _weighing(config, scheduler, executor))
    recall_trials(drafting, config, folder, ops)
    limits = Limits(spec.vocab_size, spec.max_len, tokenizer.eos_ids_below(spec.vocab_size))
    compiler = _compiler(config, tokenizer, spec.vocab_size)
    engine = Engine(executor, cache, scheduler, drafting, limits, counters, partial(ForkedText.begin, tokenizer))
    size, loader = ranks.layout.size if ranks else 1, _load_adapters(engine, heads, config, folder)
    built = Built(engine, folder, ops, tokenizer, compiler, threads, loader, spec.runs, num_kv_bytes, ranks)
    built.summary = f"{config.model} {describe(ops, model.origin, size)}; {sizing}{spec.note}"
    return built


def _find(config: EngineConfig, threads: int, progress: bool) -> tuple[Path, Ops]:
    """The model's folder, and the kernels that serve it."""
    check_attention(device := choose_device(config.device), config.attention)

    def choose(quantization: str, without: Collection[str] = ()) -> Ops:
        return choose_ops(device, config.dtype, quantization, threads, config.isa, without)

    ops = choose(config.quantization)  # what is refused must not cost a download
    folder = catalog.resolve(config.model, progress=progress)
    ops = as_stored(folder, ops, choose) if config.quantization == "auto" else ops
    warn_of_lacking(ops)
    bits, size, has_adapters = config.bit_identity, config.block_size, bool(config.max_loras)
    # Several GPUs: start_ranks refuses "flash".
    attention = config.attention if config.tensor_parallel_size == 1 else "exact"
    ops = tested(ops, folder, partial(choose, config.quantization), attention, bits, size, has_adapters)
    torch.set_num_threads(1 if ops.has_own_threads else threads)
    return folder, ops


def _compiler(config: EngineConfig, tokenizer: Tokenizer, vocab_size: int) -> Compiler:
    words = partial(vocabulary, tokenizer, vocab_size)
    return Compiler(words, config.grammar_backend, max_digits=config.max_number_digits)


def _weighing(config: EngineConfig, scheduler: Scheduler, executor: Executor) -> Weighing | None:
    """For drafters that requests name, too."""
    cost, most = scheduler.cost.decoding, executor.most_under_way
    if config.adaptive or most > 1:
        cost.begin(step_seconds(executor, ROWS, _TIMING_S))
    return Weighing(cost, most) if config.adaptive else None


def _load(
    config: EngineConfig, folder: Path, ops: Ops, threads: int, progress: bool, pulse: int, lockstep: Lockstep | None
) -> tuple[AnyModel, range, Ranks | None]:
    """The model, or this process's part of it, the layers that it has, and the processes of all others."""
    max_len, max_rows = config.max_model_len, config.max_num_batched_tokens
    peers = None if lockstep is None else lockstep.peers(folder, ops, max_rows)
    ranks = start_ranks(config, folder, ops, threads, pulse)
    if ranks is None:
        model = load_model(folder, ops, max_len, progress=progress, expert_peers=peers)
        return model, range(model.spec.num_layers), None
    layers = ranks.layout.layers(0)
    return load_model(folder, ops, max_len, progress=progress, peers=ranks.peers, layers=layers), layers, ranks


def _hold_adapters(model: AnyModel, config: EngineConfig) -> int:
    """Makes room for adapters, how many is returned. Raises ConfigError for a model that takes none."""
    num_slots = config.max_loras or 0
    if num_slots:
        if not isinstance(model, Decoder):
            runs = f"{model.spec.architecture} runs through transformers"
            raise ConfigError(f"--max-loras: {runs}, and adapters need a model that is native.")
        model.hold_adapters(num_slots, config.max_lora_rank)
    return num_slots


def _load_adapters(engine: Engine, heads: AdapterHeads, config: EngineConfig, folder: Path) -> AdapterLoader:
    """Loads those that the configuration names; returns what loads others."""
    loader = AdapterLoader(engine.executor, heads, folder, engine.adapters.num_slots, config.max_lora_rank)
    for source in map(AdapterSource.parse, config.lora):
        engine.adapters.add(loader.load(source))
    return loader


def _check_needs(name: str, needs: Needs, spec: ModelSpec) -> None:
    """Raises ConfigError for layers and numbers of best tokens that the target does not have."""
    if wrong := [layer for layer in needs.hidden_layers if layer not in range(spec.num_layers)]:
        raise ConfigError(f"--drafter {name} reads layers {wrong}; the model has 0 to {spec.num_layers - 1}.")
    if not 0 <= needs.top_k <= (most := min(MOST_TOP_K, spec.vocab_size)):
        raise ConfigError(f"--drafter {name} needs the {needs.top_k} best tokens of a row; there are {most} at most.")


def _run_on(
    make: Callable[..., StepRunner], model: AnyModel, ops: Ops, num_layers: int, outputs: tuple[Any, ...], kv: KVStorage
) -> StepRunner:
    """What runs the model's steps, whose layers are the first of that cache."""
    return make(model, ops, kv.layers[:num_layers], kv.block_size, *outputs)


def _make_storage(
    config: EngineConfig, ops: Ops, shapes: Shapes, others: list[Shapes], max_len: int, free: int, run_on: RunOn
) -> tuple[KVStorage, int, str]:
    """The KV cache of all layers, as large as the configuration and `free` bytes say, the bytes that it takes with that
    of the model's other processes, whose layers are `others`, and why so many. What `run_on` captures is measured,
    where it is that much, on the smallest. Processes on a host's CPUs share its memory, GPUs have their own."""
    sizes, is_on_gpu = (config.block_size, ops.kv_dtype, ops.device, ops.copy_kv), ops.device.type != "cpu"
    per_block = [KVStorage.bytes_per_block(each, *sizes[:2]) for each in (shapes, *others)]
    limits = config.block_size, max_len, config.max_num_seqs, config.kv_cache_gib
    measure = partial(recorded_bytes, ops.device, lambda: run_on(KVStorage(shapes, MIN_BLOCKS, *sizes)))
    is_measured = ops.records and ops.buckets and not others
    planned = max(per_block) if is_on_gpu else sum(per_block)
    num_blocks, why = plan_blocks(free, planned, *limits, measure if is_measured else None)
    return KVStorage(shapes, num_blocks, *sizes), num_blocks * sum(per_block), why
