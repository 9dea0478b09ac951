"""What one type of JSON values may have to fulfil, as facts that can be put together in cases and looked up for
values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeAlias

TYPES = ("null", "boolean", "number", "string", "array", "object")
ALL_TYPES = frozenset(TYPES)
OF_TYPE = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "integer"), "number"),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format", "none of"), "string"),
    **dict.fromkeys(("elements", "contains", "minItems", "maxItems", "uniqueItems"), "array"),
    **dict.fromkeys(("members", "required", "minProperties", "maxProperties", "propertyNames"), "object"),
}  # which values a fact is about; "values" is about all
_COUNTED = ("Length", "Items", "Properties")
_LONGEST_MATCHED = 200  # characters of a text that a pattern is tried on here
_UNTRIED = re.compile(r"\\[^dwnrtf\\./^$*+?()\[\]{}|-]|\(\?[^:]|\)[*+{]|--|&&|\|\||~~|\[[^\]]*\[")
_LINE_ENDS = re.compile("[\r\u2028\u2029]")  # no "." of ECMA-262, but of Python
_MOST_REPEATS = 3  # in a pattern that is tried here: matching is a power of the length


@dataclass(frozen=True, eq=False, slots=True)
class Term:
    """A schema, or what does not fit it. Schemas are the same only if they are one object in the document."""

    schema: Any
    positive: bool = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Term) and self.schema is other.schema and self.positive == other.positive

    def __hash__(self) -> int:
        return hash((id(self.schema), self.positive))


Terms: TypeAlias = tuple[Term, ...]  # all of them at once; none: anything
FALSE: Terms = (Term(False),)


def terms(schema: Any, positive: bool = True) -> Terms:
    """A schema as terms; anything and nothing have one form each."""
    if schema is True or schema == {}:
        return () if positive else FALSE
    if schema is False:
        return FALSE if positive else ()
    return (Term(schema, positive),)


def both(first: Terms, second: Terms) -> Terms:
    return tuple(dict.fromkeys(first + second))


@dataclass(frozen=True, slots=True)
class Members:
    """Of an object: what its members must be by name, by patterns that names match, and all others."""

    properties: dict[str, Terms] = field(default_factory=dict)
    patterns: dict[str, Terms] = field(default_factory=dict)
    rest: Terms = ()

    def of(self, name: str) -> Terms | None:
        """What the member of this name must be; None where a pattern cannot be tried."""
        matching = [(found, matches(pattern, name)) for pattern, found in self.patterns.items()]
        if any(matched is None for _, matched in matching):
            return None
        if name not in self.properties and not any(matched for _, matched in matching):
            return self.rest
        found = self.properties.get(name, ())
        for inner, matched in matching:
            found = both(found, inner) if matched else found
        return found


@dataclass(frozen=True, slots=True)
class Elements:
    """Of an array: what its first items must be, and all others."""

    prefix: tuple[Terms, ...] = ()
    rest: Terms = ()

    def at(self, i: int) -> Terms:
        return self.prefix[i] if i < len(self.prefix) else self.rest


@dataclass(frozen=True, slots=True)
class Contains:
    """Of an array: from item `start` on, `least` to `most` items fit `schema`."""

    schema: Any
    least: int = 1
    most: int | None = None
    start: int = 0


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that holds for all values of its type that fit. `denied`: its opposite holds."""

    name: str
    value: Any
    denied: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """Which members and items were looked at; `fitting` are schemas: an item that fits one of them was."""

    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    all_names: bool = False
    num_items: int = 0
    all_items: bool = False
    fitting: tuple[Any, ...] = ()

    def __or__(self, other: Seen) -> Seen:
        return Seen(
            tuple(dict.fromkeys(self.names + other.names)),
            tuple(dict.fromkeys(self.patterns + other.patterns)),
            self.all_names or other.all_names,
            max(self.num_items, other.num_items),
            self.all_items or other.all_items,
            self.fitting + other.fitting,
        )


@dataclass(frozen=True, slots=True)
class Case:
    """Values of some types for which all facts hold; a fact about another type says nothing."""

    types: frozenset[str] = ALL_TYPES
    facts: tuple[Fact, ...] = ()
    seen: Seen = Seen()

    def about(self, kind: str) -> list[Fact]:
        """Facts about one type only."""
        return [fact for fact in self.facts if OF_TYPE.get(fact.name) == kind]


def case(name: str, value: Any, denied: bool = False) -> Case:
    """Values of its type for which one fact holds."""
    return Case(frozenset({OF_TYPE[name]}), (Fact(name, value, denied),))


def product(first: list[Case], second: list[Case]) -> list[Case]:
    """What fits a case of each."""
    return [
        Case(one.types & other.types, one.facts + other.facts, one.seen | other.seen)
        for one in first
        for other in second
        if one.types & other.types
    ]


