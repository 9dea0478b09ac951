"""Weights as sources: integers in groups are the numbers they stand for, parts of a weight are those of its numbers,
and every backend packs either kind to the same bits."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from specserve.kernels.reference import Kernels
from specserve.models.decoder import Decoder
from specserve.ops import Ops
from specserve.ops.packing import Lazy, Quantized, Source, Weight, cut, reordered, scaled as multiplied, stacked
from specserve.testing import PagedDecoder, llama_spec
from specserve.testing.heads import random_weights

FLOATS = ("reference-float32", "reference-bfloat16", "native-float32", "native-bfloat16")
INTEGERS = ("native-int8", "native-int4", "reference-int8", "reference-int4")
INT4 = ("native-int4", "reference-int4")
INT8 = ("native-int8", "reference-int8")


def quantized(
    rows: int, columns: int, group: int, *, act_order: bool = False, zeros: str = "integers", seed: int = 0
) -> Quantized:
    """Random int4 with scales as checkpoints have them, float16."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-columns // group)
    order = torch.arange(columns) // group
    offsets = {
        "none": None,
        "integers": torch.randint(0, 16, (rows, groups), generator=generator, dtype=torch.uint8),
        "floats": torch.rand((rows, groups), generator=generator) * 15,
    }
    return Quantized(
        ints=torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8),
        scales=(torch.rand((rows, groups), generator=generator) * 0.1).half(),
        zeros=offsets[zeros],
        group=group,
        order=order[torch.randperm(columns, generator=generator)].int() if act_order else None,
    )


def one_by_one(weight: Quantized) -> Tensor:
    """Its numbers by the formula, in float32."""
    rows, columns = weight.shape
    found = torch.empty(rows, columns)
    for o in range(rows):
        for i in range(columns):
            g = i // weight.group if weight.order is None else int(weight.order[i])
            zero = 0.0 if weight.zeros is None else float(weight.zeros[o, g])
            found[o, i] = torch.tensor(float(weight.ints[o, i]) - zero) * weight.scales[o, g].float()
    return found


def test_numbers_of_a_small_matrix() -> None:
    weight = Quantized(
        ints=torch.tensor([[0, 15, 8, 1], [3, 3, 0, 7]]),
        scales=torch.tensor([[0.5, 2.0], [1.0, 0.25]]),
        zeros=torch.tensor([[8, 1], [0, 7]]),
        group=2,
    )
    assert weight[:].tolist() == [[-4.0, 3.5, 14.0, 0.0], [3.0, 3.0, -1.75, 0.0]]
    assert weight[1:].tolist() == [[3.0, 3.0, -1.75, 0.0]]


def test_act_order_says_the_group_of_each_input() -> None:
    weight = Quantized(
        ints=torch.tensor([[1, 2, 3, 4]], dtype=torch.int8),
        scales=torch.tensor([[1.0, 10.0]]),
        zeros=None,
        group=2,
        order=torch.tensor([1, 0, 0, 1], dtype=torch.int32),
    )
    assert weight[:].tolist() == [[10.0, 2.0, 3.0, 40.0]]


@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 40),
    group=st.integers(1, 16),
    act_order=st.booleans(),
    zeros=st.sampled_from(["none", "integers", "floats"]),
    seed=st.integers(0, 100),
)
def test_numbers_are_those_of_the_formula(rows: int, columns: int, group: int, **more: Any) -> None:
    weight = quantized(rows, columns, group, **more)
    assert weight.shape == (rows, columns) and weight[:].dtype == torch.float32
    assert torch.equal(weight[:], one_by_one(weight))


# Parts


