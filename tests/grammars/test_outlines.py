"""Tables against Python's own regular expressions, on all texts of a few tokens: what matches can be said and what does
not cannot, nothing leads to where no way goes on, and rows of drafts are those of walking. Then against llguidance on
real vocabularies."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from specserve.config import EngineConfig
from specserve.engine.build import build
from specserve.engine.request import Request
from specserve.grammars.llguidance import LlguidanceBackend
from specserve.grammars.outlines import OutlinesBackend
from specserve.structured import automaton
from specserve.structured.automaton import Automaton, AutomatonState
from specserve.structured.base import Grammar, RefusedError, Vocabulary
from specserve.structured.spec import Structured
from specserve.structured.vocabulary import vocabulary
from specserve.testing import write_tiny_model
from specserve.text.tokenizer import Tokenizer
from specserve.types import GrammarState, SamplingParams

EOS = (0, 2)
characters = st.sampled_from("abé😀")
expressions = st.recursive(
    characters | st.sampled_from(["[ab]", "[^a]", ".", "[a-b😀]", ""]),
    lambda inner: (
        st.lists(inner, min_size=2, max_size=3).map("".join)
        | st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})")
        | st.tuples(inner, st.sampled_from(["*", "+", "?", "{1,2}", "*?", "{2}"])).map(lambda x: f"(?:{x[0]}){x[1]}")
    ),
    max_leaves=5,
)
whole = st.lists(st.sampled_from("abéc😀\n"), min_size=1, max_size=3).map(lambda text: "".join(text).encode())
pieces = st.sampled_from(["é".encode()[:1], "é".encode()[1:], "😀".encode()[:2], "😀".encode()[2:], b"a\xc3", b"\xff"])
token_sets = st.lists(whole | pieces, min_size=1, max_size=5, unique=True)


def words_of(tokens: list[bytes]) -> Vocabulary:
    """Ids 0, 1 and 2 are no text, and three behind the last are padding."""
    spelled = [b"", b"", b"", *tokens]

    def encode(text: str) -> list[int]:
        found, left = [], text.encode()
        while left:
            fitting = [t for t, spelling in enumerate(spelled) if spelling and left.startswith(spelling)]
            if not fitting:
                return []
            found.append(max(fitting, key=lambda t: len(spelled[t])))
            left = left[len(spelled[found[-1]]) :]
        return found

    return Vocabulary(spelled, EOS, len(spelled) + 3, encode)


def allowed(state: GrammarState, words: Vocabulary) -> set[int]:
    row = np.full(words.num_words, -1, np.int32)
    state.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def takes(state: GrammarState, words: Vocabulary, tokens: list[int]) -> bool:
    """Whether these tokens may come and then the end; the state is where it was afterwards."""
    taken = 0
    for token in (*tokens, words.eos_ids[0]):
        may_come = token in allowed(state, words)
        assert state.allows(token) == may_come
        assert state.advance(token) == may_come, "mask and advance disagree"
        if not may_come:
            break
        taken += 1
    state.rollback(taken)
    return taken == len(tokens) + 1


def compiled(pattern: str, words: Vocabulary) -> Automaton | None:
    """None where nothing fits, or a part of the expression never does."""
    try:
        return OutlinesBackend(words).compile(Structured.regex(pattern))
    except RefusedError as error:
        if "nothing fits" in str(error) or "never match" in str(error):
            return None
        raise


def fits(pattern: str, text: bytes) -> bool:
    try:
        return re.fullmatch(pattern, text.decode()) is not None
    except UnicodeDecodeError:
        return False


@settings(max_examples=300)
@given(pattern=expressions, tokens=token_sets)
def test_what_matches_can_be_said_and_nothing_else(pattern: str, tokens: list[bytes]) -> None:
    assume(pattern)
    words = words_of(tokens)
    grammar = compiled(pattern, words)
    ids = range(3, 3 + len(tokens))
    for said in itertools.chain.from_iterable(itertools.product(ids, repeat=n) for n in range(4)):
        text = b"".join(words.tokens[token] for token in said)
        accepted = grammar is not None and takes(grammar.start(), words, list(said))
        assert accepted == fits(pattern, text), text


def states(grammar: Automaton, words: Vocabulary) -> Iterator[list[int]]:
    """The tokens to each state that can be reached."""
    seen = {automaton.START}
    ahead: list[tuple[int, list[int]]] = [(automaton.START, [])]
    while ahead:
        state, said = ahead.pop()
        yield said
        for token in range(-1, words.size + 3):
            after = grammar.after(state, token)
            if after not in (automaton.NOWHERE, *seen):
                seen.add(after)
                ahead.append((after, [*said, token]))


def walked(grammar: Automaton, tokens: list[int]) -> AutomatonState:
    state = grammar.start()
    assert all(state.advance(token) for token in tokens)
    return state


@settings(max_examples=150)
@given(pattern=expressions, tokens=token_sets, seed=st.integers(0, 999))
def test_every_state_has_a_way_to_the_end_and_drafts_are_what_walking_gives(
    pattern: str, tokens: list[bytes], seed: int
) -> None:
    assume(pattern)
    words, chance = words_of(tokens), random.Random(seed)
    grammar = compiled(pattern, words)
    assume(grammar is not None)
    assert grammar is not None
    for said in states(grammar, words):
        state = walked(grammar, said)
        ended = bool(said) and said[-1] in EOS
        assert bool(allowed(state, words)) != ended, "nothing leads to where no way goes on"
        assert allowed(state, words) <= set(range(3, 3 + len(tokens))) | set(EOS)
        assert (EOS[0] in allowed(state, words)) == (EOS[1] in allowed(state, words))
        nodes = [chance.randrange(words.size) for _ in range(6)]
        parents = [chance.randrange(-1, i) for i in range(6)]
        rows = np.full((7, words.num_words), -1, np.int32)
        state.fill_draft(np.array(nodes, np.int32), np.array(parents, np.int32), frozenset({EOS[1], 4}), rows)
        for node, row in enumerate(rows, -1):
            assert (row == expected(grammar, said, nodes, parents, node, {EOS[1], 4}, words)).all()
        assert state.jump_forward() == walked(grammar, said).jump_forward()
        for token in state.jump_forward():
            assert state.advance(token), "what is forced may come"


def expected(
    grammar: Automaton, said: list[int], nodes: list[int], parents: list[int], node: int, ends: set[int], words: Any
) -> Any:
    """A row of a draft, by walking to it from the beginning."""
    path: list[int] = []
    while node >= 0:
        path, node = [nodes[node], *path], parents[node]
    row = np.zeros(words.num_words, np.int32)
    state = walked(grammar, said)
    if not ends & set(path) and all(state.advance(token) for token in path):
        state.fill(row)
    return row


@settings(max_examples=100)
@given(pattern=expressions, moves=st.lists(st.integers(-3, 8), max_size=30))
def test_going_back_is_never_having_gone(pattern: str, moves: list[int]) -> None:
    """Negative moves take back so many tokens; others try a token."""
    assume(pattern)
    words = words_of([b"a", b"b", "é".encode(), "é".encode()[:1], "é".encode()[1:], b"ab"])
    grammar = compiled(pattern, words)
    assume(grammar is not None)
    assert grammar is not None
    state, said = grammar.start(), list[int]()
    for move in moves:
        if move < 0:
            back = min(-move, len(said))
            state.rollback(back)
            del said[len(said) - back :]
        elif state.advance(move):
            said.append(move)
        assert allowed(state, words) == allowed(walked(grammar, said), words)


# --- forced text ------------------------------------------------------------------------------------------------------

LETTERS = [bytes([c]) for c in b'abcdefghijklmnop{}":, 0123456789-']


@pytest.mark.parametrize(
    ("pattern", "forced"),
    [
        ("abc", ["ab", "c", None]),
        ("abc|abd", []),  # "abd" is a token as well: it may come instead of "ab"
        ("abe|abf", ["ab"]),
        ("ab*", []),  # "ab" may come instead of "a"
        ("a(bc)?", []),
        ("eb?", ["e"]),
        ("[ae]b", []),
        ("ké", ["k", "é", None]),
        ("k(é|è)", ["k"]),
    ],
)
def test_forced_text_is_split_as_the_tokenizer_does_and_stops_where_it_may_be_split_otherwise(
    pattern: str, forced: list[str | None]
) -> None:
    words = words_of([*LETTERS, b"ab", b"abd", "é".encode(), b"\xc3", b"\xa9", b"\xa8"])
    found = OutlinesBackend(words).compile(Structured.regex(pattern)).start().jump_forward()
    assert [None if token in EOS else words.tokens[token].decode() for token in found] == forced


def test_a_long_forced_text_is_split_in_parts() -> None:
    words = words_of([b"ab", b"a", b"b"])
    state = OutlinesBackend(words).compile(Structured.regex("(?:ab){600}b?")).start()
    assert state.jump_forward() == [3] * 256
    assert all(state.advance(token) for token in [3] * 590)
    assert state.jump_forward() == [3] * 10
    assert state.advance(4)
    assert state.jump_forward() == [5, *[3] * 9]


def test_the_end_comes_once_and_can_be_taken_back() -> None:
    words = words_of([b"a", b"b", b"ab"])
    state = OutlinesBackend(words).compile(Structured.choice(["ab"])).start()
    assert state.jump_forward() == [5, EOS[0]]
    assert not state.advance(EOS[0]), "nothing was said yet"
    assert state.advance(3)
    assert state.jump_forward() == [4, EOS[0]]
    assert state.advance(4)
    assert (state.jump_forward(), allowed(state, words)) == ([EOS[0]], set(EOS))
    assert state.advance(EOS[1])
    assert (state.jump_forward(), allowed(state, words)) == ([], set())
    assert not state.advance(EOS[0])
    assert not state.advance(3)
    state.rollback(2)
    assert state.jump_forward() == [4, EOS[0]]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "same_as"),
    [("^ab$", "ab"), (r"\Aab\z", "ab"), ("^a|b$", "a|b"), (r"[\^$]b", "[$^]b"), (r"a\$", "a[$]"), ("[]^]b", r"[\]^]b")],
)
def test_anchors_at_the_ends_say_what_holds_anyway(pattern: str, same_as: str) -> None:
    words = words_of([b"a", b"b", b"^", b"$", b"]"])
    found, other = compiled(pattern, words), compiled(same_as, words)
    assert found is not None and other is not None
    for said in itertools.product(range(3, 8), repeat=2):
        assert takes(found.start(), words, list(said)) == takes(other.start(), words, list(said))
        assert takes(found.start(), words, list(said[:1])) == takes(other.start(), words, list(said[:1]))


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(a$|ab)", r"\$ is only taken at the ends"),
        ("a(^b)", r"\^ is only taken"),
        (r"a\bb", "only taken"),
        ("(?=a)b", "look-ahead"),
        (r"(a)\1", "back references"),
        ("(", "cannot be read"),
        ("a)|(?:b", "closes a bracket"),
        ("[a", "cannot be read"),
        ("a{2", "cannot be read"),
        ("a{,2}", "cannot be read"),
        ("a\\", "cannot be read"),
        ("(?x)a # )", "flag x"),
        ("(?i-s:a)(?sx:b)", "flag x"),
        ("a[a&&b]", "never match"),
        ("c", "nothing fits"),
        (r"\x00", "nothing fits"),
        ("(a|b)*a(a|b){11}", "4098 states, whose tables take 4 MiB for this vocabulary; at most 4096 states and 64"),
    ],
)
def test_what_cannot_be_enforced_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(RefusedError, match=reason) as caught:
        OutlinesBackend(words_of([b"a", b"b"])).compile(Structured.regex(pattern))
    assert "\n" not in str(caught.value)


def test_a_choice_may_be_any_text_without_nul(backend: OutlinesBackend, words: Vocabulary) -> None:
    options = ["\n", "a\tb", '"q"', "back\\slash", "😀", "é|è", "a.b*", "\x01\x7f", " ", "\u2028"]
    state = backend.compile(Structured.choice(options)).start()
    assert [option for option in options if not takes(state, words, words.encode(option))] == []
    others = ["n", "a\\tb", "'q'", "backslash", "é", "aab", "\x01", "  ", "u2028", "\n\n"]
    assert [other for other in others if takes(state, words, words.encode(other))] == []
    with pytest.raises(RefusedError, match="NUL"):
        backend.compile(Structured.choice(["a", "a\0b"]))


def test_tables_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automaton, "MAX_BYTES", 5 * 4 * 257 - 1)
    backend = OutlinesBackend(words_of([b"a", b"b"]))
    assert backend.compile(Structured.regex("a")).num_bytes == 4 * 4 * 257
    with pytest.raises(RefusedError, match="5 states"):
        backend.compile(Structured.regex("ab"))


# --- JSON Schemas -----------------------------------------------------------------------------------------------------

FLAT: dict[str, Any] = {
    "type": "object",
    "title": "Order",
    "properties": {
        "name": {"type": "string", "description": "of whom"},
        "size": {"enum": ["S", "M", 3, None, "é\n\"\\"]},
        "paid": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    },
    "required": ["paid", "name", "size", "tags"],
    "additionalProperties": False,
}  # fmt: skip
SCHEMAS: list[Any] = [
    FLAT,
    {"type": "integer"},
    {"type": "string"},
    {"const": None},
    {"enum": [1, "1", True, 2.5], "type": ["integer", "string"]},
    {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 3},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 0, "maxItems": 0},
    {"type": "array", "items": {"const": "a"}, "minItems": 1, "maxItems": 1},
    {"type": "object", "additionalProperties": False},
]
scalars = st.none() | st.booleans() | st.integers(-3, 130) | st.sampled_from(["S", "1", "", 'é\n"\\', "a", 2.5])
values = (
    scalars
    | st.lists(scalars, max_size=4)
    | st.fixed_dictionaries(
        {"name": scalars, "size": scalars, "paid": st.booleans() | scalars, "tags": st.lists(scalars, max_size=3)},
        optional={"more": scalars},
    ).map(lambda value: {name: value[name] for name in (*FLAT["properties"], "more") if name in value})  # in order
    | st.just({})
    | st.builds(
        lambda name, size, tags: {"name": name, "size": size, "paid": True, "tags": tags},
        st.text("aé\t", max_size=3),
        st.sampled_from(["S", 3, None]),
        st.lists(st.integers(-2, 200), max_size=2),
    )
)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")
    tokenizer = Tokenizer(folder)
    return vocabulary(tokenizer, tokenizer.vocab_size)


@pytest.fixture(scope="module")
def backend(words: Vocabulary) -> OutlinesBackend:
    return OutlinesBackend(words)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:30])
@settings(max_examples=60)
@given(value=values)
def test_what_fits_a_schema_can_be_said_and_nothing_else(
    schema: Any, value: Any, backend: OutlinesBackend, words: Vocabulary
) -> None:
    state = backend.compile(Structured.json(schema)).start()
    text = json.dumps(value, ensure_ascii=False)
    assert takes(state, words, words.encode(text)) == jsonschema_rs.is_valid(schema, value)
    assert takes(state, words, words.encode(text + " ")) is False


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (True, "not an object"),
        ({}, "the type null"),
        ({"type": "number"}, 'the type "number"'),
        ({"type": ["string", "null"]}, "the type"),
        ({"type": "integer", "minimum": 0}, "minimum"),
        ({"type": "string", "maxLength": 3}, "maxLength"),
        ({"type": "integer", "enum": [1], "multipleOf": 2}, "multipleOf"),
        ({"type": "integer", "enum": ["a"]}, "nothing fits"),
        ({"enum": [1], "const": 1}, "both"),
        ({"enum": [[1]]}, "no scalars"),
        ({"const": float("inf")}, "no scalars"),
        ({"anyOf": [{"type": "null"}]}, "the type null"),
        ({"type": "array", "items": {"type": "null"}}, "without maxItems"),
        ({"type": "array", "maxItems": 2}, "items of the schema"),
        ({"type": "array", "items": {"type": "null"}, "minItems": 3, "maxItems": 2}, "nothing fits"),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 2, "uniqueItems": True}, "uniqueItems"),
        ({"type": "object"}, "additionalProperties: false"),
        ({"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False}, "required"),
        ({"type": "object", "required": [["a"]], "additionalProperties": False}, "required"),
        ({**FLAT, "minProperties": 1}, "minProperties"),
        ({**FLAT, "properties": {"n": {"type": "string", "format": "date"}}, "required": ["n"]}, "'n' has format"),
        ({"const": "a\0b"}, None),
    ],
)  # fmt: skip
def test_schemas_of_other_shapes_are_refused_by_name(schema: Any, reason: str | None, backend: OutlinesBackend) -> None:
    asked = Structured("json_schema", json.dumps(schema))
    if reason is None:
        assert backend.compile(asked).num_bytes, "NUL has an escape in JSON"
        return
    with pytest.raises(RefusedError, match=reason):
        backend.compile(asked)


@pytest.mark.parametrize("around", [{"type": "array", "maxItems": 1}, FLAT], ids=["arrays", "objects"])
def test_a_schema_of_any_depth_is_answered(around: Any, backend: OutlinesBackend) -> None:
    deep: Any = {"type": "null"}
    for _ in range(400):
        inner = {"items": deep} if around is not FLAT else {"properties": {"a": deep}, "required": ["a"]}
        deep = {**around, **inner}
    with pytest.raises(RefusedError, match="nested more than"):
        backend.compile(Structured.json(deep))


# --- the same as llguidance -------------------------------------------------------------------------------------------

ASKED = [
    Structured.regex(r"[0-9]{4}-(0[1-9]|1[0-2])"),
    Structured.regex(r"1(\.[0-9]+)?"),
    Structured.regex(r"yes|yes please|no+"),
    Structured.regex(r"(\w+ ){0,2}\w+[.!?]"),
    Structured.regex(r"(?i)the (end|other)\s?"),
    Structured.regex(r"[^a-m]{1,6}"),
    Structured.regex(r"(?s).{0,5}"),
    Structured.choice(["then", "the", "other", 'a "b"\n', "😀", "\t\\"]),
    Structured.json(FLAT),
]


def same(first: Grammar, second: Grammar, words: Vocabulary, seed: int) -> int:
    """Walk both together at random; returns how many masks were compared. Where text is forced llguidance's mask has
    one token of those that may come. NUL ends texts in our tables, and nothing else."""
    nul = {token for token, spelling in enumerate(words.tokens) if b"\0" in spelling}
    ours, theirs, chance, compared = first.start(), second.start(), random.Random(seed), 0
    for _ in range(12):
        may_come, others = allowed(ours, words), allowed(theirs, words) - nul
        if theirs.jump_forward():
            assert others <= may_come
        else:
            assert may_come == others
            compared += 1
        token = chance.choice(sorted(may_come))
        assert ours.advance(token)
        assert theirs.advance(token)
        if token in words.eos_ids:
            break
    return compared


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: asked.text[:20])
def test_masks_are_those_of_llguidance(asked: Structured, words: Vocabulary, backend: OutlinesBackend) -> None:
    grammars = backend.compile(asked), LlguidanceBackend(words).compile(asked)
    assert sum(same(*grammars, words, seed) for seed in range(60)) >= 30


def test_masks_are_those_of_llguidance_on_a_real_vocabulary(smollm2: Path) -> None:
    tokenizer = Tokenizer(smollm2)
    words = vocabulary(tokenizer, tokenizer.vocab_size + 40)
    first, second = OutlinesBackend(words), LlguidanceBackend(words)
    for asked in ASKED:
        grammars = first.compile(asked), second.compile(asked)
        assert sum(same(*grammars, words, seed) for seed in range(8)) >= 8, asked


def generated(folder: Path, backend: str, drafter: str, asked: Structured) -> list[list[int]]:
    config = EngineConfig(model=str(folder), dtype="float32", max_model_len=120, grammar_backend=backend)
    built = build(config)
    grammar = built.compiler.compile(asked)
    for i in range(4):
        params = SamplingParams(temperature=float(i % 2), seed=i, max_tokens=60, structured=asked)
        built.engine.add(Request(id=str(i), prompt_ids=[3 + i, 7], params=params, drafter=drafter), grammar)
    outputs: dict[str, list[int]] = {str(i): [] for i in range(4)}
    while built.engine.has_work:
        for event in built.engine.step():
            assert event.error is None
            outputs[event.request_id] += event.tokens
    return list(outputs.values())


@pytest.mark.parametrize("asked", [ASKED[3], ASKED[7]], ids=lambda asked: asked.kind)
def test_the_engine_generates_what_fits_with_drafts_or_without(asked: Structured, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama", seed=3)
    tokenizer = Tokenizer(folder)
    plain = generated(folder, "outlines", "none", asked)
    assert generated(folder, "outlines", "grammar", asked) == plain
    ended = [tokens for tokens in plain if tokens[-1] in tokenizer.eos_ids]
    for tokens in ended:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        assert text in json.loads(asked.text) if asked.kind == "choice" else re.fullmatch(asked.text, text)
    assert ended, "none ended within its limit"


def test_a_token_into_a_dead_end_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can finish é here: its second byte is no token. A planted fault that forgets so lets it begin."""
    words = words_of([b"\xc3", b"b"])
    asked = Structured.regex("é|b")
    assert allowed(OutlinesBackend(words).compile(asked).start(), words) == {4}
    monkeypatch.setattr(automaton, "_alive", lambda accepting, sources: np.ones_like(accepting))
    assert allowed(OutlinesBackend(words).compile(asked).start(), words) == {3, 4}
