"""Frames: what is encoded is decoded, and nothing else is, whatever bytes come."""

from __future__ import annotations

import random
import struct
from hashlib import blake2b
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from specserve.parallel.frame import Header, TransferError, decode, encode, token_bytes
from specserve.testing.damage import damaged

BLOCK = 4


def header(num_blocks: int = 3, num_ahead: int = 1, **fields: Any) -> Header:
    usual: dict[str, Any] = {
        "model": "ab" * 32,
        "numerics": "cpu avx2 float32 none",
        "dtype": "float32",
        "block_size": BLOCK,
        "salt": b"tenant",
        "adapter": "",
        "tokens": token_bytes(range(num_blocks * BLOCK + num_ahead)),
        "digests": [bytes([i]) * 32 for i in range(num_blocks)],
        "target": [(2, 8), (1, 4)],
        "draft": [(2, 4)],
        "head": "cd" * 32,
        "num_drafted": 2 * BLOCK,
        "num_skipped": 0,
    }
    return Header(**{**usual, **fields})


def blocks_of(made: Header) -> list[bytes]:
    return [random.Random(i).randbytes(size) for i, size in enumerate(made.block_sizes())]


def sealed(frame: bytes) -> bytes:
    """With the checksum of what the frame is now."""
    return frame[:-16] + blake2b(frame[:-16], digest_size=16).digest()


def with_header(named: bytes, blocks: bytes) -> bytes:
    return sealed(struct.pack("<4sHHIQ", b"ssKV", 2, 1, len(named), len(blocks)) + named + blocks + bytes(16))


def test_a_frame_is_decoded_as_it_was_encoded() -> None:
    made = header()
    blocks = blocks_of(made)
    target, more = 2 * BLOCK * (2 * 8 + 4) * 4, 2 * BLOCK * 2 * 4 * 4
    assert [len(block) for block in blocks] == [target + more, target + more, target]
    found, data = decode(encode(made, blocks))
    assert found == made
    assert data == blocks
    assert found.token_ids == list(range(13))


@given(
    num_blocks=st.integers(1, 5),
    num_ahead=st.integers(0, 1),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    target=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=3),
    draft=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6)), max_size=2),
    salt=st.binary(max_size=40),
    drafted=st.integers(0, 5),
    skipped=st.integers(0, 4),
)
def test_frames_of_any_shape_are_decoded(
    num_blocks: int, num_ahead: int, dtype: str, drafted: int, skipped: int, draft: list[tuple[int, int]], **fields: Any
) -> None:
    num_drafted, num_skipped = min(drafted, num_blocks) * BLOCK if draft else 0, min(skipped, num_blocks - 1) * BLOCK
    fields |= {"num_drafted": num_drafted, "num_skipped": num_skipped}
    made = header(num_blocks, num_ahead, dtype=dtype, draft=draft, **fields)
    blocks = blocks_of(made)
    assert len(blocks) == num_blocks - num_skipped // BLOCK
    found, data = decode(encode(made, blocks))
    assert found == made
    assert data == blocks


@given(st.binary(max_size=300))
def test_bytes_that_are_no_frame_are_refused(content: bytes) -> None:
    with pytest.raises(TransferError):
        decode(content)
    with pytest.raises(TransferError):
        decode(b"ssKV" + struct.pack("<HHIQ", 2, 1, 0, 0) + content)


@given(seed=st.integers(0, 2**32))
def test_a_damaged_frame_is_refused(seed: int) -> None:
    whole = encode(header(), blocks_of(header()))
    broken = damaged(whole, random.Random(seed))
    if broken != whole:
        with pytest.raises(TransferError):
            decode(broken)


@given(seed=st.integers(0, 2**32))
def test_a_damaged_header_under_a_right_checksum_is_refused_or_consistent(seed: int) -> None:
    """Whoever sends on purpose can make a checksum; what is decoded then has as many bytes and tokens as it says."""
    made = header()
    named, payload = damaged(msgspec.msgpack.encode(made), random.Random(seed)), b"".join(blocks_of(made))
    try:
        found, data = decode(with_header(named, payload))
    except TransferError:
        return
    assert b"".join(data) == payload
    assert [len(block) for block in data] == found.block_sizes()
    assert len(found.token_ids) in (found.num_tokens, found.num_tokens + 1)
    assert found.num_drafted <= found.num_tokens


@given(stop=st.integers(0, 1000))
def test_a_frame_that_is_cut_says_so(stop: int) -> None:
    whole = encode(header(), blocks_of(header()))
    with pytest.raises(TransferError, match=r"cut|ends after") as caught:
        decode(whole[: stop % len(whole)])
    assert caught.value.code == "cut"


@pytest.mark.parametrize(
    ("place", "value", "code", "says"),
    [
        (0, b"PNG\0", "corrupt", "begins with b'PNG"),
        (4, struct.pack("<H", 1), "version", "version 1; this engine reads 2"),
        (6, struct.pack("<H", 7), "layout", "layout 7; this engine's have 1"),
        (8, struct.pack("<I", 2**32 - 1), "too_long", "header of the frame would take 4294967295 bytes"),
        (12, struct.pack("<Q", 2**63), "too_long", "blocks of the frame would take 9223372036854775808 bytes"),
        (30, b"\xc1", "corrupt", "checksum"),
        (-1, b"\0\0", "too_long", "goes on for 1 bytes"),
    ],
)
def test_an_error_says_what_is_wrong(place: int, value: bytes, code: str, says: str) -> None:
    whole = encode(header(), blocks_of(header()))
    start = place % len(whole)
    with pytest.raises(TransferError, match=says) as caught:
        decode(whole[:start] + value + whole[start + len(value) :])
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tokens": token_bytes(range(11))}, "44 bytes of token ids for 12 tokens"),
        ({"tokens": token_bytes(range(14))}, "56 bytes of token ids"),
        ({"tokens": bytes(49)}, "49 bytes of token ids"),
        ({"num_drafted": 16}, "16 of 12 tokens"),
        ({"num_drafted": 3}, "no number of its blocks of 4"),
        ({"num_skipped": 3}, "leaves out 3 of 12 tokens"),
        ({"num_skipped": 12}, "leaves out 12 of 12 tokens"),
        ({"num_skipped": 4}, "its blocks take"),
        ({"target": []}, "does not describe"),
        ({"head": ""}, "does not describe"),
        ({"target": [(2, 8)]}, "its blocks take"),
        ({"target": [(2**20, 2**20)] * 4000}, "its blocks take"),
        ({"target": [(2**21, 8)]}, "header is no header"),
        ({"digests": [b"short"] * 3}, "header is no header"),
        ({"digests": []}, "header is no header"),
        ({"dtype": "int8"}, "header is no header"),
        ({"num_drafted": -4}, "header is no header"),
        ({"block_size": 0}, "header is no header"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(fields: dict[str, Any], says: str) -> None:
    named = msgspec.msgpack.encode({**msgspec.structs.asdict(header()), **fields})
    with pytest.raises(TransferError, match=says) as caught:
        decode(with_header(named, b"".join(blocks_of(header()))))
    assert caught.value.code == "corrupt"


def test_a_header_with_an_unknown_field_is_refused() -> None:
    named = msgspec.msgpack.encode({**msgspec.structs.asdict(header()), "more": 1})
    with pytest.raises(TransferError, match="more"):
        decode(with_header(named, b"".join(blocks_of(header()))))


def test_a_salt_that_nobody_would_decode_is_not_encoded() -> None:
    made = header(salt=bytes(2**16 + 1))
    with pytest.raises(TransferError, match="65537 bytes; 65536 are allowed"):
        encode(made, blocks_of(made))
