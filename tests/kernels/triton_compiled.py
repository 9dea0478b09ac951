"""What the Triton kernels become on real chips, in a process that compiles but has no GPU; run by
test_triton_compiled.py.

The kernels are called as ever, on tensors of the CPU. In place of a launch, Triton compiles what it would launch.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from specserve.kernels import (
    _triton_adapters as adapters,
    _triton_attention as attention,
    _triton_linear as linear,
    _triton_rows as rows_of,
    _triton_sampling as sampling,
)
from specserve.kernels._torch_sampling import SamplingArrays
from specserve.kernels._triton_bank import Bank, Shrunk

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
CHIPS = {  # and bytes of shared memory that a program may have
    "A100": (GPUTarget("cuda", 80, 32), 163 * 1024),
    "H100": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "RTX 5090": (GPUTarget("cuda", 120, 32), 99 * 1024),
    "MI300": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
}
ASIDE = 32  # bytes of a thread's stack: addresses that ptxas puts aside before a loop and takes up behind it
BUCKETS = ((1, 2, 15, 16), (17, 32), (33, 48, 64), (65, 96, 256), (257, 4096))
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
_MMA = re.compile(r"(?:mma\.sync|wgmma\.mma_async)\S*\s+\{([^}]*)\}")


@dataclass
class Driver:
    """Of a GPU that is not there."""

    target: GPUTarget

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@dataclass
class Compiler:
    """Compiles for one chip what is launched."""

    target: GPUTarget
    shared_memory: int
    found: list[Any] = field(default_factory=list)  # compiled kernels, one for each launch

    @property
    def is_cuda(self) -> bool:
        return self.target.backend == "cuda"

    def one(self, launch: Callable[[], object]) -> Any:
        """The first kernel of an op."""
        self.found.clear()
        launch()
        return self.found[0]

    def check(self, kernel: Any) -> None:
        assert kernel.metadata.shared <= self.shared_memory, kernel.metadata
        if self.is_cuda:
            usage = resources(kernel)
            assert usage["LOCAL"] == 0 and usage["STACK"] <= ASIDE, f"{kernel.metadata.name} spills: {usage}"


@pytest.fixture(params=CHIPS)
def chip(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler(*CHIPS[request.param])
    run = JITFunction.run

    def compiled(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiler.found.append(run(kernel, *args, grid=grid, warmup=True, **options))
        return compiler.found[-1]

    monkeypatch.setattr(JITFunction, "run", compiled)
    for module in (adapters, linear):
        monkeypatch.setattr(module, "shared_memory_of", lambda device: compiler.shared_memory)
    for module in (adapters, attention, linear, rows_of, sampling):
        for value in vars(module).values():
            if isinstance(value, JITFunction):
                value.device_caches.clear()  # of the chip before
    driver.set_active(Driver(compiler.target))
    return compiler


def resources(kernel: Any) -> dict[str, int]:
    """Registers and bytes of a thread."""
    path = kernel.metadata_group[f"{kernel.metadata.name}.cubin"]
    done = subprocess.run([CUOBJDUMP, "--dump-resource-usage", path], capture_output=True, text=True, check=True)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout)}


def products_of_a_sum(kernel: Any) -> set[int]:
    """How many products of the tensor cores a step of the loop adds to each accumulator, all 16 of k long."""
    return set(Counter(_MMA.findall(kernel.asm["ptx"])).values())


def empty(*shape: int, dtype: torch.dtype = BFLOAT16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def buckets(chip: Compiler, run: Callable[[int], object]) -> list[Any]:
    """The kernel of each bucket; all its numbers of rows have the same one."""
    kernels = []
    for bucket in BUCKETS:
        variants = {id(kernel): kernel for kernel in (chip.one(lambda rows=rows: run(rows)) for rows in bucket)}
        assert len(variants) == 1, f"{len(variants)} variants for {bucket} rows"
        kernels += variants.values()
    return kernels


def same_order(chip: Compiler, run: Callable[[int], object]) -> None:
    """All buckets add up in the same order."""
    kernels = buckets(chip, run)
    for kernel in kernels:
        chip.check(kernel)
    if chip.is_cuda:
        steps = [products_of_a_sum(kernel) for kernel in kernels]
        assert steps[0] and all(step == steps[0] for step in steps), f"other steps of k: {steps}"


def test_linear(chip: Compiler) -> None:
    weight = empty(960, 576)
    same_order(chip, lambda rows: linear.linear(empty(rows, 576), weight))


def test_gated(chip: Compiler) -> None:
    weight, bias = empty(2 * 14336, 4096), empty(2 * 14336)
    same_order(chip, lambda rows: linear.gated(empty(rows, 4096), weight, bias, "silu"))


def test_logits_and_weights_of_float32(chip: Compiler) -> None:
    head = empty(49152, 576)
    chip.check(chip.one(lambda: linear.logits(empty(3, 576, dtype=FLOAT32), head)))
    for rows in (3, 30):
        chip.check(chip.one(lambda: linear.linear(empty(rows, 576, dtype=FLOAT32), empty(960, 576, dtype=FLOAT32))))  # noqa: B023


def bank(inputs: int, outputs: int, max_rank: int, dtype: torch.dtype = BFLOAT16) -> Bank:
    ranks = torch.zeros(8, dtype=torch.int32)
    return Bank(ranks, empty(8, inputs * max_rank, dtype=dtype), empty(8, outputs * max_rank, dtype=dtype), max_rank)


def shrunk(bank: Bank, rows: int, num_parts: int) -> Shrunk:
    return Shrunk(bank, torch.zeros(rows, dtype=torch.int64), empty(num_parts, rows, bank.max_rank, dtype=FLOAT32))


@pytest.mark.parametrize(("inputs", "max_rank"), [(576, 192), (14336, 64)])
def test_what_adapters_read_is_added_up_as_weights_do(chip: Compiler, inputs: int, max_rank: int) -> None:
    own = bank(inputs, 960, max_rank)
    same_order(chip, lambda rows: adapters.shrink(empty(rows, inputs), own, torch.zeros(rows, dtype=torch.int64)))
    if chip.is_cuda:
        steps = products_of_a_sum(chip.found[0])
        assert steps == products_of_a_sum(chip.one(lambda: linear.linear(empty(1, inputs), empty(960, inputs))))


def test_products_with_adapters(chip: Compiler) -> None:
    """A layer's own sum is that of its kernel without adapters."""
    weight, gate_and_up = empty(6144, 4096), empty(2 * 1536, 576)
    own, own_gated = bank(4096, 6144, 192), bank(576, 2 * 1536, 128)

    def product(rows: int, adapted: bool) -> None:
        linear.linear(empty(rows, 4096), weight, None, None, shrunk(own, rows, 2) if adapted else None)

    def gated(rows: int, adapted: bool) -> None:
        added = shrunk(own_gated, rows, 1) if adapted else None
        linear.gated(empty(rows, 576), gate_and_up, None, "silu", added)

    for run in (product, gated):
        same_order(chip, lambda rows: run(rows, True))  # noqa: B023
        if chip.is_cuda:
            with_adapters = products_of_a_sum(chip.found[0])
            assert products_of_a_sum(chip.one(lambda: run(1, False))) == with_adapters - {2}  # noqa: B023


