"""Chooses which proposed nodes a step verifies: as many tokens a second as measured cost and acceptance promise, and no
more than drafts may lose."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from itertools import accumulate

from specserve.speculation.cost import DecodeCost
from specserve.speculation.guard import Guard, Load
from specserve.speculation.tree import Proposals

_MARGIN = 1.01  # times as many tokens a second as without drafts: less is not worth the risk
_FEW = 8  # nodes, as a sequence alone has
_LOOKS_AGAIN, _LIKELY = 32, 0.1  # steps between two in which nodes of that survival are verified to see what they take,
# where that is in doubt: up to as many rows as the step has anyway
_WAIT_S = 0.008  # by which drafts may lengthen a step, for each sequence that decodes, where there are several


class Planner:
    """Joint admission for all sequences of a step. In a step of decoding alone, nodes are taken from the likeliest on
    while that gives more tokens a second, "none at all" included; beside chunks of prompts, while a node is expected to
    save more time than its row takes. What was chosen before in the step counts: all of it together is affordable."""

    def __init__(self, cost: DecodeCost) -> None:
        self.guard = Guard(cost)
        self._cost = cost
        self.load = Load(0)
        self.plain = 0.0  # seconds of the step without drafts and chunks; 0 while nothing is known
        self._curve = [0.0]  # seconds of the step with 0, 1, 2 ... nodes
        self._num_chosen = 0  # nodes of this step so far
        self._expected = 0.0  # tokens of this step, with what was chosen
        self._promised = 0.0  # seconds that asking for chosen drafts will take
        self.is_probe = False  # a step without drafts, which tells what plain decoding takes
        self._since_look = 1
        self._scale = 1.0  # what plain steps are expected to take, times what they took

    def start(self, load: Load) -> None:
        """A step without drafts so far."""
        self.load = load
        self._curve = self._cost.curve(load.rows + load.tokens, _FEW, load.context)
        self.plain = self._curve[0] if not load.tokens else self._cost.seconds(load.rows, load.context)
        self._num_chosen, self._expected, self._promised = 0, float(load.rows), 0.0
        self.guard.begin(load)
        measured = self.guard.plain(load)
        self._scale = self.plain / measured if measured else 1.0
        self.is_probe = self.guard.wants_plain(load)

    def extra(self, count: int) -> float:
        """Seconds that so many nodes add to the step."""
        if count >= len(self._curve):
            load = self.load
            self._curve = self._cost.curve(load.rows + load.tokens, count, load.context)
        return self._curve[count] - self._curve[0]

    def can_draft(self, asking: float = 0.0) -> bool:
        """Whether a row more can be afforded, and `asking` seconds for what is in it."""
        return self._affordable() >= self.extra(self._num_chosen + 1) + self._promised + asking

    def _affordable(self) -> float:
        """Seconds, as they are expected, that drafts of this step may lose."""
        return self.guard.affordable() * self._scale

    def price(self, count: int) -> float:
        """What so many nodes cost, in tokens that plain decoding of one sequence emits in the time."""
        return self.extra(count) * self.load.rows / self.plain if count and self.plain else 0.0

    def speed(self, expected: Many[float], asking: float = 0.0) -> float:
        """Times the tokens a second of plain decoding if all sequences were like this one: with drafts as long as is
        best, of which expected[i] tokens of depth i are accepted, for `asking` seconds each."""
        asked = 1.0 + asking * self.load.rows / self.plain
        sums = accumulate(expected, initial=1.0)
        return max(tokens / (asked + self.price(count)) for count, tokens in enumerate(sums))

    def forecast(self, count: int, asking: float) -> tuple[float | None, float | None, float]:
        """Seconds of the step without drafts, and with so many nodes for which drafters were asked so long; None while
        nothing is known and beside chunks. And the guard's allowance."""
        with_nodes, known = self.plain + self.extra(count) + asking, self.plain and not self.load.tokens
        return (self.plain, with_nodes, self.guard.allowance) if known else (None, None, self.guard.allowance)

    def choose(self, proposals: Many[Proposals], most: int, asking: Many[float] = ()) -> list[list[int]]:
        """For each of the proposals its nodes to verify, ascending: at most `most` together. asking[n] are the seconds
        that n of these nodes would still take to make; without it they are there."""
        chosen: list[list[int]] = [[] for _ in proposals]
        load, plain = self.load, self.plain
        if not plain or self.is_probe:
            return chosen
        affordable = min(self._affordable(), _WAIT_S * load.rows if load.rows > 1 else math.inf)
        nodes = sorted((-p, i, node) for i, each in enumerate(proposals) for node, p in enumerate(each.survival))
        before, expected = self._num_chosen, self._expected
        self.extra(before + min(len(nodes), most))
        curve = self._curve
        promised, taken_promised = self._promised, self._promised
        taken, best = 0, self._value(before, expected, self._promised) * (1.0 if before or load.tokens else _MARGIN)
        for count, (survival, _, _) in enumerate(nodes[:most], 1):
            promised = self._promised + (asking[count] if asking else 0.0)
            if curve[before + count] - curve[0] + promised > affordable:
                break
            expected -= survival
            value = self._value(before + count, expected, promised)
            if value > best:
                best, taken, taken_promised = value, count, promised
                self._expected = expected
        if self._since_look >= _LOOKS_AGAIN and affordable > self._promised and not load.tokens:
            likely = min(sum(-p > _LIKELY for p, _, _ in nodes[:most]), load.rows + before + 2 * taken)
            if likely > taken and self._cost.is_doubted(load.rows + before + likely):
                self._expected -= sum(p for p, _, _ in nodes[taken:likely])
                taken, taken_promised = likely, self._promised + (asking[likely] if asking else 0.0)
                self._since_look = 0
        if taken:
            self._num_chosen, self._promised = before + taken, taken_promised
        for _, i, node in nodes[:taken]:
            chosen[i].append(node)
        for each in chosen:
            each.sort()
        return chosen

    def admit(self, survival: float, asking: float) -> None:
        """Take one node that is worth less than it costs, to learn."""
        self._num_chosen, self._expected = self._num_chosen + 1, self._expected + survival
        self._promised += asking

    def _value(self, count: int, expected: float, promised: float) -> float:
        """Of a step with so many nodes, which is expected to give so many tokens: tokens a second; beside chunks of
        prompts the seconds that nodes save. A token that is accepted saves a later step's share there, or only its own
        row beside a chunk."""
        load, seconds = self.load, self._curve[count] + promised
        if not load.tokens:
            return expected / seconds
        extra = seconds - self._curve[0]
        share = self.plain / load.rows + (extra / count if count else 0.0)
        return (expected - load.rows) * share / 2 - extra

    def end_step(
        self, drafted: int, accepted: int, drafting: float, seconds: float, reading: float = 0.0, repaid: float = 0.0
    ) -> None:
        """The step took `seconds`, of these `drafting` for asking drafters and telling them; `accepted` of `drafted`
        nodes stood. Seconds of `reading` are lent: drafts of their sequences pay them back, `repaid` of all in this
        step, and what is left counts when these end."""
        load = self.load
        self._since_look += 1
        if drafted and load.tokens:
            self.guard.charge(self.extra(drafted) - accepted * self.plain / load.rows)
        self.guard.charge(repaid)
        self.guard.took(load, drafted, accepted, seconds - reading, drafting)
