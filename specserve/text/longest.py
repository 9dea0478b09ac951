"""How much text one token can stand for, from the parts of a tokenizer. Knows tokenizers' own JSON of them; reads no
text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

_COMPOSED = 4  # most characters that NFC makes one of, as in U+1F82: a letter and three marks


def longest_token(backend: Tokenizer) -> int | None:
    """Most characters of a text that one token stands for, so that a text of c characters has at least c / this many.

    None where there is no such number: parts that drop, shorten or join text without end, such as unknown characters
    that become one token together, and kinds of parts that are not known here.
    """
    parts = [*_parts(backend.normalizer, "normalizers"), *_parts(backend.pre_tokenizer, "pretokenizers")]
    stripping = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    if stripping or not _has_every_byte(backend, parts) or not all(map(_keeps_text, parts)):
        return None
    composing = any(part["type"] == "NFC" for part in parts)
    return max(map(len, backend.get_vocab(with_added_tokens=True))) * (_COMPOSED if composing else 1)


def _parts(component: Any, nested: str) -> Iterator[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer as JSON, or what a sequence of them consists of."""
    if component is None:
        return
    state = json.loads(component.__getstate__())
    yield from state[nested] if state["type"] == "Sequence" else [state]


def _has_every_byte(backend: Tokenizer, parts: list[Mapping[str, Any]]) -> bool:
    """Whether no character is unknown: those that are can be left out or become one token together."""
    byte_level = any(part["type"] == "ByteLevel" for part in parts)
    if not byte_level and not getattr(backend.model, "byte_fallback", False):
        return False
    spelled = ByteLevel.alphabet() if byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    return all(backend.token_to_id(token) is not None for token in spelled)


def _keeps_text(part: Mapping[str, Any]) -> bool:
    kind = part["type"]
    if kind == "Replace":
        pattern = part["pattern"].get("String")
        return pattern is not None and len(part["content"]) >= len(pattern)
    if kind in ("Split", "Punctuation"):
        return bool(part["behavior"] != "Removed")
    return kind in ("ByteLevel", "Digits", "Metaspace", "NFC", "Prepend")
