"""Structural tags, as xgrammar documents them, in the part that xgrammar enforces exactly. The caller checks
schemas, expressions and grammars inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from specserve.structured.base import RefusedError

_MOST_FORMATS = 1000
_MOST_NESTED = 20
_MOST_REPEATS = 1000  # of one format, also where a format around it is repeated
# The keys of each format: a text, several texts, a yes or no, a number, a format, several of them.
_FORMATS: Mapping[str, Mapping[str, str]] = {
    "const_string": {"value": "text"},
    "json_schema": {"json_schema": "schema"},
    "regex": {"pattern": "regex"},
    "grammar": {"grammar": "ebnf"},
    "any_text": {"excludes": "texts"},
    "token": {"token": "token"},
    "sequence": {"elements": "formats"},
    "or": {"elements": "formats"},
    "optional": {"content": "format"},
    "plus": {"content": "format"},
    "star": {"content": "format"},
    "repeat": {"content": "format", "min": "count", "max": "count"},
    "tag": {"begin": "edge", "content": "format", "end": "edges"},
    "triggered_tags": {
        "triggers": "texts", "tags": "formats", "at_least_one": "flag", "stop_after_first": "flag", "excludes": "texts",
    },
    "token_triggered_tags": {
        "trigger_tokens": "tokens", "tags": "formats", "exclude_tokens": "tokens", "at_least_one": "flag",
        "stop_after_first": "flag",
    },
    "tags_with_separator": {"tags": "formats", "separator": "text", "at_least_one": "flag", "stop_after_first": "flag"},
}  # fmt: skip
_OPTIONAL = {"excludes", "exclude_tokens", "at_least_one", "stop_after_first"}


@dataclass(frozen=True, slots=True)
class Inside:
    """What makes a grammar, as text, of what a tag has inside; each raises RefusedError. Tags may name `token_ids`; of
    these `control_ids` come in free text only where they are triggers."""

    schema: Callable[[Any], str]
    regex: Callable[[str], str]  # gives an expression
    ebnf: Callable[[str], str]
    token_ids: Set[int]
    control_ids: Set[int]


def structural_tag(tag: Any, inside: Inside) -> tuple[dict[str, Any], set[int]]:
    """The tag with schemas as grammars, and the tokens that it names. Raises RefusedError, naming what is not known."""
    if isinstance(tag, dict) and "structures" in tag:
        tag = _from_structures(tag)
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag" or set(tag) != {"type", "format"}:
        raise RefusedError('a structural tag is {"type": "structural_tag", "format": {...}}.')
    walk = _Walk(inside)
    return {"type": "structural_tag", "format": walk.format(tag["format"], 0)}, walk.tokens


def _from_structures(tag: dict[str, Any]) -> dict[str, Any]:
    """The older form: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}."""
    structures = tag["structures"]
    if not isinstance(structures, list) or any(
        not isinstance(each, dict) or set(each) != {"begin", "schema", "end"} for each in structures
    ):
        raise RefusedError('structures is a list of {"begin", "schema", "end"}.')
    tags = [
        {
            "type": "tag",
            "begin": each["begin"],
            "content": {"type": "json_schema", "json_schema": each["schema"]},
            "end": each["end"],
        }
        for each in structures
    ]
    others = {key: value for key, value in tag.items() if key not in ("type", "structures", "triggers")}
    if others:
        raise RefusedError(f"{sorted(others)[0]} in a structural tag is not known.")
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags},
    }


class _Walk:
    """Copies a format, part by part."""

    def __init__(self, inside: Inside) -> None:
        self.tokens: set[int] = set()
        self._inside = inside
        self._left = _MOST_FORMATS
        self._repeats = 1  # of what is being copied

    def format(self, value: Any, depth: int) -> dict[str, Any]:
        self._left -= 1
        if depth > _MOST_NESTED or self._left < 0:
            raise RefusedError(f"formats are nested at most {_MOST_NESTED} deep, {_MOST_FORMATS} in all.")
        name = value.get("type") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in _FORMATS:
            raise RefusedError(f"the format {name!r} is not known; there are {', '.join(_FORMATS)}.")
        known = _FORMATS[name]
        unknown = sorted(set(value) - known.keys() - {"type"} - ({"style"} if value.get("style") == "json" else set()))
        if unknown:
            raise RefusedError(f"{unknown[0]} in the format {name} is not enforced.")
        missing = sorted(known.keys() - value.keys() - _OPTIONAL)
        if missing:
            raise RefusedError(f"the format {name} needs {missing[0]}.")
        found = {"type": name}
        outer = self._repeats
        if name == "repeat":
            self._repeats *= max(self._part("count", value["max"], "max of repeat", depth), 1)
            if self._repeats > _MOST_REPEATS:
                raise RefusedError(
                    f"at most {_MOST_REPEATS} repeats are taken, those of formats around one among them."
                )
        found |= {key: self._part(known[key], value[key], f"{key} of {name}", depth) for key in known if key in value}
        self._repeats = outer
        return self._without_controls(found) if name == "token_triggered_tags" else self._as_grammar(found)

    def _as_grammar(self, found: dict[str, Any]) -> dict[str, Any]:
        """As a format of its own a schema would have any amount of white space."""
        if found["type"] != "json_schema":
            return found
        return {"type": "grammar", "grammar": found["json_schema"]}

    def _without_controls(self, found: dict[str, Any]) -> dict[str, Any]:
        """Free text holds no control token but the triggers."""
        excluded = {*found.get("exclude_tokens", ()), *self._inside.control_ids} - set(found["trigger_tokens"])
        return found | {"exclude_tokens": sorted(excluded)}

    def _part(self, kind: str, value: Any, where: str, depth: int) -> Any:
        if kind == "format":
            return self.format(value, depth + 1)
        if kind in ("formats", "texts", "tokens"):
            return self._several(kind[:-1], value, where, depth)
        if kind == "edges" and isinstance(value, list):
            return self._several("text", value, where, depth)
        if kind in ("edge", "edges") and isinstance(value, dict):
            return self.format(value, depth + 1)
        return self._single(kind, value, where)

    def _several(self, kind: str, value: Any, where: str, depth: int) -> list[Any]:
        if not isinstance(value, list):
            raise RefusedError(f"{where} is a list.")
        return [self._part(kind, each, where, depth) for each in value]

    def _single(self, kind: str, value: Any, where: str) -> Any:
        if kind == "schema":
            return self._inside.schema(value)
        right: Any = {"flag": bool, "count": int, "token": int}.get(kind, str)
        if not isinstance(value, right) or isinstance(value, bool) != (right is bool):
            raise RefusedError(f"{where} is {value!r}; it must be {_SAID[kind]}.")
        if kind == "regex":
            return self._inside.regex(value)
        if kind == "ebnf":
            return self._inside.ebnf(value)
        if kind == "count" and not -1 <= value <= _MOST_REPEATS:
            raise RefusedError(f"{where} is {value}; it must be at most {_MOST_REPEATS}, -1 where there is no end.")
        if kind == "token":
            if value not in self._inside.token_ids:
                raise RefusedError(f"{where} is {value}, which is no token of the model, or ends a text.")
            self.tokens.add(value)
        return value


_SAID = dict.fromkeys(("text", "edge", "edges", "regex", "ebnf"), "a text") | {
    "flag": "true or false",
    "count": "a whole number",
    "token": "the id of a token",
}
