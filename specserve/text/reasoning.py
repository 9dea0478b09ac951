"""Which tokens open and close a model's reasoning, told by its own files, and whether a prompt ends inside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence as Many
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from specserve.errors import InputError, ModelError

if TYPE_CHECKING:
    from specserve.text.tokenizer import Tokenizer

# Where an answer begins: in the midst of reasoning; where the model may open it, or answer at once; after it.
Beginning: TypeAlias = Literal["inside", "before", "after"]

_KNOWN = (
    ("<think>", "</think>"),  # DeepSeek R1, Qwen 3, QwQ, SmolLM 3
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
)


QUESTIONS = ("a", "b")  # whose prompts end alike, but for the questions themselves


@dataclass(frozen=True)
class Reasoning:
    """The tokens around a model's reasoning, one or several in a row each. `header` are those that a prompt ends with,
    after its last control token, where the model's turn begins; None where no chat template says so. `controls` are
    control tokens, without those of reasoning: nothing before the last of them belongs to the model's turn. `eos_ids`
    end an output, so they cannot come in the midst of reasoning when something is to follow it."""

    open: tuple[int, ...]
    close: tuple[int, ...]
    header: tuple[int, ...] | None
    controls: frozenset[int]
    eos_ids: frozenset[int]

    @cached_property
    def fallbacks(self) -> list[int]:
        """For each number of tokens of `close` matched, how many are still matched when the next one does not fit: the
        longest proper end of those that begins it (Knuth, Morris and Pratt)."""
        found, close = [0, 0], self.close
        for size in range(2, len(close)):
            ends = (n for n in range(size - 1, 0, -1) if close[:n] == close[size - n : size])
            found.append(next(ends, 0))
        return found

    def beginning(self, prompt_ids: Many[int]) -> Beginning:
        """Where the answer to a prompt begins."""
        last = next((i for i in range(len(prompt_ids) - 1, -1, -1) if prompt_ids[i] in self.controls), -1)
        turn = tuple(prompt_ids[last + 1 :])
        opened, closed = _last(turn, self.open), _last(turn, self.close)
        if opened != closed:
            return "inside" if opened > closed else "after"
        if self.header is None:
            return "after"
        is_new = turn == self.header or (bool(self.header) and turn[-len(self.header) :] == self.header)
        return "before" if is_new else "after"


def markers(tokenizer: Tokenizer, stated: Any, source: str) -> Reasoning | None:
    """Of a model whose files state the response_template `stated`, or None, and whose chat templates have the text
    `source`; None for one that does not reason, as far as they tell. Without a header: no template is run."""
    added = tokenizer.added_tokens
    for (first, last), is_certain in _candidates(tokenizer, stated):
        if not (is_certain or first in source or last in source or {first, last} <= added.keys()):
            continue
        opening, closing = _ids(tokenizer, first), _ids(tokenizer, last)
        if opening and closing and opening != closing:
            controls = tokenizer.special_ids.difference(opening, closing)
            return Reasoning(opening, closing, None, controls, tokenizer.eos_ids)
    return None


def with_header(tokenizer: Tokenizer, found: Reasoning) -> Reasoning:
    """With the header that the chat template says: two questions go through it, unless it is known what it makes of
    them."""
    return replace(found, header=_header(tokenizer, found.controls))


def _candidates(tokenizer: Tokenizer, stated: Any) -> Iterator[tuple[tuple[str, str], bool]]:
    """Texts that may open and close reasoning, and whether the model's own files say that they do."""
    family = None if tokenizer.call_format is None else tokenizer.call_format.template
    for template in (stated, family):
        fields = template.get("fields") if isinstance(template, Mapping) else None
        field = fields.get("reasoning_content") if isinstance(fields, Mapping) else None
        if isinstance(field, Mapping) and isinstance(field.get("open"), str) and isinstance(field.get("close"), str):
            yield (field["open"], field["close"]), template is stated
    for pair in _KNOWN:
        yield pair, False


def _ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Nothing for a text that the tokenizer spells only together with something else."""
    if text in tokenizer.added_tokens:
        return (tokenizer.added_tokens[text],)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return tuple(ids) if b"".join(map(tokenizer.token_bytes, ids)) == text.encode() else ()


def _header(tokenizer: Tokenizer, controls: frozenset[int]) -> tuple[int, ...] | None:
    """What two prompts have in common at their ends, after the last control token."""
    one, two = (_asked(tokenizer, content) for content in QUESTIONS)
    if one is None or two is None:
        return None
    common: list[int] = []
    for token, other in zip(reversed(one), reversed(two), strict=False):
        if token != other or token in controls:
            break
        common.insert(0, token)
    return tuple(common)


def _asked(tokenizer: Tokenizer, content: str) -> list[int] | None:
    """The prompt of one question; None where there is no template, or it wants more than that."""
    if content in tokenizer.questions:
        return tokenizer.questions[content]
    try:
        return tokenizer.encode_chat([{"role": "user", "content": content}])
    except (InputError, ModelError):
        return None


def _last(ids: tuple[int, ...], marker: tuple[int, ...]) -> int:
    """Where a marker stands for the last time; -1 if nowhere."""
    size = len(marker)
    return next((i for i in range(len(ids) - size, -1, -1) if ids[i : i + size] == marker), -1)