@pytest.mark.parametrize("zeros", ["none", "integers", "floats"])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("axis", "sizes"), [(0, (3, 3)), (0, (1, 5)), (1, (48, 48)), (1, (32, 64)), (1, (12, 20, 64))])
def test_a_part_has_the_numbers_of_the_whole(axis: int, sizes: tuple[int, ...], act_order: bool, zeros: str) -> None:
    weight, start = quantized(6, 96, 16, act_order=act_order, zeros=zeros), 0
    for size, numbers in zip(sizes, weight[:].split(sizes, axis), strict=True):
        part = cut(weight, axis, range(start, start + size))
        assert tuple(part.shape) == tuple(numbers.shape)
        assert torch.equal(part[:], numbers)
        assert torch.equal(cut(weight[:], axis, range(start, start + size))[:], numbers)
        assert torch.equal(cut(part, axis, range(size))[:], numbers)
        start += size


def test_a_part_along_groups_has_its_own_scales_alone() -> None:
    weight = quantized(4, 96, 16)
    along, through = cut(weight, 1, range(32, 64)), cut(weight, 1, range(24, 48))
    assert isinstance(along, Quantized) and isinstance(through, Quantized)
    assert along.order is None and along.scales.shape == (4, 2)
    assert through.order is not None and through.order.tolist() == [1] * 8 + [2] * 16


def test_a_bias_is_cut_by_rows() -> None:
    assert cut(torch.arange(6.0), 0, range(4, 6))[:].tolist() == [4.0, 5.0]


# Rows of several


@pytest.mark.parametrize("act_order", [False, True])
def test_stacked_integers_stay_integers(act_order: bool) -> None:
    one, other = quantized(3, 32, 8, act_order=act_order), quantized(2, 32, 8, act_order=act_order, zeros="none")
    other = Quantized(other.ints, other.scales, None, 8, one.order)
    for parts in ([one, other], [other, one], [other, other], [one]):
        whole = stacked(parts)
        assert isinstance(whole, Quantized)
        assert torch.equal(whole[:], torch.cat([part[:] for part in parts]))
        assert whole.ints.data_ptr() != parts[0].ints.data_ptr()


def test_stacked_of_different_groups_are_floats() -> None:
    first = quantized(3, 32, 8)
    others: list[Weight] = [quantized(2, 32, 16), quantized(2, 32, 8, act_order=True), torch.randn(2, 32)]
    for other in others:
        for parts in ([first, other], [other, first]):
            whole = stacked(parts)
            assert isinstance(whole, Tensor)
            assert torch.equal(whole, torch.cat([part[:] for part in parts]))


def test_scaled_integers_are_scaled_numbers() -> None:
    weight = quantized(3, 32, 8, act_order=True)
    found = multiplied(weight, 0.5)
    assert isinstance(found, Quantized) and torch.equal(found[:], weight[:] * 0.5)
    assert torch.equal(multiplied(weight[:], 0.5)[:], weight[:] * 0.5)
    assert multiplied(weight, 1.0) is weight


def test_rows_of_integers_in_another_order() -> None:
    weight, rows = quantized(4, 32, 8, act_order=True), torch.tensor([3, 0, 2, 1])
    found = reordered(weight, rows)
    assert isinstance(found, Quantized) and torch.equal(found[:], weight[:][rows])
    assert torch.equal(reordered(torch.arange(4.0), rows)[:], torch.tensor([3.0, 0.0, 2.0, 1.0]))
    assert reordered(weight, None) is weight


# Backends


def make_ops(name: str) -> Ops:
    """Kernels by name: reference or native, then how they keep weights. Skips native ones that were not built; with
    SPECSERVE_REQUIRE_NATIVE=1 that fails."""
    backend, weights = name.split("-")
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    if backend == "reference":
        quantization = weights if weights.startswith("int") else "none"
        reference: Ops = Kernels(torch.device("cpu"), dtype, quantization=quantization)
        return reference
    required = os.environ.get("SPECSERVE_REQUIRE_NATIVE") == "1"
    if importlib.util.find_spec("specserve.kernels._native") is None and not required:
        pytest.skip("Built without native kernels.")
    module: Any = importlib.import_module("specserve.kernels.cpu")
    native: Ops = module.Kernels(dtype, weights if weights.startswith("int") else "none", threads=1)
    return native


