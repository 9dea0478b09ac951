"""Whether a JSON value fits a JSON Schema, judged in bounded time: for what was not generated under its grammar.

Schemas are clients', so nothing they hold may take long: there is a limit to the work, and patterns have a time-out.
What is not judged within them, or by what is known here, is in doubt and neither fits nor fails.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any, TypeAlias
from urllib.parse import unquote

_MOST_STEPS = 4_000  # schemas applied and values compared; they take about 10 ms
_PATTERNS_S = 0.02  # that all patterns together may take
_IN_DOUBT = {"unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"}
_DIGITS = 400  # of a number that divides others exactly

Judged: TypeAlias = bool | None  # None: in doubt


def fits(value: Any, schema: Any) -> Judged:
    """Whether a value fits; None where that is in doubt."""
    try:
        return _Check(schema).schema(value, schema)
    except (_TooMuchError, RecursionError):
        return None


class _TooMuchError(Exception):
    """The work has come to its limit."""


def _all(judged: Iterable[Judged]) -> Judged:
    in_doubt = False
    for found in judged:
        if found is False:
            return False
        in_doubt |= found is None
    return None if in_doubt else True


def _not(judged: Judged) -> Judged:
    return None if judged is None else not judged


def _any(judged: Iterable[Judged]) -> Judged:
    return _not(_all(map(_not, judged)))


class _Check:
    """One value against one schema, `root`, in which references are looked up."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = _MOST_STEPS
        self._seconds = _PATTERNS_S

    def schema(self, value: Any, schema: Any) -> Judged:
        self._step()
        if not isinstance(schema, Mapping):
            return schema if isinstance(schema, bool) else None
        return _all(self._keywords(value, schema))

    def _step(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise _TooMuchError

    def _keywords(self, value: Any, schema: Mapping[str, Any]) -> Iterator[Judged]:
        for name, stated in schema.items():
            if name in _IN_DOUBT or (name == "$id" and schema is not self._root):
                yield None
            elif (judge := _KEYWORDS.get(name)) is not None:
                try:
                    yield judge(self, value, stated, schema)
                except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
                    yield None  # the keyword does not state what it should
        if isinstance(value, dict):
            yield from self._properties(value, schema)
        elif isinstance(value, list):
            yield from self._items(value, schema)

    # --- any value ---

    def _reference(self, value: Any, stated: str, schema: Mapping[str, Any]) -> Judged:
        if stated != "#" and not stated.startswith("#/"):
            return None
        found = self._root
        for part in stated[2:].split("/") if stated != "#" else ():
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            found = found[int(name)] if isinstance(found, list) else found[name]
        return self.schema(value, found)

    def _condition(self, value: Any, stated: Any, schema: Mapping[str, Any]) -> Judged:
        fitting = self.schema(value, stated)
        if fitting is None:
            return None
        return self.schema(value, schema.get("then" if fitting else "else", True))

    def _one(self, value: Any, stated: list[Any], schema: Mapping[str, Any]) -> Judged:
        judged = [self.schema(value, each) for each in stated]
        if judged.count(True) > 1:
            return False
        return None if None in judged else judged.count(True) == 1

    def _same(self, one: Any, other: Any) -> bool:
        """Numbers are the same whatever their type is, but true is no 1."""
        self._step()
        if isinstance(one, list) and isinstance(other, list):
            return len(one) == len(other) and all(map(self._same, one, other))
        if isinstance(one, dict) and isinstance(other, Mapping):
            return one.keys() == other.keys() and all(self._same(one[name], other[name]) for name in one)
        return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)

    def _matches(self, pattern: str, text: str) -> Judged:
        import regex  # unlike Python's own it can be stopped

        self._step()
        begin = time.perf_counter()
        try:
            return regex.search(pattern, text, timeout=self._seconds) is not None
        except (regex.error, TypeError):
            return None
        except TimeoutError:
            raise _TooMuchError from None
        finally:
            self._seconds = max(1e-6, self._seconds - time.perf_counter() + begin)

    # --- objects and lists ---

    def _properties(self, value: dict[str, Any], schema: Mapping[str, Any]) -> Iterator[Judged]:
        named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        if not isinstance(named, Mapping) or not isinstance(patterns, Mapping):
            yield None
            return
        for name, entry in value.items():
            if name in named:
                yield self.schema(entry, named[name])
            matched = [(self._matches(pattern, name), stated) for pattern, stated in patterns.items()]
            yield from (self._unless(_not(found), entry, stated) for found, stated in matched)
            if name not in named and "additionalProperties" in schema:
                other = [found for found, _ in matched]
                yield self._unless(_any(other), entry, schema["additionalProperties"])

    def _unless(self, excepted: Judged, value: Any, schema: Any) -> Judged:
        return True if excepted else _any([excepted, self.schema(value, schema)])

    def _items(self, value: list[Any], schema: Mapping[str, Any]) -> Iterator[Judged]:
        """`items` was a list, and `additionalItems` what came after it, before `prefixItems`."""
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(rest, list):
            first, rest = rest, schema.get("additionalItems", True)
        if not isinstance(first, list):
            yield None
            return
        yield from map(self.schema, value, first)
        yield from (self.schema(entry, rest) for entry in value[len(first) :])

    def _contains(self, value: Any, stated: Any, schema: Mapping[str, Any]) -> Judged:
        if not isinstance(value, list):
            return True
        judged = [self.schema(entry, stated) for entry in value]
        if None in judged:
            return None
        return bool(schema.get("minContains", 1) <= judged.count(True) <= schema.get("maxContains", len(value)))

    def _unique(self, value: Any, stated: Any, schema: Mapping[str, Any]) -> Judged:
        if stated is not True or not isinstance(value, list):
            return True
        return not any(self._same(one, other) for i, one in enumerate(value) for other in value[:i])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and value == value // 1,
    "number": _is_number,
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}

