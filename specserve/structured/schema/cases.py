"""A schema as cases: whatever fits it fits one of them, and in a case nothing applies but facts about single types.

A case keeps which members and items its schemas have looked at, for `unevaluatedProperties` and `unevaluatedItems`:
more schemas that fit never look at less, so each set of fitting branches is a case of its own where it matters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from specserve.structured.schema.denial import without
from specserve.structured.schema.document import Document, check_shape
from specserve.structured.schema.facts import (
    ALL_TYPES,
    FALSE,
    OF_TYPE,
    Case,
    Elements,
    Fact,
    Members,
    Seen,
    Term,
    Terms,
    both,
    canonical,
    case,
    elements,
    holds,
    own_facts,
    product,
    terms,
    type_of,
)
from specserve.structured.spec import RefusedError

_MOST_CASES = 256  # of one place
_MOST_STEPS = 20_000  # of one document: cases that were made on the way
_MOST_TOGETHER = 5  # branches of an anyOf whose sets are told apart
_UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")


class LoopError(RefusedError):
    """A schema that asks for itself in the same place."""


class Cases:
    """Of one document. Everything raises RefusedError: for what cannot be turned round, for too many cases, and for a
    schema that asks for itself in the same place."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._known: dict[tuple[Term, bool], list[Case]] = {}
        self._open: set[tuple[Term, bool]] = set()
        self._possible: dict[Terms, bool] = {}
        self._needed: set[Terms] = set()  # by what is being looked at
        self._is_sure = True  # of a False: no answer on the way hung on what is being looked at
        self._made: dict[tuple[int, ...], Any] = {}
        self._num_steps = 0

    def target(self, schema: dict[str, Any], keyword: str = "$ref") -> Any:
        return self._document.target(schema, keyword)

    def expand(self, asked: Terms, tracked: bool = False) -> list[Case]:
        """All cases; none if nothing fits. `tracked`: somebody asks what they have seen."""
        found = [Case()]
        for term in asked:
            found = self._product(found, self._cases_of(term, tracked))
        return found

    def fits(self, value: Any, asked: Terms) -> bool | None:
        """Whether a value fits; None where that is not known here."""
        try:
            return _any([self.fits_case(value, each) for each in self.expand(asked)])
        except LoopError:
            return None

    def satisfiable(self, asked: Terms) -> bool:
        """Whether anything fits that has an end; False is certain, True is not. What needs itself inside itself has no
        end; that it was so while another was looked at is not kept, as that one may find another way."""
        if asked in self._possible:
            return self._possible[asked]
        if asked in self._needed:
            self._is_sure = False
            return False
        self.count(1)
        outer, self._is_sure = self._is_sure, True
        self._needed.add(asked)
        try:
            found = any(map(self.is_possible, self.expand(asked)))
        except LoopError:
            if not self._open:
                raise
            return True  # who asks is being looked at itself
        finally:
            self._needed.discard(asked)
            is_certain, self._is_sure = self._is_sure or not self._needed, outer
        if found or is_certain:
            self._possible[asked] = found
        else:
            self._is_sure = False
        return found

    def is_possible(self, found: Case) -> bool:
        """As `satisfiable`, of one case."""
        values = self.values(found)
        if values is not None:
            return bool(values)
        return any(self._type_is_possible(found, kind) for kind in found.types)

    def values(self, found: Case) -> list[Any] | None:
        """The values that fit a case, as far as is known, if only these few can; else None."""
        judged = self.judged(found)
        return None if judged is None else [value for value, _ in judged]

    def judged(self, found: Case) -> list[tuple[Any, bool]] | None:
        """As `values`, each with whether it is known to fit."""
        listed = [fact.value for fact in found.facts if fact.name == "values"]
        if not listed:
            if not found.types <= {"null", "boolean"}:
                return None
            listed = [[None] * ("null" in found.types) + [True, False] * ("boolean" in found.types)]
        unique = {canonical(value): value for value in listed[0]}
        for others in listed[1:]:
            kept = set(map(canonical, others))
            unique = {key: value for key, value in unique.items() if key in kept}
        self.count(len(unique))
        rest = replace(found, facts=tuple(fact for fact in found.facts if fact.name != "values"))
        fitting = ((value, self.fits_case(value, rest)) for value in unique.values())
        return [(value, bool(fits)) for value, fits in fitting if fits is not False]

    def count(self, num_steps: int) -> None:
        """Raise RefusedError after too many steps."""
        self._num_steps += num_steps
        if self._num_steps > _MOST_STEPS:
            raise RefusedError(f"telling this schema's cases apart takes more than {_MOST_STEPS} steps.")

    # --- schemas in the same place ------------------------------------------------------------------------------------

    def _cases_of(self, term: Term, tracked: bool) -> list[Case]:
        key = (term, tracked)
        if key in self._known:
            return self._known[key]
        if key in self._open:
            raise LoopError("$ref: a schema asks for itself in the same place.")
        self._open.add(key)
        try:
            found = self._asked(term.schema, tracked) if term.positive else self._denied(term.schema)
        finally:
            self._open.discard(key)
        return self._known.setdefault(key, found)

    def _asked(self, schema: Any, tracked: bool) -> list[Case]:
        if isinstance(schema, bool):
            return [Case()] if schema else []
        check_shape(schema)
        tracked = tracked or any(name in schema for name in _UNEVALUATED)
        facts = tuple(own_facts(schema))
        found = [Case(facts=facts, seen=_seen(schema, facts))]
        if "type" in schema:
            found = self._product(found, _of_types(schema["type"]))
        for branches in self._branches(schema, tracked):
            found = self._product(found, branches)
        return [self._with_rest(schema, each) for each in found]

    def _branches(self, schema: dict[str, Any], tracked: bool) -> Iterator[list[Case]]:
        """The cases of each keyword that applies schemas in the same place."""
        for name in ("$ref", "$dynamicRef"):
            if name in schema:
                yield self.expand(terms(self.target(schema, name)), tracked)
        for inner in schema.get("allOf", ()):
            yield self.expand(terms(inner), tracked)
        if "anyOf" in schema:
            yield self._any_of(schema["anyOf"], tracked)
        if "oneOf" in schema:
            yield self._one_of(schema["oneOf"], tracked)
        if "not" in schema:
            yield [replace(each, seen=Seen()) for each in self.expand(terms(schema["not"], False))]
        if "if" in schema and (tracked or "then" in schema or "else" in schema):
            yield self._if(schema, tracked)
        for name, needed in _dependents(schema):
            absent = Case(facts=(Fact("members", Members({name: FALSE})),))
            yield [absent, *self._product([case("required", name)], self.expand(terms(needed), tracked))]

    def _any_of(self, schemas: list[Any], tracked: bool) -> list[Case]:
        branches = [self.expand(terms(schema), tracked) for schema in schemas]
        if not tracked:
            return list(itertools.chain.from_iterable(branches))
        if len(branches) > _MOST_TOGETHER:
            raise RefusedError(f"anyOf with more than {_MOST_TOGETHER} branches beside {' or '.join(_UNEVALUATED)}.")
        found = list[Case]()
        for size in range(1, len(branches) + 1):
            for chosen in itertools.combinations(branches, size):
                found += self._all(chosen)
        return self._few(found)

    def _one_of(self, schemas: list[Any], tracked: bool) -> list[Case]:
        """Each branch without the others; one that cannot fit at the same time need not be turned round."""
        found = list[Case]()
        for i, schema in enumerate(schemas):
            branch = self.expand(terms(schema), tracked)
            for j, other in enumerate(schemas):
                if j != i and self._meet(branch, self.expand(terms(other))):
                    branch = self._product(branch, self.expand(terms(other, False)))
            found += branch
        return self._few(found)

    def _meet(self, first: list[Case], second: list[Case]) -> bool:
        return any(map(self.is_possible, self._product(first, second)))

    def _if(self, schema: dict[str, Any], tracked: bool) -> list[Case]:
        condition, then, otherwise = (terms(schema.get(name, True)) for name in ("if", "then", "else"))
        yes = self._product(self.expand(condition, tracked), self.expand(then, tracked))
        denied = self.expand(terms(schema["if"], False))
        return yes + self._product(denied, self.expand(otherwise, tracked))

    def _with_rest(self, schema: dict[str, Any], found: Case) -> Case:
        """What nothing in the same place has looked at is looked at last."""
        facts, seen = found.facts, found.seen
        if "unevaluatedProperties" in schema:
            facts += (Fact("members", self._unseen_members(schema["unevaluatedProperties"], seen)),)
            seen |= Seen(all_names=True)
        if "unevaluatedItems" in schema:
            facts += (Fact("elements", self._unseen_items(schema["unevaluatedItems"], seen)),)
            seen |= Seen(all_items=True)
        return Case(found.types, facts, seen)

    def _unseen_members(self, schema: Any, seen: Seen) -> Members:
        if seen.all_names:
            return Members()
        return Members(dict.fromkeys(seen.names, ()), dict.fromkeys(seen.patterns, ()), terms(schema))

    def _unseen_items(self, schema: Any, seen: Seen) -> Elements:
        if seen.all_items:
            return Elements()
        key = tuple(map(id, (*seen.fitting, schema)))
        rest = self._made.setdefault(key, {"anyOf": [*seen.fitting, schema]}) if seen.fitting else schema
        return Elements(((),) * seen.num_items, terms(rest))

    # --- what does not fit --------------------------------------------------------------------------------------------

    def _denied(self, schema: Any) -> list[Case]:
        if isinstance(schema, bool):
            return [] if schema else [Case()]
        check_shape(schema)
        for name in _UNEVALUATED:
            if schema.get(name, True) not in (True, {}):
                raise RefusedError(f"{name} is not enforced where it must not fit.")
        found = _not_of_types(schema["type"]) if "type" in schema else []
        for fact in own_facts(schema):
            found = found + without(fact)
        for branches in self._denied_branches(schema):
            found = found + branches
        return self._few([replace(each, seen=Seen()) for each in found])

    def _denied_branches(self, schema: dict[str, Any]) -> Iterator[list[Case]]:
        for name in ("$ref", "$dynamicRef"):
            if name in schema:
                yield self.expand(terms(self.target(schema, name), False))
        for inner in schema.get("allOf", ()):
            yield self.expand(terms(inner, False))
        for name in ("anyOf", "oneOf"):
            if name in schema:
                yield self._all(self.expand(terms(inner, False)) for inner in schema[name])
        for first, second in itertools.combinations(schema.get("oneOf", ()), 2):
            yield self._product(self.expand(terms(first)), self.expand(terms(second)))
        if "not" in schema:
            yield self.expand(terms(schema["not"]))
        if "if" in schema:
            for positive, name in ((True, "then"), (False, "else")):
                denied = self.expand(terms(schema.get(name, True), False))
                yield self._product(self.expand(terms(schema["if"], positive)), denied) if denied else []
        for name, needed in _dependents(schema):
            yield self._product([case("required", name)], self.expand(terms(needed, False)))

    # --- cases of cases -----------------------------------------------------------------------------------------------

    def _all(self, branches: Iterable[list[Case]]) -> list[Case]:
        found = [Case()]
        for branch in branches:
            found = self._product(found, branch)
        return found

    def _product(self, first: list[Case], second: list[Case]) -> list[Case]:
        self.count(len(first) * len(second))
        return self._few(product(first, second))

    def _few(self, cases: list[Case]) -> list[Case]:
        if len(cases) > _MOST_CASES:
            raise RefusedError(f"this schema has more than {_MOST_CASES} cases in one place.")
        return cases

    # --- what is possible ---------------------------------------------------------------------------------------------

    def fits_case(self, value: Any, found: Case) -> bool | None:
        kind = type_of(value)
        if kind not in found.types:
            return False
        return _every(self._fact_holds(fact, value) for fact in found.facts if OF_TYPE.get(fact.name, kind) == kind)

    def _fact_holds(self, fact: Fact, value: Any) -> bool | None:
        asked = fact.value
        if fact.name == "members":
            return _every(self._fits_member(asked, name, inner) for name, inner in value.items())
        if fact.name == "propertyNames":
            return _every(self.fits(name, asked) for name in value)
        if fact.name == "elements":
            return _every(self.fits(inner, asked.at(i)) for i, inner in enumerate(value))
        if fact.name == "contains":
            found = [self.fits(inner, terms(asked.schema)) for inner in value[asked.start :]]
            most = len(value) if asked.most is None else asked.most
            return None if None in found else asked.least <= found.count(True) <= most
        return holds(fact, value)

    def _fits_member(self, members: Members, name: str, value: Any) -> bool | None:
        asked = members.of(name)
        return None if asked is None else self.fits(value, asked)

    def _type_is_possible(self, found: Case, kind: str) -> bool:
        facts = found.about(kind)
        if kind == "object":
            names = [fact.value for fact in facts if fact.name == "required"]
            layers = [fact.value for fact in facts if fact.name == "members"]
            return all(self.satisfiable(member(layers, name)) for name in names)
        if kind == "array":
            layers = [fact.value for fact in facts if fact.name == "elements"]
            least = max((fact.value for fact in facts if fact.name == "minItems"), default=0)
            length = max((len(layer.prefix) for layer in layers), default=0)  # after it, all items are alike
            asked = [item(layers, i) for i in range(min(least, length + 1))]
            asked += [terms(fact.value.schema) for fact in facts if fact.name == "contains" and fact.value.least]
            return all(map(self.satisfiable, asked))
        return True


