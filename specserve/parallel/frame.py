"""Frames: KV blocks of one prefix as bytes, for another engine. Nothing in a frame is trusted before it is checked.

    magic, versions of frame and block layout, two lengths | header, msgpack | blocks | BLAKE2b of all that is before

A block holds what Executor.read_blocks says: its target layers and, within the first `num_drafted` tokens, the layers
of the drafter's model as well. The blocks of the first `num_skipped` tokens are named, and left out: who asked has
them.
"""

from __future__ import annotations

import hashlib
import math
import struct
import sys
from array import array
from collections.abc import Iterable
from typing import Annotated, Literal, TypeAlias

import msgspec

from specserve.errors import SpecserveError

FRAME_VERSION, LAYOUT_VERSION = 2, 1
TIMEOUT_S = 10.0  # from asking for a frame to having it, or hearing that it comes
NOT_AWAITED = "It is not awaited any more."
MOST_TOKENS = 2**22
MOST_HEADER_BYTES = 2**26
MOST_SALT_BYTES = 2**16
MOST_BLOCK_BYTES = 2**40  # all blocks of a frame
_MAGIC = b"ssKV"
_START = struct.Struct("<4sHHIQ")  # magic, frame version, layout version, bytes of the header, bytes of the blocks
_CHECKSUM_BYTES = 16
_DIGEST_BYTES = 32
_ALIKE = "Run the same release in both engines."
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

TransferCode: TypeAlias = Literal[
    "version", "layout", "cut", "too_long", "corrupt", "model", "adapter", "shape", "block_size", "dtype"
]
DType: TypeAlias = Literal["float32", "bfloat16", "float16"]
_Size = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
_Shapes = Annotated[list[tuple[_Size, _Size]], msgspec.Meta(max_length=4096)]  # num_kv_heads, head_dim of each layer
_Name = Annotated[str, msgspec.Meta(max_length=1024)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=_DIGEST_BYTES, max_length=_DIGEST_BYTES)]


class TransferError(SpecserveError):
    """KV from elsewhere that cannot be had here; nothing of it was written. `code` says why in one word. Whoever wanted
    it computes it."""

    def __init__(self, code: TransferCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a frame's blocks hold, and what their bits depend on."""

    model: _Name  # digest of the files that the target was read from, hex
    numerics: _Name  # kernels, types and positions it was computed with, in words
    dtype: DType  # of keys and values
    block_size: _Size
    salt: Annotated[bytes, msgspec.Meta(max_length=MOST_SALT_BYTES)]  # Request.salt
    adapter: _Name  # AdapterInfo.digest; "": none
    tokens: Annotated[bytes, msgspec.Meta(max_length=4 * MOST_TOKENS)]  # int32; perhaps with the one after the blocks
    digests: Annotated[list[_Digest], msgspec.Meta(min_length=1)]  # of the blocks, as cache.prefix chains them
    target: _Shapes
    draft: _Shapes
    head: _Name  # digest of what wrote the draft layers, hex; "": nothing did
    num_drafted: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]  # leading tokens with KV in the draft layers
    num_skipped: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]  # leading tokens whose blocks are left out

    @property
    def num_tokens(self) -> int:
        """In its blocks."""
        return len(self.digests) * self.block_size

    @property
    def first_block(self) -> int:
        """That is not left out."""
        return self.num_skipped // self.block_size

    @property
    def token_ids(self) -> list[int]:
        return _swapped(array("i", self.tokens)).tolist()

    @property
    def target_bytes(self) -> int:
        """Of the target's layers, of one block."""
        return self._bytes_of(self.target)

    def block_sizes(self) -> list[int]:
        """Bytes of each block that is not left out."""
        drafted = self.num_drafted // self.block_size
        target, more = self.target_bytes, self._bytes_of(self.draft)
        return [target + (more if i < drafted else 0) for i in range(self.first_block, len(self.digests))]

    def _bytes_of(self, shapes: Iterable[tuple[int, int]]) -> int:
        return sum(2 * self.block_size * math.prod(shape) * _ITEM_BYTES[self.dtype] for shape in shapes)


def token_bytes(tokens: Iterable[int]) -> bytes:
    """As a header has them."""
    return _swapped(array("i", tokens)).tobytes()


def _swapped(ids: array[int]) -> array[int]:
    """Little-endian and back."""
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def encode(header: Header, blocks: Iterable[bytes]) -> bytes:
    """A frame. Raises TransferError for more than a frame may hold."""
    return b"".join(parts(header, blocks))


