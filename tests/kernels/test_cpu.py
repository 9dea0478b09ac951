"""The native kernels, for every instruction set of this machine and every format of weights: against exact products of
what lies in memory, against the reference, and their promises: a row's bits depend on that row alone, what is not
finite stays in its row, a recording does what its ops do."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import importlib.util
import itertools
import os
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from numpy.typing import NDArray
from torch import Tensor

from specserve.kernels.reference import Kernels as Reference
from specserve.models.decoder import Decoder
from specserve.models.loader import find_architecture
from specserve.ops import MOST_TOP_K, AttentionRows, DrawArrays, Drawn, HeadNorms, Rotation
from specserve.ops.isa import choose_isa
from specserve.runtime.pack import StepInput
from specserve.runtime.runner import Output, Runner, _Computed
from specserve.sampling.inputs import SampledSeq
from specserve.sampling.noise import hash_tokens
from specserve.sampling.sampler import draft_arrays
from specserve.testing import Feed, PagedDecoder, random_weights, tiny_config, unequal_rows
from specserve.types import Draft, SamplingParams

if importlib.util.find_spec("specserve.kernels._native") is None and os.environ.get("SPECSERVE_REQUIRE_NATIVE") != "1":
    pytest.skip("Built without native kernels.", allow_module_level=True)
_native: Any = importlib.import_module("specserve.kernels._native")
cpu: Any = importlib.import_module("specserve.kernels.cpu")
cache_layout: Any = importlib.import_module("specserve.kernels._cpu_cache")

SETS = cpu.instruction_sets()
SETS = SETS[SETS.index(choose_isa("auto", SETS, "native")) :]  # SPECSERVE_ISA hides faster ones
FORMATS = ("float32", "bfloat16", "int8", "int4")
TILE = GROUP = 32
REFERENCE = Reference(torch.device("cpu"), torch.float32)
every_set = pytest.mark.parametrize("isa", SETS)
every_format = pytest.mark.parametrize("weights", FORMATS)
# One case for each instruction set and format in turn: for what depends on each of them, but not on the two together.
in_turn = pytest.mark.parametrize(
    ("isa", "weights"), [(SETS[i % len(SETS)], FORMATS[i % len(FORMATS)]) for i in range(max(len(SETS), len(FORMATS)))]
)
sizes = st.sampled_from([36, 100, 32, 64]) | st.integers(1, 130)
seeds = st.integers(0, 2**31)


def with_each(name: str, values: Collection[Any]) -> Any:
    """Every instruction set with every format, and of `values` the next in each, so that each set comes with all (where
    they are no more than the formats) and so does each format (where they are no more than the sets)."""
    cases = [
        (isa, weights, list(values)[(i + k) % len(values)])
        for i, isa in enumerate(SETS)
        for k, weights in enumerate(FORMATS)
    ]
    return pytest.mark.parametrize(("isa", "weights", name), cases)


def examples(n: int) -> settings:
    """At most so many, and fewer where the profile says so."""
    return settings(max_examples=min(n, settings().max_examples), suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> None:
    torch.set_num_threads(1)


def make(isa: str, weights: str = "float32", threads: int = 1, kv: torch.dtype = torch.float32) -> Any:
    """Kernels; `kv` is the dtype of the cache where the weights do not say it."""
    dtype = torch.float32 if kv == torch.float16 else kv
    if weights.startswith("int"):
        return cpu.Kernels(dtype, weights, threads, isa, kv)
    return cpu.Kernels(getattr(torch, weights), "none", threads, isa)


def returned(ops: Any, x: Tensor) -> Tensor:
    """x, as rows that an op returned: of exactly these numbers."""
    rows: Tensor = ops.embed(torch.arange(len(x)), x.float().contiguous(), 1.0)
    return rows


def numbers(x: Any) -> Tensor:
    """What an activation stands for, float64 [rows, width]."""
    data: Tensor = x.parts[0].double()
    if len(x.parts) == 3:
        data = (data.view(len(data), -1, GROUP) * x.parts[1].double()[..., None]).flatten(1)
    return data[:, : x.width]


def rounding(x: Any) -> Tensor:
    """How far an activation may lie from what it was made of, [rows, width]."""
    if len(x.parts) == 3:
        half_steps: Tensor = 0.5 * x.parts[1].double() * (1 + 1e-4)  # 127 steps in float32 are not exact
        return half_steps.repeat_interleave(GROUP, 1)[:, : x.width]
    return numbers(x).abs() * (2.0**-8 if x.parts[0].dtype == torch.bfloat16 else 0)


def bits(x: Any) -> list[Tensor]:
    """All that an op returned, to be compared row by row."""
    return [x] if isinstance(x, Tensor) else list(x.parts)


def same(x: Any, y: Any, rows: Any = slice(None)) -> bool:
    """Whether x has the bits that `rows` of y have; NaN is NaN."""
    return all(
        torch.equal(torch.nan_to_num(a), torch.nan_to_num(b[rows])) and torch.equal(a.isnan(), b[rows].isnan())
        for a, b in zip(bits(x), bits(y), strict=True)
    )


# Packed weights


def unpacked(weight: Any, weights: str, inputs: int) -> tuple[Tensor, Tensor | None]:
    """What packed memory stands for by the layout in kernels/cpu/pack.h: weights, float64 [padded outputs, padded
    inputs], and the scale of each, if there are any."""
    memory, width = weight.memory.numpy(), -(-inputs // TILE) * TILE
    if weights == "float32":
        tiles = memory.view(np.float32).reshape(-1, width, TILE).transpose(0, 2, 1)
        return _matrix(tiles, width), None
    if weights == "bfloat16":
        words = memory.view(np.uint16).reshape(-1, width // 2, TILE, 2).transpose(0, 2, 1, 3)
        return _matrix((words.astype(np.uint32) << 16).view(np.float32), width), None
    groups, header = width // GROUP, 64 if weights == "int8" else 128
    tiles = memory.reshape(-1, groups, header + GROUP * TILE // (1 if weights == "int8" else 2))
    halves = np.ascontiguousarray(tiles[..., :header]).view(np.float16).astype(np.float64)  # [tiles, groups, ..]
    scales = halves[..., :TILE].transpose(0, 2, 1)[..., None]  # [tiles, TILE, groups, 1]
    stored = tiles[..., header:].reshape(*tiles.shape[:2], -1, TILE, 4).transpose(0, 3, 1, 2, 4)
    if weights == "int8":
        values = scales * (stored.reshape(-1, TILE, groups, GROUP).astype(np.float64) - 128)
    else:
        nibbles = [part.reshape(-1, TILE, groups, GROUP // 2) for part in (stored & 15, stored >> 4)]
        values = scales * np.concatenate(nibbles, -1) + halves[..., TILE:].transpose(0, 2, 1)[..., None]
    return _matrix(values, width), _matrix(np.broadcast_to(scales, values.shape), width)


def _matrix(tiles: NDArray[Any], width: int) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(tiles, np.float64).reshape(-1, width))


@every_format
@examples(60)
@given(outputs=sizes, inputs=sizes, exponent=st.integers(-4, 3), shift=st.floats(-3, 3), seed=seeds)
def test_packed_weights_are_near(
    weights: str, outputs: int, inputs: int, exponent: int, shift: float, seed: int
) -> None:
    """Within half a step of each group, but for what float16 rounds of its scale and minimum."""
    generator = torch.Generator().manual_seed(seed)
    matrix = 10.0**exponent * (torch.randn(outputs, inputs, generator=generator) + shift)
    matrix[torch.rand(outputs, inputs, generator=generator) < 0.2] = 0.0
    matrix[:, : inputs // 3] = matrix[:1, :1]  # groups that are constant
    found, scale = unpacked(make(SETS[0], weights).pack(matrix), weights, inputs)
    wanted = torch.nn.functional.pad(matrix.double(), (0, found.shape[1] - inputs, 0, len(found) - outputs))
    if scale is None:
        assert torch.equal(found, wanted.to(getattr(torch, weights)).double())
        return
    groups = in_groups(wanted)
    low, high, peak = groups.amin(-1), groups.amax(-1), groups.abs().amax(-1)
    if weights == "int8":
        exact, most, offset = peak / 127, 127, torch.zeros(())
    else:
        exact, most, offset = (high - low) / 15, 15, half_error(low)
    bound = in_groups(scale)[..., 0].abs() / 2 + most * half_error(exact) + offset + 4e-7 * peak
    error = in_groups((found - wanted).abs()).amax(-1)
    assert (error <= bound * (1 + 1e-5)).all()
    assert not found[outputs:].any()


def in_groups(x: Tensor) -> Tensor:
    return x.reshape(len(x), -1, GROUP)


def half_error(x: Tensor) -> Tensor:
    """The most that rounding to float16 changes."""
    return (x.abs() * 2.0**-11).clamp(min=2.0**-25)


@pytest.mark.parametrize(("weights", "most"), [("int8", 127), ("int4", 15)])
@examples(40)
@given(steps=st.integers(1, 15), negative=st.booleans(), exponent=st.integers(-3, 1), seed=seeds)
def test_weights_that_were_rounded_before_are_kept(
    weights: str, most: int, steps: int, negative: bool, exponent: int, seed: int
) -> None:
    """As GGUF rounds them: a float16 step times integers of at most 127; or of at most 15, above or below an end that
    is float16 as well."""
    noise = np.random.default_rng(seed)
    n = noise.integers(-127, 128, (40, 3, GROUP)) if weights == "int8" else noise.integers(0, steps + 1, (40, 3, GROUP))
    n[..., 5] = most if weights == "int8" else 0
    n[..., 9] = most if weights == "int8" else steps
    step, end = (noise.uniform(0.5, 9, (2, 40, 3, 1)) * 10.0**exponent).astype(np.float16).astype(np.float32)
    step = -step if negative else step
    matrix = torch.from_numpy((n * step + (0 if weights == "int8" else end)).astype(np.float32)).flatten(1)
    found, _ = unpacked(make(SETS[0], weights).pack(matrix), weights, matrix.shape[1])
    assert ((found[:40] - matrix).abs() <= 4e-7 * in_groups(matrix).abs().amax(-1).repeat_interleave(GROUP, 1)).all()


# Products


def product(x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """x w^T + bias in float64, and how far sums in float32, in whatever order, may lie from it. A weight near zero may
    be the difference of a multiple of a scale and an offset, each up to twice the highest."""
    offset = torch.zeros(len(w)) if bias is None else bias
    size = x.abs() @ (4 * w.abs().amax(-1, keepdim=True).expand_as(w).T) + offset.abs()
    error: Tensor = (x.shape[1] + 8) * 2.0**-23 * size + 1e-30
    return x @ w.T + offset.double(), error


@every_set
@every_format
@examples(25)
@given(rows=st.integers(1, 40), inputs=sizes, outputs=sizes, biased=st.booleans(), seed=seeds)
def test_linear_is_the_product_of_what_lies_in_memory(
    isa: str, weights: str, rows: int, inputs: int, outputs: int, biased: bool, seed: int
) -> None:
    ops, generator = make(isa, weights), torch.Generator().manual_seed(seed)
    bias = torch.randn(outputs, generator=generator) if biased else None
    weight = ops.pack(torch.randn(outputs, inputs, generator=generator), bias)
    x = ops.quantize_activation(torch.randn(rows, inputs, generator=generator))
    out = ops.linear(x, weight)
    w = unpacked(weight, weights, inputs)[0][:outputs, :inputs]
    wanted, bound = product(numbers(x), w, bias)
    assert out.shape == (rows, outputs)
    assert ((out - wanted).abs() <= bound).all()
    padded = out.as_strided((rows, -(-outputs // TILE) * TILE), out.stride())
    assert not padded[:, outputs:].any(), "the padding stays zero"


def pattern(kind: str, shape: tuple[int, ...], low: int, high: int, seed: int) -> NDArray[np.int64]:
    """Integers from low to high: any, the same end everywhere, or both ends by turns."""
    if kind == "any":
        return np.random.default_rng(seed).integers(low, high + 1, shape)
    ends = {"lowest": [low], "highest": [high], "alternating": [low, high], "pairs": [low, low, high, high]}[kind]
    return np.resize(np.array(ends), shape)


patterns = st.sampled_from(["any", "lowest", "highest", "alternating", "pairs"])


def rounded_to(isa: str, x: NDArray[Any]) -> NDArray[Any]:
    """Integers as that instruction set rounds activations to: with AVX2 neighbours of one sign, whose products with
    weights are added in 16 bits, come to at most 128. Those that come to more come to just that."""
    if isa != "avx2":
        return x
    pairs = x.reshape(*x.shape[:-1], -1, 2).astype(np.int64)
    rest = np.sign(pairs[..., 0]) * (128 - np.abs(pairs[..., 0]))
    pairs[..., 1] = np.where(np.abs(pairs.sum(-1)) > 128, rest, pairs[..., 1])
    return pairs.reshape(x.shape)


@every_set
@given(
    numbers=st.lists(
        st.floats(-1, 1, width=32) | st.sampled_from([0.5, -0.5, 63.5 / 127, 0.25]), min_size=32, max_size=32
    ),
    size=st.sampled_from([1e-20, 0.003, 1.0, 1e30]),
)
def test_activations_are_rounded_so_that_sums_are_exact(isa: str, numbers: list[float], size: float) -> None:
    """To the nearest of 255 integers; with AVX2 of as many as leave no sum of two products without room."""
    ops, x = make(isa, "int8"), torch.tensor([numbers]) * size
    data, scales, sums = ops.quantize_activation(x).parts
    pairs = x.view(-1, 2)
    peak = max(float(x.abs().max()), float(pairs.sum(-1).abs().max()) if isa == "avx2" else 0.0)
    scale = np.float32(peak) / np.float32(127)
    assert scales.item() == scale
    assert sums.item() == data.sum(dtype=torch.int32)
    if peak > 1e-30:
        wanted = (x * (np.float32(127) / np.float32(peak)).item()).round()
        assert torch.equal(data.float(), wanted)
    else:
        assert not data.any()
    if isa == "avx2":
        assert data.view(-1, 2).sum(-1, dtype=torch.int32).abs().max() <= 128


@every_set
@pytest.mark.parametrize("weights", ["int8", "int4"])
@examples(25)
@given(
    groups=st.integers(1, 25),
    outputs=sizes,
    stored=patterns,
    activations=patterns,
    minimum=st.integers(-8, 8),
    seed=seeds,
)
def test_integers_are_multiplied_exactly(
    isa: str, weights: str, groups: int, outputs: int, stored: str, activations: str, minimum: int, seed: int
) -> None:
    """As plain integers are, by any number of rows: bytes of whatever value, with scales of one. Sums stay below 2^24,
    so that not one is rounded."""
    ops, inputs = make(isa, weights), groups * GROUP
    weight = ops.pack(torch.zeros(outputs, inputs))
    header = 64 if weights == "int8" else 128
    tiles = weight.memory.numpy().reshape(-1, groups, header + GROUP * TILE // (1 if weights == "int8" else 2))
    drawn = pattern(stored, (2, *tiles[..., header:].shape), 0, 255 if weights == "int8" else 15, seed)
    tiles[..., header:] = drawn[0] if weights == "int8" else drawn[0] | drawn[1] << 4
    halves = np.ones((*tiles.shape[:2], header // 2), np.float16)
    halves[..., TILE:] = minimum
    tiles[..., :header] = halves.view(np.uint8)
    w = unpacked(weight, weights, inputs)[0][:outputs]
    x = torch.from_numpy(rounded_to(isa, pattern(activations, (33, inputs), -127, 127, seed + 1)).astype(np.int8))
    wanted = x.double() @ w.T
    for rows in (*range(1, 10), 16, 17, 33):
        activation = ops.quantize_activation(torch.zeros(rows, inputs))
        data, scales, sums = activation.parts
        data.copy_(x[:rows])
        scales.fill_(1.0)
        sums.copy_(in_groups(data).sum(-1, dtype=torch.int32))
        assert torch.equal(ops.linear(activation, weight).double(), wanted[:rows])


@every_set
@every_format
@examples(16)
@given(
    rows=st.integers(1, 20),
    inputs=sizes,
    inner=sizes,
    biased=st.booleans(),
    activation=st.sampled_from(["silu", "gelu_tanh"]),
    seed=seeds,
)
def test_gated_is_the_product_of_what_lies_in_memory(
    isa: str, weights: str, rows: int, inputs: int, inner: int, biased: bool, activation: str, seed: int
) -> None:
    ops, generator = make(isa, weights), torch.Generator().manual_seed(seed)
    parts = torch.randn(2, inner, inputs, generator=generator)
    biases = torch.randn(2, inner, generator=generator) if biased else (None, None)
    weight = ops.pack_gated(*parts, *biases)
    x = ops.quantize_activation(torch.randn(rows, inputs, generator=generator))
    tiles = unpacked(weight, weights, inputs)[0]
    tiles = tiles.view(-1, 2, TILE, tiles.shape[1])
    halves = [tiles[:, i].flatten(0, 1)[:inner, :inputs] for i in (0, 1)]
    (gate, gate_error), (up, up_error) = (product(numbers(x), w, b) for w, b in zip(halves, biases, strict=True))
    curve = torch.nn.functional.silu if activation == "silu" else gelu
    wanted = curve(gate) * up
    # Both curves are nowhere steeper than 1.13.
    bound = 1.13 * gate_error * (up.abs() + up_error) + curve(gate).abs() * up_error + 4e-6 * (gate * up).abs()
    out = ops.gated(x, weight, activation)
    assert ((numbers(out) - wanted).abs() <= bound + rounding(out)).all()
    assert not out.parts[0][:, inner:].any(), "the padding stays zero"


def gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


@every_set
@every_format
@examples(16)
@given(rows=st.integers(1, 20), width=sizes, exponent=st.integers(-20, 30), seed=seeds)
def test_activations_are_near(isa: str, weights: str, rows: int, width: int, exponent: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = 10.0**exponent * torch.randn(rows, width, generator=generator)
    x[:, : width // 2] *= torch.rand(rows, 1, generator=generator) > 0.3  # groups of zeros
    out = make(isa, weights).quantize_activation(x)
    assert ((numbers(out) - x).abs() <= rounding(out)).all()
    if weights in ("float32", "bfloat16"):
        assert torch.equal(numbers(out), x.to(getattr(torch, weights)).double())
        return
    data, scales, sums = out.parts
    groups = in_groups(torch.nn.functional.pad(x, (0, data.shape[1] - width)))
    peak = groups.abs().amax(-1)
    if isa == "avx2":
        peak = torch.maximum(peak, groups.unflatten(-1, (-1, 2)).sum(-1).abs().amax(-1))
    torch.testing.assert_close(scales, peak / 127, rtol=1e-6, atol=0)
    assert torch.equal(sums, in_groups(data).sum(-1, dtype=torch.int32))
    assert int(data.int().abs().max()) <= 127


@every_set
def test_activations_next_to_nothing_are_near(isa: str) -> None:
    x = 10.0 ** torch.linspace(-45, -35, 11)[:, None] * torch.randn(11, 64)
    out = make(isa, "int8").quantize_activation(x)
    data, _, sums = out.parts
    assert torch.equal(sums, in_groups(data).sum(-1, dtype=torch.int32))
    assert ((numbers(out) - x).abs() <= rounding(out) + 1e-30).all()


@every_set
def test_curves_are_exact(isa: str) -> None:
    """Through `gated` with the identity for a gate and ones as `up`. What gelu takes e to the power of is rounded
    itself, which counts where its value is below a millionth of x."""
    ops = make(isa)
    x = torch.cat((torch.linspace(-80, 80, 16001), 10.0 ** torch.linspace(-30, 0, 300), torch.zeros(1)))
    x = torch.cat((x, -x, torch.tensor([-200.0, 200.0, -1e30, 1e30])))
    x = torch.nn.functional.pad(x, (0, -len(x) % TILE)).view(-1, TILE)
    identity = ops.pack_gated(torch.eye(TILE), torch.zeros(TILE, TILE), torch.zeros(TILE), torch.ones(TILE))
    for activation, curve, floor in (("silu", torch.nn.functional.silu, 1e-33), ("gelu_tanh", gelu, 1e-7)):
        found = numbers(ops.gated(ops.quantize_activation(x), identity, activation))
        wanted = curve(x.double())
        assert ((found - wanted).abs() <= 2e-6 * wanted.abs() + floor * x.abs().clamp(max=1)).all()
        assert not found[x == 0].any()
        assert not found[x <= -200].any()
        assert torch.equal(found[x >= 200], x[x >= 200].double())


# Against the reference


def close(found: Tensor, wanted: Tensor, rounded: Tensor | float = 0.0, tolerance: float = 1e-5) -> None:
    error = (found.double() - wanted.double()).abs()
    assert (error <= rounded + tolerance * (1 + wanted.double().abs())).all(), f"error {error.max():.1e}"


@every_set
@every_format
@examples(10)
@given(rows=st.integers(1, 40), hidden=sizes, with_post=st.booleans(), seed=seeds)
def test_rowwise_ops_agree_with_the_reference(
    isa: str, weights: str, rows: int, hidden: int, with_post: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    ops = make(isa, weights)
    table, ids = torch.randn(50, hidden).to(ops.dtype), torch.randint(0, 50, (rows,))
    assert torch.equal(ops.embed(ids, table, 3.5), REFERENCE.embed(ids, table, 3.5))
    residual, delta, norm = torch.randn(rows, hidden), torch.randn(rows, hidden), torch.randn(hidden)
    post = torch.randn(hidden) if with_post else None
    packed, packed_post = ops.pack_vector(norm), None if post is None else ops.pack_vector(post)
    found, added, chosen = returned(ops, residual), returned(ops, delta), torch.randint(0, rows, (7,))
    collected = ops.gather_rows(chosen, found, added, packed_post, 1e-5)
    read = ops.fused_add_norm(found, added, packed_post, packed, 1e-5)
    wanted = residual.clone()
    wanted_read = REFERENCE.fused_add_norm(wanted, delta, post, norm, 1e-5)
    close(found, wanted)
    close(numbers(read), wanted_read, rounding(read))
    assert torch.equal(collected, found[chosen])
    close(ops.norm(collected, packed, 1e-5), REFERENCE.norm(wanted[chosen], norm, 1e-5))
    assert same(ops.fused_add_norm(found, None, None, packed, 1e-5), read)
    close(ops.softcap(returned(ops, 30 * residual), 6.0), REFERENCE.softcap(30 * residual, 6.0))


@every_set
def test_norm_takes_activations_any_origin(isa: str) -> None:
    """Also those that no op returned, which are copied first."""
    ops, weight = make(isa), torch.randn(100)
    for rows in range(1, 60):
        x = torch.randn(2 * rows, 100)[::2]
        wanted = ops.norm(returned(ops, x), ops.pack_vector(weight), 1e-5)
        assert torch.equal(ops.norm(x, ops.pack_vector(weight), 1e-5), wanted)


@every_set
def test_activate_takes_activations_any_origin(isa: str) -> None:
    ops = make(isa)
    for rows in range(1, 60):
        x = torch.randn(2 * rows, 100)[::2]
        assert torch.equal(numbers(ops.quantize_activation(x)), x.double())


@every_set
@examples(30)
@given(rows=st.integers(1, 9), vocab=sizes, offset=st.sampled_from([-9, 0]), seed=seeds)
def test_best_tokens_are_the_first_of_the_best(isa: str, rows: int, vocab: int, offset: int, seed: int) -> None:
    noise = np.random.default_rng(seed)
    logits = noise.integers(-4, 5, (rows, vocab)).astype(np.float32) + offset  # many equals
    for row in logits:
        row[noise.integers(vocab)] = noise.choice([np.nan, np.inf, -np.inf, 0.0, 3.0])
        row[noise.random(vocab) < noise.choice([0.0, 0.5, 1.0])] = -np.inf
    wanted = [-1 if np.isnan(row).any() or np.isinf(row.max()) else int(row.argmax()) for row in logits]
    ops = make(isa)
    assert ops.argmax(returned(ops, torch.from_numpy(logits))).tolist() == wanted
    assert REFERENCE.argmax(torch.from_numpy(logits)).tolist() == wanted


@every_set
@examples(30)
@given(rows=st.integers(1, 5), vocab=sizes, has_bias=st.booleans(), has_ids=st.booleans(), seed=seeds)
def test_drafts_are_drawn_as_in_torch(
    isa: str, rows: int, vocab: int, has_bias: bool, has_ids: bool, seed: int
) -> None:
    noise = np.random.default_rng(seed)
    logits = torch.from_numpy(noise.normal(0, 3, (7, vocab)).astype(np.float32))
    logits[6, noise.integers(vocab)] = noise.choice([np.nan, np.inf])
    logits[5, noise.random(vocab) < 0.9] = -np.inf
    logits[4] = -np.inf
    bias = torch.from_numpy(noise.normal(0, 3, (rows, vocab)).astype(np.float32)) if has_bias else None
    ids = torch.from_numpy(noise.permutation(vocab)) if has_ids else None
    hashed = hash_tokens(torch.arange(vocab) if ids is None else ids)
    how = DrawArrays(
        torch.from_numpy(noise.integers(0, 7, rows)),
        torch.from_numpy(noise.choice([0.0, 0.3, 1.0, 7.0], rows)),
        torch.from_numpy(noise.integers(-(2**63), 2**63 - 1, rows)),
    )
    wanted = REFERENCE.draw(0, logits, bias, how, ids, hashed)
    ops = make(isa)
    own = None if bias is None else returned(ops, bias)
    found = ops.draw(0, logits, own, how, ids, hashed)
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert torch.allclose(found.share, wanted.share, rtol=1e-4)
    assert torch.allclose(found.second_share, wanted.second_share, rtol=1e-4, atol=1e-20)
    there = wanted.second_share > 1e-20  # beyond that weights are 0 in float32
    assert torch.equal(found.second[there], wanted.second[there])
    is_broken = ~logits[how.rows].amax(-1).isfinite()
    for drawn in (wanted, found):
        assert torch.equal(drawn.share == 0, is_broken)
        assert all(drawn.tokens[is_broken] == (0 if ids is None else ids[0]))
        assert all(drawn.second_share[is_broken] == 0)


@every_set
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_what_is_drawn_second_would_be_first_without_the_first(isa: str, temperature: float) -> None:
    draw = torch.Generator().manual_seed(0)
    logits, hashed = torch.randn(64, 300, generator=draw), hash_tokens(torch.arange(300))
    keys = torch.randint(2**62, (64,), generator=draw)
    how = DrawArrays(torch.arange(64), torch.full((64,), temperature, dtype=torch.float64), keys)
    ops = make(isa)
    # What an op returns, its next call overwrites.
    first = Drawn(*(each.clone() for each in ops.draw(0, logits, None, how, None, hashed)))
    again = ops.draw(0, logits.scatter(1, first.tokens[:, None], -torch.inf), None, how, None, hashed)
    assert torch.equal(again.tokens, first.second)
    assert torch.allclose(again.share * (1 - first.share), first.second_share, rtol=1e-3, atol=1e-6)


@every_set
@examples(60)
@given(
    data=st.data(),
    rows=st.integers(1, 6),
    vocab=sizes | st.integers(130, 700),
    kind=st.sampled_from(["few", "equal", "many"]),
    seed=seeds,
)
def test_the_k_best_tokens(isa: str, data: st.DataObject, rows: int, vocab: int, kind: str, seed: int) -> None:
    """Best first, of equals the lower id first; nothing of a row whose best is not finite, whatever is beside it."""
    noise, k = np.random.default_rng(seed), data.draw(st.integers(1, min(MOST_TOP_K, vocab)))
    span = {"few": 4, "equal": 1, "many": 10**6}[kind]  # different values
    logits = noise.integers(-span + 1, span, (rows, vocab)).astype(np.float32)
    logits[logits == 0] *= noise.choice([-1.0, 1.0], (logits == 0).sum())  # -0.0 equals 0.0
    for row in logits:
        row[noise.random(vocab) < noise.choice([0.0, 0.5, 0.98, 1.0])] = -np.inf
        if noise.random() < 0.3:
            row[noise.integers(vocab)] = noise.choice([np.nan, np.inf])
    wanted = [sorted(range(vocab), key=lambda token: (-row[token], token))[:k] for row in logits.tolist()]
    sound = [not np.isnan(row).any() and np.isfinite(row.max()) for row in logits]
    wanted = [ids if is_sound else [-1] * k for ids, is_sound in zip(wanted, sound, strict=True)]
    for ops in (make(isa), REFERENCE):
        of_ops = returned(ops, torch.from_numpy(logits)) if ops is not REFERENCE else torch.from_numpy(logits)
        top = ops.top_k(of_ops, ops.argmax(of_ops), k)
        assert top.dtype == torch.int32
        assert top.tolist() == wanted
    empty = torch.empty(0, vocab)
    assert REFERENCE.top_k(empty, REFERENCE.argmax(empty), k).shape == (0, k)


@dataclass
class Step:
    """Sequences of one step: chains and trees over a cache in blocks of shuffled order."""

    cached: list[int]
    lengths: list[int]
    is_tree: list[bool]
    block_size: int
    kv_heads: int
    share: int  # query heads that read one kv head
    d: int
    window: int | None
    seed: int
    has_slopes: bool = False

    def __post_init__(self) -> None:
        noise = np.random.default_rng(self.seed)
        counts = [-(-(c + n) // self.block_size) for c, n in zip(self.cached, self.lengths, strict=True)]
        blocks = iter((1 + noise.permutation(sum(counts) + 3)).tolist())
        self.num_slots = (sum(counts) + 4) * self.block_size
        self.tables = [list(itertools.islice(blocks, count)) for count in counts]
        self.parents = [
            np.array([noise.integers(-1, r) if r else -1 for r in range(n)], np.int32) if tree else None
            for n, tree in zip(self.lengths, self.is_tree, strict=True)
        ]
        self.starts = [0, *np.cumsum(self.lengths).tolist()]
        torch.manual_seed(self.seed)
        self.q = torch.randn(self.starts[-1], self.kv_heads * self.share * self.d)

    def slopes(self, ops: Any) -> Any:
        """Of ALiBi, as `ops` take them."""
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.rand(self.kv_heads * self.share, generator=generator)
        return ops.pack_vector(drawn) if self.has_slopes else None

    @property
    def layout(self) -> AttentionRows:
        return layout(self.lengths, self.cached, self.tables, self.parents)

    def kv(self, dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(2, self.num_slots, self.kv_heads, self.d, generator=generator).to(dtype)

    def slots(self, s: int) -> list[int]:
        """The slot of each logical index of sequence s."""
        slots = [block * self.block_size + i for block in self.tables[s] for i in range(self.block_size)]
        return slots[: self.cached[s] + self.lengths[s]]

    def seen(self, s: int, r: int) -> list[int]:
        """The slots that row r of sequence s sees, in order, were there no window."""
        parents, slots, path = self.parents[s], self.slots(s), [r]
        while (above := path[-1] - 1 if parents is None else int(parents[path[-1]])) >= 0:
            path.append(above)
        return slots[: self.cached[s]] + [slots[self.cached[s] + node] for node in reversed(path)]

    def positions(self) -> Tensor:
        seqs = range(len(self.lengths))
        return torch.tensor([len(self.seen(s, r)) - 1 for s in seqs for r in range(self.lengths[s])])

    def how(self, ops: Any) -> tuple[float, int | None, Any]:
        return 1.5 * self.d**-0.5, self.window, self.slopes(ops)

    def attend(self, ops: Any, kv: Tensor, q: Tensor | None = None) -> Any:
        plan = ops.plan(self.layout, self.block_size)
        return ops.attention(returned(ops, self.q if q is None else q), kv, plan, *self.how(ops))


def layout(lengths: list[int], cached: list[int], tables: list[list[int]], parents: list[Any]) -> AttentionRows:
    rows = [tree if tree is not None else range(-1, n - 1) for n, tree in zip(lengths, parents, strict=True)]
    return AttentionRows.pack([0, *itertools.accumulate(lengths)], cached, tables, list(itertools.chain(*rows)), 1)


contexts = st.sampled_from([0, 1, 50, 63, 64, 65, 127, 128, 511]) | st.integers(0, 300)
steps = st.integers(1, 3).flatmap(
    lambda n: st.builds(
        Step,
        cached=st.lists(contexts, min_size=n, max_size=n),
        lengths=st.lists(st.integers(1, 20) | st.integers(30, 40), min_size=n, max_size=n),
        is_tree=st.lists(st.booleans(), min_size=n, max_size=n),
        block_size=st.integers(1, 16) | st.sampled_from([16, 32]),
        kv_heads=st.integers(1, 4),
        share=st.integers(1, 4),
        d=st.integers(1, 40).map(lambda half: 2 * half) | st.sampled_from([32, 64, 96]),
        window=st.sampled_from([None, None, 1, 7, 64, 130]),
        seed=seeds,
        has_slopes=st.booleans(),
    )
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def held(ops: Any, kv: Tensor) -> Tensor:
    """A cache that holds `kv` [2, slots, kv_heads, d] as the kernels do."""
    places = cache_layout.places(kv, torch.arange(kv.shape[1])).flatten(1)
    return torch.zeros_like(kv).view(2, -1).scatter(1, places, kv.flatten(1)).view(kv.shape)


def read(ops: Any, cache: Tensor) -> Tensor:
    places = cache_layout.places(cache, torch.arange(cache.shape[1])).flatten(1)
    return cache.view(2, -1).gather(1, places).view(cache.shape)


def with_cache_of(isa: str, weights: str, dtype: torch.dtype, threads: int = 1) -> Any:
    if weights.startswith("int"):
        return make(isa, weights, threads, dtype)
    return cpu.Kernels(torch.float32 if dtype == torch.float16 else dtype, "none", threads, isa, dtype)


@every_set
@examples(50)
@given(step=steps, dtype=dtypes, weights=st.sampled_from(FORMATS))
def test_attention_agrees_with_the_reference(isa: str, step: Step, dtype: torch.dtype, weights: str) -> None:
    """To 1e-5 in float32; in bfloat16 probabilities are rounded too, and their sum is not."""
    ops, kv = with_cache_of(isa, weights, dtype), step.kv(dtype)
    found = step.attend(ops, held(ops, kv))
    plan = REFERENCE.plan(step.layout, step.block_size)
    q = (step.q.bfloat16().float() if dtype == torch.bfloat16 else step.q).view(len(step.q), -1, step.d)
    wanted = REFERENCE.attention(q, kv.float(), plan, *step.how(REFERENCE))
    close(numbers(found), wanted, rounding(found), 2.0**-7 if dtype == torch.bfloat16 else 1e-5)
    assert not found.parts[0][:, found.width :].any(), "the padding stays zero"


@every_set
@examples(30)
@given(step=steps, dtype=dtypes, normed=st.booleans())
def test_rotation_agrees_with_the_reference(isa: str, step: Step, dtype: torch.dtype, normed: bool) -> None:
    ops, d = with_cache_of(isa, "none", dtype), step.d
    angles = 6 * torch.rand(2400, d // 2)
    tables = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)
    rotation = Rotation(step.positions(), *tables)
    qkv, norms = torch.randn(len(step.q), (step.share + 2) * step.kv_heads * d), torch.randn(2, d)
    cache, wanted_kv = held(ops, step.kv(dtype)), step.kv(dtype).float()
    plans = [kernels.plan(step.layout, step.block_size) for kernels in (ops, REFERENCE)]
    packed = HeadNorms(ops.pack_vector(norms[0]), ops.pack_vector(norms[1]), 1e-5) if normed else None
    plain = HeadNorms(norms[0], norms[1], 1e-5) if normed else None
    q = ops.rope_and_cache(returned(ops, qkv), packed, rotation, cache, plans[0])
    wanted = REFERENCE.rope_and_cache(qkv, plain, rotation, wanted_kv, plans[1])
    close(q, wanted.flatten(1))
    found_kv = read(ops, cache)
    rounded = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    close(found_kv, wanted_kv, wanted_kv.double().abs() * rounded)
    written = [slot for s in range(len(step.lengths)) for slot in step.slots(s)[step.cached[s] :]]
    untouched = torch.ones(step.num_slots, dtype=torch.bool).index_fill_(0, torch.tensor(written), False)
    assert torch.equal(found_kv[:, untouched], step.kv(dtype)[:, untouched])


@examples(30)
@given(step=steps, dtype=dtypes, count=st.integers(0, 40), seed=seeds)
def test_slots_are_copied(step: Step, dtype: torch.dtype, count: int, seed: int) -> None:
    """In every layer, all read before any is written; a group of 16 slots lies in the memory of these slots. No
    instruction set has code of its own for it."""
    ops, kv = with_cache_of(SETS[0], "none", dtype), step.kv(dtype)
    assert torch.equal(read(ops, held(ops, kv)), kv)
    torch.manual_seed(seed)
    sources, targets = (torch.randperm(step.num_slots)[:count] for _ in range(2))
    layers = [held(ops, kv), held(ops, -kv)]
    whole = [layer.clone() for layer in layers]
    ops.copy_kv(layers, sources, targets)
    wanted = kv.index_copy(1, targets, kv[:, sources])
    assert torch.equal(read(ops, layers[0]), wanted)
    assert torch.equal(read(ops, layers[1]), -wanted)
    untouched = [group for group in range(step.num_slots // 16) if not (targets // 16 == group).any()]
    for group in untouched:
        own = slice(16 * group, 16 * group + 16)
        assert all(torch.equal(layer[:, own], before[:, own]) for layer, before in zip(layers, whole, strict=True))


@examples(30)
@given(step=steps, dtype=dtypes, count=st.integers(0, 40), seed=seeds)
def test_slots_are_read_and_written_in_nobodys_layout(step: Step, dtype: torch.dtype, count: int, seed: int) -> None:
    """As the reference does, whose caches hold at each slot what was written there; all bits are kept, and those of
    other slots."""
    ops, kv = with_cache_of(SETS[0], "none", dtype), step.kv(dtype)
    torch.manual_seed(seed)
    slots = torch.randperm(step.num_slots)[:count]
    if count % 2:  # whole groups, as blocks mostly are
        slots = (torch.randperm(step.num_slots // 16)[:count, None] * 16 + torch.arange(16)).flatten()
    values = torch.randn(2, len(slots), *kv.shape[2:]).to(dtype)
    values.flatten()[:3] = torch.tensor([-0.0, torch.finfo(dtype).tiny / 2, torch.finfo(dtype).max])[: values.numel()]
    cache, wanted = held(ops, kv), kv.clone()
    assert torch.equal(ops.read_kv(cache, slots), REFERENCE.read_kv(wanted, slots))
    ops.write_kv(cache, slots, values)
    REFERENCE.write_kv(wanted, slots, values)
    found = ops.read_kv(cache, slots)
    assert found.shape == values.shape
    assert torch.equal(found.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(read(ops, cache), wanted)


# A row's bits depend on that row alone


def between_attentions(ops: Any, residual: Tensor, delta: Tensor, weight: Any, gated: Any, norm: Any, post: Any) -> Any:
    """All that happens to rows there, and a head."""
    stream = returned(ops, residual)
    x = ops.fused_add_norm(stream, returned(ops, delta), post, norm, 1e-5)
    hidden, logits = ops.norm(stream, norm, 1e-5), ops.linear(x, weight)
    capped, act = ops.softcap(returned(ops, logits), 5.0), ops.quantize_activation(hidden)
    best = ops.argmax(logits)
    top = ops.top_k(logits, best, min(4, logits.shape[1]))
    return [stream, x, hidden, act, logits, ops.gated(x, gated, "silu"), capped, best, top]


@every_set
@every_format
@examples(20)
@given(rows=st.integers(1, 40), hidden=sizes, inner=sizes, with_post=st.booleans(), data=st.data(), seed=seeds)
def test_a_row_has_the_same_bits_among_any_rows(
    isa: str, weights: str, rows: int, hidden: int, inner: int, with_post: bool, data: st.DataObject, seed: int
) -> None:
    torch.manual_seed(seed)
    residual, delta = torch.randn(2, rows, hidden)
    matrices, biases, vectors = torch.randn(3, inner, hidden), torch.randn(3, inner), torch.randn(2, hidden)
    alone, together = make(isa, weights), make(isa, weights, threads=data.draw(st.integers(1, 3)))
    weight, gated = alone.pack(matrices[0], biases[0]), alone.pack_gated(*matrices[1:], *biases[1:])
    norm, post = (alone.pack_vector(vector) for vector in vectors)
    packed = weight, gated, norm, post if with_post else None

    whole = between_attentions(together, residual, delta, *packed)
    some = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=9))
    for few in ([data.draw(st.integers(0, rows - 1))], some):
        found = between_attentions(alone, residual[few], delta[few], *packed)
        assert all(same(x, y, few) for x, y in zip(found, whole, strict=True))


@every_set
@examples(40)
@given(step=steps, dtype=dtypes, weights=st.sampled_from(FORMATS), threads=st.integers(1, 3), data=st.data())
def test_attention_of_a_row_has_the_same_bits_in_any_step(
    isa: str, step: Step, dtype: torch.dtype, weights: str, threads: int, data: st.DataObject
) -> None:
    """A row alone, whose context is a chain and lies among NaN, against the row in its step: in whatever chunk, tree
    and company. And what nobody owns may be NaN there too."""
    kv, nothing = step.kv(dtype), torch.full_like(step.kv(dtype), torch.nan)
    ops = with_cache_of(isa, weights, dtype)
    whole = step.attend(with_cache_of(isa, weights, dtype, threads), held(ops, kv))
    owned = [slot for s in range(len(step.lengths)) for slot in step.slots(s)]
    among = nothing.index_copy(1, torch.tensor(owned), kv[:, owned])
    assert same(step.attend(ops, held(ops, among)), whole)
    for s in range(len(step.lengths)):
        r = data.draw(st.integers(0, step.lengths[s] - 1))
        seen, row = step.seen(s, r), step.starts[s] + r
        chain = nothing.index_copy(1, torch.tensor(step.slots(s)[: len(seen)]), kv[:, seen])
        plan = ops.plan(layout([1], [len(seen) - 1], [step.tables[s]], [None]), step.block_size)
        q = returned(ops, step.q[row : row + 1])
        assert same(ops.attention(q, held(ops, chain), plan, *step.how(ops)), whole, slice(row, row + 1))


LONG = [
    (isa, dtype, (None, 700)[(i + k) % 2])
    for i, isa in enumerate(SETS)
    for k, dtype in enumerate([torch.float32, torch.bfloat16, torch.float16])
]


@pytest.mark.parametrize("has_slopes", [False, True])
@pytest.mark.parametrize(("isa", "dtype", "window"), LONG)
def test_segments_of_a_long_context_give_the_same_bits(
    isa: str, dtype: torch.dtype, window: int | None, has_slopes: bool
) -> None:
    """Many rows read all of it one after the other; of few rows, each segment is a piece for whatever thread."""
    many = Step([1237, 600, 0], [60, 3, 4], [False] * 3, 16, 2, 3, 32, window, 7, has_slopes)
    one, three = (with_cache_of(isa, "int8", dtype, threads) for threads in (1, 3))
    cache = held(one, many.kv(dtype))
    whole = many.attend(one, cache)
    assert same(many.attend(three, cache), whole)
    for s, begin, count in ((0, 0, 1), (0, 3, 6), (0, 40, 20), (1, 0, 3), (2, 1, 2)):
        few = layout([count], [many.cached[s] + begin], [many.tables[s]], [None])
        rows = slice(many.starts[s] + begin, many.starts[s] + begin + count)
        for ops in (one, three):
            q = returned(ops, many.q[rows])
            assert same(ops.attention(q, cache, ops.plan(few, 16), *many.how(ops)), whole, rows)
    tree = Step([1276, 976], [7, 5], [True, True], 16, 2, 3, 32, window, 7, has_slopes)
    cache = held(one, tree.kv(dtype))
    assert same(tree.attend(one, cache), tree.attend(three, cache))
    wanted = REFERENCE.attention(
        (tree.q.bfloat16().float() if dtype == torch.bfloat16 else tree.q).view(len(tree.q), -1, 32),
        tree.kv(dtype).float(), REFERENCE.plan(tree.layout, 16), *tree.how(REFERENCE),
    )  # fmt: skip
    float_ops = with_cache_of(isa, "none", dtype)
    found = tree.attend(float_ops, cache)
    close(numbers(found), wanted, rounding(found), 2.0**-7 if dtype == torch.bfloat16 else 1e-5)


@every_set
def test_float16_holds_its_largest_number_of_what_is_larger(isa: str) -> None:
    """To nearest even below, small numbers and zeros too; what is not finite breaks its row as ever."""
    d, ops = 32, with_cache_of(isa, "none", torch.float16)
    drawn = torch.cat((torch.randn(64 * d) * 2.0 ** torch.randint(-30, 20, (64 * d,)), torch.zeros(d)))
    drawn[:8] = torch.tensor([65504.0, 65519.0, 65520.0, 1e30, -1e30, 2.0**-24, 2.0**-25, -(2.0**-26)])
    rows = drawn.view(-1, d)
    turn = Rotation(torch.arange(len(rows)), torch.ones(len(rows), d), torch.zeros(len(rows), d))
    plan = ops.plan(layout([len(rows)], [0], [list(range(1, 8))], [None]), 16)
    cache = held(ops, torch.zeros(2, 128, 1, d, dtype=torch.float16))
    ops.rope_and_cache(returned(ops, torch.cat((rows, rows, -rows), 1)), None, turn, cache, plan)
    wanted = rows.clamp(-65504, 65504).half()
    assert torch.equal(read(ops, cache)[0, 16 : 16 + len(rows), 0], wanted)
    assert torch.equal(read(ops, cache)[1, 16 : 16 + len(rows), 0], -wanted)
    assert ops.broken_rows(plan) == []


# Instruction sets that round alike, with vectors of different widths, and the formats for which they do: AVX-512 adds
# products of bfloat16 in pairs. The sanitizer's build has those of AVX-VNNI as a processor with AVX-512 runs them.
WIDTHS = {
    ("avx512", "avx2"): ("float32", "int8", "int4"),
    ("avx_vnni", "avx2"): FORMATS,
    ("avx2", "avx_vnni_evex"): FORMATS,
}
WIDE = [(*pair, weights) for pair, formats in WIDTHS.items() if set(pair) <= set(SETS) for weights in formats]


@pytest.mark.parametrize(("isa", "other", "weights"), WIDE)
@examples(20)
@given(rows=st.integers(1, 12), hidden=sizes, inner=sizes, with_post=st.booleans(), seed=seeds)
def test_rows_have_the_same_bits_in_vectors_of_any_width(
    isa: str, other: str, weights: str, rows: int, hidden: int, inner: int, with_post: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    residual, delta = torch.randn(2, rows, hidden)
    matrices, biases, vectors = torch.randn(3, inner, hidden), torch.randn(3, inner), torch.randn(2, hidden)
    matrices /= hidden**0.5
    results = []
    for ops in (make(isa, weights), make(other, weights)):
        norm, post = (ops.pack_vector(vector) for vector in vectors)
        weight, gated = ops.pack(matrices[0], biases[0]), ops.pack_gated(*matrices[1:], *biases[1:])
        results.append(between_attentions(ops, residual, delta, weight, gated, norm, post if with_post else None))
    assert all(same(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize(("isa", "other", "weights"), [case for case in WIDE if case[2] in ("float32", "int8")])
@examples(20)
@given(step=steps, data=st.data())
def test_attention_has_the_same_bits_in_vectors_of_any_width(
    isa: str, other: str, weights: str, step: Step, data: st.DataObject
) -> None:
    """AVX-512 adds products of bfloat16 in pairs here too. Of the weights only whether they are integers counts: then
    so is what attention returns."""
    dtype = torch.float32 if isa == "avx512" else data.draw(dtypes)
    one, two = (with_cache_of(name, weights, dtype) for name in (isa, other))
    assert same(step.attend(one, held(one, step.kv(dtype))), step.attend(two, held(two, step.kv(dtype))))


ODD = {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 77}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**ODD, "attention_bias": True, "mlp_bias": True, "vocab_size": 301},
    "mistral": {"sliding_window": 7, "num_key_value_heads": 1},
    "qwen3": {},
    "gemma3": {**ODD, "sliding_window": 11, "final_logit_softcapping": 6.0, "tie_word_embeddings": False},
}


def tiny(ops: Any, architecture: str, embedding: dict[int, float] | None = None, **overrides: Any) -> Decoder:
    """A random model, that embeds some tokens as nothing but one number."""
    spec, tensors = tiny_weights(architecture, tuple(overrides.items()))
    table = tensors["model.embed_tokens.weight"].clone()
    for token, value in (embedding or {}).items():
        table[token] = value
    return Decoder(spec, {**tensors, "model.embed_tokens.weight": table}, ops)


@lru_cache
def tiny_weights(architecture: str, overrides: tuple[tuple[str, Any], ...]) -> tuple[Any, dict[str, Tensor]]:
    config = tiny_config(architecture, **dict(overrides))
    return find_architecture(config).spec(config), dict(random_weights(config, 1))


@with_each("architecture", MODELS)
def test_models_have_the_same_bits_in_any_company(isa: str, weights: str, architecture: str) -> None:
    assert unequal_rows(tiny(make(isa, weights), architecture, **MODELS[architecture])) == []


def greedy(model: Decoder, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The likeliest continuations of prompts that run together."""
    paged = PagedDecoder(model, len(prompts), 64)
    tokens = [[int(logits[-1].argmax())] for logits in paged.step(*(Feed(i, p) for i, p in enumerate(prompts)))]
    for _ in range(count - 1):
        for i, logits in enumerate(paged.step(*(Feed(i, chain[-1:]) for i, chain in enumerate(tokens)))):
            tokens[i].append(int(logits[-1].argmax()))
    return tokens


