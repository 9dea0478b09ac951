"""Whether a device's ops compute what the reference does, and give a row among others the bits that it has alone.

What a GPU does with kernels follows from its driver, the compiler and the libraries of that machine, which nobody has
tested together before. So an engine on a GPU begins with this test: a few small inputs for every op that its model
uses. Numbers are drawn with fixed seeds, so that two starts test the same and kernels are compiled once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from specserve.ops import Ops
from specserve.ops.selftest.attention import CHECKS as OF_ATTENTION
from specserve.ops.selftest.checks import CHECKS as OF_ROWS
from specserve.ops.selftest.inputs import NUM_ROWS, Check, Inputs, Rows
from specserve.ops.selftest.uses import Uses

# Largest difference to the reference, of results that are about 1, by how weights are stored. Sums in float32 have
# another order than the reference's, bfloat16 is rounded at the same places, and integers round what they read, too.
_TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2, "int8": 6e-2, "int4": 6e-2}

_MOST_TOLD = 3  # faults with their reasons, of others the names


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with an op. `is_wrong`: its numbers are; else the bits of a row depend on other rows."""

    name: str  # of the check
    why: str
    is_wrong: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


@dataclass(frozen=True, slots=True)
class Findings:
    num_checks: int
    faults: tuple[Fault, ...]
    seconds: float

    @property
    def wrong(self) -> tuple[Fault, ...]:
        """The faults that change what is computed by more than rounding."""
        return tuple(fault for fault in self.faults if fault.is_wrong)

    def __str__(self) -> str:
        """For people."""
        if not self.faults:
            return f"all {self.num_checks} checks passed in {self.seconds:.2f} s"
        told = [str(fault) for fault in self.faults[:_MOST_TOLD]]
        told += [fault.name for fault in self.faults[_MOST_TOLD:]]
        return f"{len(self.faults)} of {self.num_checks} checks failed: {'; '.join(told)}"


def self_test(
    ops: Ops,
    twin: Ops,
    uses: Uses | None = None,
    block_size: int = 16,
    num_rows: int = NUM_ROWS,
    checks: Sequence[Check] = (*OF_ROWS, *OF_ATTENTION),
) -> Findings:
    """Run those of the checks that are of ops that a model with these `uses` calls; None: of all ops. `twin` is the
    reference on the CPU, in the dtype of `ops`, and says which numbers are right. A row alone is compared with itself
    among 2 rows to `num_rows`, 17 at most. Never raises for what `ops` do: that is a fault."""
    started, asked = time.perf_counter(), uses or Uses()
    own = [check for check in checks if asked.has(check.needs)]
    faults: list[Fault] = []
    for check in own:
        inputs, same = (Inputs(each, asked, block_size, crc32(check.name.encode())) for each in (ops, twin))
        faults += _faults(check, inputs, same, num_rows)
    return Findings(len(own), tuple(faults), time.perf_counter() - started)


def _faults(check: Check, inputs: Inputs, same: Inputs, num_rows: int) -> Iterator[Fault]:
    """`same` are those of the reference."""
    try:
        compute = check.prepare(inputs)
        whole = _found(compute, 0, num_rows)
    except Exception as error:  # of a compiler, a driver or a library: whatever it is, the op cannot be used
        yield Fault(check.name, f"it fails with {type(error).__name__}: {_first_line(error)}", True)
        return
    ops, expected = inputs.ops, _found(check.prepare(same), 0, num_rows)
    tolerance = _TOLERANCES[ops.quantization if ops.quantization != "none" else str(ops.dtype).removeprefix("torch.")]
    if (why := _difference(whole, expected, tolerance)) is not None:
        yield Fault(check.name, why, True)
    elif check.by_row and (why := _other_bits(compute, whole, num_rows)) is not None:
        yield Fault(check.name, why, False)


@torch.inference_mode()
def _found(compute: Rows, start: int, stop: int) -> list[Tensor]:
    return [part.cpu() for part in compute(start, stop)]


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> str | None:
    """How results differ from those that are right, if they do."""
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape:
            return f"its result is {list(one.shape)} and not {list(other.shape)}"
        if not other.is_floating_point():
            if (wrong := int((one != other).sum())) > 0:
                return f"{wrong} of its {other.numel()} integers are wrong"
            continue
        off = (one.double() - other.double()).abs() - tolerance * other.double().abs()
        if not bool((most := off.nan_to_num(torch.inf).max()) <= tolerance):
            return f"it is off by {most + tolerance:.2g}, and {tolerance:.2g} may come of rounding"
    return None


def _other_bits(compute: Rows, whole: list[Tensor], num_rows: int) -> str | None:
    """Among how many rows a row has other bits than alone, if it has. All rows are looked at."""
    single = [_found(compute, row, row + 1) for row in range(num_rows)]
    alone = [torch.cat(parts) for parts in zip(*single, strict=True)]
    for count in range(2, num_rows + 1):
        among = whole if count == num_rows else _found(compute, 0, count)
        for one, other in zip(among, alone, strict=True):
            differs = (one != other[:count]).reshape(count, -1).any(1)
            if rows := differs.nonzero()[:, 0].tolist():
                return f"row {rows[0]} of {count} has other bits than alone"
    return None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "no reason given")[:200]