def own_facts(schema: Mapping[str, Any]) -> Iterator[Fact]:
    """What a schema says of single types itself, without applying other schemas in the same place."""
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "pattern", "format"):
        if name in schema:
            yield Fact(name, schema[name])
    for kind in _COUNTED:
        for name in ("min" + kind, "max" + kind):
            if name in schema:
                yield Fact(name, int(schema[name]))
    if schema.get("uniqueItems"):
        yield Fact("uniqueItems", True)
    yield from (Fact("required", name) for name in dict.fromkeys(schema.get("required", ())))
    if schema.get("propertyNames", True) not in (True, {}):
        yield Fact("propertyNames", terms(schema["propertyNames"]))
    if any(name in schema for name in ("properties", "patternProperties", "additionalProperties")):
        yield Fact("members", _members(schema))
    if any(name in schema for name in ("prefixItems", "items")):
        yield Fact("elements", elements(schema))
    if "contains" in schema:
        most = schema.get("maxContains")
        found = Contains(schema["contains"], int(schema.get("minContains", 1)), None if most is None else int(most))
        if found.least or found.most is not None:
            yield Fact("contains", found)
    if "const" in schema:
        yield Fact("values", [schema["const"]])
    if "enum" in schema:
        yield Fact("values", schema["enum"])


def _members(schema: Mapping[str, Any]) -> Members:
    properties = {name: terms(inner) for name, inner in schema.get("properties", {}).items()}
    patterns = {name: terms(inner) for name, inner in schema.get("patternProperties", {}).items()}
    rest = terms(schema.get("additionalProperties", True))
    for pattern in [pattern for pattern in patterns if matches_all(pattern)]:
        found = patterns.pop(pattern)
        properties = {name: both(inner, found) for name, inner in properties.items()}
        patterns = {name: both(inner, found) for name, inner in patterns.items()}
        rest = found
    return Members(properties, patterns, rest)


def elements(schema: Mapping[str, Any]) -> Elements:
    """Of `prefixItems` and `items`, or of the older `items` and `additionalItems`."""
    items = schema.get("items", True)
    if isinstance(items, list):
        return Elements(tuple(map(terms, items)), terms(schema.get("additionalItems", True)))
    return Elements(tuple(map(terms, schema.get("prefixItems", ()))), terms(items))


def holds(fact: Fact, value: Any) -> bool | None:
    """Of a value whose type the fact is about; None where that is not known here: formats, and patterns that take long.
    Facts with schemas in them are not asked."""
    found = _holds(fact, value)
    return found if found is None or not fact.denied else not found


def _holds(fact: Fact, value: Any) -> bool | None:
    name, limit = fact.name, fact.value
    if name in _HOLDS:
        return _HOLDS[name](value, limit)
    if name[3:] in _COUNTED:
        return bool(len(value) >= limit if name.startswith("min") else len(value) <= limit)
    assert name == "format", f"{name} holds schemas"
    return None


_HOLDS: dict[str, Callable[[Any, Any], bool | None]] = {
    "minimum": lambda value, limit: value >= limit,
    "maximum": lambda value, limit: value <= limit,
    "exclusiveMinimum": lambda value, limit: value > limit,
    "exclusiveMaximum": lambda value, limit: value < limit,
    "multipleOf": lambda value, limit: (fraction(value) / fraction(limit)).denominator == 1,
    "integer": lambda value, _: value == math.floor(value),
    "none of": lambda value, excluded: value not in excluded,
    "pattern": lambda value, pattern: matches(pattern, value),
    "uniqueItems": lambda value, _: len(set(map(canonical, value))) == len(value),
    "required": lambda value, name: name in value,
    "values": lambda value, allowed: canonical(value) in set(map(canonical, allowed)),
}


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int | float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def fraction(number: float) -> Fraction:
    """What its decimal digits say."""
    return Fraction(str(number))


def canonical(value: Any) -> str:
    """Equal for values that JSON Schema calls equal: 1.0 is 1, and the order of members says nothing."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return value


def matches_all(pattern: str) -> bool:
    """Whether every text has a match: the empty one does, and nothing asks where it lies."""
    return not re.search(r"[\^$\\]|\(\?", pattern) and bool(matches(pattern.replace(".", "x"), ""))


def matches(pattern: str, text: str) -> bool | None:
    """Whether a text has a match. None for patterns that Python may read otherwise than ECMA-262 does or be slow with,
    and for long texts."""
    repeats = len(re.findall(r"[*+?{]", pattern))
    if _UNTRIED.search(pattern) or repeats > _MOST_REPEATS or len(text) > _LONGEST_MATCHED or _LINE_ENDS.search(text):
        return None
    try:
        return re.search(re.sub(r"(?<!\\)\$", r"\\Z", pattern), text, re.ASCII) is not None
    except re.error:
        return None
