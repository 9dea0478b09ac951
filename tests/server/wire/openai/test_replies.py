"""The bodies of whole responses and of streams, field by field; a stream says what the whole response says."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from specserve.outputs import Chunk, CompletionOutput, RequestOutput
from specserve.server.wire.errors import WireError, unavailable
from specserve.server.wire.json.pieces import json_text
from specserve.server.wire.openai.logprobs import LEAST, CompletionLogprobs, chat_logprobs
from specserve.server.wire.openai.replies import Reply, chat_body, completion_body, model_card, model_list
from specserve.server.wire.openai.stream import DONE, ChatStream, CompletionStream, Stream
from specserve.server.wire.openai.usage import metrics, speculative_decoding, usage
from specserve.types import SequenceStats, TokenLogprobs

END, NOW = 9, 20.0


class Words:
    """Token i stands for spellings[i]; 5 and 6 are one character together, the last is special."""

    spellings = (b"He", b"llo", b" wor", b"ld", b"!", b"\xf0\x9f", b"\x98\x80", b"a", "é".encode(), b"<end>")
    special_ids = frozenset({END})

    def token_bytes(self, token_id: int) -> bytes:
        return self.spellings[token_id]


HEAD = {"id": "x-1", "created": 1_700_000_000, "model": "tiny"}


def reply(**chosen: Any) -> Reply:
    return Reply(**HEAD, vocabulary=Words(), **chosen)


def stats(**changed: Any) -> SequenceStats:
    """4 steps, 3 of them with a draft, of 3, 2 and 2 tokens; 2, 1 and 0 were accepted: 3 + 4 tokens came of it."""
    fields: dict[str, Any] = {
        "arrived": 10.0,
        "first_scheduled": 10.25,
        "first_token": 10.5,
        "finished": 12.5,
        "num_steps": 4,
        "num_drafts": 3,
        "num_draft_tokens": 7,
        "num_accepted_tokens": 3,
        "accepted_by_position": [2, 1, 0],
        "drafted_by_position": [3, 3, 1],
        "num_prefix_cached_tokens": 2,
        "longest_draft": 4,
    }
    fields |= changed
    drafted, accepted = fields["num_draft_tokens"], fields["num_accepted_tokens"]
    return SequenceStats(**{"by_source": {"prediction": [drafted, accepted]}} | fields)


def scored(token: int, *top: tuple[int, float], logprob: float = -0.5) -> TokenLogprobs:
    return TokenLogprobs(token, logprob, 1, dict(top))


def ended(index: int = 0, text: str = "Hello", ids: tuple[int, ...] = (0, 1, END), **changed: Any) -> CompletionOutput:
    fields: dict[str, Any] = {"finish_reason": "stop", "stats": stats()} | changed
    return CompletionOutput(index, text, list(ids), **fields)


def output(*completions: CompletionOutput, **changed: Any) -> RequestOutput:
    fields: dict[str, Any] = {"prompt": "aé", "prompt_token_ids": [7, 8]} | changed
    return RequestOutput("request-0", outputs=list(completions) or [ended()], **fields)


USAGE = {
    "prompt_tokens": 2,
    "completion_tokens": 3,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 2},
    "completion_tokens_details": {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 3,
        "rejected_prediction_tokens": 4,
    },
}
METRICS = {
    "time_to_first_token_ms": 500.0,
    "generation_time_ms": 2000.0,
    "queue_time_ms": 250.0,
    "tokens_per_second": 1.0,
    "speculative_decoding": {
        "mean_acceptance_length": 1.75,
        "draft_acceptance_rate": 3 / 7,
        "acceptance_histogram": [2, 1, 1, 0, 0],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 3,
        "num_draft_tokens": 7,
        "num_spec_tokens": 4,
        "by_source": {"prediction": {"num_draft_tokens": 7, "num_accepted_tokens": 3}},
    },
}


# --- whole responses --------------------------------------------------------------------------------------------------


def test_chat_body() -> None:
    assert chat_body(reply(), output(), NOW) == {
        "id": "x-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": USAGE,
        "metrics": METRICS,
    }


def test_chat_body_with_everything() -> None:
    entries = [scored(0, (0, -0.5), (5, float("-inf"))), scored(1), scored(END)]
    first = ended(0, logprobs=entries, finish_reason="length")
    second = ended(1, "", (5,), logprobs=[scored(5)], stop_reason="x")
    body = chat_body(reply(return_token_ids=True), output(first, second), NOW)
    assert body["prompt_token_ids"] == [7, 8]
    assert [choice["token_ids"] for choice in body["choices"]] == [[0, 1, END], [5]]
    assert [(c["index"], c["finish_reason"], c["stop_reason"]) for c in body["choices"]] == [
        (0, "length", None),
        (1, "stop", "x"),
    ]
    content = body["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "He",
        "logprob": -0.5,
        "bytes": [72, 101],
        "top_logprobs": [
            {"token": "He", "logprob": -0.5, "bytes": [72, 101]},
            {"token": "\ufffd", "logprob": LEAST, "bytes": [0xF0, 0x9F]},
        ],
    }
    assert [entry["token"] for entry in content] == ["He", "llo", "<end>"]
    assert body["usage"]["completion_tokens"] == 4
    assert body["usage"]["prompt_tokens"] == 2


def test_completion_body() -> None:
    assert completion_body(reply(), [output()], NOW) == {
        "id": "x-1",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "choices": [
            {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None},
        ],
        "usage": USAGE,
        "metrics": METRICS,
    }


def test_completions_of_several_prompts_are_numbered_through() -> None:
    outputs = [output(ended(0, "a"), ended(1, "b")), output(ended(0, "c"), ended(1, "d"), prompt_token_ids=[7] * 5)]
    body = completion_body(reply(return_token_ids=True), outputs, NOW)
    assert [(c["index"], c["text"], len(c["prompt_token_ids"])) for c in body["choices"]] == [
        (0, "a", 2),
        (1, "b", 2),
        (2, "c", 5),
        (3, "d", 5),
    ]
    assert body["usage"]["prompt_tokens"] == 7
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert body["metrics"]["speculative_decoding"]["acceptance_histogram"] == [8, 4, 4, 0, 0]


def test_echo_puts_the_prompt_first_with_its_logprobs() -> None:
    completion = ended(0, "He😀", (0, 5, 6), logprobs=[scored(0, (0, -0.5)), scored(5), scored(6)])
    prompt_logprobs = [None, scored(8, (7, -0.25), logprob=-2.0)]
    body = completion_body(reply(echo=True), [output(completion, prompt_logprobs=prompt_logprobs)], NOW)
    (choice,) = body["choices"]
    assert choice["text"] == "aéHe😀"
    assert choice["logprobs"] == {
        "tokens": ["a", "é", "He", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80"],
        "token_logprobs": [None, -2.0, -0.5, -0.5, -0.5],
        "top_logprobs": [
            None,
            {"a": -0.25, "é": -2.0},
            {"He": -0.5},
            {"bytes:\\xf0\\x9f": -0.5},
            {"bytes:\\x98\\x80": -0.5},
        ],
        "text_offset": [0, 1, 2, 4, 4],
    }


def test_echo_of_ids_is_what_they_spell() -> None:
    ids = [END, 5, 6, 7]
    shown = {True: "😀a", False: "<end>😀a"}
    for skip, text in shown.items():
        made = completion_body(
            reply(echo=True, skip_special_tokens=skip), [output(prompt=None, prompt_token_ids=ids)], NOW
        )
        assert made["choices"][0]["text"] == text + "Hello"
        assert made["choices"][0]["logprobs"] is None


def test_completions_begin_where_the_prompt_ends_however_its_tokens_spell_it() -> None:
    """A tokenizer may add a space or an id before the prompt."""
    scores = CompletionLogprobs(Words(), frozenset({END}))
    part = scores.prompt([END, 2, 3], [None, scored(2), scored(3)], "world")
    assert part["text_offset"] == [0, 0, 4]
    assert scores.part([0, 1], [scored(0), scored(1)])["text_offset"] == [5, 7]
    silent = CompletionLogprobs(Words(), frozenset())
    silent.skip(3)
    assert silent.part([0], [scored(0)])["text_offset"] == [3]


def test_two_tokens_of_the_same_bytes_keep_the_likelier() -> None:
    class Twins(Words):
        spellings = (b"a", b"a", b"b")

    part = CompletionLogprobs(Twins(), frozenset()).part([1], [scored(1, (0, -0.1), (2, -0.2), logprob=-3.0)])
    assert part["top_logprobs"] == [{"a": -0.1, "b": -0.2}]


@pytest.mark.parametrize(
    ("completion", "status", "code"),
    [
        (ended(finish_reason="error", error="The logits were not finite."), 500, "completion_failed"),
        (ended(finish_reason="error", error="Nothing.", error_code="no_token_left"), 400, "no_token_left"),
        (ended(finish_reason="abort"), 503, "aborted"),
    ],
)
def test_what_did_not_end_well_is_no_answer(completion: CompletionOutput, status: int, code: str) -> None:
    for make in (
        lambda: chat_body(reply(), output(ended(), completion), NOW),
        lambda: completion_body(reply(), [output(), output(completion)], NOW),
    ):
        with pytest.raises(WireError) as caught:
            make()
        assert (caught.value.status, caught.value.code) == (status, code)
    if completion.error:
        assert caught.value.message == completion.error


# --- statistics -------------------------------------------------------------------------------------------------------


def test_drafts_that_no_prediction_gave_are_no_predicted_tokens() -> None:
    details = usage([output(ended(stats=stats(by_source={"ngram": [7, 3]})), ended(1))])["completion_tokens_details"]
    counts = {"reasoning_tokens": 0, "accepted_prediction_tokens": 3, "rejected_prediction_tokens": 4}
    assert details == counts, "the second choice's alone"


def test_without_a_drafter_there_is_nothing_to_say_about_drafts() -> None:
    plain = stats(num_drafts=0, num_draft_tokens=0, num_accepted_tokens=0, accepted_by_position=[], num_steps=3)
    plain.longest_draft = 0
    outputs = [output(ended(stats=plain))]
    assert "speculative_decoding" not in metrics(outputs, NOW)
    assert usage(outputs)["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }
    plain.longest_draft = 2
    silent = speculative_decoding([plain])
    assert silent["acceptance_histogram"] == [3, 0, 0]
    assert (silent["mean_acceptance_length"], silent["draft_acceptance_rate"]) == (1.0, 0.0)


def test_times_of_what_the_engine_has_not_ended_reach_until_now() -> None:
    assert metrics([output(ended(stats=stats(finished=None)))], 13.5)["generation_time_ms"] == 3000.0
    one = metrics([output(ended(ids=(END,), stats=stats(finished=10.5)))], NOW)
    assert (one["generation_time_ms"], one["tokens_per_second"]) == (0.0, None)


@given(st.data(), st.integers(1, 6))
def test_the_histogram_adds_up(data: st.DataObject, k: int) -> None:
    """What each step accepted, counted the engine's way and back."""
    runs = data.draw(st.lists(st.lists(st.integers(0, k)), min_size=1, max_size=3))
    made = []
    for accepted in runs:
        longest = data.draw(st.integers(max(accepted, default=0), k))
        by_position = [sum(a > i for a in accepted) for i in range(longest)]
        drafted = sum(accepted) + data.draw(st.integers(0, 9))
        made.append(
            stats(
                num_steps=len(accepted),
                num_draft_tokens=drafted,
                num_accepted_tokens=sum(accepted),
                accepted_by_position=by_position,
                longest_draft=k,
            )
        )
    told = speculative_decoding(made)
    steps = list(itertools.chain(*runs))
    assert told["acceptance_histogram"] == [steps.count(j) for j in range(k + 1)]
    assert told["num_spec_steps"] == len(steps)
    assert told["num_accepted_draft_tokens"] == sum(steps)
    assert told["mean_acceptance_length"] == (1 + sum(steps) / len(steps) if steps else 1)


