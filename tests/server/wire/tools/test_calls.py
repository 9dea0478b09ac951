"""Calls of tools, found in answers of every format: whole, in pieces, broken, and in the bodies and events of chats."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from specserve.errors import ModelError
from specserve.outputs import Chunk, CompletionOutput, RequestOutput
from specserve.server.wire.answer import Arguments, Call, Part, Text
from specserve.server.wire.anthropic_api.stream import MessageStream, message_body
from specserve.server.wire.openai.replies import Reply, chat_body
from specserve.server.wire.openai.responses import ResponsesRequest
from specserve.server.wire.openai.responses_stream import ResponseStream, response_body
from specserve.server.wire.openai.stream import ChatStream
from specserve.server.wire.tools.calls import ToolCalling, keeping_delimiters
from specserve.server.wire.tools.enforced import EnforcedCalls
from specserve.text.tool_tags import LLAMA as LLAMA_STYLE, style_of
from specserve.text.tools import CallFormat, call_format
from specserve.types import SamplingParams, SequenceStats, TokenLogprobs

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
CHATML = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
# A family's sign in the chat template, and the answer that calls weather and then now, or weather alone.
HERMES = "<tool_call>"
QWEN_TAGS = "<tool_call>\n<function=example>"
LLAMA = '<|start_header_id|>{"name": ..., "parameters": ...}'
MISTRAL_NAMED = "[TOOL_CALLS]name[ARGS]"
MISTRAL_LIST = "[TOOL_CALLS] {% if tool_call.id | length != 9 %}"
WEATHER = '{"name": "weather", "arguments": {"city": "Köln", "days": 2}}'
ANSWERS = {
    HERMES: f'<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>{{"name": "now"}}</tool_call>',
    QWEN_TAGS: (
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ),
    MISTRAL_NAMED: '[TOOL_CALLS]weather[ARGS]{"city": "Köln", "days": 2}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}',
    MISTRAL_LIST: f'[TOOL_CALLS] [{WEATHER}, {{"name": "now", "arguments": {{}}}}]',
}
BOTH = [("weather", '{"city": "Köln", "days": 2}'), ("now", "{}")]


def named(source: str, special: tuple[str, ...] = ()) -> CallFormat:
    found = call_format(None, f"{{{{ tools }}}}{source}", special)
    assert found is not None
    return found


def calling(source: str | CallFormat = HERMES, prompt: str = CHATML, **chosen: Any) -> ToolCalling:
    numbers = itertools.count()
    made = source if isinstance(source, CallFormat) else named(source)
    return ToolCalling(made, TOOLS, prompt, new_id=lambda: f"call_{next(numbers)}", **chosen)


def parts_of(calling: ToolCalling, *pieces: str) -> list[Part]:
    parser = calling.parser()
    return [*itertools.chain.from_iterable(map(parser.push, pieces)), *parser.finish()]


def told(parts: list[Part]) -> list[str | tuple[str, str]]:
    """Texts joined, and calls with their arguments."""
    found: list[Any] = []
    for part in parts:
        if isinstance(part, Arguments):
            found[-1] = (found[-1][0], found[-1][1] + part.text)
        elif isinstance(part, Call):
            found.append((part.name, ""))
        elif found and isinstance(found[-1], str):
            found[-1] += part.text
        else:
            found.append(part.text)
    return found


# --- formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ANSWERS)
@pytest.mark.parametrize("before", ["", "Let me look.", "\n "])
@pytest.mark.parametrize("after", ["", "\n", " \n\n"])
def test_every_family_calls_tools(family: str, before: str, after: str) -> None:
    parts = told(parts_of(calling(family), f"{before}\n{ANSWERS[family]}{after}"))
    assert parts == [*([before] if before.strip() else []), *BOTH]


@pytest.mark.parametrize("begin", ["", "\n ", "<|python_tag|>"])
@pytest.mark.parametrize("key", ["parameters", "arguments"])
def test_llama_answers_with_a_call_and_nothing_else(begin: str, key: str) -> None:
    answer = f'{begin}{{"name": "weather", "{key}": {{"city": "Rom"}}}}'
    assert told(parts_of(calling(LLAMA), answer)) == [("weather", '{"city": "Rom"}')]
    for text in (f"So: {answer}", f"{answer} and more", '{"name": "Rom"}', '{"a": 1}', '{"name": "weather", "x'):
        assert told(parts_of(calling(LLAMA), text)) == [text]


def test_a_model_is_taken_at_its_word() -> None:
    own = {
        "start_anchor": "<a>",
        "fields": {
            "tool_calls": {"open": "CALL(", "close": ")", "content": "json", "repeats": True},
            "content": {"content": "text"},
        },
    }
    found = call_format(own, HERMES, ())
    assert found == CallFormat(own, style_of(own))
    assert told(parts_of(calling(found), f"a CALL({WEATHER}) b")) == ["a", BOTH[0], " b"]
    assert call_format({"fields": {"content": {}}}, HERMES, ()) == named(HERMES)
    longer = {"tool_calls": {"open": ["CALL(", "CALL(("], "close": [")", "))"], "content": "json"}}
    for text in (f"a CALL(({WEATHER})) b", f"a CALL({WEATHER}) b"):
        for cut_text in ([text], list(text)):
            found = CallFormat({**own, "fields": longer})
            assert told(parts_of(calling(found), *cut_text)) == ["a", BOTH[0], " b"]
    with pytest.raises(ModelError, match="response_template"):
        calling(CallFormat({"fields": {"tool_calls": {"open": "a", "close": 5}}}))


def test_what_nobody_knows_has_no_format() -> None:
    assert call_format(None, "{{ tools | tojson }}", ()) is None
    assert call_format(None, "", ()) is None


def test_formats_say_what_they_need() -> None:
    tokens = ("[TOOL_CALLS]", "</s>", "<|im_end|>")
    assert [named(family, tokens).special for family in (HERMES, QWEN_TAGS, MISTRAL_NAMED, MISTRAL_LIST)] == [
        False,
        False,
        True,
        True,
    ]
    params = SamplingParams(temperature=0.5)
    assert keeping_delimiters(named(MISTRAL_LIST, tokens), params) == SamplingParams(
        temperature=0.5, skip_special_tokens=False
    )
    assert keeping_delimiters(named(HERMES, tokens), params) is params
    for family, pattern in ((HERMES, "call_[0-9a-f]{24}"), (MISTRAL_LIST, "[0-9a-f]{9}")):
        ids = [
            part.id for part in parts_of(ToolCalling(named(family), TOOLS), ANSWERS[family]) if isinstance(part, Call)
        ]
        assert len(set(ids)) == 2
        for made in ids:
            assert re.fullmatch(pattern, made)


# --- what is a call and what is not -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inside",
    [
        "",
        "hello",
        '{"name": "weather", "arguments": {"city": "Rom"}',
        '{"name": "delete", "arguments": {}}',
        '{"name": ["weather"], "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "weather", "arguments": [1]}',
        '{"name": "weather", "arguments": "Rom"}',
        '{"name": "weather", "arguments": {"days": NaN}}',
        '{"name": "weather", "arguments": {"days": 1e999}}',
        '{"name": "weather", "arguments": {"days": ' + "1" * 5000 + "}}",
        '{"name": "weather", "arguments": ' + "[" * 100_000,
        f'[{WEATHER}, {{"name": "delete"}}]',
        f"{WEATHER} {WEATHER}",
        "5",
        "null",
    ],
    ids=lambda text: text[:50],
)
def test_what_only_looks_like_a_call_is_text(inside: str) -> None:
    answer = f"Well\n <tool_call>{inside}</tool_call> so\n"
    assert told(parts_of(calling(), answer)) == [answer]
    after = parts_of(calling(), f"{answer}<tool_call>{WEATHER}</tool_call>")
    assert told(after) == [answer.rstrip(), BOTH[0]]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("{}", "{}"),
        ("null", "{}"),
        ('"{\\"city\\": \\"Rom\\"}"', '{"city": "Rom"}'),
        ('{"days": "2"}', '{"days": "2"}'),
        ('{"city": "\\ud800"}', '{"city": "\ufffd"}'),
        ('{"city": "</tool>\\n\\"é\\""}', '{"city": "</tool>\\n\\"é\\""}'),
    ],
)
def test_arguments_are_an_object_as_text(arguments: str, expected: str) -> None:
    answer = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    assert told(parts_of(calling(), answer)) == [("weather", expected)]


def test_arguments_between_tags_have_the_types_of_the_tool() -> None:
    """A client's schema may be anything; what cannot be read by it stays text."""
    answer = (
        "<tool_call>\n<function=weather>\n<parameter=city>\n 7\n</parameter>\n<parameter=days>3</parameter>\n"
        '<parameter=tags>\n["a", 1]\n</parameter>\n<parameter=other>\nx\ny\n</parameter></function></tool_call>'
    )
    (call,) = told(parts_of(calling(QWEN_TAGS), answer))
    assert json.loads(call[1]) == {"city": " 7", "days": 3, "tags": ["a", 1], "other": "x\ny"}
    strange = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": {"a": {"anyOf": 5}}}}}]
    text = "<tool_call><function=weather><parameter=a>1</parameter></function></tool_call>"
    assert told(parts_of(ToolCalling(named(QWEN_TAGS), strange), text)) == [text]