_Judge: TypeAlias = Callable[[_Check, Any, Any, Mapping[str, Any]], Judged]


def _typed(check: _Check, value: Any, stated: Any, schema: Mapping[str, Any]) -> Judged:
    return any(_TYPES[name](value) for name in ([stated] if isinstance(stated, str) else stated))


def _counted(kind: type[str | list[Any] | dict[str, Any]], compare: Callable[[Any, Any], bool]) -> _Judge:
    return lambda check, value, stated, schema: not isinstance(value, kind) or compare(len(value), stated)


def _bounded(compare: Callable[[Any, Any], bool], strictly: Callable[[Any, Any], bool], strict_name: str) -> _Judge:
    """The strict bound's keyword was once a flag beside the other."""

    def judge(check: _Check, value: Any, stated: Any, schema: Mapping[str, Any]) -> Judged:
        if not _is_number(value) or isinstance(stated, bool):
            return True
        return (strictly if schema.get(strict_name) is True else compare)(value, stated)

    return judge


def _multiple(check: _Check, value: Any, stated: Any, schema: Mapping[str, Any]) -> Judged:
    if not _is_number(value):
        return True
    one, other = repr(value), repr(stated)
    if len(one) + len(other) > _DIGITS:
        return None
    return (Fraction(one) / Fraction(other)).denominator == 1


def _dependent(check: _Check, value: Any, stated: Any, schema: Mapping[str, Any]) -> Judged:
    if not isinstance(value, dict):
        return True
    needed = [each for name, each in stated.items() if name in value]
    return _all(check.schema(value, {"required": each} if isinstance(each, list) else each) for each in needed)


_KEYWORDS: Mapping[str, _Judge] = {
    "$ref": _Check._reference,
    "type": _typed,
    "const": lambda check, value, stated, schema: check._same(value, stated),
    "enum": lambda check, value, stated, schema: any(check._same(value, each) for each in stated),
    "allOf": lambda check, value, stated, schema: _all(check.schema(value, each) for each in stated),
    "anyOf": lambda check, value, stated, schema: _any(check.schema(value, each) for each in stated),
    "oneOf": _Check._one,
    "not": lambda check, value, stated, schema: _not(check.schema(value, stated)),
    "if": _Check._condition,
    "minimum": _bounded(operator.ge, operator.gt, "exclusiveMinimum"),
    "maximum": _bounded(operator.le, operator.lt, "exclusiveMaximum"),
    "exclusiveMinimum": _bounded(operator.gt, operator.gt, ""),
    "exclusiveMaximum": _bounded(operator.lt, operator.lt, ""),
    "multipleOf": _multiple,
    "minLength": _counted(str, operator.ge),
    "maxLength": _counted(str, operator.le),
    "pattern": lambda check, value, stated, schema: not isinstance(value, str) or check._matches(stated, value),
    "minItems": _counted(list, operator.ge),
    "maxItems": _counted(list, operator.le),
    "uniqueItems": _Check._unique,
    "contains": _Check._contains,
    "minProperties": _counted(dict, operator.ge),
    "maxProperties": _counted(dict, operator.le),
    "required": lambda check, value, stated, schema: not isinstance(value, dict) or all(n in value for n in stated),
    "propertyNames": lambda check, value, stated, schema: (
        not isinstance(value, dict) or _all(check.schema(name, stated) for name in value)
    ),
    "dependentRequired": _dependent,
    "dependentSchemas": _dependent,
    "dependencies": _dependent,
}
