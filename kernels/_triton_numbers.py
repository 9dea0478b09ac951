"""Products and rounding for the Triton kernels, the same on a device and interpreted (TRITON_INTERPRET=1).

Triton's interpreter (3.6) cuts off what bfloat16 cannot hold, where a device rounds to nearest, and multiplies the bits
of bfloat16 as integers.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

H100_SHARED_MEMORY = 227 * 1024  # bytes that a program may have; where there is no device, it is for this one


@lru_cache
def shared_memory_of(device: torch.device) -> int:
    """Bytes of shared memory that a program may have."""
    if device.type != "cuda" or INTERPRETED:
        return H100_SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


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
