"""Bounds of numbers that are nearer to each other than 1, the nearer one excluded and whole: expressions for intervals
are easily wrong there. Knows which bounds apply to one number; knows no backend.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specserve.structured.schema.document import is_number
from specserve.structured.spec import RefusedError

_MOST_NEAR = 100  # pairs of bounds of one number


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
