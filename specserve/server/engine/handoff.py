"""A request whose prompt one engine computes, and which another one answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from msgspec import structs

from specserve.engine.port import Listener, QueueTimeoutError
from specserve.engine.request import Request
from specserve.errors import SpecserveError
from specserve.parallel.frame import NOT_AWAITED
from specserve.server.engine.client import EngineClient, RefusedError
from specserve.server.engine.messages import KVExported, KVImported, KVReport, KVWanted
from specserve.types import Event, SamplingParams

_log = logging.getLogger(__name__)
_PROMPT_ALONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class Told(Protocol):
    """Who learns from it."""

    def failed(self) -> None:
        """KV was asked for and did not come."""

    def transferred(self, num_tokens: int, milliseconds: float) -> None:
        """KV came, so long after it was asked for."""

    def not_computed(self) -> None:
        """The first engine did not compute the prompt."""


class Handoff:
    """An EnginePort for one request, whose listener sees one engine.

    `source` computes the prompt, and a token that nobody reads. Then the request goes to the engine that `choose`
    gives, which asks for the blocks that it lacks: its question goes to `source`, whose frame it opens itself, in
    memory that the two share, or fetches from `address`. Only small messages come by here. Whatever fails of it, the
    second engine computes."""

    def __init__(self, source: EngineClient, choose: Callable[[], EngineClient], told: Told, address: str = "") -> None:
        self._source, self._choose, self._told, self._address = source, choose, told, address
        self._target: EngineClient | None = None
        self._gone = ""  # why the source can be asked no more
        self._asked_at: float | None = None  # when the target has asked for KV that it neither has nor has given up

    def submit(self, request: Request, listener: Listener) -> None:
        self._request, self._listener, self._arrived = request, listener, time.perf_counter()
        self._first = structs.replace(
            request,
            id=f"{request.id}-prompt",
            params=_PROMPT_ALONE,
            bad_words=None,
            private=True,
            prediction=(),
            explain=False,
            compiles_slowly=False,
        )
        self._source.hear_kv(request.id, self._hear_source)
        self._source.submit(self._first, self._hear_prompt, counted=False)

    def abort(self, request_id: str, index: int | None = None) -> None:
        if self._target is not None:
            self._target.abort(request_id, index)
        elif index is None:
            self._source.abort(self._first.id)
        if index is None:
            self._close()

    def expire(self, request_id: str) -> None:
        if self._target is not None:
            self._target.expire(request_id)
        else:
            self._source.expire(self._first.id)

    def _hear_prompt(self, event: Event | SpecserveError) -> None:
        if isinstance(event, RefusedError) and event.code == QueueTimeoutError.code:
            self._close()
            self._listener(event)
        elif isinstance(event, SpecserveError) or event.error is not None:
            reason = str(event) if isinstance(event, SpecserveError) else event.error
            _log.warning("A prompt of %d tokens is computed where it is answered: %s", len(self._prompt), reason)
            self._told.not_computed()
            self._answer(0)
        elif event.finish_reason is not None:
            self._answer(len(self._prompt))

    @property
    def _prompt(self) -> list[int]:
        return self._request.prompt_ids

    def _answer(self, num_elsewhere: int) -> None:
        """Send it to the engine that answers, which may have KV of so many tokens."""
        try:
            self._target = target = self._choose()
        except SpecserveError as error:
            self._close()
            self._listener(error)
            return
        target.hear_kv(self._request.id, self._hear_target)
        request = structs.replace(self._request, arrived=self._arrived, num_elsewhere=num_elsewhere)
        target.submit(request, self._hear_answer)

    def _hear_answer(self, event: Event | SpecserveError) -> None:
        self._close()  # once there are tokens no KV is awaited any more
        self._listener(event)

    def _hear_target(self, report: KVReport | SpecserveError) -> None:
        if isinstance(report, KVWanted):
            self._asked_at = time.perf_counter()
            if self._gone:
                self._import("", 0, self._gone)
            else:
                request = self._request
                self._source.export_kv(request.id, self._prompt, request.salt, request.adapter, report.first_block)
        elif isinstance(report, KVImported):
            if report.num_tokens and self._asked_at is not None:
                self._told.transferred(report.num_tokens, 1e3 * (time.perf_counter() - self._asked_at))
            elif self._asked_at is not None and not self._gone and report.reason != NOT_AWAITED:
                self._told.failed()
            self._release()

    def _hear_source(self, report: KVReport | SpecserveError) -> None:
        if isinstance(report, KVExported):
            self._import(report.path, report.num_bytes, report.reason)
        elif isinstance(report, SpecserveError):
            self._gone = str(report)
            self._import("", 0, self._gone)

    def _import(self, path: str, num_bytes: int, reason: str) -> None:
        """Tell the target what has become of its question, if it still has one."""
        if self._target is not None and self._asked_at is not None:
            self._target.import_kv(self._request.id, path, num_bytes, reason, "" if reason else self._address)

    def _release(self) -> None:
        """Nothing is read of what the source holds."""
        if self._asked_at is not None:
            self._asked_at = None
            if not self._gone:
                self._source.release_kv(self._request.id)

    def _close(self) -> None:
        """No KV is awaited any more. What is on its way to the source is answered by nobody, and released."""
        self._release()
        self._source.hear_kv(self._request.id, None)
        if self._target is not None:
            self._target.hear_kv(self._request.id, None)
