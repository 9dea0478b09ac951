"""What llguidance is told: constraints as the grammars that it reads, without what it knows and gets wrong, which is
refused."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cached_property
from typing import Any

from llguidance import LLMatcher

from specserve.grammars._ascii import in_ascii
from specserve.grammars._gbnf import START, parse
from specserve.grammars._llguidance_controls import exact_sets, spells_controls
from specserve.grammars._longest import lark
from specserve.structured.base import RefusedError
from specserve.structured.schema.bounds import check_bounds, numbers_in
from specserve.structured.schema.document import Document, check_depth, check_shape, is_number, reachable, walk
from specserve.structured.schema.formats import exact
from specserve.structured.schema.objects import MANY_UNNAMED
from specserve.structured.spec import Structured

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
_WITH_LONG_ESCAPES: Any = {**_OPTIONS, "json_allowed_escapes": 'nrbtf\\"u'}  # of control characters alone
_MOST_RULES = 1000  # of a Lark grammar: a chain of 5,000 rules overflows the stack, and the process dies
_MOST_MULTIPLE = 1000  # of multipleOf: its automaton has so many states, and takes seconds
_MOST_PROPERTIES = 1800  # of one object: each takes four items of a row
# That may come next: with 400 a mask takes 3.5 ms, with 1,000 it takes 25, and all streams wait for it; and there are
# places in the midst of an answer where fewer are too many items for a mask.
_MOST_OPTIONAL = 400
_MOST_STRUCTURES = 1800  # objects and arrays of one enum
_LARGEST = 2**53  # beyond it floats are not whole numbers one by one
_COUNTING = re.compile(r"\{,?[0-9]{3,}|\}\)*\{")


def schema_of(text: str) -> Any:
    """The schema that a text is, not too deep for whoever walks it."""
    try:
        schema = json.loads(text)
    except RecursionError as error:
        raise RefusedError("the schema is nested too deeply.") from error
    if not isinstance(schema, dict | bool):
        raise RefusedError("a JSON Schema is an object, true or false.")
    check_depth(schema)
    for each in walk(schema):
        check_shape(each)
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
    options = _WITH_LONG_ESCAPES if spells_controls(schema) else _OPTIONS
    told = exact_sets(exact(schema))
    try:
        return LLMatcher.grammar_from_json_schema(told, overrides=options)
    except ValueError as error:
        raise RefusedError("a number in the schema is beyond what JSON readers take.") from error


def counting_patterns(schema: Any) -> list[str]:
    """Patterns that repeat something a hundred times or more, or counts of counts: their automata may be huge."""
    patterns = (inner.get("pattern") for inner in reachable(schema))
    return list(dict.fromkeys(each for each in patterns if isinstance(each, str) and _COUNTING.search(each)))


def grammar_of(asked: Structured) -> str:
    """What LLMatcher takes, of anything else."""
    if asked.kind == "regex":
        return regex_grammar(asked.text)
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


def regex_grammar(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(in_ascii(pattern))


def of_ebnf(text: str) -> str:
    return LLMatcher.grammar_from_lark(lark(parse(text).bodies, START))


def _literal(text: str) -> str:
    """A regular expression for this text alone; literals in Lark cannot spell every control character."""
    return "".join(c if c.isascii() and c.isalnum() else rf"\x{{{ord(c):x}}}" for c in text)


# --- what it gets wrong -----------------------------------------------------------------------------------------------


def _check_schema(root: dict[str, Any]) -> None:
    schemas = list(reachable(root))
    for schema in schemas:
        multiple = schema.get("multipleOf")
        if is_number(multiple) and multiple > _MOST_MULTIPLE:
            raise RefusedError(f"multipleOf: {multiple} is more than {_MOST_MULTIPLE}, the most that is enforced.")
        if len(schema.get("properties", ())) > _MOST_PROPERTIES:
            raise RefusedError(f"properties: more than {_MOST_PROPERTIES} in one object are not taken.")
        if _num_optional(schema) > _MOST_OPTIONAL:
            raise RefusedError(
                f"properties: more than {_MOST_OPTIONAL} in one object that may be left out are not taken. Name those "
                "that always come in `required`."
            )
        if sum(isinstance(value, dict | list) for value in _listed(schema.get("enum"))) > _MOST_STRUCTURES:
            raise RefusedError(f"enum: more than {_MOST_STRUCTURES} objects and arrays are not taken.")
        if is_number(least := schema.get("minProperties")) and least > len(_listed(schema.get("required"))) + 1:
            raise RefusedError(MANY_UNNAMED)
        check_bounds(schema, root)
        _check_precision(schema)
    together = _Together(root)
    if any(together.num_optional(schema) > _MOST_OPTIONAL for schema in schemas):
        raise RefusedError(
            f"anyOf, oneOf: branches that together have more than {_MOST_OPTIONAL} properties that may be left out are "
            "not taken. Let each begin with a required property that is a constant of its own."
        )


def _check_precision(schema: dict[str, Any]) -> None:
    """Numbers are floats to it: an integer of more than 53 bits would be another one."""
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "const", "enum"):
        for number in numbers_in(schema.get(name)):
            is_bound = name.endswith("imum") and abs(number) < 2**64  # floats of this size are whole
            is_exact = abs(number) <= _LARGEST or (is_bound and number == int(float(number)))
            if isinstance(number, int) and not is_exact:
                raise RefusedError(f"{name}: {number} is beyond 2**53 and would not be enforced exactly.")


def _num_optional(schema: dict[str, Any]) -> int:
    properties = schema.get("properties", {})
    return len(properties) - sum(name in properties for name in set(map(str, _listed(schema.get("required")))))


class _Together:
    """How many optional properties may come next in a document, by place. All branches of a union are followed at once;
    those behind a required constant, only with the branches that have the same one."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._known: dict[int, Counter[str]] = {}  # by identity of the schema

    def num_optional(self, schema: dict[str, Any]) -> int:
        """Those of an object and of all that is in its place, at most."""
        behind = self._optional(schema)
        return behind[""] + max((num for constant, num in behind.items() if constant), default=0)

    def _optional(self, schema: Any) -> Counter[str]:
        """By the constant that they stand behind, "" for none."""
        if not isinstance(schema, dict):
            return Counter()
        if id(schema) not in self._known:
            self._known[id(schema)] = Counter()  # one that comes to itself again adds nothing
            found = _runs(schema)
            inner = [each for name in ("anyOf", "oneOf", "allOf") for each in schema.get(name, ())]
            if "$ref" in schema:
                inner.append(self._document.target(schema))
            for each in inner:
                found.update(self._optional(each))
            self._known[id(schema)] = found
        return self._known[id(schema)]

    @cached_property
    def _document(self) -> Document:
        return Document(self._root)


def _runs(schema: dict[str, Any]) -> Counter[str]:
    """The longest row of properties, as they are written, that may all be left out: before the first required one that
    is a constant, and behind it."""
    required = set(map(str, _listed(schema.get("required"))))
    longest, run, constant = Counter[str](), 0, ""
    for name, value in schema.get("properties", {}).items():
        run = 0 if name in required else run + 1
        longest[constant] = max(longest[constant], run)
        said = value if isinstance(value, dict) else {}
        fixed = [said["const"]] if "const" in said else _listed(said.get("enum"))
        if name in required and not constant and len(fixed) == 1:
            constant = f"{name}: {json.dumps(fixed)}"
    return longest


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
