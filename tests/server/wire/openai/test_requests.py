"""What clients may send and what becomes of it: every row is a request that is taken, or refused by name."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from specserve.errors import InputError
from specserve.server.wire.errors import wire_error
from specserve.server.wire.fields import MAX_HEADER, Limits, header_names
from specserve.server.wire.json.pieces import json_pieces, json_text
from specserve.server.wire.json.text import json_object
from specserve.server.wire.openai.messages import MAX_MESSAGES
from specserve.server.wire.openai.requests import ChatCompletionRequest, CompletionRequest, checked, read
from specserve.server.wire.openai.tokenization import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
    detokenize_body,
    read_tokenize,
    tokenize_body,
)
from specserve.server.wire.openai.unsupported import REFUSED
from specserve.types import SamplingParams

LIMITS = Limits(vocab_size=1000, max_model_len=256, max_completions=8, drafters=frozenset({"ngram"}))
USER = {"role": "user", "content": "Hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLED = {**CALL, "function": {"name": "add", "arguments": {"a": 1}}}
IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}


def chat(**fields: Any) -> ChatCompletionRequest:
    return read(ChatCompletionRequest, json.dumps({"messages": [USER], **fields}).encode(), LIMITS)


def completion(**fields: Any) -> CompletionRequest:
    return read(CompletionRequest, json.dumps({"prompt": "Hi", **fields}).encode(), LIMITS)


def assert_refused(make: Any, fields: dict[str, Any], param: str) -> None:
    """Refused with 400 and a short message; the message names the field, as `param` does."""
    with pytest.raises(InputError) as caught:
        make(**fields)
    told = wire_error(caught.value)
    assert (told.status, told.body["error"]["param"]) == (400, param)
    assert param.split("[")[0] in told.message
    assert len(told.message) < 500


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
NAN, INF = float("nan"), float("inf")


# reliability: 8 and 11
@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [NAN, INF, -INF, -3, 1e308, "0.7", True, [], {}, 10**19])
def test_a_number_is_a_finite_number_in_its_range(make: Any, name: str, value: Any) -> None:
    assert_refused(make, {name: value}, name)


# 12
def test_extreme_temperatures_are_taken() -> None:
    assert chat(temperature=1e-30).sampling_params.temperature == 1e-30
    assert chat(temperature=2.0, top_k=1).sampling_params.top_k == 1


SHARED_REFUSALS: list[tuple[dict[str, Any], str]] = [
    # 13
    ({"n": 2**31}, "n"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 9}, "n"),  # above max_completions
    ({"n": 1.0}, "n"),
    ({"n": True}, "n"),
    ({"best_of": 10**9}, "best_of"),
    # 15
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2**63}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": None, "min_tokens": 10**9}, "min_tokens"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    # 17
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1000": 1}}, "logit_bias"),
    ({"logit_bias": {str(2**31): 1}}, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"007": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": {"5": NAN}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"logit_bias": {"5": True}}, "logit_bias"),
    ({"logit_bias": {"5": 100.5}}, "logit_bias"),
    ({"logit_bias": {str(i): 0 for i in range(10**5)}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    # 18
    ({"stop": ["x"] * 10**5}, "stop"),
    ({"stop": "x" * 10**6}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a", 1]}, "stop"),
    ({"stop": "\ud800"}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    # 19
    ({"stop_token_ids": [1000]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [1.0]}, "allowed_token_ids"),
    ({"allowed_token_ids": [1] * 1001}, "allowed_token_ids"),
    ({"bad_words": ["\udfff"]}, "bad_words"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": "word"}, "bad_words"),
    # 21
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
    ({"model": 5}, "model"),
    # 22
    ({"seed": 2**64}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 1.0}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"request_id": "x" * 10**6}, "request_id"),
    ({"request_id": "a\nb"}, "request_id"),
    ({"cache_salt": "x" * 10**6}, "cache_salt"),
    ({"cache_salt": "a\x00"}, "cache_salt"),
    ({"priority": 2**31}, "priority"),
    ({"priority": 1}, "priority"),
    ({"priority": -1}, "priority"),
    ({"beam_width": 2}, "beam_width"),
    ({"use_beam_search": True, "beam_width": 33}, "beam_width"),
    ({"use_beam_search": True, "beam_width": 2, "n": 3}, "n"),
    ({"use_beam_search": "yes"}, "use_beam_search"),
    ({"use_beam_search": True, "length_penalty": "x"}, "length_penalty"),
    ({"use_beam_search": True, "early_stopping": "always"}, "early_stopping"),
    ({"use_beam_search": True, "early_stopping": 1}, "early_stopping"),
    ({"use_beam_search": True, "presence_penalty": 1}, "presence_penalty"),
    ({"length_penalty": 2}, "length_penalty"),
    ({"early_stopping": True}, "early_stopping"),
    # 23
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream": True, "stream_options": "usage"}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    # 29, 30
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    # speculation
    ({"speculative": {"drafter": "ngrm"}}, "speculative.drafter"),
    ({"speculative": {"num_tokens": -1}}, "speculative.num_tokens"),
    ({"speculative": {"num_tokens": 2.0}}, "speculative.num_tokens"),
    ({"speculative": {"num_token": 2}}, "speculative.num_token"),
    ({"speculative": {"enabled": True, "drafter": "none"}}, "speculative"),
    ({"speculative": {"explain": 1}, "stream": True}, "speculative.explain"),
    ({"speculative": {"explain": True}}, "speculative.explain"),
    ({"top_k": 1.5}, "top_k"),
    ({"ignore_eos": "no"}, "ignore_eos"),
]


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(("fields", "param"), SHARED_REFUSALS, ids=lambda value: ascii(value)[:40])
def test_both_endpoints_refuse(make: Any, fields: dict[str, Any], param: str) -> None:
    assert_refused(make, fields, param)


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize("name", [name for name in REFUSED if name != "best_of"])
def test_what_is_not_supported_is_refused_by_name(make: Any, name: str) -> None:
    assert_refused(make, {name: {"type": "json_object"}}, name)
    assert name not in make(**{name: None}).ignored(LIMITS)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "Hi"}, "prompt"),  # 21
        ({"top_logprobs": 10**6, "logprobs": True}, "top_logprobs"),  # 16
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens"),
        ({"max_completion_tokens": 5, "min_tokens": 6}, "min_tokens"),
        # 40
        ({"tools": [{"type": "function"}], "tool_choice": "none"}, "tools"),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools"),
        ({"tools": ["f"]}, "tools"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [tool("f"), tool("g"), tool("f")]}, "tools"),
        ({"tools": [tool('f"')]}, "tools"),
        ({"tools": [tool("f\n")]}, "tools"),
        ({"tools": [tool("")]}, "tools"),
        ({"tools": [tool("f" * 129)]}, "tools"),
        ({"tools": [tool("f", "x")]}, "tools"),
        ({"tools": [tool("f", {"type": "string"})]}, "tools"),
        ({"tools": [tool("f", {"type": 17})]}, "tools"),
        ({"tools": [tool("f", {"properties": ["a"]})]}, "tools"),
        ({"tools": [tool("f", {"properties": {"a": 5}})]}, "tools"),
        ({"tools": [tool("f", {"required": "a"})]}, "tools"),
        ({"tools": [tool("f", {"required": [1]})]}, "tools"),
        ({"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"prediction": "text"}, "prediction"),
        ({"prediction": {"type": "content", "content": [IMAGE]}}, "prediction.content"),
        ({"prediction": {"type": "draft", "content": "a"}}, "prediction.type"),
        ({"continue_final_message": True}, "continue_final_message"),
        # 28
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages"),
        ({"messages": [USER] * 100_000}, "messages"),
        ({"messages": [{"role": "bot", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [USER, {"role": "user", "content": None}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        # 28, 30
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL] * 129}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "type": "shell"}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "function_call": "f"}]}, "messages[0].tool_calls"),
        # 29
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"not a name": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {f"x{i}": 1 for i in range(65)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
    ids=lambda value: ascii(value)[:60],
)
def test_chat_refuses(fields: dict[str, Any], param: str) -> None:
    assert_refused(chat, fields, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [USER]}, "messages"),  # 21
        ({"logprobs": 10**6, "echo": True}, "logprobs"),  # 16
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"min_tokens": 17}, "min_tokens"),  # the default of max_tokens is 16
        ({"prompt": ["a"] * 4, "n": 3}, "n"),  # 13
        # 14
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [[1], 1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, [1]]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": 1}, "prompt"),
        ({"prompt": ["a"] * 1_000_000}, "prompt"),
        # 24
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1000]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": [1.0]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[1, 2], [999, 1000]]}, "prompt"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_completions_refuse(fields: dict[str, Any], param: str) -> None:
    assert_refused(completion, fields, param)


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(
    "literal", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000], ids=lambda text: text[:9]
)
@pytest.mark.parametrize("name", ["temperature", "n", "max_tokens", "seed", "unknown"])
def test_literals_that_are_no_numbers_are_named(make: Any, literal: str, name: str) -> None:
    kind = ChatCompletionRequest if make is chat else CompletionRequest
    with pytest.raises(InputError) as caught:
        read(kind, f'{{"{name}": {literal}}}'.encode(), LIMITS)
    assert caught.value.param == name


# --- what is taken ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [chat, completion])
def test_defaults_are_those_of_openai(make: Any) -> None:
    most = {chat: None, completion: 16}[make]
    assert make().sampling_params == SamplingParams(max_tokens=most)
    nothing = {name: None for name in make().__class__.model_fields if name not in ("messages", "prompt")}
    assert make(**nothing).sampling_params == SamplingParams(max_tokens=most)
    assert make(**nothing).ignored(LIMITS) == []


def test_every_sampling_field_reaches_the_engine() -> None:
    fields: dict[str, Any] = {
        "n": 2,
        "temperature": 0,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -1,
        "frequency_penalty": 1,
        "max_tokens": 7,
        "min_tokens": 3,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "seed": -1,
    }
    listed: dict[str, Any] = {
        "stop": ["a", "b"],
        "bad_words": ["c"],
        "stop_token_ids": [1],
        "allowed_token_ids": [1, 999],
    }
    expected = SamplingParams(
        **fields,
        **{k: tuple(v) for k, v in listed.items()},
        logit_bias={5: -100.0},
        num_speculative_tokens=4,
        logprobs=2,
    )
    more: dict[str, Any] = {
        **fields,
        **listed,
        "logit_bias": {"5": -100},
        "speculative": {"drafter": "ngram", "num_tokens": 4},
    }
    assert chat(**more, logprobs=True, top_logprobs=2).sampling_params == expected
    assert completion(**more, logprobs=2).sampling_params == expected


@pytest.mark.parametrize(
    ("fields", "chosen", "prompt"),
    [({}, None, None), ({"logprobs": 3}, 3, None), ({"logprobs": 0, "echo": True}, 0, 0), ({"echo": True}, None, None)],
)
def test_logprobs_of_completions(fields: dict[str, Any], chosen: int | None, prompt: int | None) -> None:
    params = completion(**fields).sampling_params
    assert (params.logprobs, params.prompt_logprobs) == (chosen, prompt)


@pytest.mark.parametrize(
    ("fields", "chosen"),
    [
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_logprobs_of_chat(fields: dict[str, Any], chosen: int | None) -> None:
    assert chat(**fields).sampling_params.logprobs == chosen


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_token_limit(name: str) -> None:
    assert chat(**{name: 5}).sampling_params.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=5).sampling_params.max_tokens == 5


@pytest.mark.parametrize(
    ("stop", "expected"),
    [(None, ()), ([], ()), ("a", ("a",)), (["a", "é"], ("a", "é")), (["x" * 4096] * 16, ("x" * 4096,) * 16)],
    ids=str.__call__,
)
def test_stop_is_null_text_or_a_list(stop: Any, expected: tuple[str, ...]) -> None:
    assert chat(stop=stop).sampling_params.stop == expected


@pytest.mark.parametrize(
    ("speculative", "cap"),
    [
        ({}, None),
        ({"enabled": True}, None),
        ({"enabled": False}, 0),
        ({"enabled": False, "num_tokens": 4}, 0),
        ({"drafter": "none"}, 0),
        ({"drafter": "ngram", "num_tokens": 3}, 3),
        ({"num_tokens": 0}, 0),
    ],
)
def test_speculative(speculative: dict[str, Any], cap: int | None) -> None:
    assert chat(speculative=speculative).sampling_params.num_speculative_tokens == cap


@pytest.mark.parametrize("make", [chat, completion])
def test_a_priority_needs_a_server_that_takes_some(make: Any) -> None:
    assert [make(**fields).priority for fields in ({}, {"priority": 0}, {"priority": None})] == [0, 0, 0]
    with pytest.raises(InputError, match="--scheduling-policy priority") as caught:
        make(priority=-5)
    assert caught.value.param == "priority"
    open_to_all = dataclasses.replace(LIMITS, max_priority=2**31 - 1)
    for priority in (-5, 2**31 - 1, 1 - 2**31):
        body = json.dumps({"prompt": "a", "priority": priority}).encode()
        assert read(CompletionRequest, body, open_to_all).priority == priority


def test_a_drafter_that_cannot_be_named_is_refused_with_the_reason() -> None:
    limits = dataclasses.replace(LIMITS, refused_drafters=(("slow", "Drafter 'slow' needs a model."),))
    for name, why in (("slow", "Drafter 'slow' needs a model."), ("slwo", "Unknown drafter 'slwo'")):
        with pytest.raises(InputError, match=rf"^speculative\.drafter is not loaded\. {why}") as refused:
            checked(CompletionRequest, {"prompt": "a", "speculative": {"drafter": name}}, limits)
        assert refused.value.param == "speculative.drafter"


def test_drafts_cannot_be_asked_of_a_server_without_a_drafter() -> None:
    plain = Limits(vocab_size=1000, max_model_len=256)
    for wish in ({"enabled": True}, {"num_tokens": 2}):
        with pytest.raises(InputError, match="without a drafter"):
            checked(CompletionRequest, {"prompt": "a", "speculative": wish}, plain)
    for no_wish in ({"enabled": False}, {"drafter": "none"}, {}):
        assert checked(CompletionRequest, {"prompt": "a", "speculative": no_wish}, plain)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 999], ([1, 999],)),
        ([[1], [2, 3]], ([1], [2, 3])),
        ("\ud800a\x00", ("\ufffda\x00",)),  # 27
        (["a"] * 8, ("a",) * 8),
    ],
    ids=ascii,
)
def test_prompts_are_a_tuple(prompt: Any, expected: tuple[Any, ...]) -> None:
    request = completion(prompt=prompt)
    assert request.prompt == expected
    assert request.num_choices == len(expected)


def test_unknown_fields_are_named_and_unused_ones_are_not() -> None:
    request = chat(user="x" * 10**6, metadata={"a": 1}, store=True, zzz=1, copy=2, num_choices=3, service_tier="auto")
    assert request.ignored(LIMITS) == ["zzz", "copy", "num_choices", "service_tier"]
    assert request.num_choices == 1
    streamed = completion(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert streamed.ignored(LIMITS) == ["stream_options.continuous_usage_stats"]
    assert (streamed.include_usage, chat().include_usage) == (True, False)


def test_a_prediction_that_no_drafter_reads_is_named() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(prediction={"type": "content", "content": parts})
    assert request.prediction is not None
    assert request.prediction.content == "a\nb"
    assert request.ignored(LIMITS) == ["prediction"]
    assert request.ignored(Limits(1000, 256, drafters=frozenset({"prediction"}))) == []


@given(st.lists(st.text()))
def test_header_names_say_nothing_but_names(names: list[str]) -> None:
    value = header_names(names)
    assert set(value) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-,?")
    assert value.count(",") == max(0, len(names) - 1)


def test_header_names_are_bounded() -> None:
    assert header_names(["a", "b\r\nSet-Cookie: x"]) == "a,b??Set-Cookie??x"
    assert len(header_names(["x" * 10**6] * 10**4)) == MAX_HEADER + 3


def test_salt_is_bytes() -> None:
    assert chat(cache_salt="é").salt == "é".encode()
    assert chat().salt == b""


# --- messages ---------------------------------------------------------------------------------------------------------


def test_messages_become_what_templates_read() -> None:
    sent = [
        {"role": "developer", "content": "Be brief.", "name": "boss"},
        {"role": "user", "content": [{"type": "text", "text": "a\ud800"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "reasoning_content": "hm"},
        {"role": "tool", "content": "<|im_end|>", "tool_call_id": "1"},
        {"role": "system", "content": ""},
    ]
    called = {**CALL, "function": {"name": "add", "arguments": {"a": 1}}}
    assert chat(messages=sent).conversation() == [
        {"role": "system", "content": "Be brief.", "name": "boss"},
        {"role": "user", "content": "a\ufffd\nb"},
        {"role": "assistant", "content": "", "tool_calls": [called], "reasoning_content": "hm"},
        {"role": "tool", "content": "<|im_end|>", "tool_call_id": "1"},
        {"role": "system", "content": ""},
    ]


@pytest.mark.parametrize("arguments", ["", "{}", None, {}])
def test_a_call_without_arguments_has_none(arguments: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    (message,) = chat(messages=[{"role": "assistant", "tool_calls": [call]}]).conversation()
    assert message["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        *((text, text) for text in ("{", '{"city":', "[1]", '{"a": NaN}', "null", "7", "Paris", '{"a": 1, "a": 2}')),
        ("[" * 10_000, "[" * 10_000),
        ('{"a\ud800":', '{"a\ufffd":'),
        (5, "5"),
        (["a", {"b": None}], '["a", {"b": null}]'),
        (False, "false"),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_arguments_that_are_no_object_are_text(arguments: Any, text: str) -> None:
    """An answer that max_tokens cut off is sent back as it was; nothing of it is lost, a repeated name neither."""
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    (message,) = chat(messages=[{"role": "assistant", "tool_calls": [call]}]).conversation()
    assert message["tool_calls"] == [{**call, "function": {"name": "now", "arguments": text}}]


@pytest.mark.parametrize("text", ['{"a": {"b": [{"c": 1}]}, "d": {}}', '{"\\"a\\": 1": "b\\": 2"}', "{}", '{"": ":"}'])
def test_arguments_that_are_an_object_are_one(text: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": text}}
    (message,) = chat(messages=[{"role": "assistant", "tool_calls": [call]}]).conversation()
    assert message["tool_calls"][0]["function"]["arguments"] == json.loads(text)


ANSWERED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"content": None, "refusal": "No."}, {"content": "No."}),
    ({"content": "Well.", "refusal": "No."}, {"content": "Well.\nNo."}),
    ({"content": [{"type": "refusal", "refusal": "No."}]}, {"content": "No."}),
    ({"content": [{"type": "text", "text": "a"}], "refusal": "No."}, {"content": "a\nNo."}),
    ({"content": None}, {"content": ""}),
    ({"content": []}, {"content": ""}),
    ({"reasoning_content": "hm"}, {"content": "", "reasoning_content": "hm"}),
    ({"content": [], "tool_calls": [CALL]}, {"content": "", "tool_calls": [CALLED]}),
    (
        {"content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}},
        {"content": "", "tool_calls": [{name: v for name, v in CALLED.items() if name != "id"}]},
    ),
    (
        {"content": "", "tool_calls": [{"id": "1", "type": "custom", "custom": {"name": "sh", "input": "ls -l"}}]},
        {
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "sh", "arguments": "ls -l"}}],
        },
    ),
    (
        {"content": [{"type": "text", "text": "a", "annotations": [], "cache_control": {"type": "ephemeral"}}]},
        {"content": "a", "content.cache_control": True},
    ),
]


@pytest.mark.parametrize(("sent", "made"), ANSWERED, ids=lambda value: ascii(value)[:60])
def test_whatever_an_answer_may_be_is_taken_back(sent: dict[str, Any], made: dict[str, Any]) -> None:
    assert chat(messages=[USER, {"role": "assistant", **sent}]).conversation()[1] == {"role": "assistant", **made}


def test_the_old_role_of_results() -> None:
    said = {"role": "function", "name": "add", "content": "2"}
    assert chat(messages=[said]).conversation() == [{**said, "role": "tool"}]


def test_the_longest_conversation_is_taken() -> None:
    assert len(chat(messages=[USER] * MAX_MESSAGES).conversation()) == MAX_MESSAGES


def test_template_options() -> None:
    assert chat().template_options() == {
        "add_generation_prompt": True,
        "continue_final_message": False,
        "tools": None,
    }
    tools = [{"type": "function", "function": {"name": "f"}}]
    chosen = chat(
        add_generation_prompt=False,
        continue_final_message=True,
        tools=tools,
        tool_choice="none",
        reasoning_effort="low",
        chat_template_kwargs={"enable_thinking": False},
    )
    assert chosen.template_options() == {
        "add_generation_prompt": False,
        "continue_final_message": True,
        "tools": tools,
        "reasoning_effort": "low",
        "enable_thinking": False,
    }
    assert chat(tools=[], tool_choice="auto", response_format={"type": "text"}, best_of=1).ignored(LIMITS) == []


def test_tools_are_callable_unless_the_choice_is_none() -> None:
    tools = [tool("f", {"type": "object", "properties": {"a": {}, "b": True}, "required": ["a"]}), tool("mcp.g-1")]
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": None}):
        assert chat(tools=tools, **choice).callable_tools == tuple(tools)
    none = chat(tools=tools, tool_choice="none", parallel_tool_calls=False)
    assert (none.callable_tools, none.template_options()["tools"]) == ((), tools)
    assert chat().callable_tools == ()


def test_which_tool_must_be_called() -> None:
    tools, named = [tool("f"), tool("g")], {"type": "function", "function": {"name": "g"}}
    asked = [chat(tools=tools, tool_choice=choice).must_call for choice in (None, "none", "auto", "required", named)]
    assert asked == [False, False, False, True, "g"]


def allowed(*names: str, **mode: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"tools": tools, **mode}}


def test_some_of_the_tools_may_be_allowed() -> None:
    """The model is told of no other."""
    tools = [tool("f"), tool("g"), tool("h")]
    for mode, must in (({}, False), ({"mode": "auto"}, False), ({"mode": "required"}, True)):
        made = chat(tools=tools, tool_choice=allowed("h", "f", **mode))
        assert made.must_call is must
        assert list(made.callable_tools) == made.template_options()["tools"] == [tools[0], tools[2]]
    for wrong in (allowed(), allowed("i"), allowed("f", mode="any"), {"type": "allowed_tools", "tools": [tools[0]]}):
        assert_refused(chat, {"tools": tools, "tool_choice": wrong}, "tool_choice")


# --- /tokenize, /detokenize -------------------------------------------------------------------------------------------


def test_tokenize_takes_a_prompt_or_messages() -> None:
    text = read_tokenize(b'{"prompt": "", "return_token_strs": true}', LIMITS)
    assert isinstance(text, TokenizeTextRequest)
    assert (text.prompt, text.add_special_tokens, text.return_token_strs) == ("", True, True)
    talk = read_tokenize(json.dumps({"messages": [USER], "add_generation_prompt": False}).encode(), LIMITS)
    assert isinstance(talk, TokenizeChatRequest)
    assert (talk.conversation(), talk.add_special_tokens) == ([USER], False)
    assert talk.template_options()["add_generation_prompt"] is False


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a", "messages": [USER]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
    ],
)
def test_tokenize_refuses(fields: dict[str, Any], param: str) -> None:
    assert_refused(lambda **sent: read_tokenize(json.dumps(sent).encode(), LIMITS), fields, param)


@pytest.mark.parametrize("tokens", [None, "a", [1000], [-1], [1.0], [True], [[1]]])
def test_detokenize_refuses(tokens: Any) -> None:
    assert_refused(lambda **sent: checked(DetokenizeRequest, sent, LIMITS), {"tokens": tokens}, "tokens")


def test_tokenize_bodies() -> None:
    assert checked(DetokenizeRequest, {"tokens": [1, 2]}, LIMITS).tokens == [1, 2]
    ids, text = list(range(10_000)), 'é\u2028"\n😀' * 20_000
    for write in (json_text, lambda body: b"".join(json_pieces(body))):
        told = json.loads(write(tokenize_body(ids, 256)))
        assert told == {"count": 10_000, "max_model_len": 256, "tokens": ids, "token_strs": None}
        assert json.loads(write(tokenize_body(ids, 256, str)))["token_strs"] == [str(i) for i in ids]
        assert json.loads(write(detokenize_body(text))) == {"prompt": text}
        assert json.loads(write(detokenize_body(""))) == {"prompt": ""}


# --- whatever is sent -------------------------------------------------------------------------------------------------

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=3) | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.just("role"), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(
    sorted({*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields, *REFUSED, "junk", "\ud800"})
)


@given(st.dictionaries(NAMES, JUNK, max_size=4), st.booleans())
def test_junk_is_taken_or_refused_and_nothing_else(junk: dict[str, Any], is_chat: bool) -> None:
    make = chat if is_chat else completion
    try:
        request = make(**junk)
    except InputError as error:
        told = wire_error(error)
        assert told.status == 400
        json_text(told.body).encode()
    else:
        assert request.sampling_params.check_ids(LIMITS.vocab_size) is None
        assert 1 <= request.num_choices <= LIMITS.max_completions


def test_nothing_heavy_is_loaded() -> None:
    """The process that talks HTTP starts fast; who serves these bodies is nothing they know."""
    folder = Path(__file__).resolve().parents[4]
    names = ["errors", "json.text", "anthropic_api.stream"]
    names += [f"openai.{name}" for name in ("requests", "replies", "stream", "tokenization", "responses_stream")]
    code = f"import sys, {', '.join(f'specserve.server.wire.{name}' for name in names)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "specserve.server.wire.openai.stream" in loaded
    assert not {"torch", "transformers", "aiohttp", "specserve.engine.engine", "specserve.engine.build"} & loaded


def test_the_rows_are_not_refused_for_another_reason() -> None:
    assert json_object(b"{}") == {}
    assert chat().conversation() == [USER]
    assert completion().prompt == ("Hi",)


# --- what is held as long as the answer takes -------------------------------------------------------------------------


def test_nothing_is_held_that_nobody_reads() -> None:
    """Of an unknown name its value, of thousands all but as many as the answer's header could tell; of a message, whose
    template may read them, all."""
    heavy = [{}] * 1000
    asked = chat(
        user=heavy, metadata={"a": heavy}, store=heavy, junk=heavy, messages=[{**USER, "name": "x", "own": heavy}]
    )
    assert (asked.user, asked.metadata, asked.store, asked.model_extra) == (None, None, None, {"junk": True})
    assert asked.conversation()[0]["own"] == heavy
    assert asked.ignored(LIMITS) == ["junk"]
    many = chat(**{f"unknown_{i}": 1 for i in range(100_000)})
    assert set((many.model_extra or {}).values()) == {True}
    assert len(many.ignored(LIMITS)) == 1024
    with pytest.raises(InputError, match="prompt does not belong here"):
        chat(**{f"unknown_{i}": 1 for i in range(5000)}, prompt="a")


@pytest.mark.parametrize("make", [chat, completion])
def test_beams(make: Any) -> None:
    """n is the width, as in vLLM, unless there is a beam_width; the model's sampling defaults are not for them."""
    searched = make(use_beam_search=True, n=3).sampling_params
    assert (searched.beam_width, searched.n, searched.length_penalty, searched.early_stopping) == (3, 3, 1.0, False)
    wide = make(use_beam_search=True, beam_width=4, length_penalty=-0.5, early_stopping="never").sampling_params
    assert (wide.beam_width, wide.n, wide.length_penalty, wide.early_stopping) == (4, 1, -0.5, "never")
    assert make(use_beam_search=False, n=3).sampling_params.beam_width is None
    assert make(n=3).sampling_params.beam_width is None
