"""The processor of this machine, and how many of its cores an engine may use."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from specserve.errors import ConfigError
from specserve.machine.cgroups import Group, groups

THREADS = "SPECSERVE_THREADS"  # the environment variable


def default_threads() -> int:
    """Threads of an engine that is not told how many: what SPECSERVE_THREADS says, or as many as usable cores. Raises
    ConfigError for what is no number of threads."""
    said = os.environ.get(THREADS)
    if not said:
        return usable_cores()
    if not said.isdecimal() or int(said) < 1:
        raise ConfigError(f"{THREADS} is {said!r}; it must be a whole number of at least 1.")
    return int(said)


def usable_cores(root: Path = Path("/")) -> int:
    """Cores this process may use: those of its affinity, or what the tightest CPU quota of its control group and all
    their ancestors comes to, rounded up, if that is less. `root` is the root of the file system.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(math.ceil(share) for share in _shares(root))]))


def processor(root: Path = Path("/")) -> tuple[str, set[str]]:
    """Its name and instruction sets by /proc/cpuinfo, which only Linux has; elsewhere what Python says, and none."""
    cpuinfo = root / "proc/cpuinfo"
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, set((fields.get("flags") or fields.get("Features") or "").split())


def _shares(root: Path) -> Iterator[float]:
    """Cores' worth of time that each group with a quota gets. What cannot be read as one limits nothing: a system that
    words it otherwise must not keep an engine from starting."""
    for group in groups("cpu", root):
        try:
            quota, period = _quota(group)
            share = int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):  # none: a root group has no files, "max" is no number
            continue
        if share > 0:  # version 1 says -1 where there is no limit
            yield share


def _quota(group: Group) -> tuple[str, str]:
    """Microseconds of CPU time in each period, and those of the period."""
    if group.version == 2:
        quota, period = (group.folder / "cpu.max").read_text("ascii").split()
        return quota, period
    files = (group.folder / name for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    quota, period = (file.read_text("ascii") for file in files)
    return quota, period
