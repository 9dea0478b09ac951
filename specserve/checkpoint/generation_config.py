"""What a request is sampled with where it says nothing of it, through whatever API it comes: the values of the model's
generation_config.json, then SamplingParams' own; but an answer in a conversation may take what the context leaves.
docs/sdk.md, "Sampling defaults", tells users."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specserve.checkpoint.folder import read_json
from specserve.errors import ConfigError, InputError, ModelError
from specserve.types import SamplingParams

AUTO, NONE = "auto", "none"
_OFF = (NONE, "vllm")  # vLLM's word for the defaults of the engine
_FILE = "generation_config.json"
STATED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# max_tokens of a request by whether it is a conversation: what the context leaves, or OpenAI's default for a text.
MAX_TOKENS: Mapping[bool, int | None] = MappingProxyType({True: None, False: SamplingParams().max_tokens})


def stated_by(source: str, folder: Path) -> dict[str, float]:
    """The values of generation_config.json, by the names of SamplingParams. `source`: "auto" is the model's own file,
    if it has one, "none" or "vllm" no file, else a file or the folder that has it. Raises ConfigError for one that
    cannot be read, and for a value that sampling does not take."""
    if source in _OFF:
        return {}
    path = folder / _FILE if source == AUTO else Path(source)
    if source == AUTO and not path.is_file():
        return {}
    path = path / _FILE if path.is_dir() else path
    try:
        written = read_json(path)
        found = {name: written[name] for name in STATED if written.get(name) is not None}
        SamplingParams(**found)
    except (InputError, ModelError) as error:
        hint = f"Correct it, or start with --generation-config {NONE}."
        raise ConfigError(f"--generation-config {path}: {error} {hint}") from error
    return found


def check_named(source: str) -> None:
    """Raise ConfigError as `stated_by` for a file that is named, before a model is loaded or fetched."""
    if source != AUTO:
        stated_by(source, Path())


def missing(given: Mapping[str, Any], stated: Mapping[str, float]) -> dict[str, float]:
    """Those of the stated values that a request does not give; None is as not given. A greedy one, or one that searches
    with beams, has no use for them: it would be another text than the most likely one."""
    if given.get("temperature") == 0 or given.get("beam_width") or given.get("use_beam_search"):
        return {}
    return {name: value for name, value in stated.items() if given.get(name) is None}


def sampling_params(given: Mapping[str, Any], stated: Mapping[str, float], is_chat: bool) -> SamplingParams:
    """Of a request that gives these fields of SamplingParams. Raises InputError for a wrong one."""
    return SamplingParams(**{"max_tokens": MAX_TOKENS[is_chat], **given, **missing(given, stated)})
