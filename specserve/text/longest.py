"""The fewest tokens that a text can have, from the parts of a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

_COMPOSED = 4  # most characters that NFC makes one of, as in U+1F82: a letter and three marks
_AT_ONCE = 2**16  # characters that are looked at before another thread may run


@dataclass(frozen=True, slots=True)
class Bound:
    """No token stands for more than `longest` characters, besides those that count for nothing: `dropped` ones, which
    the tokenizer leaves out or makes one token of however many there are, and blanks where `strips`."""

    longest: int
    dropped: str = ""
    strips: bool = False

    def fewest_tokens(self, text: str) -> int:
        counted = len(text) - sum(map(text.count, self.dropped))
        if self.strips:
            counted -= sum(map(_num_blanks, (text[at : at + _AT_ONCE] for at in range(0, len(text), _AT_ONCE))))
        return -(-max(0, counted) // self.longest)


def bound(backend: Tokenizer, longest: int) -> Bound | None:
    """Of a tokenizer whose longest token is spelled with so many characters. None where there is none: parts that drop,
    shorten or join text without end, such as unknown characters that become one token together, and kinds of parts that
    are not known here."""
    parts = [*_parts(backend.normalizer, "normalizers"), *_parts(backend.pre_tokenizer, "pretokenizers")]
    dropped = _without_token(backend, parts)
    if dropped is None or not all(map(_keeps_text, parts)):
        return None
    composing = any(part["type"] == "NFC" for part in parts)
    strips = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    return Bound(longest * (_COMPOSED if composing else 1), dropped, strips)


def _parts(component: Any, nested: str) -> Iterator[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer as JSON, or what a sequence of them consists of."""
    if component is None:
        return
    state = json.loads(component.__getstate__())
    yield from state[nested] if state["type"] == "Sequence" else [state]


def _without_token(backend: Tokenizer, parts: list[Mapping[str, Any]]) -> str | None:
    """The characters of which no part is a token: they are left out or become one together. None where those are more
    than some ASCII ones. Bytes that only begin a longer character may be unknown: what follows them is not."""
    if any(part["type"] == "ByteLevel" for part in parts):
        known = {token: backend.token_to_id(token) is not None for token in ByteLevel.alphabet()}
        if sum(known.values()) == len(known):
            return ""
        one_byte = {chr(byte): _spelled(chr(byte)) for byte in range(128)}
        following = {_spelled(chr(byte))[-1] for byte in range(0x80, 0xC0)}
        if not all(known[spelling] for spelling in following):
            return None
        return "".join(character for character, spelling in one_byte.items() if not known[spelling])
    has_all = getattr(backend.model, "byte_fallback", False) and all(
        backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)
    )
    return "" if has_all else None


def _spelled(text: str) -> str:
    """A text's bytes in the alphabet of byte-level tokenizers."""
    return "".join(piece for piece, _ in ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text))


def _keeps_text(part: Mapping[str, Any]) -> bool:
    kind = part["type"]
    if kind == "Replace":
        pattern = part["pattern"].get("String")
        return pattern is not None and len(part["content"]) >= len(pattern)
    if kind in ("Split", "Punctuation"):
        return bool(part["behavior"] != "Removed")
    return kind in ("ByteLevel", "Digits", "Metaspace", "NFC", "Prepend")


def _num_blanks(text: str) -> int:
    return len(text) - sum(map(len, text.split()))
