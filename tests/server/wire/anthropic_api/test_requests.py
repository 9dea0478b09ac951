"""What Anthropic's clients send, and the chat completion that is asked for by it; errors in Anthropic's words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from specserve.errors import CapacityError, EngineError, InputError, PromptTooLongError
from specserve.server.wire.anthropic_api.requests import CountTokensRequest, MessagesRequest, anthropic_error
from specserve.server.wire.errors import (
    WireError,
    body_too_large,
    method_not_allowed,
    model_not_found,
    overloaded,
    timed_out,
    unauthorized,
    unavailable,
    unsupported_media_type,
    wire_error,
)
from specserve.server.wire.fields import Limits
from specserve.server.wire.json.pieces import json_text
from specserve.server.wire.openai.requests import ChatCompletionRequest
from specserve.server.wire.openai.structured import as_chat_format
from specserve.server.wire.translated import read_translated
from specserve.types import SamplingParams

LIMITS = Limits(vocab_size=1000, max_model_len=256, max_completions=8, drafters=frozenset({"ngram"}))
USER = {"role": "user", "content": "Hi"}
USE = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "2"}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def sent(**fields: Any) -> MessagesRequest:
    body = {"max_tokens": 5, "messages": [USER], **fields}
    return read_translated(MessagesRequest, json.dumps(body).encode(), LIMITS)


def chat(**fields: Any) -> ChatCompletionRequest:
    return sent(**fields).as_chat(LIMITS)


def talk(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return chat(messages=list(messages), **fields).conversation()


# --- what is taken ----------------------------------------------------------------------------------------------------


def test_every_field_reaches_chat() -> None:
    request = sent(
        model="tiny",
        system="Be brief.",
        stream=True,
        stop_sequences=["a", "é"],
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        metadata={"user_id": "x"},
        thinking={"type": "disabled"},
        output_config={"effort": "low"},
        speculative={"drafter": "ngram", "num_tokens": 3},
    )
    made = request.as_chat(LIMITS)
    assert isinstance(made, ChatCompletionRequest)
    assert made.conversation() == [{"role": "system", "content": "Be brief."}, USER]
    assert made.sampling_params == SamplingParams(
        max_tokens=5, stop=("a", "é"), temperature=0.5, top_p=0.25, top_k=7, num_speculative_tokens=3
    )
    assert made.template_options() == {
        "add_generation_prompt": True,
        "continue_final_message": False,
        "tools": None,
        "reasoning_effort": "low",
    }
    assert (made.model, made.stream, made.n, made.speculative.drafter) == ("tiny", True, 1, "ngram")
    assert request.ignored(LIMITS) == []


def test_defaults_are_those_of_chat() -> None:
    assert chat().sampling_params == SamplingParams(max_tokens=5)
    nothing = {name: None for name in MessagesRequest.model_fields if name not in ("messages", "max_tokens")}
    assert chat(**nothing).sampling_params == SamplingParams(max_tokens=5)


def test_a_conversation_with_tools() -> None:
    called = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    again = {**USE, "id": "t2", "input": {}}
    assert talk(
        {"role": "user", "content": [text("a"), text("b\ud800")]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, text("Well."), USE, again]},
        {"role": "user", "content": [RESULT, {**RESULT, "tool_use_id": "t2", "is_error": True}, text("Go on.")]},
        system=[text("Be"), {**text("brief."), "cache_control": {"type": "ephemeral"}}],
    ) == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "a\nb\ufffd"},
        {
            "role": "assistant",
            "content": "Well.",
            "reasoning_content": "hm",
            "tool_calls": [called, {**called, "id": "t2", "function": {"name": "add", "arguments": {}}}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "2"},
        {"role": "tool", "tool_call_id": "t2", "content": "2", "is_error": True},
        {"role": "user", "content": "Go on."},
    ]


def test_turns_of_one_role_are_one_turn() -> None:
    """As Anthropic has it, and as many templates need it."""
    assert talk(
        {"role": "user", "content": "a"},
        {"role": "user", "content": [text("b")]},
        {"role": "assistant", "content": []},
        {"role": "assistant", "content": "c"},
        {"role": "system", "content": "d"},
        USER,
    ) == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "system", "content": "d"},
        USER,
    ]


@pytest.mark.parametrize("content", [None, "", []])
def test_a_tool_may_have_said_nothing(content: Any) -> None:
    result = {**RESULT, "content": content}
    said = talk(USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]})
    assert said[2] == {"role": "tool", "tool_call_id": "t1", "content": ""}
    assert (said[1]["content"], said[1]["tool_calls"][0]["id"]) == ("", "t1")


def test_an_answer_goes_on_where_the_last_message_stops() -> None:
    begun = chat(messages=[USER, {"role": "assistant", "content": "The answer is"}])
    assert begun.conversation()[-1] == {"role": "assistant", "content": "The answer is"}
    assert (begun.add_generation_prompt, begun.continue_final_message) == (False, True)
    for nothing in ("", [], [text("")]):
        fresh = chat(messages=[USER, {"role": "assistant", "content": nothing}])
        assert fresh.conversation() == [USER]
        assert (fresh.add_generation_prompt, fresh.continue_final_message) == (True, False)


def test_tools_become_functions() -> None:
    fields = CountTokensRequest.model_validate(
        {
            "messages": [USER],
            "tools": [TOOL, {"type": "custom", "name": "b", "input_schema": {"\ud800": ["\ud800"]}}],
            "tool_choice": {"type": "none", "disable_parallel_tool_use": True},
        },
        context=LIMITS,
    ).as_chat(LIMITS)
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    other = {"name": "b", "parameters": {"\ufffd": ["\ufffd"]}}
    assert list(fields.tools) == [{"type": "function", "function": f} for f in (function, other)]
    assert (fields.tool_choice, fields.parallel_tool_calls) == ("none", False)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_tool_choice_in_the_words_of_chat(choice: dict[str, Any], expected: Any) -> None:
    chosen = sent(tool_choice=choice).tool_choice
    assert chosen is not None
    assert chosen.as_chat() == expected


def test_a_structure_in_the_words_of_chat() -> None:
    assert as_chat_format({"type": "json_schema", "schema": {"type": "object"}}) == {
        "type": "json_schema",
        "json_schema": {"schema": {"type": "object"}},
    }
    for other in (None, 5, {"type": "text"}):
        assert as_chat_format(other) == other


def test_what_a_tool_was_asked_can_always_be_told() -> None:
    """JSON can spell half of a surrogate pair, and UTF-8 cannot."""
    used = {**USE, "input": {"\ud800": ["\ud800"]}}
    said = talk(USER, {"role": "assistant", "content": [used]}, {"role": "user", "content": [RESULT]})
    assert said[1]["tool_calls"][0]["function"]["arguments"] == {"\ufffd": ["\ufffd"]}


def test_unknown_names_are_told_apart_from_unused_ones() -> None:
    request = sent(
        metadata={"user_id": 5},
        service_tier="auto",
        context_management={},
        output_config={"effort": "low", "task_budget": 5},
        tool_choice={"type": "auto", "zzz": 1},
    )
    assert request.ignored(LIMITS) == [
        "service_tier",
        "context_management",
        "tool_choice.zzz",
        "output_config.task_budget",
    ]


def test_counting_needs_no_limit() -> None:
    body = json.dumps({"messages": [USER], "system": "a", "tools": []}).encode()
    made = read_translated(CountTokensRequest, body, LIMITS).as_chat(LIMITS)
    assert made.conversation() == [{"role": "system", "content": "a"}, USER]
    assert made.sampling_params == SamplingParams(max_tokens=None)


# --- what is refused --------------------------------------------------------------------------------------------------


def message(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(content)}]}


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 2**63}, "max_tokens"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": -7}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 10**5}, "stop_sequences"),
    ({"stop_sequences": 5}, "stop_sequences"),
    ({"stream": "yes"}, "stream"),
    ({"model": 5}, "model"),
    ({"speculative": {"drafter": "ngrm"}}, "speculative.drafter"),
    ({"speculative": {"num_token": 2}}, "speculative.num_token"),
    ({"mcp_servers": [{"type": "url", "url": "http://x"}]}, "mcp_servers"),
    ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ({"output_format": {"type": "json_schema"}}, "output_config.format"),
    ({"output_format": {"type": "json_schema", "schema": {}, "schma": {}}}, "output_config.format"),
    ({"system": 5}, "system"),
    ({"system": [IMAGE]}, "system"),
    ({"tools": [TOOL, TOOL]}, "tools"),  # two of a name
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [TOOL] * 129}, "tools"),
    ({"tools": 5}, "tools"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [USER] * 10_001}, "messages"),
    ({"messages": [USER, {"role": "tool", "content": "a"}]}, "messages[1].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (message("a"), "messages[0].content"),
    (message(*[text("a")] * 10_001), "messages[0].content"),
    (message(IMAGE), "messages[0].content"),
    (message({"type": "document"}), "messages[0].content"),
    (message({"type": []}), "messages[0].content"),
    (message({"type": "text"}), "messages[0].content"),
    (message({"type": "redacted_thinking", "data": "x"}), "messages[0].content"),
    (message({"type": "web_search_tool_result", "tool_use_id": "a", "content": []}), "messages[0].content"),
    (message(USE), "messages[0].content"),
    (message(RESULT, role="assistant"), "messages[0].content"),
    (message({**RESULT, "content": [IMAGE]}), "messages[0].content"),
    (message({**RESULT, "content": 0}), "messages[0].content"),
    (message({**RESULT, "tool_use_id": None}), "messages[0].content"),
    (message({**USE, "input": "{}"}, role="assistant"), "messages[0].content"),
    (message({**USE, "id": 5}, role="assistant"), "messages[0].content"),
    (message({**USE, "name": None}, role="assistant"), "messages[0].content"),
    (message(USE, role="assistant"), "messages"),
    ({"messages": [{"role": "assistant", "content": ""}]}, "messages"),
    ({"messages": [{"role": "assistant", "content": [USE] * 129}, USER]}, "messages"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSALS, ids=lambda value: ascii(value)[:60])
def test_refused_by_the_name_that_was_sent(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InputError) as caught:
        chat(**fields)
    told = wire_error(caught.value)
    assert (told.status, told.param) == (400, param)
    assert param in told.message
    assert len(told.message) < 500


def test_no_message_says_a_name_that_was_not_sent() -> None:
    for fields, wrong in (
        ({"output_config": {"format": {"type": "json_schema"}}}, "response_format"),
        ({"stop_sequences": [""]}, "stop "),
    ):
        with pytest.raises(InputError) as caught:
            chat(**fields)
        assert wrong not in str(caught.value)


def test_the_most_blocks_are_one_turn() -> None:
    said = talk(*[{"role": "user", "content": [text("x" * 200)] * 10_000}] * 5)
    assert said == [{"role": "user", "content": "\n".join(["x" * 200] * 50_000)}]


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=3) | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "role", "content", "text", "name", "id", "zzz"]), inner, max_size=4)
    ),
    max_leaves=8,
)
KINDS = st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image", "disabled", "auto", "tool", "custom"])
BLOCKS = st.lists(st.fixed_dictionaries({"type": KINDS}, optional=dict.fromkeys(["text", "name", "input"], JUNK)))


@given(st.dictionaries(st.sampled_from(sorted({*MessagesRequest.model_fields, "junk"})), JUNK | BLOCKS, max_size=4))
def test_junk_is_taken_or_refused_and_nothing_else(junk: dict[str, Any]) -> None:
    try:
        made = chat(**junk)
    except InputError as error:
        told = wire_error(error)
        assert told.status == 400
        json_text(anthropic_error(told, "r")).encode()
    else:
        json.dumps(made.conversation(), ensure_ascii=False).encode()


def test_the_schema_has_what_is_taken() -> None:
    schema = MessagesRequest.model_json_schema()
    assert not {"thinking", "mcp_servers"} & set(schema["properties"])
    assert sorted(schema["required"]) == ["max_tokens", "messages"]
    whole, blocks = schema["$defs"]["AnthropicMessage"]["properties"]["content"]["anyOf"]
    assert whole == {"type": "string"}
    kinds = [block["properties"]["type"]["const"] for block in blocks["items"]["anyOf"]]
    assert kinds == ["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InputError("n is 0.", "n"), "invalid_request_error"),
        (PromptTooLongError(300, 255, "the context"), "invalid_request_error"),
        (unauthorized(), "authentication_error"),
        (model_not_found("tinny", ["tiny"]), "not_found_error"),
        (method_not_allowed("PUT", ["POST"]), "invalid_request_error"),
        (timed_out(408, "Too slow."), "timeout_error"),
        (body_too_large(10), "request_too_large"),
        (unsupported_media_type("a"), "invalid_request_error"),
        (overloaded("Full."), "rate_limit_error"),
        (EngineError("Stopped."), "api_error"),
        (KeyError("/secret"), "api_error"),
        (unavailable("Draining."), "overloaded_error"),
        (CapacityError("Full."), "overloaded_error"),
        (TimeoutError(), "timeout_error"),
        (WireError(403, "permission_error", "No."), "permission_error"),
    ],
)
def test_errors_have_the_shape_of_anthropic(error: Exception, kind: str) -> None:
    told = wire_error(error)
    assert anthropic_error(told, "req_1") == {
        "type": "error",
        "error": {"type": kind, "message": told.message},
        "request_id": "req_1",
    }
