"""A tokenizer as grammars see it: the bytes of every token, and how text in the middle of an output is split."""

from __future__ import annotations

from collections.abc import Sequence as Many

from specserve.structured.base import Vocabulary
from specserve.text.tokenizer import Tokenizer


def vocabulary(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """Of an LM head that is `size` wide. Control tokens are no text."""
    known = min(tokenizer.vocab_size, size)
    tokens = [b"" if i in tokenizer.special_ids else tokenizer.token_bytes(i) for i in range(known)]
    eos_ids = sorted(tokenizer.eos_ids_below(size), key=lambda token: (token != tokenizer.eos_id, token))
    controls = {text: token for text, token in tokenizer.added_tokens.items() if token in tokenizer.special_ids}
    return Vocabulary(tokens, tuple(eos_ids), size, _Split(tokenizer, tokens), controls)


class _Split:
    """A text's tokens as the tokenizer gives them, where these spell the text and nothing else: some tokenizers put a
    space before every text. Else the longest tokens, one after the other."""

    def __init__(self, tokenizer: Tokenizer, tokens: Many[bytes]) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._ids: dict[bytes, int] = {}

    def __call__(self, text: str) -> list[int]:
        wanted = text.encode()
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if b"".join(self._tokens[i] for i in ids) == wanted:
            return ids
        return self._longest(wanted)

    def _longest(self, text: bytes) -> list[int]:
        if not self._ids:
            self._ids = {spelling: token for token, spelling in enumerate(self._tokens) if spelling}
        found: list[int] = []
        most = max(map(len, self._ids))
        while text:
            length = next((n for n in range(min(most, len(text)), 0, -1) if text[:n] in self._ids), None)
            if length is None:
                return []  # a byte that no token stands for
            found.append(self._ids[text[:length]])
            text = text[length:]
        return found
