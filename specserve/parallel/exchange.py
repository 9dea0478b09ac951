"""What an engine's process does to hand KV to other engines of its machine, and to take theirs: on the thread that
calls Engine.step, between steps."""

from __future__ import annotations

import os
from collections.abc import Sequence as Many
from functools import partial
from typing import Protocol

from specserve.errors import SpecserveError
from specserve.parallel.kv_transfer import PrefixTransfer
from specserve.parallel.prefix_connector import PrefixConnector
from specserve.parallel.shared_frames import SharedFrames, read_shared


class Replies(Protocol):
    """How whoever carries messages between engines is told."""

    def wanted(self, request_id: str, first_block: int) -> None:
        """This engine lacks the blocks from that one on of the request's prompt."""

    def exported(self, request_id: str, path: str, num_bytes: int, reason: str) -> None:
        """What `export` was asked for lies at that path; or why it does not."""

    def imported(self, request_id: str, num_tokens: int, reason: str) -> None:
        """What was wanted is read no more: it brought so many tokens, or why it brought none."""


class KVExchange:
    """The frames of one engine: those it holds for others, and those it takes from them."""

    def __init__(self, transfer: PrefixTransfer, block_size: int, replies: Replies, timeout_s: float) -> None:
        self.connector = PrefixConnector(transfer, block_size, replies.wanted, replies.imported, timeout_s)
        self._transfer, self._replies = transfer, replies
        self._frames = SharedFrames()

    @property
    def numerics(self) -> str:
        """What the bits of this engine's KV depend on, besides its model."""
        return self._transfer.format.numerics

    @property
    def num_held(self) -> int:
        """Frames for others."""
        return len(self._frames)

    def export(self, request_id: str, tokens: Many[int], salt: bytes, adapter: str | None, first_block: int) -> None:
        """Hold a frame of a prompt's cached blocks from that one on, until it is released."""
        try:
            pieces = self._transfer.export_parts(tokens, salt, adapter, first_block)
            if pieces is None:
                self._replies.exported(request_id, "", 0, "It is not cached any more where it was computed.")
            else:
                self._replies.exported(request_id, *self._frames.put(request_id, pieces), "")
        except (SpecserveError, OSError) as error:  # the adapter is gone, no memory: whoever asked computes it
            self._replies.exported(request_id, "", 0, str(error))

    def release(self, request_id: str) -> None:
        self._frames.drop(request_id)

    def take(self, request_id: str, path: str, num_bytes: int, reason: str) -> None:
        """What was wanted lies there, in another process, or why it will not come."""
        if reason:
            self.connector.refuse(request_id, reason)
        else:
            self.connector.take(request_id, partial(read_shared, os.fspath(path), num_bytes))

    def close(self) -> None:
        self.connector.close()
        self._frames.close()
