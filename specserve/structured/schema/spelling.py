"""Cases spelled as schemas again, in keywords that grammars are made of: bounds, lengths, patterns, constants, items in
their order.

Whatever cannot be spelled exactly is refused, with two exceptions that are narrower than asked: `contains` (see
`_WINDOW`), and numbers next to a whole one that is excluded (see `_STEP`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from specserve.structured.schema.cases import Cases, item
from specserve.structured.schema.facts import Case, Contains, Elements, Fact, Terms, both, canonical, fraction, terms
from specserve.structured.spec import RefusedError

# In a long array, what `contains` asks for comes among the first items: each place is a branch of its own, and a text
# that goes on with other items may never come to it.
_WINDOW = 8
_MOST_PLACES = 64  # of what one `contains` asks for
_MOST_PERMUTATIONS = 400
# llguidance takes an excluded whole bound for included where the other bound is less than 1 away, so the numbers that
# are nearer to it than this are left out instead.
_STEP = 1e-6
_LONG = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_LONGEST_EXCLUDED = 1000  # characters of texts that a text must not be

Write = Callable[[Terms], Any]


def options(found: Case, cases: Cases, write: Write, members: Callable[[list[Fact]], list[Any]]) -> list[Any]:
    """Schemas of which one must fit; `write` spells what is inside a value."""
    judged = cases.judged(found)
    if judged is not None:
        return [_constant(value, fits, found) for value, fits in judged]
    writers: dict[str, Callable[[list[Fact]], list[Any]]] = {
        "number": _numbers,
        "string": _strings,
        "array": lambda facts: _arrays(facts, cases, write),
        "object": members,
    }
    free = [kind for kind in sorted(found.types) if not found.about(kind)]
    spelled: list[Any] = [{"type": free[0] if len(free) == 1 else free}] if free else []
    for kind in sorted(found.types - set(free)):
        spelled += writers[kind](found.about(kind))
    return [True] if len(free) == 6 else spelled


def _constant(value: Any, fits: bool, found: Case) -> Any:
    """A value that fits; formats and patterns of texts that nobody could try here are left to the grammar."""
    if fits:
        return {"const": value}
    if not isinstance(value, str):
        raise RefusedError("an enum or const is not enforced beside a pattern or format that cannot be tried here.")
    return {"const": value, "allOf": _strings([fact for fact in found.about("string") if fact.name != "none of"])}


# --- numbers and texts ------------------------------------------------------------------------------------------------


def _numbers(facts: list[Fact]) -> list[Any]:
    values = {name: [fact.value for fact in facts if fact.name == name] for name in {fact.name for fact in facts}}
    for fact in facts:
        if fact.denied:
            raise RefusedError(f"{_called(fact)} is not enforced where it must not fit.")
    is_integer = "integer" in values
    low = max(((value, name == "exclusiveMinimum") for name in ("minimum", "exclusiveMinimum")
               for value in values.get(name, ())), default=None)  # fmt: skip
    high = min(((value, name != "exclusiveMaximum") for name in ("maximum", "exclusiveMaximum")
                for value in values.get(name, ())), default=None)  # fmt: skip
    lowest = None if low is None else (low[0], low[1])
    highest = None if high is None else (high[0], not high[1])
    spelled = _whole_bounds(lowest, highest) if is_integer else _bounds(lowest, highest)
    if spelled is None:
        return []
    if "multipleOf" in values:
        spelled["multipleOf"] = _common_multiple(values["multipleOf"])
    return [{"type": "integer" if is_integer else "number", **spelled}]


Edge = tuple[float, bool] | None  # a bound, and whether it is excluded


def _whole_bounds(low: Edge, high: Edge) -> dict[str, Any] | None:
    spelled: dict[str, Any] = {}
    if low is not None:
        spelled["minimum"] = math.floor(low[0]) + 1 if low[1] else math.ceil(low[0])
    if high is not None:
        spelled["maximum"] = math.ceil(high[0]) - 1 if high[1] else math.floor(high[0])
    return None if len(spelled) == 2 and spelled["minimum"] > spelled["maximum"] else spelled


def _bounds(low: Edge, high: Edge) -> dict[str, Any] | None:
    """None where no number is between them."""
    if low is not None and high is not None:
        if low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1])):
            return None
        low, high = _stepped(low, high, 1), _stepped(high, low, -1)
        if low[0] > high[0]:
            raise RefusedError(f"numbers within {_STEP} of an excluded bound are not enforced exactly.")
    spelled: dict[str, Any] = {}
    for edge, name, excluded in ((low, "minimum", "exclusiveMinimum"), (high, "maximum", "exclusiveMaximum")):
        if edge is not None:
            spelled[excluded if edge[1] else name] = edge[0]
    return spelled


def _stepped(edge: tuple[float, bool], other: tuple[float, bool], direction: int) -> tuple[float, bool]:
    if not edge[1] or edge[0] != int(edge[0]) or abs(other[0] - edge[0]) > 1:
        return edge
    return round(edge[0] + direction * _STEP, 6), False


def _common_multiple(values: list[float]) -> float:
    if len(set(values)) == 1:
        return values[0]
    parts = [fraction(value) for value in values]
    found = Fraction(math.lcm(*(p.numerator for p in parts)), math.gcd(*(p.denominator for p in parts)))
    return found.numerator if found.denominator == 1 else float(found)


def _strings(facts: list[Fact]) -> list[Any]:
    spelled: dict[str, Any] = {"type": "string"}
    patterns = list[dict[str, Any]]()
    for fact in facts:
        if fact.denied:
            raise RefusedError(f"{_called(fact)} is not enforced where it must not fit.")
        if fact.name == "minLength":
            spelled["minLength"] = max(fact.value, spelled.get("minLength", 0))
        elif fact.name == "maxLength":
            spelled["maxLength"] = min(fact.value, spelled.get("maxLength", fact.value))
        elif fact.name in ("pattern", "format") and {fact.name: fact.value} not in patterns:
            patterns.append({fact.name: fact.value})
    excluded = [text for fact in facts if fact.name == "none of" for text in fact.value]
    if excluded:
        patterns.append({"pattern": all_but(excluded)})
    if spelled.get("minLength", 0) > spelled.get("maxLength", math.inf):
        return []
    if len(patterns) == 1:
        return [{**spelled, **patterns[0]}]
    return [{**spelled, "allOf": [{"type": "string", **each} for each in patterns]} if patterns else spelled]


def all_but(texts: list[str]) -> str:
    """A regular expression of every text but these."""
    if sum(map(len, texts)) > _LONGEST_EXCLUDED:
        raise RefusedError(f"texts of more than {_LONGEST_EXCLUDED} characters are not enforced under not.")
    if any(_LONG.search(text) for text in texts):
        raise RefusedError("a text with a control character that JSON writes as \\u00XX is not enforced under not.")
    return f"^{_all_but(sorted(set(texts)))}$"


def _all_but(texts: list[str]) -> str:
    """They share what was before. Whoever goes on otherwise is free."""
    branches = [] if "" in texts else [""]
    groups = {
        first: [text[1:] for text in each] for first, each in itertools.groupby(filter(None, texts), lambda t: t[0])
    }
    others = "".join(f"\\x{{{ord(first):x}}}" for first in groups)
    branches.append(f"[^{others}][\\s\\S]*" if others else "[\\s\\S]+")
    branches += [f"\\x{{{ord(first):x}}}{_all_but(rests)}" for first, rests in groups.items()]
    return f"({'|'.join(branches)})"


def _called(fact: Fact) -> str:
    return 'type "integer"' if fact.name == "integer" else fact.name


# --- arrays -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Array:
    """Items in their order. `most` None: as many as you like."""

    layer: Elements
    least: int
    most: int | None


def _arrays(facts: list[Fact], cases: Cases, write: Write) -> list[Any]:
    layers = [fact.value for fact in facts if fact.name == "elements"]
    length = max((len(layer.prefix) for layer in layers), default=0)
    layer = Elements(tuple(item(layers, i) for i in range(length)), item(layers, length))
    least = max((fact.value for fact in facts if fact.name == "minItems"), default=0)
    most = min((fact.value for fact in facts if fact.name == "maxItems"), default=None)
    if not cases.satisfiable(layer.rest):
        most = length if most is None else min(most, length)
    found = [_Array(layer, least, most)]
    for asked in (fact.value for fact in facts if fact.name == "contains"):
        found = [placed for array in found for placed in _placed(array, asked)]
        cases.count(len(found))
    unique = [fact for fact in facts if fact.name == "uniqueItems"]
    if any(fact.denied for fact in unique):
        raise RefusedError("uniqueItems is not enforced where it must not fit.")
    if unique and (most is None or most > 1):
        return [{"const": value} for array in found for value in _permutations(array, cases)]
    return [_array(array, write) for array in found if array.most is None or array.least <= array.most]


def _array(array: _Array, write: Write) -> Any:
    spelled: dict[str, Any] = {"type": "array"}
    if array.layer.prefix:
        spelled["prefixItems"] = [write(asked) for asked in array.layer.prefix]
    if array.layer.rest:
        spelled["items"] = write(array.layer.rest)
    if array.least:
        spelled["minItems"] = array.least
    if array.most is not None:
        spelled["maxItems"] = array.most
    return spelled


def _placed(array: _Array, asked: Contains) -> list[_Array]:
    """All ways to place what `contains` asks for, as far as `_WINDOW` reaches. Where it has no upper bound, what is
    between and after may fit as well."""
    if array.most is not None and asked.most is not None and asked.most >= array.most:
        asked = replace(asked, most=None)
    if max(asked.least, asked.most or 0) > _WINDOW:
        raise RefusedError(f"minContains and maxContains of more than {_WINDOW} are not enforced.")
    counts = range(asked.least, (asked.least if asked.most is None else asked.most) + 1)
    end = _end(array, asked, counts)
    inside, outside = terms(asked.schema), () if asked.most is None else terms(asked.schema, False)
    places = (chosen for n in counts for chosen in itertools.combinations(range(asked.start, end), n))
    return [_with(array, chosen, asked.start, inside, outside) for chosen in places]


def _end(array: _Array, asked: Contains, counts: range) -> int:
    """Before which item they are all placed: the array's end, or so far that the ways are not too many."""
    ends = [asked.start + length for length in range(_WINDOW, -1, -1)]
    if array.most is not None:
        ends = [array.most, *(end for end in ends if end < array.most)]
    return next(end for end in ends if sum(math.comb(max(0, end - asked.start), n) for n in counts) <= _MOST_PLACES)


