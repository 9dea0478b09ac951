"""The Triton kernels against the reference: interpreted where there is no GPU. On a GPU their bits are compared, too:
each row among others against that row alone."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton is not installed")

from specserve.kernels import _triton_attention as attention, _triton_linear as linear, _triton_rows as rows_of
from specserve.kernels._torch_runs import ancestors, slots_of
from specserve.kernels._triton_numbers import INTERPRETED
from specserve.kernels.reference import Kernels, _Plan
from specserve.ops import AttentionRows, HeadNorms, Rotation
from specserve.testing.interpreted import mend_interpreter

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
BLOCK, NUM_BLOCKS = 16, 160
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("Triton was imported without TRITON_INTERPRET=1, and there is no GPU", allow_module_level=True)
if INTERPRETED:
    mend_interpreter()


@pytest.fixture(params=DTYPES.values(), ids=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    random.seed(0)
    return request.param


@pytest.fixture
def reference(dtype: torch.dtype) -> Kernels:
    return Kernels(DEVICE, dtype)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape).to(DEVICE)


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 96, 64), (3, 50, 128), (17, 33, 80), (40, 100, 96), (130, 48, 200)])
def test_linear(dtype: torch.dtype, reference: Kernels, rows: int, n: int, k: int) -> None:
    x, weight, bias = normal(rows, k).to(dtype), (normal(n, k) * k**-0.5).to(dtype), normal(n).to(dtype)
    assert_close(linear.linear(x, weight), F.linear(x.double(), weight.double()), dtype)
    assert_close(linear.linear(x, weight, bias), F.linear(x.double(), weight.double(), bias.double()), dtype)
    assert linear.linear(x[:0], weight).shape == (0, n)
    scores = linear.linear(x.float(), weight, None, torch.float32)
    assert scores.dtype == torch.float32
    assert_close(scores, F.linear(x.double(), weight.double()), torch.float32)


@pytest.mark.parametrize("activation", linear.ACTIVATIONS)
@pytest.mark.parametrize(("rows", "n", "k"), [(2, 48, 64), (18, 33, 72), (65, 16, 32)])
def test_gated(dtype: torch.dtype, reference: Kernels, activation: str, rows: int, n: int, k: int) -> None:
    x, weight, bias = normal(rows, k).to(dtype), (normal(2 * n, k) * k**-0.5).to(dtype), normal(2 * n).to(dtype)
    for some in (None, bias):
        expected = reference.gated(x, reference.pack(weight, some), activation)
        assert_close(linear.gated(x, weight, some, activation), expected, dtype)


def test_tiles_of_a_bucket_are_the_same_and_block_k_is_the_weight_s() -> None:
    for (n, k), itemsize, parts in itertools.product([(960, 576), (576, 1536), (4096, 14336)], (2, 4), (1, 2)):
        cut = [linear.tiles_for(rows, n, k, itemsize, parts) for rows in range(1, 300)]
        assert len({each.block_k for each in cut}) == 1
        borders = [rows for rows in range(2, 300) if cut[rows - 1] != cut[rows - 2]]
        assert set(borders) <= {17, 33, 65, 257}


def test_embed(dtype: torch.dtype, reference: Kernels) -> None:
    table, ids = normal(50, 80).to(dtype), torch.tensor([3, 0, 49, 7], device=DEVICE)
    assert torch.equal(rows_of.embed(ids, table, 1.5), reference.embed(ids, table, 1.5))


@pytest.mark.parametrize("has_post", [False, True])
@pytest.mark.parametrize("has_delta", [False, True])
def test_add_rms_norm(dtype: torch.dtype, reference: Kernels, has_delta: bool, has_post: bool) -> None:
    residual, weight = normal(5, 80), normal(80)
    delta, post = normal(5, 80).to(dtype) if has_delta else None, normal(80) if has_post else None
    mine, theirs = residual.clone(), residual.clone()
    found = rows_of.add_rms_norm(mine, delta, post, weight, 1e-5, dtype)
    assert_close(found, reference.fused_add_norm(theirs, delta, post, weight, 1e-5), dtype)
    assert_close(mine, theirs, dtype)
    alone = rows_of.add_rms_norm(
        residual[2:3].contiguous(), None if delta is None else delta[2:3].contiguous(), post, weight, 1e-5, dtype
    )
    assert torch.equal(alone, found[2:3])


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("d", [16, 64, 80])
def test_rope_and_cache(dtype: torch.dtype, reference: Kernels, d: int, is_normed: bool) -> None:
    heads, kv_heads, rows = 6, 2, 5
    qkv = normal(rows, (heads + 2 * kv_heads) * d).to(dtype)
    qkv[2, heads * d + 3], qkv[3, -1] = float("nan"), float("inf")
    positions, cos, sin = torch.tensor([0, 3, 5, 39, 7], device=DEVICE), normal(40, d), normal(40, d)
    slots = torch.tensor([9, 3, 4, 17, 1], device=DEVICE)
    kv = normal(2, 32, kv_heads, d).to(dtype)
    expected_kv, plan = kv.clone(), _Plan([], slots, slots, torch.zeros(rows, dtype=torch.bool, device=DEVICE))
    norms = (normal(d), normal(d), 1e-6) if is_normed else None
    rotation = Rotation(positions, cos, sin)
    expected = reference.rope_and_cache(qkv, norms and HeadNorms(*norms), rotation, expected_kv, plan)
    before = kv.clone()
    broken = torch.tensor([True, False, False, False, False], device=DEVICE)
    # A row without a slot is written nowhere.
    nowhere = torch.full((rows,), -1, device=DEVICE)
    tables = (positions, cos, sin, kv)
    rows_of.rope_and_cache(qkv, norms and rows_of.Norms(*norms), *tables, nowhere, broken)
    assert torch.equal(kv, before)
    assert broken.tolist() == [True, False, False, False, False]
    found = rows_of.rope_and_cache(qkv, norms and rows_of.Norms(*norms), *tables, slots, broken)
    assert broken.tolist() == [True, *plan.broken.tolist()[1:]] == [True, False, True, True, False]
    assert_close(found, expected, dtype)
    assert_close(kv, expected_kv, dtype)


@pytest.mark.parametrize("vocab", [7, 9000])
def test_argmax(vocab: int) -> None:
    torch.manual_seed(0)
    scores = normal(7, vocab)
    scores[0, [5, vocab - 1]] = 9.0
    scores[1, 3] = float("nan")
    scores[2, 6] = float("inf")
    scores[3] = float("-inf")
    scores[4, 2] = float("-inf")
    scores[6, 1:4] = torch.tensor([float("nan"), float("inf"), 1.0])
    assert torch.equal(rows_of.argmax(scores), Kernels(DEVICE, torch.float32).argmax(scores))
    assert rows_of.argmax(scores)[0] == 5


@dataclass
class Plan:
    row_seq: Tensor
    visible: Tensor
    prefix: Tensor
    path_start: Tensor
    paths: Tensor
    tables: Tensor
    block_size: int
    max_splits: int


def plan_of(rows: AttentionRows, as_paths: bool = False) -> Plan:
    """As the engine's, or with every position of this step on a path, also those of chains."""
    numbers: list[tuple[int, int, int, int]] = []
    paths: list[int] = []
    for s, cached in enumerate(rows.cached.tolist()):
        start, stop = rows.query_starts[s : s + 2].tolist()
        parents = rows.parents[start:stop].tolist()
        slots = slots_of(rows.block_tables[s].tolist(), cached + stop - start, BLOCK)
        for r in range(stop - start):
            path = list(range(stop - start)) if rows.is_block(s) else ancestors(parents, r)
            is_chain = path == list(range(len(path))) and not as_paths
            visible = cached + len(path)
            numbers.append((s, visible, visible if is_chain else cached, len(paths)))
            paths += [] if is_chain else [slots[cached + node] for node in path]
    numbers += [(0, 0, 0, 0)] * (rows.num_rows - len(numbers))
    columns = [torch.tensor(column, dtype=torch.int32, device=DEVICE) for column in zip(*numbers, strict=True)]
    tables = torch.from_numpy(rows.block_tables).to(DEVICE)
    splits = -(-max(number[1] for number in numbers) // attention.SPLIT)
    return Plan(*columns, torch.tensor(paths or [0], dtype=torch.int32, device=DEVICE), tables, BLOCK, splits)


def layout(lengths: list[int], cached: list[int], parents: list[list[int]]) -> AttentionRows:
    blocks = iter(np.random.default_rng(0).permutation(NUM_BLOCKS).tolist())
    tables = [[next(blocks) for _ in range(-(-(a + b) // BLOCK))] for a, b in zip(cached, lengths, strict=True)]
    starts = np.cumsum([0, *lengths]).tolist()
    return AttentionRows.pack(starts, cached, tables, list(itertools.chain(*parents)), Kernels.row_multiple)


def chain(n: int) -> list[int]:
    return list(range(-1, n - 1))


def tree(n: int) -> list[int]:
    return [-1, *(random.randrange(-1, r) for r in range(1, n))]


def ring(n: int) -> list[int]:
    return [n - 1, *range(n - 1)]


SHAPES = [(6, 2, 64), (2, 2, 80), (4, 1, 128), (20, 1, 16)]  # heads, kv heads, size
STEPS = {
    "chains": ([1, 4, 1], [0, 254, 30], [chain(1), chain(4), chain(1)]),
    "long": ([1], [512], [chain(1)]),
    "longest": ([1], [2304], [chain(1)]),  # more splits than are merged at once
    "chain": ([6], [252], [chain(6)]),  # which a program may have together
    "trees": ([5, 1], [253, 40], [[-1, 0, 0, 1, -1], chain(1)]),
    "block": ([4, 2], [254, 9], [ring(4), ring(2)]),
}


def compared(
    heads: int, kv_heads: int, d: int, step: str, window: int | None, dtype: torch.dtype, is_sloped: bool = False
) -> None:
    """All forms of the kernel against the reference."""
    rows = layout(*STEPS[step])
    plan, reference = plan_of(rows), Kernels(DEVICE, dtype)
    kv, q, scale = normal(2, NUM_BLOCKS * BLOCK, kv_heads, d).to(dtype), normal(rows.num_rows, heads, d), d**-0.5
    num_real = len(rows.parents)
    how = scale, window, torch.rand(heads).to(DEVICE) if is_sloped else None
    expected = reference.attention(q, kv, reference.plan(rows, BLOCK), *how)[:num_real]
    split = attention.attention_in(False, q, kv, plan, *how)
    assert_close(split[:num_real], expected, dtype)
    assert not split[num_real:].any(), "padding"
    looped = attention.attention_in(True, q, kv, plan, *how)
    assert torch.equal(looped, split), "splits in one program or in several"
    paths = attention.attention_in(False, q, kv, plan_of(rows, as_paths=True), *how)
    assert torch.equal(paths, split), "each row alone or several in a program"


@pytest.mark.parametrize(("heads", "kv_heads", "d"), SHAPES)
def test_attention_of_chains(dtype: torch.dtype, heads: int, kv_heads: int, d: int) -> None:
    compared(heads, kv_heads, d, "chains", None, dtype)


@pytest.mark.parametrize("step", ["long", "chain", "trees", "block"])
def test_attention_of_one_sequence(dtype: torch.dtype, step: str) -> None:
    compared(4, 2, 64, step, None, dtype)


def test_attention_of_many_splits() -> None:
    torch.manual_seed(0)
    compared(2, 1, 16, "longest", None, torch.bfloat16)


@pytest.mark.parametrize(("step", "window"), [("chain", 1), ("chain", 100), ("trees", 100), ("long", 256)])
def test_attention_in_a_window(step: str, window: int) -> None:
    torch.manual_seed(0)
    compared(4, 2, 64, step, window, torch.bfloat16)


@pytest.mark.parametrize(("step", "window"), [("chains", None), ("chain", None), ("trees", None), ("trees", 100)])
def test_attention_with_linear_biases(dtype: torch.dtype, step: str, window: int | None) -> None:
    compared(6, 2, 64, step, window, dtype, is_sloped=True)


def test_a_tree_s_path_is_a_chain(dtype: torch.dtype) -> None:
    """A leaf has the bits of its path alone, wherever its ancestors lie."""
    random.seed(3)
    parents, cached = tree(6), 254
    rows = layout([6], [cached], [parents])
    kv, q = normal(2, NUM_BLOCKS * BLOCK, 2, 64).to(dtype), normal(rows.num_rows, 4, 64)
    found = attention.attention(q, kv, plan_of(rows), 0.1, None)
    for leaf in (5, 3):
        path = ancestors(parents, leaf)
        alone = layout([len(path)], [cached], [chain(len(path))])
        blocks, own = rows.block_tables[0].tolist(), alone.block_tables[0].tolist()
        moved = kv.clone()
        from_slots, to_slots = (slots_of(table, cached + 6, BLOCK) for table in (blocks, own))
        for i, node in enumerate(path):
            moved[:, to_slots[cached + i]] = kv[:, from_slots[cached + node]]
        queries = normal(alone.num_rows, 4, 64)
        queries[len(path) - 1] = q[leaf]
        lonely = attention.attention(queries, moved, plan_of(alone), 0.1, None)
        assert torch.equal(lonely[len(path) - 1], found[leaf])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning")
def test_a_row_that_is_nan_stays_alone(dtype: torch.dtype) -> None:
    rows = layout(*STEPS["trees"])
    kv, q = normal(2, NUM_BLOCKS * BLOCK, 2, 64).to(dtype), normal(rows.num_rows, 4, 64)
    whole = attention.attention(q, kv, plan_of(rows), 0.1, None)
    q[2] = float("nan")
    broken = attention.attention(q, kv, plan_of(rows), 0.1, None)
    assert broken[2].isnan().all()
    others = [r for r in range(rows.num_rows) if r != 2]
    assert torch.equal(broken[others], whole[others])
    x, weight = normal(4, 64).to(dtype), normal(32, 64).to(dtype)
    plain = linear.linear(x, weight), linear.gated(x, weight, None, "silu")
    x[1, 5] = float("nan")
    for found, before in zip((linear.linear(x, weight), linear.gated(x, weight, None, "silu")), plain, strict=True):
        assert found[1].isnan().all()
        assert torch.equal(found[[0, 2, 3]], before[[0, 2, 3]])
