"""Every name by which a client can say what the answer must be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specserve.errors import InputError
from specserve.server.wire.fields import Limits
from specserve.server.wire.openai.requests import ChatCompletionRequest, CompletionRequest, checked
from specserve.structured.spec import Structured

LIMITS = Limits(vocab_size=1000, max_model_len=64)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON = Structured.json(SCHEMA)
TAG = {"format": {"type": "const_string", "value": "a"}}
MADE_OF_TAG = Structured.structural_tag({"type": "structural_tag", **TAG})
EBNF, LARK = 'root ::= "a"', 'start: "a"'

SAID: list[tuple[dict[str, Any], str, Structured]] = [
    ({"response_format": {"type": "json_object"}}, "response_format", Structured.json_object()),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format", JSON),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
        "response_format",
        JSON,
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
        "response_format",
        Structured.json(True),
    ),
    ({"response_format": {"type": "structural_tag", **TAG}}, "response_format", MADE_OF_TAG),
    ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs", JSON),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "structured_outputs", Structured.json(json.dumps(SCHEMA))),
    ({"structured_outputs": {"json_object": True}}, "structured_outputs", Structured.json_object()),
    (
        {"structured_outputs": {"regex": "a+", "disable_any_whitespace": True}},
        "structured_outputs",
        Structured.regex("a+"),
    ),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs", Structured.choice(["a", "b"])),
    ({"structured_outputs": {"grammar": EBNF}}, "structured_outputs", Structured.grammar(EBNF, "ebnf")),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, "structured_outputs", MADE_OF_TAG),
    ({"guided_json": SCHEMA}, "guided_json", JSON),
    ({"guided_regex": "a+"}, "guided_regex", Structured.regex("a+")),
    ({"guided_choice": ["a"]}, "guided_choice", Structured.choice(["a"])),
    ({"guided_grammar": LARK}, "guided_grammar", Structured.grammar(LARK)),
    ({"json_schema": SCHEMA}, "json_schema", JSON),
    ({"regex": "a+"}, "regex", Structured.regex("a+")),
    ({"ebnf": EBNF}, "ebnf", Structured.grammar(EBNF, "ebnf")),
    ({"grammar": EBNF}, "grammar", Structured.grammar(EBNF, "ebnf")),
    ({"structural_tag": TAG}, "structural_tag", MADE_OF_TAG),
]


def chat(**fields: Any) -> ChatCompletionRequest:
    return checked(ChatCompletionRequest, {"messages": [{"role": "user", "content": "a"}], **fields}, LIMITS)


def completion(**fields: Any) -> CompletionRequest:
    return checked(CompletionRequest, {"prompt": "a", **fields}, LIMITS)


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(("fields", "name", "expected"), SAID, ids=lambda value: ascii(value)[:50])
def test_every_name_says_the_same(make: Any, fields: dict[str, Any], name: str, expected: Structured) -> None:
    asked = make(**fields)
    assert asked.constraint == (name, expected)
    assert asked.sampling_params.structured == expected
    assert asked.ignored(LIMITS) == []


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(
    "fields", [{}, {"response_format": None}, {"response_format": {"type": "text"}}, {"regex": None}]
)
def test_free_text(make: Any, fields: dict[str, Any]) -> None:
    asked = make(**fields)
    assert (asked.constraint, asked.sampling_params.structured) == (None, None)


def test_text_goes_with_a_constraint() -> None:
    assert chat(response_format={"type": "text"}, regex="a").structured == Structured.regex("a")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": "json"}, "response_format", 'is "json"; it must be an object whose type is "text"'),
        ({"response_format": {"type": "xml"}}, "response_format", "it must be an object whose type is"),
        ({"response_format": {"type": ["text"]}}, "response_format", "it must be an object whose type is"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format", "has schema, which is not known"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "has no schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format",
            "has no schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strct": True}}},
            "response_format",
            "has json_schema.strct, which is not known",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format",
            "json_schema.schema is 5; it must be a JSON Schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "says nothing"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "says nothing"),
        ({"structured_outputs": {"json": {}, "choice": ["a"]}}, "structured_outputs", "says json and choice"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "is not known"),
        ({"guided_choice": []}, "guided_choice", "it must be a list of 1 to 4096 texts"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "is empty"),
        ({"guided_choice": ["a", 1]}, "guided_choice", "no text"),
        ({"guided_regex": ""}, "guided_regex", "it must be a regular expression as text"),
        ({"regex": 5}, "regex", "it must be a regular expression as text"),
        ({"regex": "a" * 2**21}, "regex", "at most 1048576 are taken"),
        ({"ebnf": {}}, "ebnf", "it must be a grammar as text"),
        ({"json_schema": "{"}, "json_schema", "is refused: the schema is no JSON"),
        ({"json_schema": 5}, "json_schema", "it must be a JSON Schema"),
        ({"structural_tag": "{"}, "structural_tag", "is no JSON"),
        ({"structural_tag": [1]}, "structural_tag", "it must be a structural tag"),
        ({"guided_json": {}, "regex": "a"}, "regex", "regex and guided_json both say what the answer must be"),
        ({"response_format": {"type": "json_object"}, "ebnf": "a"}, "ebnf", "ebnf and response_format both say"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos", "structured output ends where its grammar does"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_refused(fields: dict[str, Any], param: str, message: str) -> None:
    for make in (chat, completion):
        with pytest.raises(InputError) as caught:
            make(**fields)
        assert caught.value.param == param
        assert message in str(caught.value)
        assert len(str(caught.value)) < 400