def test_adapters_of_float32_and_of_tables(chip: Compiler) -> None:
    own = bank(576, 960, 64, FLOAT32)
    for rows in (3, 30):
        x, slots, weight = (
            empty(rows, 576, dtype=FLOAT32),
            torch.zeros(rows, dtype=torch.int64),
            empty(960, 576, dtype=FLOAT32),
        )
        chip.check(chip.one(lambda: adapters.shrink(x, own, slots)))  # noqa: B023
        chip.check(chip.one(lambda: linear.linear(x, weight, None, None, shrunk(own, len(x), 1))))  # noqa: B023
        chip.check(chip.one(lambda: linear.logits(x, empty(960, 576), None, shrunk(bank(576, 960, 64), len(x), 1))))  # noqa: B023
    for dtype in (FLOAT32, BFLOAT16):
        table = bank(49152, 576, 64, dtype)
        kernels = {
            id(kernel): kernel
            for rows in (1, 3, 16)
            for ids in [torch.zeros(rows, dtype=torch.int64)]
            for kernel in [chip.one(lambda: adapters.embed(empty(rows, 576, dtype=FLOAT32), ids, table, ids, 1.5))]  # noqa: B023
        }
        (kernel,) = kernels.values()
        chip.check(kernel)


@dataclass
class Plan:
    rows: int
    max_splits: int
    block_size: int = 16

    def __getattr__(self, name: str) -> torch.Tensor:
        shape = (4, 64) if name == "tables" else (self.rows,)
        return torch.empty(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "dtype"), [(9, 3, 64, BFLOAT16), (32, 8, 128, BFLOAT16), (4, 4, 80, FLOAT32)]
)
def test_attention(chip: Compiler, heads: int, kv_heads: int, d: int, dtype: torch.dtype) -> None:
    def run(is_looped: bool, rows: int, splits: int) -> None:
        q, kv = empty(rows, heads, d, dtype=FLOAT32), empty(2, 1024, kv_heads, d, dtype=dtype)
        attention.attention_in(is_looped, q, kv, Plan(rows, splits), 0.1, None)

    num_products = []
    for is_looped in (False, True):
        variants = {}
        for rows, splits in ((1, 2), (2, 16), (16, 33), (300, 8)):
            chip.one(lambda: run(is_looped, rows, splits))  # noqa: B023
            variants |= {(kernel.metadata.name, id(kernel)): kernel for kernel in chip.found}
        assert len(variants) == (1 if is_looped else 2), list(variants)
        for kernel in variants.values():
            chip.check(kernel)
        if chip.is_cuda:
            num_products.append(sum(len(_MMA.findall(kernel.asm["ptx"])) for kernel in variants.values()))
    assert len(set(num_products)) <= 1, "products of a tile, with splits in programs or in a loop"


