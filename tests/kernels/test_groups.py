"""Integers in groups of 32 inputs: what torch makes of weights and rows is what the native kernels make of them."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from specserve.kernels import _torch_groups as groups
from specserve.kernels.reference import Kernels

FORMS = ("int8", "int4")


@pytest.fixture(scope="module")
def native() -> Any:
    """The native kernels' module. Skips when it was not built; with SPECSERVE_REQUIRE_NATIVE=1 that fails."""
    required = os.environ.get("SPECSERVE_REQUIRE_NATIVE") == "1"
    if importlib.util.find_spec("specserve.kernels._native") is None and not required:
        pytest.skip("Built without native kernels.")
    return importlib.import_module("specserve.kernels.cpu")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def on_grid(rows: int, columns: int, steps: int, seed: int) -> Tensor:
    """As GGUF's Q4_0 and Q4_1 round: a float16 step, which may be negative, and one end of each group in float16."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, steps + 1, (rows, columns // 32, 32), generator=generator)
    numbers[..., 0], numbers[..., 1] = 0, steps
    step = (torch.randn((rows, columns // 32, 1), generator=generator) * 0.1).half().float()
    end = torch.randn((rows, columns // 32, 1), generator=generator).half().float()
    return (numbers * step + end).flatten(1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "weight",
    [
        random(64, 96),
        random(32, 70, seed=1) * 1e-4,
        random(32, 64, seed=2) * 1e-9,
        torch.zeros(32, 64),
        random(32, 64, seed=3) * torch.tensor([1e3, 1e-3]).repeat(32),
        *[on_grid(32, 96, steps, seed=steps) for steps in (1, 7, 14, 15)],
    ],
)
def test_weights_are_rounded_as_the_native_kernels_do(native: Any, form: str, weight: Tensor) -> None:
    wanted, own = native.Kernels(torch.float32, form, 1).pack(weight).memory, groups.groups_of(form, weight)
    numbers = (own.numbers.short() + (128 if form == "int8" else 0)).to(torch.uint8)
    minima = torch.zeros_like(own.steps) if own.minima is None else own.minima
    addresses = (each.contiguous().data_ptr() for each in (numbers, own.steps, minima))
    found = torch.zeros_like(wanted)
    native._native.pack_groups(FORMS.index(form) + 2, *addresses, *numbers.shape, found.data_ptr())
    assert torch.equal(found, wanted)


@given(scale=st.sampled_from([1.0, 1e-20, 1e-31, 1e20]), seed=st.integers(0, 100), columns=st.integers(1, 70))
def test_rows_are_rounded_as_the_native_kernels_do(native: Any, scale: float, seed: int, columns: int) -> None:
    x = random(3, columns, seed=seed) * scale
    x[1, seed % columns] = [float("nan"), float("inf"), 0.0][seed % 3]
    ints, scales, _ = native.Kernels(torch.float32, "int8", 1, "portable").quantize_activation(x).parts
    own, own_scales = groups.quantize_rows(x)
    assert torch.equal(own, ints) and torch.equal(own_scales.nan_to_num(-1), scales.nan_to_num(-1))


@pytest.mark.parametrize("form", FORMS)
def test_products_are_those_of_the_native_kernels(native: Any, form: str) -> None:
    """But for what fused multiplications do not round. With AVX2 activations are rounded otherwise: see test_cpu."""
    ops, x = native.Kernels(torch.float32, form, 1, "portable"), random(9, 200)
    weight, bias = random(33, 200, seed=1), random(33)
    found = ops.linear(ops.quantize_activation(x), ops.pack(weight, bias))
    own = Kernels(torch.device("cpu"), torch.float32, quantization=form)
    wanted = own.linear(own.quantize_activation(x), own.pack(weight, bias))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_s_product_does_not_depend_on_the_others(form: str) -> None:
    own = Kernels(torch.device("cpu"), torch.float32, quantization=form)
    x, weight = random(40, 160), own.pack(random(50, 160, seed=1))
    whole = own.linear(own.quantize_activation(x), weight)
    for count in (1, 2, 3, 8, 17, 33):
        assert torch.equal(own.linear(own.quantize_activation(x[:count]), weight), whole[:count])
