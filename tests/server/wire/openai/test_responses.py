"""What clients of OpenAI's Responses API send, and the chat completion that is asked for by it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from specserve.errors import InputError
from specserve.server.wire.errors import wire_error
from specserve.server.wire.fields import Limits
from specserve.server.wire.json.pieces import json_text
from specserve.server.wire.openai.requests import ChatCompletionRequest
from specserve.server.wire.openai.responses import LOGPROBS, ResponsesRequest, TextConfig
from specserve.server.wire.translated import read_translated
from specserve.types import SamplingParams

LIMITS = Limits(vocab_size=1000, max_model_len=256, max_completions=8, drafters=frozenset({"ngram"}))
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "2"}
TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": False}
ANSWER = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Well.", "annotations": []}],
}


def sent(**fields: Any) -> ResponsesRequest:
    return read_translated(ResponsesRequest, json.dumps({"input": "Hi", **fields}).encode(), LIMITS)


def chat(**fields: Any) -> ChatCompletionRequest:
    return sent(**fields).as_chat(LIMITS)


def talk(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    return chat(input=list(items), **fields).conversation()


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


# --- what is taken ----------------------------------------------------------------------------------------------------


def test_every_field_reaches_chat() -> None:
    request = sent(
        model="tiny",
        instructions="Be brief.",
        stream=True,
        max_output_tokens=5,
        temperature=0.5,
        top_p=0.25,
        include=[LOGPROBS],
        top_logprobs=3,
        text={"format": {"type": "text"}},
        reasoning={"effort": "low"},
        metadata={"a": "b"},
        user="x",
        store=True,
        background=False,
        truncation="disabled",
        parallel_tool_calls=False,
        speculative={"drafter": "ngram", "num_tokens": 3},
    )
    made = request.as_chat(LIMITS)
    assert isinstance(made, ChatCompletionRequest)
    assert made.conversation() == [{"role": "system", "content": "Be brief."}, user("Hi")]
    assert made.sampling_params == SamplingParams(
        max_tokens=5, temperature=0.5, top_p=0.25, logprobs=3, num_speculative_tokens=3
    )
    assert made.template_options()["reasoning_effort"] == "low"
    assert (made.model, made.stream, made.n) == ("tiny", True, 1)
    assert request.ignored(LIMITS) == []


def test_defaults_are_those_of_chat() -> None:
    nothing = {name: None for name in ResponsesRequest.model_fields if name != "input"}
    for made in (chat(), chat(**nothing)):
        assert made.conversation() == [user("Hi")]
        assert made.sampling_params == SamplingParams(max_tokens=None)
        assert made.template_options()["tools"] is None


@pytest.mark.parametrize("field", ["content", "summary"])
def test_what_a_reasoning_item_holds_is_looked_at_whole(field: str) -> None:
    item = {"type": "reasoning", "summary": [{"text": "a"}], "content": [{"text": "b"}], field: True}
    with pytest.raises(InputError, match="no list of texts"):
        talk(user("a"), item)


def test_items_become_messages() -> None:
    called = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b\ud800"}]
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    assert talk(
        {"role": "developer", "content": "Be brief."},
        user(parts),
        reasoning,
        ANSWER,
        CALL,
        {**CALL, "call_id": "c2", "arguments": ""},
        OUTPUT,
        {**OUTPUT, "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"type": "message", "role": "user", "content": "a", "status": "completed"},
        user("b"),
    ) == [
        {"role": "system", "content": "Be brief."},
        user("a\nb\ufffd"),
        {
            "role": "assistant",
            "content": "Well.",
            "reasoning_content": "hm",
            "item.id": True,
            "item.status": True,
            "tool_calls": [called, {**called, "id": "c2", "function": {"name": "add", "arguments": {}}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "3"},
        {"role": "assistant", "content": "No."},
        {**user("a"), "item.status": True},
        user("b"),
    ]


def test_calls_of_other_servers_tools_are_calls() -> None:
    searched = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "a"}}
    patched = {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** a"}
    done = {"type": "custom_tool_call_output", "call_id": "c2", "output": "Done!"}
    answer, result = talk(user("a"), searched, patched, done)[1:]
    calls = [(call["id"], call["function"]) for call in answer["tool_calls"]]
    assert calls == [
        ("", {"name": "web_search", "arguments": {"action": {"query": "a"}}}),
        ("c2", {"name": "apply_patch", "arguments": "*** a"}),
    ]
    assert answer["item.id"] and answer["item.status"]
    assert result == {"role": "tool", "tool_call_id": "c2", "content": "Done!"}


def test_what_is_encrypted_is_named() -> None:
    (_, said) = talk(user("a"), {"type": "reasoning", "summary": [], "encrypted_content": "x"})
    assert said == {"role": "assistant", "content": "", "item.encrypted_content": True}


def test_a_call_needs_no_text_before_it() -> None:
    said = talk(user("a"), CALL, OUTPUT)
    assert [message["role"] for message in said] == ["user", "assistant", "tool"]
    assert said[1]["content"] == ""


def test_tools_become_functions() -> None:
    bare = {"type": "function", "name": "b", "parameters": None, "strict": None}
    made = chat(tools=[TOOL, bare], tool_choice="none", parallel_tool_calls=False)
    function = {name: value for name, value in TOOL.items() if name != "type"}
    assert list(made.tools) == [{"type": "function", "function": f} for f in (function, {"name": "b"})]
    assert (made.tool_choice, made.parallel_tool_calls) == ("none", False)


def test_a_structure_in_the_words_of_chat() -> None:
    named = {"name": "a", "schema": {"type": "object"}, "strict": True}
    assert TextConfig(format={"type": "json_schema", **named}).as_chat() == {
        "type": "json_schema",
        "json_schema": named,
    }
    assert TextConfig(format={"type": "json_object"}).as_chat() == {"type": "json_object"}


def test_unknown_names_are_told_apart_from_unused_ones() -> None:
    request = sent(
        user="x",
        service_tier="auto",
        prompt_cache_key="k",
        text={"verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"},
        include=["reasoning.encrypted_content", LOGPROBS],
    )
    assert request.ignored(LIMITS) == [
        "service_tier",
        "prompt_cache_key",
        "text.verbosity",
        "reasoning.summary",
        "include.reasoning.encrypted_content",
    ]


@pytest.mark.parametrize(
    ("fields", "chosen"), [({}, None), ({"include": [LOGPROBS]}, 0), ({"include": [LOGPROBS], "top_logprobs": 20}, 20)]
)
def test_logprobs(fields: dict[str, Any], chosen: int | None) -> None:
    assert chat(**fields).sampling_params.logprobs == chosen


def test_what_the_response_says_of_its_request() -> None:
    assert sent().echo() == {
        "instructions": None,
        "max_output_tokens": None,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_logprobs": 0,
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": None, "summary": None},
        "metadata": {},
        "previous_response_id": None,
        "background": False,
        "truncation": "disabled",
        "store": False,
    }
    chosen: dict[str, Any] = {
        "instructions": "a",
        "max_output_tokens": 5,
        "temperature": 0,
        "top_p": 0.5,
        "top_logprobs": 2,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "add"},
        "parallel_tool_calls": False,
        "metadata": {"a": "b"},
    }
    told = sent(**chosen, reasoning={"effort": "low"}, store=True).echo()
    assert {name: told[name] for name in chosen} == chosen
    assert (told["reasoning"], told["store"]) == ({"effort": "low", "summary": None}, False)


def test_what_comes_back_can_always_be_sent() -> None:
    """JSON can spell half of a surrogate pair, and UTF-8 cannot."""
    half = "\ud800"
    tool = {**TOOL, "description": half, "parameters": {half: [half]}}
    request = sent(instructions=half, metadata={half: half}, tools=[tool], text={"format": {half: half}})
    assert json_text(request.echo()).encode().count("\ufffd".encode()) == 8


# --- what is refused --------------------------------------------------------------------------------------------------


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


IMAGE = {"type": "input_image", "image_url": "file:///etc/passwd"}

REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"conversation": {"id": "conv_1"}}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"background": True}, "background"),
    ({"background": 0}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 2**63}, "max_output_tokens"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": "0.5"}, "top_p"),
    ({"stream": 1}, "stream"),
    ({"instructions": 5}, "instructions"),
    ({"instructions": ["a"]}, "instructions"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"speculative": {"enabled": True, "drafter": "none"}}, "speculative"),
    ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"include": "a"}, "include"),
    ({"include": [5]}, "include"),
    ({"include": [LOGPROBS], "tools": [TOOL]}, "include"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"format": {"type": "json_object", "schema_": {}}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": 5}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
    ({"text": "json"}, "text"),
    ({"reasoning": "low"}, "reasoning"),
    ({"reasoning": {"effort": 5}}, "reasoning.effort"),
    ({"tools": [TOOL, TOOL]}, "tools"),  # two of a name
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "custom", "name": "a"}]}, "tools"),
    ({"tools": [{"name": "a"}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a", "parameters": 5}]}, "tools[0].parameters"),
    ({"tools": [TOOL] * 129}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "add"}}, "tool_choice"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": ["Hi"]}, "input"),
    ({"input": [user("a")] * 10_001}, "input"),
    (item(role="tool", content="a"), "input"),
    (item(role=[], content="a"), "input"),
    (item(role="user"), "input"),
    (item(role="user", content=[IMAGE]), "input"),
    (item(role="user", content=[{"type": "text", "text": "a"}]), "input"),
    (item(role="user", content=[{"type": "input_text"}]), "input"),
    (item(role="user", content=["a"]), "input"),
    (item(type="item_reference", id="msg_1"), "input"),
    (item(type="web_search_result"), "input"),
    (item(type="web_search_call", call_id=5), "input"),
    (item(type="shell_call_output", output=[]), "input"),
    (item(type=[]), "input"),
    *((item(type=kind, role="user", content="a"), "input") for kind in ({}, [], "", 0, False)),
    (item(type="reasoning", summary=[5]), "input"),
    ({"input": [{**CALL, "arguments": {"a": 1}}]}, "input"),
    ({"input": [{**CALL, "call_id": None}]}, "input"),
    ({"input": [CALL] * 129}, "input"),
    ({"input": [{**OUTPUT, "output": None}]}, "input"),
    ({"input": [{**OUTPUT, "output": [IMAGE]}]}, "input"),
    ({"input": [{**OUTPUT, "call_id": 5}]}, "input"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSALS, ids=lambda value: ascii(value)[:60])
def test_refused_by_the_name_that_was_sent(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InputError) as caught:
        chat(**fields)
    told = wire_error(caught.value)
    assert (told.status, told.param) == (400, param)
    assert param in told.message
    assert len(told.message) < 500


def test_messages_say_no_name_that_was_not_sent() -> None:
    for fields, wrong in (
        ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "response_format"),
        ({"max_output_tokens": 0}, "max_tokens"),
    ):
        with pytest.raises(InputError) as caught:
            chat(**fields)
        assert wrong not in str(caught.value)


def test_who_runs_into_what_is_kept_elsewhere_is_told_what_to_send() -> None:
    for name in ("previous_response_id", "conversation"):
        with pytest.raises(InputError, match=r"as input\.$"):
            sent(**{name: "x"})


def test_the_schema_has_what_is_taken() -> None:
    schema = ResponsesRequest.model_json_schema()
    refused = {"previous_response_id", "conversation", "prompt", "background", "truncation"}
    assert not refused & set(schema["properties"])
    assert schema["required"] == ["input"]
    whole, items = schema["properties"]["input"]["anyOf"]
    assert whole == {"type": "string"}
    kinds = [entry["properties"]["type"] for entry in items["items"]["anyOf"]]
    assert kinds[0] == {"enum": ["message", None]}
    assert [kind["const"] for kind in kinds[1:]] == ["function_call", "function_call_output", "reasoning"]


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=3) | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "role", "content", "text", "name", "id", "zzz"]), inner, max_size=4)
    ),
    max_leaves=8,
)
KINDS = st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "function", "web_search"])
FIELDS = ["role", "content", "output", "summary", "name", "call_id", "arguments", "parameters"]
ITEMS = st.lists(st.fixed_dictionaries({"type": KINDS}, optional=dict.fromkeys(FIELDS, JUNK)))


@given(st.dictionaries(st.sampled_from(sorted({*ResponsesRequest.model_fields, "junk"})), JUNK | ITEMS, max_size=4))
def test_junk_is_taken_or_refused_and_nothing_else(junk: dict[str, Any]) -> None:
    try:
        request = sent(**junk)
        made = request.as_chat(LIMITS)
    except InputError as error:
        told = wire_error(error)
        assert told.status == 400
        json_text(told.body).encode()
    else:
        json.dumps([made.conversation(), request.echo()], ensure_ascii=False).encode()
