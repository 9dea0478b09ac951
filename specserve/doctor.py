"""What an engine would find on this machine: device, instruction sets, memory, kernels, threads, models, versions.
Looks only: fetches nothing, changes nothing, and reads no weights but a matrix of each kind that is quantised."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from rich.markup import escape
from rich.table import Table

from specserve.cache.sizing import GIB, free_memory
from specserve.checkpoint import catalog
from specserve.checkpoint.entries import MODELS, WEIGHT_BITS
from specserve.checkpoint.fitting import Fit, fit
from specserve.checkpoint.folder import is_adapter, read_config
from specserve.checkpoint.installed import installed
from specserve.checkpoint.peft import PeftAdapter, read_peft
from specserve.checkpoint.quantized import QuantizedWeights
from specserve.checkpoint.trials import all_trials
from specserve.config import EngineConfig
from specserve.errors import ConfigError, NotFetchedError, SpecserveError
from specserve.files import reading
from specserve.layout import Layout, check
from specserve.machine.cores import THREADS, default_threads, processor, usable_cores
from specserve.models.lora import read_adapter
from specserve.models.rounding import as_stored, how_kept
from specserve.ops import Ops, choice
from specserve.ops.device import choose_device, why_no_gpu
from specserve.ops.isa import VARIABLE
from specserve.ops.selftest import self_test
from specserve.registry import DRAFTERS, GRAMMARS, KERNELS
from specserve.terminal import console
from specserve.text.tokenizer import Tokenizer
from specserve.version import __version__

# Instruction sets that decide which kernels are fast, by the names the Linux kernel gives them.
INSTRUCTION_SETS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_int8",
    "amx_bf16",
)
ARM_INSTRUCTION_SETS = ("asimd", "asimddp", "i8mm", "bf16", "sve")
CPU_BUILD = (
    "Without a GPU its CPU build is enough and gigabytes smaller; pytorch.org/get-started shows how to install it "
    "(Compute Platform: CPU)"
)
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy")


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and its findings, as (name, value) lines. `fault` is what keeps an engine from starting."""

    title: str
    rows: list[tuple[str, str]]
    fault: SpecserveError | None = None


def examine(
    model: str, isa: str = "auto", root: Path = Path("/"), layout: Layout | None = None, device_name: str = "auto"
) -> list[Section]:
    """All findings, for the model (or LoRA adapter) whose folder is to be looked up and an engine with this `isa` on
    this device, or engines in this layout. `root` is the root of the file system. Raises ConfigError for a device that
    is not there and for an instruction set that the kernels do not have."""
    device = choose_device(device_name, root)
    return [
        Section("Versions", _versions()),
        Section("Device", [*_cpu(root), *_gpus()]),
        Section("Memory", [("free for an engine", f"{free_memory(device) / GIB:.1f} GiB on {device}")]),
        Section("Kernels", _kernels(device, isa)),
        Section("Drafters", [("found", ", ".join(DRAFTERS.names()) or "none"), *_trials(model)]),
        Section("Structured output", _grammars()),
        _catalog(device, isa),
        _adapter(folder) if is_adapter(folder := Path(model).expanduser()) else _models(model, isa, device),
        *([] if layout is None else [_layout(layout, model, isa)]),
    ]


def as_dict(sections: Iterable[Section]) -> dict[str, dict[str, str]]:
    """The findings by heading, and by name."""
    return {section.title: {name.strip(): value for name, value in section.rows} for section in sections}


