"""An answer on the terminal: its text as it comes, how it ended, how fast it was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from specserve.errors import EngineError, NoTokenLeftError
from specserve.terminal import console
from specserve.types import SequenceStats

if TYPE_CHECKING:
    from specserve.llm import Chunk, CompletionOutput


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion that has ended."""

    text: str
    num_tokens: int
    stats: SequenceStats
    reasoning: str = ""

    def speed(self) -> str:
        """One line: tokens per second after the first token, time to the first, tokens a step, drafts accepted."""
        stats = self.stats
        assert stats.first_token is not None and stats.finished is not None, "a finished completion has both times"
        seconds = stats.finished - stats.first_token
        parts = [f"{self.num_tokens} tokens"]
        if self.num_tokens > 1 and seconds > 0:
            parts.append(f"{(self.num_tokens - 1) / seconds:.1f} tokens/s")
        parts.append(f"first after {(stats.first_token - stats.arrived) * 1e3:.0f} ms")
        parts.append(f"{stats.mean_acceptance_length:.2f} tokens a step")
        if stats.num_draft_tokens:
            parts.append(f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} draft tokens accepted")
        return ", ".join(parts)


def write_text(chunk: Chunk) -> None:
    """Its text to standard output; what the model thinks before goes beside it, to standard error."""
    if chunk.reasoning:
        console(stderr=True, highlight=False, soft_wrap=True).print(Text(chunk.reasoning, "dim"), end="")
    print(chunk.text, end="", flush=True)


def write(chunks: Iterable[Chunk], show: Callable[[Chunk], object] = write_text) -> Answer:
    """Write a stream to standard output as it comes. Raises as `check` for an error of its own."""
    texts: list[str] = []
    thoughts: list[str] = []
    num_tokens = 0
    stats: SequenceStats | None = None
    for chunk in chunks:
        if chunk.text and thoughts and not any(texts):
            print("\n", file=sys.stderr)
        show(chunk)
        texts.append(chunk.text)
        thoughts += [chunk.reasoning] if chunk.reasoning else []
        num_tokens += len(chunk.token_ids)
        check(chunk)
        stats = chunk.stats or stats
    print()
    assert stats is not None, "the last chunk of a stream has its stats"
    return Answer("".join(texts), num_tokens, stats, "".join(thoughts))


def check(said: Chunk | CompletionOutput) -> None:
    """Raise NoTokenLeftError or EngineError for a completion that failed alone, whose siblings may be well."""
    if said.finish_reason == "error":
        kind = NoTokenLeftError if said.error_code == NoTokenLeftError.code else EngineError
        raise kind(said.error or "The request failed in the engine, which gave no reason.")
