"""KV between the engine of this process and other engines: what it has computed for them is theirs to fetch, and what
they have computed for it is fetched. Only small messages go by way of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized

from specserve.cluster.kv_link import Fetcher, answer, longest_s
from specserve.engine.request import Request
from specserve.errors import SpecserveError
from specserve.parallel.address import Address
from specserve.parallel.frame import MOST_HEADER_BYTES
from specserve.parallel.shared_frames import SharedFrames, read_shared
from specserve.server.engine.client import EngineClient
from specserve.server.engine.messages import (
    ExportKV,
    ImportKV,
    KVCommand,
    KVExported,
    KVImported,
    KVReport,
    KVWanted,
    ReleaseKV,
)

_MOST_FETCHED = 8  # at once; others wait


class KVRelay:
    """Of one engine after another. A frame of the engine's is in memory that it shares with this process; one that is
    fetched is put into such memory here, for the engine to read. `tell` gets what the server is to know.

    `most_bytes` are those of the engine's KV cache: no frame that it wants is larger, but for its header. Without a
    `fetcher` nothing is fetched."""

    def __init__(self, tell: Callable[[KVReport], None]) -> None:
        self.fetcher: Fetcher | None = None
        self.most_bytes = 0
        self._tell = tell
        self._client: EngineClient | None = None
        self._asked: set[str] = set()  # exports that were not released
        self._offered: dict[str, memoryview] = {}  # frames of the engine's
        self._wanted: set[str] = set()  # by the engine, and not on its way
        self._fetched = SharedFrames()
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(_MOST_FETCHED)

    @property
    def num_held(self) -> int:
        """Frames, and what is done for some."""
        kinds: list[Sized] = [self._asked, self._offered, self._wanted, self._fetched, self._fetching]
        return sum(len(each) for each in kinds)

    def expect(self, request: Request, client: EngineClient) -> None:
        """A request goes to the engine, which may want KV for it."""
        if request.num_elsewhere:
            self._client = client
            client.hear_kv(request.id, self._hear)

    def forget(self, request_id: str) -> None:
        """No KV is awaited for that request any more."""
        if (task := self._fetching.pop(request_id, None)) is not None:
            task.cancel()
        self._fetched.drop(request_id)
        self._wanted.discard(request_id)
        if self._client is not None and request_id not in self._asked:
            self._client.hear_kv(request_id, None)

    def obey(self, command: KVCommand, client: EngineClient) -> None:
        """What the server says."""
        self._client = client
        match command:
            case ExportKV(id, tokens, salt, adapter, first_block):
                self._asked.add(id)
                client.hear_kv(id, self._hear)
                client.export_kv(id, tokens, salt, adapter, first_block)
            case ReleaseKV(id):
                self._release(id)
            case ImportKV(reason=reason) if reason:
                self._refuse(command.id, reason)
            case ImportKV():
                if command.id in self._wanted:
                    self._wanted.remove(command.id)
                    self._fetching[command.id] = asyncio.create_task(self._fetch(command, client))

    def answer(self, message: bytes) -> bytes:
        """What another engine that says so is told. Raises LinkError for what none says."""
        return answer(message, self._offered)

    def abandon(self) -> None:
        """The server, or the engine, has gone: nobody waits for anything any more."""
        for request_id in list(self._asked):
            self._release(request_id)
        for request_id in (*self._fetching, *self._wanted):
            self.forget(request_id)
        self._fetched.close()
        self._client = None

    def _hear(self, report: KVReport | SpecserveError) -> None:
        match report:
            case KVWanted():
                self._wanted.add(report.id)
                self._tell(report)
            case KVExported():
                self._tell(self._offer(report))
            case KVImported():
                self.forget(report.id)
                self._tell(report)

    def _offer(self, report: KVExported) -> KVExported:
        """Let others fetch it; what the server is told of it."""
        if report.reason or report.id not in self._asked:
            return report
        try:
            self._offered[report.id] = read_shared(report.path, report.num_bytes)
        except (OSError, SpecserveError) as error:
            return KVExported(report.id, "", 0, str(error))
        return KVExported(report.id, "", report.num_bytes, "")

    def _release(self, request_id: str) -> None:
        self._asked.discard(request_id)
        self._offered.pop(request_id, None)
        if self._client is not None:
            self._client.hear_kv(request_id, None)
            self._client.release_kv(request_id)

    def _refuse(self, request_id: str, reason: str) -> None:
        """Let the engine compute what it wanted."""
        if (task := self._fetching.pop(request_id, None)) is not None:
            task.cancel()
        self._fetched.drop(request_id)
        if self._client is not None:
            self._client.import_kv(request_id, "", 0, reason)

    async def _fetch(self, command: ImportKV, client: EngineClient) -> None:
        name, num_bytes = command.id, command.num_bytes
        try:
            if self.fetcher is None:
                raise SpecserveError("This engine was not started with --role decode, and fetches no KV.")
            if not 0 < num_bytes <= (most := self.most_bytes + MOST_HEADER_BYTES):
                raise SpecserveError(f"It has {num_bytes} bytes of KV; {most} are allowed here.")
            address = Address.parse(command.address, "An engine's address")
            async with self._places:
                client.expect_kv(name, longest_s(num_bytes))
                self._fetched.begin(name, num_bytes)
                await self.fetcher.fetch(
                    address, name, num_bytes, lambda start, piece: self._fetched.fill(name, start, piece)
                )
                path = self._fetched.finish(name)
            self._fetching.pop(name, None)
            client.import_kv(name, path, num_bytes, "")
        except (SpecserveError, OSError) as error:
            self._fetching.pop(name, None)  # so that it is not this task that is cancelled
            self._refuse(name, f"The engine at {command.address}: {error}")