def test_an_answer_that_ends_inside_a_call() -> None:
    assert told(parts_of(calling(), f"a <tool_call>{WEATHER}")) == ["a", BOTH[0]]
    assert told(parts_of(calling(), f"a <tool_call>{WEATHER[:-3]}")) == [f"a <tool_call>{WEATHER[:-3]}"]
    assert told(parts_of(calling(), "a <tool_")) == ["a <tool_"]
    assert told(parts_of(calling(), "")) == []


def outcome(calling: ToolCalling, answer: str) -> bool | None:
    parser = calling.parser()
    parser.push(answer)
    parser.finish()
    return parser.called


@pytest.mark.parametrize("family", ANSWERS)
def test_wherever_an_answer_ends_only_a_last_call_that_is_whole_was_called(family: str) -> None:
    answer = ANSWERS[family]
    seen = set()
    for end in range(len(answer) + 1):
        parts = told(parts_of(calling(family), answer[:end]))
        calls = [part for part in parts if isinstance(part, tuple)]
        assert calls == BOTH[: len(calls)], "a call that was cut off is none"
        called = outcome(calling(family), answer[:end])
        assert (called is True) == bool(calls and isinstance(parts[-1], tuple)), answer[:end]
        seen.add((len(calls), called))
    assert {(0, None), (0, False), (2, True)} <= seen
    assert family == MISTRAL_LIST or {(1, True), (1, False)} <= seen


