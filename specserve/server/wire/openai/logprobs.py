"""Log-probabilities in OpenAI's two shapes: of chat, with bytes, and of completions, with text offsets."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from specserve.server.wire.json.pieces import AT_ONCE, LazyList
from specserve.server.wire.openai.bodies import ChatLogprobs, ChatTokenLogprob, TextLogprobs, TokenLogprob
from specserve.types import TokenLogprobs

LEAST = -9999.0  # for what cannot be: JSON has no -inf, and OpenAI sends this


class Vocabulary(Protocol):
    """What a Tokenizer knows of tokens."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...


def chat_logprobs(entries: Sequence[TokenLogprobs], vocabulary: Vocabulary) -> ChatLogprobs:
    """`logprobs` of a chat choice, whole or streamed; `content` is made when it is looked at."""

    def entry(of: TokenLogprobs) -> ChatTokenLogprob:
        top = [_spelled(*each, vocabulary) for each in of.top.items()]
        return {**_spelled(of.token, of.logprob, vocabulary), "top_logprobs": top}

    content: Any = LazyList(entries, entry)
    return {"content": content, "refusal": None}


def _spelled(token: int, logprob: float, vocabulary: Vocabulary) -> TokenLogprob:
    spelling = vocabulary.token_bytes(token)
    return {
        "token": spelling.decode("utf-8", "replace"),
        "logprob": max(logprob, LEAST),
        "bytes": list(spelling),
    }


class CompletionLogprobs:
    """`logprobs` of one choice of a completion, part by part: a text offset counts the characters before it, the echoed
    prompt's too. A special token that is not shown has no width."""

    def __init__(self, vocabulary: Vocabulary, hidden: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._hidden = hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def skip(self, num_characters: int) -> None:
        """Text that has no entries, such as a prompt echoed without log-probabilities."""
        self._offset += num_characters

    def prompt(self, ids: Sequence[int], entries: Sequence[TokenLogprobs | None], text: str) -> TextLogprobs:
        """Of the echoed prompt; nothing predicts its first token, which has null. The completion then begins after
        `text`, however the tokens spell it."""
        part = self.part(ids, entries)
        self._offset = len(text)
        part["text_offset"] = [min(offset, len(text)) for offset in part["text_offset"]]
        return part

    def prompt_parts(
        self, ids: Sequence[int], entries: Iterable[TokenLogprobs | None], text: str
    ) -> Iterator[TextLogprobs]:
        """As `prompt`, for AT_ONCE tokens each."""
        left = iter(entries)
        for at in range(0, len(ids), AT_ONCE):
            part = self.part(ids[at : at + AT_ONCE], list(islice(left, AT_ONCE)))
            part["text_offset"] = [min(offset, len(text)) for offset in part["text_offset"]]
            yield part
        self._offset = len(text)

    def part(self, ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> TextLogprobs:
        """Of the next tokens; all but the offsets is made when it is looked at."""
        tokens: Any = LazyList(ids, self._name)
        scores: Any = LazyList(entries, lambda e: None if e is None else max(e.logprob, LEAST))
        top: Any = LazyList(entries, lambda e: None if e is None else self._top(e))
        offsets = [self._advance(token) for token in ids]
        return {"tokens": tokens, "token_logprobs": scores, "top_logprobs": top, "text_offset": offsets}

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The k best and the token itself, best first; of two tokens with the same bytes the likelier."""
        top: dict[str, float] = {}
        for token, logprob in [*entry.top.items(), (entry.token, entry.logprob)]:
            top.setdefault(self._name(token), max(logprob, LEAST))
        return top

    def _name(self, token: int) -> str:
        """Its text; where that is part of a character, its bytes, as OpenAI names them, lest two share a name."""
        spelling = self._vocabulary.token_bytes(token)
        try:
            return spelling.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)

    def _advance(self, token: int) -> int:
        """Where the token begins."""
        offset = self._offset
        if token not in self._hidden:
            self._offset += len(self._utf8.decode(self._vocabulary.token_bytes(token)))
        return offset


def joined(first: TextLogprobs, second: TextLogprobs) -> TextLogprobs:
    """Two parts as one."""
    return {
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": first["top_logprobs"] + second["top_logprobs"],
        "text_offset": first["text_offset"] + second["text_offset"],
    }