# --- streams ----------------------------------------------------------------------------------------------------------


def bodies(events: list[str]) -> list[dict[str, Any]]:
    return [json.loads(event) for event in events]


def choice_of(event: dict[str, Any]) -> dict[str, Any]:
    (choice,) = event["choices"]
    assert isinstance(choice, dict)
    return choice


def chunk(text: str, ids: list[int], index: int = 0, **more: Any) -> Chunk:
    return Chunk("request-0", index, text, ids, **more)


def test_a_chat_stream_event_by_event() -> None:
    stream = ChatStream(reply(include_usage=True), output())
    head = {**HEAD, "object": "chat.completion.chunk"}
    none = {"logprobs": None, "finish_reason": None}
    assert bodies(stream.push(chunk("He", [0]))) == [
        {**head, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, **none}], "usage": None},
        {**head, "choices": [{"index": 0, "delta": {"content": "He"}, **none}], "usage": None},
    ]
    assert not stream.finished
    last = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    assert bodies(stream.push(chunk("llo", [1, END], finish_reason="stop"))) == [
        {**head, "choices": [{"index": 0, "delta": {"content": "llo"}, **none}], "usage": None},
        {**head, "choices": [last], "usage": None},
    ]
    assert stream.finished
    *closing, done = stream.end(NOW)
    assert bodies(closing) == [{**head, "choices": [], "usage": USAGE, "metrics": METRICS}]
    assert done == DONE == "[DONE]"


