"""What llguidance is told: constraints as the grammars that it reads, without what it knows and gets wrong, which is
refused. Knows its formats and options; makes no matcher."""

from __future__ import annotations

import bisect
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from specserve.constraint.base import RefusedError
from specserve.grammars._gbnf import START, parse
from specserve.grammars._longest import lark
from specserve.schema.document import check_depth, is_number, reachable
from specserve.schema.formats import exact
from specserve.schema.objects import MANY_UNNAMED
from specserve.structured import Structured

# Every option, so that no schema can set one by its key "x-guidance". The spelling is that of json.dumps and of most
# training data: left to the model, no separator would be forced, and a model that is at a loss writes white space for
# ever. Without \u escapes a key of an open object has one spelling, and cannot come again as another.
_OPTIONS: Any = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
    "json_allowed_escapes": 'nrbtf\\"',
    "json_allow_general_unicode_escapes": False,
}
_MOST_RULES = 1000  # of a Lark grammar: a chain of 5,000 rules overflows the stack, and the process dies
_MOST_MULTIPLE = 1000  # of multipleOf: its automaton has so many states, and takes seconds
_MOST_PROPERTIES = 1800  # of one object: each takes four items of a row
_MOST_STRUCTURES = 1800  # objects and arrays of one enum
_MOST_NEAR = 100  # pairs of bounds of one number
_COUNTING = re.compile(r"\{,?[0-9]{3,}|\}\)*\{")


def schema_of(text: str) -> Any:
    """The schema that a text is, not too deep for whoever walks it."""
    try:
        schema = json.loads(text)
    except RecursionError as error:
        raise RefusedError("the schema is nested too deeply.") from error
    check_depth(schema)
    return schema


def schema_grammar(schema: Any) -> str:
    """What LLMatcher takes, of a schema."""
    if schema is False:
        raise RefusedError("nothing fits this schema.")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RefusedError("a JSON Schema is an object, true or false.")
    _check_schema(schema)
    try:
        return LLMatcher.grammar_from_json_schema(exact(schema), overrides=_OPTIONS)
    except ValueError as error:
        raise RefusedError("a number in the schema is beyond what JSON readers take.") from error


def counting_patterns(schema: Any) -> list[str]:
    """Patterns that repeat something a hundred times or more, or counts of counts: their automata may be huge."""
    patterns = (inner.get("pattern") for inner in reachable(schema))
    return list(dict.fromkeys(each for each in patterns if isinstance(each, str) and _COUNTING.search(each)))


def grammar_of(asked: Structured) -> str:
    """What LLMatcher takes, of anything else."""
    if asked.kind == "regex":
        return LLMatcher.grammar_from_regex(asked.text)
    if asked.kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(_literal(option) for option in json.loads(asked.text)))
    if asked.kind == "ebnf":
        return of_ebnf(asked.text)
    assert asked.kind == "lark", "kinds has no others"
    return _of_lark(asked.text)


def _of_lark(text: str) -> str:
    if text.count(":") > _MOST_RULES:
        raise RefusedError(f"this grammar has more than {_MOST_RULES} rules.")
    if "%json" in text:
        raise RefusedError("%json inside a grammar is not taken: send the schema itself.")
    return LLMatcher.grammar_from_lark(text)


def of_ebnf(text: str) -> str:
    return LLMatcher.grammar_from_lark(lark(parse(text).bodies, START))


def _literal(text: str) -> str:
    """A regular expression for this text alone; literals in Lark cannot spell every control character."""
    return "".join(c if c.isascii() and c.isalnum() else rf"\x{{{ord(c):x}}}" for c in text)


# --- what it gets wrong -----------------------------------------------------------------------------------------------


def _check_schema(root: dict[str, Any]) -> None:
    for schema in reachable(root):
        multiple = schema.get("multipleOf")
        if is_number(multiple) and multiple > _MOST_MULTIPLE:
            raise RefusedError(f"multipleOf: {multiple} is more than {_MOST_MULTIPLE}, the most that is enforced.")
        if len(schema.get("properties", ())) > _MOST_PROPERTIES:
            raise RefusedError(f"properties: more than {_MOST_PROPERTIES} in one object are not taken.")
        if sum(isinstance(value, dict | list) for value in _listed(schema.get("enum"))) > _MOST_STRUCTURES:
            raise RefusedError(f"enum: more than {_MOST_STRUCTURES} objects and arrays are not taken.")
        if is_number(least := schema.get("minProperties")) and least > len(_listed(schema.get("required"))) + 1:
            raise RefusedError(MANY_UNNAMED)
        if schema.get("format") == "unknown":
            raise RefusedError("Unknown format: unknown.")  # a name it takes for any text
        _check_bounds(schema, root)


@dataclass(frozen=True, slots=True)
class _Bound:
    """Of a number. `within` names the branch it is in, of each choice around it."""

    name: str
    value: float
    within: dict[int, int]

    def meets(self, other: _Bound) -> bool:
        """Whether both may apply to one number: not from two branches of one choice."""
        return all(other.within.get(choice, branch) == branch for choice, branch in self.within.items())


def _check_bounds(schema: dict[str, Any], root: dict[str, Any]) -> None:
    """A number above (or below) a whole one, with its other bound less than 1 away, may be that whole one here."""
    if schema.get("type") == "integer":
        return
    bounds = list(_bounds(schema, root))
    for name, far, direction in (("exclusiveMinimum", "aximum", 1), ("exclusiveMaximum", "inimum", -1)):
        edges = [bound for bound in bounds if bound.name == name and bound.value == int(bound.value)]
        others = sorted((bound for bound in bounds if bound.name.endswith(far)), key=lambda bound: bound.value)
        near = (pair for edge in edges for pair in _near(edge, others, direction))
        # A few are looked at closely; with more of them, two that are near may meet.
        if any(i >= _MOST_NEAR or edge.meets(other) for i, (edge, other) in enumerate(near)):
            raise RefusedError(f"{name} with the other bound less than 1 away is not enforced exactly.")


def _near(edge: _Bound, others: list[_Bound], direction: int) -> Iterator[tuple[_Bound, _Bound]]:
    """The edge with each of the sorted others that is at most 1 away on its open side."""
    low, high = sorted((edge.value, edge.value + direction))
    start = bisect.bisect_left(others, low, key=lambda bound: bound.value)
    for other in itertools.islice(others, start, None):
        if other.value > high:
            return
        yield edge, other


def _bounds(schema: dict[str, Any], root: dict[str, Any]) -> Iterator[_Bound]:
    """The bounds of a schema and of what applies in the same place. What is come to again, from another branch perhaps,
    is looked at once more as if it were in no branch, and then no more."""
    left, seen = [(schema, dict[int, int]())], dict[int, dict[int, int]]()
    while left:
        found, within = left.pop()
        if not isinstance(found, dict) or seen.get(id(found)) == {}:
            continue
        within = seen[id(found)] = {} if id(found) in seen else within
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            value = found.get(name)
            if is_number(value):
                yield _Bound(name, float(value), within)
        left += [(branch, within) for branch in _listed(found.get("allOf"))]
        for name in ("anyOf", "oneOf"):
            branches = _listed(found.get(name))
            left += [(branch, within | {id(branches): i}) for i, branch in enumerate(branches)]
        reference = found.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            left.append((_at(root, reference), within))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _at(root: Any, reference: str) -> Any:
    """What a local JSON pointer leads to; None where that is nothing."""
    for step in reference[2:].split("/"):
        root = root.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root
