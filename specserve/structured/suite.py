"""Checks a backend against JSON Schema's own truth: schemas with instances that are known to fit or not, as in
JSON-Schema-Test-Suite. No model: a grammar says itself what it would accept.

A grammar fixes how JSON is written, so an instance that fits must be accepted in one of its spellings, and one that
does not fit must be refused in all of them.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specserve.errors import InputError
from specserve.structured.spec import Structured
from specserve.structured.trial import Outcome, Trial

PASSED, WRONG_ACCEPT, WRONG_REJECT = "passed", "wrong_accept", "wrong_reject"
REFUSED, CRASHED, TIMED_OUT = "refused", "crashed", "timed_out"
OUTCOMES = {
    PASSED: "passed",
    WRONG_ACCEPT: "wrong_accepts",
    WRONG_REJECT: "wrong_rejects",
    REFUSED: "refused",
    CRASHED: "crashed",
    TIMED_OUT: "timed_out",
}  # of a group: what they are called in the totals
_MOST_SPELLINGS = 48


@dataclass(slots=True)
class Group:
    """What came of one schema. `wrong` names the tests that were judged wrongly."""

    description: str
    schema: Any
    outcome: str
    reason: str | None = None
    wrong: list[dict[str, Any]] = field(default_factory=list)


def check(entries: Sequence[Mapping[str, Any]], trial: Trial) -> Iterator[Group]:
    """Each entry is {"schema", "tests": [{"data", "valid"}]}, perhaps with descriptions."""
    for entry in entries:
        yield _checked(entry, trial)


def totals(groups: Iterable[Group]) -> dict[str, int]:
    """How many groups had which outcome; one with both kinds of mistakes counts as a wrong accept."""
    counts = Counter(group.outcome for group in groups)
    return {name: counts[outcome] for outcome, name in OUTCOMES.items()}


def by_keyword(groups: Iterable[Group]) -> dict[str, dict[str, int]]:
    """For each keyword the outcomes of the groups whose schema has it."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        for keyword in sorted(_keywords(group.schema)):
            found.setdefault(keyword, []).append(group)
    return {keyword: totals(having) for keyword, having in sorted(found.items())}


def shares(counts: dict[str, int]) -> dict[str, float]:
    """How much of all groups counted passed, and how much was refused, 0 to 1."""
    total = sum(counts.values())
    return {f"{name}_share": round(counts[name] / total, 4) if total else 0.0 for name in ("passed", "refused")}


def entries_of(value: Any) -> list[Mapping[str, Any]]:
    """Raises InputError unless `value` is what `check` takes."""
    if not isinstance(value, list):
        raise InputError('The file must hold a list of {"schema": ..., "tests": [{"data": ..., "valid": true}]}.')
    for i, entry in enumerate(value):
        tests = entry.get("tests") if isinstance(entry, dict) else None
        right = isinstance(tests, list) and all(isinstance(t, dict) and {"data", "valid"} <= set(t) for t in tests)
        if not right or "schema" not in entry:
            raise InputError(f'Entry {i} is not {{"schema": ..., "tests": [{{"data": ..., "valid": true}}]}}.')
    return value


def _checked(entry: Mapping[str, Any], trial: Trial) -> Group:
    group = Group(entry.get("description", ""), entry["schema"], PASSED)
    try:
        asked = Structured.json(entry["schema"])
    except InputError as error:
        group.outcome, group.reason = REFUSED, str(error)
        return group
    order = {name: place for place, name in enumerate(dict.fromkeys(_names(entry["schema"])))}
    spelled = [list(_spellings(_arranged(test["data"], order))) for test in entry["tests"]]
    outcome = trial.run(asked, [text for spellings in spelled for text in spellings])
    if not _is_judged(group, outcome):
        return group
    accepted = iter(outcome.accepted)
    for test, spellings in zip(entry["tests"], spelled, strict=True):
        found = [next(accepted) for _ in spellings]
        if any(found) != test["valid"]:
            kind = WRONG_REJECT if test["valid"] else WRONG_ACCEPT
            group.wrong.append({"description": test.get("description", ""), "data": test["data"], "mistake": kind})
            group.outcome = WRONG_ACCEPT if WRONG_ACCEPT in (kind, group.outcome) else WRONG_REJECT
    return group


def _is_judged(group: Group, outcome: Outcome) -> bool:
    """Whether the grammar could say anything; if not, the group has what happened instead."""
    if outcome.timed_out:
        group.outcome = TIMED_OUT
    elif outcome.crashed is not None:
        group.outcome, group.reason = CRASHED, outcome.crashed
    elif outcome.refused is not None:
        group.outcome, group.reason = REFUSED, outcome.refused
    return group.outcome == PASSED


def _names(schema: Any) -> Iterator[str]:
    """Of properties, in the order of the schema, which most grammars want them in."""
    if isinstance(schema, dict):
        stated = schema.get("properties")
        if isinstance(stated, dict):
            yield from stated
        for value in schema.values():
            yield from _names(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _names(value)


def _arranged(value: Any, order: dict[str, int]) -> Any:
    """The value with the keys of its objects in some order; keys that are not in it come last."""
    if isinstance(value, list):
        return [_arranged(each, order) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: _arranged(value[key], order) for key in sorted(value, key=lambda key: order.get(key, len(order)))}


def _spellings(value: Any) -> Iterator[str]:
    """Texts of one value: its keys in other orders, whole numbers without a fraction, and characters as they are or
    escaped."""
    seen: dict[str, None] = {}
    for variant in itertools.islice(_variants(value), _MOST_SPELLINGS):
        for in_ascii in (False, True):
            text = json.dumps(variant, ensure_ascii=in_ascii)
            seen[text] = seen[text.replace("\x7f", r"\u007f")] = None
    return iter(seen)


def _variants(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, float) and value.is_integer():
        yield int(value)
    elif isinstance(value, list):
        for items in itertools.islice(itertools.product(*map(_few, value)), _MOST_SPELLINGS):
            yield list(items)
    elif isinstance(value, dict):  # its own order first: that matters more than the orders inside it
        for keys in itertools.islice(itertools.permutations(value), _MOST_SPELLINGS // 2):
            yield {key: value[key] for key in keys}
        for keys in itertools.islice(itertools.permutations(value), _MOST_SPELLINGS):
            for values in itertools.islice(itertools.product(*(_few(value[key]) for key in keys)), _MOST_SPELLINGS):
                yield dict(zip(keys, values, strict=True))


def _few(value: Any) -> list[Any]:
    return list(itertools.islice(_variants(value), _MOST_SPELLINGS))


def _keywords(schema: Any) -> set[str]:
    """The keywords of a schema and of those inside it. Names of properties are no keywords."""
    if not isinstance(schema, dict):
        return set()
    found = set(schema)
    for name, value in schema.items():
        if name in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"):
            inner = list(value.values()) if isinstance(value, dict) else []
        elif name in ("enum", "const", "default", "examples", "dependentRequired"):
            inner = []
        else:
            inner = value if isinstance(value, list) else [value]
        for each in inner:
            found |= _keywords(each)
    return found
