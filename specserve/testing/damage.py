"""Damages files as a fuzzer does, and holds a reader of them to what it may take: for tests of whatever reads files."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

_NUMBERS = (0, 1, 2, 3, 7, 2**7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 0.5, -0.0, 1e-300, 1e300, math.inf, -math.inf, math.nan),
    *(2**31 - 1, 2**31, 30_000_000, 2**60, 2**64, 10**30, 10**400, -(10**30)),
    *("", "x", "\0", "../x", "\ud800", "\x1b[2J\n", "x" * 3000, "7", "{{ 7", "[", "(" * 300),
    *([], {}, [[]], [None], [1, 2, 3], ["x"] * 9, {"type": "x"}, {"": {}}, {"content": 7}, [{}], [{"name": []}]),
)


class TooLongError(BaseException):
    """A reader took longer than it may."""


def damaged(content: bytes, rng: random.Random, header: int | None = None) -> bytes:
    """A copy with one to four changes: bits flipped, numbers made extreme, parts cut out, doubled, moved or zeroed, the
    end cut off or more added. Most are made in the first `header` bytes, where there is one."""
    changed = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        size = len(changed) if header is None or rng.random() < 0.2 else min(header, len(changed))
        at, other, length = rng.randint(0, size), rng.randint(0, size), rng.choice((1, 2, 4, 8, 24))
        match rng.randint(0, 7):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randint(0, 7)
            case 1 | 2:
                width = rng.choice((1, 4, 8))
                changed[at : at + width] = (rng.choice(_NUMBERS) % 256**width).to_bytes(width, "little")
            case 3:
                del changed[at:]
            case 4:
                changed += bytes(changed[at : at + length]) or b"\0"
            case 5:
                changed[at : at + length], changed[other : other + length] = (
                    changed[other : other + length],
                    changed[at : at + length],
                )
            case 6:
                changed[at : at + length] = bytes(len(changed[at : at + length]))
            case _:
                changed[at:at] = changed[other : other + length]
    return bytes(changed)


def damaged_json(text: str, rng: random.Random) -> str:
    """As `damaged_value` what a JSON text says; and now and then one that is nested too deeply."""
    if rng.random() < 0.05:
        return "[" * 100_000 if rng.random() < 0.5 else '{"a":' * 100_000
    return json.dumps(damaged_value(json.loads(text), rng))


def damaged_value(value: Any, rng: random.Random) -> Any:
    """What JSON can say, with one to three values replaced, by others of any type and size, left out or put
    elsewhere."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        holders = list(_holders(value))
        if not holders:
            break
        held = rng.choice(holders)
        place = rng.choice(list(held) if isinstance(held, dict) else range(len(held)))
        match rng.randint(0, 9):
            case 0:
                del held[place]
            case 1 if isinstance(held, dict):
                held[rng.choice(("", "x", "type", "content", place + "s"))] = held.pop(place)
            case 2:
                held[place] = copy.deepcopy(rng.choice(holders))
            case 3 if isinstance(held[place], int | float) and not isinstance(held[place], bool):
                held[place] = _multiplied(held[place], rng.choice((-1, 0, 2, 10, 1000, 0.5)))
            case _:
                held[place] = copy.deepcopy(rng.choice(_VALUES))
    return value


def _multiplied(number: float, factor: float) -> float:
    try:
        return number * factor
    except OverflowError:  # half of a whole number beyond all floats
        return number // 2


def _holders(value: Any) -> Iterator[Any]:
    """Every object and list in a JSON value that is not empty."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if inner:
        yield value
    for each in inner:
        yield from _holders(each)


def replace_by_another_kind(path: Path, rng: random.Random) -> None:
    """Put a folder, a pipe, a link to what never ends, a file of 3 GiB without content or nothing in a file's place."""
    path.unlink()
    makers: tuple[Callable[[], object], ...] = (
        path.mkdir,
        lambda: os.mkfifo(path),
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to(path),
        lambda: path.symlink_to(path.parent),
        lambda: _sparse(path),
        lambda: path.write_bytes(b""),
        lambda: None,
    )
    rng.choice(makers)()


def _sparse(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(3 << 30)


@contextmanager
def bounded(mib: int, seconds: float) -> Iterator[None]:
    """Within the block the process gets at most so much more memory of its own, files that it maps aside, and
    TooLongError is raised after so much time. For the main thread."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLongError(f"more than {seconds} s")

    pages = int(Path("/proc/self/statm").read_text("ascii").split()[5])
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = pages * resource.getpagesize() + (mib << 20)
    before = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
