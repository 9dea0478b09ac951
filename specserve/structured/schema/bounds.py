"""Bounds of numbers: how many digits they ask for; bounds for multiples, which would have to go on at the digit where
other numbers end; and those that are nearer to each other than 1, the nearer one excluded and whole, as expressions for
intervals are easily wrong there."""

from __future__ import annotations

import bisect
import copy
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from specserve.config import DEFAULT_MAX_NUMBER_DIGITS
from specserve.structured.schema.document import is_number, reachable
from specserve.structured.spec import RefusedError

_MOST_NEAR = 100  # pairs of bounds of one number
_LONGEST_WRITTEN = 22  # digits in front of the point: of a longer float, writers choose an exponent
_MOST_WHOLE = 18  # digits of a bound: it is a 64-bit integer


def demanded(schemas: Iterable[Any]) -> tuple[int, int]:
    """The most digits before and after the point that numbers need to fit the schemas, by what is written in them."""
    pairs = [_digits(value) for schema in schemas for value in _written(schema)]
    return max((whole for whole, _ in pairs), default=0), max((part for _, part in pairs), default=0)


def most_digits(schemas: Iterable[Any], least: int) -> int:
    """What a number may have: `least`, or one more than is demanded, so that it can be above any bound."""
    return max(least, sum(demanded(schemas)) + 1)


def _written(schema: Any) -> Iterator[float]:
    """The numbers in a schema that those in an answer must reach, or be, or divide into."""
    left = [schema]
    while left:
        found = left.pop()
        if isinstance(found, dict):
            yield from (found[name] for name in ("minimum", "exclusiveMinimum") if _sign(found.get(name)) > 0)
            yield from (found[name] for name in ("maximum", "exclusiveMaximum") if _sign(found.get(name)) < 0)
            if _sign(found.get("multipleOf")):
                yield found["multipleOf"]
            for name in ("const", "enum"):
                yield from numbers_in(found.get(name))
        inner = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
        left += [each for each in inner if isinstance(each, dict | list)]


def numbers_in(value: Any) -> Iterator[float]:
    """Those in a constant, zero left out."""
    left = [value]
    while left:
        found = left.pop()
        if _sign(found):
            yield found
        left += found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()


def _sign(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (value > 0) - (value < 0) if is_number else 0


def _digits(number: float) -> tuple[int, int]:
    """Before and after the point; a zero alone before it is none."""
    whole, _, part = f"{abs(Decimal(str(number))):f}".partition(".")
    if isinstance(number, float) and len(whole) > _LONGEST_WRITTEN:
        return DEFAULT_MAX_NUMBER_DIGITS + 2, 0
    return len(whole.lstrip("0")), len(part.rstrip("0"))


def with_ends(root: Any) -> Any:
    """The same document, with bounds beside each `multipleOf` that leave it the digits that any number may have;
    itself, if it has none."""
    if not any("multipleOf" in schema for schema in reachable(root)):
        return root
    whole, part = demanded([root])
    num_digits = max(DEFAULT_MAX_NUMBER_DIGITS - part, whole + 1)
    if num_digits > _MOST_WHOLE:
        return root
    made, most = copy.deepcopy(root), int(float(10**num_digits - 1))  # what it is to readers whose numbers are floats
    for schema in list(reachable(made)):
        if "multipleOf" in schema:
            schema["minimum"] = max(-most, schema.get("minimum", -most))
            schema["maximum"] = min(most, schema.get("maximum", most))
    return made


@dataclass(frozen=True, slots=True)
class _Bound:
    """Of a number. `within` names the branch it is in, of each choice around it."""

    name: str
    value: float
    within: dict[int, int]

    def meets(self, other: _Bound) -> bool:
        """Whether both may apply to one number: not from two branches of one choice."""
        return all(other.within.get(choice, branch) == branch for choice, branch in self.within.items())


def check_bounds(schema: dict[str, Any], root: dict[str, Any]) -> None:
    """Raise RefusedError for a number above (or below) a whole one, with its other bound at most 1 away. `root` is the
    document that local references of the schema are in."""
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
