"""What the Triton kernels of kernels/ compute, in torch and float64: for a machine without a GPU or without Triton, and
to test kernels against. Every function has the signature of the kernel that it stands for, and, as those, reads nothing
on the host."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_bank: Any = import_module("specserve.kernels._triton_bank")
_SPLIT = 256  # logical positions


class Norms(NamedTuple):
    """Weights float32 [d] of the norms of query heads and key heads."""

    q: Tensor
    k: Tensor
    eps: float


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    adapters: Any = None,
) -> Tensor:
    """x [rows, k] times weight [n, k] transposed, plus bias [n], plus what `adapters` add -> [rows, n]."""
    out = x.to(weight.dtype).double() @ weight.double().T
    out = out if bias is None else out + bias
    return (out if adapters is None else out + _added(adapters, len(weight))).to(out_dtype or weight.dtype)


def _added(adapters: Any, num_outputs: int) -> Tensor:
    """What b adds to the outputs, float64 [rows, num_outputs]; zero for rows without an adapter."""
    bank, slots, sums = adapters
    own = slots.clamp(min=0)
    rank = torch.where(slots < 0, 0, bank.ranks[own])[:, None, None]
    at_n, at_r = (torch.arange(size, device=slots.device) for size in (num_outputs, bank.max_rank))
    at = (at_n[:, None] * rank + at_r).clamp(max=bank.b.shape[1] - 1)  # [rows, num_outputs, max_rank]
    products = bank.b[own[:, None, None], at].double() * sums.double().sum(0)[:, None]
    return torch.where(at_r < rank, products, 0).sum(-1)


def logits(x: Tensor, weight: Tensor, bias: Tensor | None = None, adapters: Any = None) -> Tensor:
    """As `linear`, float32 [rows, n]."""
    return linear(x, weight, bias, torch.float32, adapters)


def gated(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, adapters: Any = None) -> Tensor:
    """activation(gate) * up of weight [2 n, k], gate's rows and then up's -> [rows, n]."""
    gate, up = linear(x, weight, bias, None, adapters).double().chunk(2, -1)
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return (activated * up).to(weight.dtype)


def shrink(x: Tensor, bank: Any, slots: Tensor) -> Any:
    """a x of x [rows, in], for rows whose slot, int64 [rows], holds an adapter."""
    a = bank.a.view(len(bank.a), bank.max_rank, -1)[slots.clamp(min=0)]
    sums = torch.einsum("mk,mrk->mr", x.to(a.dtype).double(), a.double())
    return _bank.Shrunk(bank, slots, sums.float()[None])


def embed_adapters(residual: Tensor, token_ids: Tensor, bank: Any, slots: Tensor, scale: float) -> None:
    """residual += scale * b a[:, id], in place, float32 [rows, hidden]; token_ids and slots int64 [rows]."""
    own, at_r = slots.clamp(min=0), torch.arange(bank.max_rank, device=slots.device)
    at = (token_ids[:, None] * bank.ranks[own][:, None] + at_r).clamp(max=bank.a.shape[1] - 1)
    sums = bank.a[own[:, None], at].float()
    residual += scale * _added(_bank.Shrunk(bank, slots, sums[None]), residual.shape[1]).float()


def embed(token_ids: Tensor, table: Tensor, scale: float) -> Tensor:
    """Rows token_ids int64 [rows] of table [vocab, hidden] times scale -> float32 [rows, hidden]."""
    return table[token_ids].float() * scale


def add_rms_norm(
    residual: Tensor,
    delta: Tensor | None,
    post: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """residual float32 [rows, hidden] += delta, in place, normed with `post` where there is one; then the norm of
    residual, [rows, hidden]."""
    if delta is not None:
        residual += delta if post is None else _over_rms(delta, post, eps).to(delta.dtype)
        dtype = dtype or delta.dtype
    assert dtype is not None, "without a delta say which dtype"
    return _over_rms(residual, weight, eps).to(dtype)


def _over_rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


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
    """Norm and rotate the heads of qkv [rows, (heads + 2 kv_heads) d], store k and v at write_slots int64 [rows], or
    nowhere where that is negative -> q float32 [rows, heads, d]. What is not finite is stored as 0 and makes `broken`
    bool [rows] true."""
    kv_heads, d = kv.shape[2:]
    x = qkv.view(len(qkv), -1, d)
    qk, v = x[:, :-kv_heads].float(), x[:, -kv_heads:]
    if norms is not None:
        q, k = qk[:, :-kv_heads], qk[:, -kv_heads:]
        parts = _over_rms(q, norms.q, norms.eps), _over_rms(k, norms.k, norms.eps)
        qk = torch.cat(parts, 1).to(qkv.dtype).float()
    qk = qk * cos[positions][:, None] + qk.roll(d // 2, -1) * sin[positions][:, None]
    written = torch.stack((qk[:, -kv_heads:].to(kv.dtype), v.to(kv.dtype)))
    finite, is_written = written.isfinite(), write_slots >= 0
    broken |= is_written & ~finite.all(3).all(2).all(0)
    kept = torch.where(is_written[None, :, None, None], written.masked_fill(~finite, 0), kv[:, :1])
    kv.index_copy_(1, write_slots.clamp(min=0), kept)
    return qk[:, :-kv_heads].contiguous()


def argmax(logits: Tensor) -> Tensor:
    """The lowest of the best ids of each row, int64 [rows]; -1 where the highest is infinite or any is NaN."""
    top, best = logits.max(-1)
    return best.masked_fill(~top.isfinite(), -1)


def attention(
    q: Tensor, kv: Tensor, plan: Any, scale: float, window: int | None, slopes: Tensor | None = None
) -> Tensor:
    """q [rows, heads, d] over kv [2, slots, kv_heads, d] -> [rows, heads * d] of kv's dtype; `slopes` float32 [heads]
    of ALiBi."""
    (rows, heads, d), kv_heads = q.shape, kv.shape[2]
    visible, prefix = plan.visible[:, None], plan.prefix[:, None]
    at = torch.arange(plan.max_splits * _SPLIT, device=q.device)
    is_seen = at < visible
    if window is not None:
        is_seen &= at >= visible - window
    tables, paths, size = plan.tables.reshape(-1), plan.paths, plan.block_size
    block = plan.row_seq[:, None] * plan.tables.stride(0) + at // size
    slots = tables[block.clamp(max=len(tables) - 1)] * size + at % size
    node = (plan.path_start[:, None] + at - prefix).clamp(0, len(paths) - 1)
    slots = torch.where(is_seen, torch.where(at < prefix, slots, paths[node]), 0)
    k, v = kv[:, slots].double()  # [rows, positions, kv_heads, d]
    own = q.to(kv.dtype).double().view(rows, kv_heads, heads // kv_heads, d)
    scores = torch.einsum("rhsd,rlhd->rhsl", own, k) * scale
    if slopes is not None:
        scores += slopes.double().view(kv_heads, -1, 1) * (at - visible + 1)[:, None, None]
    shares = scores.masked_fill(~is_seen[:, None, None], -torch.inf).softmax(-1).nan_to_num(0)
    return torch.einsum("rhsl,rlhd->rhsd", shares, v).reshape(rows, heads * d).to(kv.dtype)


MODULES = {
    "_triton_linear": SimpleNamespace(linear=linear, logits=logits, gated=gated),
    "_triton_adapters": SimpleNamespace(shrink=shrink, embed=embed_adapters),
    "_triton_rows": SimpleNamespace(
        embed=embed, add_rms_norm=add_rms_norm, rope_and_cache=rope_and_cache, argmax=argmax, Norms=Norms
    ),
    "_triton_attention": SimpleNamespace(attention=attention),
    "_triton_sampling": import_module("specserve.kernels._torch_sampling"),
}  # of kernels/, by name: what stands for them
