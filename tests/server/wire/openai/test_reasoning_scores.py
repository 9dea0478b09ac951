"""Log-probabilities of answers that may begin with reasoning, whose marker is several tokens: a stream has those that
the whole body has."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from specserve.engine.packed import packed
from specserve.engine.request import Request
from specserve.outputs import Collector, RequestOutput
from specserve.server.wire.fields import Limits
from specserve.server.wire.openai.replies import Reply, chat_body
from specserve.server.wire.openai.responses import LOGPROBS, ResponsesRequest
from specserve.server.wire.openai.responses_stream import ResponseStream, response_body
from specserve.server.wire.openai.stream import DONE, ChatStream, Stream
from specserve.server.wire.translated import read_translated
from specserve.testing import write_tiny_model
from specserve.text.reasoning import Reasoning
from specserve.text.reasoning_split import ReasoningSplit
from specserve.text.tokenizer import Tokenizer
from specserve.types import Event, SamplingParams, SequenceStats, TokenLogprobs

OPEN, CLOSE = "<a><", "</a></"
ASKED = read_translated(
    ResponsesRequest,
    json.dumps({"input": "Hi", "include": [LOGPROBS]}).encode(),
    Limits(vocab_size=999, max_model_len=99),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tiny_model(tmp_path_factory.mktemp("scored"), "llama"))


def collector(tokenizer: Tokenizer, params: SamplingParams, lazily: bool) -> Collector:
    opening, closing = (tuple(tokenizer.encode(mark, add_special_tokens=False)) for mark in (OPEN, CLOSE))
    assert len(opening) > 1
    reasoning = Reasoning(opening, closing, (), frozenset(), frozenset())
    request = Request(id="0", prompt_ids=[1], params=params)
    output = RequestOutput.of(request, "", lambda: ReasoningSplit(reasoning, False, len(CLOSE)))
    return Collector(output, params, tokenizer, lambda *_: None, lazily)


def streamed(stream: Stream, collector: Collector, events: list[Event], at_once: bool) -> list[dict[str, Any]]:
    """`at_once`: what is told of lags behind what has come."""
    told: list[str] = []
    for event in events:
        collector.push(event)
        while collector.chunks and (not at_once or event is events[-1]):
            told += stream.push(collector.chunks.popleft())
    return [json.loads(event) for event in [*told, *stream.end(0.0)] if event != DONE]


@settings(max_examples=300)
@given(
    num_marked=st.integers(0, 3),
    words=st.lists(st.sampled_from(["<", "a", ">", "x", " ", "</a></", "</a>", "stone"]), max_size=6),
    places=st.lists(st.integers(0, 30), max_size=6),
    lazily=st.booleans(),
    at_once=st.booleans(),
    stop=st.sampled_from([(), ("a>x",), ("x",)]),
    last=st.sampled_from([None, []]),
)
def test_streams_have_the_scores_of_the_whole(
    tokenizer: Tokenizer,
    num_marked: int,
    words: list[str],
    places: list[int],
    lazily: bool,
    at_once: bool,
    stop: tuple[str, ...],
    last: list[Any] | None,
) -> None:
    params = SamplingParams(max_tokens=99, logprobs=1, stop=stop)
    marker = tokenizer.encode(OPEN, add_special_tokens=False)
    ids = [
        *marker[:num_marked],
        *(token for word in words for token in tokenizer.encode(word, add_special_tokens=False)),
    ]
    edges = sorted({0, len(ids), *(place % (len(ids) + 1) for place in places)})
    events = []
    for begin, end in itertools.pairwise([*edges, len(ids)]):
        scores = packed([TokenLogprobs(ids[i], -float(i), 1, {}) for i in range(begin, end)])
        events.append(Event("0", 0, ids[begin:end], scores))
    events[-1] = Event("0", 0, [], last, finish_reason="length", stats=SequenceStats())
    reply = Reply(id="resp_1", created=0, model="tiny", vocabulary=tokenizer)

    whole = collector(tokenizer, params, lazily)
    for event in events:
        whole.push(event)
    chat = json.loads(json.dumps(chat_body(reply, whole.output, 0.0), default=list))
    expected = (chat["choices"][0]["logprobs"] or {"content": []})["content"]
    part = collector(tokenizer, params, lazily)
    told = streamed(ChatStream(reply, part.output), part, events, at_once)
    scored = [choice["logprobs"] for event in told for choice in event["choices"] if choice["logprobs"]]
    assert [entry for each in scored for entry in each["content"]] == expected

    body = json.loads(json.dumps(response_body(reply, ASKED, whole.output, 0.0), default=list))
    texts = [content for item in body["output"] if item["type"] == "message" for content in item["content"]]
    expected = [entry for text in texts for entry in text["logprobs"]]
    part = collector(tokenizer, params, lazily)
    told = streamed(ResponseStream(reply, ASKED, part.output), part, events, at_once)
    deltas = [event["logprobs"] for event in told if event["type"] == "response.output_text.delta"]
    assert [entry for each in deltas for entry in each] == expected
    assert told[-1]["response"]["output"] == body["output"]
