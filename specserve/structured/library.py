"""Grammars that come with the package, by name: a text in grammars/library and, beside it, what it is for with examples
that fit and that do not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import specserve.grammars
from specserve.errors import InputError, unknown
from specserve.files import read_text

_MOST_BYTES = 2**24
KIND_OF: Mapping[str, str] = {".regex": "regex", ".ebnf": "ebnf", ".gbnf": "ebnf", ".lark": "lark"}


@dataclass(frozen=True, slots=True)
class Entry:
    """A grammar of the library. `valid` are outputs it must allow, `invalid` ones that it must not."""

    name: str
    kind: str
    text: str
    description: str
    valid: tuple[str, ...]
    invalid: tuple[str, ...]


def names() -> list[str]:
    """All that there are, sorted."""
    return sorted(file.stem for file in _folder().glob("*.json"))


def find(name: str) -> Entry:
    """Raises InputError for an unknown name, which lists those that are near."""
    if name not in names():
        raise InputError(unknown("grammar", name, names()), "structured")
    said = json.loads((_folder() / f"{name}.json").read_text("utf-8"))
    (file,) = (file for file in _folder().glob(f"{name}.*") if file.suffix in KIND_OF)
    kind, text = read(file)
    return Entry(name, kind, text, said["description"], tuple(said["valid"]), tuple(said["invalid"]))


def read(file: Path) -> tuple[str, str]:
    """Kind and text of a grammar in a file, the kind by its name's end. Raises InputError."""
    if file.suffix not in KIND_OF:
        raise InputError(
            f"{str(file)!r} is no grammar: the file's name must end in one of {', '.join(KIND_OF)}.", "structured"
        )
    try:
        text = read_text(file, _MOST_BYTES, pipes=True)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The grammar {str(file)!r} cannot be read: {error}.", "structured") from error
    kind = KIND_OF[file.suffix]
    return kind, text.removesuffix("\n") if kind == "regex" else text  # editors end a file with a line break


def _folder() -> Path:
    found = [folder for path in specserve.grammars.__path__ if (folder := Path(path) / "library").is_dir()]
    assert found, "a checkout and a wheel both have grammars/library"
    return found[0]
