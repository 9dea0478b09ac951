"""Measures a drafter on recorded text, without a model: a greedy target's answer is known, so what it would have
accepted is too. A drafter that needs hidden states cannot be replayed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specserve.bench.drive import Driver, NoTarget, fault
from specserve.errors import ConfigError, InputError
from specserve.files import parse_json, read_text
from specserve.speculation.base import Drafter
from specserve.speculation.lookup import prepare
from specserve.types import Draft, Ids, SamplingParams, Sequence, Verdict

_MOST_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Record:
    """One recorded answer: token ids of prompt and output, and the category it counts for. `top[i]` are the target's
    best tokens where it said output_ids[i], best first; None where they were not recorded."""

    prompt_ids: list[int]
    output_ids: list[int]
    category: str = "all"
    top: list[list[int]] | None = None


@dataclass(slots=True)
class Tally:
    """Counts over steps. Position i is depth i of a draft: 0 follows the last committed token."""

    num_records: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    num_draft_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    drafted_by_position: list[int] = field(default_factory=list)  # drafts that reach this depth
    drafting_seconds: float = 0.0  # begin, propose, commit and end

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_by_position)

    @property
    def tokens_per_step(self) -> float:
        """Mean acceptance length, the target's own token included; 1.0 is plain decoding."""
        return self.num_tokens / self.num_steps if self.num_steps else 1.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Of the drafts that reach a depth, how many had it accepted."""
        pairs = zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        return [accepted / drafted for accepted, drafted in pairs]

    @property
    def microseconds_per_step(self) -> float:
        return self.drafting_seconds / self.num_steps * 1e6 if self.num_steps else 0.0

    def add_step(self, draft: Draft, num_accepted: int) -> None:
        """Count one verified draft, which emitted num_accepted + 1 tokens."""
        depth = int(draft.depths.max()) + 1 if len(draft) else 0
        missing = [0] * (depth - len(self.drafted_by_position))
        self.drafted_by_position += missing
        self.accepted_by_position += missing
        for position in range(depth):
            self.drafted_by_position[position] += 1
            self.accepted_by_position[position] += position < num_accepted
        self.num_steps += 1
        self.num_tokens += num_accepted + 1
        self.num_draft_tokens += len(draft)

    def summary(self) -> dict[str, Any]:
        """Figures as JSON has them."""
        return {
            "records": self.num_records,
            "steps": self.num_steps,
            "tokens": self.num_tokens,
            "draft_tokens": self.num_draft_tokens,
            "accepted_tokens": self.num_accepted_tokens,
            "tokens_per_step": self.tokens_per_step,
            "acceptance_by_position": self.acceptance_by_position,
            "drafting_microseconds_per_step": self.microseconds_per_step,
        }


@dataclass(slots=True)
class ReplayReport:
    """All records together, and by category."""

    overall: Tally = field(default_factory=Tally)
    categories: dict[str, Tally] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        categories = {name: tally.summary() for name, tally in sorted(self.categories.items())}
        return {**self.overall.summary(), "categories": categories}


def replay_file(path: Path, drafter: str, num_speculative_tokens: int, options: Mapping[str, Any]) -> ReplayReport:
    """Replay a file of JSON lines {"prompt_ids", "output_ids", "category", "top"} with the drafter of that name.

    Raises ConfigError (drafter, options, no such file) or InputError (naming the line of a bad record).
    """
    make = prepare(drafter, options)
    if make is None:
        raise ConfigError("A replay needs a drafter; 'none' drafts nothing.")
    return replay(make(NoTarget()), read_records(path), num_speculative_tokens)


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file of JSON lines; empty lines are skipped. Raises ConfigError or InputError."""
    try:
        lines = read_text(path, _MOST_BYTES, pipes=True).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _record(line, f"{path}, line {number}")


def replay(drafter: Drafter, records: Iterable[Record], num_speculative_tokens: int) -> ReplayReport:
    """Walk every recorded output: propose, accept what the recording agrees with, commit, until it ends.

    Drafts are capped as the engine caps them, by what is left of the output. A drafter that needs the target's best
    tokens is told those that were recorded, nothing of what follows rejected nodes. Raises ConfigError for a drafter
    that needs hidden states or more best tokens than there are, an invalid draft, or fewer than one token to draft.
    """
    if drafter.needs.hidden_layers:
        raise ConfigError("This drafter needs the target's hidden states, and a recording has none.")
    if num_speculative_tokens < 1:
        raise ConfigError(f"num_speculative_tokens is {num_speculative_tokens}; a replay needs at least 1.")
    report = ReplayReport()
    for record in records:
        tallies = (report.overall, report.categories.setdefault(record.category, Tally()))
        for tally in tallies:
            tally.num_records += 1
        _Walk(drafter, record, tallies).run(num_speculative_tokens)
    return report


