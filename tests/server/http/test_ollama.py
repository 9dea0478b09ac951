"""Ollama's API over HTTP, beside OpenAI's on the same server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from specserve.server.http.ollama import NOT_OFFERED
from specserve.testing import write_tiny_model

USER = {"role": "user", "content": "the cat sat"}
OPTIONS = {"num_predict": 12, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def lines(reply: Any) -> list[Any]:
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.body.strip().split(b"\n")]


def test_a_conversation_is_answered_as_by_chat(server: Any) -> None:
    chat = server.post("/v1/chat/completions", {"messages": [USER], "max_tokens": 12, "temperature": 0}).json
    whole = server.post("/api/chat", {"model": "tiny", "messages": [USER], "stream": False, "options": OPTIONS}).json
    content = chat["choices"][0]["message"]["content"]
    assert whole["message"] == {"role": "assistant", "content": content}
    assert (whole["model"], whole["done"], whole["done_reason"]) == ("tiny", True, "length")
    assert (whole["prompt_eval_count"], whole["eval_count"]) == (chat["usage"]["prompt_tokens"], 12)
    assert whole["total_duration"] >= whole["prompt_eval_duration"] + whole["eval_duration"] > 0
    told = lines(server.post("/api/chat", {"model": "tiny:latest", "messages": [USER], "options": OPTIONS}))
    assert "".join(line["message"]["content"] for line in told) == content
    assert [line["done"] for line in told] == [*[False] * (len(told) - 1), True]
    assert {line["model"] for line in told} == {"tiny:latest"}
    assert told[-1]["eval_count"] == 12


@pytest.mark.parametrize("raw", [False, True])
def test_a_prompt_is_answered(server: Any, raw: bool) -> None:
    if raw:
        asked = {"prompt": USER["content"], "max_tokens": 12, "temperature": 0}
        text = server.post("/v1/completions", asked).json["choices"][0]["text"]
    else:
        asked = {"messages": [{"role": "system", "content": "Be brief."}, USER], "max_tokens": 12, "temperature": 0}
        text = server.post("/v1/chat/completions", asked).json["choices"][0]["message"]["content"]
    system = {} if raw else {"system": "Be brief."}
    asked = {"model": "tiny", "prompt": USER["content"], "raw": raw, **system, "options": OPTIONS}
    assert server.post("/api/generate", {**asked, "stream": False}).json["response"] == text
    assert "".join(line["response"] for line in lines(server.post("/api/generate", asked))) == text


def test_drafts_change_nothing(server: Any) -> None:
    asked = {"messages": [USER], "stream": False, "options": {**OPTIONS, "num_predict": 60}}
    plain = server.post("/api/chat", {**asked, "speculative": {"enabled": False}}).json
    drafted = server.post("/api/chat", {**asked, "speculative": {"drafter": "ngram"}}).json
    assert plain["message"] == drafted["message"]
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


def test_an_answer_fits_its_format(server: Any) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    schema["additionalProperties"] = False
    for body in ({"messages": [USER]}, {"prompt": "a"}, {"prompt": "a", "raw": True}):
        path = "/api/chat" if "messages" in body else "/api/generate"
        reply = server.post(path, {**body, "stream": False, "format": schema, "options": {"num_predict": 60}}).json
        text = reply["message"]["content"] if "messages" in body else reply["response"]
        assert json.loads(text)["city"] in ("Oslo", "Rome")
        assert reply["done_reason"] == "stop"


def test_what_was_ignored_is_named(server: Any) -> None:
    asked = {"messages": [USER], "keep_alive": "5m", "think": True, "tools": [], "sparkle": 1}
    reply = server.post("/api/chat", {**asked, "options": {**OPTIONS, "num_gpu": 1}})
    assert set(reply.headers["x-specserve-ignored"].split(",")) == {"sparkle", "options.num_gpu", "keep_alive", "think"}


def test_where_nothing_is_asked_the_model_is_loaded(server: Any) -> None:
    chat = server.post("/api/chat", {"model": "tiny", "messages": []}).json
    assert (chat["message"], chat["done_reason"], chat["done"]) == (
        {"role": "assistant", "content": ""},
        "load",
        True,
    )
    unload = server.post("/api/generate", {"model": "tiny", "keep_alive": 0})
    assert (unload.json["response"], unload.json["done_reason"]) == ("", "load")
    assert unload.headers["x-specserve-ignored"] == "keep_alive"
    wrong = server.post("/api/generate", {"model": "tiny", "options": {"frequency_penalty": -3}})
    assert (wrong.status, "options.frequency_penalty" in wrong.json["error"]) == (400, True)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/api/chat", {"model": "gpt", "messages": [USER]}, 404, "Unknown model 'gpt'"),
        ("/api/show", {"name": "gpt"}, 404, "Unknown model 'gpt'"),
        ("/api/chat", {"messages": [USER], "options": {"num_ctx": 4096}}, 400, "4096 and the context of this server"),
        ("/api/chat", {"messages": [{**USER, "images": ["aGk="]}]}, 400, "reads text alone"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "suffix is not supported"),
        ("/api/chat", {"messages": [{**USER, "content": "x" * 4000}]}, 400, "255 fit"),
        ("/api/nothing", {}, 404, "There is no /api/nothing here"),
    ],
)
def test_errors_are_as_ollamas(server: Any, path: str, body: Any, status: int, message: str) -> None:
    reply = server.post(path, body)
    assert reply.status == status
    assert set(reply.json) == {"error"}
    assert message in reply.json["error"]


def test_models_are_told_of(server: Any) -> None:
    (model,) = server.get("/api/tags").json["models"]
    (running,) = server.get("/api/ps").json["models"]
    shown = server.post("/api/show", {"model": model["name"]}).json
    assert model["name"] == model["model"] == running["name"] == "tiny:latest"
    assert (model["size"] > 10**5, running["context_length"], running["size_vram"]) == (True, 256, 0)
    assert len(model["digest"]) == 64
    assert model["details"] == running["details"] == shown["details"]
    assert model["details"]["family"] == "llama"
    assert model["details"]["format"] == "safetensors"
    info = shown["model_info"]
    assert (info["general.architecture"], info["llama.context_length"]) == ("llama", 256)
    assert f"{info['general.parameter_count'] / 1000:.1f}K" == model["details"]["parameter_size"]
    assert shown["capabilities"] == ["completion"]
    assert shown["template"] == server.get("/tokenizer_info").json["chat_template"]
    assert set(server.get("/api/version").json) == {"version", "specserve"}


@pytest.mark.parametrize("what", NOT_OFFERED)
def test_what_is_not_offered_says_what_to_do(server: Any, what: str) -> None:
    reply = server.ask("DELETE" if what == "delete" else "POST", f"/api/{what}", {"model": "tiny"})
    assert (reply.status, reply.headers["x-should-retry"]) == (400, "false")
    assert reply.json == {"error": NOT_OFFERED[what]}


def test_a_model_that_generates_text_embeds_none(server: Any) -> None:
    for path, body in (("embed", {"input": "a"}), ("embeddings", {"prompt": "a"})):
        reply = server.post(f"/api/{path}", body)
        assert reply.status == 400 and "generates text" in reply.json["error"]


@pytest.mark.parametrize("path", ["/api/tags", "/api/ps", "/api/version", "/api/chat", "/api/show", "/api/pull"])
def test_every_route_needs_a_key(strict_server: Any, path: str) -> None:
    ask = strict_server.get if path in ("/api/tags", "/api/ps", "/api/version") else strict_server.post
    reply = ask(path, *([] if ask == strict_server.get else [{}]), headers={"Authorization": ""})
    assert reply.status == 401
    assert set(reply.json) == {"error"}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, serving_process: Any) -> Iterator[Any]:
    """A model whose chat template takes tools and which thinks, under two names."""
    folder = write_tiny_model(tmp_path_factory.mktemp("thinker"), "llama", max_position_embeddings=2048)
    template = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|start|>{{ m.role }}\n"
        "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c | tojson }}</tool_call>{% endfor %}<|end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n"
        "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
    )
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}), "utf-8")
    names = ("--served-model-name=thinker-1b", "--served-model-name=org/thinker:Q4")
    with serving_process(folder, tmp_path_factory.mktemp("served"), *names, **{"max-model-len": 2048}) as served:
        yield served


def test_names_have_tags(bare: Any) -> None:
    names = [model["name"] for model in bare.get("/api/tags").json["models"]]
    assert names == ["thinker-1b:latest", "org/thinker:Q4"]
    for name in (*names, "thinker-1b", "thinker:1b"):
        assert bare.post("/api/show", {"model": name}).status == 200, name
        reply = bare.post("/api/chat", {"model": name, "messages": [USER], "stream": False, "options": OPTIONS})
        assert (reply.status, reply.json["model"]) == (200, name)
    for name in ("org/thinker", "thinker", "thinker:2b"):
        assert bare.post("/api/show", {"model": name}).status == 404, name


def test_capabilities_are_those_of_the_template(bare: Any) -> None:
    shown = bare.post("/api/show", {"model": "thinker-1b"}).json
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert "enable_thinking" in shown["template"]


def test_the_template_is_told_whether_to_think_and_of_tools(bare: Any) -> None:
    asked = {"messages": [USER], "stream": False, "options": OPTIONS}
    counts = [
        bare.post("/api/chat", {**asked, **more}).json["prompt_eval_count"]
        for more in ({}, {"think": False}, {"tools": [TOOL]})
    ]
    assert counts[0] < min(counts[1:])
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    results = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "11"}]
    reply = bare.post("/api/chat", {**asked, "messages": [USER, *results], "tools": [TOOL]})
    assert reply.status == 200
    assert "x-specserve-ignored" not in reply.headers