def ops_on_rows() -> list[Callable[[], object]]:
    ids, weight = torch.zeros(3, dtype=torch.int64), empty(576, dtype=FLOAT32)
    marks, norms = torch.zeros(3, dtype=torch.bool), rows_of.Norms(empty(64), empty(64), 1e-5)
    angles, kv = empty(99, 64, dtype=FLOAT32), empty(2, 64, 3, 64)
    return [
        lambda: rows_of.embed(ids, empty(49152, 576), 1.0),
        lambda: rows_of.add_rms_norm(empty(3, 576, dtype=FLOAT32), empty(3, 576), weight, weight, 1e-5),
        lambda: rows_of.rope_and_cache(empty(3, 15 * 64), norms, ids, angles, angles, kv, ids, marks),
        lambda: rows_of.argmax(empty(3, 49152, dtype=FLOAT32)),
    ]


def test_ops_on_rows(chip: Compiler) -> None:
    for launch in ops_on_rows():
        chip.one(launch)
        for kernel in chip.found:
            chip.check(kernel)


def test_sampling(chip: Compiler) -> None:
    """With masks and without, two numbers of rows have the same kernels."""
    hashed = torch.zeros(49152, dtype=torch.int64)

    def run(rows: int, masks: np.ndarray[Any, np.dtype[np.int32]] | None) -> None:
        ids, laws = np.arange(rows), (np.full(rows, law) for law in (0.7, 0.1, 0.9))
        how = SamplingArrays(ids, *laws, np.full(rows, 40), ids)
        sampling.sample(empty(8, 49152, dtype=FLOAT32), how, hashed, masks)

    for masks in (None, np.zeros((8, 1536), np.int32)):
        variants = {}
        for rows in (1, 8):
            chip.one(lambda: run(rows, masks))  # noqa: B023
            variants |= {id(kernel): kernel for kernel in chip.found}
        assert len(variants) == 5, [kernel.metadata.name for kernel in variants.values()]
        for kernel in variants.values():
            chip.check(kernel)


@pytest.mark.parametrize("chip", ["H100"], indirect=True)
def test_kernels_that_overlap_wait_before_they_touch_what_others_write(
    chip: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (adapters, attention, linear, rows_of):
        monkeypatch.setattr(module, "overlap", lambda device: {"OVERLAP": True, "launch_pdl": True})
    q, kv = empty(3, 9, 64, dtype=FLOAT32), empty(2, 1024, 3, 64)
    own, ids = bank(576, 960, 64), torch.zeros(1, dtype=torch.int64)
    launches = [
        *ops_on_rows(),
        lambda: linear.linear(empty(1, 576), empty(960, 576), empty(960)),
        lambda: linear.gated(empty(1, 576), empty(2 * 1536, 576), None, "silu"),
        lambda: linear.linear(empty(1, 576), empty(960, 576), None, None, shrunk(own, 1, 1)),
        lambda: adapters.shrink(empty(1, 576), own, ids),
        lambda: adapters.embed(empty(1, 960, dtype=FLOAT32), ids, own, ids, 1.0),
        *[lambda how=how: attention.attention_in(how, q, kv, Plan(3, 8), 0.1, None) for how in (False, True)],
    ]
    for launch in launches:
        chip.one(launch)
        for kernel in chip.found:
            assert kernel.metadata.launch_pdl
            before, wait, _ = kernel.asm["ptx"].partition("griddepcontrol.wait")
            assert wait and not re.search(r"\b(ld|st|atom|red)\.global|cp\.async", before), kernel.metadata.name


@pytest.mark.parametrize("chip", ["H100"], indirect=True)
def test_tiles_of_k_that_depend_on_the_rows_are_noticed(chip: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = linear.tiles_for

    def planted(rows: int, *sizes: int) -> linear.Tiles:
        return plain(rows, *sizes)._replace(block_k=64 if rows <= 16 else 32)

    monkeypatch.setattr(linear, "tiles_for", planted)
    weight = empty(960, 576)
    with pytest.raises(AssertionError, match="other steps of k"):
        same_order(chip, lambda rows: linear.linear(empty(rows, 576), weight))


@pytest.mark.parametrize("chip", ["H100"], indirect=True)
def test_kernels_for_some_numbers_of_rows_are_noticed(chip: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_linear_kernel", triton.jit(linear._linear_kernel.fn))
    weight = empty(960, 576)
    with pytest.raises(AssertionError, match=r"variants for \(1, 2, 15, 16\) rows"):
        buckets(chip, lambda rows: linear.linear(empty(rows, 576), weight))
