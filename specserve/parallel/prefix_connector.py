"""A connector for frames, however they come: checked on a thread beside the steps, written between them, piece by
piece."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from specserve.parallel.connector import Arrival, Failed, News
from specserve.parallel.frame import NOT_AWAITED, TIMEOUT_S, Header, TransferError
from specserve.parallel.kv_transfer import PrefixTransfer
from specserve.types import Sequence

# Asks for a frame of a request's first tokens, without the blocks before that one.
Want = Callable[[str, int], object]
# Tells that nothing more is read of what was asked for: of how many tokens it brought KV, and what failed ("": nothing)
Done = Callable[[str, int, str], object]
_PIECE_BYTES = 2**23  # written between two steps: some milliseconds


@dataclass(eq=False, slots=True)
class _Transfer:
    """Of one sequence. `frame` is there once something came; `data` is what its blocks from `first` on are to hold."""

    seq: Sequence
    first: int
    begun: float
    deadline: float
    frame: Future[tuple[Header, list[memoryview]]] | None = None
    data: list[tuple[memoryview, bool]] = field(default_factory=list)
    num_written: int = 0
    reason: str = ""  # why it failed
    within_s: float = TIMEOUT_S


class PrefixConnector:
    """Brings what `want` asks for and `take` is given. A request's id is that of its sequences; only its first one
    awaits KV, and the others share that. `clock` gives seconds."""

    def __init__(
        self,
        transfer: PrefixTransfer,
        block_size: int,
        want: Want,
        done: Done,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transfer, self._block_size = transfer, block_size
        self._want, self._done = want, done
        self._timeout_s, self._clock = timeout_s, clock
        self._open: dict[str, _Transfer] = {}
        self._reader = ThreadPoolExecutor(1, "specserve-kv")

    def num_available(self, seq: Sequence) -> int:
        whole = (min(seq.num_elsewhere, len(seq.tokens) - 1) // self._block_size) * self._block_size
        return max(0, whole - seq.cached)

    def begin(self, seq: Sequence) -> None:
        assert seq.request_id not in self._open, "one sequence of a request awaits KV"
        first = seq.cached // self._block_size
        now, within_s = self._clock(), self._timeout_s
        self._open[seq.request_id] = _Transfer(seq, first, now, now + within_s, within_s=within_s)
        self._want(seq.request_id, first)

    def take(self, request_id: str, read: Callable[[], memoryview]) -> None:
        """A frame has come, or can be read with `read`, which a thread calls; it raises OSError. Nothing happens where
        nobody awaits it any more."""
        if (found := self._open.get(request_id)) is not None and found.frame is None:
            found.frame = self._reader.submit(lambda: self._transfer.opened(read()))

    def expect(self, request_id: str, within_s: float) -> None:
        """A frame is on its way, and may take so long from now on."""
        if (found := self._open.get(request_id)) is not None:
            found.deadline = max(found.deadline, self._clock() + within_s)
            found.within_s = max(self._timeout_s, within_s)

    def refuse(self, request_id: str, reason: str) -> None:
        """There will be no frame."""
        if (found := self._open.get(request_id)) is not None:
            found.reason = reason

    def poll(self) -> News:
        news, left = News(), _PIECE_BYTES
        for each in list(self._open.values()):
            try:
                self._open_frame(each)
            except (TransferError, OSError, ValueError) as error:
                each.reason = str(error)
            if each.reason:
                news.failures.append(Failed(each.seq, each.reason))
                self._close(each, 0)
            elif each.data and left > 0:
                left -= self._write(each, left)
                if each.num_written == len(each.data):
                    news.arrivals.append(arrival := self._arrival(each))
                    self._close(each, arrival.num_tokens - each.first * self._block_size)
        return news

    def end(self, seq: Sequence) -> None:
        each = self._open[seq.request_id]
        each.reason = NOT_AWAITED
        self._close(each, 0)

    def close(self) -> None:
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _open_frame(self, each: _Transfer) -> None:
        """Look whether it has come, and what of it is for the sequence. Raises what is wrong with it."""
        if each.reason or each.data:
            return
        if each.frame is not None and each.frame.done():
            header, data = each.frame.result()
            if header.first_block != each.first:
                raise TransferError("corrupt", f"The frame begins with block {header.first_block}, not {each.first}.")
            each.data = self._transfer.fitting(header, data, each.seq)
            if not each.data:
                raise TransferError("corrupt", "The frame has no block of the prompt.")
        elif self._clock() > each.deadline:
            each.reason = f"It was not there after {each.within_s:g} s."

    def _write(self, each: _Transfer, most: int) -> int:
        """Write its next blocks, at least one and no more than `most` bytes else; returns how many bytes."""
        first, size = each.num_written, 0
        while each.num_written < len(each.data) and (not size or size < most):
            size += len(each.data[each.num_written][0])
            each.num_written += 1
        ids = each.seq.blocks.ids[each.first + first : each.first + each.num_written]
        self._transfer.write(ids, each.data[first : each.num_written])
        return size

    def _arrival(self, each: _Transfer) -> Arrival:
        num_drafted = next((i for i, (_, drafted) in enumerate(each.data) if not drafted), len(each.data))
        return Arrival(
            each.seq,
            (each.first + len(each.data)) * self._block_size,
            (each.first + num_drafted) * self._block_size if num_drafted else 0,
            self._clock() - each.begun,
        )

    def _close(self, each: _Transfer, num_tokens: int) -> None:
        del self._open[each.seq.request_id]
        each.data, each.frame = [], None  # whatever is mapped is let go, also what an error refers to
        self._done(each.seq.request_id, num_tokens, each.reason)
