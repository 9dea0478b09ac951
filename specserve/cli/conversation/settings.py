"""What `/set` changes: sampling parameters by their names, and who drafts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from specserve.checkpoint.generation_config import STATED
from specserve.cli.options import SAMPLING_HELP
from specserve.errors import InputError, unknown
from specserve.types import RANGES, SamplingParams

DRAFTER, NUM_DRAFTED = "drafter", "num_speculative_tokens"
NAMES = (*SAMPLING_HELP, NUM_DRAFTED, DRAFTER)
DEFAULT = "default"
_PLAIN = {entry.name: entry.default for entry in fields(SamplingParams)}


def parse(line: str) -> tuple[str, str | None]:
    """The name and the value of NAME VALUE or NAME=VALUE; no value asks for the one that holds. Raises InputError."""
    name, _, value = line.replace("=", " ", 1).strip().partition(" ")
    name = name.removeprefix("--").replace("-", "_")
    if name not in NAMES:
        raise InputError(unknown("setting", name, NAMES), "set")
    return name, value.strip() or None


def value_of(name: str, text: str) -> Any:
    """What a text says for a parameter; the check of its type and range is that of all requests. Raises InputError."""
    value: Any = text
    if isinstance(_PLAIN[name], bool):
        value = {"on": True, "true": True, "off": False, "false": False}.get(text.lower())
        if value is None:
            raise InputError(f"{name} is {text!r}; it must be on or off.", name)
    elif name in RANGES:
        for kind in (int, float):
            try:
                value = kind(text)
                break
            except ValueError:
                continue
    elif text.startswith(("[", '"')):  # texts with spaces or line breaks, as JSON
        try:
            value = json.loads(text)
        except ValueError as error:
            raise InputError(f"{name} is no JSON: {error}. Write a text, or texts as JSON.", name) from error
    SamplingParams(**{"max_tokens": None, name: value})
    return tuple(value) if isinstance(value, list) else (value,) if name == "stop" else value


def request_fields(given: Mapping[str, Any], drafter: str | None) -> dict[str, Any]:
    """The settings as fields of a request over HTTP, which leaves out what was not set: another server may not know
    it, and has defaults of its own."""
    stated = {name: value for name, value in given.items() if value is not None and name != NUM_DRAFTED}
    told = (*STATED, "max_tokens")  # whose defaults are the server's; those of the others are in the API
    sent = {name: value for name, value in stated.items() if name in told or value != _PLAIN[name]}
    speculative = {} if drafter is None else {"drafter": drafter}
    if given.get(NUM_DRAFTED) is not None:
        speculative |= {"num_tokens": given[NUM_DRAFTED]}
    return sent | ({"speculative": speculative} if speculative else {})
