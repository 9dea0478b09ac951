"""Beam search over HTTP: the SDK's answers, whole in streams, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from specserve.llm import LLM
from specserve.types import SamplingParams

PROMPT = "The other day the stone"
BODY = {"prompt": PROMPT, "use_beam_search": True, "beam_width": 4, "n": 2, "max_tokens": 9, "return_token_ids": True}


def told(choices: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    keys = ("index", "text", "token_ids", "cumulative_logprob", "score", "finish_reason")
    return [tuple(choice[key] for key in keys) for choice in choices]


def test_answers_are_those_of_the_sdk(server: Any, tiny: Any) -> None:
    params = SamplingParams(max_tokens=9)
    with LLM(str(tiny), threads=1, kv_cache_gib=0.01) as llm:
        outputs = llm.beam_search(PROMPT, params, beam_width=4, n=2)[0].outputs
    expected = [(o.index, o.text, o.token_ids, o.cumulative_logprob, o.score, o.finish_reason) for o in outputs]
    assert told(server.post("/v1/completions", BODY).json["choices"]) == expected
    chunks = [event["choices"][0] for event in server.post("/v1/completions", {**BODY, "stream": True}).events[:-1]]
    for index, text, _, cumulative, score, reason in expected:
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert "".join(chunk["text"] for chunk in own) == text
        assert sum(bool(chunk["text"]) for chunk in own) <= 1, "whole"
        ending = own[-1]
        assert (ending["cumulative_logprob"], ending["score"], ending["finish_reason"]) == (cumulative, score, reason)


def test_conversations_grammars_and_stop_texts(server: Any) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "use_beam_search": True, "n": 3, "max_tokens": 30}
    found = server.post("/v1/chat/completions", {**body, "structured_outputs": {"regex": "(yes|no|other)!"}}).json
    texts = [choice["message"]["content"] for choice in found["choices"]]
    assert len(texts) == 3 and set(texts) <= {"yes!", "no!", "other!"}
    scores = [choice["score"] for choice in found["choices"]]
    assert scores == sorted(scores, reverse=True)
    cut = {**body, "structured_outputs": {"regex": "(yes|no)!"}, "n": 2, "stop": "!"}
    choices = server.post("/v1/chat/completions", cut).json["choices"]
    assert {choice["message"]["content"] for choice in choices} <= {"yes", "no"}
    assert [choice["stop_reason"] for choice in choices] == ["!", "!"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"speculative": {"drafter": "suffix"}}, "speculative.drafter"),
        ({"beam_width": 1, "n": 2}, "n"),
        ({"top_k": "x"}, "top_k"),
    ],
)
def test_what_contradicts_is_refused_by_name(server: Any, fields: dict[str, Any], param: str) -> None:
    response = server.post("/v1/completions", {**BODY, **fields})
    assert response.status == 400
    assert response.json["error"]["param"] == param


MESSAGES = {"messages": [{"role": "user", "content": "Hi"}]}
ELSEWHERE = [
    ("/v1/messages", {**MESSAGES, "max_tokens": 4}),
    ("/v1/messages/count_tokens", MESSAGES),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 4}),
    ("/api/chat", {**MESSAGES, "stream": False, "options": {"num_predict": 4}}),
    ("/api/generate", {"prompt": "Hi", "stream": False, "options": {"num_predict": 4}}),
]


@pytest.mark.parametrize(("path", "body"), ELSEWHERE)
def test_other_apis_say_where_beams_are_searched(server: Any, path: str, body: dict[str, Any]) -> None:
    asked = {"use_beam_search": True, "beam_width": 4, "length_penalty": 0.5, "early_stopping": "never"}
    options = body.get("options")
    for name, value in asked.items():
        places = [{**body, name: value}] + ([{**body, "options": {**options, name: value}}] if options else [])
        for place, sent in zip(("", "options."), places, strict=False):
            response = server.post(path, sent)
            assert response.status == 400
            assert f"{place}{name} is for beam search, which /v1/completions and /v1/chat/completions offer" in str(
                response.json
            )
    nothing = {"use_beam_search": False, "beam_width": None, "length_penalty": 1.0, "early_stopping": False}
    plain = server.post(path, {**body, **nothing, **({"options": {**options, **nothing}} if options else {})})
    assert plain.status == 200
    assert "X-Specserve-Ignored" not in plain.headers
