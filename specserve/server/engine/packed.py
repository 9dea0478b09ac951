"""Log-probabilities as they travel from the engine: packed, and unpacked by whoever looks at them. As objects those of
a token and its 20 best take 3 KB, packed a tenth of that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias, overload

import msgspec

from specserve.types import TokenLogprobs

_AT_ONCE = 64  # entries that are unpacked at once

Block: TypeAlias = tuple[int, bytes]  # how many entries, and the entries

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[TokenLogprobs | None]).decode


def packed(entries: Sequence[TokenLogprobs | None] | None) -> list[Block] | None:
    """Entries as they are sent; None stays None."""
    if entries is None:
        return None
    parts = [entries[at : at + _AT_ONCE] for at in range(0, len(entries), _AT_ONCE)]
    return [(len(part), _pack(part)) for part in parts]


class Packed(Sequence[Any]):
    """A list of TokenLogprobs, and None where the prompt's first token has none, made of blocks. Read it in order."""

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self._blocks = list(blocks)

    def __len__(self) -> int:
        return sum(count for count, _ in self._blocks)

    def __iter__(self) -> Iterator[Any]:
        for _, block in self._blocks:
            yield from _unpack(block)

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> Packed: ...
    def __getitem__(self, place: int | slice) -> Any:
        if place == slice(None):
            return Packed(self._blocks)
        found = list(self)[place]
        return Packed(packed(found) or ()) if isinstance(place, slice) else found

    def __iadd__(self, other: Packed) -> Packed:
        self._blocks += other._blocks
        return self
