"""Tells a completion's reasoning from its answer while it grows, by its tokens, as grammars after reasoning do
(structured/reasoning.py).

The text may lag behind the tokens, as what may become a stop string is held back, and a marker of several tokens may
come in pieces, so both are counted in characters of all that was decoded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial

from specserve.text.reasoning import Reasoning
from specserve.text.tokenizer import Tokenizer
from specserve.types import SamplingParams


def splitting(
    tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int]
) -> Callable[[], ReasoningSplit] | None:
    """What makes the ReasoningSplit of each completion of a prompt; None where no reasoning can come. Blanks between
    reasoning and answer go with neither, but belong to an answer that a grammar rules."""
    reasoning, beginning = tokenizer.markers, tokenizer.beginning(prompt_ids)
    if reasoning is None or beginning == "after":
        return None
    hidden = tokenizer.special_ids if params.skip_special_tokens else frozenset[int]()
    shown = b"".join(tokenizer.token_bytes(token) for token in reasoning.close if token not in hidden)
    num_shown = len(shown.decode("utf-8", "replace"))
    return partial(ReasoningSplit, reasoning, beginning == "inside", num_shown, trims=params.structured is None)


class _Phase(Enum):
    OPENING = auto()  # all tokens begin what opens reasoning
    REASONING = auto()
    ANSWERING = auto()


class ReasoningSplit:
    """Follows one completion. `is_open`: the prompt has opened the reasoning; else the model may, as the first thing it
    says. `num_shown` characters of the text stand for what closes it."""

    def __init__(self, reasoning: Reasoning, is_open: bool, num_shown: int, trims: bool = True) -> None:
        self._reasoning = reasoning
        self._phase = _Phase.REASONING if is_open else _Phase.OPENING
        self._num_shown = num_shown
        self._matched = 0  # tokens of the marker that is looked for
        self._starts: deque[int] = deque(maxlen=len(reasoning.close))  # where the last tokens began
        self._decoded = 0  # characters that tokens stood for
        self._told = 0  # characters that were told, or left out
        self._waiting = ""  # text that comes after those
        self._opened = 0  # where reasoning begins
        self._closed = (0, 0)  # where it ends and where the answer begins, once they are known
        self._blanks: list[str] = []  # that follow reasoning that was told
        self._has_reasoned, self._has_answered = False, not trims

    def push(self, token_ids: Sequence[int], sizes: Sequence[int], text: str, final: bool) -> tuple[str, str, int]:
        """New tokens, the characters that each stood for, and the text that has become visible; `final`: no more will
        come. Reasoning, answer, and how many more tokens are reasoning or mark it: -n where n that might have been have
        turned out to be none."""
        num_tokens = 0
        for token, size in zip(token_ids, sizes, strict=True):
            self._starts.append(self._decoded)
            self._decoded += size
            num_tokens += self._follow(token)
        if final and self._phase is _Phase.OPENING:
            num_tokens += self._answer_at_once()
        self._waiting += text
        taken = self._waiting if final else self._waiting[: max(self._certain - self._told, 0)]
        self._waiting = self._waiting[len(taken) :]
        reasoning, answer = self._split(taken)
        return self._trimmed_reasoning(reasoning), self._trimmed_answer(answer), num_tokens

    def _follow(self, token: int) -> int:
        if self._phase is _Phase.ANSWERING:
            return 0
        if self._phase is _Phase.OPENING:
            return self._open(token)
        close = self._reasoning.close
        while self._matched and token != close[self._matched]:
            self._matched = self._reasoning.fallbacks[self._matched]
        self._matched += token == close[self._matched]
        if self._matched == len(close):
            self._phase = _Phase.ANSWERING
            self._closed = max(self._decoded - self._num_shown, self._opened), self._decoded
        return 1

    def _open(self, token: int) -> int:
        if token != self._reasoning.open[self._matched]:
            return self._answer_at_once()
        self._matched += 1
        if self._matched == len(self._reasoning.open):
            self._phase, self._matched, self._opened = _Phase.REASONING, 0, self._decoded
        return 1

    def _answer_at_once(self) -> int:
        self._phase, self._has_answered = _Phase.ANSWERING, True
        return -self._matched

    @property
    def _certain(self) -> int:
        """What is before belongs to reasoning, a marker or the answer for certain."""
        if self._phase is _Phase.OPENING:
            return 0
        return self._starts[-self._matched] if self._phase is _Phase.REASONING and self._matched else self._decoded

    def _split(self, taken: str) -> tuple[str, str]:
        begin = self._told
        self._told += len(taken)
        if self._phase is _Phase.REASONING:
            return taken[max(self._opened - begin, 0) :], ""
        end, answer = (max(place - begin, 0) for place in self._closed)
        return taken[max(self._opened - begin, 0) : end], taken[answer:]

    def _trimmed_reasoning(self, text: str) -> str:
        """Without blanks before and after it."""
        if not text or text.isspace():
            if self._has_reasoned and text:
                self._blanks.append(text)
            return ""
        kept = text.rstrip()
        found = "".join([*self._blanks, kept]) if self._has_reasoned else kept.lstrip()
        self._has_reasoned = True
        self._blanks = [text[len(kept) :]]
        return found

    def _trimmed_answer(self, text: str) -> str:
        """Without the blanks after reasoning."""
        text = text if self._has_answered else text.lstrip()
        self._has_answered |= bool(text)
        return text
