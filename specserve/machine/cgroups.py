"""The control groups (version 1 or 2) that hold this process, as folders of their limits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_USUAL = PurePosixPath("/sys/fs/cgroup")


class Group(NamedTuple):
    """A control group's folder and the version of its hierarchy, 1 or 2."""

    folder: Path
    version: int


def groups(controller: str, root: Path = Path("/")) -> Iterator[Group]:
    """The groups whose limits of a controller ("cpu", "memory") hold for this process: its own and every ancestor up to
    the mount point, which in a container is the container's own group. A folder may lack files of the controller, or
    not exist. `root` is the root of the file system.
    """
    for line in _lines(root / "proc/self/cgroup"):
        match line.split(":", 2):
            case [_, "", path]:
                version = 2
            case [_, controllers, path] if controller in controllers.split(","):
                version = 1
            case _:
                continue
        mounted, point = _mount(controller, version, root)
        own = PurePosixPath(path)
        # A path outside what is mounted is the host's name of it: the mount point alone can be seen.
        inside = own.relative_to(mounted) if own.is_relative_to(mounted) and ".." not in own.parts else PurePosixPath()
        for folder in dict.fromkeys((inside, *inside.parents)):
            yield Group(root / point.relative_to("/") / folder, version)


def _mount(controller: str, version: int, root: Path) -> tuple[PurePosixPath, PurePosixPath]:
    """Which group a hierarchy's mount shows, and where. Without a mount table, the usual places."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        match before.split(" "), after.split(" "):
            case [_, _, _, mounted, point, *_], [kind, _, options] if point.startswith("/"):
                if kind == "cgroup2" if version == 2 else kind == "cgroup" and controller in options.split(","):
                    return _unescaped(mounted), _unescaped(point)
    return PurePosixPath("/"), _USUAL if version == 2 else _USUAL / controller


def _unescaped(path: str) -> PurePosixPath:
    """The kernel writes spaces and the like as \\040."""
    return PurePosixPath(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path))


def _lines(path: Path) -> list[str]:
    return path.read_text("utf-8", "surrogateescape").splitlines() if path.is_file() else []
