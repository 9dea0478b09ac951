"""The reference kernels against naive formulas, and their promise that a row's bits depend on that row alone."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from specserve.kernels.reference import Kernels
from specserve.ops import AttentionRows, HeadNorms, Rotation

BLOCK = 16
HEADS, KV_HEADS, DIM = 6, 2, 16
SLOPES = torch.tensor([2.0**-i for i in range(1, HEADS + 1)])


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(torch.device("cpu"), request.param)


def make_kv(dtype: torch.dtype, blocks: int = 60) -> Tensor:
    return torch.randn(2, blocks * BLOCK, KV_HEADS, DIM, generator=torch.Generator().manual_seed(0)).to(dtype)


def layout(lengths: list[int], cached: list[int], tables: list[list[int]], parents: list | None = None):
    starts = np.cumsum([0, *lengths]).tolist()
    rows = parents or [range(-1, n - 1) for n in lengths]
    return AttentionRows.pack(starts, cached, tables, list(itertools.chain(*rows)), Kernels.row_multiple)


def attend(kernels: Kernels, kv: Tensor, queries: list[Tensor], cached, tables, parents=None, window=None, slopes=None):
    """One step's attention; returns each sequence's rows."""
    rows = layout([len(q) for q in queries], cached, tables, parents)
    padding = torch.zeros(rows.num_rows - len(rows.parents), HEADS, DIM)
    out = kernels.attention(torch.cat([*queries, padding]), kv, kernels.plan(rows, BLOCK), DIM**-0.5, window, slopes)
    return [out[a:b] for a, b in zip(rows.query_starts, rows.query_starts[1:], strict=False)]


def naive(
    kv: Tensor, query: Tensor, cached: int, table: list[int], window: int | None, slopes: Tensor | None
) -> Tensor:
    """Dense attention in float64, row by row."""
    slots = [block * BLOCK + i for block in table for i in range(BLOCK)]
    out = []
    for r, q in enumerate(query.double()):
        seen = slots[max(0, cached + r + 1 - (window or 10**9)) : cached + r + 1]
        k, v = kv[:, seen].double().repeat_interleave(HEADS // KV_HEADS, 2)
        scores = torch.einsum("hd,lhd->hl", q, k) * DIM**-0.5
        if slopes is not None:
            scores += slopes.double()[:, None] * torch.arange(1 - len(seen), 1)
        p = scores.softmax(-1)
        out.append(torch.einsum("hl,lhd->hd", p, v).flatten())
    return torch.stack(out)


@settings(max_examples=25)
@given(
    cached=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 20), min_size=4, max_size=4),
    window=st.sampled_from([None, 1, 7, 130]),
    shuffle=st.randoms(use_true_random=False),
    has_slopes=st.booleans(),
)
def test_attention_equals_dense_attention(cached, lengths, window, shuffle, has_slopes) -> None:
    kernels = Kernels(torch.device("cpu"), torch.float32)
    blocks = list(range(1, 90))
    shuffle.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(-(-(c + n) // BLOCK))] for c, n in zip(cached, lengths, strict=False)]
    kv = make_kv(torch.float32, 90)
    generator = torch.Generator().manual_seed(1)
    queries = [torch.randn(n, HEADS, DIM, generator=generator) for _, n in zip(cached, lengths, strict=False)]
    slopes = SLOPES if has_slopes else None
    got = attend(kernels, kv, queries, cached, tables, window=window, slopes=slopes)
    for out, query, c, table in zip(got, queries, cached, tables, strict=True):
        torch.testing.assert_close(out.double(), naive(kv, query, c, table, window, slopes), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("slopes", [None, SLOPES], ids=["", "alibi"])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("cached", [0, 3, 127, 128, 300])
def test_attention_rows_are_invariant(kernels: Kernels, cached: int, window: int | None, slopes: Tensor | None) -> None:
    kv = make_kv(kernels.dtype)
    table = list(range(1, 25))
    query = torch.randn(40, HEADS, DIM)
    (whole,) = attend(kernels, kv, [query], [cached], [table], window=window, slopes=slopes)
    for r in (0, 7, 8, 39):
        (alone,) = attend(kernels, kv, [query[r : r + 1]], [cached + r], [table], window=window, slopes=slopes)
        assert torch.equal(alone[0], whole[r])
    others = [torch.randn(n, HEADS, DIM) for n in (3, 17, 1)]
    tables = [list(range(25, 60)), list(range(40, 60)), [59]]
    mixed = attend(
        kernels, kv, [*others, query[:6]], [500, 9, 2, cached], [*tables, table], window=window, slopes=slopes
    )
    assert torch.equal(mixed[3], whole[:6])


def rotation(positions: list[int], d: int = DIM) -> Rotation:
    """Random angles for 512 positions, in the layout of models.rotary.rotary_tables."""
    angle = 6 * torch.rand(512, d // 2, generator=torch.Generator().manual_seed(3))
    cos, sin = torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)
    return Rotation(torch.tensor(positions), cos, sin)


def packed_rows(*parts: Tensor) -> Tensor:
    """Heads of q, k and v, [rows, n, d] each, as rows of one product, with rows of ones as padding."""
    rows = torch.cat(parts, 1).flatten(1)
    return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % Kernels.row_multiple), value=1.0)


def test_a_tree_node_sees_its_path_as_if_it_were_a_chain(kernels: Kernels) -> None:
    """Rows: one own token, then the tree 0 -> (1, 2), 1 -> 3, 2 -> 4. Node 4's path is rows 0, 2, 4."""
    cached, table, path = 140, list(range(1, 20)), [0, 2, 4]
    qkv = packed_rows(torch.randn(5, HEADS + 2 * KV_HEADS, DIM)).to(kernels.dtype)
    parents = np.array([-1, 0, 0, 1, 2], np.int32)
    tree, tree_kv = kernels.plan(layout([5], [cached], [table], [parents]), BLOCK), make_kv(kernels.dtype)
    tree_q = kernels.rope_and_cache(qkv, None, rotation([140, 141, 141, 142, 142, 0, 0, 0]), tree_kv, tree)
    chain, chain_kv = kernels.plan(layout([3], [cached], [table]), BLOCK), make_kv(kernels.dtype)
    chain_q = kernels.rope_and_cache(qkv[[*path, 0]], None, rotation([140, 141, 142, 0]), chain_kv, chain)
    assert torch.equal(tree_q[path], chain_q[:3])
    for slopes in (None, SLOPES):
        out = kernels.attention(tree_q, tree_kv, tree, 0.25, None, slopes)
        assert torch.equal(kernels.attention(chain_q, chain_kv, chain, 0.25, None, slopes)[:3], out[path])


