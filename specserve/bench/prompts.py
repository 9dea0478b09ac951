"""Prompt sets: reading them, and picking some of each category."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from specserve.errors import ConfigError, InputError
from specserve.files import parse_json, read_text

BUNDLED = "demo"
MOST_BYTES = 2**28  # of a file that a measurement reads
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and the category it counts for."""

    text: str
    category: str = "all"


def load_prompts(source: str = BUNDLED) -> list[Prompt]:
    """Prompts of a file of JSON lines with `prompt` or `turns`, and perhaps `category`; other keys are the file's own.

    Of `turns` the first is taken: later ones would follow each engine's own answers and could not be compared. "demo"
    is the bundled set. Raises ConfigError for a file that cannot be read, InputError naming a bad line.
    """
    bundled = files("specserve.bench") / "data" / f"{BUNDLED}.jsonl"
    try:
        text = bundled.read_text("utf-8") if source == BUNDLED else read_text(Path(source), MOST_BYTES, pipes=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The prompts in {source} cannot be read: {error}. Give a JSON-lines file, or {BUNDLED!r} for "
            "the bundled set."
        ) from error
    lines = enumerate(text.splitlines(), 1)
    prompts = [_prompt(line, f"{source}, line {number}") for number, line in lines if line.strip()]
    if not prompts:
        raise InputError(f"{source} holds no prompts.", "prompts")
    return prompts


def spread(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """At most `limit` prompts, as equally from all categories as their sizes allow and evenly inside each; the same
    ones every time, in the order of the file."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    if limit < 1:
        raise ConfigError(f"limit is {limit}; it must be at least 1.")
    groups: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(prompt.category, []).append(index)
    quotas = _quotas([len(group) for group in groups.values()], limit)
    chosen = [index for group, quota in zip(groups.values(), quotas, strict=True) for index in evenly(group, quota)]
    return [prompts[index] for index in sorted(chosen)]


def evenly(items: Sequence[T], count: int) -> list[T]:
    """So many of the items, which has as many, the first and others at even distances."""
    return [items[position * len(items) // count] for position in range(count)]


def _quotas(sizes: list[int], limit: int) -> list[int]:
    """How many from each group: one in turn from every group that has some left."""
    quotas = [0] * len(sizes)
    while limit:
        for index, size in enumerate(sizes):
            if limit and quotas[index] < size:
                quotas[index] += 1
                limit -= 1
    return quotas


def _prompt(line: str, where: str) -> Prompt:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}.", "prompts") from error
    text = _text(value) if isinstance(value, dict) else None
    if not isinstance(text, str) or not text:
        raise InputError(f'{where} needs "prompt" (text) or "turns" (a list of texts).', "prompts")
    return Prompt(text, str(value.get("category", "all")))


def _text(value: dict[str, Any]) -> Any:
    turns = value.get("turns")
    return value.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