def _with(array: _Array, chosen: tuple[int, ...], start: int, inside: Terms, others: Terms) -> _Array:
    """The items at the chosen places fit; the others from `start` on are what `others` says."""
    length = max(len(array.layer.prefix), start, *(i + 1 for i in chosen)) if chosen else len(array.layer.prefix)
    length = max(length, start if others else 0)
    prefix = [both(array.layer.at(i), inside if i in chosen else others if i >= start else ()) for i in range(length)]
    layer = Elements(tuple(prefix), both(array.layer.rest, others))
    return replace(array, layer=layer, least=max(array.least, *(i + 1 for i in chosen)) if chosen else array.least)


def _permutations(array: _Array, cases: Cases) -> list[Any]:
    """All arrays of different items, where these can be listed."""
    pools = list[list[Any]]()
    for i in range(len(array.layer.prefix) + 1):
        pools.append(_listed(array.layer.at(i), cases))
    longest = len({canonical(value) for pool in pools for value in pool})
    most = longest if array.most is None else min(array.most, longest)
    found = list[Any]()
    for length in range(array.least, most + 1):
        for chosen in _different([pools[min(i, len(pools) - 1)] for i in range(length)]):
            found.append(chosen)
            cases.count(1)
            if len(found) > _MOST_PERMUTATIONS:
                raise RefusedError("uniqueItems is not enforced where there are so many different arrays.")
    return found


def _listed(asked: Terms, cases: Cases) -> list[Any]:
    """The values that fit, if they are few."""
    found = dict[str, Any]()
    for each in cases.expand(asked):
        judged = cases.judged(each)
        if judged is None or not all(fits for _, fits in judged):
            raise RefusedError("uniqueItems is only enforced for items of an enum, a const, booleans and null.")
        found |= {canonical(value): value for value, _ in judged}
    return list(found.values())


def _different(pools: list[list[Any]]) -> Iterator[list[Any]]:
    if not pools:
        yield []
        return
    for chosen in _different(pools[:-1]):
        taken = set(map(canonical, chosen))
        yield from ([*chosen, value] for value in pools[-1] if canonical(value) not in taken)
