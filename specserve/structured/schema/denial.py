"""Facts turned round: the cases of a type's values for which a fact does not hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specserve.structured.schema.facts import (
    ALL_TYPES,
    FALSE,
    Case,
    Contains,
    Elements,
    Fact,
    Members,
    case,
    product,
    terms,
    type_of,
)
from specserve.structured.spec import RefusedError

_OPPOSITE = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
_MOST_STRUCTURES = 4  # arrays, and objects, of one enum: the cases of each are multiplied


def without(fact: Fact) -> list[Case]:
    """Raises RefusedError for a fact that cannot be turned round."""
    name, value = fact.name, fact.value
    if name in _OPPOSITE:
        return [case(_OPPOSITE[name], value)]
    if name in _WITHOUT:
        return _WITHOUT[name](value)
    if name.startswith("min"):
        return [case("max" + name[3:], value - 1)] if value else []
    if name.startswith("max"):
        return [case("min" + name[3:], value + 1)]
    return [case(name, value, denied=not fact.denied)]


def _without_members(members: Members) -> list[Case]:
    if any(members.patterns.values()) or members.rest:
        named = "additionalProperties" if members.rest else "patternProperties"
        raise RefusedError(f"{named} is not enforced where it must not fit.")
    found = list[Case]()
    for name, inner in members.properties.items():
        for term in inner:
            fact = Fact("members", Members({name: terms(term.schema, not term.positive)}))
            found.append(Case(frozenset({"object"}), (Fact("required", name), fact)))
    return found


def _without_elements(layer: Elements) -> list[Case]:
    found = list[Case]()
    for i, inner in enumerate(layer.prefix):
        for term in inner:
            fact = Fact("elements", Elements((*((),) * i, terms(term.schema, not term.positive))))
            found.append(Case(frozenset({"array"}), (Fact("minItems", i + 1), fact)))
    for term in layer.rest:
        outside = {"not": term.schema} if term.positive else term.schema
        found.append(case("contains", Contains(outside, start=len(layer.prefix))))
    return found


def _without_contains(asked: Contains) -> list[Case]:
    found = list[Case]()
    if asked.least:
        found.append(case("contains", replace(asked, least=0, most=asked.least - 1)))
    if asked.most is not None:
        found.append(case("contains", replace(asked, least=asked.most + 1, most=None)))
    return found


def _without_values(values: list[Any]) -> list[Case]:
    kinds = dict.fromkeys(map(type_of, values))
    found = [Case(ALL_TYPES - set(kinds))]
    for kind in kinds:
        found += _UNLIKE[kind]([value for value in values if type_of(value) == kind])
    return [each for each in found if each.types]


def _unlike_booleans(values: list[Any]) -> list[Case]:
    return [Case(frozenset({"boolean"}), (Fact("values", [value for value in (True, False) if value not in values]),))]


def _unlike_numbers(values: list[Any]) -> list[Case]:
    """Between them, below and above."""
    edges = [None, *sorted(values), None]
    found = list[Case]()
    for low, high in itertools.pairwise(edges):
        facts = [Fact("exclusiveMinimum", low), Fact("exclusiveMaximum", high)]
        found.append(Case(frozenset({"number"}), tuple(fact for fact in facts if fact.value is not None)))
    return found


def _unlike_arrays(values: list[Any]) -> list[Case]:
    return _unlike_all(values, _unlike_array)


def _unlike_objects(values: list[Any]) -> list[Case]:
    return _unlike_all(values, _unlike_object)


def _unlike_all(values: list[Any], unlike: Callable[[Any], list[Case]]) -> list[Case]:
    if len(values) > _MOST_STRUCTURES:
        raise RefusedError(f"an enum of more than {_MOST_STRUCTURES} arrays or objects is not enforced under not.")
    found = [Case()]
    for value in values:
        found = product(found, unlike(value))
    return found


def _unlike_array(value: list[Any]) -> list[Case]:
    """Shorter, longer, or another item somewhere."""
    found = without(Fact("minItems", len(value))) + without(Fact("maxItems", len(value)))
    return found + _without_elements(Elements(tuple(terms({"const": item}) for item in value)))


def _unlike_object(value: dict[str, Any]) -> list[Case]:
    """A member that is missing, more members, or another value somewhere."""
    found = [found for name in value for found in _without_required(name)]
    more = (*(Fact("required", name) for name in value), Fact("minProperties", len(value) + 1))
    found.append(Case(frozenset({"object"}), more))
    return found + _without_members(Members({name: terms({"const": inner}) for name, inner in value.items()}))


def _without_required(name: str) -> list[Case]:
    return [case("members", Members({name: FALSE}))]


def _refused(_: Any) -> list[Case]:
    raise RefusedError("propertyNames is not enforced where it must not fit.")


_UNLIKE: dict[str, Callable[[list[Any]], list[Case]]] = {
    "null": lambda values: [],
    "boolean": _unlike_booleans,
    "number": _unlike_numbers,
    "string": lambda values: [case("none of", values)],
    "array": _unlike_arrays,
    "object": _unlike_objects,
}
_WITHOUT: dict[str, Callable[[Any], list[Case]]] = {
    "members": _without_members,
    "elements": _without_elements,
    "contains": _without_contains,
    "values": _without_values,
    "required": _without_required,
    "propertyNames": _refused,
}
