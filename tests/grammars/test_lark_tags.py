"""Structural tags in llguidance: free text, triggers and calls, token by token; control tokens; and the same texts as
xgrammar takes, where that is installed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer as Backend

from specserve.grammars.llguidance import LlguidanceBackend
from specserve.registry import GRAMMARS
from specserve.structured.base import Grammar, RefusedError, Vocabulary
from specserve.structured.spec import Structured
from specserve.structured.vocabulary import vocabulary
from specserve.testing import write_tiny_model
from specserve.text.tokenizer import Tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
TIME = {
    "type": "object",
    "properties": {"zone": {"enum": ["utc", "cet"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
ANY = {"type": "any_text"}
OPEN, CLOSE = "<|start|>", "<|pad|>"  # control tokens of the tiny model that do not end a text


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")
    tokenizer = Tokenizer(folder)
    return vocabulary(tokenizer, tokenizer.vocab_size)


@pytest.fixture(scope="module")
def backend(words: Vocabulary) -> LlguidanceBackend:
    return LlguidanceBackend(words)


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def digit(begin: str, end: Any = "</t>") -> dict[str, Any]:
    return tag(begin, {"type": "regex", "pattern": "[0-9]"}, end)


def json_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


def calls(begin: str = "<tool_call>", end: str = "</tool_call>", **options: bool) -> dict[str, Any]:
    """Calls of two tools as Hermes and Qwen write them."""
    tags = [
        tag(f'{begin}\n{{"name": "{name}", "arguments": ', json_of(schema), f"}}\n{end}")
        for name, schema in (("weather", CITY), ("time", TIME))
    ]
    return {"type": "triggered_tags", "triggers": [begin], "tags": tags, **options}


def weather(city: str = "Rome", begin: str = "<tool_call>", end: str = "</tool_call>") -> str:
    return f'{begin}\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n{end}'


def clock(begin: str = "<tool_call>", end: str = "</tool_call>") -> str:
    return f'{begin}\n{{"name": "time", "arguments": {{"zone": "utc"}}}}\n{end}'


def compiled(backend: LlguidanceBackend, value: Any) -> Grammar:
    return backend.compile(Structured.structural_tag({"type": "structural_tag", "format": value}))


def ids_of(words: Vocabulary, text: str) -> list[int]:
    """As a tokenizer reads a template: what spells a control token is one."""
    pieces = re.split("(" + "|".join(map(re.escape, words.controls)) + ")", text)
    return [
        token
        for piece in pieces
        for token in ([words.controls[piece]] if piece in words.controls else words.encode(piece))
    ]


def walked(grammar: Grammar, words: Vocabulary, ids: list[int]) -> tuple[int, bool]:
    """How many of the tokens may come one after the other, and whether the text may end behind them."""
    state, taken = grammar.start(), 0
    for token in ids:
        if not state.advance(token):
            break
        taken += 1
    row = np.zeros(words.num_words, np.int32)
    state.fill(row)
    bits = set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
    return taken, words.eos_ids[0] in bits


def takes(grammar: Grammar, words: Vocabulary, text: str) -> bool:
    """Whether it may be said from its beginning to its end; what spells a control token is one."""
    ids = ids_of(words, text)
    return walked(grammar, words, ids) == (len(ids), True)


def jump_forward(grammar: Grammar, words: Vocabulary, text: str) -> str:
    """What must come behind a text."""
    state = grammar.start()
    for token in ids_of(words, text):
        assert state.advance(token)
    spelled = {token: spelling.encode() for spelling, token in words.controls.items()}
    return b"".join(spelled.get(token, words.tokens[token]) for token in state.jump_forward()).decode()


def test_a_file_with_an_underscore_is_no_backend() -> None:
    assert "llguidance" in GRAMMARS.names()
    assert not any(name.startswith("_") for name in GRAMMARS.names())


def test_control_tokens_have_spellings(words: Vocabulary) -> None:
    assert words.controls[OPEN] == ids_of(words, OPEN)[0]
    assert all(words.tokens[token] == b"" for token in words.controls.values())


@pytest.mark.parametrize(("begin", "end"), [("<tool_call>", "</tool_call>"), (OPEN, CLOSE)])
def test_calls_in_free_text(backend: LlguidanceBackend, words: Vocabulary, begin: str, end: str) -> None:
    """As text and as control tokens: text before, between and after calls, several calls, none, and no other call."""
    grammar = compiled(backend, calls(begin, end))
    first, second = weather(begin=begin, end=end), clock(begin, end)
    good = ["", "no call", first, f"Let me look. {first}", first + second, f"{first} and {second}\nDone.", "<tool"]
    bad = [
        begin,
        f"x {begin}",
        f"x {begin}y",
        f"{first}{begin}",
        first.removesuffix(end),
        first.replace("weather", "other"),
        first.replace("Rome", "a name that is too long"),
        first.replace("city", "zone"),
        second.replace("utc", "xyz"),
        first.replace("\n", " "),
    ]
    assert [text for text in good if not takes(grammar, words, text)] == []
    assert [text for text in bad if takes(grammar, words, text)] == []


def test_a_trigger_that_is_a_control_token_works_as_text_too(backend: LlguidanceBackend, words: Vocabulary) -> None:
    """Spelled in other tokens it begins a call all the same: whoever reads the text sees no difference. Inside the call
    only the token will do."""
    grammar = compiled(backend, calls(OPEN, CLOSE))
    spelled = [words.tokens.index(bytes([byte])) for byte in OPEN.encode()]
    assert walked(grammar, words, [*ids_of(words, "a "), *spelled]) == (2 + len(spelled), False)
    assert walked(grammar, words, [*spelled, *ids_of(words, " b")])[0] == len(spelled)
    rest = weather(begin="", end=CLOSE)
    assert walked(grammar, words, [*spelled, *ids_of(words, rest)]) == (len(spelled) + len(ids_of(words, rest)), True)
    open_call = ids_of(words, weather(begin=OPEN, end=""))
    closing = [words.tokens.index(bytes([byte])) for byte in CLOSE.encode()]
    assert walked(grammar, words, [*open_call, *closing])[0] == len(open_call)


def test_a_trigger_that_is_one_token_of_text(tmp_path: Path) -> None:
    """As in Qwen: the token is text, and what is forced is the token."""
    folder = write_tiny_model(tmp_path, "llama", vocab_size=295)
    tokens = Backend.from_file(str(folder / "tokenizer.json"))
    tokens.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>")])
    tokens.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder)
    own = vocabulary(tokenizer, 295)
    backend = LlguidanceBackend(own)
    assert (
        compiled(backend, calls(at_least_one=True)).start().jump_forward()[0] == tokenizer.added_tokens["<tool_call>"]
    )
    free = compiled(backend, calls())
    ids = tokenizer.encode(f"a {weather()} b {clock()}", add_special_tokens=False)
    assert tokenizer.added_tokens["<tool_call>"] in ids
    assert walked(free, own, ids) == (len(ids), True)
    spelled = [own.tokens.index(bytes([byte])) for byte in b"a <tool_call>x"]
    assert walked(free, own, spelled)[0] == len(spelled) - 1


def test_free_text_has_no_other_control_token(backend: LlguidanceBackend, words: Vocabulary) -> None:
    grammar = compiled(backend, calls(OPEN, CLOSE))
    row = np.zeros(words.num_words, np.int32)
    grammar.start().fill(row)
    bits = set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
    assert bits & set(words.controls.values()) == {words.controls[OPEN], *words.eos_ids}


@pytest.mark.parametrize(("begin", "end"), [("<tool_call>", "</tool_call>"), (OPEN, CLOSE)])
def test_what_calls_have_in_common_is_forced(
    backend: LlguidanceBackend, words: Vocabulary, begin: str, end: str
) -> None:
    required = compiled(backend, calls(begin, end, at_least_one=True))
    assert jump_forward(required, words, "") == f'{begin}\n{{"name": "'
    free = compiled(backend, calls(begin, end))
    assert jump_forward(free, words, "Hello") == ""
    assert jump_forward(free, words, f"Hello {begin}") == '\n{"name": "'
    assert jump_forward(free, words, f'Hello {begin}\n{{"name": "w') == 'eather", "arguments": {"city": '
    assert jump_forward(free, words, weather("x", begin, end).removesuffix(f"}}}}\n{end}")) == f"}}}}\n{end}"


def test_at_least_one_comes_first(backend: LlguidanceBackend, words: Vocabulary) -> None:
    grammar = compiled(backend, calls(at_least_one=True))
    assert [takes(grammar, words, text) for text in ("", "x", "x" + weather())] == [False, False, False]
    assert all(takes(grammar, words, text) for text in (weather(), weather() + " x " + clock(), weather() + clock()))


def test_nothing_follows_the_first(backend: LlguidanceBackend, words: Vocabulary) -> None:
    grammar = compiled(backend, calls(stop_after_first=True))
    assert all(takes(grammar, words, text) for text in ("", "x", weather(), "x" + clock()))
    assert not any(takes(grammar, words, text) for text in (weather() + " ", weather() + clock()))
    one = compiled(backend, calls(at_least_one=True, stop_after_first=True))
    assert takes(one, words, clock())
    assert jump_forward(one, words, clock()) == "<|end|>"
    assert not any(takes(one, words, text) for text in ("", "x", "x" + clock(), clock() + "x"))


def test_calls_of_mistral_and_llama(backend: LlguidanceBackend, words: Vocabulary) -> None:
    """A control token before and one inside the call, and no end; a call that is all of the answer."""
    tags = [tag(f"{OPEN}{name}{CLOSE}", json_of(schema), "") for name, schema in (("weather", CITY), ("time", TIME))]
    grammar = compiled(backend, {"type": "triggered_tags", "triggers": [OPEN], "tags": tags, "at_least_one": True})
    call = f'{OPEN}weather{CLOSE}{{"city": "Rome"}}'
    assert all(takes(grammar, words, text) for text in (call, call + call, f'{call}{OPEN}time{CLOSE}{{"zone": "cet"}}'))
    assert not any(takes(grammar, words, text) for text in ("", call + OPEN, call.replace(CLOSE, ""), call + CLOSE))
    assert jump_forward(grammar, words, OPEN + "w") == f'eather{CLOSE}{{"city": '
    whole = [tag(f'{{"name": "{name}", "parameters": ', json_of(schema), "}") for name, schema in (("w", CITY),)]
    llama = compiled(backend, {"type": "tags_with_separator", "tags": whole, "separator": "; ", "at_least_one": True})
    one = '{"name": "w", "parameters": {"city": "x"}}'
    assert [takes(llama, words, text) for text in (one, f"{one}; {one}", "", one + one)] == [True, True, False, False]


def test_the_older_form(backend: LlguidanceBackend, words: Vocabulary) -> None:
    asked = {
        "type": "structural_tag",
        "structures": [{"begin": "<f=w>", "schema": CITY, "end": "</f>"}],
        "triggers": ["<f="],
    }
    grammar = backend.compile(Structured.structural_tag(asked))
    assert takes(grammar, words, 'a <f=w>{"city": "Rome"}</f> b')
    assert not takes(grammar, words, 'a <f=x>{"city": "Rome"}</f> b')


# Formats without control tokens, and texts: for both backends alike.
SAME: list[tuple[Any, list[str]]] = [
    (tag("<a>", ANY, "</a>"), ["<a>x</a>", "<a>x</a>y", "<a></a></a>", "<a>x", "x", "<a>é\n</a>"]),
    (tag("<a>", {**ANY, "excludes": ["b/d"]}, "</a>"), ["<a>b/</a>", "<a>b/d</a>", "<a>b/dx"]),
    (tag("", ANY, ["</a>", "</b>"]), ["x</a>", "x</b>", "</a></b>", "x"]),
    (
        tag("<a>", {"type": "sequence", "elements": [{"type": "const_string", "value": "q"}, ANY]}, ["</a>", "</b>"]),
        ["<a>qx</b>", "<a>x</a>", "<a>q</a>"],
    ),
    (
        tag("<a>", {"type": "sequence", "elements": [ANY, {"type": "const_string", "value": "ab"}]}, ["b", "!"]),
        ["<a>xabb", "<a>aab!", "<a>bxabb", "<a>x!abb", "<a>ab"],
    ),
    ({**ANY, "excludes": ["ab", "x"]}, ["a", "ab", "cx", "", "ba"]),
    (
        {"type": "sequence", "elements": [{"type": "regex", "pattern": "a*"}, {"type": "const_string", "value": "ab"}]},
        ["aaab", "ab", "b", "aaa", "abb"],
    ),
    ({"type": "const_string", "value": 'a\x00\r"\\\u2028é😀\x7f'}, ['a\x00\r"\\\u2028é😀\x7f', "a", ""]),
    ({"type": "grammar", "grammar": 'root ::= "a" root | "b"'}, ["aab", "b", "a", "ba"]),
    ({"type": "or", "elements": [json_of(CITY), {"type": "const_string", "value": "none"}]}, ["none", '{"city": ""}']),
    (
        tag("(", {"type": "or", "elements": [json_of(True), {"type": "const_string", "value": "-"}]}, ")"),
        ["(-)", "([1, null])", "()", "({)", "(-"],
    ),
    (
        {"type": "triggered_tags", "triggers": ["<t", "<x"], "tags": [digit("<t>"), digit("<x>", ["</x>", "!"])]},
        ["a<x>1!b<t>1</t>", "<x", "<x>1", "<x>1</x>!"],
    ),
    (
        {"type": "triggered_tags", "triggers": ["<t>"], "tags": [digit("<t>a"), digit("<t>ab")], "excludes": ["<u"]},
        ["<t>a1</t>x<t>ab1</t>", "<u", "a<u>"],
    ),
    ({"type": "triggered_tags", "triggers": ["<t>"], "tags": [digit("<t>")], "at_least_one": True}, ["a<t>1</t>"]),
    ({"type": "triggered_tags", "triggers": ["<t>"], "tags": [digit("<t>")], "stop_after_first": True}, ["<t>1</t>"]),
    ({"type": "tags_with_separator", "tags": [digit("<t>"), digit("<")], "separator": ","}, ["<t>1</t>,<1</t>", ","]),
    (
        {"type": "tags_with_separator", "tags": [digit("<t>")], "separator": "", "at_least_one": True},
        ["<t>1</t>", "<t>1</t><t>1</t>"],
    ),
    (
        {
            "type": "sequence",
            "elements": [
                tag("<a>", ANY, "</a>"),
                {"type": "triggered_tags", "triggers": ["<t>"], "tags": [digit("<t>")], "at_least_one": True},
            ],
        },
        ["<a>x</a><t>1</t>y<t>2</t>", "<a></a>y", "<a></a><t>"],
    ),
]
texts = st.lists(
    st.sampled_from(["a", "b", "<", "<t>", "<a>", "</a>", "1", "</t>", "<t>1</t>", ",", "END", "<x>1!", "(", ")", '"']),
    max_size=7,
).map("".join)


@pytest.mark.parametrize("number", range(len(SAME)), ids=lambda number: json.dumps(SAME[number][0])[:50])
@settings(max_examples=25)
@given(text=texts)
def test_xgrammar_takes_the_same_texts(
    number: int, text: str, backend: LlguidanceBackend, words: Vocabulary, xgrammars: Any
) -> None:
    value, examples = SAME[number]
    grammar, other = compiled_once(backend, number), xgrammars(json.dumps(value))
    for each in (text, *examples):
        ids = ids_of(words, each)
        assert walked(grammar, words, ids) == other(ids), (value, each)


@cache
def compiled_once(backend: LlguidanceBackend, number: int) -> Grammar:
    return compiled(backend, SAME[number][0])


@pytest.fixture(scope="module")
def xgrammars(words: Vocabulary) -> Any:
    """For a format as JSON: what `walked` says by xgrammar."""
    xgrammar = pytest.importorskip("xgrammar")
    info = xgrammar.TokenizerInfo(
        list(words.tokens), xgrammar.VocabType.RAW, vocab_size=words.size, stop_token_ids=list(words.eos_ids)
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    @cache
    def of(value: str) -> Any:
        grammar = compiler.compile_structural_tag({"type": "structural_tag", "format": json.loads(value)})

        def judge(ids: list[int]) -> tuple[int, bool]:
            matcher, taken = xgrammar.GrammarMatcher(grammar), 0
            for token in ids:
                if not matcher.accept_token(token):
                    break
                taken += 1
            return taken, matcher.is_completed()

        return judge

    return of


leaves = st.sampled_from(
    [
        ANY,
        {**ANY, "excludes": ["b"]},
        {"type": "const_string", "value": "ab"},
        {"type": "const_string", "value": "<"},
        {"type": "regex", "pattern": "a*"},
        {"type": "regex", "pattern": "[ab1]+"},
        {"type": "regex", "pattern": ".*"},
        json_of({"type": "integer"}),
        json_of({"enum": ["a", "</t>", 1]}),
        {"type": "grammar", "grammar": 'root ::= "a" root "b" | "1"'},
    ]
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    ends = st.sampled_from(["</t>", "b", ["</t>", "!"], ""])
    tags = st.lists(st.builds(tag, st.sampled_from(["<t>", "<t1>", "<ta"]), inner, ends), min_size=1, max_size=2)
    flags = {"at_least_one": st.booleans(), "stop_after_first": st.booleans()}
    return st.one_of(
        st.fixed_dictionaries({"type": st.sampled_from(["sequence", "or"]), "elements": several}),
        st.builds(tag, st.sampled_from(["<t>", "a", ""]), inner, ends),
        st.fixed_dictionaries({"type": st.just("triggered_tags"), "triggers": st.just(["<t"]), "tags": tags, **flags}),
        st.fixed_dictionaries(
            {"type": st.just("tags_with_separator"), "tags": tags, "separator": st.sampled_from([",", ""]), **flags}
        ),
    )


@settings(max_examples=150)
@given(value=st.recursive(leaves, nested, max_leaves=4), seed=st.integers(0, 2**32))
def test_what_is_said_under_any_tags_is_what_xgrammar_takes(
    value: Any, seed: int, backend: LlguidanceBackend, words: Vocabulary, xgrammars: Any
) -> None:
    """Walks under the mask alone never find themselves without a way on, and where they end xgrammar would, too."""
    try:
        grammar = compiled(backend, value)
    except RefusedError:
        return
    try:
        judge = xgrammars(json.dumps(value))
    except RuntimeError:  # it takes no tag with an empty end around what may go on
        return
    for ids in strolls(grammar, words, seed):
        said = b"".join(words.tokens[token] for token in ids)
        assert judge(ids) == (len(ids), True), (value, said)


def strolls(grammar: Grammar, words: Vocabulary, seed: int) -> Iterator[list[int]]:
    """Texts that were ended where they may end."""
    noise = np.random.default_rng(seed)
    liked = [words.tokens.index(character.encode()) for character in 'ab1<t>/,!"']
    for _ in range(8):
        state, ids = grammar.start(), list[int]()
        for _ in range(30):
            row = np.zeros(words.num_words, np.int32)
            state.fill(row)
            bits = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            assert len(bits), "a dead end"
            may_end = words.eos_ids[0] in bits
            if may_end and noise.random() < 0.3:
                yield ids
                break
            going_on = np.setdiff1d(bits, words.eos_ids)
            if not len(going_on):
                yield ids
                break
            common = np.intersect1d(going_on, liked)
            ids.append(int(noise.choice(common if len(common) else going_on)))
            assert state.advance(ids[-1])


def test_free_text_ends_where_its_end_comes_first(backend: LlguidanceBackend, words: Vocabulary) -> None:
    """Less than a grammar without a lexer would take, and never more."""
    both = compiled(backend, {"type": "sequence", "elements": [ANY, {"type": "const_string", "value": "END"}]})
    assert takes(both, words, "aEND")
    assert not takes(both, words, "aENDbEND")
    pattern = compiled(backend, tag("<a>", {"type": "regex", "pattern": ".*"}, "</a>"))
    assert takes(pattern, words, "<a>x</a>")
    assert not takes(pattern, words, "<a>x</a></a>")


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (tag("<a>", ANY, ""), "any_text can stand last"),
        ({"type": "sequence", "elements": [ANY, json_of(CITY)]}, "any_text can stand last"),
        (tag("<a>", {"type": "or", "elements": [ANY, json_of(CITY)]}, "b"), "any_text can stand last"),
        (tag("<a>", calls(), "</a>"), "text may follow triggered_tags"),
        (
            {"type": "triggered_tags", "triggers": ["<t>", "t>"], "tags": [digit("<t>"), digit("t>")]},
            "'t>' is inside another one, '<t>'",
        ),
        (
            {"type": "triggered_tags", "triggers": ["a" + OPEN], "tags": [digit("a" + OPEN)]},
            "must begin with its control token",
        ),
        (tag("<a>", ANY, [OPEN, "x"]), "control token can have no other end"),
        (digit("<a>", ["", "x"]), "can have no other end"),
        (digit("<a>", "<|end|>"), "'<|end|>' ends the output"),
        (tag("<a>", json_of({"not": {}}), "b"), "not"),
        (tag("<a>", json_of({"multipleOf": 5000}), "b"), "multipleOf"),
        (tag("<a>", {"type": "regex", "pattern": "(?=a)b"}, "b"), "in the tag '<a>': "),
        (tag("<a>", {"type": "regex", "pattern": "((a{100}){100}){100}"}, "b"), "in the tag '<a>': "),
        (tag("<a>", json_of({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "b"), "in the tag '<a>': "),
        (
            {
                "type": "triggered_tags",
                "triggers": ["<t"],
                "tags": [digit("<t>"), tag("<ta>", json_of({"type": 3}), "b")],
            },
            "in the tag '<ta>': ",
        ),
        ({"type": "sequence", "elements": [{"type": "regex", "pattern": "a"}] * 33}, "more than 32"),
        ({"type": "or", "elements": [{**ANY, "excludes": [str(i)]} for i in range(10)]}, "different lists of excludes"),
        (tag("<a>", {"type": "grammar", "grammar": 'start: "a"'}, "b"), "in the tag"),
        (tag("<a>", {"type": "grammar", "grammar": "root ::= missing"}, "b"), "missing"),
        (
            tag(
                "<a>",
                {"type": "grammar", "grammar": "\n".join(["root ::= r1", *(f'r{i} ::= "a"' for i in range(1, 1100))])},
                "b",
            ),
            "rules",
        ),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_cannot_be_enforced_is_refused(value: Any, part: str, backend: LlguidanceBackend) -> None:
    with pytest.raises(RefusedError) as caught:
        compiled(backend, value)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_schema_inside_sets_no_options(backend: LlguidanceBackend, words: Vocabulary) -> None:
    sly = {**CITY, "x-guidance": {"whitespace_flexible": True, "lenient": True}}
    grammar = compiled(backend, tag("", json_of(sly), "!"))
    assert takes(grammar, words, '{"city": "x"}!')
    assert not takes(grammar, words, '{ "city" : "x" }!')
    with pytest.raises(RefusedError, match="not"):
        compiled(backend, tag("", json_of({**sly, "not": {"required": ["city"]}}), "!"))


def test_a_hundred_tools(backend: LlguidanceBackend, words: Vocabulary) -> None:
    tags = [tag(f"<f={i}>", json_of({**CITY, "title": str(i)}), "</f>") for i in range(128)]
    grammar = compiled(backend, {"type": "triggered_tags", "triggers": ["<f="], "tags": tags})
    assert takes(grammar, words, 'a<f=127>{"city": "x"}</f>b<f=12>{"city": "x"}</f>')
    assert not takes(grammar, words, 'a<f=128>{"city": "x"}</f>')


def test_walking_leaves_no_trace(backend: LlguidanceBackend, words: Vocabulary) -> None:
    state = compiled(backend, calls(OPEN, CLOSE)).start()
    ids = ids_of(words, f"ab{weather(begin=OPEN, end=CLOSE)}c{clock(OPEN, CLOSE)}")
    rows = []
    for token in ids:
        row = np.zeros(words.num_words, np.int32)
        state.fill(row)
        rows.append(row)
        assert state.advance(token)
    for row in reversed(rows):
        state.rollback(1)
        again = np.zeros(words.num_words, np.int32)
        state.fill(again)
        assert (again == row).all()
