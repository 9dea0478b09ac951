"""Which rows of a step belong to which sequence, and where their KV lies."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """What a backend needs to know about the rows of one step: arrays on the host, which may be copied to a device's
    static buffers or sent. Slots are block * block_size + offset."""

    num_rows: int  # padded to row_multiple; rows from query_starts[-1] on are padding
    query_starts: NDArray[np.int32]  # [seqs + 1]; sequence s owns rows [query_starts[s], query_starts[s + 1])
    cached: NDArray[
        np.int32
    ]  # [seqs] tokens with valid KV before this step; its row r lies at logical index cached + r
    block_tables: NDArray[np.int32]  # [seqs, blocks] block ids, then zeros; row r's KV is written at index cached + r
    parents: NDArray[np.int32]  # [query_starts[-1]] parent row, counted within its sequence; -1: none in this step. A
    # row sees the cached tokens, its ancestors and itself. In a chain row r's parent is r - 1. A ring, where the first
    # row's parent is the last, is a block: all of its rows see each other.

    @classmethod
    def pack(
        cls,
        query_starts: Sequence[int],
        cached: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        parents: Sequence[int],
        multiple: int,
    ) -> AttentionRows:
        """Of lists; a block table is as long as its sequence needs."""
        num_seqs, num_rows = len(cached), len(parents)
        numbers = np.array(
            [*query_starts, *cached, *parents], np.int32
        )  # one call for all, as it takes as long as each
        return cls(
            num_rows=num_rows + -num_rows % multiple,
            query_starts=numbers[: num_seqs + 1],
            cached=numbers[num_seqs + 1 : 2 * num_seqs + 1],
            block_tables=padded_tables(block_tables),
            parents=numbers[2 * num_seqs + 1 :],
        )

    @classmethod
    def one_each(cls, cached: NDArray[np.int32], block_tables: NDArray[np.int32]) -> AttentionRows:
        """A row of each sequence: of arrays, as a pass of a small head takes hardly longer than lists of its rows."""
        n = len(cached)
        return cls(n, np.arange(n + 1, dtype=np.int32), cached, block_tables, np.full(n, -1, np.int32))

    def is_block(self, s: int) -> bool:
        """Whether the rows of sequence s see each other."""
        start, stop = self.query_starts[s : s + 2].tolist()
        return bool(stop - start > 1 and self.parents[start] == stop - start - 1)


def padded_tables(block_tables: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Side by side, int32 [tables, blocks of the longest], with zeros after the shorter ones. Tables that are arrays of
    the type "i" are copied at once, other ones number by number."""
    longest = max(map(len, block_tables), default=0)
    padded = array("i")
    for blocks in block_tables:
        padded.extend(blocks)
        if len(blocks) < longest:
            padded.frombytes(bytes(padded.itemsize * (longest - len(blocks))))
    return np.array(padded, np.int32).reshape(len(block_tables), longest)