def test_what_a_row_may_not_see_cannot_reach_it(kernels: Kernels) -> None:
    """A neighbour's rows may be NaN, and what a row does not see is multiplied by 0: a cache holds nothing but finite
    numbers. NaN in a slot that no row's context reaches is never read."""
    clean, dirty = make_kv(kernels.dtype), torch.full_like(make_kv(kernels.dtype), torch.nan)
    table, cached = [5, 3, 9], 37
    slots = [block * BLOCK + i for block in table for i in range(BLOCK)][: cached + 2]
    dirty[:, slots] = clean[:, slots]
    dirty[:, :BLOCK] = 0.0  # the null block
    query = torch.randn(2, HEADS, DIM)
    (right,) = attend(kernels, clean, [query], [cached], [table])
    bad = torch.full((3, HEADS, DIM), torch.nan)
    got = attend(kernels, dirty, [bad, query], [20, cached], [[20, 21], table])
    assert torch.equal(got[1], right)
    plan = kernels.plan(layout([2], [cached], [table]), BLOCK)
    qkv = torch.full((4, HEADS + 2 * KV_HEADS, DIM), torch.nan)
    qkv[:2, -KV_HEADS:] = 1.0
    kernels.rope_and_cache(qkv.flatten(1), None, rotation([cached, cached + 1, 0, 0]), dirty, plan)
    assert (dirty[:, :BLOCK] == 0).all(), "padding rows are not stored"
    assert (dirty[1, slots[-2:]] == 1).all()
    assert (dirty[0, slots[-2:]] == 0).all(), "NaN is not stored"
    assert kernels.broken_rows(plan) == [0, 1]
    assert torch.equal(dirty[:, slots[:-2]], clean[:, slots[:-2]])


