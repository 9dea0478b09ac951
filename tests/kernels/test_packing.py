"""Weights as sources: integers in groups are the numbers they stand for, parts of a weight are those of its numbers,
and every backend packs either kind to the same bits."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from specserve.errors import ModelError
from specserve.kernels.reference import Kernels
from specserve.models.decoder import Decoder
from specserve.ops import Ops
from specserve.ops.packing import Lazy, Quantized, Shard, Source, Weight, stacked
from specserve.testing import PagedDecoder, llama_spec
from specserve.testing.heads import random_weights

FLOATS = ("reference-float32", "reference-bfloat16", "native-float32", "native-bfloat16")
INTEGERS = ("native-int8", "native-int4")


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
@pytest.mark.parametrize(("axis", "count"), [(0, 2), (0, 3), (1, 2), (1, 3), (1, 8)])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_part_has_the_numbers_of_the_whole(axis: int, count: int, act_order: bool, zeros: str, lazy: bool) -> None:
    weight = quantized(6, 96, 16, act_order=act_order, zeros=zeros)
    source: Source = Lazy(weight.shape, lambda: weight) if lazy else weight
    parts = [Shard(axis, index, count).cut(source) for index in range(count)]
    for part, numbers in zip(parts, weight[:].chunk(count, axis), strict=True):
        assert tuple(part.shape) == tuple(numbers.shape)
        assert torch.equal(part[:], numbers)
        assert torch.equal(Shard(axis, 0, 1).cut(part)[:], numbers)
    floats = [Shard(axis, index, count).cut(weight[:]) for index in range(count)]
    assert all(torch.equal(part[:], one[:]) for part, one in zip(parts, floats, strict=True))


def test_a_part_along_groups_has_its_own_scales_alone() -> None:
    weight = quantized(4, 96, 16)
    along, through = Shard(1, 1, 3).cut(weight), Shard(1, 1, 4).cut(weight)
    assert isinstance(along, Quantized) and isinstance(through, Quantized)
    assert along.order is None and along.scales.shape == (4, 2)
    assert through.order is not None and through.order.tolist() == [1] * 8 + [2] * 16


def test_a_lazy_weight_is_cut_when_it_is_read() -> None:
    reads: list[int] = []

    def read() -> Weight:
        reads.append(1)
        return torch.arange(12.0).view(4, 3)

    part = Shard(0, 1, 2).cut(Lazy((4, 3), read))
    assert part.shape == (2, 3) and not reads
    assert part[:].tolist() == [[6.0, 7.0, 8.0], [9.0, 10.0, 11.0]] and reads == [1]


def test_a_bias_is_cut_by_rows() -> None:
    assert Shard(0, 2, 3).cut(torch.arange(6.0))[:].tolist() == [4.0, 5.0]


@pytest.mark.parametrize(("axis", "words"), [(0, "7 rows has no 2"), (1, "9 columns has no 2")])
def test_what_has_no_equal_parts_is_refused(axis: int, words: str) -> None:
    for source in (torch.zeros(7, 9), quantized(7, 9, 3), Lazy((7, 9), lambda: pytest.fail("it was read"))):
        with pytest.raises(ModelError, match=words):
            Shard(axis, 0, 2).cut(source)


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


# Backends


@pytest.fixture(params=(*FLOATS, *INTEGERS))
def ops(request: pytest.FixtureRequest) -> Ops:
    """Skips native kernels that were not built; with SPECSERVE_REQUIRE_NATIVE=1 that fails."""
    backend, weights = request.param.split("-")
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    if backend == "reference":
        reference: Ops = Kernels(torch.device("cpu"), dtype)
        return reference
    required = os.environ.get("SPECSERVE_REQUIRE_NATIVE") == "1"
    if importlib.util.find_spec("specserve.kernels._native") is None and not required:
        pytest.skip("Built without native kernels.")
    module: Any = importlib.import_module("specserve.kernels.cpu")
    native: Ops = module.Kernels(dtype, weights if weights.startswith("int") else "none", threads=1)
    return native


def products(ops: Ops, one: Source, other: Source) -> list[Tensor]:
    """What linear layers, a head and a table make of two weights [n, in]."""
    x = ops.quantize_activation(torch.randn((4, one.shape[1]), generator=torch.Generator().manual_seed(3)))
    found = [ops.linear(x, ops.pack(one)).clone(), ops.linear(x, ops.pack_head(other)).clone()]
    down = ops.pack(torch.eye(one.shape[0]))
    found.append(ops.linear(ops.gated(x, ops.pack_gated(one, other, None, None), "silu"), down).clone())
    return [*found, ops.pack_table(one)]


@pytest.mark.parametrize("act_order", [False, True])
def test_integers_are_packed_as_their_numbers_are(ops: Ops, act_order: bool) -> None:
    one, other = (quantized(40, 128, 64, act_order=act_order, seed=seed) for seed in (1, 2))
    wanted = products(ops, one[:], other[:])
    lazy = Lazy(one.shape, lambda: one), Lazy(other.shape, lambda: other)
    for found in (products(ops, one, other), products(ops, *lazy)):
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_a_decoder_of_integers_is_one_of_their_numbers(ops: Ops) -> None:
    spec = llama_spec(
        vocab_size=60, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, max_len=32
    )
    plain = random_weights(spec.shapes())
    weights: dict[str, Weight] = {
        name: quantized(*tensor.shape, 32, act_order="o_proj" in name, seed=seed) if "proj" in name else tensor
        for seed, (name, tensor) in enumerate(plain.items())
    }
    numbers = {name: weight[:] for name, weight in weights.items()}
    decoders = [PagedDecoder(Decoder(spec, each, ops), 1, 32) for each in (weights, numbers)]
    found, wanted = (each.chunks(0, list(range(20)), 7) for each in decoders)
    assert torch.equal(found, wanted)
