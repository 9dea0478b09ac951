"""Turns one completion's tokens into text as they come, and ends it at a stop string.

A token is a piece of a byte string, so text is that string read as UTF-8 while it grows: a character appears with its
last byte, bytes that can never become one appear as U+FFFD. Decoding again from a little before (what tokenizers'
DecodeStream and most engines do) waits for the next token after any U+FFFD, and takes quadratic time over long runs.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from specserve.text.reasoning_split import ReasoningSplit
from specserve.text.stops import MAX_CHARACTER_BYTES, StopSearch, StopString
from specserve.text.tokenizer import Tokenizer
from specserve.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Step:
    """What some tokens made visible: new `text`; how many of them are kept, `num_kept`, fewer than given when a stop
    string was complete before the last; and that stop string, or None. `pieces` are the text by token, but for what the
    end has made visible. Where reasoning is told apart, `text` is the answer's, and `apart` is new reasoning and how
    many more tokens, or fewer, have turned out to be reasoning or to mark it."""

    text: str
    num_kept: int
    stop: str | None = None
    pieces: list[str] = field(default_factory=list, compare=False)
    apart: tuple[str, int] = ("", 0)


Split: TypeAlias = Callable[[], ReasoningSplit]


def detokenizers(
    count: int, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int], split: Split | None = None
) -> list[Detokenizer]:
    """Those of a request's completions, which share their stop strings."""
    stops = [StopString(stop) for stop in params.stop]
    return [Detokenizer(tokenizer, params, prompt_ids, stops, split and split()) for _ in range(count)]


class Detokenizer:
    """The visible text of one completion after `prompt_ids`.

    Text that may still turn out to be the beginning of a stop string is held back. The first stop string to be complete
    ends the text, whichever began first; a stop that is complete before `params.min_tokens` tokens does not count.
    How tokens are split among calls of `push` never changes the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        stops: Sequence[StopString] | None = None,
        split: ReasoningSplit | None = None,
    ) -> None:
        """`stops` are those of `params`, where completions share them; `split` tells reasoning apart."""
        self._tokenizer = tokenizer
        self._params = params
        self._skipped = tokenizer.special_ids if params.skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopSearch([StopString(stop) for stop in params.stop] if stops is None else stops)
        self._held = ""
        self._num_tokens = 0
        self._ended = False
        self._split = split
        # A prompt of ids can end inside a character; the completion then begins with the rest of it.
        self._utf8.decode(b"".join(self._bytes(token) for token in prompt_ids[-MAX_CHARACTER_BYTES:]))

    def push(self, token_ids: Sequence[int], final: bool = False) -> Step:
        """Take the next tokens, the last ones if `final`. Must not be called after a stop string or the last ones."""
        assert not self._ended, "push after the end"
        pieces: list[str] = []
        sizes: list[int] = []
        stop = None
        for token in token_ids:
            self._num_tokens += 1
            decoded = self._utf8.decode(self._bytes(token))
            piece, stop = self._release(decoded)
            pieces.append(piece)
            sizes.append(len(decoded))
            if stop is not None:
                self._ended = True
                break
        text = "".join(pieces) + (self.finish() if final else "")
        if self._split is None:
            return Step(text, len(pieces), stop, pieces)
        reasoning, text, num_tokens = self._split.push(token_ids[: len(pieces)], sizes, text, self._ended)
        return Step(text, len(pieces), stop, pieces, (reasoning, num_tokens))

    def finish(self) -> str:
        """What was held back, once no more tokens will come: empty after a stop string."""
        rest = "" if self._ended else self._held + self._utf8.decode(b"", final=True)
        self._ended = True
        return rest

    def _bytes(self, token: int) -> bytes:
        return b"" if token in self._skipped else self._tokenizer.token_bytes(token)

    def _release(self, text: str) -> tuple[str, str | None]:
        """What is certain with this new text, and the stop string that ended it, if one did."""
        visible, begin = "", 0
        while found := self._stops.push(text, begin):
            end, stop = found
            is_end = self._num_tokens >= self._params.min_tokens
            hidden = len(stop) if is_end and not self._params.include_stop_str_in_output else 0
            shown = self._held + text[begin:end]
            visible += shown[: len(shown) - hidden]
            if is_end:
                return visible, stop
            self._held, begin = "", end
        self._held += text[begin:]
        certain = len(self._held) - self._stops.num_uncertain
        visible += self._held[:certain]
        self._held = self._held[certain:]
        return visible, None
