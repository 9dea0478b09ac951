"""What Triton kernels become on real chips, in a process that compiles but has no GPU, started with TRITON_INTERPRET=0.

The kernels are called as ever, on tensors of the CPU. In place of a launch, Triton compiles what it would launch.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

CHIPS: dict[str, tuple[tuple[str, int | str, int], int]] = {  # and bytes of shared memory that a program may have
    "A100": (("cuda", 80, 32), 163 * 1024),
    "H100": (("cuda", 90, 32), 227 * 1024),
    "RTX 5090": (("cuda", 120, 32), 99 * 1024),
    "MI300": (("hip", "gfx942", 64), 64 * 1024),
    "RX 7900": (("hip", "gfx1100", 32), 64 * 1024),
}
ALL_CHIPS = os.environ.get("SPECSERVE_ALL_CHIPS") == "1"  # every kernel for every chip, which takes minutes
ASIDE = 32  # bytes of a thread's stack: addresses that ptxas puts aside before a loop and takes up behind it
SPILLED = re.compile(r"\.vgpr_spill_count:\s+(\d+)")
MMA = re.compile(r"(?:mma\.sync|wgmma\.mma_async)\S*\s+\{([^}]*)\}")


@dataclass
class _Driver:
    """Of a GPU that is not there."""

    target: Any

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


@dataclass
class Compiler:
    """Compiles for one chip what is launched."""

    target: Any
    shared_memory: int
    found: list[Any] = field(default_factory=list)  # compiled kernels, one for each launch

    @property
    def is_cuda(self) -> bool:
        return bool(self.target.backend == "cuda")

    def one(self, launch: Callable[[], object]) -> Any:
        """The first kernel of an op."""
        self.found.clear()
        launch()
        return self.found[0]

    def check(self, kernel: Any) -> None:
        """It fits into shared memory, and spills no registers."""
        assert kernel.metadata.shared <= self.shared_memory, kernel.metadata
        if self.is_cuda:
            usage = resources(kernel)
            assert usage["LOCAL"] == 0 and usage["STACK"] <= ASIDE, f"{kernel.metadata.name} spills: {usage}"
        else:
            spilled = SPILLED.findall(kernel.asm["amdgcn"])
            assert spilled == ["0"], f"{kernel.metadata.name} spills: {spilled} registers"

    def buckets(self, rows_of: Sequence[Sequence[int]], run: Callable[[int], object], most: int = 2) -> list[Any]:
        """The kernel of each bucket; all its numbers of rows have the same one. Of many buckets at most so many are
        compiled, the first and the last, unless all chips are."""
        kernels: list[Any] = []
        some = rows_of if ALL_CHIPS or most >= len(rows_of) else [*rows_of[: most - 1], rows_of[-1]]
        for bucket in some:
            variants = {id(kernel): kernel for kernel in (self.one(partial(run, rows)) for rows in bucket)}
            assert len(variants) == 1, f"{len(variants)} variants for {bucket} rows"
            kernels += variants.values()
        return kernels


@contextmanager
def compiling(chip: str, modules: Sequence[ModuleType]) -> Iterator[Compiler]:
    """While this is open what the kernels of these modules launch is compiled for that chip, and not run."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    target, shared_memory = CHIPS[chip]
    compiler, run = Compiler(GPUTarget(*target), shared_memory), JITFunction.run

    def compiled(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiler.found.append(run(kernel, *args, grid=grid, warmup=True, **options))
        return compiler.found[-1]

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", compiled))
        for module in modules:
            if hasattr(module, "shared_memory_of"):
                memory = compiler.shared_memory
                stack.enter_context(mock.patch.object(module, "shared_memory_of", lambda device, memory=memory: memory))
            for value in vars(module).values():
                if isinstance(value, JITFunction):
                    value.device_caches.clear()  # of the chip before
        driver.set_active(_Driver(compiler.target))
        yield compiler


def resources(kernel: Any) -> dict[str, int]:
    """Registers and bytes of a thread, of NVIDIA's chips."""
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    path = kernel.metadata_group[f"{kernel.metadata.name}.cubin"]
    done = subprocess.run([program, "--dump-resource-usage", path], capture_output=True, text=True, check=True)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout)}


def products_of_a_sum(kernel: Any) -> set[int]:
    """How many products of the tensor cores a step of the loop adds to each accumulator, all as long in k."""
    return set(Counter(MMA.findall(kernel.asm["ptx"])).values())


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)