def dense(ops: Ops, packed: Any, columns: int) -> Tensor:
    """The matrix that linear layers multiply with, float32 [out, in]; one step of an activation is 1 / 127."""
    return ops.linear(ops.quantize_activation(torch.eye(columns)), packed).float().T.clone()


def in_memory(ops: Ops, one: Source, other: Source) -> list[Tensor]:
    """What is multiplied with of two weights [n, in], as linear layer, head and gated MLP; and a table."""
    columns = one.shape[1]
    found = [dense(ops, ops.pack(one), columns), dense(ops, ops.pack_head(other), columns)]
    rows = ops.quantize_activation(torch.eye(columns))
    gated = ops.gated(rows, ops.pack_gated(one, other, None, None), "silu")
    found.append(ops.linear(gated, ops.pack(torch.eye(one.shape[0]))).float().T.clone())
    return [*found, ops.pack_table(one)]


@pytest.mark.parametrize("kernels", FLOATS)
@pytest.mark.parametrize("act_order", [False, True])
def test_floats_of_integers_are_their_numbers(kernels: str, act_order: bool) -> None:
    ops = make_ops(kernels)
    one, other = (quantized(40, 128, 64, act_order=act_order, seed=seed) for seed in (1, 2))
    lazy = Lazy(one.shape, lambda: one), Lazy(other.shape, lambda: other)
    wanted = in_memory(ops, one[:], other[:])
    for found in (in_memory(ops, one, other), in_memory(ops, *lazy)):
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kernels", INTEGERS)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("zeros", ["none", "integers"])
def test_integers_that_fit_are_kept(kernels: str, group: int, zeros: str) -> None:
    """But for what float16 rounds of int4's minima, and not so if they are rounded again."""
    ops = make_ops(kernels)
    weight, other = (quantized(40, 256, group, zeros=zeros, seed=seed) for seed in (1, 2))
    least = torch.zeros(1) if weight.zeros is None else weight.of_inputs(weight.zeros) * weight.of_inputs(weight.scales)
    tolerance = 1e-6 + (least * 2.0**-11 if kernels in INT4 else 0)
    kept, rounded = (dense(ops, ops.pack(each), 256) for each in (weight, weight[:]))
    assert ((kept - weight[:]).abs() <= tolerance).all()
    if zeros == "integers" and group > 32:
        assert (kept - weight[:]).norm() < 0.1 * (rounded - weight[:]).norm()
    _, head, gated, _ = in_memory(ops, weight, other)
    assert ((head - other[:]).abs() <= 1e-6).all()  # a head is int8
    apart = torch.nn.functional.silu(kept) * dense(ops, ops.pack(other), 256)
    assert (gated - apart).norm() < 0.02 * apart.norm()


@pytest.mark.parametrize("kernels", INT4)
def test_signed_int4_is_kept(kernels: str) -> None:
    ops = make_ops(kernels)
    weight = quantized(33, 64, 64, zeros="none")
    signed = Quantized((weight.ints.char() - 8), weight.scales, None, 64)
    found = dense(ops, ops.pack(signed), 64)
    torch.testing.assert_close(found, signed[:], rtol=1e-6, atol=1e-7)


WEIGHT = quantized(40, 128, 64)
MISFITS: dict[str, tuple[Quantized, tuple[str, ...]]] = {
    "act-order": (quantized(40, 128, 64, act_order=True), INTEGERS),
    "small groups": (quantized(40, 128, 16), INTEGERS),
    "odd groups": (quantized(40, 144, 48), INTEGERS),
    "half a group": (quantized(40, 112, 64), INTEGERS),
    "tiny scales": (dataclasses.replace(WEIGHT, scales=WEIGHT.scales.float() * 1e-7), INTEGERS),
    "huge scales": (dataclasses.replace(WEIGHT, scales=WEIGHT.scales.float() * 1e7), INTEGERS),
    "fine scales": (dataclasses.replace(WEIGHT, scales=torch.full((40, 2), 6.1e-6 / 7)), INTEGERS),
    "8 bits": (dataclasses.replace(WEIGHT, ints=WEIGHT.ints * 16), INT4),
    "beyond 127": (dataclasses.replace(WEIGHT, ints=WEIGHT.ints.short() * 16), INT8),
    "half a zero": (quantized(40, 128, 64, zeros="floats"), INT8),
}


