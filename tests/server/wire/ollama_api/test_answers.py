"""Answers in Ollama's words: whole, and line by line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specserve.outputs import Chunk, CompletionOutput, RequestOutput
from specserve.server.wire.answer import Arguments, Call, Part, Text
from specserve.server.wire.ollama_api.answers import OllamaStream, answer_body
from specserve.server.wire.openai.replies import Reply
from specserve.types import SequenceStats, TokenLogprobs

STATS = SequenceStats(arrived=1.0, first_scheduled=1.5, first_token=2.0, finished=3.0, num_steps=1)


class Letters:
    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


class Marked:
    """Tells `[` as the beginning of a call of `f`, whose arguments go to `]`."""

    def __init__(self) -> None:
        self.called: bool | None = None
        self._inside = False

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        for letter in text:
            if letter == "[":
                parts.append(Call("c", "f"))
                self._inside = self.called = True
            elif letter == "]":
                self._inside = False
            else:
                parts.append(Arguments(letter) if self._inside else Text(letter))
        return parts

    def finish(self) -> list[Part]:
        return []


def reply(**fields: Any) -> Reply:
    return Reply(id="x", created=1, model="tiny", vocabulary=Letters(), **fields)


def output(text: str, reason: Any = "stop", **fields: Any) -> RequestOutput:
    ids = list(text.encode())
    return RequestOutput("r", "p", [1, 2, 3], [CompletionOutput(0, text, ids, None, reason, stats=STATS, **fields)])


def lines(stream: OllamaStream, *chunks: Chunk) -> list[Any]:
    return [json.loads(line) for chunk in chunks for line in stream.push(chunk)] + [
        json.loads(line) for line in ([] if stream.failed else stream.end(9.0))
    ]


def test_counts_and_times() -> None:
    body = answer_body(reply(), "generate", output("ab", "length"), 9.0)
    assert (body["response"], body["done"], body["done_reason"]) == ("ab", True, "length")
    assert (body["prompt_eval_count"], body["eval_count"]) == (3, 2)
    assert (body["total_duration"], body["load_duration"]) == (2 * 10**9, 0)
    assert (body["prompt_eval_duration"], body["eval_duration"]) == (5 * 10**8, 10**9)


def test_an_eval_takes_some_time() -> None:
    quick = SequenceStats(arrived=1.0, first_scheduled=1.0, first_token=2.0, finished=2.0, num_steps=1)
    made = output("a")
    made.outputs[0].stats = quick
    assert answer_body(reply(), "chat", made, 9.0)["eval_duration"] == 1


@pytest.mark.parametrize("kind", ["chat", "generate"])
def test_lines_add_up_to_the_whole(kind: Any) -> None:
    made = output("ab")
    made.outputs[0].reasoning = "why"
    whole = answer_body(reply(), kind, made, 9.0)
    first = Chunk("r", 0, "a", [97], None, reasoning="why")
    told = lines(OllamaStream(reply(), kind, made), first, Chunk("r", 0, "b", [98], None, "stop", stats=STATS))
    said = [line["message"] if kind == "chat" else line for line in [*told, whole]]
    text = "content" if kind == "chat" else "response"
    for name in (text, "thinking"):
        assert "".join(each.get(name, "") for each in said[:-1]) == said[-1][name]
    assert [line["done"] for line in told] == [*[False] * (len(told) - 1), True]
    ends = ("done_reason", "total_duration", "eval_count", "prompt_eval_count")
    assert {name: told[-1][name] for name in ends} == {name: whole[name] for name in ends}


def test_calls_come_whole() -> None:
    text = 'x[{"a": 1}][{"b": 2}]y'
    calling = reply(tool_parser=Marked)
    whole = answer_body(calling, "chat", output(text), 9.0)["message"]
    calls = [
        {"id": "c", "function": {"index": 0, "name": "f", "arguments": {"a": 1}}},
        {"id": "c", "function": {"index": 1, "name": "f", "arguments": {"b": 2}}},
    ]
    assert (whole["content"], whole["tool_calls"]) == ("xy", calls)
    stream = OllamaStream(calling, "chat", output(text))
    told = lines(
        stream, *(Chunk("r", 0, letter, [1], None) for letter in text[:-1]),
        Chunk("r", 0, "y", [1], None, "stop", stats=STATS),
    )  # fmt: skip
    assert [call for line in told for call in line["message"].get("tool_calls", ())] == calls
    assert "".join(line["message"]["content"] for line in told) == "xy"
    cut = OllamaStream(calling, "chat", output('[{"a": 1, "b', "length"))
    told = lines(cut, Chunk("r", 0, '[{"a": 1, "b', [1], None, "length", stats=STATS))
    assert told[0]["message"]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert told[-1]["done_reason"] == "length"


def test_log_probabilities_go_with_the_first_line_of_their_chunk() -> None:
    scores = [TokenLogprobs(97, -0.5, 1, {97: -0.5})]
    told = lines(OllamaStream(reply(), "chat", output("a")), Chunk("r", 0, "", [97], scores, "stop", stats=STATS))
    entry = {"token": "a", "logprob": -0.5, "bytes": [97]}
    assert told[0]["logprobs"] == [{**entry, "top_logprobs": [entry]}]
    assert "logprobs" not in told[1]


def test_a_line_is_one_to_every_client() -> None:
    text = "a\x85b\u2028c\u2029d\ne\r\x0b\x0c\x1c\x1d\x1ef"
    stream = OllamaStream(reply(), "chat", output(text))
    (event,) = stream.push(Chunk("r", 0, text, [97], None))
    sent = stream.frame(event).decode()
    (line,) = sent.splitlines()
    assert json.loads(line)["message"]["content"] == text
    assert sent.endswith("\n")


def test_a_stream_that_fails_ends_with_an_error() -> None:
    stream = OllamaStream(reply(), "chat", output("a"))
    told = lines(stream, Chunk("r", 0, "", [], None, "error", error="It broke.", stats=STATS))
    assert told == [{"error": "It broke."}]
    assert stream.frame(json.dumps(told[0])) == b'{"error": "It broke."}\n'
