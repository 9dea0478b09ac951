"""What all Triton kernels share: products and rounding, the same on a device and interpreted (TRITON_INTERPRET=1), and
how one kernel follows another.

Triton's interpreter (3.6) cuts off what bfloat16 cannot hold, where a device rounds to nearest, and multiplies the bits
of bfloat16 as integers.
"""

from __future__ import annotations

import os
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# A product and a sum after it are rounded once. Triton 3.9 warns where nobody has said so, and 3.10 is to round twice.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

OVERLAPS = False  # whether kernels start while the one before ends: `benchmarks/gpu.py --part layers` says if it pays

H100_SHARED_MEMORY = 227 * 1024  # bytes that a program may have; where there is no device, it is for this one


@lru_cache
def shared_memory_of(device: torch.device) -> int:
    """Bytes of shared memory that a program may have."""
    if device.type != "cuda" or INTERPRETED:
        return H100_SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


@lru_cache
def overlap(device: torch.device) -> dict[str, bool]:
    """Constants and options of a launch: whether a kernel may start while the one before it ends, as an H100 and later
    GPUs of NVIDIA can (programmatic dependent launch). Then what it does before `follow` overlaps."""
    if device.type != "cuda" or INTERPRETED or torch.version.cuda is None:
        return {"OVERLAP": False}
    can = OVERLAPS and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"OVERLAP": True, "launch_pdl": True} if can else {"OVERLAP": False}


@triton.jit
def follow(OVERLAP: tl.constexpr):
    """Let the next kernel start, and wait for all before this one: every kernel calls it before it reads what another
    may have written, and before it writes. So kernels end in their order, and what they wrote is seen in it."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def fetch(at):
    """Bring the lines of 128 bytes at pointers `at` to L2; nothing waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 x to the nearest of `dtype`, of two the even one."""
    if dtype == tl.bfloat16 and INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def add_product(a, b, total):
    """total [m, n] + a [m, k] b [k, n] in float32, in the order of k."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def quantize_groups(x):
    """Groups float32 [groups, 32] as integers of at most 127, int8 alike, times scales float32 [groups]; and these
    times the sums of the integers. What is not finite makes its group's scale NaN: it must not vanish."""
    is_bad = tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1), 1) > 0
    x = tl.where(is_bad[:, None], 0.0, x)
    peak = tl.max(tl.abs(x), 1)
    inverse = tl.where(peak > 1e-30, tl.div_rn(127.0 + tl.zeros_like(peak), tl.maximum(peak, 1e-30)), 0.0)
    y = tl.minimum(tl.maximum(x * inverse[:, None], -127.0), 127.0)
    ints = ((y + 12582912.0) - 12582912.0).to(
        tl.int8
    )  # to the nearest, of two the even one: 1.5 * 2^23 has no fractions
    scale = tl.where(is_bad, float("nan"), tl.div_rn(peak, 127.0 + tl.zeros_like(peak)))
    return ints, scale, scale * tl.sum(ints.to(tl.int32), 1).to(tl.float32)


@triton.jit
def store_groups(ints, scales, found, scale, sums, row, group, mask, rows, k):
    """What `quantize_groups` found, as groups `group` [groups] of rows `row`, int64, where `mask` is true: in int8
    [rows, k] and float32 [2, k / 32, rows]."""
    at = (row * k + group * 32)[:, None] + tl.arange(0, 32)[None, :]
    tl.store(ints + at, found, mask=mask[:, None])
    place = scales + group.to(tl.int64) * rows + row
    tl.store(place, scale, mask=mask)
    tl.store(place + (k // 32).to(tl.int64) * rows, sums, mask=mask)
