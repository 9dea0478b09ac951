"""Reads the model file of a SentencePiece tokenizer: pieces, scores, and how text is normalized.

The file is a protocol buffer (github.com/google/sentencepiece, src/sentencepiece_model.proto); its few fields are read
here, so that neither of the two libraries has to be installed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from specserve import files
from specserve.errors import ModelError

_MOST_BYTES = 1 << 26  # the largest published ones have 5 MB
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


class PieceType(IntEnum):
    NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@dataclass(frozen=True, slots=True)
class Piece:
    """One of the vocabulary. BPE merges the highest `score` first; of unigram models it is a log-probability."""

    text: str
    score: float
    type: int


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """`pieces` by id. `charsmap` are the normalization's rules, compiled, empty for none. bos and eos are ids, -1 for
    none."""

    path: Path
    pieces: list[Piece]
    is_bpe: bool
    byte_fallback: bool
    unk_id: int
    bos_id: int
    eos_id: int
    charsmap: bytes
    dummy_prefix: bool
    squeezes_blanks: bool


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Raises ModelError for a file that is damaged or no such model, and for settings that are not known here."""
    try:
        content = files.read_bytes(path, _MOST_BYTES)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error
    try:
        return _parse(path, content)
    except (ValueError, IndexError, TypeError, struct.error) as error:
        raise ModelError(f"{path} is damaged, or no model of SentencePiece: {error}.") from error


def _parse(path: Path, content: bytes) -> SentencePieceModel:
    pieces, trained, normalizer, denormalizer = [], b"", b"", b""
    for number, value in _fields(content):
        match number:
            case 1:
                pieces.append(_piece(_as_bytes(value)))
            case 2:
                trained += _as_bytes(value)
            case 3:
                normalizer += _as_bytes(value)
            case 5:
                denormalizer += _as_bytes(value)
    if not pieces:
        raise ValueError("it has no pieces")
    trainer, rules = dict(_fields(trained)), dict(_fields(normalizer))
    kind = trainer.get(3, 1)
    if kind not in (1, 2):
        raise ModelError(f"{path} is a model of words or characters; BPE and unigram models are read.")
    refused = {
        "marks spaces after words (treat_whitespace_as_suffix)": trainer.get(24, 0),
        "keeps spaces as they are (escape_whitespaces is false)": not rules.get(5, 1),
        "changes text that was decoded (denormalizer_spec)": dict(_fields(denormalizer)).get(2, b""),
        "has unused pieces": any(piece.type == PieceType.UNUSED for piece in pieces),
    }
    if found := next((what for what, is_so in refused.items() if is_so), None):
        raise ModelError(f"{path} {found}, which tokenizer.json cannot say. Get the model's tokenizer.json.")
    bos, eos = (_as_id(trainer.get(number, default)) for number, default in ((41, 1), (42, 2)))
    unk_id = next((i for i, piece in enumerate(pieces) if piece.type == PieceType.UNKNOWN), None)
    if unk_id is None:
        raise ValueError("it has no unknown piece")
    return SentencePieceModel(
        path=path,
        pieces=pieces,
        is_bpe=kind == 2,
        byte_fallback=bool(trainer.get(35, 0)),
        unk_id=unk_id,
        bos_id=bos if bos < len(pieces) else -1,
        eos_id=eos if eos < len(pieces) else -1,
        charsmap=_as_bytes(rules.get(2, b"")),
        dummy_prefix=bool(rules.get(3, 1)),
        squeezes_blanks=bool(rules.get(4, 1)),
    )


def _piece(content: bytes) -> Piece:
    fields = dict(_fields(content))
    text, score, kind = fields.get(1, b""), fields.get(2, b"\0\0\0\0"), fields.get(3, 1)
    if not text:
        raise ValueError("a piece has no text")
    (number,) = struct.unpack("<f", _as_bytes(score))
    if math.isnan(number):
        raise ValueError("a piece's score is no number")
    return Piece(_as_bytes(text).decode("utf-8"), number, PieceType(_as_id(kind)))


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers of fields and their values: integers, or bytes of all else."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(content, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            size, at = _varint(content, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {kind} at byte {at}")
        if at + size > len(content):
            raise ValueError(f"{size:,} bytes at {at:,} of {len(content):,}")
        yield key >> 3, content[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """An integer of seven bits a byte, the lowest first, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError(f"an integer without end before byte {at}")


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where text is expected")
    return value


def _as_id(value: int | bytes) -> int:
    """An int32: negative ones are written as of 64 bits."""
    if isinstance(value, bytes):
        raise ValueError("text where a number is expected")
    return value - (1 << 64) if value >= 1 << 63 else value