class _Walk:
    """One record being replayed."""

    def __init__(self, drafter: Drafter, record: Record, tallies: tuple[Tally, ...]) -> None:
        self.drafter = Driver(drafter)
        self.output = record.output_ids
        self.top = self._recorded(record, drafter.needs.top_k)
        self.tallies = tallies
        self.seq = Sequence(
            request_id="replay",
            index=0,
            tokens=list(record.prompt_ids),
            num_prompt=len(record.prompt_ids),
            params=SamplingParams(),
            seed=0,
            max_tokens=len(record.output_ids),
        )

    def run(self, num_speculative_tokens: int) -> None:
        self._timed(self.drafter.begin, self.seq)
        while rest := self.output[self.seq.num_output :]:
            self._step(rest, min(num_speculative_tokens, len(rest) - 1))
        self._timed(self.drafter.end, self.seq)

    def _step(self, rest: list[int], budget: int) -> None:
        draft = self._draft(budget) if budget else Draft.empty()
        path = accepted_path(draft, rest)
        verdict = Verdict(rest[: len(path) + 1], path)
        for tally in self.tallies:
            tally.add_step(draft, len(path))
        top = None
        if self.top is not None:
            top = np.full((1 + len(draft), self.top.shape[1]), -1, np.int32)
            first = self.seq.num_output
            top[[0, *(node + 1 for node in path)]] = self.top[first : first + len(verdict.tokens)]
        self.seq.tokens += verdict.tokens
        self._timed(self.drafter.observe, [self.seq], [verdict], [draft], top)

    @staticmethod
    def _recorded(record: Record, top_k: int) -> Ids | None:
        if not top_k:
            return None
        if record.top is None or any(len(ids) < top_k for ids in record.top):
            raise ConfigError(
                f"This drafter needs the target's {top_k} best tokens of every position, and a recorded answer lacks "
                f"them. Record it with `specserve bench --record FILE --record-top {top_k}`."
            )
        return np.array([ids[:top_k] for ids in record.top], np.int32)

    def _draft(self, budget: int) -> Draft:
        drafts: Any = self._timed(self.drafter.propose, [self.seq], [budget])
        wrong = fault(drafts[0], budget, NoTarget.vocab_size) if len(drafts) == 1 else "count"
        if wrong is not None:
            raise ConfigError(f"{type(self.drafter.drafter).__name__} made an invalid draft ({wrong}).")
        draft: Draft = drafts[0]
        return draft

    def _timed(self, verb: Any, *args: Any) -> Any:
        begun = time.perf_counter()
        result = verb(*args)
        spent = time.perf_counter() - begun
        for tally in self.tallies:
            tally.drafting_seconds += spent
        return result


def accepted_path(draft: Draft, rest: list[int]) -> list[int]:
    """The nodes of `draft`, root's child first, that a greedy target saying `rest` accepts."""
    children = {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True))
    }
    path: list[int] = []
    node = children.get((-1, rest[0]))
    while node is not None and len(path) < len(rest) - 1:
        path.append(node)
        node = children.get((node, rest[len(path)]))
    return path


def _record(line: str, where: str) -> Record:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise InputError(f"{where} must be an object with prompt_ids, output_ids and category.")
    prompt_ids, output_ids = (_ids(value.get(name), name, where) for name in ("prompt_ids", "output_ids"))
    top = value.get("top")
    if top is not None:
        if not isinstance(top, list) or len(top) != len(output_ids):
            raise InputError(
                f"{where}: top must be a list of as many lists of token ids as there are output_ids.", "top"
            )
        top = [_ids(ids, "top", where) for ids in top]
    return Record(prompt_ids, output_ids, str(value.get("category", "all")), top)


def _ids(ids: Any, name: str, where: str) -> list[int]:
    if not isinstance(ids, list) or not ids or any(type(token) is not int or not 0 <= token < 2**31 for token in ids):
        raise InputError(f"{where}: {name} must be a list of token ids, and not empty.", name)
    return ids
