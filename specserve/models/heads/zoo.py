"""The draft heads that come with specserve: folders of drafters/zoo, as `specserve train --int8` writes them."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ZooHead:
    """A head, by its config.json alone: what kind it is, and the name and fingerprint of the target it was made for."""

    folder: Path
    kind: str
    verifier: str
    fingerprint: str


_KINDS = {"eagle": "eagle", "eagle3": "eagle", "dflash": "block", "dspark": "block", "medusa": "medusa"}


def place() -> Path:
    """The folder of all of them."""
    folders = (Path(each) / "zoo" for each in importlib.import_module("specserve.drafters").__path__)
    return next(folder for folder in folders if folder.is_dir())


def heads() -> list[ZooHead]:
    """All of them, by the names of their folders."""
    return [_described(path.parent) for path in sorted(place().glob("*/config.json"))]


def find(kind: str, fingerprint: str) -> Path | None:
    """The folder of the head of that kind for the target with this fingerprint."""
    return next((each.folder for each in heads() if (each.kind, each.fingerprint) == (kind, fingerprint)), None)


def _described(folder: Path) -> ZooHead:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    verifier = config["speculators_config"]["verifier"]
    kind = _KINDS[config["speculators_model_type"]]
    return ZooHead(folder, kind, verifier["name_or_path"], verifier["fingerprint"])
