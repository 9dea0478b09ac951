"""What each step of an answer did with drafts: a table of the steps, and the text with its drafts marked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.text import Text

from specserve.server.wire.openai.explained import DraftToken, ExplainedStep, explained_step
from specserve.terminal import FittedTable
from specserve.types import JUMP_FORWARD

if TYPE_CHECKING:
    from specserve.cli.answer import Answer
    from specserve.llm import Chunk

_MOST_STEPS = 500  # that are listed, the newest; sums go over all
_COLORS = ("green", "cyan", "yellow", "blue", "red")
_MARKS = {"accepted": "{+%s+}", JUMP_FORWARD: "{=%s=}", "rejected": "[-%s-]"}  # where there are no colours


class Explanation:
    """The steps of one answer as they come. `token_bytes` is the tokenizer's."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._steps: deque[tuple[int, ExplainedStep]] = deque(maxlen=_MOST_STEPS)  # with the tokens they emitted
        self._num_steps = 0
        self._num_estimated = 0
        self._took_ms = 0.0  # the steps of which it is known what they would have taken without drafts
        self._plain_ms = 0.0  # and what their tokens would

    def of(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """The same chunks, noted while they pass."""
        for chunk in chunks:
            if chunk.explained is not None:
                self._add(explained_step(chunk, self._token_bytes), len(chunk.token_ids))
            yield chunk

    def _add(self, step: ExplainedStep, emitted: int) -> None:
        self._steps.append((emitted, step))
        self._num_steps += 1
        if step["plain_ms"] is not None:
            self._num_estimated += 1
            self._took_ms += step["step_ms"]
            self._plain_ms += emitted * step["plain_ms"]

    def show(self, answer: Answer) -> RenderableType:
        """All of it, once the answer is whole."""
        table = FittedTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("step", "rows", "proposed", "verified", "accepted", "tokens", "expected", "took", "may lose"):
            table.add_column(name, justify="left" if name == "proposed" else "right", no_wrap=name != "proposed")
        first = self._num_steps - len(self._steps)
        for number, (emitted, step) in enumerate(self._steps, first + 1):
            times = step["expected_ms"], step["step_ms"], step["allowance_ms"]
            counts = step["num_verified"], step["num_accepted"], emitted
            cells = *map(str, counts), *("-" if ms is None else f"{ms:.2f}" for ms in times)
            table.add_row(str(number), str(step["step_rows"]), _proposed(step), *cells)
        left_out = [Text(f"The first {first} steps are not listed.")] if first else []
        return Group(*left_out, table, *map(Text, self._sums(answer)))

    def _sums(self, answer: Answer) -> list[str]:
        stats = answer.stats
        per_step = answer.num_tokens / stats.num_steps
        lines = [f"{answer.num_tokens} tokens in {stats.num_steps} steps, {per_step:.2f} tokens a step."]
        for source, (drafted, accepted) in stats.by_source.items():
            lines.append(f"{source}: {accepted} of {drafted} draft tokens accepted, {accepted / drafted:.0%}.")
        if all(step["allowance_ms"] is None for _, step in self._steps):
            return [*lines, "No times were expected: with --no-adaptive drafts are not weighed by what steps cost."]
        if not self._num_estimated:
            return [*lines, "No times were expected: what steps cost was not known yet."]
        won = self._plain_ms - self._took_ms
        return [
            *lines,
            f"{self._num_estimated} steps of known cost took {self._took_ms:.1f} ms. Without drafts their tokens would "
            f"have taken about {self._plain_ms:.1f} ms: {abs(won):.1f} ms {'won' if won >= 0 else 'lost'}.",
        ]


def _proposed(step: ExplainedStep) -> str:
    found = ", ".join(f"{source} {count}" for source, count in step["proposed"].items())
    return found or ("nothing" if step["room"] else "not asked")


class MarkedText:
    """Writes an answer with every draft token marked: accepted ones in the colour of who proposed them, what a grammar
    left no choice of, and rejected ones, struck through, before what came instead. Without colours, in brackets."""

    def __init__(self, console: Console, token_bytes: Callable[[int], bytes]) -> None:
        self._console = console
        self._token_bytes = token_bytes
        self._colors: dict[str, str] = {}  # by source, as they come

    def write(self, chunk: Chunk) -> None:
        text = Text()
        if chunk.explained is None:
            text.append(chunk.text)
        else:
            step = explained_step(chunk, self._token_bytes)
            for place in range(len(step["tokens"]) + 1):
                for branch in step["rejected"]:
                    if branch["position"] == place:
                        said = "".join(token["text"] for token in branch["tokens"]).replace("\n", "⏎")
                        self._append(text, said, "rejected", "dim strike")
                if place < len(step["tokens"]):
                    self._append_token(text, step["tokens"][place])
            text.append(chunk.text[len("".join(chunk.pieces)) :])
        self._console.print(text, end="", soft_wrap=True)

    def legend(self) -> Text:
        """What the colours stand for, of all sources so far."""
        shown = Text("drafts: ")
        for source, color in self._colors.items():
            shown.append(source, color).append(", ")
        return shown.append("rejected", "dim strike")

    def _append_token(self, text: Text, token: DraftToken) -> None:
        if not token["sources"]:
            text.append(token["text"])
            return
        source = token["sources"][0]
        if source not in self._colors:
            self._colors[source] = "magenta" if source == JUMP_FORWARD else _COLORS[len(self._colors) % len(_COLORS)]
        kind = JUMP_FORWARD if source == JUMP_FORWARD else "accepted"
        self._append(text, token["text"], kind, self._colors[source])

    def _append(self, text: Text, said: str, kind: str, style: str) -> None:
        if said:
            has_colors = self._console.is_terminal and not self._console.no_color
            text.append(said if has_colors else _MARKS[kind] % said, style)
