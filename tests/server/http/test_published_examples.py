"""The requests that Ollama's and OpenAI's references show, and that each answer has the shape which these state.
Answers are kept short; the models' names are those of the references."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from pydantic import TypeAdapter

from specserve.testing import write_tiny_model

WHY = "Why is the sky blue?"
ASKED = {"role": "user", "content": WHY}
NAMES = ("llama3.2", "mistral", "llava", "codellama:code", "deepseek-r1", "gpt-5.1", "gpt-3.5-turbo-instruct")
KEPT_SHORT = 24  # tokens
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, serving_process: Any) -> Iterator[Any]:
    folder = write_tiny_model(tmp_path_factory.mktemp("published"), "llama", max_position_embeddings=4096)
    names = [f"--served-model-name={name}" for name in NAMES]
    with serving_process(folder, tmp_path_factory.mktemp("served"), *names, **{"max-model-len": 4096}) as served:
        yield served


def check(schema: Any, value: Any) -> None:
    found = [f"{list(error.instance_path)}: {error.message}" for error in jsonschema_rs.iter_errors(schema, value)]
    assert found == [], value


def record(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


# --- Ollama's answers, as its reference states them -------------------------------------------------------------------

TEXT, WHOLE, YES = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TIME = {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)$"}
HEAD = {"model": TEXT, "created_at": TIME, "done": YES}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
ENDS = {
    "done_reason": {"enum": ["stop", "length"]},
    **dict.fromkeys((*DURATIONS, "prompt_eval_count", "eval_count"), WHOLE),
}
CALL = record({"function": record({"name": TEXT, "arguments": {"type": "object"}})})
SAID = record({"role": {"const": "assistant"}, "content": TEXT}, thinking=TEXT, tool_calls={"items": CALL})
ANSWERS = {"/api/generate": {"response": TEXT}, "/api/chat": {"message": SAID}}
DETAILS = record(
    {
        **dict.fromkeys(("parent_model", "format", "family", "parameter_size", "quantization_level"), TEXT),
        "families": {"type": "array", "items": TEXT},
    }
)
LISTED = {"name": TEXT, "model": TEXT, "size": WHOLE, "digest": TEXT, "details": DETAILS}
MODELS = {
    ("GET", "/api/tags", None): record({"models": {"items": record({**LISTED, "modified_at": TIME})}}),
    ("GET", "/api/ps", None): record({"models": {"items": record({**LISTED, "expires_at": TIME, "size_vram": WHOLE})}}),
    ("GET", "/api/version", None): record({"version": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"}}),
    ("POST", "/api/show", "llava"): record(
        {
            **dict.fromkeys(("modelfile", "parameters", "template"), TEXT),
            "details": DETAILS,
            "model_info": record({"general.architecture": TEXT}),
            "capabilities": {"type": "array", "items": TEXT, "contains": {"const": "completion"}},
        }
    ),
}
AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "available": {"type": "boolean"}},
    "required": ["age", "available"],
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a given city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city to get the weather for"}},
            "required": ["city"],
        },
    },
}
EVERY_OPTION = {
    "num_keep": 5,
    "seed": 42,
    "num_predict": 100,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.0,
    "typical_p": 0.7,
    "repeat_last_n": 33,
    "temperature": 0.8,
    "repeat_penalty": 1.2,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.0,
    "penalize_newline": True,
    "stop": ["\n", "user:"],
    "numa": False,
    "num_ctx": 1024,
    "num_batch": 2,
    "num_gpu": 1,
    "main_gpu": 0,
    "use_mmap": True,
    "num_thread": 8,
}
TURNS = [
    {"role": "user", "content": "why is the sky blue?"},
    {"role": "assistant", "content": "due to rayleigh scattering."},
    {"role": "user", "content": "how is that different than mie scattering?"},
]
CALLED = [
    {"role": "user", "content": "what is the weather in Toronto?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Toronto"}}}],
    },
    {"role": "tool", "content": "11 degrees celsius", "tool_name": "get_weather"},
]
GENERATED = {
    "streamed": {"model": "llama3.2", "prompt": WHY},
    "whole": {"model": "llama3.2", "prompt": WHY, "stream": False},
    "a schema": {"model": "llama3.2", "prompt": "Ollama is 22 years old. Respond using JSON", "stream": False,
                 "format": AGE},
    "JSON": {"model": "llama3.2", "prompt": "What color is the sky? Respond using JSON", "format": "json",
             "stream": False},
    "raw": {"model": "mistral", "prompt": "[INST] why is the sky blue? [/INST]", "raw": True, "stream": False},
    "the same again": {"model": "mistral", "prompt": WHY, "options": {"seed": 123}},
    "options": {"model": "llama3.2", "prompt": WHY, "stream": False, "options": EVERY_OPTION},
    "thinking": {"model": "deepseek-r1", "prompt": WHY, "think": True},
}  # fmt: skip
CHATS = {
    "streamed": {"model": "llama3.2", "messages": [ASKED]},
    "streamed with tools": {"model": "llama3.2", "messages": CALLED[:1], "tools": [WEATHER], "stream": True},
    "whole": {"model": "llama3.2", "messages": [ASKED], "stream": False},
    "tools": {"model": "llama3.2", "messages": CALLED[:1], "tools": [WEATHER], "stream": False},
    "a schema": {"model": "llama3.2", "messages": [{"role": "user", "content": "Ollama is 22 years old."}],
                 "stream": False, "format": AGE, "options": {"temperature": 0}},
    "history": {"model": "llama3.2", "messages": TURNS},
    "history with tools": {"model": "llama3.2", "messages": CALLED, "tools": [WEATHER], "stream": False},
    "the same again": {"model": "llama3.2", "messages": [ASKED], "options": {"seed": 101, "temperature": 0}},
    "thinking": {"model": "deepseek-r1", "messages": [ASKED], "think": "high", "stream": False},
}  # fmt: skip


def shortened(body: dict[str, Any]) -> dict[str, Any]:
    """With no more tokens than it takes: one that has a format is to end by itself."""
    most = 400 if "format" in body else KEPT_SHORT
    return {**body, "options": {**body.get("options", {}), "num_predict": most}}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/api/generate", body) for body in GENERATED.values()] + [("/api/chat", body) for body in CHATS.values()],
    ids=[*(f"generate: {name}" for name in GENERATED), *(f"chat: {name}" for name in CHATS)],
)
def test_ollamas_examples_are_answered(published: Any, path: str, body: dict[str, Any]) -> None:
    reply = published.post(path, shortened(body))
    assert reply.status == 200, reply.body
    lines = [json.loads(line) for line in reply.body.strip().split(b"\n")]
    assert len(lines) == 1 or body.get("stream") is not False
    for line in lines[:-1]:
        check(record({**HEAD, **ANSWERS[path], "done": {"const": False}}), line)
    check(record({**HEAD, **ANSWERS[path], **ENDS, "done": {"const": True}}), lines[-1])
    if body.get("format") == AGE and lines[-1]["done_reason"] == "stop":
        text = lines[-1]["response"] if path == "/api/generate" else lines[-1]["message"]["content"]
        check(AGE, json.loads(text))


@pytest.mark.parametrize("asked", MODELS, ids=lambda asked: asked[1])
def test_ollamas_models_are_told_of(published: Any, asked: tuple[str, str, str | None]) -> None:
    method, path, name = asked
    reply = published.ask(method, path, None if name is None else {"model": name})
    assert reply.status == 200
    check(MODELS[asked], reply.json)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/generate", {"model": "llama3.2"}),
        ("/api/generate", {"model": "llama3.2", "keep_alive": 0}),
        ("/api/chat", {"model": "llama3.2", "messages": []}),
        ("/api/chat", {"model": "llama3.2", "messages": [], "keep_alive": 0}),
    ],
)
def test_ollamas_examples_of_loading(published: Any, path: str, body: dict[str, Any]) -> None:
    reply = published.post(path, body)
    assert reply.status == 200
    check(record({**HEAD, **ANSWERS[path], "done_reason": {"const": "load"}}), reply.json)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/api/generate", {"model": "codellama:code", "prompt": "def f(a):", "suffix": "return a"}, 400),
        ("POST", "/api/generate", {"model": "llava", "prompt": "What is this?", "images": [PIXEL]}, 400),
        ("POST", "/api/chat", {"model": "llava", "messages": [{**ASKED, "images": [PIXEL]}]}, 400),
        ("POST", "/api/create", {"model": "mario", "from": "llama3.2", "system": "You are Mario."}, 400),
        ("POST", "/api/copy", {"source": "llama3.2", "destination": "llama3-backup"}, 400),
        ("DELETE", "/api/delete", {"model": "llama3:13b"}, 400),
        ("POST", "/api/pull", {"model": "llama3.2"}, 400),
        ("POST", "/api/push", {"model": "mattw/pygmalion:latest"}, 400),
        ("POST", "/api/embed", {"model": "all-minilm", "input": WHY}, 400),
        ("POST", "/api/embeddings", {"model": "all-minilm", "prompt": WHY}, 400),
    ],
)
def test_ollamas_examples_that_are_refused(published: Any, method: str, path: str, body: Any, status: int) -> None:
    reply = published.ask(method, path, body)
    assert reply.status == status
    check({"type": "object", "properties": {"error": TEXT}, "required": ["error"], "maxProperties": 1}, reply.json)


def test_ollamas_types_read_the_answers(published: Any) -> None:
    ollama = pytest.importorskip("ollama", reason="ollama is not installed: pip install ollama")
    for path, kind, bodies in (
        ("/api/generate", ollama.GenerateResponse, GENERATED),
        ("/api/chat", ollama.ChatResponse, CHATS),
    ):
        for body in bodies.values():
            for line in published.post(path, shortened(body)).body.strip().split(b"\n"):
                kind.model_validate_json(line, strict=False)
    ollama.ListResponse.model_validate(published.get("/api/tags").json)
    ollama.ProcessResponse.model_validate(published.get("/api/ps").json)
    ollama.ShowResponse.model_validate(published.post("/api/show", {"model": "llava"}).json)


# --- OpenAI's answers, as this server's document states them ----------------------------------------------------------

CHAT, TEXTS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = [{"role": "developer", "content": "You are a helpful assistant."}, {"role": "user", "content": "Hello!"}]
OF_LOCATION = {
    "type": "object",
    "properties": {
        "location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["location"],
}
CURRENT = {"name": "get_current_weather", "description": "Get the current weather in a given location"}
BOSTON = "What is the weather like in Boston today?"
OPENAI = {
    "chat": (CHAT, {"model": "gpt-5.1", "messages": HELLO}),
    "chat, streamed": (CHAT, {"model": "gpt-5.1", "messages": HELLO, "stream": True}),
    "chat with functions": (CHAT, {
        "model": "gpt-5.1", "messages": [{"role": "user", "content": BOSTON}], "tool_choice": "auto",
        "tools": [{"type": "function", "function": {**CURRENT, "parameters": OF_LOCATION}}]}),
    "chat with log-probabilities": (CHAT, {
        "model": "gpt-5.1", "messages": [{"role": "user", "content": "Hello!"}], "logprobs": True, "top_logprobs": 2}),
    "completion": (TEXTS, {"model": "gpt-3.5-turbo-instruct", "prompt": "Say this is a test", "max_tokens": 7,
                           "temperature": 0}),
    "completion, streamed": (TEXTS, {"model": "gpt-3.5-turbo-instruct", "prompt": "Say this is a test",
                                     "max_tokens": 7, "temperature": 0, "stream": True}),
    "response": (RESPONSES, {"model": "gpt-5.1", "input": "Tell me a three sentence bedtime story about a unicorn."}),
    "response, streamed": (RESPONSES, {"model": "gpt-5.1", "instructions": "You are a helpful assistant.",
                                       "input": "Hello!", "stream": True}),
    "response with functions": (RESPONSES, {
        "model": "gpt-5.1", "input": BOSTON, "tool_choice": "auto",
        "tools": [{"type": "function", **CURRENT, "parameters": OF_LOCATION}]}),
    "response with effort": (RESPONSES, {
        "model": "gpt-5.1", "input": "How much wood would a woodchuck chuck?", "reasoning": {"effort": "high"}}),
}  # fmt: skip


@pytest.fixture(scope="module")
def document(published: Any) -> Any:
    return published.get("/openapi.json").json


def stated(document: Any, path: str, media: str) -> Any:
    """The schema of an answer, with those that it refers to."""
    schema = document["paths"][path]["post"]["responses"]["200"]["content"][media]["schema"]
    return {**schema.get("x-itemSchema", schema), "components": document["components"]}


def short(path: str, body: dict[str, Any]) -> dict[str, Any]:
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    return {limit: KEPT_SHORT, **body}


@pytest.mark.parametrize("name", OPENAI)
def test_openais_examples_are_answered(published: Any, document: Any, name: str) -> None:
    path, body = OPENAI[name]
    reply = published.post(path, short(path, body))
    assert reply.status == 200, reply.body
    if "stream" not in body:
        check(stated(document, path, "application/json"), reply.json)
        return
    events = [event for event in reply.events if event != "[DONE]"]
    assert len(events) > 2
    for event in events:
        check(stated(document, path, "text/event-stream"), event)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"model": "gpt-5.1", "messages": [{"role": "user", "content": [
            {"type": "text", "text": "What is in this image?"},
            {"type": "image_url", "image_url": {"url": "https://example.com/boardwalk.jpg"}}]}]}),
        (RESPONSES, {"model": "gpt-5.1", "input": [{"role": "user", "content": [
            {"type": "input_text", "text": "what is in this image?"},
            {"type": "input_image", "image_url": "https://example.com/boardwalk.jpg"}]}]}),
        (RESPONSES, {"model": "gpt-5.1", "tools": [{"type": "web_search_preview"}], "input": "What was good news?"}),
        ("/v1/embeddings", {"model": "text-embedding-ada-002", "input": "The food was delicious and the waiter..."}),
    ],
    ids=["image", "image in a response", "web search", "embeddings"],
)  # fmt: skip
def test_openais_examples_that_are_refused(published: Any, document: Any, path: str, body: dict[str, Any]) -> None:
    reply = published.post(path, body)
    assert reply.status == 400
    schema = {"$ref": "#/components/schemas/ErrorBody", "components": document["components"]}
    check(schema, reply.json)


def test_openais_types_read_the_answers(published: Any) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed: pip install 'openai>=3,<4'")
    responses = openai.types.responses
    kinds: dict[str, tuple[Any, Any]] = {
        CHAT: (openai.types.chat.ChatCompletion, openai.types.chat.ChatCompletionChunk),
        TEXTS: (openai.types.Completion, None),  # which knows no finish_reason of null, as OpenAI streams it
        RESPONSES: (responses.Response, responses.ResponseStreamEvent),
    }
    for path, body in OPENAI.values():
        whole, part = kinds[path]
        reply = published.post(path, short(path, body))
        if "stream" not in body:
            whole.model_validate(reply.json)
        elif part is not None:
            for event in reply.events:
                if event != "[DONE]":
                    TypeAdapter(part).validate_python(event)