@pytest.mark.parametrize(
    ("answer", "called"),
    [
        ("Hello", None),
        ("a <tool_", None),
        ("<tool_call>and so on", None),
        ("<tool_call>and so on</tool_call>", None),
        (f"<tool_call>{WEATHER}</tool_call> So.", True),
        (f"<tool_call>{WEATHER}</tool_call> 1 <tool", False),
        (f"<tool_call>{WEATHER}</tool_call><tool_call>", False),
        (f'<tool_call>{WEATHER}</tool_call><tool_call>{{"name": "no', False),
        (f"<tool_call>{WEATHER}", True),
        ('<tool_call>{"name": "weather", "arguments": {"days": "2"}}</tool_call>', False),
        ('<tool_call>{"name": "weather", "arguments": {"days": 2, "other": [{}]}}</tool_call>', True),
        (f'<tool_call>{{"name": "weather", "arguments": {{"days": ""}}}}</tool_call><tool_call>{WEATHER}', True),
        ('<tool_call>{"name": "now", "arguments": {"any": 1}}</tool_call>', True),
        (f"<think>Shall I <tool_call>{WEATHER}</tool_call>", None),
    ],
)
def test_what_was_called(answer: str, called: bool | None) -> None:
    assert outcome(calling(), answer) is called


def test_json_that_is_no_call_is_not_cut_off() -> None:
    for text, called in (('{"name": "Rom"}', None), ('{"name": "Rom"} a', None), ('{"name": "Rom", "a', False)):
        assert outcome(calling(LLAMA), text) is called
    assert outcome(calling(LLAMA), '{"name": "now", "parameters": {}}') is True
    own = {
        "start_anchor": "<a>",
        "fields": {"tool_calls": {"open": "CALL", "content": "text"}, "content": {"content": "text"}},
    }
    assert outcome(calling(CallFormat(own)), "CALL me") is None


