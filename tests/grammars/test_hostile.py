"""What a client may send to hang, crash or fill a server: each is tried in the process that can be killed, and is
either refused there or leads through masks without a fault. Whatever becomes of it, the next request is answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from specserve.grammars import llguidance
from specserve.grammars._llguidance_words import schema_grammar
from specserve.grammars._onward import Onward
from specserve.grammars.llguidance import LlguidanceBackend
from specserve.structured.base import Guarded, RefusedError, Vocabulary
from specserve.structured.spec import Structured
from specserve.structured.trial import Outcome, Trial
from specserve.structured.vocabulary import vocabulary
from specserve.testing import write_tiny_model
from specserve.text.tokenizer import Tokenizer

LIMIT_S = 2.0
STEPS, WALKS = 60, 3


def chain(num_rules: int) -> str:
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(num_rules))
    return f'start: r0\n{rules}\nr{num_rules}: "a"'


def deep(depth: int, inside: str = '{"type":"integer"}') -> str:
    opened = '{"type":"object","properties":{"a":'
    return opened * depth + inside + "}}" * depth


def choices(num: int) -> list[Any]:
    """An anyOf with two branches for each of so many members."""
    return [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(num)]


def properties(num: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"key{i}": {"type": "string"} for i in range(num)}}


REGEXES = {
    "nested stars": "(a|aa)+$",
    "many optional": "(a?){50}a{50}",
    "subset construction": "(a|b)*a(a|b){18}",
    "hundreds of hundreds": "((a{100}){100}){100}",
    "a count of two milliards": "a{2000000000}",
    "long dots": ".{1,3000}",
    "long letters": "[a-z]{1,100000}",
    "never": "[^\\s\\S]",
    "look-around": "(?=a)b",
    "backreference": "(a)\\1",
    "20,000 words": "|".join(f"w{i}x" for i in range(20_000)),
    "deep brackets": "(" * 5000 + "a" + ")" * 5000,
    "stars of stars": "((((((a*)*)*)*)*)*)*b",
    "no expression": "(((",
}
GRAMMARS = {
    "a chain of 900 rules": chain(900),
    "a chain of 5,000 rules": chain(5000),
    "no end": 'start: "a" start',
    "left recursion": 'start: start "a" | "a"',
    "ambiguous": 'start: s\ns: s s | "a" |',
    "counts of counts": 'start: a{1000}\na: b{1000}\nb: "x"{1000}',
    "a schema inside": 'start: %json {"not": {}}',
    "brackets": "start: " + "(" * 3000 + '"a"' + ")" * 3000,
}
SCHEMAS: dict[str, Any] = {
    "40,000 constants": {"enum": [f"value number {i}" for i in range(40_000)]},
    "objects as constants": {"enum": [{"a": i} for i in range(5000)]},
    "1,000 deep": deep(1000),
    "40 deep": deep(40),
    "100,000 deep": '{"not":' * 100_000 + "{}" + "}" * 100_000,
    "100,000 arrays in a constant": '{"const":' + "[" * 100_000 + "]" * 100_000 + "}",
    "refers to itself": {"$ref": "#"},
    "a ring of references": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "a ring in an option": {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}},
                            "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "no base case": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "no base case in an option": {"properties": {"a": {"$ref": "#/$defs/l"}},
                                  "$defs": {"l": {"type": "array", "items": {"$ref": "#/$defs/l"}, "minItems": 1}}},
    "fifty anyOf": {"type": "object", "allOf": choices(50)},
    "eight anyOf": {"type": "object", "allOf": choices(8)},
    "fifty anyOf and a not": {"type": "object", "allOf": choices(50), "not": {"required": ["z"]}},
    "fifty oneOf": {"allOf": [{"oneOf": [{"minimum": i}, {"minLength": i}, {"maxItems": i}]} for i in range(50)]},
    "nots of allOf": {"not": {"allOf": [{"not": branch} for branch in choices(50)]}},
    "a hundred dependents": {"dependentRequired": {f"k{i}": [f"l{i}"] for i in range(100)}},
    "twelve ifs": {"allOf": [{"if": {"required": [f"a{i}"]}, "then": {"required": [f"b{i}"]}} for i in range(12)]},
    "a large multiple": {"type": "integer", "multipleOf": 999_983},
    "a hidden multiple": {"$ref": "#/x/y", "x": {"y": {"type": "integer", "multipleOf": 999_983}}},
    "common multiples": {"type": "integer", "not": {"const": 0},
                         "allOf": [{"multipleOf": n} for n in (997, 991, 983, 977)]},
    "a milliard of characters": {"type": "string", "maxLength": 10**9},
    "exactly 100,000 characters": {"type": "string", "minLength": 10**5, "maxLength": 10**5},
    "a milliard of items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9, "maxItems": 10**9},
    "items up to a milliard": {"type": "array", "maxItems": 10**9},
    "10^400 items": '{"type":"array","maxItems":1' + "0" * 400 + "}",
    "a milliard contained": {"type": "array", "contains": {"type": "null"}, "minContains": 10**9},
    "contained up to a milliard": {"type": "array", "contains": {"type": "null"}, "maxContains": 10**9},
    "unique among a thousand": {"type": "array", "items": {"enum": list(range(1000))}, "uniqueItems": True},
    "1,000 optional properties": properties(1000),
    "400 optional properties": properties(400),
    "1,000 in fifty branches": {"anyOf": [properties(20) | {"required": [], "title": str(i)} for i in range(50)]},
    "1,000 of them inside": {"type": "object", "properties": {"x": properties(1000)}, "required": ["x"]},
    "1,000 closed": properties(1000) | {"additionalProperties": False},
    "3,000 optional properties": properties(3000),
    "20,000 properties": properties(20_000),
    "some of a thousand": properties(1000) | {"minProperties": 500},
    "anyOf of 3,000": {"anyOf": [{"type": "object", "properties": {f"k{i}": {"type": "null"}}} for i in range(3000)]},
    "a pattern that counts, late": {"type": "object", "required": ["a", "b"], "properties": {
        "a": {"type": "integer"}, "b": {"type": "string", "pattern": "^((a{100}){100}){100}$"}}},
    "a pattern that backtracks": {"type": "string", "pattern": "(a+)+$"},
    "names that backtrack": {"type": "object", "properties": {"a" * 40 + "!": True}, "maxProperties": 1,
                             "propertyNames": {"pattern": "^(a+)+$"}, "not": {"required": ["b"]}},
    "a text that it is not": {"type": "string", "not": {"const": "a" * 900}},
    "many texts that it is not": {"type": "string", "not": {"enum": [f"word {i}" for i in range(3000)]}},
    "options of another engine": {"x-guidance": {"lenient": True}, "not": {"type": "string"}, "type": "string"},
    "doubling definitions": {"$ref": "#/$defs/d0", "$defs": {
        **{f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}, "b": {"$ref": f"#/$defs/d{i + 1}"}},
                     "not": {"const": i}} for i in range(60)}, "d60": {"type": "integer"}}},
    "branches that double": {"$ref": "#/$defs/d0", "$defs": {
        **{f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(60)},
        "d60": {"not": {"type": "null"}}}},
    "bounds by the thousand": {"allOf": [{"exclusiveMinimum": i, "maximum": 10**6 - i} for i in range(3000)]},
}  # fmt: skip
CASES = {
    **{f"regex: {name}": Structured.regex(text) for name, text in REGEXES.items()},
    **{f"grammar: {name}": Structured.grammar(text) for name, text in GRAMMARS.items()},
    **{
        f"schema: {name}": Structured("json_schema", schema if isinstance(schema, str) else json.dumps(schema))
        for name, schema in SCHEMAS.items()
    },
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def words(tiny: Path) -> Vocabulary:
    tokenizer = Tokenizer(tiny)
    return vocabulary(tokenizer, tokenizer.vocab_size)


@pytest.fixture(scope="module")
def trial(tiny: Path) -> Iterator[Trial]:
    trial = Trial(tiny, 293, backend="llguidance", limit_s=LIMIT_S)
    yield trial
    trial.close()


@pytest.fixture(scope="module")
def backend(words: Vocabulary) -> LlguidanceBackend:
    return LlguidanceBackend(words)


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_or_led_through_masks(
    name: str, trial: Trial, backend: LlguidanceBackend, words: Vocabulary
) -> None:
    outcome = trial.run(CASES[name])
    assert outcome.crashed is None
    if outcome.timed_out or outcome.refused is not None:
        assert outcome.refused is None or ("\n" not in outcome.refused and len(outcome.refused) < 1000)
        return
    grammar = backend.compile(CASES[name])
    faults = [walk(Guarded(grammar.start()), words, Random(seed)) for seed in range(WALKS)]
    assert faults == [None] * WALKS


@pytest.mark.parametrize("num", [400, 401])
def test_as_many_optional_properties_are_taken_as_can_be_followed(num: int, smollm2: Path) -> None:
    """Where all their names may go on, 500 were accepted and ended an answer in its midst."""
    tokenizer = Tokenizer(smollm2)
    words = vocabulary(tokenizer, tokenizer.vocab_size)
    asked = Structured("json_schema", json.dumps({"type": "object", "properties": {f"p0_{i}": {} for i in range(num)}}))
    if num > 400:
        with pytest.raises(RefusedError, match=r"properties: more than 400 .* `required`"):
            LlguidanceBackend(words).compile(asked)
        return
    state, row = LlguidanceBackend(words).compile(asked).start(), np.zeros(words.num_words, np.int32)
    for token in words.encode('{"p0_0": 1, "p0_7": [2], "p0_399": {"a": null}}'):
        state.fill(row)
        assert state.advance(token)


def test_choices_that_are_too_many_behind_the_first_token(smollm2: Path) -> None:
    """They were accepted, and ended an answer at its second mask."""
    tokenizer = Tokenizer(smollm2)
    words = vocabulary(tokenizer, tokenizer.vocab_size)
    branches = [{"type": "string", "maxLength": 10 + i} for i in range(100)]
    with pytest.raises(RefusedError, match="behind its first tokens an answer could not go on: lexer error"):
        LlguidanceBackend(words).compile(Structured("json_schema", json.dumps({"anyOf": branches})))


def branch(num: int, at: int, first: Any = None, required: bool = True) -> dict[str, Any]:
    """An object of `num` properties that may be left out, behind one of the schema `first` if there is one."""
    named: dict[str, Any] = {f"p{at}_{i}": {} for i in range(num)}
    before = {"kind": first} if first is not None else {}
    return {"type": "object", "properties": {**before, **named}, "required": ["kind"] if before and required else []}


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf"])
@pytest.mark.parametrize("by_reference", [False, True])
@pytest.mark.parametrize(
    ("branches", "is_taken"),
    [
        ([branch(200, at) for at in range(2)], True),
        ([branch(201, at) for at in range(2)], False),
        ([branch(20, at) for at in range(50)], False),
        ([branch(20, at, {"const": f"k{at}"}) for at in range(50)], True),
        ([branch(20, at, {"enum": [f"k{at}"]}) for at in range(50)], True),
        ([branch(20, at, {"const": "k"}) for at in range(20)], True),
        ([branch(20, at, {"const": "k"}) for at in range(21)], False),
        ([*(branch(200, at, {"const": f"k{at}"}) for at in range(9)), branch(200, 9)], True),
        ([*(branch(200, at, {"const": f"k{at}"}) for at in range(9)), branch(201, 9)], False),
        ([branch(20, at, {"enum": [f"k{at}", "k"]}) for at in range(50)], False),
        ([branch(20, at, {"type": "string"}) for at in range(50)], False),
        ([branch(20, at, {"const": f"k{at}"}, required=False) for at in range(50)], False),
        ([{"anyOf": [branch(201, at)]} for at in range(2)], False),
    ],
)
def test_branches_are_taken_while_so_many_can_be_followed_at_once(
    keyword: str, by_reference: bool, branches: list[Any], is_taken: bool
) -> None:
    named = {f"b{at}": each for at, each in enumerate(branches)}
    there = [{"$ref": f"#/$defs/b{at}"} for at in range(len(branches))] if by_reference else branches
    root = {"$defs": named, keyword: there}
    if is_taken:
        schema_grammar(root)
        return
    with pytest.raises(RefusedError, match=r"anyOf, oneOf: branches that together have more than 400 properties"):
        schema_grammar(root)


def test_a_union_that_holds_itself_is_counted_once() -> None:
    inner = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    schema_grammar({"$defs": {"node": {"anyOf": [inner, branch(399, 0)]}}, "$ref": "#/$defs/node"})


def test_an_answer_has_more_room_than_the_trial_of_a_large_schema(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial's limit is where it refuses, and what it lets in meets twice as much."""
    tokenizer = Tokenizer(smollm2)
    words = vocabulary(tokenizer, tokenizer.vocab_size)
    large = Structured("json_schema", json.dumps(properties(300)))
    limits: list[Any] = []
    made = llguidance.LLParserLimits

    def noted(**stated: Any) -> Any:
        limits.append(stated)
        return made(**stated)

    monkeypatch.setattr(llguidance, "LLParserLimits", noted)
    LlguidanceBackend(words).compile(large)
    assert [each["step_max_items"] for each in limits[-2:]] == [10_000, 20_000]
    monkeypatch.setitem(llguidance._LIMITS, "step_max_items", 1_000)
    with pytest.raises(RefusedError, match=r"(?i)too many items"):
        LlguidanceBackend(words).compile(large)


