"""Facts about objects spelled as schemas: layers of members laid over each other, names that are patterns, counts as
choices of which members there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from specserve.structured.schema.cases import Cases, member
from specserve.structured.schema.facts import FALSE, Case, Fact, Members, Terms, both, matches
from specserve.structured.spec import RefusedError

MANY_UNNAMED = "minProperties: names that the schema does not list may repeat, so only one of them is counted."
_MOST_CHOICES = 64  # of which members there are


@dataclass(slots=True)
class _Object:
    """Members by name, and what is asked of how many there are."""

    members: Members
    required: tuple[str, ...]
    least: int = 0
    most: int | None = None
    spelled: dict[str, Any] = field(default_factory=dict)


def objects(facts: list[Fact], cases: Cases, write: Callable[[Terms], Any]) -> list[Any]:
    """Schemas of which one must fit."""
    required = tuple(dict.fromkeys(fact.value for fact in facts if fact.name == "required"))
    least = max((fact.value for fact in facts if fact.name == "minProperties"), default=0)
    most = min((fact.value for fact in facts if fact.name == "maxProperties"), default=None)
    members = _over([fact.value for fact in facts if fact.name == "members"], required)
    for names in (fact.value for fact in facts if fact.name == "propertyNames"):
        members = _named(members, names, cases)
    if any(not cases.satisfiable(member([members], name)) for name in required if not members.patterns):
        return []
    found = _Object(members, required, least, most)
    return [_object(each, write) for each in _counted(found, cases)]


def _object(found: _Object, write: Callable[[Terms], Any]) -> Any:
    spelled: dict[str, Any] = {"type": "object"}
    if found.members.properties:
        spelled["properties"] = {name: write(asked) for name, asked in found.members.properties.items()}
    if found.members.patterns:
        spelled["patternProperties"] = {name: write(asked) for name, asked in found.members.patterns.items()}
    if found.members.rest:
        spelled["additionalProperties"] = write(found.members.rest)
    if found.required:
        spelled["required"] = list(found.required)
    if found.least > len(found.required) + 1:
        raise RefusedError(MANY_UNNAMED)
    if found.least > len(found.required):
        spelled["minProperties"] = found.least
    if found.most is not None:
        spelled["maxProperties"] = found.most
    return spelled


def _over(layers: list[Members], required: tuple[str, ...]) -> Members:
    """What all layers say together. A single one stays as it is: patterns over names are the grammar's own business."""
    if len(layers) == 1:
        return layers[0] if layers[0].rest else _without_idle(layers[0])
    names = dict.fromkeys(name for layer in layers for name in layer.properties)
    if any(layer.rest for layer in layers):
        names |= dict.fromkeys(required)
    patterns = dict.fromkeys(pattern for layer in layers for pattern in layer.patterns)
    if len(patterns) > 1 and sum(bool(layer.patterns) for layer in layers) > 1 and any(layer.rest for layer in layers):
        raise RefusedError("patternProperties that may overlap, beside additionalProperties, are not enforced.")
    rest: Terms = ()
    for layer in layers:
        rest = both(rest, layer.rest)
    merged = Members({name: member(layers, name) for name in names}, {p: _matching(layers, p) for p in patterns}, rest)
    merged = _without_idle(merged)
    for name, asked in merged.properties.items():  # a pattern holds for listed names as well
        for pattern, also in merged.patterns.items():
            if not set(also) <= set(asked) and matches(pattern, name) is not False:
                raise RefusedError("patternProperties, beside properties and additionalProperties, are not enforced.")
    return merged


def _matching(layers: list[Members], pattern: str) -> Terms:
    found: Terms = ()
    for layer in layers:
        found = both(found, layer.patterns.get(pattern, layer.rest))
    return found


def _without_idle(members: Members) -> Members:
    """Patterns that say nothing, where names without a pattern are free as well, are left out; so is a single one that
    forbids what is forbidden anyway, and would forbid listed names with it."""
    forbidden = FALSE[0]
    if not members.rest:
        return replace(members, patterns={name: asked for name, asked in members.patterns.items() if asked})
    if forbidden in members.rest and len(members.patterns) == 1 and forbidden in next(iter(members.patterns.values())):
        return replace(members, patterns={})
    return members