def show(sections: Iterable[Section]) -> None:
    """Print the findings."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for section in sections:
        table.add_row(f"[bold]{section.title}[/bold]")
        for name, value in section.rows:
            table.add_row(f"  {escape(name)}", escape(value))
    console().print(table)


def _versions() -> list[tuple[str, str]]:
    own = [("specserve", __version__), ("python", platform.python_version()), ("system", platform.platform())]
    return own + [(name, version(name)) for name in PACKAGES]


def _cpu(root: Path) -> list[tuple[str, str]]:
    name, flags = processor(root)
    wanted = ARM_INSTRUCTION_SETS if platform.machine() in ("aarch64", "arm64") else INSTRUCTION_SETS
    found = ", ".join(name for name in wanted if name in flags) or "none of " + ", ".join(wanted)
    return [
        ("processor", name),
        ("instruction sets", found if flags else f"not reported by {platform.system()}"),
        ("cores", f"{usable_cores()} usable of {os.cpu_count()}"),
        ("threads", f"{default_threads()}; --threads or {THREADS} changes it"),
    ]


def _gpus() -> list[tuple[str, str]]:
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return [("gpu", "none usable (torch is a CPU build)")]
        built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
        return [("gpu", f"none usable ({built}): {why_no_gpu()} {CPU_BUILD}")]
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        (
            f"cuda:{index}",
            f"{card.name}, {card.total_memory / GIB:.0f} GiB, compute capability {card.major}.{card.minor}",
        )
        for index, card in enumerate(cards)
    ]


def _kernels(device: torch.device, isa: str) -> list[tuple[str, str]]:
    ops = choice.choose_ops(device, "auto", "auto", 1, isa)
    dtype = str(ops.dtype).removeprefix("torch.")
    weights = f"weights in {ops.quantization}" if ops.quantization != "none" else "weights not quantised"
    native = "multiplies bfloat16 natively" if dtype == "bfloat16" else "has no native bfloat16, so float32 is faster"
    return [
        (
            "chosen",
            f"{ops.name}, {weights}: what an engine on {device} takes; there are {', '.join(KERNELS.names())}",
        ),
        ("instruction set", f"{ops.instruction_set or 'no choice'} (--isa or {VARIABLE} changes it)"),
        ("dtype", f"{dtype}: {device} {native}"),
        ("KV cache", f"{str(ops.kv_dtype).removeprefix('torch.')} (--dtype changes it)"),
        *([("not built", lacking)] if (lacking := choice.lacking(ops)) else []),
        *([] if device.type == "cpu" else [("self-test", str(self_test(ops, choice.reference_for(ops))))]),
    ]


def _grammars() -> list[tuple[str, str]]:
    missing = {name: GRAMMARS.missing(name) for name in GRAMMARS.names()}
    lacking = [f"{name} (package {package})" for name, package in missing.items() if package is not None]
    return [
        ("backends", ", ".join(name for name, package in missing.items() if package is None) or "none"),
        ("not installed", ", ".join(lacking) or "none"),
    ]


def _weights(folder: Path, isa: str, device: torch.device) -> str:
    """How they are quantised, and how exactly an engine would keep one matrix of each kind. Raises ModelError for what
    it could not read."""
    with reading(folder):
        quantized = QuantizedWeights(folder, read_config(folder))
        automatic = choice.choose_ops(device, "auto", "auto", 1, isa)
        ops = as_stored(folder, automatic, lambda asked: choice.choose_ops(device, "auto", asked, 1, isa))
        return how_kept(quantized, ops) or quantized.describe()


def _catalog(device: torch.device, isa: str) -> Section:
    """Which of the catalog fit what is free now."""
    rows = [(name, fit.describe(MODELS[name])) for name, fit in fits_here(MODELS, device, isa).items()]
    return Section("Catalog", rows)


def fits_here(names: Iterable[str], device: torch.device, isa: str = "auto") -> dict[str, Fit]:
    """How each of these models of the catalog fits the memory of a device that is free now. Raises ConfigError for an
    instruction set that the kernels do not have."""
    ops = choice.choose_ops(device, "auto", "auto", 1, isa)
    dtype, kv_dtype = (str(each).removeprefix("torch.") for each in (ops.dtype, ops.kv_dtype))
    kinds = [dtype if ops.quantization == "none" else ops.quantization]
    for kind in ("int8", "int4"):
        if WEIGHT_BITS[kind] < WEIGHT_BITS[kinds[-1]]:
            try:
                choice.choose_ops(device, "auto", kind, 1, isa)
            except ConfigError:  # kernels without it
                continue
            kinds.append(kind)
    free = free_memory(device)
    return {name: fit(MODELS[name], free, kinds, dtype, kv_dtype) for name in names}


def _models(model: str, isa: str, device: torch.device) -> Section:
    fault, weights, tokenizer = None, "not looked at", "not looked at"
    try:
        folder = str(catalog.resolve(model, offline=True, progress=False, convert=False))
    except SpecserveError as error:
        folder, fault = str(error), None if isinstance(error, NotFetchedError) else error
    else:
        try:
            weights = _weights(Path(folder), isa, device)
        except SpecserveError as error:
            weights, fault = str(error), error
        try:
            tokenizer = Tokenizer(Path(folder)).describe()
        except SpecserveError as error:
            tokenizer, fault = str(error), error
    here = [(f"  {entry.name}", f"{entry.num_bytes / 2**20:.0f} MiB, {entry.folder}") for entry in installed()]
    rows = [
        ("cache", str(catalog.cache_folder())),
        ("model", model),
        ("folder", folder),
        ("weights", weights),
        ("tokenizer", tokenizer),
        ("in the cache", str(len(here))),
        *here,
    ]
    return Section("Models", rows, fault)


def _trials(model: str) -> list[tuple[str, str]]:
    """What earlier runs of the model found of drafters that are told of every step."""
    try:
        folder = str(catalog.resolve(model, offline=True, progress=False, convert=False))
    except SpecserveError:
        return []
    found: dict[str, list[str]] = {}
    for run, trials in all_trials():
        for name, trial in trials.items() if run["folder"] == folder else ():
            saved = f"{'saved' if trial.saved >= 0 else 'lost'} {abs(trial.saved):.1%} of the time"
            rests = "; rests at first" if trial.num_failed else ""
            where = ", ".join(str(run[part]) for part in ("kernels", "drafts") if part in run)
            told = f"{saved} of {trial.num_steps:,} steps on {trial.day}{rests} ({where})"
            found.setdefault(name, []).append(told)
    return [(name, "; ".join(runs)) for name, runs in found.items()]


def _layout(layout: Layout, model: str, isa: str) -> Section:
    config = layout.config
    device = choose_device("cpu" if layout.num_elsewhere else config.device)

    def choose(quantization: str) -> Ops:
        return choice.choose_ops(device, config.dtype, quantization, 1, isa)

    ops, folder = choose(config.quantization), None
    try:
        folder = catalog.resolve(model, offline=True, progress=False, convert=False)
        ops = as_stored(folder, ops, choose) if config.quantization == "auto" else ops
    except SpecserveError:  # what _models has said
        pass
    rows, faults = check(layout, folder, ops, str(device), free_memory(device))
    return Section("Layout", rows, faults[0] if faults else None)


def _adapter(folder: Path) -> Section:
    """What is in the folder of a LoRA adapter, whether it fits the model that it names, and how it is used."""
    rows, fault = [("folder", f"{folder}: an adapter, no model")], None
    try:
        with reading(folder):
            found = read_peft(folder)
        rows += [("made for", found.base or "not said"), ("rank", str(found.rank))]
        rows.append(("fits", _fitting(found)))
    except SpecserveError as error:
        rows, fault = [*rows, ("not usable", str(error))], error
    else:
        most = f" --max-lora-rank {found.rank}" if found.rank > EngineConfig().max_lora_rank else ""
        rows.append(("use", f"specserve serve {found.base or 'MODEL'} --lora NAME={folder}{most}"))
    return Section("LoRA adapter", rows, fault)


def _fitting(adapter: PeftAdapter) -> str:
    """Raises ModelError for an adapter that does not fit its model."""
    try:
        model = catalog.resolve(adapter.base, offline=True, progress=False, convert=False) if adapter.base else None
    except SpecserveError:
        model = None
    if model is None:
        return f"not looked at: its model is not here; specserve inspect {adapter.folder} --target MODEL looks"
    return f"{adapter.base}: changes {len(read_adapter(adapter.folder, model, adapter.rank).weights)} of its layers"
