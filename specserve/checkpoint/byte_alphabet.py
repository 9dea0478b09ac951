"""GPT-2's spelling of bytes as printable characters, in which byte-level vocabularies are written."""

from __future__ import annotations


def byte_alphabet() -> dict[str, int]:
    """Bytes by letter: printable ones stand for themselves, the others for code points from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
