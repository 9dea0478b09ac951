"""Ops that work on each row alone, in Triton: embedding, norms, rotary embedding with the KV write, argmax.

One program has the whole row, or one head of it, and is laid out by the row's length. So a row's bits know nothing of
other rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve.kernels._triton_groups import PADDED, Rows, empty_rows
from specserve.kernels._triton_numbers import follow, overlap, quantize_groups, rounded, store_groups

_EMBED_BLOCK = 1024
_VOCAB_BLOCK = 4096  # logits that one program compares


class Norms(NamedTuple):
    """Weights float32 [d] of the norms of query heads and key heads."""

    q: Tensor
    k: Tensor
    eps: float


def embed(token_ids: Tensor, table: Tensor, scale: float) -> Tensor:
    """Rows token_ids int64 [rows] of table [vocab, hidden] times scale -> float32 [rows, hidden]."""
    rows, hidden = len(token_ids), table.shape[1]
    assert table.is_contiguous() and token_ids.is_contiguous()
    out = torch.empty((rows, hidden), dtype=torch.float32, device=table.device)
    if rows:
        grid = rows, -(-hidden // _EMBED_BLOCK)
        _embed_kernel[grid](token_ids, table, out, hidden, float(scale), _EMBED_BLOCK, **overlap(table.device))
    return out


def add_rms_norm(
    residual: Tensor,
    delta: Tensor | None,
    post: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """residual float32 [rows, hidden] += delta [rows, hidden], in place, after a norm of delta with the weight `post`
    float32 [hidden] where there is one. Then residual / rms(residual) * weight float32 [hidden] -> [rows, hidden] of
    `dtype`; None: delta's."""
    rows, hidden = residual.shape
    if dtype is None:
        assert delta is not None, "without a delta say which dtype"
        dtype = delta.dtype
    assert residual.is_contiguous() and (delta is None or delta.is_contiguous())
    out = torch.empty((rows, hidden), dtype=dtype, device=residual.device)
    if rows:
        block = triton.next_power_of_2(hidden)
        options = {"num_warps": min(max(block // 512, 1), 16), **overlap(residual.device)}
        tensors = residual, delta, post, weight, out, None
        _norm_kernel[(rows,)](*tensors, rows, hidden, hidden, float(eps), block, **options)
    return out


def add_rms_norm_quantized(
    residual: Tensor, delta: Tensor | None, post: Tensor | None, weight: Tensor, eps: float
) -> Rows:
    """As `add_rms_norm`, in integers for a linear layer."""
    rows, hidden = residual.shape
    assert residual.is_contiguous() and (delta is None or delta.is_contiguous())
    out = empty_rows(rows, hidden, residual.device)
    if rows:
        block = triton.next_power_of_2(max(hidden, PADDED))
        options = {"num_warps": min(max(block // 512, 1), 16), **overlap(residual.device)}
        tensors = residual, delta, post, weight, out.ints, out.scales
        _norm_kernel[(rows,)](*tensors, rows, hidden, out.ints.shape[1], float(eps), block, **options)
    return out


def rope_and_cache(
    qkv: Tensor,
    norms: Norms | None,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    write_slots: Tensor,
    broken: Tensor,
) -> Tensor:
    """Rotate q and k by halves, store k and v -> q float32 [rows, heads, d].

    qkv [rows, (heads + 2 kv_heads) d]; every head of q and k is normed first where there are `norms`. positions int64
    [rows] are rows of cos and sin, float32 [max_len, d]; sin has a minus in its first half. Row r's k and v go to slot
    write_slots[r], int64 [rows], of kv [2, slots, kv_heads, d]; nowhere if that is negative. What is not finite there
    is stored as 0, and makes broken[r] true, bool [rows], which else stays as it is.
    """
    _, slots, kv_heads, d = kv.shape
    rows, heads = len(qkv), qkv.shape[1] // d - 2 * kv_heads
    assert qkv.is_contiguous() and kv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    q = torch.empty((rows, heads, d), dtype=torch.float32, device=qkv.device)
    if rows:
        q_norm, k_norm, eps = norms or (None, None, 0.0)
        marks = broken.view(torch.uint8)
        tensors = (qkv, q_norm, k_norm, positions, cos, sin, kv, write_slots, marks, q)
        sizes = (slots, float(eps), heads, kv_heads, d, triton.next_power_of_2(d))
        _rope_and_cache_kernel[rows, heads + 2 * kv_heads](*tensors, *sizes, num_warps=1, **overlap(qkv.device))
    return q


def argmax(logits: Tensor) -> Tensor:
    """The lowest of the best token ids of each row of float32 [rows, vocab], int64 [rows]; -1 where the highest logit
    is infinite or any is NaN."""
    rows, vocab = logits.shape
    assert logits.is_contiguous()
    parts = -(-vocab // _VOCAB_BLOCK)
    tops = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    best = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        options = overlap(logits.device)
        _best_of_part_kernel[rows, parts](logits, tops, ids, vocab, parts, _VOCAB_BLOCK, num_warps=8, **options)
        _best_kernel[(rows,)](tops, ids, best, parts, triton.next_power_of_2(parts), **options)
    return best


@triton.jit
def _embed_kernel(token_ids, table, out, hidden, scale, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    follow(OVERLAP)
    token = tl.load(token_ids + row)
    x = tl.load(table + token * hidden + at, mask=at < hidden)
    tl.store(out + row * hidden + at, x.to(tl.float32) * scale, mask=at < hidden)


@triton.jit
def _over_rms(x, n, eps):
    """x [block], zero from n on, divided by the root of the mean of its first n squares."""
    return x * (1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / n + eps))


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    residual, delta, post, weight, out, scales, rows, hidden, width, eps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """To `out` [rows, width]; where there are `scales`, as groups of integers."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < hidden
    follow(OVERLAP)
    x = tl.load(residual + row * hidden + at, mask=mask, other=0.0)
    if delta is not None:
        added = tl.load(delta + row * hidden + at, mask=mask, other=0.0).to(tl.float32)
        if post is not None:
            added = _over_rms(added, hidden, eps) * tl.load(post + at, mask=mask, other=0.0)
            added = rounded(added, delta.dtype.element_ty).to(tl.float32)
        x += added
        tl.store(residual + row * hidden + at, x, mask=mask)
    y = _over_rms(x, hidden, eps) * tl.load(weight + at, mask=mask, other=0.0)
    if scales is None:
        tl.store(out + row * width + at, rounded(y, out.dtype.element_ty), mask=mask)
    else:
        found, scale, sums = quantize_groups(tl.reshape(y, (BLOCK // 32, 32)))
        at_g = tl.arange(0, BLOCK // 32)
        store_groups(out, scales, found, scale, sums, row, at_g, at_g < width // 32, rows, width)


@triton.jit
def _normed(x, weight, at, mask, factor, dtype: tl.constexpr):
    y = x * factor * tl.load(weight + at, mask=mask, other=0.0)
    return rounded(y, dtype).to(tl.float32)


@triton.jit
def _rope_and_cache_kernel(
    qkv,
    q_norm,
    k_norm,
    positions,
    cos,
    sin,
    kv,
    write_slots,
    broken,
    q,
    slots,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK_D)
    mask = at < D
    swapped = (at + D // 2) % D
    follow(OVERLAP)
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * D
    x = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        other = tl.load(source + swapped, mask=mask, other=0.0).to(tl.float32)
        if q_norm is not None:
            factor = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / D + eps)
            weight = q_norm if head < HEADS else k_norm
            x = _normed(x, weight, at, mask, factor, qkv.dtype.element_ty)
            other = _normed(other, weight, swapped, mask, factor, qkv.dtype.element_ty)
        angle = tl.load(positions + row) * D
        x = x * tl.load(cos + angle + at, mask=mask, other=0.0)
        x += other * tl.load(sin + angle + at, mask=mask, other=0.0)
    if head < HEADS:
        tl.store(q + (row * HEADS + head) * D + at, x, mask=mask)
    else:
        slot = tl.load(write_slots + row)
        is_value = head >= HEADS + KV_HEADS
        kv_head = head - HEADS - (KV_HEADS if is_value else 0)
        place = kv + ((slots if is_value else 0) + slot) * KV_HEADS * D + kv_head * D
        y = rounded(x, kv.dtype.element_ty)
        finite = tl.abs(y.to(tl.float32)) < float("inf")
        tl.store(place + at, tl.where(finite, y, 0.0), mask=mask & (slot >= 0))
        num_bad = tl.sum(tl.where(mask & ~finite, 1, 0), 0)
        tl.store(broken + row, 1, mask=(num_bad > 0) & (slot >= 0))


@triton.jit
def _best_of_part_kernel(logits, tops, ids, vocab, parts, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """A NaN counts as infinite, for which there is no token either."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    follow(OVERLAP)
    x = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))
    top = tl.max(x, 0)
    tl.store(tops + row * parts + part, top)
    tl.store(ids + row * parts + part, tl.min(tl.where(x == top, at, vocab), 0))


@triton.jit
def _best_kernel(tops, ids, best, parts, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    follow(OVERLAP)
    x = tl.load(tops + row * parts + at, mask=at < parts, other=float("-inf"))
    first = tl.load(ids + row * parts + at, mask=at < parts, other=2147483647)
    top = tl.max(x, 0)
    found = tl.min(tl.where(x == top, first, 2147483647), 0)
    tl.store(best + row, tl.where(tl.abs(top) < float("inf"), found, -1).to(tl.int64))
