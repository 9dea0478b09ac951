"""Requests as the routes see them: prompts in, chunks of text out. Knows the tokenizer and the engine's supervisor;
knows no HTTP and no JSON."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from specserve.engine.outputs import Chunk, Collector, CompletionOutput, RequestOutput
from specserve.models.tokenizer import Tokenizer
from specserve.server.engine.client import EngineClient, Subscription
from specserve.server.engine.messages import Said, Submit
from specserve.server.engine.supervisor import Supervisor
from specserve.types import Event, SamplingParams

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One prompt as ids, and everything that goes with it."""

    prompt_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    priority: int = 0
    salt: bytes = b""
    drafter: str | None = None
    prediction: Sequence[int] = ()


class Answer:
    """A request that runs. Iterate over its chunks; `output` grows with them. A context manager: whatever still runs
    when it is left is aborted."""

    def __init__(
        self, ask: Ask, name: str, client: EngineClient, subscription: Subscription, tokenizer: Tokenizer
    ) -> None:
        completions = [CompletionOutput(index) for index in range(ask.params.n)]
        self.output = RequestOutput(name, ask.prompt, ask.prompt_ids, completions)
        self._name = name
        self._client = client
        self._subscription = subscription
        self._collector = Collector(self.output, ask.params, tokenizer, self._stop)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        async for said in self._subscription:
            for each in said:
                self._collector.push(_event(self._name, each))
            while self._collector.chunks:
                yield self._collector.chunks.popleft()
            if self._collector.finished:
                return

    async def whole(self) -> RequestOutput:
        """The output when all its completions have ended."""
        async for _ in self:
            pass
        return self.output

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._client.abort(self._subscription)

    def _stop(self, name: str, index: int) -> None:
        """A stop string, which the engine cannot see, has ended a completion."""
        self._client.abort(self._subscription, index)


class Service:
    """What all routes share. Tokenizing and templates run on threads: long texts must not hold up other streams."""

    def __init__(self, supervisor: Supervisor, tokenizer: Tokenizer, num_threads: int = 2) -> None:
        self.supervisor = supervisor
        self.tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(num_threads, "specserve-text")

    async def on_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return await self.on_thread(self.tokenizer.encode, text, add_special_tokens)

    async def chat_ids(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> tuple[str, list[int]]:
        """A conversation through the chat template, as text and ids."""

        def render() -> tuple[str, list[int]]:
            text = self.tokenizer.render_chat(messages, **template)
            return text, self.tokenizer.encode(text, add_special_tokens=False)

        return await self.on_thread(render)

    def start(self, ask: Ask, name: str) -> Answer:
        """Ask the engine. Raises EngineError while there is none."""
        client = self.supervisor.client
        submit = Submit(
            id=0,
            prompt_ids=ask.prompt_ids,
            params=ask.params,
            bad_ids=self._bad_ids(ask.params),
            priority=ask.priority,
            salt=ask.salt,
            drafter=ask.drafter,
            prediction=list(ask.prediction),
        )
        return Answer(ask, name, client, client.submit(submit, ask.params.n), self.tokenizer)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _bad_ids(self, params: SamplingParams) -> list[list[int]]:
        forms = (form for word in params.bad_words for form in (word.lstrip(), " " + word.lstrip()))
        return [self.tokenizer.encode(form, add_special_tokens=False) for form in forms]


def _event(name: str, said: Said) -> Event:
    return Event(
        request_id=name,
        index=said.index,
        tokens=said.tokens,
        logprobs=said.logprobs,
        prompt_logprobs=said.prompt_logprobs,
        finish_reason=said.finish_reason,
        stop_reason=said.stop_reason,
        error=said.error,
        stats=said.stats,
    )
