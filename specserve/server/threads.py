"""Work that would hold up the event loop, on threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
_INLINE_CHARACTERS = 4096  # text that is tokenized sooner than a thread would begin to
_NUM_THREADS = 2


class Threads:
    """The threads of one server."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "specserve-text")
        self._turn = asyncio.Lock()

    async def run(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function whose work grows with `size`, a number of characters: on a thread if there are many."""
        return await self.on_thread(function, *arguments) if size > _INLINE_CHARACTERS else function(*arguments)

    async def in_turn(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call on a thread a function that seldom lets others run: one at a time, with a rest as long as the work
        after it. However many come at once, half of the time is for those who are sent tokens."""
        await self._turn.acquire()
        begun = time.perf_counter()
        try:
            return await self.on_thread(function, *arguments)
        finally:
            asyncio.get_running_loop().call_later(time.perf_counter() - begun, self._turn.release)

    async def on_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
