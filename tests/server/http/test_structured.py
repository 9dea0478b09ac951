"""Structured output and tools that must be called, over HTTP: what clients say becomes what they get."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from specserve.testing import write_tiny_model

USER = [{"role": "user", "content": "Hello there"}]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "old": {"type": "boolean"}, "legs": {"enum": [2, 4]}},
    "required": ["kind", "old", "legs"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
CHAT = {"messages": USER, "max_tokens": 120, "temperature": 0}
TOOLS = [
    {"type": "function", "function": {"name": "feed", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
FEED = {"type": "function", "function": {"name": "feed"}}

SAYING: list[tuple[dict[str, Any], str]] = [
    ({"response_format": NAMED}, r"\{.*\}"),
    ({"structured_outputs": {"json": SCHEMA}}, r"\{.*\}"),
    ({"guided_json": SCHEMA}, r"\{.*\}"),
    ({"guided_choice": ["red", "blue\n"]}, "red|blue\n"),
    ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
    ({"guided_grammar": 'start: "a" | "b"'}, "[ab]"),
    ({"regex": "x{7}"}, "x{7}"),
    ({"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "ab"}}}, "ab"),
]


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory, serving_process: Any) -> Iterator[Any]:
    """A server whose context holds tools told of in words."""
    folder = write_tiny_model(tmp_path_factory.mktemp("roomy"), "llama", max_position_embeddings=2048)
    room = {"max-model-len": 2048}
    with serving_process(folder, tmp_path_factory.mktemp("served"), "--served-model-name=tiny", **room) as served:
        yield served


def is_pet(text: str) -> bool:
    return jsonschema_rs.is_valid(SCHEMA, json.loads(text))


@pytest.mark.parametrize(("fields", "pattern"), SAYING, ids=lambda value: str(value)[:30])
def test_answers_fit(server: Any, fields: dict[str, Any], pattern: str) -> None:
    chat = server.post("/v1/chat/completions", {**CHAT, **fields}).json["choices"][0]
    assert chat["finish_reason"] == "stop"
    assert re.fullmatch(pattern, chat["message"]["content"])
    asked = {"prompt": ["a", "b"], "max_tokens": 120, "temperature": 1, "seed": 5, "n": 2, **fields}
    whole = server.post("/v1/completions", asked).json["choices"]
    assert [choice["finish_reason"] for choice in whole] == ["stop"] * 4
    assert all(re.fullmatch(pattern, choice["text"]) for choice in whole)
    events = server.post("/v1/completions", {**asked, "stream": True}).events[:-1]
    texts = ["", "", "", ""]
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole]


@pytest.mark.parametrize("temperature", [0, 1])
def test_drafters_change_nothing(server: Any, temperature: float) -> None:
    asked = {**CHAT, "response_format": NAMED, "temperature": temperature, "seed": 3, "return_token_ids": True}

    def said(drafter: str) -> Any:
        return server.post("/v1/chat/completions", {**asked, "speculative": {"drafter": drafter}}).json["choices"][0]

    plain = said("none")
    assert is_pet(plain["message"]["content"])
    for drafter in ("ngram", "grammar", "prediction"):
        assert said(drafter) == plain, drafter


def test_other_apis_say_it_in_their_words(server: Any) -> None:
    flat = {"type": "json_schema", "name": "pet", "schema": SCHEMA}
    asked = {"input": "Hi", "max_output_tokens": 120, "temperature": 0, "text": {"format": flat}}
    whole = server.post("/v1/responses", asked).json
    assert is_pet(whole["output"][0]["content"][0]["text"])
    assert whole["text"]["format"] == flat
    message = {"messages": USER, "max_tokens": 120, "temperature": 0}
    format = {"type": "json_schema", "schema": SCHEMA}
    for fields in ({"output_config": {"format": format}}, {"output_format": format}):
        assert is_pet(server.post("/v1/messages", {**message, **fields}).json["content"][0]["text"])


def test_what_cannot_be_enforced_is_refused_by_its_field(server: Any) -> None:
    wrong = {"type": "object", "unevaluatedProperties": False, "$dynamicRef": "#a"}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": wrong}}
    for fields, param in (
        ({"response_format": schema}, "response_format"),
        ({"guided_json": wrong}, "guided_json"),
        ({"structured_outputs": {"json": wrong}}, "structured_outputs"),
        ({"regex": "a(?=b)"}, "regex"),
        ({"grammar": "start: nothing"}, "grammar"),
    ):
        for _ in range(2):  # the second is told from memory
            reply = server.post("/v1/chat/completions", {**CHAT, **fields})
            assert (reply.status, reply.error["param"]) == (400, param)
            assert reply.error["message"].startswith(f"{param}: ")
    reply = server.post("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", "schema": wrong}}})
    assert (reply.status, reply.error["param"]) == (400, "text.format")
    assert reply.error["message"].startswith("text.format: ")


NOTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "where": {"enum": ["/a"], "format": "path"},
        "what": {"type": "string", "format": "topic", "maxLength": 4},
        "day": {"type": "string", "format": "date"},
    },
    "required": ["where", "what", "day"],
    "additionalProperties": False,
}
_NOTES = ("format.path", "format.topic")


def is_noted(text: str) -> bool:
    return jsonschema_rs.is_valid(NOTED, json.loads(text), validate_formats=True)


@pytest.mark.parametrize("stream", [False, True])
def test_formats_that_the_standard_does_not_know_are_annotations(roomy: Any, stream: bool) -> None:
    """Taken, and named in a header; those that it knows are enforced beside them."""
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": NOTED}}
    reply = roomy.post("/v1/chat/completions", {**CHAT, "response_format": schema, "sparkle": 1, "stream": stream})
    assert reply.status == 200
    assert reply.headers["x-specserve-ignored"].split(",") == ["sparkle", *_NOTES]
    if not stream:
        assert is_noted(reply.json["choices"][0]["message"]["content"])
    reply = roomy.post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 99, "guided_json": NOTED})
    assert reply.headers["x-specserve-ignored"].split(",") == [*_NOTES]
    assert [is_noted(choice["text"]) for choice in reply.json["choices"]] == [True, True]
    known = {**NOTED, "properties": {"day": NOTED["properties"]["day"]}, "required": ["day"]}
    reply = roomy.post("/v1/completions", {"prompt": "a", "max_tokens": 99, "guided_json": known})
    assert "x-specserve-ignored" not in reply.headers


def test_formats_are_told_of_by_all_apis_and_of_tools(roomy: Any) -> None:
    tool = {"name": "feed", "input_schema": NOTED}
    said = {"messages": USER, "max_tokens": 160, "temperature": 0}
    flat = {"type": "json_schema", "name": "a", "schema": NOTED}
    function = {"type": "function", "name": "feed", "parameters": NOTED}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/messages", {**said, "output_config": {"format": {"type": "json_schema", "schema": NOTED}}}),
        ("/v1/messages", {**said, "tools": [tool], "tool_choice": {"type": "any"}}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 160, "text": {"format": flat}}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 160, "tools": [function], "tool_choice": "required"}),
        (
            "/v1/chat/completions",
            {
                **said,
                "tools": [{"type": "function", "function": {"name": "feed", "parameters": NOTED}}],
                "tool_choice": "required",
            },
        ),
    ]
    for path, body in asked:
        reply = roomy.post(path, body)
        assert reply.status == 200, reply.body
        assert reply.headers["x-specserve-ignored"].split(",") == [*_NOTES], path


def test_what_a_client_calls_a_format_cannot_spoil_a_header(roomy: Any) -> None:
    for names, begin in (
        (["a\r\nX-Evil: 1", "é" * 2000], "format.a??X-Evil??1,format.??"),
        ([f"{i:03}" for i in range(500)], "format.000,format.001,"),
    ):
        schema = {"anyOf": [{"type": "null", "format": name} for name in names]}
        reply = roomy.post("/v1/completions", {"prompt": "a", "guided_json": schema})
        assert reply.status == 200
        told = reply.headers["x-specserve-ignored"]
        assert told.startswith(begin)
        assert told.endswith("...")
        assert len(told) < 1100
        assert "X-Evil" not in reply.headers


# --- tools ------------------------------------------------------------------------------------------------------------


def calls_of(message: Any) -> list[tuple[str, Any]]:
    assert message["content"] is None
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


@pytest.mark.parametrize("choice", ["required", FEED], ids=["required", "named"])
@pytest.mark.parametrize("parallel", [True, False])
def test_tools_that_must_be_called_are(roomy: Any, choice: Any, parallel: bool) -> None:
    asked = {**CHAT, "max_tokens": 400, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel}
    for seed in range(4):
        reply = roomy.post("/v1/chat/completions", {**asked, "temperature": 1, "seed": seed}).json["choices"][0]
        calls = calls_of(reply["message"])
        if reply["finish_reason"] == "tool_calls":
            assert len(calls) == 1 or (parallel and choice == "required")
        assert {name for name, _ in calls} <= ({"feed", "now"} if choice == "required" else {"feed"})
        assert all(jsonschema_rs.is_valid(SCHEMA, value) if name == "feed" else value == {} for name, value in calls)


def test_arguments_come_while_they_are_written(roomy: Any) -> None:
    asked = {**CHAT, "tools": TOOLS, "tool_choice": FEED, "speculative": {"drafter": "none"}}
    whole = roomy.post("/v1/chat/completions", asked).json["choices"][0]["message"]["tool_calls"][0]["function"]
    events = roomy.post("/v1/chat/completions", {**asked, "stream": True}).events[:-1]
    deltas = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
    assert deltas[0]["function"] == {"name": "feed", "arguments": ""}
    assert {delta["index"] for delta in deltas} == {0}
    pieces = [delta["function"]["arguments"] for delta in deltas[1:]]
    assert len(pieces) > 10, "one piece a token, as nothing was drafted"
    assert "".join(pieces) == whole["arguments"]
    assert events[-1]["choices"][0] == {**events[-1]["choices"][0], "delta": {}, "finish_reason": "tool_calls"}


def chat_cut(choice: dict[str, Any] | str, limit: int) -> tuple[str, dict[str, Any]]:
    asked = {"messages": USER, "temperature": 0, "tools": TOOLS[:1], "tool_choice": choice, "max_tokens": limit}
    return "/v1/chat/completions", asked


def message_cut(choice: dict[str, Any] | str, limit: int) -> tuple[str, dict[str, Any]]:
    tools = [{"name": "feed", "input_schema": SCHEMA}]
    chosen = {"type": "any"} if choice == "required" else {"type": "tool", "name": "feed"}
    return "/v1/messages", {
        "messages": USER, "temperature": 0, "tools": tools, "tool_choice": chosen, "max_tokens": limit,
    }  # fmt: skip


def response_cut(choice: dict[str, Any] | str, limit: int) -> tuple[str, dict[str, Any]]:
    tools = [{"type": "function", "name": "feed", "parameters": SCHEMA}]
    chosen = choice if choice == "required" else {"type": "function", "name": "feed"}
    return "/v1/responses", {
        "input": "Hello there", "temperature": 0, "tools": tools, "tool_choice": chosen, "max_output_tokens": limit,
    }  # fmt: skip


@pytest.mark.parametrize("choice", ["required", FEED], ids=["required", "named"])
@pytest.mark.parametrize("limit", [1, 5, 60, 75])
def test_a_chat_call_that_max_tokens_cuts_off(roomy: Any, choice: Any, limit: int) -> None:
    whole, cut = (roomy.post(*chat_cut(choice, length)).json["choices"][0] for length in (120, limit))
    (call,) = whole["message"]["tool_calls"]
    path, asked = chat_cut(choice, limit)
    events = roomy.post(path, {**asked, "stream": True}).events[:-1]
    deltas = [delta for event in events for delta in event["choices"][0]["delta"].get("tool_calls", ())]
    said = "".join(delta["function"]["arguments"] for delta in deltas)
    assert cut["finish_reason"] == events[-1]["choices"][0]["finish_reason"] == "length"
    assert call["function"]["arguments"].startswith(said)
    assert said == "".join(made["function"]["arguments"] for made in cut["message"].get("tool_calls", ()))


@pytest.mark.parametrize("choice", ["required", FEED], ids=["required", "named"])
@pytest.mark.parametrize("limit", [1, 5, 60, 75])
def test_a_message_whose_call_max_tokens_cuts_off(roomy: Any, choice: Any, limit: int) -> None:
    path, asked = message_cut(choice, limit)
    (whole,) = roomy.post(*message_cut(choice, 120)).json["content"]
    cut = roomy.post(path, asked)
    assert (cut.status, cut.json["stop_reason"]) == (200, "max_tokens")
    assert all(whole["input"][name] == value for block in cut.json["content"] for name, value in block["input"].items())
    events = roomy.post(path, {**asked, "stream": True}).events
    assert next(event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta") == "max_tokens"
    said = "".join(event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta")
    assert json.dumps(whole["input"]).startswith(said)
    assert bool(cut.json["content"]) == any(event["type"] == "content_block_start" for event in events)


@pytest.mark.parametrize("choice", ["required", FEED], ids=["required", "named"])
@pytest.mark.parametrize("limit", [1, 5, 60, 75])
def test_a_response_whose_call_max_tokens_cuts_off(roomy: Any, choice: Any, limit: int) -> None:
    path, asked = response_cut(choice, limit)
    (whole,) = roomy.post(*response_cut(choice, 120)).json["output"]
    cut = roomy.post(path, asked).json
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    events = roomy.post(path, {**asked, "stream": True}).events
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")
    for item in cut["output"]:
        assert item["status"] == "incomplete"
        assert whole["arguments"].startswith(item["arguments"])
    assert [item["arguments"] for item in cut["output"]] == [i["arguments"] for i in last["response"]["output"]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_a_stop_ends_was_not_made(roomy: Any, stream: bool) -> None:
    """A stop text, or the id of a token, in the midst of the arguments."""
    path, asked = chat_cut(FEED, 120)
    (call,) = roomy.post(path, asked).json["choices"][0]["message"]["tool_calls"]
    colon = roomy.post("/tokenize", {"prompt": ":", "add_special_tokens": False}).json["tokens"]
    for ended in ({"stop": '"old'}, {"stop_token_ids": colon}):
        reply = roomy.post(path, {**asked, **ended, "stream": stream})
        choices = [event["choices"][0] for event in reply.events[:-1]] if stream else reply.json["choices"]
        key = "delta" if stream else "message"
        made = [made for choice in choices for made in choice[key].get("tool_calls", ())]
        assert choices[-1]["finish_reason"] == "stop"
        assert choices[-1]["stop_reason"] in ('"old', *colon)
        said = "".join(each["function"]["arguments"] for each in made)
        assert call["function"]["arguments"].startswith(said) and said != call["function"]["arguments"]
    path, asked = message_cut(FEED, 120)
    reply = roomy.post(path, {**asked, "stop_sequences": ['"old'], "stream": stream})
    told = next(e["delta"] for e in reply.events if e["type"] == "message_delta") if stream else reply.json
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", '"old')


def test_other_apis_call_too(roomy: Any) -> None:
    tool = {"name": "feed", "input_schema": SCHEMA}
    asked = {"messages": USER, "max_tokens": 120, "temperature": 0, "tools": [tool]}
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "feed"}):
        message = roomy.post("/v1/messages", {**asked, "tool_choice": choice}).json
        (block,) = message["content"]
        assert (block["type"], block["name"], message["stop_reason"]) == ("tool_use", "feed", "tool_use")
        assert jsonschema_rs.is_valid(SCHEMA, block["input"])
    function = {"type": "function", "name": "feed", "parameters": SCHEMA}
    asked = {"input": "a", "max_output_tokens": 120, "temperature": 0, "tools": [function]}
    whole = roomy.post("/v1/responses", {**asked, "tool_choice": {"type": "function", "name": "feed"}}).json
    assert [(item["type"], item["name"]) for item in whole["output"]] == [("function_call", "feed")]
    assert is_pet(whole["output"][0]["arguments"])


def test_a_model_that_is_told_of_no_tools_hears_of_those_it_must_call(roomy: Any) -> None:
    asked = {"messages": [{"role": "system", "content": "Be kind."}, *USER], "max_tokens": 90, "tools": TOOLS}
    reply = roomy.post("/v1/chat/completions", {**asked, "tool_choice": "required", "return_token_ids": True}).json
    prompt = roomy.post("/detokenize", {"tokens": reply["prompt_token_ids"]}).json["prompt"]
    assert "Be kind.\n\nAnswer by calling one of these functions:" in prompt
    assert all(json.dumps(tool["function"]) in prompt for tool in TOOLS)


@pytest.mark.parametrize(
    "parameters", [{"type": "object", "not": {}}, {"type": "object", "properties": {"a": {"$ref": "http://x"}}}]
)
def test_schemas_of_tools_that_cannot_be_enforced(roomy: Any, parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    reply = roomy.post("/v1/chat/completions", {**CHAT, "tools": tools, "tool_choice": "required"})
    assert (reply.status, reply.error["param"]) == (400, "tools")
