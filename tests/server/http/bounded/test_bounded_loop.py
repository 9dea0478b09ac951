"""Work that one request may ask of the API process, at default time-outs: /health is answered beside it, and memory is
in proportion to what was sent. The oracle is conftest's; what is asked of the engine is in test_bounded_work.py."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from specserve.testing import write_tiny_model

pytestmark = pytest.mark.alone

MIB = 2**20
FIRST_PIECE = 293  # the ids of conftest's PIECES: behind those of the small tokenizer


# --- texts that end an answer -----------------------------------------------------------------------------------------


def test_long_stop_strings(large: Any, bounded: Any) -> None:
    """16 of them, of 4,096 characters. The answers begin the last one, so that all of them is held back, and never the
    others, however much of what is held is tried."""
    stops = [f"{letter}{'a' * 4095}" for letter in "bcdefghijklmnop"] + ["a" * 4095 + "b"]
    asked = {"n": 12, "max_tokens": 80, "stop": stops, "allowed_token_ids": [FIRST_PIECE + 1]}
    with bounded(large, loop_s=0.1, api_s=8) as case:
        reply = case.complete(**asked, timeout=20)
    assert [choice["text"] for choice in reply.json["choices"]] == ["a" * 64 * 80] * 12


# --- bodies -----------------------------------------------------------------------------------------------------------

OBJECTS = b"[" + b",".join([b"{}"] * (5 * MIB)) + b"]"  # 15 MB, and 350 of Python
UNUSED = {
    "user": b'{"prompt":"x","max_tokens":1,"user":%s}' % OBJECTS,
    "unknown": b'{"prompt":"x","max_tokens":1,"nobody_knows_it":%s}' % OBJECTS,
}


@pytest.mark.parametrize("name", UNUSED)
def test_large_bodies(large: Any, bounded: Any, name: str) -> None:
    """Three at once, whose answers take a while. They are answered or refused; what nobody needs is
    held by nobody, and nobody waits while they are parsed."""
    body = UNUSED[name].replace(b'"max_tokens":1,', b'"max_tokens":100,"ignore_eos":true,')
    with bounded(large, api_mib=8 * 3 * len(body) / MIB) as case:
        replies = case.at_once([body] * 3)
    assert {reply.status for reply in replies} <= {200, 400, 413, 429, 503}
    for reply in replies:
        assert reply.status == 200 or reply.error["message"]


# --- texts ------------------------------------------------------------------------------------------------------------

WORDS = "the cat sat on the mat, 1 2 3 4. " * (MIB // 33)
LONG = {
    "tokenize": ("/tokenize", {"prompt": WORDS, "return_token_strs": True}),
    "tokenize-one-letter": ("/tokenize", {"prompt": "7" * MIB}),
    "detokenize": ("/detokenize", {"tokens": [5, 300, 70] * (MIB // 3)}),
    "count": ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": WORDS[: MIB - 100]}]}),
    "prompt": ("/v1/completions", {"prompt": WORDS}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORDS}]}),
    "prediction": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "prediction": {"type": "content", "content": WORDS}},
    ),
}


@pytest.mark.parametrize("name", LONG)
def test_long_texts(large: Any, bounded: Any, name: str) -> None:
    """Two of a mebibyte at once, on their way to tokens and back: nobody waits for them, and memory is in proportion.
    Before tokenizers let go of Python's lock one of them held the loop for a second."""
    path, body = LONG[name]
    with bounded(large, api_mib=512) as case:
        replies = case.at_once([case.written(body)] * 2, path)
    assert {reply.status for reply in replies} <= {200, 400}
    for reply in replies:
        is_prompt = path in ("/v1/completions", "/v1/chat/completions")
        assert reply.status == (400 if is_prompt else 200), reply.body[:300]


def test_conversations_of_many_messages(large: Any, bounded: Any) -> None:
    """As many as there may be, in every API that takes them, all at once."""
    messages = [{"role": role, "content": f"{i} the cat sat"} for i in range(5000) for role in ("user", "assistant")]
    chat = [{**message, "name": "x"} for message in messages]
    bodies = {
        "/v1/chat/completions": {"messages": chat},
        "/v1/messages": {"messages": messages, "max_tokens": 4},
        "/v1/messages/count_tokens": {"messages": messages},
        "/v1/responses": {"input": messages},
        "/tokenize": {"messages": chat},
    }
    with bounded(large, api_mib=512) as case, ThreadPoolExecutor(len(bodies)) as threads:
        replies = list(threads.map(case.served.post, bodies, bodies.values()))
    for path, reply in zip(bodies, replies, strict=True):
        is_counted = path in ("/tokenize", "/v1/messages/count_tokens")
        assert reply.status == (200 if is_counted else 400), reply.body[:300]


# --- what is the model's own ------------------------------------------------------------------------------------------

