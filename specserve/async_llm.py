"""The Python SDK for asyncio: an engine on a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from specserve.adapters import AdapterDone, AdapterInfo, AdapterSource
from specserve.checkpoint.generation_config import AUTO, check_named, stated_by
from specserve.config import DEFAULT_MODEL, EngineConfig
from specserve.engine.build import build
from specserve.engine.compiling import Compiling
from specserve.engine.port import LocalPort, ThreadPort
from specserve.engine.request import Request
from specserve.errors import SpecserveError
from specserve.machine.ownership import Ownership
from specserve.outputs import Chunk, Collector, Gathered, RequestOutput
from specserve.prompts import Messages, Prediction, Prompt, Requests
from specserve.types import Event, SamplingParams

__all__ = ["AsyncLLM"]


class AsyncLLM:
    """An engine on a thread of its own, for asyncio. Cancelling a call or leaving a stream aborts its request. Calls of
    a lower `priority` (-64 to 64) run first, and are preempted last when memory is short; a step lets a call pass 16
    earlier ones, so each has its turn. All else as for LLM.

    Any thread and event loop may call it. It belongs to the process that made it: after a fork calls in the child raise
    EngineError. torch's number of threads is set for the whole process (1 where native kernels serve, else `threads`),
    as the engine's steps run beside the caller's own code."""

    def __init__(
        self, model: str = DEFAULT_MODEL, *, generation_config: str = AUTO, progress: bool = False, **options: Any
    ) -> None:
        self.config = EngineConfig(model=model, **options)
        check_named(generation_config)
        built = build(self.config, progress=progress)
        self.tokenizer, self.summary = built.tokenizer, built.summary
        self.engine = built.engine  # its counters may be read; everything else belongs to the port's thread
        self._requests = Requests(self.tokenizer, stated_by(generation_config, built.folder))
        self._owner = Ownership()
        self._port = ThreadPort(
            LocalPort(built.engine, Compiling(built.compiler, built.tokenizer.markers), built.loader)
        )

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        drafter: str | None = None,
        prediction: Prediction | None = None,
        adapter: str | None = None,
    ) -> RequestOutput:
        """Complete one prompt; many calls at once are batched by the engine."""
        fields = self._requests.fields(drafter, prediction, adapter=adapter, priority=priority)
        return await self._whole(*self._requests.of_prompt(prompt, params, **fields))

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        drafter: str | None = None,
        prediction: Prediction | None = None,
        adapter: str | None = None,
        **template: Any,
    ) -> RequestOutput:
        """Answer one conversation."""
        fields = self._requests.fields(drafter, prediction, adapter=adapter, priority=priority)
        return await self._whole(*self._requests.of_chat(messages, params, template, **fields))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        drafter: str | None = None,
        prediction: Prediction | None = None,
        adapter: str | None = None,
        explain: bool = False,
    ) -> AsyncIterator[Chunk]:
        """Complete one prompt and yield its text as it comes."""
        fields = self._requests.fields(drafter, prediction, adapter=adapter, priority=priority, explain=explain)
        return self._stream(*self._requests.of_prompt(prompt, params, **fields))

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        drafter: str | None = None,
        prediction: Prediction | None = None,
        adapter: str | None = None,
        explain: bool = False,
        **template: Any,
    ) -> AsyncIterator[Chunk]:
        """Answer one conversation and yield the text as it comes."""
        fields = self._requests.fields(drafter, prediction, adapter=adapter, priority=priority, explain=explain)
        return self._stream(*self._requests.of_chat(messages, params, template, **fields))

    def sampling_params(self, *, chat: bool = True, **fields: Any) -> SamplingParams:
        """As LLM.sampling_params."""
        return self._requests.params(chat, fields)

    async def load_adapter(
        self, name: str, path: str | Path, *, pinned: bool = False, head: str | Path | None = None
    ) -> AdapterInfo:
        """As LLM.load_adapter, beside steps."""
        source = AdapterSource(name, str(path), pinned, str(head or ""))
        return await self._told(partial(self._port.load_adapter, source, True))

    async def unload_adapter(self, name: str) -> None:
        """As LLM.unload_adapter."""
        await self._told(partial(self._port.unload_adapter, name))

    async def _told(self, ask: Callable[[AdapterDone], None]) -> AdapterInfo:
        self._owner.check()
        loop = asyncio.get_running_loop()
        found: asyncio.Queue[AdapterInfo | SpecserveError] = asyncio.Queue()
        ask(partial(_hand_over, loop, found))
        info = await found.get()
        if isinstance(info, SpecserveError):
            raise info
        return info

    async def close(self) -> None:
        """Stop after the step that is running; requests that are still open get an EngineError."""
        if self._owner.is_here:  # else the threads are the parent's
            await asyncio.to_thread(self._port.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _whole(self, request: Request, output: RequestOutput) -> RequestOutput:
        async with aclosing(self._stream(request, output, whole=True)) as chunks:
            async for _ in chunks:
                pass
        return output

    async def _stream(self, request: Request, output: RequestOutput, whole: bool = False) -> AsyncGenerator[Chunk]:
        """`whole`: nobody reads the chunks, so many events may come as one."""
        self._owner.check()
        collector = Collector(output, request.params, self.tokenizer, self._port.abort)
        events: asyncio.Queue[Event | SpecserveError] = asyncio.Queue()
        tell = partial(_hand_over, asyncio.get_running_loop(), events)
        self._port.submit(request, Gathered(tell) if whole and not request.params.stop else tell)
        try:
            while not collector.finished:
                collector.push(await events.get())
                while collector.chunks:
                    yield collector.chunks.popleft()
        finally:
            if not collector.finished:
                self._port.abort(request.id)


def _hand_over(loop: asyncio.AbstractEventLoop, events: asyncio.Queue[Any], event: object) -> None:
    """From the engine's thread to the loop's. Nobody listens any more once the loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(events.put_nowait, event)
