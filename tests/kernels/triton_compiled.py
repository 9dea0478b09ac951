"""What the Triton kernels become on real chips, in a process that compiles but has no GPU; run by
test_triton_compiled.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import triton

from specserve.kernels import (
    _triton_adapters as adapters,
    _triton_attention as attention,
    _triton_linear as linear,
    _triton_rows as rows_of,
    _triton_sampling as sampling,
)
from specserve.kernels._torch_sampling import SamplingArrays
from specserve.kernels._triton_bank import Bank, Shrunk
from specserve.testing.compiled import ALL_CHIPS, CHIPS, MMA, Compiler, compiling, empty, products_of_a_sum

BUCKETS = ((1, 2, 15, 16), (17, 32), (33, 48, 64), (65, 96, 256), (257, 4096))
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


@pytest.fixture
def chip(request: pytest.FixtureRequest) -> Iterator[Compiler]:
    with compiling(request.param, (adapters, attention, linear, rows_of, sampling)) as compiler:
        yield compiler


def on(*chips: str) -> pytest.MarkDecorator:
    """Compiles for these chips, or for all."""
    return pytest.mark.parametrize("chip", CHIPS if ALL_CHIPS else chips, indirect=True)


def same_order(chip: Compiler, run: Callable[[int], object], most: int = 2) -> None:
    """All buckets add up in the same order."""
    kernels = chip.buckets(BUCKETS, run, most)
    for kernel in kernels:
        chip.check(kernel)
    if chip.is_cuda:
        steps = [products_of_a_sum(kernel) for kernel in kernels]
        assert steps[0] and all(step == steps[0] for step in steps), f"other steps of k: {steps}"


@on("H100", "RX 7900")
def test_linear(chip: Compiler) -> None:
    weight = empty(960, 576)
    same_order(chip, lambda rows: linear.linear(empty(rows, 576), weight), len(BUCKETS) if chip.is_cuda else 2)


@on("RTX 5090", "MI300")
def test_gated(chip: Compiler) -> None:
    weight, bias = empty(2 * 14336, 4096), empty(2 * 14336)
    same_order(chip, lambda rows: linear.gated(empty(rows, 4096), weight, bias, "silu"))


@on("A100")
def test_logits_and_weights_of_float32(chip: Compiler) -> None:
    head = empty(49152, 576)
    chip.check(chip.one(lambda: linear.linear(empty(3, 576, dtype=FLOAT32), head, None, FLOAT32)))
    for rows in (3, 30):
        chip.check(chip.one(lambda: linear.linear(empty(rows, 576, dtype=FLOAT32), empty(960, 576, dtype=FLOAT32))))  # noqa: B023


def bank(inputs: int, outputs: int, max_rank: int, dtype: torch.dtype = BFLOAT16) -> Bank:
    ranks = torch.zeros(8, dtype=torch.int32)
    return Bank(ranks, empty(8, inputs * max_rank, dtype=dtype), empty(8, outputs * max_rank, dtype=dtype), max_rank)


def shrunk(bank: Bank, rows: int, num_parts: int) -> Shrunk:
    return Shrunk(bank, torch.zeros(rows, dtype=torch.int64), empty(num_parts, rows, bank.max_rank, dtype=FLOAT32))


@on("A100")
@pytest.mark.parametrize(("inputs", "max_rank"), [(576, 192), (14336, 64)][: 2 if ALL_CHIPS else 1])
def test_what_adapters_read_is_added_up_as_weights_do(chip: Compiler, inputs: int, max_rank: int) -> None:
    own = bank(inputs, 960, max_rank)
    same_order(chip, lambda rows: adapters.shrink(empty(rows, inputs), own, torch.zeros(rows, dtype=torch.int64)))
    if chip.is_cuda:
        steps = products_of_a_sum(chip.found[0])
        assert steps == products_of_a_sum(chip.one(lambda: linear.linear(empty(1, inputs), empty(960, inputs))))


@on("H100")
def test_products_with_adapters(chip: Compiler) -> None:
    """A layer's own sum is that of its kernel without adapters."""
    weight, gate_and_up = empty(6144, 4096), empty(2 * 1536, 576)
    own, own_gated = bank(4096, 6144, 192), bank(576, 2 * 1536, 128)

    def product(rows: int, adapted: bool) -> None:
        linear.linear(empty(rows, 4096), weight, None, None, shrunk(own, rows, 2) if adapted else None)

    def gated(rows: int, adapted: bool) -> None:
        added = shrunk(own_gated, rows, 1) if adapted else None
        linear.gated(empty(rows, 576), gate_and_up, None, "silu", added)

    for run in (product, gated) if ALL_CHIPS else (product,):
        same_order(chip, lambda rows: run(rows, True))  # noqa: B023
        if chip.is_cuda:
            with_adapters = products_of_a_sum(chip.found[0])
            assert products_of_a_sum(chip.one(lambda: run(1, False))) == with_adapters - {2}  # noqa: B023


@on("MI300")
def test_adapters_of_float32_and_of_tables(chip: Compiler) -> None:
    own = bank(576, 960, 64, FLOAT32)
    for rows in (3, 30) if ALL_CHIPS else (30,):
        x, slots = empty(rows, 576, dtype=FLOAT32), torch.zeros(rows, dtype=torch.int64)
        weight, head = empty(960, 576, dtype=FLOAT32), empty(960, 576)
        one, other = shrunk(own, rows, 1), shrunk(bank(576, 960, 64), rows, 1)
        for launch in (
            partial(adapters.shrink, x, own, slots),
            partial(linear.linear, x, weight, None, None, one),
            partial(linear.linear, x, head, None, FLOAT32, other),
        ):
            chip.check(chip.one(launch))
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


ATTENTION = [(9, 3, 64, BFLOAT16), (32, 8, 128, BFLOAT16), (4, 4, 80, FLOAT32)]


@pytest.mark.parametrize(
    ("chip", "heads", "kv_heads", "d", "dtype"),
    [(chip, *each) for chip in CHIPS for each in ATTENTION]
    if ALL_CHIPS
    else [(chip, *each) for chip, each in zip(("H100", "RTX 5090", "MI300"), ATTENTION, strict=True)],
    indirect=["chip"],
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
            num_products.append(sum(len(MMA.findall(kernel.asm["ptx"])) for kernel in variants.values()))
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


@on("RX 7900")
def test_ops_on_rows(chip: Compiler) -> None:
    for launch in ops_on_rows():
        chip.one(launch)
        for kernel in chip.found:
            chip.check(kernel)


@on("A100")
def test_sampling(chip: Compiler) -> None:
    """With masks and without, two numbers of rows have the same kernels."""
    hashed = torch.zeros(49152, dtype=torch.int64)

    def run(rows: int, masks: np.ndarray[Any, np.dtype[np.int32]] | None) -> None:
        ids, laws = np.arange(rows), (np.full(rows, law) for law in (0.7, 0.1, 0.9))
        how = SamplingArrays(ids, *laws, np.full(rows, 40), ids)
        sampling.sample(empty(8, 49152, dtype=FLOAT32), how, hashed, masks)

    for masks in (np.zeros((8, 1536), np.int32), None)[: 2 if ALL_CHIPS else 1]:
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
    for launch in launches if ALL_CHIPS else launches[1::3]:
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
        chip.buckets(BUCKETS, lambda rows: linear.linear(empty(rows, 576), weight))