def test_a_completion_stream_event_by_event() -> None:
    whole = output(prompt_logprobs=[None, scored(8)])
    stream = CompletionStream(reply(echo=True, return_token_ids=True), [whole])
    head = {**HEAD, "object": "text_completion"}
    scores = [scored(0), scored(1)]
    events = bodies(stream.push(chunk("Hello", [0, 1], logprobs=scores)))
    prompt = {
        "tokens": ["a", "é"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"é": -0.5}],
        "text_offset": [0, 1],
    }
    told = {
        "tokens": ["He", "llo"],
        "token_logprobs": [-0.5] * 2,
        "top_logprobs": [{"He": -0.5}, {"llo": -0.5}],
        "text_offset": [2, 4],
    }
    begun = {"index": 0, "text": "aé", "logprobs": prompt, "finish_reason": None, "prompt_token_ids": [7, 8]}
    text = {"index": 0, "text": "Hello", "logprobs": told, "finish_reason": None, "token_ids": [0, 1]}
    assert events == [{**head, "choices": [begun]}, {**head, "choices": [text]}]
    last = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert bodies(stream.push(chunk("", [], finish_reason="length"))) == [{**head, "choices": [last]}]
    assert stream.end(NOW) == [DONE]


def test_a_chunk_without_anything_to_say_is_no_event() -> None:
    stream = ChatStream(reply(), output())
    assert len(stream.push(chunk("", [5]))) == 1  # the role
    assert stream.push(chunk("", [6])) == []
    with_ids = ChatStream(reply(return_token_ids=True), output())
    role, ids = bodies(with_ids.push(chunk("", [5])))
    assert role["prompt_token_ids"] == [7, 8]
    assert "prompt_token_ids" not in ids
    assert choice_of(ids)["token_ids"] == [5]


