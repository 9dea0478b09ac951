"""LayerNorm, learned positions, layers that are activated and not gated, biases of heads, sums: by the reference and by
the native kernels of every instruction set and format, against float64, and row by row."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specserve.kernels.reference import Kernels as Reference
from specserve.ops import ACTIVATIONS, Placed
from specserve.ops.isa import choose_isa

CPU = torch.device("cpu")
EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "gelu": F.gelu,
}
ROWS, EPS = 40, 1e-5


def native_cases() -> list[tuple[str, str]]:
    required = os.environ.get("SPECSERVE_REQUIRE_NATIVE") == "1"
    if importlib.util.find_spec("specserve.kernels._native") is None and not required:
        return []
    sets = importlib.import_module("specserve.kernels.cpu").instruction_sets()
    allowed = sets[sets.index(choose_isa("auto", sets, "native")) :]
    return list(itertools.product(allowed, ("float32", "bfloat16", "int8", "int4")))


@pytest.fixture(params=[("torch", "float32"), ("torch", "bfloat16"), *native_cases()], ids="-".join)
def ops(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(3)
    kind, weights = request.param
    dtype = torch.bfloat16 if weights == "bfloat16" else torch.float32
    if kind == "torch":
        return Reference(CPU, dtype)
    native = importlib.import_module("specserve.kernels.cpu")
    return native.Kernels(dtype, weights if weights.startswith("int") else "none", 1, kind)


def read(ops: Any, x: Any) -> Tensor:
    """What a linear layer reads, through the identity."""
    width = x.shape[1] if isinstance(x, Tensor) else x.width
    found: Tensor = ops.linear(x, ops.pack(torch.eye(width)))
    return found.double()


def tolerance(ops: Any) -> float:
    """Of numbers of the size of 1 that a linear layer reads."""
    if ops.dtype == torch.bfloat16:
        return 0.01
    return 1e-5 if ops.quantization == "none" else 0.04


def owned(ops: Any, x: Tensor) -> Tensor:
    """x, as rows that an op returned."""
    rows: Tensor = ops.embed(torch.arange(len(x)), x.contiguous(), 1.0)
    return rows


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.layer_norm(x.double(), weight.shape, weight.double(), None if bias is None else bias.double(), EPS)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("hidden", [36, 96, 133])
def test_layer_norms(ops: Any, hidden: int, has_bias: bool) -> None:
    """Of numbers far from 0, too: the mean is subtracted before squares are added up."""
    residual, delta = torch.randn(ROWS, hidden) + 30, torch.randn(ROWS, hidden)
    weight, bias = torch.randn(hidden), torch.randn(hidden) if has_bias else None
    packed = ops.pack_layer_norm(weight, bias)
    wanted = layer_norm(residual + delta, weight, bias)
    stream = owned(ops, residual)
    found = read(ops, ops.fused_add_norm(stream, owned(ops, delta), None, packed, EPS))
    error = (found - wanted).abs().max() / wanted.abs().max()
    assert error < tolerance(ops)
    torch.testing.assert_close(stream, residual + delta)
    whole = ops.norm(stream, packed, EPS).clone()
    assert (whole - wanted).abs().max() / wanted.abs().max() < (1e-5 if ops.dtype == torch.float32 else 0.01)
    for start, rows in ((0, 4), (4, 8), (12, 28)):
        assert torch.equal(ops.norm(stream[start : start + rows].clone(), packed, EPS), whole[start : start + rows])
    assert not torch.allclose(whole, ops.norm(stream, ops.pack_vector(weight), EPS), atol=0.1)


def test_a_norm_may_read_what_it_returned_last(ops: Any) -> None:
    """In a recording both are in one place."""
    x = torch.randn(ROWS, 70)
    first, second = (ops.pack_layer_norm(torch.randn(70), torch.randn(70)) for _ in range(2))
    wanted = ops.norm(owned(ops, ops.norm(owned(ops, x), first, EPS).clone()), second, EPS).clone()
    assert torch.equal(ops.norm(ops.norm(owned(ops, x), first, EPS), second, EPS), wanted)
    if ops.records:
        rows = owned(ops, x)
        with ops.recording() as recording:
            found = ops.norm(ops.norm(rows, first, EPS), second, EPS)
        recording.start(ROWS, 0, None)
        recording.finish()
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [True, False])
def test_activated_layers(ops: Any, activation: str, has_bias: bool) -> None:
    weight, bias = torch.randn(77, 48) * 48**-0.5, torch.randn(77) if has_bias else None
    packed, x = ops.pack(weight, bias), ops.quantize_activation(owned(ops, torch.randn(ROWS, 48)))
    inner = ops.linear(x, packed).clone()
    found = read(ops, ops.activated(x, packed, activation))
    wanted = EXACT[activation](inner.double())
    assert (found - wanted).abs().max() / wanted.abs().max() < tolerance(ops)
    for other in ACTIVATIONS:
        if other != activation and {activation, other} != {"gelu", "gelu_tanh"}:  # those are too close for int8
            assert (found - EXACT[other](inner.double())).abs().max() > 0.05
    torch.manual_seed(3)
    values = torch.randn(ROWS, 48)
    whole = read(ops, ops.activated(ops.quantize_activation(owned(ops, values)), packed, activation))
    for start, rows in ((0, 4), (4, 8), (12, 28)):
        part = ops.quantize_activation(owned(ops, values[start : start + rows]))
        assert torch.equal(read(ops, ops.activated(part, packed, activation)), whole[start : start + rows])


def test_curves_of_wide_ranges_are_exact(ops: Any) -> None:
    if ops.dtype != torch.float32 or ops.quantization != "none":
        pytest.skip("rounded")
    x = torch.cat((torch.linspace(-12, 12, 6001), 10.0 ** torch.linspace(-30, 8, 300)))
    x = F.pad(torch.cat((x, -x)), (0, -2 * len(x) % 128)).view(-1, 32)
    identity = ops.pack(torch.eye(32))
    for activation in ACTIVATIONS:
        found = read(ops, ops.activated(ops.quantize_activation(owned(ops, x)), identity, activation))
        wanted = EXACT[activation](x.double())
        assert ((found - wanted).abs() <= 2e-6 * wanted.abs() + 2e-7 * x.abs().clamp(max=12)).all()


@pytest.mark.parametrize("has_norm", [True, False])
def test_embeddings_with_positions_and_a_norm(ops: Any, has_norm: bool) -> None:
    hidden = 70
    table, places = torch.randn(50, hidden).to(ops.dtype), torch.randn(12, hidden).to(ops.dtype)
    weight, bias = torch.randn(hidden), torch.randn(hidden)
    ids, positions = torch.randint(0, 50, (ROWS,)), torch.randint(0, 9, (ROWS,))
    norm = ops.pack_layer_norm(weight, bias) if has_norm else None
    packed, learned = ops.pack_table(table), ops.pack_table(places)
    found = ops.embed(ids, packed, 1.5, Placed(positions, learned[3:]), norm, EPS).clone()
    wanted = table[ids].double() * 1.5 + places[positions + 3].double()
    wanted = layer_norm(wanted, weight, bias) if has_norm else wanted
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    for start, rows in ((0, 4), (4, 8)):
        part = slice(start, start + rows)
        placed = Placed(positions[part], learned[3:])
        assert torch.equal(ops.embed(ids[part], packed, 1.5, placed, norm, EPS), found[part])


def test_sums(ops: Any) -> None:
    stream, added = owned(ops, torch.randn(ROWS, 70)), torch.randn(ROWS, 70)
    before = stream.clone()
    delta = ops.linear(ops.quantize_activation(added), ops.pack(torch.eye(70)))
    expected = before + delta
    ops.add(stream, delta)
    assert torch.equal(stream, expected)


def test_biases_of_heads(ops: Any) -> None:
    weight, bias, x = torch.randn(90, 70), torch.randn(90), ops.quantize_activation(torch.randn(ROWS, 70))
    plain = ops.linear(x, ops.pack_head(weight)).clone()
    biased = ops.linear(x, ops.pack_head(weight, bias))
    limit = 1e-4 if ops.dtype == torch.float32 else 0.2
    assert (biased.float() - plain.float() - bias).abs().max() < limit
