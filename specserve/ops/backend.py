"""What a kernel backend declares: which engines it can serve, and how its kernels are made for one.

A backend is a file of kernels/ with one public class named ...Kernels that has these two class methods, and states its
PRIORITY; see specserve.registry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from specserve.ops import Ops
from specserve.ops.isa import choose_isa


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """What an engine is to run with, as EngineConfig says it: "auto" is the backend's choice."""

    device: torch.device
    dtype: str = "auto"
    quantization: str = "auto"
    threads: int = 1
    isa: str = "auto"

    def __str__(self) -> str:
        named = {"dtype": self.dtype, "quantization": self.quantization, "isa": self.isa}
        return " ".join([f"--device {self.device}", *(f"--{k} {v}" for k, v in named.items() if v != "auto")])

    def on_cpu(self, instruction_sets: list[str], kernels: str) -> tuple[torch.dtype, str]:
        """The dtype and the instruction set for a CPU where `kernels` have these, the fastest first. "auto" is bfloat16
        where the processor multiplies it natively, else float32: an emulated bfloat16 is slower than float32.

        Raises ConfigError for an instruction set that is not there.
        """
        isa = choose_isa(self.isa, instruction_sets, kernels)
        if self.dtype != "auto":
            return getattr(torch, self.dtype), isa
        return torch.bfloat16 if isa == "avx512" and torch.cpu._is_avx512_bf16_supported() else torch.float32, isa


class KernelBackend(Protocol):
    """The class in a backend's file."""

    def supports(self, asked: KernelOptions) -> str | None:
        """None where it can serve such an engine, else why it cannot, as what follows its name in a sentence. The
        highest PRIORITY that can is taken, and refuses an instruction set that it does not have itself."""

    def create(self, asked: KernelOptions) -> Ops:
        """The kernels for an engine that it supports. Raises ConfigError."""