@pytest.mark.parametrize(("reason", "code"), [("error", "completion_failed"), ("abort", "aborted")])
@pytest.mark.parametrize("began", [False, True])
def test_an_error_is_the_last_event(reason: Any, code: str, began: bool) -> None:
    stream = CompletionStream(reply(include_usage=True), [output()])
    if began:
        stream.push(chunk("He", [0]))
    (event,) = bodies(stream.push(chunk("llo", [1], finish_reason=reason, error="It broke.")))
    assert set(event["error"]) == {"message", "type", "param", "code"}
    assert event["error"]["code"] == code
    assert stream.failed
    with pytest.raises(AssertionError):
        stream.push(chunk("", []))
    with pytest.raises(AssertionError):
        stream.end(NOW)


def test_a_stream_may_be_failed_from_outside() -> None:
    stream = ChatStream(reply(), output())
    (event,) = bodies(stream.fail(unavailable("The server stops.")))
    assert event == {
        "error": {"message": "The server stops.", "type": "service_unavailable", "param": None, "code": "unavailable"}
    }
    assert stream.failed


def test_a_choice_ends_once() -> None:
    stream = ChatStream(reply(), output(ended(0), ended(1)))
    stream.push(chunk("", [END], finish_reason="stop"))
    with pytest.raises(AssertionError):
        stream.push(chunk("", [], finish_reason="stop"))
    with pytest.raises(AssertionError):
        stream.end(NOW)


