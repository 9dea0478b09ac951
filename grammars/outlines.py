"""outlines-core: a regular expression becomes an automaton, and that becomes tables, so that masks, drafts and going
back are look-ups. Regular expressions, choices, and JSON Schemas that are one fixed shape of scalars.

Source: github.com/dottxt-ai/outlines-core. Its index is asked for over the 256 bytes, which takes milliseconds where
one over all tokens takes seconds. Once what it has read may stand alone, an index forgets ways that are longer
("1(\\.[0-9]+)?" without "1.5"), so every text ends with a byte of its own here, NUL: no text can hold one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import outlines_core

from specserve.grammars._ascii import in_ascii
from specserve.structured.automaton import ENDED, START, Automaton, TokenTree, Transitions, check_size
from specserve.structured.base import RefusedError, Vocabulary
from specserve.structured.schema.document import check_depth
from specserve.structured.schema.formats import without_annotations
from specserve.structured.spec import Structured

_END = 0  # the byte after a text
_EOS = 256  # the index asks for one; it stands for nothing
_PIECES = re.compile(r"\\.|\[\^?\]?|\(\?[a-zA-Z]*(?:-[a-zA-Z]+)?[:)]|.", re.DOTALL)
_ANCHORS = ("^", "$", r"\A", r"\z", r"\b", r"\B")


class OutlinesBackend:
    """Constraints for one vocabulary, as tables."""

    kinds = frozenset({"regex", "choice", "json_schema"})

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tree = TokenTree(vocabulary)
        self._bytes = outlines_core.Vocabulary(_EOS, {bytes([byte]): [byte] for byte in range(256)})

    def compile(self, asked: Structured) -> Automaton:
        try:
            index = outlines_core.Index(rf"(?:{_pattern(asked)})\x00", self._bytes)
        except ValueError as error:
            if isinstance(error, RefusedError):
                raise
            raise RefusedError(_reason(str(error))) from error
        except RecursionError as error:
            raise RefusedError("this schema is nested too deeply.") from error
        return Automaton(_transitions(index, self._tree.vocabulary), self._tree)


def _transitions(index: outlines_core.Index, vocabulary: Vocabulary) -> Transitions:
    """What is reached without the byte that ends a text. States are numbered as they are found."""
    edges, finals = index.get_transitions(), set(index.get_final_states())
    number = {index.get_initial_state(): START}
    for state in (ahead := list(number)):
        for byte, after in edges[state].items():
            if byte not in (_END, _EOS) and after not in number:
                number[after] = START + len(number)
                ahead.append(after)
    check_size(START + len(number), vocabulary)
    following = np.zeros((START + len(number), 256), np.int32)
    accepting = np.zeros(START + len(number), np.bool_)
    for state, i in number.items():
        accepting[i] = edges[state].get(_END) in finals
        for byte, after in edges[state].items():
            if byte not in (_END, _EOS):
                following[i, byte] = number[after]
    assert not following[ENDED].any(), "ways begin at the start"
    return Transitions(following, accepting)


def _reason(said: str) -> str:
    """What a refusal of the library is about; it shows its automaton's own numbers."""
    if "no transitions from state" in said or "universal start state" in said:
        return "a part of this regular expression can never match."
    if "building NFA" in said:
        return (
            "this regular expression cannot be read, or is not regular: look-ahead, look-behind and back references "
            "are not taken."
        )
    return f"this regular expression is not taken: {said.splitlines()[0][:200].rstrip('.')}."


# --- regular expressions ----------------------------------------------------------------------------------------------


def _pattern(asked: Structured) -> str:
    """A regular expression without anchors, whose brackets are closed."""
    if asked.kind == "regex":
        return _unanchored(in_ascii(asked.text))
    if asked.kind == "choice":
        return "|".join(_literal(option) for option in json.loads(asked.text))
    assert asked.kind == "json_schema", "kinds has no others"
    schema = json.loads(asked.text)
    check_depth(schema)
    return _of_schema(without_annotations(schema), "the schema")


def _unanchored(pattern: str) -> str:
    """Without ^ and $ at the ends, where they say what holds anyway."""
    pieces = _PIECES.findall(pattern)
    if pieces[:1] in (["^"], [r"\A"]):
        pieces = pieces[1:]
    if pieces[-1:] in (["$"], [r"\z"]):
        pieces = pieces[:-1]
    _check(pieces)
    return "".join(pieces)


def _check(pieces: list[str]) -> None:
    """Brackets must pair: what is put around the expression is to stay outside."""
    groups = classes = 0
    for piece in pieces:
        if classes or piece.startswith("["):
            classes += piece.startswith("[") - (piece == "]")
        elif piece in _ANCHORS:
            raise RefusedError(f"the whole text must match, so {piece} is only taken at the ends of the expression.")
        elif piece.startswith("(?") and "x" in piece.split("-")[0]:
            raise RefusedError("the flag x, for comments in a regular expression, is not taken.")
        else:
            groups += (piece.startswith("(") and not piece.endswith(")")) - (piece == ")")
        if groups < 0:
            raise RefusedError("this regular expression closes a bracket that it did not open.")