def test_calls_inside_of_reasoning_are_text() -> None:
    thought = f"<think>\nMaybe <tool_call>{WEATHER}</tool_call>?\n</think>"
    assert told(parts_of(calling(), f"{thought}\n\n<tool_call>{WEATHER}</tool_call>")) == [thought, BOTH[0]]
    begun = calling(prompt=f"{CHATML}<think>\n")
    rest = thought.removeprefix("<think>\n")
    assert told(parts_of(begun, f"{rest}<tool_call>{WEATHER}</tool_call>")) == [rest, BOTH[0]]
    assert told(parts_of(calling(prompt=f"{CHATML}<think>\n\n</think>\n\n"), ANSWERS[HERMES])) == BOTH


def test_prompts_have_no_calls_but_one_may_have_begun_there() -> None:
    called = f"{CHATML}<tool_call>{WEATHER}</tool_call>"
    assert told(parts_of(calling(prompt=f"<tool_call>{CHATML}"), "a\n")) == ["a\n"]
    assert told(parts_of(calling(prompt="<tool_call> and no anchor"), "a")) == ["a"]
    assert told(parts_of(calling(prompt=called), " \n")) == [" \n"]
    assert told(parts_of(calling(prompt=f"{CHATML}b <tool_call>"), f"{WEATHER}</tool_call>a")) == [BOTH[0], "a"]
    assert told(parts_of(calling(prompt=f"{CHATML}b <tool_call>"), "x</tool_call>")) == ["x</tool_call>"]


def test_one_call_alone_if_so_asked() -> None:
    for family in ANSWERS:
        assert told(parts_of(calling(family, parallel=False), f"a{ANSWERS[family]}\n")) == ["a", BOTH[0]]


# --- in pieces --------------------------------------------------------------------------------------------------------


def test_text_comes_at_once_and_calls_when_they_are_whole() -> None:
    parser = calling().parser()
    assert parser.push("Let me") == [Text("Let me")]
    assert parser.push(" look. 1 <") == [Text(" look. 1")]
    assert parser.push(" 2, <tool") == [Text(" < 2,")]
    assert parser.push("_call>") == []
    assert parser.push(WEATHER) == []
    assert parser.push("</tool_call") == []
    assert parser.push("> \n") == [Call("call_0", "weather"), Arguments('{"city": "Köln", "days": 2}')]
    assert parser.push("Done") == [Text(" \nDone")]
    assert parser.push("\n<tool_call>no</tool_call>") == [Text("\n<tool_call>no</tool_call>")]
    assert parser.push("<tool_") == []
    assert parser.finish() == [Text("<tool_")]


