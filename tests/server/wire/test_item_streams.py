"""Answers in the shapes of Anthropic's Messages and OpenAI's Responses, whole and event by event; a stream says what
the whole body says."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from specserve.outputs import Chunk, CompletionOutput, RequestOutput
from specserve.server.wire.answer import Arguments, Call, Part, Text, items_of
from specserve.server.wire.anthropic_api.requests import MessagesRequest
from specserve.server.wire.anthropic_api.stream import MessageStream, count_tokens_body, message_body
from specserve.server.wire.errors import WireError, overloaded, unavailable
from specserve.server.wire.fields import Limits
from specserve.server.wire.item_stream import ItemStream
from specserve.server.wire.json.pieces import json_text
from specserve.server.wire.openai.replies import Reply
from specserve.server.wire.openai.responses import LOGPROBS, ResponsesRequest
from specserve.server.wire.openai.responses_stream import ResponseStream, response_body
from specserve.server.wire.translated import read_translated
from specserve.types import SequenceStats, TokenLogprobs

NOW = 20.0
LIMITS = Limits(vocab_size=1000, max_model_len=256)


class Words:
    """Token i is the letter i of the alphabet."""

    special_ids = frozenset({25})

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([97 + token_id])


class Brackets:
    """`<name:arguments>` is a call, everything else is text; a call is certain with its colon."""

    def __init__(self) -> None:
        self._held = ""
        self._calls = False
        self._num_calls = 0

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._held += text
        while self._held and (taken := self._take()):
            parts += [part for part in taken if isinstance(part, Call) or part.text]
        return parts

    def finish(self) -> list[Part]:
        rest, self._held = self._held, ""
        return [Text(rest)] if rest else []

    @property
    def called(self) -> bool | None:
        return None if not self._num_calls else not self._calls

    def _take(self) -> list[Part]:
        """The parts of the beginning of what is held; none where the rest of it must come first."""
        if self._calls:
            inside, end, self._held = self._held.partition(">")
            self._calls = not end
            return [Arguments(inside)]
        before, bracket, rest = self._held.partition("<")
        name, colon, after = rest.partition(":")
        if before or not colon:
            self._held = bracket + rest
            return [Text(before)] if before else []
        self._held, self._calls = after, True
        self._num_calls += 1
        return [Call(f"call_{self._num_calls}", name)]


def reply(id: str = "x_1") -> Reply:
    return Reply(id=id, created=1_700_000_000, model="tiny", vocabulary=Words())


def stats(**changed: Any) -> SequenceStats:
    """3 steps with a draft of 2 tokens each; 1, 0 and 1 were accepted."""
    fields: dict[str, Any] = {
        "arrived": 10.0,
        "first_scheduled": 10.25,
        "first_token": 10.5,
        "finished": 12.5,
        "num_steps": 3,
        "num_drafts": 3,
        "num_draft_tokens": 6,
        "num_accepted_tokens": 2,
        "accepted_by_position": [2, 0],
        "drafted_by_position": [3, 3],
        "num_prefix_cached_tokens": 2,
        "longest_draft": 2,
        "by_source": {"ngram": [6, 2]},
    }
    return SequenceStats(**fields | changed)


def output(text: str = "Hello", **changed: Any) -> RequestOutput:
    fields: dict[str, Any] = {"token_ids": [1, 2, 25], "finish_reason": "stop", "stats": stats()} | changed
    completion = CompletionOutput(0, text, **fields)
    return RequestOutput("request-0", "abc", [3, 4, 5], [completion])


def chunk(text: str, ids: tuple[int, ...] = (1,), **more: Any) -> Chunk:
    return Chunk("request-0", 0, text, list(ids), **more)


def request(**fields: Any) -> ResponsesRequest:
    return read_translated(ResponsesRequest, json.dumps({"input": "Hi", **fields}).encode(), LIMITS)


def bodies(events: list[str]) -> list[dict[str, Any]]:
    return [json.loads(event) for event in events]


METRICS = {
    "time_to_first_token_ms": 500.0,
    "generation_time_ms": 2000.0,
    "queue_time_ms": 250.0,
    "tokens_per_second": 1.0,
    "speculative_decoding": {
        "mean_acceptance_length": 1 + 2 / 3,
        "draft_acceptance_rate": 1 / 3,
        "acceptance_histogram": [1, 2, 0],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 2,
        "num_draft_tokens": 6,
        "num_spec_tokens": 2,
        "by_source": {"ngram": {"num_draft_tokens": 6, "num_accepted_tokens": 2}},
    },
}


# --- Anthropic --------------------------------------------------------------------------------------------------------

MESSAGE = {"id": "x_1", "type": "message", "role": "assistant", "model": "tiny"}
THINKING = {"output_tokens_details": {"thinking_tokens": 0}}
COUNTS = {
    "input_tokens": 1,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 2,
    "output_tokens": 3,
    **THINKING,
}
FIRST_COUNTS = {
    "input_tokens": 3,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 0,
    "output_tokens": 0,
    **THINKING,
}


def test_message_body() -> None:
    assert message_body(reply(), output(), NOW) == {
        **MESSAGE,
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": COUNTS,
        "metrics": METRICS,
    }
    assert count_tokens_body(7) == {"input_tokens": 7}


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"finish_reason": "stop"}, "end_turn", None),
        ({"finish_reason": "stop", "stop_reason": 25}, "end_turn", None),
        ({"finish_reason": "stop", "stop_reason": "###"}, "stop_sequence", "###"),
        ({"finish_reason": "length"}, "max_tokens", None),
    ],
)
def test_why_a_message_ended(fields: dict[str, Any], reason: str, sequence: str | None) -> None:
    ended = output(**fields)
    body = message_body(reply(), ended, NOW)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)
    stream = MessageStream(reply(), ended)
    stream.push(chunk("Hello", **fields))
    assert bodies(stream.end(NOW))[0]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_a_message_stream_event_by_event() -> None:
    stream = MessageStream(reply(), output())
    begun = {**MESSAGE, "content": [], "stop_reason": None, "stop_sequence": None, "usage": FIRST_COUNTS}
    assert bodies(stream.push(chunk(""))) == [{"type": "message_start", "message": begun}]
    assert bodies(stream.push(chunk("Hel"))) == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}},
    ]
    assert stream.push(chunk("")) == []
    assert not stream.finished
    assert bodies(stream.push(chunk("lo", finish_reason="stop"))) == [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "lo"}},
        {"type": "content_block_stop", "index": 0},
    ]
    assert stream.finished
    reasons = {"stop_reason": "end_turn", "stop_sequence": None}
    assert bodies(stream.end(NOW)) == [
        {"type": "message_delta", "delta": reasons, "usage": COUNTS, "metrics": METRICS},
        {"type": "message_stop"},
    ]


CALLING = 'Well.<add:{"a":1}><now:>'


def test_calls_are_blocks() -> None:
    body = message_body(reply(), output(CALLING), NOW, Brackets())
    assert body["content"] == [
        {"type": "text", "text": "Well."},
        {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "call_2", "name": "now", "input": {}},
    ]
    assert (body["stop_reason"], body["stop_sequence"]) == ("tool_use", None)
    assert message_body(reply(), output(CALLING), NOW)["content"] == [{"type": "text", "text": CALLING}]


def test_streamed_calls_are_blocks() -> None:
    stream = MessageStream(reply(), output(CALLING), Brackets())
    events = [*stream.push(chunk('Well.<add:{"a"')), *stream.push(chunk(":1}><now:>", finish_reason="stop"))]
    delta = "content_block_delta"
    assert bodies(events)[1:] == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": delta, "index": 0, "delta": {"type": "text_delta", "text": "Well."}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "content_block_start",
            "index": 1,
            "content_block": {"type": "tool_use", "id": "call_1", "name": "add", "input": {}},
        },
        {"type": delta, "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"a"'}},
        {"type": delta, "index": 1, "delta": {"type": "input_json_delta", "partial_json": ":1}"}},
        {"type": "content_block_stop", "index": 1},
        {
            "type": "content_block_start",
            "index": 2,
            "content_block": {"type": "tool_use", "id": "call_2", "name": "now", "input": {}},
        },
        {"type": "content_block_stop", "index": 2},
    ]
    assert bodies(stream.end(NOW))[0]["delta"]["stop_reason"] == "tool_use"


CUT: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("{", {}),
    ('{"city":', {}),
    ('{"city": "Kö', {}),
    ('{"city": "Köln", "days": [1, 2', {"city": "Köln", "days": [1, 2]}),
    ('{"city": "Köln", "at": {"x": 1, "y', {"city": "Köln", "at": {"x": 1}}),
    ('{"a": "x", "b": 1e999, "c": tr', {"a": "x", "b": sys.float_info.max}),
    ('{"a": 1, "b": "\\ud83d', {"a": 1}),
    ('{"a": 1, "b": ' + "1" * 5000, {}),  # more digits than Python reads
    ('{"a": 1, "b": ' + "[" * 2000, {}),
]


@pytest.mark.parametrize(("arguments", "read"), CUT, ids=[text[:24] for text, _ in CUT])
@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_call_that_was_cut_off_holds_what_was_whole(arguments: str, read: dict[str, Any], reason: Any) -> None:
    ended = output(f"<add:{arguments}", finish_reason=reason)
    body = message_body(reply(), ended, NOW, Brackets())
    assert json.loads(json_text(body))["content"] == [
        {"type": "tool_use", "id": "call_1", "name": "add", "input": read}
    ]
    stream = MessageStream(reply(), ended, Brackets())
    events = bodies([*stream.push(chunk(f"<add:{arguments}", finish_reason=reason)), *stream.end(NOW)])
    said = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(said) == arguments
    if reason == "length":
        assert body["stop_reason"] == "max_tokens"
        assert next(e["delta"]["stop_reason"] for e in events if e["type"] == "message_delta") == "max_tokens"


@pytest.mark.parametrize("value", ["1e999", "-1e999", "1" * 5000, '"\\ud83d"', "[" * 1500 + "]" * 1500])
def test_what_json_spells_and_nothing_holds_can_be_sent(value: str) -> None:
    ended = output(f'<add:{{"a": {value}}}>')
    assert json_text(message_body(reply(), ended, NOW, Brackets()))


def test_what_only_looked_like_a_call_is_text() -> None:
    ended = output("a<b")
    assert message_body(reply(), ended, NOW, Brackets())["content"] == [{"type": "text", "text": "a<b"}]
    stream = MessageStream(reply(), ended, Brackets())
    events = bodies([*stream.push(chunk("a<b")), *stream.push(chunk("", finish_reason="stop"))])
    assert [event["delta"]["text"] for event in events if "delta" in event] == ["a", "<b"]
    assert events[-1] == {"type": "content_block_stop", "index": 0}


def test_a_message_may_say_nothing() -> None:
    silent = output("")
    assert message_body(reply(), silent, NOW)["content"] == []
    stream = MessageStream(reply(), silent)
    (begun,) = bodies(stream.push(chunk("", finish_reason="stop")))
    assert begun["type"] == "message_start"
    assert [event["type"] for event in bodies(stream.end(NOW))] == ["message_delta", "message_stop"]


def test_a_failed_message() -> None:
    stream = MessageStream(reply("msg_1"), output())
    stream.push(chunk("He"))
    (event,) = bodies(stream.push(chunk("", finish_reason="error", error="It broke.")))
    assert event == {
        "type": "error",
        "error": {"type": "api_error", "message": "It broke."},
        "request_id": "msg_1",
    }
    early = MessageStream(reply(), output())
    (event,) = bodies(early.fail(unavailable("The server stops.")))
    assert event["error"] == {"type": "overloaded_error", "message": "The server stops."}


# --- OpenAI's Responses -----------------------------------------------------------------------------------------------


def response(**known: Any) -> dict[str, Any]:
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1_700_000_000,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "model": "tiny",
        "output": [],
        "usage": None,
        **request().echo(),
        **known,
    }


RESPONSE_USAGE = {
    "input_tokens": 3,
    "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
    "output_tokens": 3,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 6,
}


def part(text: str, logprobs: list[Any] | None = None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def said(text: str, **changed: Any) -> dict[str, Any]:
    fixed = {"type": "message", "id": "msg_1_0", "status": "completed", "role": "assistant"}
    return {**fixed, "content": [part(text)], **changed}


def test_response_body() -> None:
    known = {"usage": RESPONSE_USAGE, "metrics": METRICS}
    body = response_body(reply("resp_1"), request(), output(), NOW)
    assert body == response(output=[said("Hello")], **known)
    cut = response_body(reply("resp_1"), request(), output(finish_reason="length"), NOW)
    assert cut == response(
        status="incomplete",
        incomplete_details={"reason": "max_output_tokens"},
        output=[said("Hello", status="incomplete")],
        **known,
    )


def test_a_response_says_what_was_asked_for() -> None:
    asked = request(instructions="a", temperature=0.5, max_output_tokens=9, metadata={"a": "b"}, store=True)
    body = response_body(reply("resp_1"), asked, output(), NOW)
    assert body | asked.echo() == body
    assert (body["metadata"], body["max_output_tokens"], body["store"]) == ({"a": "b"}, 9, False)


def test_a_response_stream_event_by_event() -> None:
    stream = ResponseStream(reply("resp_1"), request(), output())
    fresh = response(status="in_progress")
    at = {"item_id": "msg_1_0", "output_index": 0, "content_index": 0}
    assert bodies(stream.push(chunk("Hel"))) == [
        {"type": "response.created", "sequence_number": 0, "response": fresh},
        {"type": "response.in_progress", "sequence_number": 1, "response": fresh},
        {
            "type": "response.output_item.added",
            "sequence_number": 2,
            "output_index": 0,
            "item": said("", status="in_progress", content=[]),
        },
        {"type": "response.content_part.added", "sequence_number": 3, **at, "part": part("")},
        {"type": "response.output_text.delta", "sequence_number": 4, **at, "delta": "Hel", "logprobs": []},
    ]
    assert not stream.finished
    assert bodies(stream.push(chunk("lo", finish_reason="stop"))) == [
        {"type": "response.output_text.delta", "sequence_number": 5, **at, "delta": "lo", "logprobs": []},
        {"type": "response.output_text.done", "sequence_number": 6, **at, "text": "Hello", "logprobs": []},
        {"type": "response.content_part.done", "sequence_number": 7, **at, "part": part("Hello")},
        {"type": "response.output_item.done", "sequence_number": 8, "output_index": 0, "item": said("Hello")},
    ]
    assert stream.finished
    whole = response_body(reply("resp_1"), request(), output(), NOW)
    assert bodies(stream.end(NOW)) == [{"type": "response.completed", "sequence_number": 9, "response": whole}]


def test_a_stream_that_was_cut_is_incomplete() -> None:
    ended = output(finish_reason="length")
    stream = ResponseStream(reply("resp_1"), request(), ended)
    *_, done = bodies(stream.push(chunk("Hello", finish_reason="length")))
    assert done["item"] == said("Hello", status="incomplete")
    (last,) = bodies(stream.end(NOW))
    assert last["type"] == "response.incomplete"
    assert last["response"] == response_body(reply("resp_1"), request(), ended, NOW)


def function_call(index: int, name: str, arguments: str) -> dict[str, Any]:
    own = {"id": f"fc_1_{index}", "call_id": f"call_{index}", "name": name, "arguments": arguments}
    return {"type": "function_call", **own, "status": "completed"}


def test_calls_are_items() -> None:
    body = response_body(reply("resp_1"), request(), output(CALLING), NOW, Brackets())
    assert body["output"] == [said("Well."), function_call(1, "add", '{"a":1}'), function_call(2, "now", "")]
    assert body["status"] == "completed"


def test_streamed_calls_are_items() -> None:
    stream = ResponseStream(reply("resp_1"), request(), output(CALLING), Brackets())
    stream.push(chunk("Well."))
    *closed, added, first = bodies(stream.push(chunk('<add:{"a"')))
    assert [event["type"].removeprefix("response.") for event in closed] == [
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]
    empty = function_call(1, "add", "") | {"status": "in_progress"}
    at = {"item_id": "fc_1_1", "output_index": 1}
    kind = "response.function_call_arguments"
    assert added == {
        "type": "response.output_item.added",
        "sequence_number": 8,
        "output_index": 1,
        "item": empty,
    }
    assert first == {"type": f"{kind}.delta", "sequence_number": 9, **at, "delta": '{"a"'}
    second, done, item, *rest = bodies(stream.push(chunk(":1}><now:>", finish_reason="stop")))
    assert second == {"type": f"{kind}.delta", "sequence_number": 10, **at, "delta": ":1}"}
    assert done == {"type": f"{kind}.done", "sequence_number": 11, **at, "name": "add", "arguments": '{"a":1}'}
    whole = function_call(1, "add", '{"a":1}')
    assert item == {"type": "response.output_item.done", "sequence_number": 12, "output_index": 1, "item": whole}
    assert [event["type"] for event in rest] == [
        "response.output_item.added",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]


def test_logprobs_go_with_the_text() -> None:
    entries = [TokenLogprobs(t, -0.5, 1, {t: -0.5, 3: -2.0}) for t in (1, 2, 25)]
    told = [
        {
            "token": chr(97 + token),
            "logprob": -0.5,
            "bytes": [97 + token],
            "top_logprobs": [
                {"token": chr(97 + token), "logprob": -0.5, "bytes": [97 + token]},
                {"token": "d", "logprob": -2.0, "bytes": [100]},
            ],
        }
        for token in (1, 2, 25)
    ]
    asked = request(include=[LOGPROBS], top_logprobs=2)
    body = response_body(reply("resp_1"), asked, output("bc", logprobs=entries), NOW)
    assert body["output"][0]["content"] == [part("bc", told)]
    stream = ResponseStream(reply("resp_1"), asked, output("bc", logprobs=entries))
    events = bodies(
        [
            *stream.push(chunk("", (1,), logprobs=entries[:1])),
            *stream.push(chunk("bc", (2,), logprobs=entries[1:2])),
            *stream.push(chunk("", (25,), logprobs=entries[2:], finish_reason="stop")),
        ]
    )
    deltas = [event for event in events if event["type"].endswith("delta")]
    assert [(event["delta"], event["logprobs"]) for event in deltas] == [
        ("", told[:1]),
        ("bc", told[1:2]),
        ("", told[2:]),
    ]
    assert events[-3]["logprobs"] == told
    assert json.loads(stream.end(NOW)[0])["response"] == body


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (unavailable("Gone."), "server_error"),
        (overloaded("Full."), "rate_limit_exceeded"),
        (WireError(400, "invalid_request_error", "No.", param="input"), "invalid_prompt"),
    ],
)
@pytest.mark.parametrize("began", [False, True])
def test_a_failed_response(error: WireError, code: str, began: bool) -> None:
    stream = ResponseStream(reply("resp_1"), request(), output(CALLING), Brackets())
    earlier = [*stream.push(chunk("Well.<add:"))] if began else []
    *events, last = bodies([*earlier, *stream.fail(error)])
    assert stream.failed
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["sequence_number"] for event in [*events, last]] == list(range(len(events) + 1))
    told = {"code": code, "message": error.message, "type": error.kind, "param": error.param}
    assert last["type"] == "response.failed"
    assert last["response"] == response(status="failed", error=told, output=[said("Well.")] if began else [])


def test_a_completion_that_failed_fails_the_response() -> None:
    stream = ResponseStream(reply("resp_1"), request(), output())
    *_, last = bodies(stream.push(chunk("", finish_reason="error", error="It broke.")))
    assert last["response"]["error"]["message"] == "It broke."
    assert stream.failed


def test_a_completion_that_left_no_token_is_the_clients_fault() -> None:
    last = {"finish_reason": "error", "error": "Nothing may come.", "error_code": "no_token_left"}
    failed = output(**last)
    for make in (
        lambda: message_body(reply(), failed, NOW),
        lambda: response_body(reply(), request(), failed, NOW),
    ):
        with pytest.raises(WireError) as caught:
            make()
        assert (caught.value.status, caught.value.code) == (400, "no_token_left")
    (event,) = bodies(MessageStream(reply(), output()).push(chunk("", **last)))
    assert event["error"] == {"type": "invalid_request_error", "message": "Nothing may come."}
    *_, told = bodies(ResponseStream(reply(), request(), output()).push(chunk("", **last)))
    assert told["response"]["error"] == {
        "code": "invalid_prompt",  # of OpenAI's codes the one that fits
        "message": "Nothing may come.",
        "type": "invalid_request_error",
        "param": None,
    }


# --- both -------------------------------------------------------------------------------------------------------------


def both(ended: RequestOutput, parse: bool = False) -> list[ItemStream]:
    parsers = [Brackets() if parse else None for _ in range(2)]
    return [
        MessageStream(reply("msg_1"), ended, parsers[0]),
        ResponseStream(reply("resp_1"), request(), ended, parsers[1]),
    ]


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_what_did_not_end_well_is_no_answer(reason: str) -> None:
    failed = output(finish_reason=reason)
    with pytest.raises(WireError):
        message_body(reply(), failed, NOW)
    with pytest.raises(WireError):
        response_body(reply(), request(), failed, NOW)


def test_nothing_follows_an_end() -> None:
    for stream in both(output()):
        with pytest.raises(AssertionError):
            stream.end(NOW)
        stream.push(chunk("Hello", finish_reason="stop"))
        with pytest.raises(AssertionError):
            stream.push(chunk(""))
        stream.fail(unavailable("Gone."))
        with pytest.raises(AssertionError):
            stream.end(NOW)


def test_one_answer_is_all_there_is() -> None:
    two = output()
    two.outputs.append(CompletionOutput(1))
    with pytest.raises(AssertionError):
        MessageStream(reply(), two)


def test_frames_have_the_name_of_their_event() -> None:
    for stream in both(output()):
        for event in [*stream.push(chunk('a\n"type":"b"\r\n\u2028', finish_reason="stop")), *stream.end(NOW)]:
            name, data, *rest = stream.frame(event).decode().split("\n")
            assert rest == ["", ""]
            assert name == f"event: {json.loads(event)['type']}"
            assert data == f"data: {event}"
    with pytest.raises(AssertionError):
        stream.frame("[DONE]")


def test_pings() -> None:
    message, responses = both(output())
    assert message.ping() == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert responses.ping() == b": ping\n\n"


def test_parts_add_up_to_items() -> None:
    items = items_of([Text("a"), Text("b"), Call("1", "f"), Arguments("{"), Arguments("}"), Call("2", "g"), Text("c")])
    assert [(type(item).__name__, item.index) for item in items] == [
        ("TextItem", 0),
        ("CallItem", 1),
        ("CallItem", 2),
        ("TextItem", 3),
    ]
    with pytest.raises(AssertionError):
        items_of([Arguments("{")])


# --- reasoning --------------------------------------------------------------------------------------------------------

THOUGHT = "Hm, so."
SIGNATURE = hashlib.sha256(THOUGHT.encode()).hexdigest()


def test_reasoning_is_a_block_of_its_own() -> None:
    body = message_body(reply(), output(reasoning=THOUGHT, num_reasoning_tokens=2), NOW)
    assert body["usage"]["output_tokens_details"] == {"thinking_tokens": 2}
    assert body["content"] == [
        {"type": "thinking", "thinking": THOUGHT, "signature": SIGNATURE},
        {"type": "text", "text": "Hello"},
    ]
    stream = MessageStream(reply(), output(reasoning=THOUGHT))
    events = [*stream.push(chunk("", reasoning="Hm, ")), *stream.push(chunk("Hel", reasoning="so."))]
    delta = {"type": "content_block_delta", "index": 0}
    assert bodies(events)[1:] == [
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "thinking", "thinking": "", "signature": ""},
        },
        {**delta, "delta": {"type": "thinking_delta", "thinking": "Hm, "}},
        {**delta, "delta": {"type": "thinking_delta", "thinking": "so."}},
        {**delta, "delta": {"type": "signature_delta", "signature": SIGNATURE}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Hel"}},
    ]


def test_reasoning_is_an_item_of_its_own() -> None:
    def thought(text: str, **changed: Any) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": text}]
        known = {"type": "reasoning", "id": "rs_1_0", "status": "completed", "summary": [], "content": content}
        return {**known, "encrypted_content": None, **changed}

    ended = output(reasoning=THOUGHT, num_reasoning_tokens=2)
    body = response_body(reply("resp_1"), request(), ended, NOW)
    assert body["output"] == [thought(THOUGHT), said("Hello") | {"id": "msg_1_1"}]
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    stream = ResponseStream(reply("resp_1"), request(), ended)
    events = bodies([*stream.push(chunk("", reasoning=THOUGHT)), *stream.push(chunk("Hel"))])[2:]
    at = {"item_id": "rs_1_0", "output_index": 0}
    within = {**at, "content_index": 0}
    empty = thought("", status="in_progress", content=[])
    assert [{k: v for k, v in event.items() if k != "sequence_number"} for event in events[:6]] == [
        {"type": "response.output_item.added", "output_index": 0, "item": empty},
        {"type": "response.content_part.added", **within, "part": {"type": "reasoning_text", "text": ""}},
        {"type": "response.reasoning_text.delta", **within, "delta": THOUGHT},
        {"type": "response.reasoning_text.done", **within, "text": THOUGHT},
        {"type": "response.content_part.done", **within, "part": {"type": "reasoning_text", "text": THOUGHT}},
        {"type": "response.output_item.done", "output_index": 0, "item": thought(THOUGHT)},
    ]
    cut = response_body(reply("resp_1"), request(), output("", reasoning=THOUGHT, finish_reason="length"), NOW)
    assert (cut["status"], cut["output"]) == ("incomplete", [thought(THOUGHT, status="incomplete")])


def test_log_probabilities_of_reasoning_are_no_texts() -> None:
    scores = [TokenLogprobs(token, -0.5, 1, {}) for token in (1, 2, 3)]
    ended = output("Hi", reasoning=THOUGHT, num_reasoning_tokens=2, logprobs=scores)
    asked = request(include=[LOGPROBS])
    body = response_body(reply("resp_1"), asked, ended, NOW)
    assert [entry["token"] for entry in body["output"][1]["content"][0]["logprobs"]] == ["d"]
    stream = ResponseStream(reply("resp_1"), asked, ended)
    chunks = [
        chunk("", (1,), reasoning=THOUGHT, num_reasoning_tokens=1, logprobs=scores[:1]),
        chunk("Hi", (2, 3), num_reasoning_tokens=1, logprobs=scores[1:], finish_reason="stop"),
    ]
    for one in chunks:
        stream.push(one)
    assert bodies(stream.end(NOW))[-1]["response"] == body


def test_what_was_thought_can_be_sent_back() -> None:
    """The blocks and items of an answer, in the conversation of the next request."""
    ended = output(reasoning=THOUGHT)
    items = response_body(reply("resp_1"), request(), ended, NOW)["output"]
    again = request(input=[{"role": "user", "content": "a"}, *items, {"role": "user", "content": "b"}])
    blocks = message_body(reply(), ended, NOW)["content"]
    talk = [("user", "a"), ("assistant", blocks), ("user", "b")]
    asked = {"max_tokens": 5, "messages": [{"role": role, "content": content} for role, content in talk]}
    messages = read_translated(MessagesRequest, json.dumps(asked).encode(), LIMITS)
    for chat in (again.as_chat(LIMITS), messages.as_chat(LIMITS)):
        said = chat.conversation()[1]
        assert (said["reasoning_content"], said["content"]) == (THOUGHT, "Hello")


# --- however an answer is cut into chunks -----------------------------------------------------------------------------

NAMES = st.text("fg", min_size=1, max_size=2)
OBJECTS = st.dictionaries(st.text("ab", max_size=2), st.integers(0, 9), max_size=2).map(json.dumps)
ANSWERS = st.lists(st.text("ab \né<", max_size=4) | st.builds("<{}:{}>".format, NAMES, OBJECTS), max_size=5)


def split(data: st.DataObject, ended: RequestOutput) -> Iterator[Chunk]:
    """The answer in chunks of any sizes, empty ones too; reasoning before it."""
    (completion,) = ended.outputs
    for piece in cut(data, completion.reasoning):
        yield chunk("", reasoning=piece)
    *pieces, last = cut(data, completion.text)
    for piece in pieces:
        yield chunk(piece)
    yield chunk(last, finish_reason=completion.finish_reason, stats=completion.stats)


def cut(data: st.DataObject, text: str) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[start:stop] for start, stop in itertools.pairwise([0, *places, len(text)])]


def all_events(data: st.DataObject, stream: ItemStream, ended: RequestOutput) -> list[dict[str, Any]]:
    events = [event for one in split(data, ended) for event in stream.push(one)]
    return bodies([*events, *stream.end(NOW)])


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client that follows Anthropic's rules makes of the events."""
    start, *middle, delta, stop = events
    assert (start["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in middle:
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            texts.append("")
        assert event["index"] == len(blocks) - 1, "blocks come one after the other"
        if kind == "delta":
            texts[-1] += "".join(event["delta"].get(name, "") for name in ("text", "partial_json", "thinking"))
            blocks[-1] |= {"signature": event["delta"]["signature"]} if "signature" in event["delta"] else {}
    for block, text in zip(blocks, texts, strict=True):
        if block["type"] in ("text", "thinking"):
            block[block["type"]] += text
        else:
            block["input"] = json.loads(text or "{}")
    told = {"content": blocks, **delta["delta"], "usage": delta["usage"], "metrics": delta["metrics"]}
    return {**start["message"], **told}


def items_told(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a client that follows OpenAI's rules makes of the events of items."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            items.append(event["item"])
        elif kind == "content_part.added":
            items[-1]["content"].append(event["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            items[-1]["content"][0]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            items[-1]["arguments"] += event["delta"]
        elif kind == "output_item.done":
            assert event["item"] == items[-1] | {"status": event["item"]["status"]}
            items[-1] = event["item"]
    return items


@given(
    st.data(),
    ANSWERS.map("".join),
    st.text("ab \n<", max_size=5),
    st.booleans(),
    st.sampled_from(["stop", "length"]),
)
def test_however_it_is_split_a_stream_says_what_the_whole_says(
    data: st.DataObject, text: str, thought: str, parse: bool, reason: str
) -> None:
    def parser() -> Brackets | None:
        return Brackets() if parse else None

    ended = output(text, finish_reason=reason, reasoning=thought)
    whole = message_body(reply("msg_1"), ended, NOW, parser())
    message, responses = both(ended, parse)
    assert message_of(all_events(data, message, ended)) == whole
    events = all_events(data, responses, ended)
    expected = response_body(reply("resp_1"), request(), ended, NOW, parser())
    assert events[-1]["response"] == expected
    assert items_told(events) == expected["output"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


# --- what the APIs' own libraries make of it --------------------------------------------------------------------------


def served(library: str, answers: dict[str, bytes], kind: str) -> Any:
    """A client of the library whose requests are answered with these bytes, by path."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sdk = pytest.importorskip(library, reason=f"{library} is not installed: pip install {library}")
        http = pytest.importorskip("httpx2", reason="a newer release of the library is needed")

    def answer(sent: Any) -> Any:
        return http.Response(200, headers={"content-type": kind}, content=answers[sent.url.path])

    http_client = http.Client(transport=http.MockTransport(answer))
    make, url = {"openai": ("OpenAI", "http://test/v1"), "anthropic": ("Anthropic", "http://test")}[library]
    return getattr(sdk, make)(api_key="x", base_url=url, http_client=http_client, max_retries=0)


def streamed(stream: ItemStream, text: str, thought: str = "") -> bytes:
    """A stream's bytes, pings between them."""
    middle = len(text) // 2
    thoughts = [stream.push(chunk("", reasoning=piece)) for piece in (thought[:2], thought[2:])]
    events = [
        *itertools.chain(*thoughts),
        *stream.push(chunk(text[:middle])),
        *stream.push(chunk(text[middle:], finish_reason="stop")),
    ]
    return stream.ping().join(stream.frame(event) for event in [*events, *stream.end(NOW)])


def strict(parsed: Any) -> None:
    """The libraries fill their types without looking; this looks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        type(parsed).model_validate(parsed.model_dump(by_alias=True))


def test_anthropic_reads_bodies() -> None:
    calling = ["text", "tool_use", "tool_use"]
    for text, thought, kinds in (
        (CALLING, "", calling),
        (CALLING, "Hm.", ["thinking", *calling]),
        ("", "", []),
        ("", "Hm.", ["thinking"]),
        ("Hello", "", ["text"]),
    ):
        body = message_body(reply("msg_1"), output(text, reasoning=thought), NOW, Brackets())
        client = served("anthropic", {"/v1/messages": json.dumps(body).encode()}, "application/json")
        read = client.messages.create(model="tiny", max_tokens=5, messages=[{"role": "user", "content": "Hi"}])
        strict(read)
        assert [block.type for block in read.content] == kinds
        assert (read.usage.input_tokens, read.usage.cache_read_input_tokens, read.usage.output_tokens) == (1, 2, 3)
        assert read.metrics == METRICS
    counting = served("anthropic", {"/v1/messages/count_tokens": b'{"input_tokens": 7}'}, "application/json")
    assert counting.messages.count_tokens(model="a", messages=[]).input_tokens == 7


def test_anthropic_reads_streams() -> None:
    for text, thought in itertools.product((CALLING, "Hello", ""), ("", "Hm, so.")):
        ended = output(text, reasoning=thought)
        raw = streamed(MessageStream(reply("msg_1"), ended, Brackets()), text, thought)
        client = served("anthropic", {"/v1/messages": raw}, "text/event-stream")
        with client.messages.stream(model="tiny", max_tokens=5, messages=[]) as stream:
            for event in stream:
                strict(event)
            final = stream.get_final_message()
        expected = message_body(reply("msg_1"), ended, NOW, Brackets())
        read = final.model_dump(exclude_none=True)
        told = {name: read[name] for name in ("id", "role", "content", "stop_reason", "usage")}
        assert {name: expected[name] for name in told} == told


def test_anthropic_raises_on_an_error_event() -> None:
    stream = MessageStream(reply("msg_1"), output())
    events = [*stream.push(chunk("He")), *stream.fail(unavailable("The server stops."))]
    raw = b"".join(map(stream.frame, events))
    client = served("anthropic", {"/v1/messages": raw}, "text/event-stream")
    with (
        pytest.raises(Exception, match=r"The server stops\.") as caught,
        client.messages.stream(model="tiny", max_tokens=5, messages=[]) as read,
    ):
        list(read)
    assert type(caught.value).__module__.startswith("anthropic")


def test_openai_reads_responses() -> None:
    told = ((CALLING, "Well."), ("", ""), ("Hello", "Hello"))
    for (text, shown), thought in itertools.product(told, ("", "Hm.")):
        body = response_body(reply("resp_1"), request(), output(text, reasoning=thought), NOW, Brackets())
        client = served("openai", {"/v1/responses": json.dumps(body).encode()}, "application/json")
        read = client.responses.create(model="tiny", input="Hi")
        strict(read)
        assert read.output_text == shown
        assert (read.usage.input_tokens_details.cached_tokens, read.usage.total_tokens) == (2, 6)
        assert read.metrics == METRICS
        assert [item.content[0].text for item in read.output if item.type == "reasoning"] == (
            [thought] if thought else []
        )


def test_openai_reads_streams_of_responses() -> None:
    asked = request(tools=[], metadata={"a": "b"})
    for text, thought in itertools.product((CALLING, "Hello", ""), ("", "Hm, so.")):
        ended = output(text, reasoning=thought)
        raw = streamed(ResponseStream(reply("resp_1"), asked, ended, Brackets()), text, thought)
        client = served("openai", {"/v1/responses": raw}, "text/event-stream")
        with client.responses.stream(model="tiny", input="Hi") as stream:
            for event in stream:
                strict(event)
            final = stream.get_final_response()
        expected = response_body(reply("resp_1"), asked, ended, NOW, Brackets())
        read = [item.model_dump(exclude_unset=True) for item in final.output]
        for item in (*read, *expected["output"]):
            item.pop("parsed_arguments", None)
            [part.pop("parsed", None) for part in item.get("content", ())]
        assert read == expected["output"]


def test_openai_reads_a_failed_response() -> None:
    stream = ResponseStream(reply("resp_1"), request(), output())
    raw = b"".join(map(stream.frame, stream.fail(overloaded("Full."))))
    client = served("openai", {"/v1/responses": raw}, "text/event-stream")
    *_, last = client.responses.create(model="tiny", input="Hi", stream=True)
    strict(last)
    assert (last.type, last.response.error.code) == ("response.failed", "rate_limit_exceeded")


@pytest.mark.parametrize("library", ["anthropic", "openai"])
def test_the_libraries_types_do_look(library: str) -> None:
    is_anthropic = library == "anthropic"
    body = message_body(reply(), output(), NOW) if is_anthropic else response_body(reply(), request(), output(), NOW)
    for broken in ({"usage": {"input_tokens": "many"}}, {"role" if is_anthropic else "object": "x"}):
        answers = dict.fromkeys(("/v1/messages", "/v1/responses"), json.dumps({**body, **broken}).encode())
        client = served(library, answers, "application/json")
        made = client.messages if is_anthropic else client.responses
        asked = {"max_tokens": 5, "messages": []} if is_anthropic else {"input": "Hi"}
        with pytest.raises(ValueError, match="validation error"):
            strict(made.create(model="tiny", **asked))
