"""One-time marks in texts: digits, which trimming, changes of case and JSON leave as they are."""

from __future__ import annotations

import secrets

# Fields of messages that templates compare, and build control tokens of: no mark is put into them.
STRUCTURE = ("role", "type")
_NONCE_DIGITS, _NUMBER_DIGITS = 39, 8  # 39 digits are 128 bits


class Marks:
    """Numbered marks for one rendering, which nobody else can know."""

    def __init__(self) -> None:
        least = 10 ** (_NONCE_DIGITS - 1)  # without a zero in front a mark is a number, too
        self._nonce = str(least + secrets.randbelow(9 * least))

    def mark(self, number: int) -> str:
        return f"{self._nonce}{number:0{_NUMBER_DIGITS}}"

    def split(self, text: str) -> tuple[list[str], list[int]]:
        """The pieces of a text, and the numbers of the marks between them. What is left of a mark that was cut stays in
        the pieces."""
        first, *parts = text.split(self._nonce)
        pieces, numbers = [first], []
        for part in parts:
            digits = part[:_NUMBER_DIGITS]
            if len(digits) == _NUMBER_DIGITS and digits.isascii() and digits.isdecimal():
                numbers.append(int(digits))
                pieces.append(part[_NUMBER_DIGITS:])
            else:
                pieces[-1] += self._nonce + part
        return pieces, numbers
