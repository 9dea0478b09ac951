"""Bounds what drafts may cost by what steps took: nothing here rests on what anybody expected of them."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from specserve.runtime.cost import DecodeCost, row_class
from specserve.speculation import constants as tuned


class Load(NamedTuple):
    """A step without its drafts."""

    rows: int  # sequences that decode
    context: int = 0  # tokens they have in all
    tokens: int = 0  # of chunks of prompts


@dataclass(slots=True)
class _Plain:
    """The newest plain steps of about one load."""

    load: Load
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=tuned.MIDDLE_OF))
    at: int = 0  # the newest one's number


@dataclass(slots=True)
class _Block:
    """Steps with drafts since the last plain one, all of one load."""

    before: float  # seconds of a plain step before it
    seconds: float = 0.0
    steps: float = 0.0  # plain steps that would have given as many tokens
    num_steps: int = 0

    def add(self, seconds: float, steps: float) -> None:
        self.seconds += seconds
        self.steps += steps
        self.num_steps += 1

    def lost(self, plain: float) -> float:
        """Seconds, where a plain step takes `plain`."""
        return self.seconds - self.steps * plain


class Guard:
    """What drafts may still cost, in seconds. It begins with two plain steps, grows by 1 % of all time and by what
    drafts gain, up to four plain steps, and shrinks by what they lose. Only what it affords is drafted, so in any
    stretch of time drafts lose at most 1 % of it and some plain steps, whatever the model of costs says.

    Gains and losses are measured. Steps with drafts come in blocks between plain steps of the same load, the fewer at a
    time the less they gain; a block's time is held against that of plain steps for as many tokens, which take the mean
    of what they took before and after it: a machine that grows slower makes both slower. Where nothing is left, drafts
    get short trials, ever more seldom while these fail. Beside chunks of prompts nothing can be compared: there what
    rows are expected to take is charged.
    """

    def __init__(self, cost: DecodeCost, most_under_way: int = 1) -> None:
        self._cost = cost
        self._allowance, self._is_new = 0.0, True
        self._plain: dict[tuple[int, int], _Plain] = {}
        self._by_rows: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=5))  # steps with drafts
        self._blocks: dict[tuple[int, int], _Block] = {}  # of the newest steps' loads
        self._begun: deque[tuple[int, int]] = deque(maxlen=most_under_way)  # these
        self._speed = 1.0  # of blocks, times that of plain steps
        self._num_steps = 0
        self._trial: float | None = None  # what is left of one
        self._trial_steps, self._blocked, self._wait = 0, 0, tuned.TRIAL_AFTER

    def begin(self, load: Load) -> None:
        """A step of this load comes."""
        if load.rows:
            self._begun.append(self._key(load))
            for key in [key for key in self._blocks if key not in self._begun]:
                self._settle(key, self._blocks[key].before)
        if self._is_new and (plain := self.plain(load)):
            self._allowance, self._is_new = tuned.STEPS * plain, False

    def plain(self, load: Load) -> float:
        """Seconds of a plain step, by those of that load or else of the most similar one; 0 while nothing is known."""
        same = self._plain.get(self._key(load))
        if same is not None and self._num_steps - same.at < tuned.STALE:
            return median(same.seconds)
        fresh = [each for each in self._plain.values() if self._num_steps - each.at < tuned.STALE]
        expected = self._cost.seconds(load.rows, load.context)
        if not fresh:
            return expected
        found = min(fresh, key=lambda each: _distance(each.load, load))
        seconds = median(found.seconds)
        return seconds * expected / (self._cost.seconds(found.load.rows, found.load.context) or 1.0)

    @property
    def allowance(self) -> float:
        """Seconds that are left, by what is known of the block so far."""
        return self._allowance - sum(block.lost(block.before) for block in self._blocks.values())

    def affordable(self) -> float:
        """Seconds that drafts of this step may lose."""
        return self.allowance if self._trial is None else max(self.allowance, self._trial)

    def wants_plain(self, load: Load) -> bool:
        """Whether the step should be a plain one, so that it shows what these take."""
        block = self._blocks.get(self._key(load))
        if block is None or load.tokens:
            return False
        most = next(most for speed, most in tuned.BLOCKS if self._speed >= speed)
        return block.num_steps >= most

    def charge(self, seconds: float) -> None:
        """Drafts cost so much, or gained it, beside what steps tell."""
        self._allowance -= seconds

    def took(self, load: Load, drafted: int, accepted: int, seconds: float, drafting: float) -> None:
        """A step of that load, with so many draft rows of which some were accepted, took `seconds`; of these `drafting`
        for asking drafters and telling them."""
        self._num_steps += 1
        plain, key = self.plain(load), self._key(load)
        if drafted and not load.tokens:
            calm, steps = self._calm(load.rows + drafted, seconds), 1 + accepted / load.rows
            self._blocks.setdefault(key, _Block(plain)).add(calm, steps)
            if self._trial is not None:
                self._trial -= calm - steps * plain
        else:
            self._allowance -= drafting
            if load.rows and not load.tokens:
                self._learn(load, seconds - drafting)
                if key in self._blocks:
                    self._settle(key, (self._blocks[key].before + self.plain(load)) / 2)
        if load.rows:
            self._allowance = min(self._allowance + tuned.SHARE * seconds, tuned.GAINED * plain)
            self._try(drafted, plain)

    def _try(self, drafted: int, plain: float) -> None:
        """Begin a trial where too little is left, and end it when it has failed or has shown enough."""
        if self.allowance > tuned.TRIAL * plain:
            self._trial, self._blocked, self._wait = None, 0, tuned.TRIAL_AFTER
            return
        if self._trial is not None:
            self._trial_steps += 1
            if self._trial < 0 or self._trial_steps == tuned.TRIAL_AFTER:
                is_better = self._trial > tuned.TRIAL * plain
                self._trial, self._blocked = None, self._wait if is_better else 0
                self._wait = tuned.TRIAL_AFTER if is_better else 2 * self._wait
        else:
            self._blocked += not drafted
        if self._trial is None and self._blocked >= self._wait:
            self._trial, self._trial_steps, self._blocked = tuned.TRIAL * plain, 0, 0

    def _settle(self, key: tuple[int, int], plain: float) -> None:
        """A block is over; plain steps beside it took so long."""
        block = self._blocks.pop(key)
        self._allowance -= block.lost(plain)
        weight = min(1.0, block.num_steps / tuned.BLOCKS[-1][1])
        self._speed += weight * (block.steps * plain / block.seconds - self._speed)

    def _learn(self, load: Load, seconds: float) -> None:
        """Of a plain step."""
        key = self._key(load)
        if key not in self._plain or self._num_steps - self._plain[key].at >= tuned.STALE:
            self._plain[key] = _Plain(load)
        found = self._plain[key]
        found.load, found.at = load, self._num_steps
        found.seconds.append(seconds)

    def _calm(self, rows: int, seconds: float) -> float:
        """What of a step with drafts was no pause of the machine."""
        recent = self._by_rows[row_class(rows)]
        recent.append(seconds)
        return min(seconds, tuned.PAUSE * median(recent)) if len(recent) >= tuned.MIDDLE_OF else seconds

    @staticmethod
    def _key(load: Load) -> tuple[int, int]:
        return load.rows, load.context.bit_length()


def _distance(one: Load, other: Load) -> float:
    rows = abs(math.log(max(one.rows, 1) / max(other.rows, 1)))
    return rows + 0.5 * abs(one.context.bit_length() - other.context.bit_length())
