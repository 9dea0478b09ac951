"""How much memory this process may have, and how it gives it back to the system. Linux with glibc only."""

from __future__ import annotations

import ctypes
import resource

_M_MMAP_THRESHOLD = -3
_LARGE = 2**20  # bytes


def return_large_blocks() -> None:
    """Let glibc give blocks of a MiB or more back as soon as they are freed. By itself it takes what is freed for what
    will be asked for again, up to 32 MiB, and one small block behind a large body then keeps all of it. Where there is
    another C library nothing happens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)


def limit_memory(max_bytes: int) -> None:
    """Let this process have so much memory, or what it may have at most (`ulimit -Hv`) where that is less. One that
    crashes leaves no core file, which would be waited for until it lies on the disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