@in_turn
def test_greedy_chains_are_the_same_alone_together_and_on_any_threads(isa: str, weights: str) -> None:
    prompts = [[5, 9, 200, 31], list(range(20, 50)), [7]]
    models = [tiny(make(isa, weights, threads, torch.bfloat16), "gemma3", **MODELS["gemma3"]) for threads in (1, 2, 3)]
    alone = [greedy(models[0], [prompt], 12)[0] for prompt in prompts]
    assert len(set(alone[1])) > 3, "a chain that repeats itself shows little"
    assert [greedy(model, prompts, 12) for model in models] == [alone] * 3


# Planted faults


def split_by_rows(ops: Any) -> Callable[[Any, Any], Tensor]:
    """With more than 8 rows products are summed in two halves, as a library may well choose to."""
    linear = ops.linear

    def split(x: Any, weight: Any, adapters: object = None) -> Tensor:
        whole: Tensor = linear(x, weight)
        if x.rows <= 8:
            return whole
        left = numbers(x).float()
        left[:, x.width // 2 :] = 0
        return whole.copy_(
            linear(ops.quantize_activation(left), weight)
            + linear(ops.quantize_activation(numbers(x).float() - left), weight)
        )

    return split


def shifted_tables(ops: Any) -> Callable[[Any, int], Any]:
    """In steps of several sequences every block is taken for the one after it."""
    plan = ops.plan

    def shift(rows: Any, block_size: int) -> Any:
        if len(rows.cached) > 1:
            rows = dataclasses.replace(rows, block_tables=np.roll(rows.block_tables, -1, axis=1))
        return plan(rows, block_size)

    return shift


@in_turn
def test_planted_faults_are_noticed(isa: str, weights: str) -> None:
    model = tiny(make(isa, weights), "llama")
    with mock.patch.object(model.ops, "linear", split_by_rows(model.ops)):
        assert {"chunks of 9", "chunks of 40", "last of a batch"} <= set(unequal_rows(model))
    with mock.patch.object(model.ops, "plan", shifted_tables(model.ops)):
        assert set(unequal_rows(model)) == {"tree in a batch"}


# What is not finite


@every_set
@every_format
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(isa: str, weights: str, bad: float) -> None:
    ops, hidden = make(isa, weights), 100
    linear, gated = ops.pack(torch.randn(40, hidden)), ops.pack_gated(*torch.randn(2, 70, hidden), None, None)
    down, norm = ops.pack(torch.randn(36, 70)), ops.pack_vector(torch.randn(hidden))
    clean, delta = torch.randn(2, 9, hidden)
    broken = clean.clone()
    broken[4, 37] = bad

    def run(x: Tensor) -> list[Any]:
        read = ops.quantize_activation(x)
        stream = returned(ops, x)
        normed = ops.fused_add_norm(stream, returned(ops, delta), norm, norm, 1e-5)
        inner = [ops.gated(read, gated, activation) for activation in ("silu", "gelu_tanh")]
        products = [ops.linear(read, linear), ops.linear(normed, linear), *(ops.linear(x, down) for x in inner)]
        return [*products, *inner, normed, ops.norm(stream, norm, 1e-5), read]

    others, results = [0, 1, 2, 3, 5, 6, 7, 8], run(broken)
    assert all(same(_rows(x, others), y, others) for x, y in zip(results, run(clean), strict=True))
    for product in results[:4]:
        assert not product[4].isfinite().any()
    for x in (*results[4:6], results[7]):
        assert not (numbers(x) if not isinstance(x, Tensor) else x)[4].isfinite().all()
    assert not numbers(results[6])[4].isfinite().all()
    assert not numbers(results[8])[4, 32:64].isfinite().all()
    assert torch.equal(ops.argmax(results[0])[4:5], torch.tensor([-1]))


def _rows(x: Any, rows: list[int]) -> Any:
    return x[rows] if isinstance(x, Tensor) else dataclasses.replace(x, parts=tuple(part[rows] for part in x.parts))


LARGEST = torch.finfo(torch.float32).max  # bfloat16 rounds it to infinity


@every_set
@examples(40)
@given(step=steps, dtype=dtypes, data=st.data())
def test_rows_that_do_not_see_a_broken_one_have_the_same_bits(
    isa: str, step: Step, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Whatever number of its key or value is not finite; in any chain, tree and window."""
    ops, d, rows = with_cache_of(isa, "none", dtype, data.draw(st.integers(1, 3))), step.d, len(step.q)
    sound = torch.randn(rows, (step.share + 2) * step.kv_heads * d)
    hit = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=3, unique=True))
    bad = data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf, LARGEST, -LARGEST]))
    qkv = sound.clone()
    for row in hit:
        qkv[row, data.draw(st.integers(step.share * step.kv_heads * d, qkv.shape[1] - 1))] = bad
    turn = Rotation(step.positions(), torch.ones(2400, d), torch.zeros(2400, d))

    def run(x: Tensor) -> tuple[Any, Tensor, list[int]]:
        cache, plan = held(ops, step.kv(dtype)), ops.plan(step.layout, step.block_size)
        q = ops.rope_and_cache(returned(ops, x), None, turn, cache, plan)
        return ops.attention(q, cache, plan, d**-0.5, step.window), read(ops, cache), ops.broken_rows(plan)

    found, cache, broken = run(qkv)
    if dtype != torch.bfloat16 and abs(bad) == LARGEST:
        assert broken == []
        assert cache.isfinite().all()
        return
    assert broken == sorted(hit)
    assert cache.isfinite().all()
    slots = [step.slots(s)[step.cached[s] + r] for s in range(len(step.lengths)) for r in range(step.lengths[s])]
    seen = [step.seen(s, r) for s in range(len(step.lengths)) for r in range(step.lengths[s])]
    unseeing = [row for row in range(rows) if not {slots[other] for other in hit} & set(seen[row])]
    assert same(_rows(found, unseeing), run(sound)[0], unseeing)


@with_each("bad", (torch.nan, torch.inf))
def test_a_sequence_that_breaks_breaks_alone(isa: str, weights: str, bad: float) -> None:
    """Token 7 embeds as what is not finite. Rows of its sequence after it read zeros in place of its KV."""
    model = tiny(make(isa, weights), "gemma3", {7: bad}, **MODELS["gemma3"])
    paged, clean = PagedDecoder(model, 3, 64), PagedDecoder(model, 3, 64)
    for decoder in (paged, clean):
        decoder.step(Feed(0, [1, 2, 3]), Feed(1, [4, 5]), Feed(2, [9] * 20))
    left, broken, right = paged.step(Feed(0, [6, 8]), Feed(1, [6, 7, 9]), Feed(2, [10] * 5))
    assert not broken[1].isfinite().any()
    assert all(layer.isfinite().all() for layer in paged.kv)
    wanted = clean.step(Feed(0, [6, 8]), Feed(1, [6, 8, 9]), Feed(2, [10] * 5))
    assert torch.equal(left, wanted[0])
    assert torch.equal(broken[0], wanted[1][0])
    assert torch.equal(right, wanted[2])
    assert wanted[1].isfinite().all()
    assert torch.equal(paged.step(Feed(2, [11]), Feed(1, [5]))[0], clean.step(Feed(2, [11]))[0])


# Recordings


def batch(rows: AttentionRows, tokens: list[int], positions: list[int], num_judged: int) -> StepInput:
    """The last rows are judged, in reverse."""
    judged = list(range(rows.num_rows))[::-1][:num_judged]
    return StepInput(*(np.array(values, np.int64) for values in (tokens, positions, judged)), rows=rows)


BROKEN = 7
TAPS = (0, 2)  # layers whose outputs are shown
TOP_K = 8  # and how many of the best tokens
TREE = np.array([-1, 0, 0, 1, 2], np.int32)
# lengths, cached, sequences, parents, and how many rows are judged
SCRIPT: list[tuple[list[int], list[int], list[int], list[Any], int]] = [
    ([30, 8], [0, 0], [0, 1], [None, None], 3),
    ([1], [30], [0], [None], 1),
    ([1, 5], [0, 8], [2, 1], [None, TREE], 6),
    ([3], [1], [2], [None], 0),
    ([40], [4], [2], [None], 40),
    ([2, 1], [31, 9], [0, 1], [None, None], 2),
]


@with_each("threads", (1, 2, 9))
def test_a_recording_does_what_its_ops_do(isa: str, weights: str, threads: int) -> None:
    """One recording of 40 rows replays steps of fewer, bit for bit, whatever rows of earlier ones hold, NaN too."""
    model = tiny(make(isa, weights, threads), "gemma3", {BROKEN: torch.nan}, **MODELS["gemma3"])
    spec, tables = model.spec, [[1, 4, 6], [2, 5, 8], [3, 7, 9]]
    eager_kv = [torch.randn((2, 10 * 16, *shape)).to(model.ops.dtype) for shape in spec.kv_shapes]
    recorded_kv = [layer.clone() for layer in eager_kv]
    one_by_one = make(isa, weights, threads)
    one_by_one.records = False
    eager = Runner(model, one_by_one, eager_kv, 16, 40, 40, TAPS, TOP_K)
    recorded = Runner(model, model.ops, recorded_kv, 16, 40, 40, TAPS, TOP_K)
    for lengths, cached, seqs, parents, num_judged in SCRIPT:
        rows = layout(lengths, cached, [tables[s] for s in seqs], parents)
        tokens = torch.randint(10, spec.vocab_size, (rows.num_rows,)).tolist()
        tokens[-1] = BROKEN if rows.num_rows == 40 else tokens[-1]
        depths = [[0, 1, 1, 2, 2] if tree is not None else range(n) for n, tree in zip(lengths, parents, strict=True)]
        positions = [c + depth for c, own in zip(cached, depths, strict=True) for depth in own]
        one = batch(rows, tokens, positions, num_judged)
        for step in (eager, recorded):
            step.start(one)
        wanted, found = eager.finish(), recorded.finish()
        assert found.top is not None
        assert wanted.top is not None
        assert [len(part) for part in (*tensors(found)[:3], found.top)] == [num_judged] * 4
        assert [len(tap) for tap in found.taps.values()] == [rows.num_rows] * 2
        assert all(same(x, y) for x, y in zip(tensors(found), tensors(wanted), strict=True))
        assert found.broken == wanted.broken
        assert found.top.tolist() == wanted.top.tolist()
        assert found.top[:, 0].tolist() == found.best.tolist()
        assert bool(found.logits.isfinite().all()) == (rows.num_rows < 40)
        assert all(same(x, y) for x, y in zip(recorded_kv, eager_kv, strict=True))


def tensors(output: Output) -> list[Tensor]:
    return [output.hidden, output.logits, output.best, *output.taps.values()]


def test_steps_of_all_sizes_keep_few_views_of_a_recordings_outputs() -> None:
    """Each is 4 KB, and with taps there are as many sizes as numbers of rows times those of judged ones."""

    def num_views() -> int:
        return sum(type(each) is _Computed for each in gc.get_objects())

    model = tiny(make(SETS[0]), "llama")
    kv = [torch.zeros(2, 64, *shape) for shape in model.spec.kv_shapes]
    step, before = Runner(model, model.ops, kv, 16, 40, 40, (0,)), num_views()
    first: dict[int, Tensor] = {}
    for n in range(1, 41):
        rows = layout([n], [0], [[1, 2, 3]], [None])
        for num_judged in range(1, n + 1):
            one = batch(rows, [10] * n, list(range(n)), num_judged)
            step.start(one)
            found = step.finish()
            assert [len(part) for part in tensors(found)] == [num_judged] * 3 + [n]
            last = first.setdefault(n, found.logits[0].clone())
            assert torch.equal(found.logits[0], last)
    assert num_views() - before <= 300


@every_set
def test_threads_that_come_late_find_nothing_to_do(isa: str) -> None:
    """More threads than any machine has cores for: most come to a run when it is over, and the next one has begun."""
    ops, alone = make(isa, "int8", threads=24), make(isa, "int8")
    matrix = torch.randn(300, 96)
    x, few = torch.randn(40, 9, 96), torch.randint(1, 10, (40,)).tolist()
    wanted = [alone.linear(alone.quantize_activation(rows), alone.pack(matrix)).clone() for rows in x]
    rows, weight = returned(ops, x[0].clone()), ops.pack(matrix)
    with ops.recording() as recording:
        found = ops.linear(ops.quantize_activation(rows), weight)
    for turn in range(400):
        which, n = turn % len(x), few[turn % len(x)]
        rows[:n] = x[which, :n]
        recording.start(n, 0, None)
        recording.finish()
        assert torch.equal(found[:n], wanted[which][:n])


@every_set
@pytest.mark.parametrize("threads", [1, 2, 24])
def test_an_op_has_as_many_rows_as_one_before_it_found(isa: str, threads: int) -> None:
    """Twice in a recording, each time in the same memory, so that a thread that comes late finds another number there;
    also none, and then ops that have the rows of the step again."""
    ops = make(isa, threads=threads)
    choices, rows = [returned(ops, torch.zeros(1, 20)) for _ in range(2)], torch.randn(2, 19, 40)
    streams, last = [returned(ops, part) for part in rows], returned(ops, torch.ones(1, 40))
    capped = [ops.softcap(returned(ops, part), 2.0) for part in rows]
    with ops.recording() as recording:
        for choice, stream in zip(choices, streams, strict=True):
            count = ops.argmax(choice)
            recording.program.rows_from(count.data_ptr())
            ops.softcap(stream, 2.0)
            recording.program.rows_from(0)
        ops.softcap(last, 2.0)
    for turn in range(60):
        counts = turn % 20, turn * 7 % 20
        last.fill_(1.0)
        for choice, stream, part, n in zip(choices, streams, rows, counts, strict=True):
            stream.copy_(part)
            choice.zero_()[0, n] = 1.0
        recording.start(1, 0, None)
        recording.finish()
        for stream, part, wanted, n in zip(streams, rows, capped, counts, strict=True):
            assert torch.equal(stream[:n], wanted[:n])
            assert torch.equal(stream[n:], part[n:]), "rows that nobody asked for"
        assert not bool((last == 1.0).any())


@every_set
@pytest.mark.parametrize("threads", [1, 2, 9])
def test_between_start_and_finish_the_host_does_something_else(isa: str, threads: int) -> None:
    """Nothing, other work of the same threads, or so much that the others have done all; or it forgets to finish: then
    the next start does, and the end of the recording."""
    ops, alone = make(isa, "int8", threads), make(isa, "int8")
    matrix, x = torch.randn(300, 96), torch.randn(6, 9, 96)
    wanted = [alone.linear(alone.quantize_activation(rows), alone.pack(matrix)).clone() for rows in x]
    rows, weight = returned(ops, x[0].clone()), ops.pack(matrix)
    with ops.recording() as recording:
        found = ops.linear(ops.quantize_activation(rows), weight)
    recording.finish()
    assert not found.any(), "nothing was started"
    for turn in range(60):
        which = turn % len(x)
        rows[:] = x[which]
        recording.start(9, 0, None)
        if which == 1:
            assert torch.equal(ops.linear(ops.quantize_activation(x[0]), weight), wanted[0])
        elif which == 2:
            time.sleep(0.002)
        elif which == 3:
            recording.start(4, 0, None)
            recording.finish()
            assert torch.equal(found, wanted[which])
            continue
        recording.finish()
        assert torch.equal(found, wanted[which])
    recording.start(9, 0, ops.plan(layout([9], [0], [[1]], [None]), 16))
    del recording


@every_set
def test_the_other_threads_begin_without_their_caller(isa: str) -> None:
    """And do all, if it never comes."""
    ops = make(isa, "int8", threads=2)
    matrix, x = torch.randn(300, 96), torch.randn(9, 96)
    weight = ops.pack(matrix)
    wanted, rows = ops.linear(ops.quantize_activation(x), weight).clone(), returned(ops, x)
    with ops.recording() as recording:
        found = ops.linear(ops.quantize_activation(rows), weight)
    recording.start(9, 0, None)
    until = time.monotonic() + 30
    while not torch.equal(found, wanted):
        assert time.monotonic() < until, "nobody has begun"
        time.sleep(0.001)
    recording.finish()
    assert torch.equal(found, wanted)


@every_set
def test_a_profile_runs_every_op_once(isa: str) -> None:
    ops = make(isa, threads=2)
    weight, x = ops.pack(torch.randn(40, 64)), torch.randn(5, 64)
    wanted, rows = ops.linear(ops.quantize_activation(x), weight), returned(ops, x)
    with ops.recording() as recording:
        found = ops.linear(ops.quantize_activation(rows), weight)
    assert recording.program.names() == ["quantize_activation", "linear"]
    assert not found.any(), "recorded, not run"
    assert len(recording.program.profile(4)) == 2
    assert torch.equal(found[:4], wanted[:4])
    assert not found[4].any(), "a row that was not asked for"


# Thread pools


def test_two_kernels_work_at_the_same_time() -> None:
    """Each on threads of its own, called by threads of Python."""
    torch.manual_seed(1)
    matrix, x = torch.randn(200, 100), torch.randn(2, 17, 100)
    single = make(SETS[0], "int8")
    wanted = [single.linear(single.quantize_activation(rows), single.pack(matrix)) for rows in x]

    def work(i: int) -> bool:
        ops = make(SETS[0], "int8", 2)
        weight = ops.pack(matrix)
        return all(torch.equal(ops.linear(ops.quantize_activation(x[i]), weight), wanted[i]) for _ in range(100))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, (0, 1))) == [True, True]


@every_set
def test_threads_of_python_share_kernels(isa: str) -> None:
    """All that kernels do with their threads, each kind in a thread of its own: recordings that are started and
    finished, some by nobody, with the other threads' work in between; ops; samples of many rows; profiles; the ends of
    programs that were started. Each gets what it gets alone, and all come to their end."""
    ops, alone = make(isa, "int8", threads=3), make(isa, "int8")
    torch.manual_seed(2)
    matrix, x = torch.randn(300, 96), torch.randn(5, 9, 96)
    weight = ops.pack(matrix)
    wanted = [alone.linear(alone.quantize_activation(rows), alone.pack(matrix)).clone() for rows in x]
    scores, hashed = torch.randn(24, 500), hash_tokens(torch.arange(500))
    params = SamplingParams(temperature=1.0)
    drafts = draft_arrays([SampledSeq(Draft.empty(), params, 77 * i, 5, i, None) for i in range(24)])
    asked = scores, scores.argmax(-1), drafts, hashed, None, "coupled"
    sampled = alone.verify(*asked)

    def recorded() -> tuple[Any, Tensor, Tensor]:
        rows = returned(ops, x[0].clone())
        with ops.recording() as recording:
            return recording, rows, ops.linear(ops.quantize_activation(rows), weight)

    def started(turn: int) -> None:
        recording, rows, found = own
        recording.finish()
        rows[:] = x[turn % 5]
        recording.start(9, 0, None)
        if turn % 3:
            recording.finish()
            assert torch.equal(found, wanted[turn % 5])

    def op(turn: int) -> None:
        assert torch.equal(ops.linear(ops.quantize_activation(x[turn % 5]), weight), wanted[turn % 5])

    def sample(turn: int) -> None:
        assert ops.verify(*asked).tokens.tolist() == sampled.tokens.tolist()

    def profiled(turn: int) -> None:
        recording, _, found = recorded()
        assert len(recording.program.profile(9)) == 2
        assert torch.equal(found, wanted[0])

    def ended(turn: int) -> None:
        recorded()[0].start(9, 0, None)

    own, failures, num_done = recorded(), list[BaseException](), list[None]()

    def work(kind: Callable[[int], None]) -> None:
        try:
            for turn in range(150):
                kind(turn)
        except BaseException as error:
            failures.append(error)
        num_done.append(None)

    kinds = (started, op, sample, sample, profiled, ended)
    threads = [threading.Thread(target=work, args=(kind,), daemon=True) for kind in kinds]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 120
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    assert len(num_done) == len(kinds), "some wait for ever"
    assert not failures, failures


def test_what_one_thread_records_is_no_other_threads() -> None:
    ops, x = make(SETS[0], "int8", threads=2), torch.randn(4, 96)
    weight = ops.pack(torch.randn(64, 96))
    wanted = ops.linear(ops.quantize_activation(x), weight).clone()
    with ops.recording() as recording, ThreadPoolExecutor(1) as pool:
        ops.quantize_activation(x)
        assert torch.equal(pool.submit(lambda: ops.linear(ops.quantize_activation(x), weight)).result(60), wanted)
    assert recording.program.names() == ["quantize_activation"]


def test_python_goes_on_while_a_program_waits_for_its_end() -> None:
    """The pool is held by another thread for about a second, in which a third one counts milliseconds."""
    ops = make(SETS[0], threads=2)
    weight, rows = ops.pack(torch.randn(1024, 1024)), ops.norm(torch.randn(64, 1024), torch.ones(1024), 1e-6)

    def recorded(num_ops: int) -> Any:
        with ops.recording() as recording:
            x = ops.quantize_activation(rows)
            for _ in range(num_ops):
                ops.linear(x, weight)
        return recording

    short = recorded(20)
    short.program.profile(64)
    begun = time.perf_counter()
    short.program.profile(64)
    long = recorded(int(20 / (time.perf_counter() - begun)) + 1)
    program, is_over = _native.Program(ops._thread_pool, SETS[0]), threading.Event()
    ticks, begins = list[None](), threading.Event()

    def hold() -> None:
        begins.set()
        long.program.profile(64)
        is_over.set()

    def count() -> None:
        while not is_over.wait(0.001):
            ticks.append(None)

    with ThreadPoolExecutor(2) as pool:
        holding, counting = pool.submit(hold), pool.submit(count)
        begins.wait(60)
        while not ticks:
            time.sleep(0.001)
        assert not is_over.is_set(), "or nothing is waited for"
        before = len(ticks)
        del program
        passed = len(ticks) - before
        holding.result(60)
        counting.result(60)
    assert passed >= 5


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux lists a process's threads")
def test_threads_end_with_their_kernels() -> None:
    def count() -> int:
        gc.collect()
        return len(list(Path("/proc/self/task").iterdir()))

    x, before = torch.randn(4, 36), count()
    kept = make(SETS[0], threads=4)
    kept.quantize_activation(x)
    assert count() >= before + 3, "or this test would see nothing"
    del kept
    for _ in range(40):
        make(SETS[0], threads=4).quantize_activation(x)
    assert count() < before + 40, "at most a few that the system has not buried yet"


def test_an_unknown_instruction_set_is_named() -> None:
    with pytest.raises(ValueError, match="sse9"):
        make("sse9").quantize_activation(torch.zeros(1, 32))
