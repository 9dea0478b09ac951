"""What the Triton kernels of kernels/ compute, in torch and float64: for a machine without a GPU or without Triton, and
to test kernels against. Every function has the signature of the kernel that it stands for, and, as those, reads nothing
on the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_bank: Any = import_module("specserve.kernels._triton_bank")
_groups: Any = import_module("specserve.kernels._triton_groups")
_SPLIT = 256  # logical positions
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "gelu": F.gelu,
}


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


def gated(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, adapters: Any = None) -> Tensor:
    """activation(gate) * up of weight [2 n, k], gate's rows and then up's -> [rows, n]."""
    gate, up = linear(x, weight, bias, None, adapters).double().chunk(2, -1)
    return (_ACTIVATIONS[activation](gate) * up).to(weight.dtype)


def quantize(x: Tensor) -> Any:
    """x [rows, any] in integers for a linear layer."""
    return _groups.rows_in_torch(x)


def integers(x: Any, weight: Any, out_dtype: torch.dtype, adapters: Any = None) -> Tensor:
    """x in integers [rows, in] times weight [out, in] transposed, plus bias and what `adapters` add -> [rows, out]."""
    out = _numbers(x) @ _matrix(weight).T
    out = out if weight.bias is None else out + weight.bias
    return (out if adapters is None else out + _added(adapters, weight.outputs)).to(out_dtype)


def gated_integers(x: Any, weight: Any, activation: str, adapters: Any = None) -> Any:
    """activation(gate) * up of weight [2 n, in], gate's rows and then up's, in integers [rows, n]."""
    gate, up = integers(x, weight, torch.float64, adapters).chunk(2, -1)
    return quantize((_ACTIVATIONS[activation](gate) * up).float())


def activated_integers(x: Any, weight: Any, activation: str, adapters: Any = None) -> Any:
    """activation(x weight^T + bias), in integers [rows, out]."""
    return quantize(_ACTIVATIONS[activation](integers(x, weight, torch.float64, adapters)).float())


def _numbers(x: Any) -> Tensor:
    """float64 [rows, width, padded]"""
    scales: Tensor = x.scales[0].T.double()
    numbers: Tensor = x.ints.double() * scales.repeat_interleave(_groups.GROUP, 1)
    return numbers


def _matrix(weight: Any) -> Tensor:
    """float64 [out, in, padded]"""
    numbers = weight.numbers
    if weight.minima is not None:
        numbers = torch.stack((numbers & 15, numbers >> 4), 1).flatten(0, 1)
    group = torch.arange(weight.num_groups, device=numbers.device) // weight.times
    found: Tensor = numbers.double() * weight.steps[group].double()[..., None]
    if weight.minima is not None:
        found += weight.minima[group].double()[..., None]
    return found.transpose(0, 1).flatten(1)


def experts(x: Tensor, weights: Any, chosen: Tensor, shares: Tensor, activation: str, shared: Tensor | None) -> Tensor:
    """x [rows, in] through the experts [rows, per_token] of each row, times `shares`, plus `shared`."""
    pairs = zip(weights.gate_up, weights.down, strict=True)
    found = [linear(gated(x, gate_up, None, activation), down, None, torch.float32) for gate_up, down in pairs]
    return _of_each_row(found, chosen, shares, shared)


def integer_experts(
    x: Any, weights: Any, chosen: Tensor, shares: Tensor, activation: str, shared: Tensor | None
) -> Tensor:
    """As `experts`, in integers."""
    pairs = [
        [
            each._replace(numbers=each.numbers[e], steps=each.steps[e], minima=None if least is None else least[e])
            for each in weights
            for least in [each.minima]
        ]
        for e in range(len(weights.down.numbers))
    ]
    found = [integers(gated_integers(x, gate_up, activation), down, torch.float32) for gate_up, down in pairs]
    return _of_each_row(found, chosen, shares, shared)


def _of_each_row(found: list[Tensor], chosen: Tensor, shares: Tensor, shared: Tensor | None) -> Tensor:
    """The sum of what a row's experts found, of what each found for all rows [rows, out]."""
    rows = torch.arange(len(chosen), device=chosen.device)[:, None]
    total: Tensor = (torch.stack(found)[chosen.long(), rows] * shares[..., None]).sum(1)
    return total if shared is None else total + shared


def shrink(x: Any, bank: Any, slots: Tensor) -> Any:
    """a x of x [rows, in], for rows whose slot, int64 [rows], holds an adapter."""
    x = x if isinstance(x, Tensor) else _numbers(x)[:, : x.width]
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


def add_rms_norm_quantized(
    residual: Tensor, delta: Tensor | None, post: Tensor | None, weight: Tensor, eps: float
) -> Any:
    """As `add_rms_norm`, in integers for a linear layer."""
    return quantize(add_rms_norm(residual, delta, post, weight, eps, torch.float32))


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
    q: Tensor,
    kv: Tensor,
    plan: Any,
    scale: float,
    window: int | None,
    slopes: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """q [rows, heads, d] over kv [2, slots, kv_heads, d] -> [rows, heads * d] of `out_dtype` (None: kv's); `slopes`
    float32 [heads] of ALiBi."""
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
    return torch.einsum("rhsl,rlhd->rhsd", shares, v).reshape(rows, heads * d).to(out_dtype or kv.dtype)


MODULES = {
    "_triton_linear": SimpleNamespace(linear=linear, gated=gated),
    "_triton_integers": SimpleNamespace(
        quantize=quantize, linear=integers, gated=gated_integers, activated=activated_integers
    ),
    "_triton_experts": SimpleNamespace(experts=experts),
    "_triton_integer_experts": SimpleNamespace(experts=integer_experts),
    "_triton_adapters": SimpleNamespace(shrink=shrink, embed=embed_adapters),
    "_triton_rows": SimpleNamespace(
        embed=embed,
        add_rms_norm=add_rms_norm,
        add_rms_norm_quantized=add_rms_norm_quantized,
        rope_and_cache=rope_and_cache,
        argmax=argmax,
        Norms=Norms,
    ),
    "_triton_attention": SimpleNamespace(attention=attention),
    "_triton_sampling": import_module("specserve.kernels._torch_sampling"),
}  # of kernels/, by name: what stands for them
