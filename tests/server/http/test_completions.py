"""From a body to requests: the engine is told to expect them before their prompts are tokenized."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from specserve.server.http import completions
from specserve.server.wire.fields import Limits
from specserve.server.wire.openai.requests import ChatCompletionRequest, CompletionRequest, read
from specserve.text.tokenizer import ChatPrompt

LIMITS = Limits(vocab_size=300, max_model_len=512)


class Service:
    """Tokenizes everything as [1], and keeps what was called."""

    tokenizer = SimpleNamespace(takes_tools=True)

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.prompts = self

    def new_id(self) -> str:
        return "0"

    async def with_tools(self, prepared: Any, use: Any) -> Any:
        return prepared, None

    async def with_reasoning_apart(self, prepared: Any) -> Any:
        return prepared

    def wake_engine(self) -> None:
        self.calls.append("wake")

    async def chat_prompt(self, messages: Any, **template: Any) -> ChatPrompt:
        self.calls.append("tokenize")
        return ChatPrompt("x", [1])

    async def check_length(self, text: str) -> None:
        pass

    async def encode(self, text: str) -> list[int]:
        self.calls.append("tokenize")
        return [1]


def server() -> Any:
    return SimpleNamespace(service=Service(), adapter_of=lambda name: None)


def test_a_conversation() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
    told = server()
    asyncio.run(completions.prepare_chat(told, read(ChatCompletionRequest, body, LIMITS)))
    assert told.service.calls == ["wake", "tokenize"]


def test_texts() -> None:
    """Once, however many they are."""
    told = server()
    request = read(CompletionRequest, b'{"prompt": ["x", "y"]}', LIMITS)
    asyncio.run(completions.prepare_completions(told, request))
    assert told.service.calls == ["wake", "tokenize", "tokenize"]


def test_ids_are_there_already() -> None:
    told = server()
    asyncio.run(completions.prepare_completions(told, read(CompletionRequest, b'{"prompt": [1, 2]}', LIMITS)))
    assert told.service.calls == []