@pytest.mark.parametrize(("inputs", "outputs"), [(576, 1536), (576, 3072), (100, 36), (2048, 96)])
def test_linear_rows_are_invariant(kernels: Kernels, inputs: int, outputs: int) -> None:
    bias = torch.randn(outputs) if outputs == 96 else None
    matrix = torch.randn(outputs, inputs)
    weight = kernels.pack(matrix, bias)
    x = kernels.quantize_activation(torch.randn(256, inputs))
    whole = kernels.linear(x, weight)
    right = x.double() @ matrix.to(kernels.dtype).double().T + (0 if bias is None else bias.to(kernels.dtype).double())
    torch.testing.assert_close(whole.double(), right, rtol=tolerance(kernels), atol=tolerance(kernels) * inputs**0.5)
    for rows in (4, 8, 12, 40, 128):
        for start in (0, 8, 104):
            assert torch.equal(kernels.linear(x[start : start + rows], weight), whole[start : start + rows])


def test_linear_in_tiles_equals_one_call() -> None:
    """The CUDA path, on whatever device the test has: GEMMs of a fixed number of rows."""
    kernels = Kernels(torch.device("cpu"), torch.float32)
    weight, x = kernels.pack(torch.randn(24, 32), torch.randn(24)), torch.randn(72, 32)
    whole = kernels.linear(x, weight)
    kernels.tile = 16
    assert torch.equal(kernels.linear(x, _dense(weight)), whole)


def _dense(weight: Any) -> Any:
    """As it lies where there is no oneDNN."""
    return dataclasses.replace(weight, matrix=weight.matrix.to_dense() if weight.matrix.is_mkldnn else weight.matrix)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [36, 96, 1536])
def test_gated_rows_are_invariant_and_right(kernels: Kernels, activation: str, width: int, biased: bool) -> None:
    gate, up = 0.2 * torch.randn(2, width, 48)
    biases = torch.randn(2, width) if biased else (None, None)
    weight, x = kernels.pack_gated(gate, up, *biases), kernels.quantize_activation(torch.randn(104, 48))
    whole = kernels.gated(x, weight, activation)
    for start, rows in ((0, 4), (8, 8), (16, 24), (64, 40)):
        assert torch.equal(kernels.gated(x[start : start + rows], weight, activation), whole[start : start + rows])
    plain = torch.nn.functional.silu if activation == "silu" else _gelu
    products = [x.double() @ part.to(kernels.dtype).double().T for part in (gate, up)]
    if biased:
        products = [product + bias.to(kernels.dtype).double() for product, bias in zip(products, biases, strict=True)]
    right = plain(products[0]) * products[1]
    torch.testing.assert_close(whole.double(), right, rtol=4 * tolerance(kernels), atol=4 * tolerance(kernels))


def tolerance(kernels: Kernels) -> float:
    return 1e-5 if kernels.dtype == torch.float32 else 1e-2


def _gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    """In float64."""
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


