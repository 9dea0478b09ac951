"""Conversations that clients send back, over HTTP, to a model whose chat template takes no tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from specserve.testing import write_tiny_model

PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
QUESTION = {"role": "user", "content": "How warm is it?"}


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory, serving_process: Any) -> Iterator[Any]:
    folder = write_tiny_model(tmp_path_factory.mktemp("roomy"), "llama", max_position_embeddings=8192)
    room = {"max-model-len": 8192}
    with serving_process(folder, tmp_path_factory.mktemp("served"), "--served-model-name=tiny", **room) as served:
        yield served


def prompt_of(server: Any, **fields: Any) -> str:
    """The prompt of a chat."""
    ids = server.post("/tokenize", fields).json["tokens"]
    return str(server.post("/detokenize", {"tokens": ids}).json["prompt"])


def ignored(reply: Any) -> set[str]:
    return set(filter(None, reply.headers.get("x-specserve-ignored", "").split(",")))


# --- the loop of every SDK: a call, what it gave, and the next answer -------------------------------------------------


def loop(path: str) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """A request, what forces a call, and what goes on from an answer with a result."""
    limits: dict[str, Any] = {"temperature": 0}
    if path == "/v1/messages":
        tools = [{"name": "weather", "description": "Degrees.", "input_schema": SCHEMA}]
        first = {"messages": [QUESTION], "max_tokens": 120, "tools": tools, **limits}

        def next_turn(answer: Any) -> dict[str, Any]:
            (block,) = answer["content"]
            result = {"type": "tool_result", "tool_use_id": block["id"], "content": "7 degrees"}
            turns = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
            return {**first, "messages": [QUESTION, *turns], "max_tokens": 8}

        return first, {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}, next_turn
    function = {"name": "weather", "description": "Degrees.", "parameters": SCHEMA}
    if path == "/v1/responses":
        first = {"input": [QUESTION], "max_output_tokens": 120, "tools": [{"type": "function", **function}], **limits}

        def next_turn(answer: Any) -> dict[str, Any]:
            (item,) = answer["output"]
            result = {"type": "function_call_output", "call_id": item["call_id"], "output": "7 degrees"}
            return {**first, "input": [QUESTION, item, result], "max_output_tokens": 8}

        return first, {"tool_choice": "required", "parallel_tool_calls": False}, next_turn
    tools = [{"type": "function", "function": function}]
    first = {"messages": [QUESTION], "max_tokens": 120, "tools": tools, **limits}

    def next_turn(answer: Any) -> dict[str, Any]:
        message = answer["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "7 degrees"}
        return {**first, "messages": [QUESTION, message, result], "max_tokens": 8}

    return first, {"tool_choice": "required", "parallel_tool_calls": False}, next_turn


def used(path: str, answer: Any) -> int:
    """Tokens of the prompt."""
    usage = answer["usage"]
    if path == "/v1/messages":
        return int(usage["input_tokens"] + usage["cache_read_input_tokens"])
    return int(usage["input_tokens" if path == "/v1/responses" else "prompt_tokens"])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_the_loop_goes_on_where_the_template_takes_no_tools(roomy: Any, path: str, stream: bool) -> None:
    first, forced, next_turn = loop(path)
    assert roomy.post(path, {**first, "stream": stream}).status == 200
    called = roomy.post(path, {**first, **forced}).json
    second = roomy.post(path, {**next_turn(called), "stream": stream})
    assert second.status == 200
    ids = {
        "/v1/chat/completions": {"messages.tool_calls.id", "messages.tool_call_id"},
        "/v1/responses": {"input.call_id", "input.id", "input.status"},
        "/v1/messages": {"messages.content.id", "messages.content.tool_use_id"},
    }
    assert ignored(second) == ids[path]


def test_every_api_makes_the_same_prompt_of_the_loop(roomy: Any) -> None:
    sizes = []
    for path in PATHS:
        first, _, next_turn = loop(path)
        call = {"name": "weather", "arguments": '{"city": "Oslo"}'}
        answer = {
            "/v1/chat/completions": {"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c1", "type": "function", "function": call}]}}]},
            "/v1/responses": {"output": [{"type": "function_call", "call_id": "c1", **call}]},
            "/v1/messages": {"content": [{"type": "tool_use", "id": "c1", "name": "weather",
                "input": {"city": "Oslo"}}]},
        }[path]  # fmt: skip
        sizes.append(used(path, roomy.post(path, next_turn(answer)).json))
        if path == "/v1/chat/completions":
            asked = next_turn(answer)
            prompt = prompt_of(roomy, messages=asked["messages"], tools=asked["tools"])
        if path == "/v1/messages":
            asked = next_turn(answer)
            counted = roomy.post("/v1/messages/count_tokens", {n: asked[n] for n in ("messages", "tools")}).json
    assert sizes == [sizes[0]] * 3
    assert counted == {"input_tokens": sizes[0]}
    assert json.dumps(first["tools"][0]["description"]) in prompt
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in prompt
    assert "<tool_response>\n7 degrees\n</tool_response>" in prompt
    assert "You may call these functions:" in prompt


# --- what a server said itself ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", ['{"city":', "[1]", "null", "Oslo", ""])
def test_a_call_that_was_cut_off_is_taken_back(roomy: Any, arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "broken"}
    messages = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    assert roomy.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2}).status == 200
    assert f'"arguments": {arguments or "{}"}}}' in prompt_of(roomy, messages=messages)
    item = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": arguments}
    output = {"type": "function_call_output", "call_id": "c1", "output": "broken"}
    assert roomy.post("/v1/responses", {"input": [QUESTION, item, output], "max_output_tokens": 2}).status == 200


def test_an_answer_in_the_midst_of_a_call_is_taken_back_as_it_came(roomy: Any) -> None:
    first, forced, next_turn = loop("/v1/chat/completions")
    cut = roomy.post("/v1/chat/completions", {**first, **forced, "max_tokens": 40}).json
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["choices"][0]["message"]["tool_calls"], "or nothing is taken back"
    assert roomy.post("/v1/chat/completions", next_turn(cut)).status == 200


def test_what_is_not_read_is_named_in_the_words_of_each_api(roomy: Any) -> None:
    odd = {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}, "zzz": 1}], "name": "Bo"}
    thought = {"role": "assistant", "content": "b", "reasoning_content": "hm", "audio": {"id": "x"}}
    asked = {"messages": [odd, thought, QUESTION], "max_tokens": 2, "reasoning_effort": "low"}
    more = {"chat_template_kwargs": {"enable_thinking": False}}
    names = {"content.zzz", "name", "reasoning_content", "audio"}
    expected = {f"messages.{name}" for name in names} | {"reasoning_effort", "chat_template_kwargs.enable_thinking"}
    assert ignored(roomy.post("/v1/chat/completions", {**asked, **more})) == expected
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "b", "citations": [{"type": "x"}]},
    ]
    asked = {
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [QUESTION, {"role": "assistant", "content": blocks, "id": "msg_1"}, QUESTION],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
    }
    names = {"thinking", "signature", "redacted_thinking", "citations"}
    expected = {f"messages.content.{name}" for name in names} | {
        "messages.id", "thinking", "output_config.effort", "system.cache_control",
    }  # fmt: skip
    assert ignored(roomy.post("/v1/messages", {**asked, "max_tokens": 2})) == expected
    assert ignored(roomy.post("/v1/messages/count_tokens", asked)) == expected
    items = [
        QUESTION,
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        QUESTION,
    ]
    asked = {"input": items, "reasoning": {"effort": "low", "summary": "auto"}, "max_output_tokens": 2}
    expected = {"input.id", "input.encrypted_content", "reasoning.effort", "reasoning.summary"}
    assert ignored(roomy.post("/v1/responses", asked)) == expected
    assert ignored(roomy.post("/v1/responses", {"input": "a", "max_output_tokens": 2})) == set()


# --- two agents' requests, in the shape that is published -------------------------------------------------------------

CODEX = {
    "model": "tiny",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: read only."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<cwd>/repo</cwd>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAAAB"},
        {
            "type": "function_call",
            "name": "shell",
            "arguments": '{"command":["ls"]}',
            "call_id": "call_1",
            "id": "fc_1",
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "call_1", "output": '{"output":"a.py","metadata":{"exit_code":0}}'},
        {"type": "custom_tool_call", "call_id": "call_2", "name": "apply_patch", "input": "*** Begin Patch\n"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Done!"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "ls"}},
    ],
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "Runs a command.",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "array", "items": {"type": "string"}}},
                "required": ["command"],
                "additionalProperties": False,
            },
        },
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "text": {"verbosity": "medium"},
}


def test_codex(roomy: Any) -> None:
    reply = roomy.post("/v1/responses", {**CODEX, "max_output_tokens": 8})
    assert reply.status == 200
    assert reply.events[-1]["type"] in ("response.completed", "response.incomplete")
    assert {"tools.custom", "tools.web_search", "tools.local_shell", "include.reasoning.encrypted_content"} < ignored(
        reply
    )
    alone = {**CODEX, "tools": [{"type": "web_search"}]}
    assert roomy.post("/v1/responses", alone).error["param"] == "tools"


CLAUDE_CODE = {
    "model": "tiny",
    "max_tokens": 8,
    "system": [
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "<env>/repo</env>", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>Be kind.</system-reminder>"}]},
        {"role": "user", "content": "List the files."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I look.", "signature": "EqQB"},
                {"type": "redacted_thinking", "data": "EmwK"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
                {"type": "tool_use", "id": "toolu_2", "name": "Bash", "input": {"command": "pwd"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "/repo", "is_error": False},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "a.py"}],
                    "cache_control": {"type": "ephemeral"},
                },
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "a.py"}},
                {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": [{"type": "web_search_result"}]},
                {"type": "text", "text": "Found."},
            ],
        },
        {"role": "user", "content": [{"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}}]},
    ],
    "tools": [
        {"name": "Bash", "description": "Runs a command.", "input_schema": {"type": "object", "properties": {}}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": "user_1"},
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "temperature": 1,
    "stream": True,
}


def test_claude_code(roomy: Any) -> None:
    reply = roomy.post("/v1/messages?beta=true", CLAUDE_CODE)
    assert reply.status == 200
    assert reply.events[-1]["type"] == "message_stop"
    assert {"thinking", "tools.web_search_20250305", "context_management", "system.cache_control"} < ignored(reply)
    alone = {**CLAUDE_CODE, "tools": CLAUDE_CODE["tools"][1:]}  # type: ignore[index]
    assert "web_search" in roomy.post("/v1/messages", alone).error["message"]