def member(layers: list[Members], name: str) -> Terms:
    """What all of them say of one member. Raises RefusedError where a pattern cannot be tried on its name."""
    found: Terms = ()
    for layer in layers:
        inner = layer.of(name)
        if inner is None:
            raise RefusedError(f"patternProperties: whether {name!r} matches cannot be told here.")
        found = both(found, inner)
    return found


def item(layers: list[Elements], i: int) -> Terms:
    found: Terms = ()
    for layer in layers:
        found = both(found, layer.at(i))
    return found


def _seen(schema: dict[str, Any], facts: tuple[Fact, ...]) -> Seen:
    items = elements(schema)
    return Seen(
        tuple(schema.get("properties", ())),
        tuple(schema.get("patternProperties", ())),
        "additionalProperties" in schema,
        len(items.prefix),
        "additionalItems" in schema if isinstance(schema.get("items"), list) else "items" in schema,
        (schema["contains"],) if "contains" in schema else (),
    )


def _of_types(listed: str | list[str]) -> list[Case]:
    names = {listed} if isinstance(listed, str) else set(listed)
    facts = (Fact("integer", True),) if "integer" in names and "number" not in names else ()
    return [Case(frozenset("number" if name == "integer" else name for name in names), facts)]


def _not_of_types(listed: str | list[str]) -> list[Case]:
    (asked,) = _of_types(listed)
    found = [Case(ALL_TYPES - asked.types)] if asked.types != ALL_TYPES else []
    return found + [case("integer", True, denied=True) for _ in asked.facts]


def _dependents(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each name with the schema that applies where it is; `dependencies` is the older keyword for both."""
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, needed in schema.get(keyword, {}).items():
            yield name, {"type": "object", "required": needed} if isinstance(needed, list) else needed


def _every(found: Iterable[bool | None]) -> bool | None:
    """Whether all are true; None is not known."""
    listed = list(found)
    if False in listed:
        return False
    return None if None in listed else True


def _any(found: Iterable[bool | None]) -> bool | None:
    listed = list(found)
    if True in listed:
        return True
    return None if None in listed else False
