"""`Client`: AsyncClient for code that does not use asyncio, with an event loop on a thread."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any, Generic, TypeVar

from specserve.client.calls import AsyncClient, AsyncStream, Messages, Prompt
from specserve.errors import InputError
from specserve.server.wire.openai.bodies import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    DetokenizeReply,
    HealthReply,
    ModelList,
    TokenizeReply,
)

T = TypeVar("T")


class LoopThread:
    """An event loop on a thread of its own, until `close`, which awaits `finish` and cancels what still runs."""

    def __init__(self, finish: Callable[[], Awaitable[None]]) -> None:
        self._finish = finish
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._closed = False
        self._lock = threading.Lock()  # of `_closed`
        self._thread = threading.Thread(target=self._main, name="specserve-client", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine; whatever interrupts the wait, Ctrl-C too, cancels it. Raises InputError when the
        loop is closed, before or meanwhile."""
        with self._lock:
            if self._closed:
                coroutine.close()
                raise InputError("This client is closed. Make a new one.")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except CancelledError as error:
            raise InputError("This client was closed during the call. Make a new one.") from error
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        await self._stop.wait()
        await self._finish()


class Stream(Generic[T]):
    """The chunks of one answer, read once: `for chunk in stream`. As AsyncStream otherwise; `with` closes it."""

    def __init__(self, loop: LoopThread, stream: AsyncStream[T]) -> None:
        self._loop = loop
        self._stream = stream

    def __iter__(self) -> Iterator[T]:
        chunks = aiter(self._stream)
        end: Any = object()

        async def following() -> T:
            return await anext(chunks, end)

        while (chunk := self._loop.run(following())) is not end:
            yield chunk  # when the caller leaves here `chunks` is dropped, and its event loop closes it

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; an answer that still comes is aborted."""
        self._loop.run(self._stream.close())


class Client:
    """AsyncClient for code without asyncio, and inside a running event loop too, as in a notebook: it has a loop of its
    own on a thread of its own. Options, calls and errors are AsyncClient's; threads may share a client."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float | None = 600.0,
        uds: str | os.PathLike[str] | None = None,
        max_retries: int = 2,
    ) -> None:
        options: dict[str, Any] = {"api_key": api_key, "timeout": timeout, "uds": uds, "max_retries": max_retries}
        self._client = AsyncClient(base_url, **options)
        self._loop = LoopThread(self._client.close)
        self._end = weakref.finalize(self, self._loop.close)  # at the latest when the interpreter exits

    def chat(self, messages: Messages, **fields: Any) -> ChatCompletion:
        """As AsyncClient.chat."""
        return self._loop.run(self._client.chat(messages, **fields))

    def stream_chat(self, messages: Messages, **fields: Any) -> Stream[ChatCompletionChunk]:
        """As AsyncClient.stream_chat."""
        return Stream(self._loop, self._client.stream_chat(messages, **fields))

    def complete(self, prompt: Prompt, **fields: Any) -> Completion:
        """As AsyncClient.complete."""
        return self._loop.run(self._client.complete(prompt, **fields))

    def stream(self, prompt: Prompt, **fields: Any) -> Stream[CompletionChunk]:
        """As AsyncClient.stream."""
        return Stream(self._loop, self._client.stream(prompt, **fields))

    def models(self) -> ModelList:
        """As AsyncClient.models."""
        return self._loop.run(self._client.models())

    def tokenize(self, prompt: str | None = None, *, messages: Messages | None = None, **fields: Any) -> TokenizeReply:
        """As AsyncClient.tokenize."""
        return self._loop.run(self._client.tokenize(prompt, messages=messages, **fields))

    def detokenize(self, tokens: Sequence[int], **fields: Any) -> DetokenizeReply:
        """As AsyncClient.detokenize."""
        return self._loop.run(self._client.detokenize(tokens, **fields))

    def health(self) -> HealthReply:
        """As AsyncClient.health."""
        return self._loop.run(self._client.health())

    def stats(self) -> dict[str, Any]:
        """As AsyncClient.stats."""
        return self._loop.run(self._client.stats())

    def close(self) -> None:
        """Close all connections and end the thread; answers that still come are aborted."""
        self._end()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
