"""Processes of this machine, by /proc: who has started whom, and what each holds."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple


class Held(NamedTuple):
    """What one process holds: `kind` are the modules that it and those before it run, from the first process on;
    descriptors, threads, and the names of memory that it shares with others (memfd, /dev/shm), open or mapped."""

    kind: str
    num_descriptors: int
    num_threads: int
    shared_memory: tuple[tuple[str, int], ...]


def is_alive(pid: int) -> bool:
    """Not so one that has ended and is not waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    """Also those that have ended and were not waited for, in the order of their starts."""
    found = []
    for task in _listed(Path(f"/proc/{pid}/task")):
        try:
            found += map(int, (task / "children").read_text("utf-8").split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return sorted(found)


def family(pid: int) -> list[int]:
    """A process and all that come from it."""
    return [pid, *(each for child in children(pid) for each in family(child))]


def module_of(pid: int) -> str:
    """That it runs (`python -m MODULE`); nothing where it runs none, or has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return words[words.index("-m") + 1] if "-m" in words else ""


def running(pid: int, module: str) -> list[int]:
    """Of the family of a process those that run a module."""
    return [each for each in family(pid) if module_of(each) == module and is_alive(each)]


def own_bytes(*pids: int) -> int:
    """What the families of these processes have committed: pages that belong to no file, what several share counted
    once."""
    return sum(_pages(each, "Pss_Anon") + _pages(each, "Pss_Shmem") for pid in pids for each in family(pid))


def _pages(pid: int, kind: str) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text("utf-8")
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{kind}:"))


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Those of them that are still there go on afterwards."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def num_descriptors(pid: int) -> int:
    return len(_listed(Path(f"/proc/{pid}/fd")))


def held(*pids: int) -> list[Held]:
    """By the families of these processes."""
    return sorted(each for pid in pids for each in _held(pid, ""))


def _held(pid: int, before: str) -> Iterator[Held]:
    kind = f"{before}/{module_of(pid) or 'ended'}"
    own = Path(f"/proc/{pid}")
    descriptors = _listed(own / "fd")
    names = [_target(path) for path in descriptors] + [_target(path) for path in _listed(own / "map_files")]
    shared = Counter(name for name in names if name.startswith(("/memfd:", "/dev/shm/")))
    yield Held(kind, len(descriptors), len(_listed(own / "task")), tuple(sorted(shared.items())))
    for child in children(pid):
        yield from _held(child, kind)


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return []


def _target(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""