def test_events_go_over_the_wire_without_names() -> None:
    for stream in (ChatStream(reply(), output()), CompletionStream(reply(), [output()])):
        assert stream.frame('{"a":"é"}') == 'data: {"a":"é"}\n\n'.encode()
        assert stream.frame(DONE) == b"data: [DONE]\n\n"
        assert stream.ping() == b": ping\n\n"


def test_an_event_is_one_line_of_utf8() -> None:
    text = json_text({"a": "é\u2028\r\n😀"})
    assert "\n" not in text
    assert "\r" not in text
    assert json.loads(text.encode()) == {"a": "é\u2028\r\n😀"}
    with pytest.raises(ValueError, match="JSON"):
        json_text({"a": float("nan")})


TOKENS = st.lists(st.integers(0, 8), min_size=1, max_size=12)


def split(data: st.DataObject, completion: CompletionOutput) -> Iterator[Chunk]:
    """The completion in chunks of any sizes, its text shown late or early, and the end with tokens or without."""
    assert completion.logprobs is not None
    ids, text = completion.token_ids, completion.text
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    texts = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=len(cuts), max_size=len(cuts))))
    ends = list(zip([*cuts, len(ids)], [*texts, len(text)], strict=True))
    for (start, begin), (stop, end) in itertools.pairwise([(0, 0), *ends]):
        is_last = (stop, end) == ends[-1] and len(ends) == 1
        ends = ends[1:]
        reason: Any = completion.finish_reason if is_last or not ends else None
        yield chunk(
            text[begin:end],
            ids[start:stop],
            completion.index,
            logprobs=completion.logprobs[start:stop],
            finish_reason=reason,
            stats=completion.stats if reason else None,
        )


@given(st.data(), st.lists(TOKENS, min_size=4, max_size=4), st.booleans(), st.booleans())
def test_however_it_is_split_a_stream_says_what_the_whole_says(
    data: st.DataObject, tokens: list[list[int]], is_chat: bool, echo: bool
) -> None:
    """Two completions for each of two prompts, for chat of one; chunks of all of them in any order."""
    outputs = []
    for pair in (tokens[:2], tokens[2:])[: 1 if is_chat else 2]:
        made = [
            ended(
                i,
                b"".join(map(Words().token_bytes, ids)).decode(errors="replace"),
                tuple(ids),
                logprobs=[scored(t, (t, -0.5), (0, -2.0)) for t in ids],
            )
            for i, ids in enumerate(pair)
        ]
        outputs.append(output(*made, prompt_logprobs=[None, scored(8)] if echo else None))
    chosen = reply(echo=echo and not is_chat, return_token_ids=True, include_usage=True)
    stream: Stream = ChatStream(chosen, outputs[0]) if is_chat else CompletionStream(chosen, outputs)
    whole = chat_body(chosen, outputs[0], NOW) if is_chat else completion_body(chosen, outputs, NOW)
    waiting = [(p, list(split(data, c))) for p, o in enumerate(outputs) for c in o.outputs]
    events: list[dict[str, Any]] = []
    while waiting:
        prompt, chunks = data.draw(st.sampled_from(waiting))
        events += bodies(stream.push(chunks.pop(0), prompt))
        waiting = [(p, rest) for p, rest in waiting if rest]
    closing, done = stream.end(NOW)
    assert stream.finished
    assert done == DONE
    assert all(event["usage"] is None for event in events)
    assert json.loads(closing) == {
        **stream_head(is_chat),
        "choices": [],
        "usage": whole["usage"],
        "metrics": whole["metrics"],
    }
    for expected in whole["choices"]:
        own = [choice_of(event) for event in events if choice_of(event)["index"] == expected["index"]]
        assert_says(own, expected, is_chat)


