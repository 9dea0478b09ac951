"""Sampling values that a checkpoint recommends: requests that say nothing of them get them."""

from __future__ import annotations

from pathlib import Path

from specserve.checkpoint.folder import read_json
from specserve.errors import ConfigError, InputError, ModelError
from specserve.types import SamplingParams

AUTO, NONE = "auto", "none"
_FILE = "generation_config.json"
_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_defaults(source: str, folder: Path) -> dict[str, float]:
    """Those of generation_config.json, by the names of SamplingParams. `source`: "auto" is the model's own file, if it
    has one, "none" no file, else a file or the folder that has it. Raises ConfigError for one that cannot be read, and
    for a value that sampling does not take."""
    if source == NONE:
        return {}
    path = folder / _FILE if source == AUTO else Path(source)
    if source == AUTO and not path.is_file():
        return {}
    path = path / _FILE if path.is_dir() else path
    try:
        stated = read_json(path)
        found = {name: stated[name] for name in _NAMES if stated.get(name) is not None}
        SamplingParams(**found)
    except (InputError, ModelError) as error:
        hint = f"Correct it, or start with --generation-config {NONE}."
        raise ConfigError(f"--generation-config {path}: {error} {hint}") from error
    return found