@pytest.mark.parametrize("with_post", [False, True])
@pytest.mark.parametrize("width", [16, 100, 576])
def test_adding_norming_and_collecting(kernels: Kernels, width: int, with_post: bool) -> None:
    """The residual, what a linear layer reads of it, and the rows that are collected; each row the same bits in any
    company."""
    before, delta, weight = torch.randn(48, width), torch.randn(48, width).to(kernels.dtype), torch.randn(width)
    post = torch.randn(width) if with_post else None
    after = before.clone()
    read = kernels.fused_add_norm(after, delta, post, kernels.pack_vector(weight), 1e-5)
    right = before + (_normed(delta, post) if with_post else delta.double())
    torch.testing.assert_close(after.double(), right, rtol=tolerance(kernels), atol=tolerance(kernels))
    torch.testing.assert_close(read.double(), _normed(after, weight), rtol=tolerance(kernels), atol=tolerance(kernels))
    assert read.dtype == kernels.dtype
    few = before[8:12].clone()
    assert torch.equal(kernels.fused_add_norm(few, delta[8:12], post, weight, 1e-5), read[8:12])
    assert torch.equal(few, after[8:12])
    rows = torch.tensor([40, 3, 3, 47])
    collected = kernels.gather_rows(rows, before, delta, post, 1e-5)
    assert torch.equal(collected, after[rows])
    hidden = kernels.norm(collected, weight, 1e-5)
    assert hidden.dtype == torch.float32
    assert torch.equal(hidden, read[rows].float()), "the hidden states are what the head reads"
    assert torch.equal(kernels.fused_add_norm(after.clone(), None, None, weight, 1e-5), read)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("d", [16, 36, 100])
def test_rotating(kernels: Kernels, d: int, normed: bool) -> None:
    """Right values by complex numbers, and a row's bits depend on that row and its position alone."""
    positions = torch.randperm(512)[:48].tolist()
    turn, plan = rotation(positions, d), kernels.plan(layout([48], [5], [list(range(1, 5))]), BLOCK)
    qkv = torch.randn(48, HEADS + 2 * KV_HEADS, d).to(kernels.dtype)
    norms = HeadNorms(torch.randn(d), torch.randn(d), 1e-5) if normed else None
    kv = torch.zeros(2, 5 * BLOCK, KV_HEADS, d, dtype=kernels.dtype)
    q = kernels.rope_and_cache(qkv.flatten(1), norms, turn, kv, plan)
    heads = qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)
    right = [part.double() for part in heads]
    if norms is not None:
        right[:2] = [_normed(part, weight) for part, weight in zip(right, (norms.q, norms.k), strict=False)]
    angle = torch.atan2(turn.sin[:, d // 2 :].double(), turn.cos[:, : d // 2].double())[positions][:, None]
    right[:2] = [_turned(part, angle) for part in right[:2]]
    for found, wanted in zip((q, *kv[:, BLOCK + 5 : BLOCK + 53]), right, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance(kernels), atol=3 * tolerance(kernels))
    assert not kv[:, : BLOCK + 5].any(), "nothing else is written"
    one, other = kernels.plan(layout([4], [20], [[1, 2]]), BLOCK), torch.zeros_like(kv)
    assert torch.equal(
        kernels.rope_and_cache(qkv[8:12].flatten(1), norms, rotation(positions[8:12], d), other, one), q[8:12]
    )
    assert torch.equal(other[:, 2 * BLOCK + 4 : 2 * BLOCK + 8], kv[:, BLOCK + 13 : BLOCK + 17])


def _turned(x: Tensor, angle: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((pairs.real, pairs.imag), -1)


def test_embedding_capping_and_choosing(kernels: Kernels) -> None:
    table, ids = torch.randn(50, 36).to(kernels.dtype), torch.tensor([3, 49, 3, 0])
    assert torch.equal(kernels.embed(ids, table, 1.0), table[ids].float())
    assert torch.equal(kernels.embed(ids, table, 5.5), table[ids].float() * 5.5)
    logits = 9 * torch.randn(8, 50)
    capped = kernels.softcap(logits.clone(), 6.0)
    torch.testing.assert_close(capped.double(), 6 * (logits.double() / 6).tanh(), rtol=1e-5, atol=1e-6)
    logits[0, [30, 7, 41]] = 100.0
    logits[1, 9] = torch.nan
    logits[2, 9] = torch.inf
    logits[3] = -torch.inf
    logits[4, :49] = -torch.inf
    wanted = [7, -1, -1, -1, 49, *logits[5:].argmax(-1).tolist()]
    assert kernels.argmax(logits).tolist() == wanted
    assert kernels.argmax(logits[:0]).shape == (0,)
