"""Reasoning over HTTP: told apart from answers, calls and structured output by every API, streamed and not, and counted
by the tokens that it took."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from tokenizers import AddedToken, Tokenizer as Backend

from specserve.async_llm import AsyncLLM
from specserve.llm import LLM, RequestOutput
from specserve.testing import tiny_tokenizer, write_tiny_model
from specserve.text.chat import ChatTemplate
from specserve.types import SamplingParams

TEMPLATE = (  # opens the reasoning of the answer, and tells of tools in Hermes' way
    "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}<|end|>\n{% endfor %}"
    "<|start|>assistant\n<think>\n"
)
USER = [{"role": "user", "content": "Hello there"}]
SCHEMA = {
    "type": "object",
    "properties": {"legs": {"enum": [2, 4]}},
    "required": ["legs"],
    "additionalProperties": False,
}
FEED = {"name": "feed", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FEED}]
CHAT = "/v1/chat/completions"


def write_reasoning_model(folder: Path) -> Path:
    width = tiny_tokenizer().get_vocab_size() + 2
    write_tiny_model(folder, "llama", vocab_size=width, max_position_embeddings=1024)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
    backend.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reasoning_model(tmp_path_factory.mktemp("thinker"))


@pytest.fixture(scope="module")
def thinker(model: Path, tmp_path_factory: pytest.TempPathFactory, serving_process: Any) -> Iterator[Any]:
    with serving_process(model, tmp_path_factory.mktemp("served"), **{"max-model-len": 1024}) as served:
        yield served


@pytest.fixture(scope="module")
def close(thinker: Any) -> int:
    (token,) = thinker.post("/tokenize", {"prompt": "</think>", "add_special_tokens": False}).json["tokens"]
    return int(token)


def asked(close: int, seed: int, **fields: Any) -> dict[str, Any]:
    """A request whose reasoning ends after some tokens: the token that closes it is made likely."""
    bias = {"logit_bias": {str(close): 3.5}, "temperature": 1, "seed": seed, "return_token_ids": True}
    return {"messages": USER, "max_tokens": 200, **bias, **fields}


def added_up(events: list[Any]) -> tuple[str, str, list[Any]]:
    """Reasoning, content and the calls' arguments of a stream."""
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    reasoning, content = ("".join(delta.get(n) or "" for delta in deltas) for n in ("reasoning_content", "content"))
    return reasoning, content, [call for delta in deltas for call in delta.get("tool_calls", ())]


@pytest.mark.parametrize("seed", range(6))
def test_chats_tell_it_apart(thinker: Any, close: int, seed: int) -> None:
    body = asked(close, seed, logprobs=True, ignore_eos=True, max_tokens=60)
    reply = thinker.post(CHAT, body).json
    (choice,), details = reply["choices"], reply["usage"]["completion_tokens_details"]
    ids = choice["token_ids"]
    thought = ids.index(close) if close in ids else len(ids)
    parts = ids[:thought], ids[thought + 1 :]
    texts = [thinker.post("/detokenize", {"tokens": part}).json["prompt"] for part in parts]
    texts = [re.sub(r"<\|\w+\|>", "", text) for text in texts]  # control tokens are no text
    assert choice["message"].get("reasoning_content", "") == texts[0].strip()
    assert choice["message"]["content"] == texts[1].lstrip()
    assert details["reasoning_tokens"] == min(thought + 1, len(ids))
    assert len(choice["logprobs"]["content"]) == len(ids), "log-probabilities are those of all tokens"
    events = thinker.post(CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}}).events[:-1]
    reasoning, content, _ = added_up(events)
    assert (reasoning, content) == (choice["message"].get("reasoning_content", ""), choice["message"]["content"])
    assert events[-1]["usage"] == reply["usage"] | {
        "prompt_tokens_details": events[-1]["usage"]["prompt_tokens_details"]
    }


def test_some_of_them_end_their_reasoning(thinker: Any, close: int) -> None:
    """What the others hold for is not held by nothing."""
    replies = [thinker.post(CHAT, asked(close, seed, max_tokens=60)).json["choices"][0] for seed in range(6)]
    assert any(reply["message"].get("reasoning_content") and reply["message"]["content"] for reply in replies)