FRAGMENTS = (
    *ANSWERS.values(), WEATHER, "<tool_call>", "</tool_call>", "<tool_", "call>", "[TOOL_CALLS]", "[ARGS]", "{}", "now",
    "<think>", "</think>", "</function>", "<function=now>", " ", "\n", "a", "<", '{"name": "now"}', "[THINK]",
    "[/THINK]",
)  # fmt: skip
FAMILIES = (*ANSWERS, LLAMA)


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=400)
@given(
    family=st.sampled_from(FAMILIES),
    pieces=st.lists(st.sampled_from(FRAGMENTS), max_size=7),
    places=st.lists(st.integers(0, 500), max_size=12),
    parallel=st.booleans(),
)
def test_parts_are_the_same_however_an_answer_is_cut(
    family: str, pieces: list[str], places: list[int], parallel: bool
) -> None:
    answer = "".join(pieces)
    make: Callable[[], ToolCalling] = lambda: calling(family, parallel=parallel)  # noqa: E731
    whole = told(parts_of(make(), answer))
    assert told(parts_of(make(), *cut(answer, places))) == whole
    assert told(parts_of(make(), *answer)) == whole
    if not any(isinstance(part, tuple) for part in whole):
        assert "".join(map(str, whole)) == answer, "an answer without calls is as it was written"


# --- bodies and events ------------------------------------------------------------------------------------------------


class Words:
    special_ids = frozenset[int]()

    def token_bytes(self, token_id: int) -> bytes:
        return b"x"


def reply(parser: Any, **chosen: Any) -> Reply:
    return Reply(id="x-1", created=1, model="tiny", vocabulary=Words(), tool_parser=parser, **chosen)


def output(*texts: str, reason: Any = "stop") -> RequestOutput:
    stats = SequenceStats(arrived=1.0)
    completions = [CompletionOutput(i, text, [1], None, reason, stats=stats) for i, text in enumerate(texts)]
    return RequestOutput("r", CHATML, [1], completions)


def choices(body: Any) -> list[Any]:
    return [(choice["message"], choice["finish_reason"]) for choice in body["choices"]]


FIRST = {
    "id": "call_0",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Köln", "days": 2}'},
}
SECOND = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}


def test_a_message_with_calls() -> None:
    made = reply(calling().parser)
    assert choices(chat_body(made, output(ANSWERS[HERMES]), 2.0)) == [
        ({"role": "assistant", "content": None, "refusal": None, "tool_calls": [FIRST, SECOND]}, "tool_calls")
    ]
    texts = output(f"So: <tool_call>{WEATHER}</tool_call>", "Hello\n", "")
    with_text, plain, empty = choices(chat_body(reply(calling().parser), texts, 2.0))
    assert with_text[0]["content"] == "So:"
    assert plain == ({"role": "assistant", "content": "Hello\n", "refusal": None}, "stop")
    assert empty == ({"role": "assistant", "content": "", "refusal": None}, "stop")
    cut_off = chat_body(reply(calling().parser), output(ANSWERS[HERMES] + "<tool_call>{", reason="length"), 2.0)
    assert choices(cut_off)[0][0]["content"] == "<tool_call>{"
    assert choices(cut_off)[0][1] == "length"
    without = chat_body(reply(None), output(ANSWERS[HERMES]), 2.0)
    assert choices(without)[0][0]["content"] == ANSWERS[HERMES]


def chunk(text: str, index: int = 0, reason: Any = None, **more: Any) -> Chunk:
    return Chunk("r", index, text, [1], finish_reason=reason, **more)


def deltas(events: list[str]) -> list[Any]:
    found = [choice for event in events for choice in json.loads(event)["choices"]]
    return [(choice["delta"], choice["finish_reason"]) for choice in found]


