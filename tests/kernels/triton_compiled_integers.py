"""What the Triton kernels of int8 and int4 become on real chips, without one; run by test_triton_compiled.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from specserve.kernels import (
    _triton_adapters as adapters,
    _triton_experts as floats,
    _triton_groups as groups,
    _triton_integer_experts as integer_experts,
    _triton_integers as integers,
    _triton_linear as linear,
    _triton_rows as rows_of,
)
from specserve.kernels._triton_bank import Bank, Shrunk
from specserve.kernels._triton_groups import Integers, Rows
from specserve.testing.compiled import ALL_CHIPS, CHIPS, MMA, Compiler, compiling, empty

BUCKETS = ((1, 2, 15, 16), (17, 32), (33, 64), (65, 4096))
FLOAT32 = torch.float32


@pytest.fixture
def chip(request: pytest.FixtureRequest) -> Iterator[Compiler]:
    with compiling(request.param, (adapters, floats, integer_experts, integers, linear, rows_of)) as compiler:
        yield compiler


def weight(form: str, n: int, k: int, times: int = 1) -> Integers:
    """Of nothing in particular."""
    num_groups, steps = k // 32, empty(k // 32 // times, n, dtype=torch.float16)
    if form == "int8":
        return Integers(empty(num_groups, n, 32, dtype=torch.int8), steps, None, None, times, k)
    return Integers(empty(num_groups // 2, n, 32, dtype=torch.uint8), steps, steps.clone(), None, times, k)


def rows(count: int, k: int) -> Rows:
    return groups.empty_rows(count, k, torch.device("cpu"))


def additions_of_a_group(kernel: Any) -> float:
    """How many additions to a row's sum follow a group's product, of 32 inputs, on the tensor cores."""
    ptx = kernel.asm["ptx"]
    num_sums = sum(len(registers.split(",")) for registers in MMA.findall(ptx))
    return (ptx.count("fma.rn.f32") + ptx.count("fma.rn.f32x2")) / num_sums  # which does two


def on(*chips: str) -> pytest.MarkDecorator:
    """Compiles for these chips, or for all."""
    return pytest.mark.parametrize("chip", CHIPS if ALL_CHIPS else chips, indirect=True)


def same_order(chip: Compiler, run: Callable[[int], object], most: int = 2) -> set[float]:
    """All buckets add up the groups in the same order: one after the other, each with as many additions."""
    kernels = chip.buckets(BUCKETS, run, most)
    for kernel in kernels:
        chip.check(kernel)
    if not chip.is_cuda:
        return set()
    found = [additions_of_a_group(kernel) for kernel in kernels]
    assert len(set(found)) == 1, f"other sums of groups: {found}"
    return set(found)


@on("H100", "MI300")
def test_linear_of_int8(chip: Compiler) -> None:
    own, most = weight("int8", 960, 576), 4 if chip.target.arch == 90 else 2
    found = same_order(chip, lambda count: integers.linear(rows(count, 576), own, torch.bfloat16), most)
    assert found <= {1.0}


@on("RTX 5090", "RX 7900")
def test_linear_of_int4(chip: Compiler) -> None:
    own = weight("int4", 6144, 4096, 4)
    assert same_order(chip, lambda count: integers.linear(rows(count, 4096), own, torch.bfloat16)) <= {2.0}


@on("H100")
@pytest.mark.parametrize("form", ["int8", "int4"][: 2 if ALL_CHIPS else 1])
def test_layers_with_activations(chip: Compiler, form: str) -> None:
    gated, plain = weight(form, 2 * 1536, 576), weight(form, 3072, 768)
    launches: list[Callable[[int], object]] = [
        lambda n: integers.gated(rows(n, 576), gated, "silu"),
        lambda n: integers.activated(rows(n, 768), plain, "gelu"),
    ]
    for launch, buckets in zip(launches, (BUCKETS, BUCKETS[:1]), strict=True):
        for kernel in chip.buckets(buckets, launch):
            chip.check(kernel)


@on("MI300", "RX 7900")
def test_gated_of_int4_where_registers_are_few(chip: Compiler) -> None:
    own = weight("int4", 2 * 1536, 576)
    for kernel in chip.buckets(
        BUCKETS if ALL_CHIPS else BUCKETS[-1:], lambda n: integers.gated(rows(n, 576), own, "silu")
    ):
        chip.check(kernel)


@on("A100")
def test_rows(chip: Compiler) -> None:
    residual, of_norm = empty(3, 576, dtype=FLOAT32), empty(576, dtype=FLOAT32)
    launches: list[Callable[[int], object]] = [
        lambda n: integers.quantize(empty(n, 576, dtype=FLOAT32)),
        lambda n: rows_of.add_rms_norm_quantized(
            residual[:1].expand(n, -1).contiguous(), empty(n, 576), None, of_norm, 1e-5
        ),
    ]
    for launch in launches:
        for kernel in chip.buckets(((1, 3, 16),), launch):
            chip.check(kernel)


@on("H100")
def test_adapters(chip: Compiler) -> None:
    bank = Bank(torch.zeros(8, dtype=torch.int32), empty(8, 64 * 576), empty(8, 64 * 960), 64)

    def shrunk(count: int) -> Shrunk:
        return Shrunk(bank, torch.zeros(count, dtype=torch.int64), empty(1, count, 64, dtype=FLOAT32))

    own = weight("int8", 960, 576)
    launches: list[Callable[[int], object]] = [
        lambda n: adapters.shrink(rows(n, 576), bank, torch.zeros(n, dtype=torch.int64)),
        lambda n: integers.linear(rows(n, 576), own, torch.bfloat16, shrunk(n)),
    ]
    for launch in launches:
        for kernel in chip.buckets(BUCKETS if ALL_CHIPS else BUCKETS[:1], launch):
            chip.check(kernel)


@triton.jit
def planted(total, left, right, scale, step):  # type: ignore[no-untyped-def]
    """A group's sum, in two where a program has many rows."""
    dots = tl.dot(left, right, out_dtype=tl.int32)
    factor = tl.broadcast_to(scale[:, None] * step[None, :], total.shape)
    if total.shape[0] > 16:
        total = tl.fma((dots >> 4).to(tl.float32) * 16.0, factor, total)
        dots = dots & 15
    return tl.fma(dots.to(tl.float32), factor, total)