WHIMS = (
    "{% set said = messages[-1].content %}{% macro again() %}{{ again() }}{% endmacro %}"
    "{% if said == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% elif said == 'memory' %}{{ (said * 10**9) * 30 }}"
    "{% elif said == 'growth' %}{% set grown = namespace(text=said) %}"
    "{% for a in range(60) %}{% set grown.text = grown.text ~ grown.text %}{% endfor %}"
    "{% elif said == 'recursion' %}{{ again() }}"
    "{% elif said == 'number' %}{{ 7 ** (10 ** (said|length + 3)) }}"
    "{% elif said == 'index' %}{{ [].pop() }}"
    "{% else %}<|start|>user\n{{ said }}<|end|>\n<|start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def whimsical(servers: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model whose chat template and tokenizer do as they like with some texts."""
    folder = write_tiny_model(tmp_path_factory.mktemp("whimsical"), "llama", max_position_embeddings=32_768)
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    split = {"type": "Split", "pattern": {"Regex": "(?:x+x+)+y"}, "behavior": "Isolated", "invert": False}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, tokenizer["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": WHIMS}), "utf-8")
    return servers.get(model=folder)


def said(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}


@pytest.mark.parametrize("whim", ["loop", "memory", "growth", "recursion", "number"])
def test_templates_without_end(whimsical: Any, bounded: Any, whim: str) -> None:
    """The requests that they are rendered for, two at once, fail alone, with an error that says what failed."""
    with bounded(whimsical) as case:
        before = case.chat(**said("hello"))
        with ThreadPoolExecutor(1) as thread:
            counting = thread.submit(case.served.post, "/tokenize", {"messages": said(whim)["messages"]})
            replies = case.chat(**said(whim)), counting.result()
        after = case.chat(**said("hello"))
    for reply in replies:
        assert (reply.status, reply.error["code"]) == (500, "text_failed"), reply.body[:300]
        assert "chat template" in reply.error["message"]
        assert reply.headers["x-should-retry"] == "false"
    assert before.status == after.status == 200
    assert after.json["choices"] == before.json["choices"]


def test_a_template_that_fails(whimsical: Any, bounded: Any) -> None:
    with bounded(whimsical) as case:
        reply = case.chat(**said("index"))
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert "cannot take these messages" in reply.error["message"]


@pytest.mark.parametrize("letters", ["", "ab " * 20_000], ids=["short", "long"])
def test_a_tokenizer_that_gives_up(whimsical: Any, bounded: Any, letters: str) -> None:
    """Its pattern panics, which is an answer as any other and no connection that ends."""
    text = letters + "x" * 40 + "z"
    with bounded(whimsical) as case:
        replies = [case.complete(prompt=text), case.chat(**said(text)), case.served.post("/tokenize", {"prompt": text})]
    for reply in replies:
        assert (reply.status, reply.error["code"]) == (500, "text_failed"), reply.body[:300]
        assert "tokenizer" in reply.error["message"]


# --- constraints ------------------------------------------------------------------------------------------------------


def expensive(i: int) -> dict[str, Any]:
    """5 KB that nobody compiles within the time for it: texts that hold all of many words, in any order."""
    patterns = [{"type": "string", "pattern": f".*{i} word number {j} of this text.*"} for j in range(80)]
    return {"prompt": "x", "max_tokens": 4, "guided_json": {"allOf": patterns}}


def test_constraints_that_nobody_waits_for(large: Any, bounded: Any) -> None:
    """Ten expensive ones whose clients have left, and one that costs nothing: it is answered in its turn, at once."""
    with bounded(large, num_pipes=8) as case:
        for i in range(10):
            case.drop(expensive(i), seconds=0.1)
        begun = time.monotonic()
        reply = case.complete(guided_choice=["yes", "no"], ignore_eos=False, timeout=30)
        waited_s = time.monotonic() - begun
    assert reply.json["choices"][0]["text"] in ("yes", "no")
    assert waited_s < 10, f"It waited {waited_s:.1f} s for constraints of clients that had left; 10 may be."


# --- answers ----------------------------------------------------------------------------------------------------------


def test_long_answers_with_logprobs(servers: Any, narrow: Path, bounded: Any) -> None:
    """16,000 tokens in one answer, with 20 alternatives each. What it costs does not depend on the vocabulary."""
    with bounded(servers.get(model=narrow), api_mib=384) as case:
        reply = case.complete(n=16, max_tokens=1000, logprobs=20, timeout=60)
    choices = reply.json["choices"]
    assert [len(choice["logprobs"]["top_logprobs"]) for choice in choices] == [1000] * 16


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_that_begins_calls_without_end(large: Any, bounded: Any, stream: bool) -> None:
    """The text opens a call of a tool again and again and closes none."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    asked = {"tools": [tool], "max_tokens": 600, "ignore_eos": True, "allowed_token_ids": [FIRST_PIECE]}
    with bounded(large) as case:
        reply = case.chat(**asked, stream=stream, timeout=60)
    assert reply.status == 200, reply.body[:300]
