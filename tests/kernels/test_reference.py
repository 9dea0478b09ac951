"""The reference kernels against naive formulas, and their promise that a row's bits depend on that row alone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from specserve.kernels.reference import Kernels

BLOCK = 16
HEADS, KV_HEADS, DIM = 6, 2, 16


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(torch.device("cpu"), request.param)


def make_kv(dtype: torch.dtype, blocks: int = 60) -> Tensor:
    return torch.randn(2, blocks * BLOCK, KV_HEADS, DIM, generator=torch.Generator().manual_seed(0)).to(dtype)


def layout(lengths: list[int], cached: list[int], tables: list[list[int]], parents: list | None = None):
    starts = np.cumsum([0, *lengths]).tolist()
    return SimpleNamespace(
        num_rows=-(-starts[-1] // Kernels.row_multiple) * Kernels.row_multiple,
        query_starts=starts,
        cached=cached,
        block_tables=tables,
        parents=parents or [None] * len(lengths),
    )


def attend(kernels: Kernels, kv: Tensor, queries: list[Tensor], cached, tables, parents=None, window=None):
    """One step's attention; returns each sequence's rows."""
    rows = layout([len(q) for q in queries], cached, tables, parents)
    padding = torch.zeros(rows.num_rows - rows.query_starts[-1], HEADS, DIM)
    out = kernels.attention(torch.cat([*queries, padding]), kv, kernels.plan(rows, BLOCK), DIM**-0.5, window)
    return [out[a:b] for a, b in zip(rows.query_starts, rows.query_starts[1:], strict=False)]


def naive(kv: Tensor, query: Tensor, cached: int, table: list[int], window: int | None) -> Tensor:
    """Dense attention in float64, row by row."""
    slots = [block * BLOCK + i for block in table for i in range(BLOCK)]
    out = []
    for r, q in enumerate(query.double()):
        seen = slots[max(0, cached + r + 1 - (window or 10**9)) : cached + r + 1]
        k, v = kv[:, seen].double().repeat_interleave(HEADS // KV_HEADS, 2)
        p = (torch.einsum("hd,lhd->hl", q, k) * DIM**-0.5).softmax(-1)
        out.append(torch.einsum("hl,lhd->hd", p, v).flatten())
    return torch.stack(out)


@settings(max_examples=25, deadline=None)
@given(
    cached=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 20), min_size=4, max_size=4),
    window=st.sampled_from([None, 1, 7, 130]),
    shuffle=st.randoms(use_true_random=False),
)
def test_attention_equals_dense_attention(cached, lengths, window, shuffle) -> None:
    kernels = Kernels(torch.device("cpu"), torch.float32)
    blocks = list(range(1, 90))
    shuffle.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(-(-(c + n) // BLOCK))] for c, n in zip(cached, lengths, strict=False)]
    kv = make_kv(torch.float32, 90)
    generator = torch.Generator().manual_seed(1)
    queries = [torch.randn(n, HEADS, DIM, generator=generator) for _, n in zip(cached, lengths, strict=False)]
    got = attend(kernels, kv, queries, cached, tables, window=window)
    for out, query, c, table in zip(got, queries, cached, tables, strict=True):
        torch.testing.assert_close(out.double(), naive(kv, query, c, table, window), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("cached", [0, 3, 127, 128, 300])
def test_attention_rows_are_invariant(kernels: Kernels, cached: int, window: int | None) -> None:
    kv = make_kv(kernels.dtype)
    table = list(range(1, 25))
    query = torch.randn(40, HEADS, DIM)
    (whole,) = attend(kernels, kv, [query], [cached], [table], window=window)
    for r in (0, 7, 8, 39):
        (alone,) = attend(kernels, kv, [query[r : r + 1]], [cached + r], [table], window=window)
        assert torch.equal(alone[0], whole[r])
    others = [torch.randn(n, HEADS, DIM) for n in (3, 17, 1)]
    tables = [list(range(25, 60)), list(range(40, 60)), [59]]
    mixed = attend(kernels, kv, [*others, query[:6]], [500, 9, 2, cached], [*tables, table], window=window)
    assert torch.equal(mixed[3], whole[:6])


def test_a_tree_node_sees_its_path_as_if_it_were_a_chain(kernels: Kernels) -> None:
    """Rows: one own token, then the tree 0 -> (1, 2), 1 -> 3, 2 -> 4. Node 4's path is rows 0, 2, 4."""
    cached, table = 140, list(range(1, 20))
    kv = make_kv(kernels.dtype)
    k, v, query = torch.randn(3, 5, HEADS, DIM)
    parents = np.array([-1, 0, 0, 1, 2], np.int32)
    tree = layout([5], [cached], [table], [parents])
    plan = kernels.plan(tree, BLOCK)
    kernels.write_kv(kv, torch.cat([k[:, :KV_HEADS]] * 2)[:8], torch.cat([v[:, :KV_HEADS]] * 2)[:8], plan)
    out = kernels.attention(torch.cat([query] * 2)[:8], kv, plan, 0.25, None)
    path = [0, 2, 4]
    chain = make_kv(kernels.dtype)
    rows = kernels.plan(layout([3], [cached], [table]), BLOCK)
    pad = [*path, 0, 0, 0, 0, 0]
    kernels.write_kv(chain, k[pad, :KV_HEADS], v[pad, :KV_HEADS], rows)
    assert torch.equal(kernels.attention(query[pad], chain, rows, 0.25, None)[:3], out[path])


