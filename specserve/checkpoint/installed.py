"""The models that are on this machine: what they take on the disk, since when they are here, and how they are removed.
Imports no torch."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specserve.checkpoint import hub
from specserve.checkpoint.catalog import CONVERTER_VERSION
from specserve.checkpoint.entries import MODELS, short_name
from specserve.checkpoint.home import cache_folder
from specserve.errors import ModelError, unknown

_FOLDER = re.compile(rf"(.+)-([0-9a-f]{{12}})-v{CONVERTER_VERSION}")


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A model that was fetched or converted. `name` is its catalog name, its hub id, or the stem of the file or folder
    it was converted from. `num_bytes` is on the disk, packed weights included; `when`, in seconds since the epoch, is
    the time of its last fetch or conversion."""

    name: str
    folder: Path
    num_bytes: int
    when: float
    hub_id: str | None = None


def installed() -> list[InstalledModel]:
    """By name. What other programs have put into the hub's cache is not told."""
    names = {model.hub_id: name for name, model in MODELS.items()}
    pulled = list(hub.records())
    found = [
        InstalledModel(
            names.get(each.name, each.name),
            each.folder,
            sum(each.files.values()) + sum(map(_size, _more_of(each))),
            each.when,
            each.repo,
        )
        for each in pulled
        if each.is_whole
    ]
    of_pulled = {folder for each in pulled for folder in _more_of(each)}
    for folder in _folders():
        if folder not in of_pulled:
            match = _FOLDER.fullmatch(folder.name)
            assert match is not None, "that is how they are found"
            found.append(InstalledModel(match[1], folder, _size(folder), folder.stat().st_mtime))
    return sorted(found, key=lambda model: model.name)


def find(name: str) -> list[InstalledModel]:
    """Those of this name, or of this catalog name; several where different files had the same. Raises ModelError."""
    models = installed()
    wanted = {name, short_name(name)}
    found = [model for model in models if model.name in wanted or model.hub_id == name]
    if not found:
        raise ModelError(unknown("installed model", name, {model.name for model in models}))
    return found


def remove(model: InstalledModel) -> int:
    """Remove it, with its packed weights, and say how many bytes that freed. Raises ModelError."""
    try:
        for pulled in list(hub.records()):
            if pulled.folder == model.folder and pulled.repo == model.hub_id:
                for path in _more_of(pulled):
                    _delete(path)
                hub.forget(pulled)
                return model.num_bytes
        _delete(model.folder)
    except OSError as error:
        raise ModelError(f"{model.folder} cannot be removed: {error.strerror or error}.") from error
    return model.num_bytes


def _folders() -> Iterator[Path]:
    for folder in sorted((cache_folder() / "models").glob("*")):
        if folder.is_dir() and _FOLDER.fullmatch(folder.name):
            yield folder


def _more_of(pulled: hub.Pulled) -> list[Path]:
    """What was made of files from the hub: packed weights, the folder that a GGUF file or an old checkpoint became."""
    digest = hashlib.sha256(str(pulled.folder.resolve()).encode()).hexdigest()[:12]
    found = list((cache_folder() / "packed").glob(f"*-{digest}-*.packed"))
    if (gguf := pulled.gguf) is not None:
        digests = {pulled.digests.get(gguf.name, "")[:12]}
    else:
        digests = set()
    for folder in _folders():
        match = _FOLDER.fullmatch(folder.name)
        if match is not None and (match[2] in digests or match[1] == pulled.folder.name):
            found.append(folder)
    return found


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    paths = path.rglob("*") if path.is_dir() else [path]
    return sum(each.lstat().st_size for each in paths if each.is_file() and not each.is_symlink())
