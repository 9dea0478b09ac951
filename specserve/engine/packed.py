"""Log-probabilities as events carry them: packed, in blocks that are unpacked when they are read. As objects those of a
token and its 20 best take 3 KB, packed a tenth of that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from specserve.types import LogprobBlock, TokenLogprobs

_BLOCK_ENTRIES = 64

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[TokenLogprobs | None]).decode


def packed(entries: Sequence[TokenLogprobs | None] | None) -> list[LogprobBlock] | None:
    """Entries as blocks; None stays None."""
    if entries is None:
        return None
    parts = [entries[at : at + _BLOCK_ENTRIES] for at in range(0, len(entries), _BLOCK_ENTRIES)]
    return [(len(part), _pack(part)) for part in parts]


class Packed(Sequence[Any]):
    """A list of TokenLogprobs, and None where the prompt's first token has none, made of blocks. Read it in order."""

    def __init__(self, blocks: Iterable[LogprobBlock] = ()) -> None:
        self._blocks = list(blocks)

    def __len__(self) -> int:
        return sum(count for count, _ in self._blocks)

    def __iter__(self) -> Iterator[Any]:
        for _, block in self._blocks:
            yield from _unpack(block)

    def __getitem__(self, place: Any) -> Any:
        if place == slice(None):
            return Packed(self._blocks)
        found = list(self)[place]
        return Packed(packed(found) or ()) if isinstance(place, slice) else found

    def __iadd__(self, other: Packed) -> Packed:
        self._blocks += other._blocks
        return self
