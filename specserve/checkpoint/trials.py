"""What earlier runs found of drafters that are told of steps: a small file for each model and how it was run."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from specserve.checkpoint.home import cache_folder
from specserve.errors import SpecserveError
from specserve.files import read_json

_log = logging.getLogger(__name__)
_MOST_BYTES = 2**20  # of a file
_MOST_FILES = 64  # the oldest go first


class Trial(NamedTuple):
    """Of one drafter: how many trials it has lost, one after another, and in the newest run that tells anything in how
    many steps it saved which share of the time, below 0: lost, and on which day that ended."""

    num_failed: int
    num_steps: int
    saved: float
    day: str


class TrialFile:
    """That of one model run in one way; `key` says which and how, in what JSON can say."""

    def __init__(self, key: Mapping[str, Any]) -> None:
        self._key = dict(key)
        digest = hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()
        self.path = _folder() / f"{Path(key['folder']).name}-{digest[:12]}.json"

    def read(self) -> dict[str, Trial]:
        """By drafter; nothing where there is no file, or one that cannot be used."""
        found = _read(self.path)
        return found[1] if found is not None and found[0] == self._key else {}

    def write(self, trials: Mapping[str, Trial]) -> None:
        """Replace the file, at once for who reads it. That it cannot be written costs a warning."""
        text = json.dumps({"run": self._key, "drafters": {name: each._asdict() for name, each in trials.items()}})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=".", suffix=".part")
            with os.fdopen(handle, "w") as file:
                file.write(text)
            Path(name).replace(self.path)
            _prune()
        except OSError as error:
            _log.warning("Which drafters paid is not kept for the next start: %s.", error)


def all_trials() -> Iterator[tuple[Mapping[str, Any], dict[str, Trial]]]:
    """Of all files that can be used: which run, and its drafters."""
    for path in sorted(_folder().glob("*.json")):
        if (found := _read(path)) is not None:
            yield found


def _folder() -> Path:
    return cache_folder() / "drafters"


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Trial]] | None:
    """None for what is no such file, which costs nothing but another trial."""
    try:
        held = read_json(path, _MOST_BYTES)
        key, drafters = dict(held["run"]), dict(held["drafters"])
        str(key["folder"])
        return key, {str(name): _checked(Trial(**each)) for name, each in drafters.items()}
    except (OSError, SpecserveError, TypeError, ValueError, KeyError):
        return None


def _checked(trial: Trial) -> Trial:
    """Raises ValueError for what no run wrote."""
    if not all(isinstance(count, int) and count >= 0 for count in trial[:2]):
        raise ValueError("a trial counts failures and steps")
    return Trial(*trial[:2], float(trial.saved), str(trial.day))


def _prune() -> None:
    """Let no more files be there than may."""
    with suppress(OSError):
        oldest = sorted(_folder().glob("*.json"), key=lambda path: -path.stat().st_mtime)[_MOST_FILES:]
        for path in oldest:
            path.unlink(missing_ok=True)