def _named(members: Members, names: Terms, cases: Cases) -> Members:
    """Only members with names that fit."""
    known = {name: asked if _fits(name, names, cases) else FALSE for name, asked in members.properties.items()}
    found = dict[str, Terms]()
    patterns = dict[str, Terms]()
    for each in cases.expand(names):
        if "string" not in each.types:
            continue
        judged = cases.judged(each)
        if judged is not None:
            if not all(fits for name, fits in judged if isinstance(name, str)):
                raise RefusedError("propertyNames: whether a name fits cannot be told here.")
            found |= {name: member([members], name) for name, _ in judged if isinstance(name, str)}
        elif each.about("string"):
            patterns[_pattern(each)] = members.rest
        else:
            return members
    if patterns and members.patterns:
        raise RefusedError("propertyNames beside patternProperties is not enforced.")
    if FALSE[0] in members.rest:
        patterns = {}
    elif patterns and members.rest and known:
        raise RefusedError("propertyNames beside properties and additionalProperties is not enforced.")
    if len(patterns) > 1:
        patterns = {"|".join(f"({pattern})" for pattern in patterns): members.rest}
    return Members({**found, **known}, patterns, FALSE)


def _fits(name: str, names: Terms, cases: Cases) -> bool:
    found = cases.fits(name, names)
    if found is None:
        raise RefusedError(f"propertyNames: whether {name!r} fits cannot be told here.")
    return found


def _pattern(found: Case) -> str:
    """Of names: what the facts about one text say, as a single expression."""
    facts = {fact.name: fact.value for fact in found.about("string")}
    several = len(facts) < len(found.about("string")) or any(fact.denied for fact in found.about("string"))
    if set(facts) == {"pattern"} and not several:
        return str(facts["pattern"])
    if set(facts) <= {"minLength", "maxLength"} and not several:
        return f"^[\\s\\S]{{{facts.get('minLength', 0)},{facts.get('maxLength', '')}}}$"
    raise RefusedError(f"propertyNames with {' and '.join(sorted(facts))} is not enforced.")


# --- how many ---------------------------------------------------------------------------------------------------------


def _counted(found: _Object, cases: Cases) -> list[_Object]:
    """Grammars count members that nobody named, and those that must be there: so choices are made until all named
    ones are there or not."""
    members = found.members
    named = [name for name, asked in members.properties.items() if cases.satisfiable(asked)]
    is_open = cases.satisfiable(members.rest) or any(map(cases.satisfiable, members.patterns.values()))
    optional = [name for name in named if name not in found.required]
    num_sure = len(found.required)
    least, most = max(found.least, num_sure), math.inf if found.most is None else found.most
    if not is_open:
        most = min(most, num_sure + len(optional))
    if least > most:
        return []
    is_bounded = most < (math.inf if is_open else num_sure + len(optional))
    if not optional or (least == num_sure and not is_bounded):
        return [replace(found, most=found.most if is_open else None)]
    if not is_bounded and not is_open:
        return _at_least(found, optional, least - num_sure)
    return _exactly(found, optional, least - num_sure if not is_open else 0, int(min(most - num_sure, len(optional))))


def _at_least(found: _Object, optional: list[str], num: int) -> list[_Object]:
    """So many of them are there, the others as they like."""
    if math.comb(len(optional), num) > _MOST_CHOICES:
        raise RefusedError(f"minProperties: {len(optional)} optional properties leave too many choices.")
    chosen = itertools.combinations(optional, num)
    return [replace(found, required=found.required + names, least=0, most=None) for names in chosen]


def _exactly(found: _Object, optional: list[str], least: int, most: int) -> list[_Object]:
    """Some of them are there, and the others are not."""
    sizes = range(least, most + 1)
    if sum(math.comb(len(optional), size) for size in sizes) > _MOST_CHOICES:
        raise RefusedError(f"maxProperties: {len(optional)} optional properties leave too many choices.")
    spelled = list[_Object]()
    for names in itertools.chain.from_iterable(itertools.combinations(optional, size) for size in sizes):
        absent = {name: FALSE for name in optional if name not in names}
        members = replace(found.members, properties=found.members.properties | absent)
        spelled.append(replace(found, members=members, required=found.required + names))
    return spelled