def _literal(text: str) -> str:
    """An expression for this text alone."""
    if "\0" in text:
        raise RefusedError("a text with the character NUL cannot be enforced.")
    return "".join(c if c.isascii() and c.isalnum() else rf"\x{{{ord(c):x}}}" for c in text)


# --- JSON Schemas of a fixed shape, spelled as json.dumps does --------------------------------------------------------

_NOTES = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id", "$comment"}
)
_MAX_ITEM = 10_000  # characters of an expression: arrays have it twice, and arrays of arrays four times
_STRING = r'"(?:[^"\\\x00-\x1f\x7f]|\\["\\bfnrt])*"'
_SCALARS = {
    "null": "null",
    "boolean": "(?:true|false)",
    "integer": "-?(?:0|[1-9][0-9]*)",
    "string": _STRING,
}
_KEYWORDS = {
    "array": frozenset({"type", "items", "minItems", "maxItems"}),
    "object": frozenset({"type", "properties", "required", "additionalProperties"}),
}


def _of_schema(schema: Any, where: str) -> str:
    """Raises RefusedError for every keyword that is not enforced here."""
    if not isinstance(schema, Mapping):
        raise RefusedError(f"{where} is not an object, and this backend takes schemas of one fixed shape only.")
    asked = {key: value for key, value in schema.items() if key not in _NOTES}
    if "enum" in asked or "const" in asked:
        return _of_values(asked, where)
    kind = asked.get("type")
    if not isinstance(kind, str) or kind not in (*_SCALARS, *_KEYWORDS):
        raise RefusedError(
            f"{where} has the type {json.dumps(kind)}; this backend takes enum, const and the types "
            f"{', '.join((*_SCALARS, *_KEYWORDS))}."
        )
    _refuse_others(asked, _KEYWORDS.get(kind, frozenset({"type"})), where)
    if kind == "array":
        return _of_array(asked, where)
    return _of_object(asked, where) if kind == "object" else _SCALARS[kind]


def _refuse_others(asked: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    if others := sorted(set(asked) - known):
        raise RefusedError(f"{where} has {', '.join(others)}, which this backend does not enforce.")


def _of_values(asked: Mapping[str, Any], where: str) -> str:
    _refuse_others(asked, frozenset({"enum", "const", "type"}), where)
    values = asked.get("enum", [asked.get("const")])
    if "const" in asked and "enum" in asked:
        raise RefusedError(f"{where} has both enum and const; use one of them.")
    if not isinstance(values, list) or not all(map(_is_scalar, values)):
        raise RefusedError(f"{where} has values that are no scalars, which this backend does not enforce.")
    fitting = [value for value in values if "type" not in asked or _is(value, asked["type"])]
    if not fitting:
        raise RefusedError(f"{where}: nothing fits its enum.")
    return f"(?:{'|'.join(_literal(json.dumps(value, ensure_ascii=False)) for value in fitting)})"


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _is(value: Any, kind: Any) -> bool:
    """Whether a scalar has a JSON type, or one of several."""
    if isinstance(kind, list):
        return any(_is(value, each) for each in kind)
    if isinstance(value, bool) or value is None:
        return bool(kind == ("null" if value is None else "boolean"))
    if isinstance(value, str):
        return bool(kind == "string")
    return kind == "number" or (kind == "integer" and float(value).is_integer())


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _of_array(asked: Mapping[str, Any], where: str) -> str:
    least, most = asked.get("minItems", 0), asked.get("maxItems")
    if not all(isinstance(count, int) and not isinstance(count, bool) for count in (least, most)):
        raise RefusedError(f"{where} is an array without maxItems, or with a count that is no integer.")
    if not 0 <= least <= most:
        raise RefusedError(f"{where}: nothing fits minItems {least} with maxItems {most}.")
    item = _of_schema(asked.get("items", True), f"items of {where}") if most else ""
    if not most:
        return r"\[\]"
    if len(item) > _MAX_ITEM:
        raise RefusedError(f"items of {where} are too large: their expression has {len(item)} characters.")
    some = rf"\[{item}(?:, {item}){{{max(least, 1) - 1},{most - 1}}}\]"
    return some if least else rf"(?:\[\]|{some})"


def _of_object(asked: Mapping[str, Any], where: str) -> str:
    properties, required = asked.get("properties", {}), asked.get("required", [])
    if asked.get("additionalProperties") is not False:
        raise RefusedError(f"{where} is an object without additionalProperties: false.")
    if not isinstance(properties, Mapping) or not _are_names(required) or set(required) != set(properties):
        raise RefusedError(f"{where} must have all its properties in required, and no others.")
    members = (
        f"{_literal(json.dumps(name, ensure_ascii=False))}: {_of_schema(schema, f'property {name!r}')}"
        for name, schema in properties.items()
    )
    return rf"\{{{', '.join(members)}\}}"
