"""Chooses which proposed nodes a step verifies: as many tokens a second as measured cost and acceptance promise, and no
more than drafts may lose."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import accumulate

from specserve.runtime.cost import DecodeCost
from specserve.speculation.constants import FEW_NODES, LIKELY, LOOKS_AGAIN, WAIT_S
from specserve.speculation.guard import Guard, Load
from specserve.speculation.tree import Proposals

_NO_LOAD = Load(0)


@dataclass(slots=True)
class Outlook:
    """What is expected of a step, and what was chosen for it so far."""

    load: Load = _NO_LOAD
    curve: list[float] = field(default_factory=lambda: [0.0])  # seconds of the step with 0, 1, 2 ... nodes
    plain: float = 0.0  # seconds of the step without drafts and chunks; 0 while nothing is known
    scale: float = 1.0  # what plain steps are expected to take, times what they took
    is_probe: bool = False  # a step without drafts, which tells what plain decoding takes
    expected: float = 0.0  # its tokens with the nodes so far, and
    num_chosen: int = 0  # how many these are
    asking: float = 0.0  # seconds for asking what takes a while, as expected
    drafting: float = 0.0  # seconds that asking took, and
    reading: float = 0.0  # that drafters took to read what is new to them


class Planner:
    """Joint admission for all sequences of a step. In a step of decoding alone, nodes are taken from the likeliest on
    while that gives more tokens a second, "none at all" included; beside chunks of prompts, while a node is expected to
    save more time than its row takes. What was chosen before in the step counts: all of it together is affordable."""

    def __init__(self, cost: DecodeCost, most_under_way: int = 1) -> None:
        self.guard = Guard(cost, most_under_way)
        self._cost = cost
        self.now = Outlook()  # that of the step which drafts are chosen for, or which has ended
        self._since_look = 0

    def start(self, load: Load) -> None:
        """A step without drafts so far."""
        curve = self._cost.curve(load.rows + load.tokens, FEW_NODES, load.context)
        plain = curve[0] if not load.tokens else self._cost.seconds(load.rows, load.context)
        self._since_look += 1
        self.guard.begin(load)
        measured = self.guard.plain(load)
        scale = plain / measured if measured else 1.0
        self.now = Outlook(load, curve, plain, scale, self.guard.wants_plain(load), float(load.rows))

    def extra(self, count: int) -> float:
        """Seconds that so many nodes add to the step."""
        if count >= len(self.now.curve):
            load = self.now.load
            self.now.curve = self._cost.curve(load.rows + load.tokens, count, load.context)
        return self.now.curve[count] - self.now.curve[0]

    @property
    def token(self) -> float:
        """Seconds of a token of plain decoding."""
        return self.now.plain / max(self.now.load.rows, 1)

    @property
    def _affordable(self) -> float:
        """Seconds, as they are expected, that nodes of this step may still lose."""
        return self.guard.affordable() * self.now.scale - self.now.asking

    def can_draft(self, asking: float = 0.0, count: int = 1) -> bool:
        """Whether so many nodes more can be afforded, and `asking` seconds for what is in them."""
        return self._affordable >= self.extra(self.now.num_chosen + count) + asking

    def price(self, count: int) -> float:
        """What so many nodes cost, in tokens that plain decoding of one sequence emits in the time."""
        return self.extra(count) / self.token if count and self.now.plain else 0.0

    def speed(self, expected: Many[float], asking: float = 0.0, is_whole: bool = False) -> float:
        """Times the tokens a second without a draft of which expected[i] tokens of depth i are accepted and which takes
        `asking` seconds: of one as long as is best, if all sequences were like this one; or of the step with what was
        chosen so far, of a draft that is verified whole."""
        now, there = self.now, self.extra(self.now.num_chosen)
        tokens, seconds = (now.expected, now.plain + now.asking + there) if is_whole else (1.0, self.token)
        sums = enumerate(accumulate(expected, initial=tokens), now.num_chosen)
        return max(more / (seconds + asking + self.extra(count) - there) for count, more in sums) * seconds / tokens

    def take(self, asking: float, survival: Many[float] = ()) -> None:
        """A sequence is asked for a draft, which takes `asking` seconds; one with `survival` is verified as it is."""
        self.now.asking += asking
        self.now.num_chosen += len(survival)
        self.now.expected += sum(survival)

    def forecast(self, count: int, asking: float) -> tuple[float | None, float | None, float]:
        """Seconds of the step without drafts, and with so many nodes for which drafters were asked so long; None while
        nothing is known and beside chunks. And the guard's allowance."""
        with_nodes, known = self.now.plain + self.extra(count) + asking, self.now.plain and not self.now.load.tokens
        return (self.now.plain, with_nodes, self.guard.allowance) if known else (None, None, self.guard.allowance)

    def choose(self, proposals: Many[Proposals], most: int) -> list[list[int]]:
        """For each of the proposals its nodes to verify, ascending: at most `most` together."""
        chosen: list[list[int]] = [[] for _ in proposals]
        load, before, expected = self.now.load, self.now.num_chosen, self.now.expected
        if not self.now.plain or self.now.is_probe:
            return chosen
        affordable = min(self._affordable, WAIT_S * load.rows if load.rows > 1 else math.inf)
        nodes = sorted((-p, i, node) for i, each in enumerate(proposals) for node, p in enumerate(each.survival))
        nodes = nodes[:most]
        self.extra(before + len(nodes))
        curve, taken = self.now.curve, 0
        best = self._value(before, expected)
        for count, (survival, _, _) in enumerate(nodes, 1):
            if curve[before + count] - curve[0] > affordable:
                break
            expected -= survival
            value = self._value(before + count, expected)
            if value > best:
                best, taken = value, count
        if self._since_look >= LOOKS_AGAIN and affordable > 0 and not load.tokens:
            likely = min(sum(-p > LIKELY for p, _, _ in nodes), load.rows + before + 2 * taken)
            if likely > taken and self._cost.is_doubted(load.rows + before + likely):
                taken, self._since_look = likely, 0
        self.now.num_chosen += taken
        for _, i, node in nodes[:taken]:
            chosen[i].append(node)
        return [sorted(each) for each in chosen]

    def _value(self, count: int, expected: float) -> float:
        """Of a step with so many nodes, which is expected to give so many tokens: tokens a second; beside chunks of
        prompts the seconds that nodes save. A token that is accepted saves a later step's share there, or only its own
        row beside a chunk."""
        load, seconds = self.now.load, self.now.curve[count]
        if not load.tokens:
            return expected / seconds
        extra = seconds - self.now.curve[0]
        share = self.token + (extra / count if count else 0.0)
        return (expected - load.rows) * share / 2 - extra