def test_a_stream_with_calls_event_by_event() -> None:
    stream = ChatStream(reply(calling().parser), output(""))
    assert deltas(stream.push(chunk("So: <tool"))) == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "So:"}, None),
    ]
    assert stream.push(chunk(f"_call>{WEATHER}")) == []
    begun = {"index": 0, "id": "call_0", "type": "function", "function": {"name": "weather", "arguments": ""}}
    assert deltas(stream.push(chunk("</tool_call>\n<tool_call>"))) == [
        ({"tool_calls": [begun]}, None),
        ({"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "Köln", "days": 2}'}}]}, None),
    ]
    second = {"index": 1, "id": "call_1", "type": "function", "function": {"name": "now", "arguments": ""}}
    assert deltas(stream.push(chunk('{"name": "now"}', reason="stop"))) == [
        ({"tool_calls": [second]}, None),
        ({"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]}, None),
        ({}, "tool_calls"),
    ]
    assert stream.finished


UNFIT = '<tool_call>{"name": "weather", "arguments": {"days": "two"}}</tool_call>'
ENDINGS = [  # an answer, what ended it, and finish_reason, stop_reason of a message, status of a response
    (ANSWERS[HERMES], "stop", None, "tool_calls", "tool_use", "completed"),
    (ANSWERS[HERMES], "stop", 25, "tool_calls", "tool_use", "completed"),
    (ANSWERS[HERMES], "stop", "##", "tool_calls", "stop_sequence", "completed"),
    (ANSWERS[HERMES], "length", None, "length", "max_tokens", "incomplete"),
    (ANSWERS[HERMES][:-30], "stop", None, "stop", "end_turn", "incomplete"),
    (ANSWERS[HERMES][:-30], "stop", 25, "stop", "end_turn", "incomplete"),
    (ANSWERS[HERMES][:-30], "stop", "##", "stop", "stop_sequence", "incomplete"),
    (ANSWERS[HERMES][:-30], "length", None, "length", "max_tokens", "incomplete"),
    (ANSWERS[HERMES] + "Done", "stop", None, "tool_calls", "tool_use", "completed"),
    (ANSWERS[HERMES] + UNFIT, "stop", None, "stop", "end_turn", "incomplete"),
    (UNFIT + ANSWERS[HERMES], "stop", None, "tool_calls", "tool_use", "completed"),
    (ANSWERS[HERMES][:40], "stop", "##", "stop", "stop_sequence", "incomplete"),
    ("Hello", "stop", None, "stop", "end_turn", "completed"),
]


@pytest.mark.parametrize(("answer", "reason", "stop", "chat", "message", "response"), ENDINGS)
def test_a_call_is_told_of_where_it_can_be_made(
    answer: str, reason: Any, stop: Any, chat: str, message: str, response: str
) -> None:
    ended = output(answer, reason=reason)
    ended.outputs[0].stop_reason = stop
    asked = ResponsesRequest(input="Hi")
    make = lambda: calling().parser()  # noqa: E731
    last = Chunk("r", 0, answer, [1], finish_reason=reason, stop_reason=stop)

    assert choices(chat_body(reply(make), ended, 2.0))[0][1] == chat
    assert deltas(ChatStream(reply(make), ended).push(last))[-1] == ({}, chat)
    assert message_body(reply(make), ended, 2.0, make())["stop_reason"] == message
    messages = MessageStream(reply(make), ended, make())
    messages.push(last)
    assert json.loads(messages.end(2.0)[0])["delta"]["stop_reason"] == message
    body = response_body(reply(make), asked, ended, 2.0, make())
    responses = ResponseStream(reply(make), asked, ended, make())
    responses.push(last)
    (event,) = responses.end(2.0)
    for told in (body, json.loads(event)["response"]):
        assert told["status"] == response
        assert told["output"][-1]["status"] == response
        assert (told["incomplete_details"] is None) == (reason == "stop")


def test_what_was_held_back_for_nothing_is_streamed_at_the_end() -> None:
    stream = ChatStream(reply(calling().parser), output(""))
    events = [*stream.push(chunk("a <tool_call>")), *stream.push(chunk("{", reason="length"))]
    assert deltas(events)[1:] == [({"content": "a"}, None), ({"content": " <tool_call>{"}, None), ({}, "length")]


def test_scores_and_ids_come_with_their_chunk_though_its_text_is_held_back() -> None:
    stream = ChatStream(reply(calling().parser, return_token_ids=True), output(""))
    scores = [TokenLogprobs(1, -0.5, 1, {})]
    held = json.loads(stream.push(chunk("<tool_call>", logprobs=scores))[1])["choices"][0]
    assert (held["delta"], held["token_ids"], len(held["logprobs"]["content"])) == ({}, [1], 1)
    events = [json.loads(event)["choices"][0] for event in stream.push(chunk(WEATHER, reason="stop", logprobs=scores))]
    assert [("token_ids" in event, event["logprobs"] is not None) for event in events] == [
        (True, True),
        (False, False),
        (False, False),
    ]


def added_up(found: list[Any]) -> tuple[dict[str, Any], str]:
    """The message that deltas make, as OpenAI's clients add them up."""
    content, calls = "", []
    for delta, _ in found[1:-1]:
        content += delta.get("content", "")
        for part in delta.get("tool_calls", []):
            assert set(part) == ({"index", "id", "type", "function"} if "id" in part else {"index", "function"})
            if "id" in part:
                assert part["index"] == len(calls)
                assert part["function"]["arguments"] == ""
                calls.append({**part, "function": dict(part["function"])})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    message = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    for call in calls:
        del call["index"]
    return message | ({"tool_calls": calls} if calls else {}), found[-1][1]


@settings(max_examples=150)
@given(
    family=st.sampled_from(FAMILIES),
    answers=st.lists(st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join), min_size=1, max_size=2),
    places=st.lists(st.integers(0, 500), max_size=8),
    reason=st.sampled_from(["stop", "length"]),
)
def test_a_stream_says_what_the_body_says(family: str, answers: list[str], places: list[int], reason: str) -> None:
    def numbered() -> Callable[[], Any]:
        """Ids begin anew for each completion."""
        return lambda: calling(family).parser()

    bodies = choices(chat_body(reply(numbered()), output(*answers, reason=reason), 2.0))
    stream = ChatStream(reply(numbered()), output(*[""] * len(answers)))
    for index, answer in enumerate(answers):
        events = [event for piece in cut(answer, places) for event in stream.push(chunk(piece, index))]
        events += stream.push(chunk("", index, reason))
        assert added_up(deltas(events)) == bodies[index]
    assert stream.finished


def test_other_apis_make_their_own_of_calls() -> None:
    answer = f"So: {ANSWERS[HERMES]}\n"
    body = message_body(reply(None), output(answer), 2.0, calling().parser())
    assert [(block["type"], block.get("name"), block.get("input")) for block in body["content"]] == [
        ("text", None, None),
        ("tool_use", "weather", {"city": "Köln", "days": 2}),
        ("tool_use", "now", {}),
    ]
    assert body["stop_reason"] == "tool_use"
    stream = MessageStream(reply(None), output(""), calling().parser())
    events = [*stream.push(chunk(answer[:20])), *stream.push(chunk(answer[20:], reason="stop"))]
    begun = [event["content_block"] for event in map(json.loads, events) if event["type"] == "content_block_start"]
    assert [(block["type"], block.get("id")) for block in begun] == [
        ("text", None),
        ("tool_use", "call_0"),
        ("tool_use", "call_1"),
    ]


def test_openai_takes_calls() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        openai = pytest.importorskip("openai", reason="openai is not installed: pip install 'openai>=3,<4'")
    body = chat_body(reply(calling().parser), output(ANSWERS[HERMES]), 2.0)
    read_back = openai.types.chat.ChatCompletion.model_validate(body)
    assert [call.function.name for call in read_back.choices[0].message.tool_calls] == ["weather", "now"]
    stream = ChatStream(reply(calling().parser), output(""))
    for event in stream.push(chunk(ANSWERS[HERMES], reason="stop")):
        openai.types.chat.ChatCompletionChunk.model_validate_json(event)


def test_transformers_is_loaded_with_the_first_tools_and_torch_never() -> None:
    code = (
        "import sys, specserve.server.wire.tools.calls as t, specserve.text.tools as m\n"
        "print('transformers' in sys.modules)\n"
        "t.ToolCalling(m.call_format(None, '<tool_call>', ()), [{'function': {'name': 'f'}}])\n"
        "print('transformers' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "False"]


# --- answers that a client has steered --------------------------------------------------------------------------------

_MANY = 30_000  # characters
HOSTILE = {
    "blanks": " " * _MANY,
    "opened again and again": "<tool_call>" * (_MANY // 11),
    "opened and empty": "<tool_call></tool_call>" * (_MANY // 23),
    "opened and blank": "<tool_call>" + " " * _MANY,
    "a name without an end": "<tool_call><function=" + "a" * _MANY,
    "closed and blank": "<tool_call><function=x></function>" + " " * _MANY,
    "parameters without ends": "<tool_call><function=x>" + "<parameter=a>" * (_MANY // 13) + "</function></tool_call>",
    "keys without ends": "<tool_call><function=x>" + "<parameter=" * (_MANY // 11) + "</function></tool_call>",
    "Mistral's name without an end": "[TOOL_CALLS]" + "a" * _MANY,
    "Mistral's id without an end": "[TOOL_CALLS]a[CALL_ID]" + "a" * _MANY,
    "Mistral's many calls": "[TOOL_CALLS]a[ARGS]" * (_MANY // 19),
    "Llama's blanks": "<|python_tag|>" + " " * _MANY,
    "Llama's key": '{"name"' + " " * _MANY,
    "thoughts": "<think></think>" * (_MANY // 15),
}  # fmt: skip


@pytest.mark.parametrize("step", [4, _MANY * 2], ids=["in pieces", "whole"])
@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
def test_no_answer_takes_more_than_linear_time(answer: str, step: int) -> None:
    """Where time was quadratic the worst of these took 15 s."""
    for family in FAMILIES:
        parser = calling(family).parser()
        pieces = [answer[at : at + step] for at in range(0, len(answer), step)]
        begun = time.thread_time()
        parts = [*itertools.chain.from_iterable(map(parser.push, pieces)), *parser.finish()]
        assert time.thread_time() - begun < 1.5
        assert "".join(part.text for part in parts if isinstance(part, Text)) == answer


def test_what_a_models_own_delimiter_may_become_is_not_looked_at_with_every_token() -> None:
    field = {"open_pattern": r"CALL\s*\((?=\s*\{)", "close": ")", "content": "json"}
    own = {"start_anchor": "<a>", "fields": {"tool_calls": field, "content": {"content": "text"}}}
    found = CallFormat(own)
    assert told(parts_of(calling(found), *f"a CALL{' ' * 3000}({WEATHER}) b")) == ["a", BOTH[0], " b"]
    parser = calling(found).parser()
    begun = time.thread_time()
    parts = [part for piece in ["CALL", *[" "] * 30_000] for part in parser.push(piece)]
    assert (parts, time.thread_time() - begun < 1) == ([], True)


@pytest.mark.parametrize("made", [1, 50_000])
def test_a_whole_answer_of_enforced_calls_is_read_once(made: int) -> None:
    parser = EnforcedCalls(LLAMA_STYLE, lambda: "id")
    begun = time.thread_time()
    parts = parser.push('{"name": "now", "parameters": {}}' * made)
    assert (len(parts), time.thread_time() - begun < 5) == (2 * made, True)


def test_the_answers_of_a_request_go_on_from_a_beginning_that_is_read_once() -> None:
    """A client can have an answer go on from a long message of its own."""
    made = calling(prompt=f"{CHATML}{'<tool_call>no</tool_call>' * 4000}")
    begun = time.thread_time()
    parsers = [made.parser() for _ in range(128)]
    assert time.thread_time() - begun < 0.05
    for parser in parsers[:2]:
        assert told([*parser.push(f"<tool_call>{WEATHER}</tool_call>"), *parser.finish()]) == [BOTH[0]]
