"""Which part of JSON Schema a backend enforces exactly, and what a schema asks for beyond it. What each
backend enforces is data.

For a backend that ignores what it does not know. Whatever is not listed is refused, with its keyword and place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specserve.structured.base import RefusedError

# What the standard calls annotations or places for other schemas; none of them says what fits.
_ANNOTATIONS = {
    "$schema", "$comment", "$defs", "definitions", "$anchor", "title", "description", "default", "examples", "readOnly",
    "writeOnly", "deprecated", "contentEncoding", "contentMediaType", "contentSchema",
}  # fmt: skip
_IN_PLACE = ("anyOf", "oneOf", "allOf")
_ALONE = ("$ref", "const", "enum", *_IN_PLACE)
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_PLACE = 100  # characters of it that are told
_LARGEST = 2**53  # from here on floats are not whole numbers one by one
_TYPES: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "boolean"), (type(None), "null"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"),
    (dict, "object"),
)  # fmt: skip


@dataclass(frozen=True)
class Subset:
    """What is enforced exactly: keywords by the type that they speak of, and formats. `pattern` gives the expression to
    put in a pattern's place; it raises RefusedError for one that is not enforced. `length` gives the expression that
    stands for minLength and maxLength. The rest are the most of each that compile in reasonable time."""

    keywords: Mapping[str, frozenset[str]]
    formats: frozenset[str]
    pattern: Callable[[Any], str]
    length: Callable[[int, int | None], str]
    most_schemas: int
    most_depth: int
    most_properties: int
    most_counted_properties: int  # beside minProperties or maxProperties
    most_values: int
    most_characters: int  # in minLength and maxLength


def check(schema: Any, subset: Subset) -> None:
    """Raise RefusedError for a schema of which not everything would be enforced exactly. The schema is the caller's
    own: its patterns and lengths are replaced."""
    _Check(schema, subset).run()


def _refuse(place: str, what: str) -> RefusedError:
    return RefusedError(f"{what} (at {place if len(place) <= _PLACE else f'...{place[-_PLACE:]}'}).")


@dataclass
class _Check:
    root: Any
    subset: Subset
    left: list[tuple[Any, str, int]] = field(default_factory=list)  # schemas to be looked at, where, how deep
    seen: set[str] = field(default_factory=set)  # what references lead to
    done: set[int] = field(default_factory=set)  # ids of the objects that were looked at

    def run(self) -> None:
        self.left.append((self.root, "#", 0))
        num_schemas = 0
        while self.left:
            schema, place, depth = self.left.pop()
            num_schemas += 1
            if num_schemas > self.subset.most_schemas:
                raise RefusedError(f"it has more than {self.subset.most_schemas} schemas in it.")
            if depth > self.subset.most_depth:
                raise _refuse(place, f"it is nested deeper than {self.subset.most_depth} levels")
            self._schema(schema, place, depth)

    def _schema(self, schema: Any, place: str, depth: int) -> None:
        if schema is True:
            return
        if schema is False:
            raise _refuse(place, "false: nothing fits it")
        if not isinstance(schema, dict):
            raise _refuse(place, "a schema is an object, true or false")
        if id(schema) in self.done:
            return
        self.done.add(id(schema))
        keys = schema.keys() - _ANNOTATIONS - ({"$id"} if place == "#" else set())
        alone = next((key for key in _ALONE if key in keys), None)
        if alone is not None:
            self._alone(alone, schema, keys, place, depth)
        elif keys:
            self._typed(schema, keys, place, depth)

    def _inside(self, schema: Any, place: str, depth: int) -> None:
        self.left.append((schema, place, depth + 1))

    def _alone(self, key: str, schema: dict[str, Any], keys: set[str], place: str, depth: int) -> None:
        """Keywords beside which no other is enforced."""
        beside = keys - {key}
        if key in ("const", "enum"):
            self._values(key, schema, place)
            beside -= {"type"}
        elif key == "$ref":
            self._reference(schema["$ref"], place, depth)
        else:
            self._in_place(key, schema[key], place, depth)
        if beside:
            raise _refuse(place, f"{sorted(beside)[0]} beside {key} is not enforced")

    def _values(self, key: str, schema: dict[str, Any], place: str) -> None:
        values = schema["enum"] if key == "enum" else [schema["const"]]
        if not isinstance(values, list) or not values:
            raise _refuse(place, "enum is a list of values")
        if len(values) > self.subset.most_values:
            raise _refuse(place, f"enum: {len(values)} values; at most {self.subset.most_values} are taken")
        if any(isinstance(value, dict | list) and value for value in values):
            raise _refuse(place, f"{key}: lists and objects are not enforced, but for empty ones")
        if any(isinstance(value, int | float) and abs(value) >= _LARGEST for value in values):
            raise _refuse(place, f"{key}: numbers beyond 2**53 are not enforced exactly")
        types = schema.get("type")
        types = types if isinstance(types, list) else [types]
        if "type" in schema and not all(_fits(value, types) for value in values):
            raise _refuse(place, f"{key}: a value that is not of the type beside it is not left out")

    def _reference(self, reference: Any, place: str, depth: int) -> None:
        if not isinstance(reference, str) or not reference.startswith("#/") or set("~%") & set(reference):
            raise _refuse(place, f"$ref: {reference!r} is not enforced, only pointers as #/$defs/NAME are")
        if reference in self.seen:
            return
        self.seen.add(reference)
        found = self.root
        for step in reference[2:].split("/"):
            found = found.get(step) if isinstance(found, dict) else None
        if found is None:
            raise _refuse(place, f"$ref: {reference!r} leads nowhere")
        if isinstance(found, dict) and "$ref" in found:
            raise _refuse(place, f"$ref: {reference!r} leads to another $ref")
        self._inside(found, reference, depth)

    def _in_place(self, key: str, branches: Any, place: str, depth: int) -> None:
        if not isinstance(branches, list) or not branches:
            raise _refuse(place, f"{key} is a list of schemas")
        if key == "allOf" and len(branches) > 1:
            raise _refuse(place, "allOf of several is not enforced")
        if key == "oneOf" and not _are_apart(branches):
            raise _refuse(place, "oneOf is not enforced, unless each branch has a type of its own")
        for i, branch in enumerate(branches):
            self._inside(branch, f"{place}/{key}/{i}", depth)

    def _typed(self, schema: dict[str, Any], keys: set[str], place: str, depth: int) -> None:
        unknown = keys.difference({"type"}, *self.subset.keywords.values())
        if unknown:
            raise _refuse(place, f"{sorted(unknown)[0]} is not enforced")
        types = schema.get("type")
        if types is None:
            raise _refuse(place, f"{sorted(keys)[0]} without type is not enforced")
        types = types if isinstance(types, list) else [types]
        known = {"type"}
        for name in types:
            if not isinstance(name, str) or name not in self.subset.keywords:
                raise _refuse(place, f"type: {name!r} is no type")
            known |= self.subset.keywords[name]
        if keys - known:
            raise _refuse(place, f"{sorted(keys - known)[0]} says nothing of type {types[0]}")
        if keys != {"type"} and len(set(types) - {"null"}) > 1:
            raise _refuse(place, f"{sorted(keys - {'type'})[0]} beside several types is not enforced")
        self._numbers(schema, keys, place)
        self._string(schema, keys, place)
        self._array(schema, place, depth)
        self._object(schema, keys, place, depth)

    def _numbers(self, schema: dict[str, Any], keys: set[str], place: str) -> None:
        """Counts and bounds, which may not contradict each other either."""
        for key in keys & {*_COUNTS, *_BOUNDS}:
            value = schema[key]
            is_right = isinstance(value, int if key in _COUNTS else (int, float)) and not isinstance(value, bool)
            if not is_right or not abs(value) < _LARGEST or (key in _COUNTS and value < 0):
                raise _refuse(place, f"{key}: {value!r} is not enforced exactly")
            if key.endswith("Length") and value > self.subset.most_characters:
                raise _refuse(
                    place, f"{key}: {value} is more than {self.subset.most_characters}, the most that is taken"
                )
        for least, most in (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties")):
            if schema.get(least, 0) > schema.get(most, math.inf):
                raise _refuse(place, f"{least} is above {most}")

    def _string(self, schema: dict[str, Any], keys: set[str], place: str) -> None:
        asked = sorted(keys & {"pattern", "format"}) + ["length"] * bool(keys & {"minLength", "maxLength"})
        if len(asked) > 1:
            raise _refuse(place, f"{asked[0]} beside {asked[1]}: only one of them is enforced")
        if asked == ["length"]:
            schema["pattern"] = self.subset.length(schema.pop("minLength", 0), schema.pop("maxLength", None))
        if "format" in keys and schema["format"] not in self.subset.formats:
            raise _refuse(place, f"format: {schema['format']!r} is not enforced")
        if "pattern" in keys:
            try:
                schema["pattern"] = self.subset.pattern(schema["pattern"])
            except RefusedError as error:
                reason = str(error).removeprefix("structured: ").rstrip(".")
                raise _refuse(place, f"pattern: {reason}") from error

    def _array(self, schema: dict[str, Any], place: str, depth: int) -> None:
        items = schema.get("items", False)
        if items is not False:
            self._inside(items, f"{place}/items", depth)
        first = schema.get("prefixItems", [])
        if not isinstance(first, list) or any(isinstance(each, bool) for each in first):
            raise _refuse(place, "prefixItems: true and false are not taken")
        for i, each in enumerate(first):
            self._inside(each, f"{place}/prefixItems/{i}", depth)

    def _object(self, schema: dict[str, Any], keys: set[str], place: str, depth: int) -> None:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise _refuse(place, "properties is an object and required a list")
        most = self.subset.most_properties
        if keys & {"minProperties", "maxProperties"}:
            most = self.subset.most_counted_properties
        if len(properties) > most:
            raise _refuse(place, f"properties: {len(properties)}; at most {most} are taken")
        unlisted = [name for name in required if name not in properties]
        if unlisted:
            raise _refuse(place, f"required: {unlisted[0]!r} is not in properties and would not be enforced")
        others = schema.get("additionalProperties", True)
        if "properties" in keys and others is not False:
            # A key that is listed could come again, spelled with \u escapes.
            raise _refuse(place, "properties are only enforced with additionalProperties: false")
        if "properties" not in keys and schema.get("minProperties", 0) > 1:
            raise _refuse(place, "minProperties: the same key could come twice")
        for name, value in properties.items():
            self._inside(value, f"{place}/properties/{name}", depth)
        if others is not False:
            self._inside(others, f"{place}/additionalProperties", depth)


def _are_apart(branches: list[Any]) -> bool:
    """Whether no value fits two of them, by their types alone."""
    types = [branch.get("type") if isinstance(branch, dict) else None for branch in branches]
    if not all(isinstance(name, str) for name in types) or {"integer", "number"} <= set(types):
        return False
    return len(set(types)) == len(types)


def _fits(value: Any, types: list[Any]) -> bool:
    name = next(name for kind, name in _TYPES if isinstance(value, kind))
    return name in types or (name == "integer" and "number" in types)