@pytest.mark.parametrize("stream", [False, True])
def test_structured_output_is_what_comes_behind_it(thinker: Any, close: int, stream: bool) -> None:
    ended = 0
    for seed in range(4):
        reply = thinker.post(CHAT, asked(close, seed, guided_regex=" ?[0-9]{3}", stream=stream))
        if stream:
            reasoning, content, _ = added_up(reply.events[:-1])
            reason = reply.events[-2]["choices"][0]["finish_reason"]
        else:
            (choice,) = reply.json["choices"]
            reasoning, content = choice["message"].get("reasoning_content", ""), choice["message"]["content"]
            reason = choice["finish_reason"]
        ended += reason == "stop"
        assert re.fullmatch(" ?[0-9]{3}" if reason == "stop" else " ?[0-9]{0,3}", content)
        assert "</think>" not in reasoning + content
    assert ended


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_must_be_made_come_behind_it(thinker: Any, close: int, stream: bool) -> None:
    made = 0
    for seed in range(4):
        body = asked(close, seed, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        (whole,) = thinker.post(CHAT, body).json["choices"]
        calls = whole["message"].get("tool_calls", [])
        if whole["finish_reason"] == "tool_calls":
            made += 1
            assert jsonschema_rs.is_valid(SCHEMA, json.loads(calls[0]["function"]["arguments"]))
        if stream:
            events = thinker.post(CHAT, {**body, "stream": True}).events[:-1]
            reasoning, content, deltas = added_up(events)
            assert reasoning == whole["message"].get("reasoning_content", "")
            assert content == (whole["message"]["content"] or "")
            assert "".join(d["function"]["arguments"] for d in deltas) == "".join(
                call["function"]["arguments"] for call in calls
            )
            assert events[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
    assert made


def test_a_template_that_loops_keeps_no_engine_from_starting(
    tmp_path: Path, serving_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No engine runs it: where answers begin is found out elsewhere, and grammars hold where that fails."""
    folder = write_reasoning_model(tmp_path / "model")
    path = folder / "tokenizer_config.json"
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE + loop}))
    with serving_process(folder, tmp_path, **{"max-model-len": 1024}) as served:
        reply = served.post(CHAT, {"messages": USER})
        assert (reply.status, reply.json["error"]["code"]) == (500, "text_failed")
        body = {"prompt": "the", "guided_regex": "[0-9]{3}", "max_tokens": 9}
        assert re.fullmatch("[0-9]{3}", served.post("/v1/completions", body).json["choices"][0]["text"])
    rendered: list[None] = []
    monkeypatch.setattr(ChatTemplate, "render", lambda *_, **__: rendered.append(None))
    with LLM(str(folder), max_model_len=128, kv_cache_gib=0.01) as llm:
        llm.generate("the", SamplingParams(max_tokens=2))
    assert not rendered


def test_an_answer_that_is_cut_off_in_it_has_nothing_else(thinker: Any) -> None:
    limits = {"temperature": 0, "max_tokens": 5}
    chat = thinker.post(CHAT, {"messages": USER, **limits}).json
    (choice,) = chat["choices"]
    thought = choice["message"]["reasoning_content"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert chat["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5
    message = thinker.post("/v1/messages", {"messages": USER, **limits}).json
    assert [(block["type"], block["thinking"]) for block in message["content"]] == [("thinking", thought)]
    assert message["stop_reason"] == "max_tokens"
    response = thinker.post("/v1/responses", {"input": USER, "temperature": 0, "max_output_tokens": 5}).json
    assert [(item["type"], item["content"][0]["text"]) for item in response["output"]] == [("reasoning", thought)]
    assert (response["status"], response["usage"]["output_tokens_details"]) == ("incomplete", {"reasoning_tokens": 5})
    for path, body in (
        ("/v1/messages", {"messages": USER, **limits}),
        ("/v1/responses", {"input": USER, "temperature": 0, "max_output_tokens": 5}),
    ):
        events = thinker.post(path, {**body, "stream": True}).events
        kinds = ("thinking_delta", "response.reasoning_text.delta")
        deltas = [event["delta"] for event in events if event["type"].endswith("delta") and "delta" in event]
        texts = [delta if isinstance(delta, str) else delta.get("thinking", "") for delta in deltas]
        assert "".join(texts) == thought
        assert any(kind in json.dumps(events) for kind in kinds)


def test_the_sdk_says_the_same(model: Path, thinker: Any, close: int) -> None:
    reply = thinker.post(CHAT, asked(close, 1, max_tokens=60)).json
    message, counted = reply["choices"][0]["message"], reply["usage"]["completion_tokens_details"]["reasoning_tokens"]
    params = SamplingParams(temperature=1, seed=1, logit_bias={close: 3.5}, max_tokens=60)
    told = (message["reasoning_content"], message["content"], counted)

    async def alone(options: dict[str, Any]) -> RequestOutput:
        async with AsyncLLM(str(model), **options) as llm:
            return await llm.chat(USER, params)

    options = {"threads": 1, "max_num_seqs": 2, "kv_cache_gib": 0.01, "max_model_len": 1024}
    with LLM(str(model), **options) as llm:
        chunks = list(llm.stream_chat(USER, params))
        prompt = llm.tokenizer.render_chat(USER)
        (whole,), (text,) = llm.chat(USER, params), llm.generate(prompt, params)
    for output in (whole.outputs[0], asyncio.run(alone(options)).outputs[0]):
        assert (output.reasoning, output.text, output.num_reasoning_tokens) == told
    streamed = ("".join(chunk.reasoning for chunk in chunks), "".join(chunk.text for chunk in chunks))
    assert (*streamed, sum(chunk.num_reasoning_tokens for chunk in chunks)) == told
    thought, _, answer = text.outputs[0].text.partition("</think>")
    assert (thought.strip(), answer.lstrip(), text.outputs[0].num_reasoning_tokens) == (*told[:2], 0)


def test_what_it_returns_it_takes_back(thinker: Any, close: int) -> None:
    (choice,) = thinker.post(CHAT, asked(close, 1, max_tokens=60)).json["choices"]
    talk = [*USER, choice["message"], *USER]
    reply = thinker.post(CHAT, {"messages": talk, "max_tokens": 1, "return_token_ids": True}).json
    prompt = thinker.post("/detokenize", {"tokens": reply["prompt_token_ids"]}).json["prompt"]
    assert f"({choice['message']['reasoning_content']})" in prompt


def test_completions_are_text_as_it_is(thinker: Any, close: int) -> None:
    bias = {"logit_bias": {str(close): 9}, "temperature": 1, "seed": 1, "max_tokens": 60}
    reply = thinker.post("/v1/completions", {"prompt": "<think>", **bias}).json
    assert "</think>" in reply["choices"][0]["text"]
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_it_is_text_where_the_operator_says_so(model: Path, serving_process: Any, tmp_path: Path, thinker: Any) -> None:
    close = thinker.post("/tokenize", {"prompt": "</think>", "add_special_tokens": False}).json["tokens"][0]
    apart = thinker.post(CHAT, asked(close, 1, max_tokens=60)).json["choices"][0]
    with serving_process(model, tmp_path, "--reasoning-format=none", **{"max-model-len": 1024}) as served:
        whole = served.post(CHAT, asked(close, 1, max_tokens=60)).json
        must = asked(close, 1, tools=TOOLS, tool_choice="required")
        called = served.post(CHAT, must).json["choices"][0]
        twin = thinker.post(CHAT, must).json["choices"][0]
    (choice,) = whole["choices"]
    assert choice["token_ids"] == apart["token_ids"]
    assert "reasoning_content" not in choice["message"]
    thought, _, answer = choice["message"]["content"].partition("</think>")
    assert (thought.strip(), answer.lstrip()) == (apart["message"]["reasoning_content"], apart["message"]["content"])
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    assert called["token_ids"] == twin["token_ids"]
    assert (called["finish_reason"], "tool_calls" in called["message"]) == (
        twin["finish_reason"],
        "tool_calls" in twin["message"],
    )