def same_memory(one: Any, other: Any) -> bool:
    """Whether two packed weights are the same bytes."""
    parts = [(each.memory,) if hasattr(each, "memory") else each.groups[:3] for each in (one, other)]
    return all(left is right if left is None else torch.equal(left, right) for left, right in zip(*parts, strict=True))


@pytest.mark.parametrize("misfit", MISFITS)
def test_integers_that_do_not_fit_are_rounded_as_their_numbers_are(misfit: str) -> None:
    weight, kernels = MISFITS[misfit]
    for name in kernels:
        ops = make_ops(name)
        assert same_memory(ops.pack(weight), ops.pack(weight[:]))


@pytest.mark.parametrize("kernels", [*FLOATS, *INTEGERS])
def test_a_decoder_of_integers_is_one_of_their_numbers(kernels: str) -> None:
    spec = llama_spec(
        vocab_size=60, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, max_len=32
    )
    plain = random_weights(spec.shapes())
    weights: dict[str, Weight] = {
        name: scaled(quantized(*tensor.shape, 32, act_order="o_proj" in name, seed=seed)) if "proj" in name else tensor
        for seed, (name, tensor) in enumerate(plain.items())
    }
    numbers = {name: weight[:] for name, weight in weights.items()}

    def logits(ops: Ops, of: Mapping[str, Weight]) -> Tensor:
        return PagedDecoder(Decoder(spec, of, ops), 1, 32).chunks(0, list(range(20)), 7)

    found, wanted = logits(make_ops(kernels), weights), logits(make_ops(kernels), numbers)
    if kernels in FLOATS:
        assert torch.equal(found, wanted)
        return
    exact = logits(make_ops("reference-float32"), numbers)
    assert not torch.equal(found, wanted)
    # Rounding activations is most of it, and differs from step to step of numbers that are next to each other.
    assert (found - exact).norm() < 1.05 * (wanted - exact).norm()


def scaled(weight: Quantized) -> Quantized:
    """To numbers of the size that layers have."""
    return dataclasses.replace(weight, scales=weight.scales * 0.3)


@pytest.mark.parametrize("kernels", INT8)
@pytest.mark.parametrize("group", [32, 128])
def test_all_of_8_bits_are_kept(kernels: str, group: int) -> None:
    """-128 too, which a symmetric GPTQ checkpoint has in most groups."""
    ints = torch.arange(40 * 128).view(40, 128) % 256
    weight = dataclasses.replace(quantized(40, 128, group), ints=ints, zeros=torch.full((40, 128 // group), 128))
    ops = make_ops(kernels)
    torch.testing.assert_close(dense(ops, ops.pack(weight), 128), weight[:], rtol=1e-6, atol=1e-6)
    wide = dataclasses.replace(weight, zeros=torch.full((40, 128 // group), 127))
    assert same_memory(ops.pack(wide), ops.pack(wide[:]))


@pytest.mark.parametrize("kernels", INTEGERS)
def test_groups_of_dead_inputs_do_not_cost_the_others_their_integers(kernels: str) -> None:
    ops, scales = make_ops(kernels), WEIGHT.scales.float()
    scales[:, 1] = torch.tensor([0.0, 1e-9, 1e-7, 1e-6]).repeat(10)
    weight = dataclasses.replace(WEIGHT, scales=scales, zeros=torch.full((40, 2), 8))
    found = dense(ops, ops.pack(weight), 128)
    torch.testing.assert_close(found[:, :64], weight[:][:, :64], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[:, 64:], weight[:][:, 64:], rtol=0, atol=16 * 2.0**-25)  # of subnormals
