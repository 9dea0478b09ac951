"""The servers that run on this machine: each leaves a file while it listens, which tells where and what it serves."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specserve.checkpoint.home import cache_folder
from specserve.files import read_json

_MOST_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class RunningServer:
    """`started` tells a process from a later one of the same number: the system's clock ticks since its start, 0 where
    it does not tell. `since` is in seconds since the epoch."""

    pid: int
    started: int
    address: str
    models: list[str]
    folder: str
    since: float


@contextlib.contextmanager
def registered(address: str, models: Sequence[str], folder: Path) -> Iterator[None]:
    """Tell of this process's server while the block runs. That no file can be written is no reason not to serve."""
    pid = os.getpid()
    path = _folder() / f"{pid}.json"
    server = RunningServer(pid, _started(pid), address, list(models), str(folder), time.time())
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps(dataclasses.asdict(server)), "utf-8")
        os.replace(partial, path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def running() -> list[RunningServer]:
    """By the time of their start. What servers that were killed left is removed."""
    found = []
    for path in _folder().glob("*.json"):
        server = _read(path)
        if server is not None and server.started == _started(server.pid) and _is_alive(server.pid):
            found.append(server)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return sorted(found, key=lambda server: server.since)


def _folder() -> Path:
    return cache_folder() / "run"


def _read(path: Path) -> RunningServer | None:
    try:
        values: dict[str, Any] = read_json(path, _MOST_BYTES)
        server = RunningServer(**values)
        return server if str(server.pid) == path.stem else None
    except (OSError, ValueError, TypeError):
        return None


def _started(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