def parts(header: Header, blocks: Iterable[bytes]) -> list[bytes]:
    """A frame in pieces, whose blocks are not copied. Raises as `encode`."""
    if len(header.salt) > MOST_SALT_BYTES:
        raise TransferError("too_long", f"The salt has {len(header.salt)} bytes; {MOST_SALT_BYTES} are allowed.")
    named, payload = msgspec.msgpack.encode(header), [*blocks]
    assert [*map(len, payload)] == header.block_sizes(), "blocks are as large as the header says"
    size = sum(map(len, payload))
    _check_lengths(len(named), size)
    start = _START.pack(_MAGIC, FRAME_VERSION, LAYOUT_VERSION, len(named), size)
    return [start, named, *payload, _checksum(start, named, *payload)]


def decode(frame: bytes | memoryview) -> tuple[Header, list[memoryview]]:
    """The header and the blocks of a frame, which is consistent in itself then. Raises TransferError: cut, too_long,
    version, layout or corrupt."""
    view = memoryview(frame)
    if len(view) < _START.size:
        raise TransferError("cut", f"The frame ends after {len(view)} bytes, before its lengths.")
    magic, version, layout, header_bytes, block_bytes = _START.unpack_from(view)
    if magic != _MAGIC:
        raise TransferError("corrupt", f"This is no frame of KV blocks: it begins with {magic!r}, not {_MAGIC!r}.")
    if version != FRAME_VERSION:
        raise TransferError("version", f"The frame has version {version}; this engine reads {FRAME_VERSION}. {_ALIKE}")
    if layout != LAYOUT_VERSION:
        raise TransferError("layout", f"Its blocks have layout {layout}; this engine's have {LAYOUT_VERSION}. {_ALIKE}")
    _check_lengths(header_bytes, block_bytes)
    stop = _START.size + header_bytes + block_bytes
    if (missing := stop + _CHECKSUM_BYTES - len(view)) > 0:
        raise TransferError("cut", f"The frame is cut: {missing} of {stop + _CHECKSUM_BYTES} bytes are missing.")
    if missing < 0:
        raise TransferError("too_long", f"The frame goes on for {-missing} bytes after its end.")
    if _checksum(view[:stop]) != view[stop:]:
        raise TransferError("corrupt", "The frame is corrupt: its checksum is another one.")
    header = _header(view[_START.size : _START.size + header_bytes])
    return header, _blocks(header, view[_START.size + header_bytes : stop])


def _check_lengths(header_bytes: int, block_bytes: int) -> None:
    for what, size, most in (("header", header_bytes, MOST_HEADER_BYTES), ("blocks", block_bytes, MOST_BLOCK_BYTES)):
        if size > most:
            raise TransferError("too_long", f"The {what} of the frame would take {size} bytes; {most} are allowed.")


def _header(encoded: memoryview) -> Header:
    """Raises TransferError for one that contradicts itself."""
    try:
        header = msgspec.msgpack.decode(encoded, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TransferError("corrupt", f"The frame's header is no header: {error}.") from error
    num_ids, rest = divmod(len(header.tokens), 4)
    if rest or num_ids not in (header.num_tokens, header.num_tokens + 1):
        raise TransferError(
            "corrupt",
            f"The frame has {len(header.tokens)} bytes of token ids for {header.num_tokens} tokens.",
        )
    if header.num_drafted > header.num_tokens or header.num_drafted % header.block_size:
        raise TransferError(
            "corrupt",
            f"The frame says that {header.num_drafted} of {header.num_tokens} tokens have KV in its draft layers; "
            f"that is no number of its blocks of {header.block_size}.",
        )
    if header.num_skipped >= header.num_tokens or header.num_skipped % header.block_size:
        raise TransferError(
            "corrupt",
            f"The frame leaves out {header.num_skipped} of {header.num_tokens} tokens; that is no smaller number of "
            f"its blocks of {header.block_size}.",
        )
    if not header.target or (header.num_drafted and not (header.draft and header.head)):
        raise TransferError("corrupt", "The frame has KV of layers that it does not describe.")
    return header


def _blocks(header: Header, payload: memoryview) -> list[memoryview]:
    sizes, start, found = header.block_sizes(), 0, []
    if sum(sizes) != len(payload):
        raise TransferError("corrupt", f"The frame holds {len(payload)} bytes of KV; its blocks take {sum(sizes)}.")
    for size in sizes:
        found.append(payload[start : start + size])
        start += size
    return found


def _checksum(*content: bytes | memoryview) -> bytes:
    running = hashlib.blake2b(digest_size=_CHECKSUM_BYTES)
    for piece in content:
        running.update(piece)
    return running.digest()
