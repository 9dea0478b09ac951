"""Arguments before they are parsed: names that options had in earlier versions, and `--json` without a path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

JSON = "--json"
STDOUT = "-"
JSON_SUFFIXES = (".json", ".jsonl")
# By command: the names that are still understood, which no help shows.
RENAMED: Mapping[tuple[str, ...], Mapping[str, str]] = MappingProxyType(
    {
        ("train",): {"--temperatures": "--temperature"},
        ("bench", "quality"): {"--quantizations": "--quantization"},
        ("grammar", "check"): {"--backend": "--grammar-backend"},
        ("inspect",): {"--path": "--model"},  # and --model was what is --target now
        ("rm",): {"--models": "--model"},
    }
)


def current(arguments: Sequence[str]) -> list[str]:
    """The arguments with today's names, and each `--json` with its value: the path that follows it, which ends in .json
    or .jsonl, else "-" for standard output. A path of another name is given as --json=PATH."""
    return list(_current(arguments))


def _current(arguments: Sequence[str]) -> Iterator[str]:
    renamed = RENAMED.get(tuple(arguments[:2])) or RENAMED.get(tuple(arguments[:1])) or {}
    if tuple(arguments[:1]) == ("inspect",) and not "".join(arguments[1:2]).startswith("-"):
        renamed = {**renamed, "--model": "--target"}
    end = arguments.index("--") if "--" in arguments else len(arguments)
    is_path = False
    for argument, following in zip(arguments[:end], [*arguments[1:end], ""], strict=False):
        if is_path:
            is_path = False
        elif argument == JSON:
            is_path = following == STDOUT or (following.endswith(JSON_SUFFIXES) and not following.startswith("-"))
            yield f"{JSON}={following if is_path else STDOUT}"
        else:
            name, equals, value = argument.partition("=")
            yield renamed.get(name, name) + equals + value
    yield from arguments[end:]
