"""Requests in Ollama's words, and the chat completion or completion that each asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specserve.errors import InputError
from specserve.server.wire.fields import Limits
from specserve.server.wire.ollama_api.requests import GenerateRequest, OllamaChatRequest
from specserve.server.wire.openai.requests import ChatCompletionRequest, CompletionRequest
from specserve.server.wire.translated import own_names, read_translated

LIMITS = Limits(vocab_size=1000, max_model_len=256, sampling=(("temperature", 0.6), ("top_p", 0.5)))
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def chat(**fields: Any) -> OllamaChatRequest:
    return read_translated(OllamaChatRequest, json.dumps({"messages": [USER], **fields}).encode(), LIMITS)


def generate(**fields: Any) -> GenerateRequest:
    return read_translated(GenerateRequest, json.dumps({"prompt": "Hi", **fields}).encode(), LIMITS)


def as_chat(**fields: Any) -> ChatCompletionRequest:
    return chat(**fields).as_chat(LIMITS)


def test_answers_are_streamed_unless_they_are_not_to_be() -> None:
    assert [chat().stream, chat(stream=None).stream, chat(stream=False).stream] == [True, True, False]
    assert as_chat().stream
    assert not as_chat(stream=False).stream


def test_options_are_sampling() -> None:
    options = {"temperature": 0.3, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "num_predict": 7, "stop": ["x"],
               "repeat_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "num_ctx": 256}  # fmt: skip
    for params in (as_chat(options=options).sampling_params, generate(options=options).as_wire(LIMITS).sampling_params):
        assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.3, 0.9, 5, 0.1, 3)
        assert (params.max_tokens, params.stop, params.repetition_penalty) == (7, ("x",), 1.1)
        assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    assert chat(options=options).ignored(LIMITS) == []


def test_what_options_do_not_say_is_the_servers() -> None:
    assert (as_chat().sampling_params.temperature, as_chat().sampling_params.top_p) == (0.6, 0.5)
    greedy = as_chat(options={"temperature": 0}).sampling_params
    assert (greedy.temperature, greedy.top_p) == (0.0, 1.0)


@pytest.mark.parametrize("most", [None, 0, -1, -2])
def test_no_limit_of_an_answer_is_the_context(most: int | None) -> None:
    assert as_chat(options={"num_predict": most}).sampling_params.max_tokens is None
    raw = generate(raw=True, options={"num_predict": most}).as_wire(LIMITS)
    assert raw.sampling_params.max_tokens == 256


def test_a_context_that_is_too_long_is_refused_with_both_numbers() -> None:
    with pytest.raises(InputError, match=r"options\.num_ctx is 257 .* 256 tokens") as caught:
        chat(options={"num_ctx": 257})
    assert caught.value.param == "options.num_ctx"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ({"options": {"top_k": "5"}}, "options.top_k"),
        ({"messages": [{**USER, "images": ["aGk="]}]}, "messages[0].images"),
        ({"messages": [{"role": "critic", "content": "a"}]}, "messages[0].role"),
        ({"format": "yaml"}, "format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
    ],
)
def test_what_is_wrong_is_named_as_it_was_sent(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InputError) as caught:
        as_chat(**fields)
    assert caught.value.param == param
    assert param in str(caught.value)


def test_formats() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    kinds = [as_chat(format=format).structured for format in (None, "", "json", schema)]
    assert kinds[:2] == [None, None]
    assert kinds[2] == ChatCompletionRequest.model_validate(
        {"messages": [USER], "response_format": {"type": "json_object"}}, context=LIMITS
    ).structured  # fmt: skip
    assert json.loads(kinds[3].text) == schema


def test_what_means_nothing_is_named() -> None:
    call = {"function": {"name": "weather", "arguments": {}, "mood": 1}, "colour": 2}
    asked = chat(
        keep_alive="5m",
        sparkle=1,
        options={"mirostat": 1, "num_gpu": 2},
        messages=[USER, {"role": "assistant", "tool_calls": [call], "taste": 3}],
    )
    assert set(asked.ignored(LIMITS)) == {
        *("keep_alive", "sparkle", "options.mirostat", "options.num_gpu", "messages.taste"),
        *("messages.tool_calls.colour", "messages.tool_calls.function.mood"),
    }
    assert generate(raw=True, think=True).ignored(LIMITS) == ["think"]


def test_thinking_is_for_the_template() -> None:
    assert as_chat().template_options() == as_chat(think="").template_options()
    for think, effort in ((True, None), (False, None), ("high", "high")):
        for body in (chat(think=think), generate(think=think)):
            options = body.as_chat(LIMITS).template_options()
            assert (options["enable_thinking"], options.get("reasoning_effort")) == (think is not False, effort)
            unread = body.as_chat(LIMITS).as_sent(["enable_thinking", "reasoning_effort"])
            assert own_names(unread, body.own_names) == ["think"]


def test_results_find_their_calls() -> None:
    def called(*names: str) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": {}}} for name in names]}

    def result(**fields: Any) -> dict[str, Any]:
        return {"role": "tool", "content": "11", **fields}

    messages = [USER, called("a", "b"), result(tool_name="b"), result(), called("a"), result(tool_name="a"), result()]
    sent = as_chat(messages=messages).conversation()
    ids = [call["id"] for message in sent for call in message.get("tool_calls", ())]
    assert len(set(ids)) == 3
    assert all(len(id) == 9 and id.isalnum() for id in ids)
    assert [message.get("tool_call_id") for message in sent if message["role"] == "tool"] == [
        ids[1],
        ids[0],
        ids[2],
        None,
    ]
    own = {"role": "assistant", "tool_calls": [{"id": "mine", "function": {"name": "a", "arguments": {"x": 1}}}]}
    sent = as_chat(messages=[USER, own, result(tool_call_id="mine")]).conversation()
    assert (sent[1]["tool_calls"][0]["id"], sent[2]["tool_call_id"]) == ("mine", "mine")
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert own_names(["messages.tool_calls.id", "messages.tool_call_id", "messages.name"], chat().own_names) == [
        "messages.tool_name"
    ]


def test_thoughts_are_sent_back() -> None:
    sent = as_chat(messages=[USER, {"role": "assistant", "content": "a", "thinking": "b"}, USER]).conversation()
    assert sent[1] == {"role": "assistant", "content": "a", "reasoning_content": "b"}


def test_a_prompt_is_a_question_or_a_text() -> None:
    question = generate(system="Be brief.").as_wire(LIMITS)
    assert isinstance(question, ChatCompletionRequest)
    assert question.conversation() == [{"role": "system", "content": "Be brief."}, USER]
    text = generate(raw=True, logprobs=True, top_logprobs=2, format="json").as_wire(LIMITS)
    assert isinstance(text, CompletionRequest)
    assert (text.prompt, text.sampling_params.logprobs, text.structured is None) == (("Hi",), 2, False)
    assert generate().without_template().as_wire(LIMITS).prompt == ("Hi",)
    with pytest.raises(InputError, match="has no chat template"):
        generate(system="a").without_template()


@pytest.mark.parametrize(
    "fields", [{"suffix": "a"}, {"template": "{{ .Prompt }}"}, {"context": [1, 2]}, {"images": ["aGk="]}]
)
def test_what_generate_does_not_do(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(InputError, match=rf"^{name} ") as caught:
        generate(**fields)
    assert caught.value.param == name
    assert generate(suffix="", template="", context=[], images=[]).ignored(LIMITS) == []


def test_nothing_asked() -> None:
    assert chat(messages=[]).is_empty
    assert generate(prompt="").is_empty
    assert not chat().is_empty
    assert [chat(model=name).name for name in ("tiny", "tiny:latest", "a:b", None)] == ["tiny", "tiny", "a:b", None]
    assert chat(tools=[TOOL]).as_chat(LIMITS).tools == (TOOL,)