@pytest.mark.parametrize(("num_masks", "why"), [(0, "nothing fits this"), (3, "behind which nothing fits")])
def test_a_way_that_leads_to_nothing_is_refused(backend: LlguidanceBackend, num_masks: int, why: str) -> None:
    class Leading:
        """A grammar and its one state: so many of its masks allow everything, the others nothing."""

        left = num_masks

        def start(self) -> Leading:
            return self

        def fill(self, row: np.ndarray) -> None:
            row[:] = -1 if self.left > 0 else 0
            self.left -= 1

        def advance(self, token: int) -> bool:
            return True

    leading: Any = Leading()
    with pytest.raises(RefusedError) as refused:
        backend._try(leading, 1)
    assert str(refused.value).count("structured:") == 1
    assert why in str(refused.value)


def test_a_walk_goes_on_where_it_can(words: Vocabulary) -> None:
    onward = Onward(words)

    def chosen(texts: list[bytes], dice: Random | None) -> bytes | None:
        row = np.zeros(words.num_words * 32, np.uint8)
        row[[words.tokens.index(text) for text in texts]] = 1
        row[list(words.eos_ids)] = 1
        token = onward(np.packbits(row, bitorder="little").view(np.int32), dice)
        return None if token is None else words.tokens[token]

    assert chosen([], None) is None
    assert chosen([b"}"], None) == b"}"
    assert chosen([b"a", b'"}', b"b"], None) == b"a"
    seen = [chosen([b"a", b"b", b",", b"}"], Random(seed)) for seed in range(200)]
    assert set(seen) == {b"a", b"b", b","}
    assert seen.count(b",") > 100, "what has structure is preferred"


def test_properties_that_must_come_are_not_counted(backend: LlguidanceBackend, words: Vocabulary) -> None:
    names = [f"key{i}" for i in range(1500)]
    schema = {"type": "object", "properties": {name: {"type": "null"} for name in names}, "required": names[400:]}
    state = backend.compile(Structured("json_schema", json.dumps(schema))).start()
    assert all(state.advance(token) for token in words.encode('{"key0": null, "key400": null'))


def walk(state: Guarded, words: Vocabulary, dice: Random) -> str | None:
    """Random tokens, and such as end nothing where there are any. What went wrong, if it did."""
    row = np.zeros(words.num_words, np.int32)
    for _ in range(STEPS):
        state.fill(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: words.size]).tolist()
        texts = [token for token in allowed if token not in words.eos_ids]
        going_on = [token for token in texts if not set(words.tokens[token]) & set(b"}]")]
        if state.fault is not None or not texts:
            return state.fault
        if not state.advance(dice.choice(going_on or texts)):
            return state.fault or "a token of the mask was not taken"
    return state.fault


def test_most_are_decided_in_time_and_all_leave_the_next_one_be(trial: Trial) -> None:
    assert trial.run(Structured.regex("a+"), ["aa", "b"]) == Outcome([True, False])