def test_what_a_row_may_not_see_cannot_reach_it(kernels: Kernels) -> None:
    """Freed blocks keep what they held, NaN included, and a neighbour's rows may be NaN: neither is ever multiplied."""
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
    kernels.write_kv(dirty, torch.full((8, KV_HEADS, DIM), torch.nan), torch.ones(8, KV_HEADS, DIM), plan)
    assert (dirty[:, :BLOCK] == 0).all(), "padding rows are not stored"
    assert (dirty[1, slots[-2:]] == 1).all()


@pytest.mark.parametrize(("inputs", "outputs"), [(576, 1536), (100, 36), (2048, 96)])
def test_linear_rows_are_invariant(kernels: Kernels, inputs: int, outputs: int) -> None:
    weight = kernels.pack(torch.randn(outputs, inputs))
    x = torch.randn(256, inputs).to(kernels.dtype)
    whole = kernels.linear(x, weight)
    for rows in (4, 8, 12, 40, 128):
        for start in (0, 8, 104):
            assert torch.equal(kernels.linear(x[start : start + rows], weight), whole[start : start + rows])


def test_linear_in_tiles_equals_one_call() -> None:
    """The CUDA path, on whatever device the test has: GEMMs of a fixed number of rows."""
    kernels = Kernels(torch.device("cpu"), torch.float32)
    weight, x = torch.randn(24, 32), torch.randn(72, 32)
    whole = kernels.linear(x, weight)
    kernels.tile = 16
    assert torch.equal(kernels.linear(x, weight), whole)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [36, 96, 1536])
def test_elementwise_rows_are_invariant_and_right(kernels: Kernels, activation: str, width: int) -> None:
    x = torch.randn(104, 2 * width).to(kernels.dtype)
    whole = kernels.gated(x, activation)
    for start, rows in ((0, 4), (8, 8), (16, 24), (64, 40)):
        assert torch.equal(kernels.gated(x[start : start + rows], activation), whole[start : start + rows])
    gate, up = x.double().chunk(2, -1)
    plain = torch.nn.functional.silu if activation == "silu" else _gelu
    tolerance = 1e-5 if kernels.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(whole.double(), plain(gate) * up, rtol=tolerance, atol=tolerance)


def _gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize("width", [16, 100, 576])
def test_norm_and_rotary(kernels: Kernels, width: int) -> None:
    x, weight = torch.randn(48, width), torch.randn(width)
    whole = kernels.rms_norm(x, weight, 1e-5)
    assert torch.equal(kernels.rms_norm(x[8:12], weight, 1e-5), whole[8:12])
    right = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    tolerance = 1e-5 if kernels.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(whole.double(), right, rtol=tolerance, atol=tolerance)
    angle = torch.rand(48, width // 2)
    heads = x[:, None].expand(-1, 3, -1)
    turned = kernels.rotary(heads, angle.cos(), angle.sin())
    pairs = torch.complex(x[:, : width // 2].double(), x[:, width // 2 :].double()) * torch.polar(
        torch.ones_like(angle).double(), angle.double()
    )
    torch.testing.assert_close(turned[:, 1].double(), torch.cat((pairs.real, pairs.imag), -1), rtol=1e-5, atol=1e-5)
    assert torch.equal(kernels.rotary(heads[8:12], angle[8:12].cos(), angle[8:12].sin()), turned[8:12])