@pytest.mark.parametrize("chip", ["H100"], indirect=True)
def test_sums_that_depend_on_the_rows_are_noticed(chip: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integers, "_add_group", planted)
    for name in ("product", "_linear_kernel"):
        plain = getattr(integers, name)
        monkeypatch.setattr(integers, name, triton.jit(plain.fn, do_not_specialize=plain.do_not_specialize))
    own = weight("int8", 960, 576)
    with pytest.raises(AssertionError, match="other sums of groups"):
        same_order(chip, lambda count: integers.linear(rows(count, 576), own, torch.bfloat16))


@on("A100", "MI300")
@pytest.mark.parametrize("form", ["none", "int8", "int4"][: 3 if ALL_CHIPS else 2])
def test_experts(chip: Compiler, form: str) -> None:
    """The kernels of 16 rows or fewer are the same."""
    found = {}
    for count in (1, 16):
        chosen, shares = torch.zeros((count, 4), dtype=torch.int64), empty(count, 4, dtype=FLOAT32)
        if form == "none":
            given: Any = empty(count, 576)
            launch = floats.experts, given, groups.Experts(empty(8, 512, 576), empty(8, 576, 256)), chosen, shares
        else:
            pair = (groups.stacked([weight(form, n, k)] * 8) for n, k in ((512, 576), (576, 256)))
            launch = integer_experts.experts, rows(count, 576), groups.IntegerExperts(*pair), chosen, shares
        chip.one(lambda: launch[0](*launch[1:], "silu", None))  # noqa: B023
        found |= {id(kernel): kernel for kernel in chip.found}
    assert len(found) == 4, [kernel.metadata.name for kernel in found.values()]
    for kernel in found.values():
        chip.check(kernel)
