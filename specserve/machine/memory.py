"""How this process gives memory back to the system. Knows glibc."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3
_LARGE = 2**20  # bytes


def return_large_blocks() -> None:
    """Let glibc give blocks of a MiB or more back as soon as they are freed. By itself it takes what is freed for what
    will be asked for again, up to 32 MiB, and one small block behind a large body then keeps all of it. Where there is
    another C library nothing happens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