def stream_head(is_chat: bool) -> dict[str, Any]:
    return {**HEAD, "object": "chat.completion.chunk" if is_chat else "text_completion"}


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def assert_says(own: list[dict[str, Any]], expected: dict[str, Any], is_chat: bool) -> None:
    """These choices of a stream add up to the choice of a whole response, and keep the rules of streams."""
    *earlier, last = own
    assert [choice["finish_reason"] for choice in earlier] == [None] * len(earlier)
    assert (last["finish_reason"], last["logprobs"]) == (expected["finish_reason"], None)
    logprobs = [choice["logprobs"] for choice in earlier if choice["logprobs"] is not None]
    assert flat(choice.get("token_ids", []) for choice in own) == expected["token_ids"]
    for name in ("content",) if is_chat else ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert flat(part[name] for part in logprobs) == expected["logprobs"][name]
    if is_chat:
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert last["delta"] == {}
        assert "".join(choice["delta"].get("content", "") for choice in own) == expected["message"]["content"]
    else:
        assert last["text"] == ""
        assert "".join(choice["text"] for choice in own) == expected["text"]


# --- what OpenAI's own library makes of it ----------------------------------------------------------------------------


@pytest.fixture
def strictly() -> Any:
    """Validates a body with one of the library's own types, which it otherwise fills without looking."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        openai = pytest.importorskip("openai", reason="openai is not installed: pip install 'openai>=3,<4'")
        types = {
            "chat.completion": openai.types.chat.ChatCompletion,
            "chat.completion.chunk": openai.types.chat.ChatCompletionChunk,
            "text_completion": openai.types.Completion,
            "model": openai.types.Model,
        }
    return lambda body: types[body["object"]].model_validate_json(json_text(body))


def test_openai_takes_whole_bodies(strictly: Any) -> None:
    entries = [scored(0, (0, -0.5), (5, float("-inf"))), scored(1), scored(END)]
    for completion in (ended(), ended(logprobs=entries, finish_reason="length", stop_reason=3)):
        read_back = strictly(chat_body(reply(return_token_ids=True), output(completion), NOW))
        assert read_back.choices[0].message.content == "Hello"
        assert read_back.usage.prompt_tokens_details.cached_tokens == 2
        assert read_back.usage.completion_tokens_details.accepted_prediction_tokens == 3
        assert read_back.metrics["speculative_decoding"]["num_spec_steps"] == 4
        assert strictly(completion_body(reply(), [output(completion)], NOW)).choices[0].text == "Hello"


def filled(body: dict[str, Any]) -> dict[str, Any]:
    """The library has one type for completions, whole and streamed, and it is the whole one's: a finish_reason is never
    null. OpenAI's own streams say null until the end all the same."""
    if body["object"] == "text_completion":
        for choice in body["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
    return body


def test_openai_takes_streams(strictly: Any) -> None:
    scores = [scored(0), scored(1)]
    for stream in (
        ChatStream(reply(include_usage=True), output()),
        CompletionStream(reply(include_usage=True, return_token_ids=True), [output()]),
    ):
        events = [
            *stream.push(chunk("Hello", [0, 1], logprobs=scores)),
            *stream.push(chunk("", [END], finish_reason="stop")),
        ]
        read_back = [strictly(filled(body)) for body in bodies([*events, *stream.end(NOW)[:-1]])]
        assert read_back[-1].usage.total_tokens == 5
        assert [c.finish_reason for event in read_back for c in event.choices][-1] == "stop"


def test_openai_takes_the_list_of_models(strictly: Any) -> None:
    listed = model_list(["tiny", "small"], 1_700_000_000, 256, "natively")
    assert listed["object"] == "list"
    assert [strictly(card).id for card in listed["data"]] == ["tiny", "small"]
    assert model_card("tiny", 0, 256, "natively")["max_model_len"] == 256


def test_openai_types_do_look(strictly: Any) -> None:
    body = chat_body(reply(), output(), NOW)
    for broken in ({"usage": 5}, {"choices": [{"index": 0}]}, {"created": "now"}):
        with pytest.raises(ValueError, match="validation error"):
            strictly({**body, **broken})


def test_chat_logprobs_of_nothing_are_an_empty_list() -> None:
    assert chat_logprobs([], Words()) == {"content": [], "refusal": None}
