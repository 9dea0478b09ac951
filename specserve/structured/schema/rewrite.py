"""A JSON Schema as another one that allows the same texts and asks only for what grammars are made of.

A place whose own keywords are plain is copied, and only what is inside it is looked at; another is spelled as its
cases. What cannot be told exactly is refused, with the keyword. Narrower than asked are only: `contains` in an array
without a bound (among the first items), and numbers within 0.000001 of an excluded whole one.
"""

from __future__ import annotations

import json
from typing import Any

from specserve.structured.schema.cases import Cases, LoopError
from specserve.structured.schema.document import Document, check_depth, check_shape, reachable
from specserve.structured.schema.facts import Fact, Terms, terms
from specserve.structured.schema.objects import objects
from specserve.structured.schema.spelling import options
from specserve.structured.spec import RefusedError

_AS_IT_IS = frozenset({
    "type", "const", "enum", "minimum", "maximum", "multipleOf", "pattern", "format", "required",
})  # fmt: skip
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems"})
_INSIDE = frozenset({"items", "additionalProperties"})
_LISTED = frozenset({"prefixItems", "anyOf", "allOf"})
_NAMED = frozenset({"properties", "patternProperties"})
_PLAIN = _AS_IT_IS | _COUNTS | _INSIDE | _LISTED | _NAMED
_IDLE = frozenset({
    "$schema", "$id", "$anchor", "$dynamicAnchor", "$comment", "$defs", "$vocabulary", "definitions", "title",
    "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "contentEncoding",
    "contentMediaType", "contentSchema",
})  # fmt: skip
_SMALL = 400  # characters of a schema that is written out wherever it is asked for
_MOST_CHARACTERS = 2**19
_KEYWORDS = _PLAIN | {
    "$ref", "$dynamicRef", "oneOf", "not", "if", "then", "else", "dependentRequired", "dependentSchemas",
    "dependencies", "propertyNames", "contains", "minContains", "maxContains", "uniqueItems", "minProperties",
    "maxProperties", "unevaluatedItems", "unevaluatedProperties", "exclusiveMinimum", "exclusiveMaximum",
    "additionalItems",
}  # fmt: skip


def rewritten(schema: Any) -> Any:
    """Raises RefusedError, and nothing else, for what cannot be told exactly or takes too many cases."""
    check_depth(schema)
    for keyword in ("$recursiveRef", "$recursiveAnchor"):
        if isinstance(schema, dict) and keyword in schema:
            raise RefusedError(f"{keyword} is not enforced: use $dynamicRef.")
    try:
        words = _Writer(Document(schema)).root()
    except RecursionError as error:
        raise RefusedError("the schema is nested too deeply.") from error
    if is_endless(words):
        raise RefusedError("$ref: a value asks for itself inside itself, without end.")
    return words


def is_endless(root: Any) -> bool:
    """Whether a schema in the document asks for itself, or for values inside values without end: they would be begun,
    and never finished. Only True is certain: what is too much to look through is taken to have an end."""
    referring = [schema for schema in reachable(root) if "$ref" in schema]
    document = Document(root)
    try:
        cases = Cases(document)
        return not all(cases.satisfiable(terms(document.target(schema))) for schema in referring)
    except LoopError:
        return True
    except (RefusedError, RecursionError):
        return False


class _Writer:
    """Of one document. Schemas that are long, or inside themselves, get a name."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._cases = Cases(document)
        self._names: dict[Terms, str] = {}
        self._written: dict[Terms, Any] = {}
        self._open: set[Terms] = set()
        self._definitions: dict[str, Any] = {}
        self._num_characters = 0

    def root(self) -> Any:
        found = self.write(terms(self._document.root))
        if not self._definitions:
            return found
        definitions = {"$defs": self._definitions}
        return definitions | found if isinstance(found, dict) else found

    def write(self, asked: Terms) -> Any:
        """What fits all of these."""
        if not asked or not self._cases.satisfiable(asked):
            return not asked
        if asked in self._written:
            return self._written[asked]
        if asked in self._open:
            self._names.setdefault(asked, f"s{len(self._names)}")
            return self._reference(asked)
        self._open.add(asked)
        found = self._body(asked)
        self._open.discard(asked)
        size = len(json.dumps(found))
        self._count(size)
        if asked in self._names or size > _SMALL:
            self._names.setdefault(asked, f"s{len(self._names)}")
            self._definitions[self._names[asked]] = found
            found = self._reference(asked)
        self._written[asked] = found
        return found

    def _reference(self, asked: Terms) -> dict[str, Any]:
        return {"$ref": f"#/$defs/{self._names[asked]}"}

    def _count(self, size: int) -> None:
        self._num_characters += size
        if self._num_characters > _MOST_CHARACTERS:
            raise RefusedError(f"the schema is more than {_MOST_CHARACTERS} characters with all its cases.")

    def _body(self, asked: Terms) -> Any:
        if len(asked) == 1 and asked[0].positive:
            schema = asked[0].schema
            check_shape(schema)
            used = _KEYWORDS & schema.keys()
            if used == {"$ref"}:
                return self.write(terms(self._document.target(schema)))
            if _is_plain(schema, used):
                return {name: self._copied(name, schema[name]) for name in schema if name in used}
        return self._choice(asked)

    def _choice(self, asked: Terms) -> Any:
        def members(facts: list[Fact]) -> list[Any]:
            return objects(facts, self._cases, self.write)

        different = dict[str, Any]()  # by their texts: to Python, 1 is True
        for found in self._cases.expand(asked):
            if self._cases.is_possible(found):
                different |= {json.dumps(each): each for each in options(found, self._cases, self.write, members)}
        spelled = list(different.values())
        if True in spelled:
            return True
        if not spelled:
            return False
        return spelled[0] if len(spelled) == 1 else {"anyOf": spelled}

    def _copied(self, name: str, value: Any) -> Any:
        if name in _INSIDE:
            return self.write(terms(value))
        if name in _LISTED:
            return [self.write(terms(inner)) for inner in value]
        if name in _NAMED:
            return {key: self.write(terms(inner)) for key, inner in value.items()}
        return int(value) if name in _COUNTS else value


def _is_plain(schema: dict[str, Any], used: frozenset[str] | set[str]) -> bool:
    """Whether a grammar is made of its own keywords as they are."""
    if not used <= _PLAIN or len(schema.get("patternProperties", ())) > 1:
        return False
    return not isinstance(schema.get("items"), list)
