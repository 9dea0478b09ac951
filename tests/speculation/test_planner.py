"""What drafts may cost: with exact times, against drafters that are right now and then, drift, lie, are slow or always
wrong, the loss stays within the ledger's bound, and where drafts pay they are soon made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from specserve.runtime.cost import ROWS, StepCost
from specserve.runtime.pack import Step
from specserve.speculation.sources import LOOKUPS, Asked
from specserve.speculation.tree import Proposals
from specserve.speculation.weighing import Weighing
from specserve.types import Draft, SamplingParams, ScheduledSeq, Sequence, Verdict

PLAIN = 0.004  # seconds of a step of one row
LENGTH = 6  # of what is proposed
RIGHT, WRONG, OTHER = 1, 2, 3  # tokens

Acceptance = Callable[[int, int, int], bool]  # of step, sequence and depth: whether that node is right


def flat(rows: int) -> float:
    """Many rows cost little more than one, as with VNNI."""
    return PLAIN * (1 + 0.02 * (rows - 1) + 0.002 * max(0, rows - 8) ** 1.5)


def steep(rows: int) -> float:
    """A row costs a third of a step, as in a large batch."""
    return PLAIN * (1 + 0.34 * (rows - 1))


@dataclass
class Run:
    seconds: float = 0.0
    plain: float = 0.0  # seconds that plain decoding takes for as many tokens
    drafted: list[int] | None = None  # nodes of each step


class Machine:
    """Decodes sequences that never end, with exact times. `asking` are the seconds that one proposal takes; with
    `is_whole` drafts are verified as they are, so that their lengths are decided before; with `is_head` whether to ask
    is, once there is what was `looked_up` at no cost, and with `passes` for how many tokens, each for `asking` seconds
    and less where sequences share a pass. What it `knows` of costs at first it believes for ever unless it `learns`."""

    def __init__(
        self,
        takes: Callable[[int], float],
        is_right: Acceptance,
        num_seqs: int = 1,
        asking: float = 2e-5,
        confidence: float = 0.5,
        knows: Callable[[int], float] | None = None,
        is_whole: bool = False,
        is_head: bool = False,
        passes: bool = False,
        shaped: Callable[[Draft], Draft] = lambda draft: draft,
        looked_up: Acceptance | None = None,
        slower: Callable[[int], float] = lambda at: 1.0,
        learns: bool = True,
    ) -> None:
        self.cost = StepCost()
        self.cost.decoding.begin(np.array([(knows or takes)(rows) for rows in ROWS]))
        self.weighing = Weighing(self.cost.decoding)
        self.takes, self.is_right, self.asking, self.confidence = takes, is_right, asking, confidence
        self.is_whole, self.is_head, self.passes = is_whole, is_head or passes, passes
        self.shaped, self.looked_up, self.slower, self.learns = shaped, looked_up, slower, learns
        self.num_asked = 0  # of the late ones
        self.seqs = [Sequence(str(i), 0, [0] * 20, 10, SamplingParams(), 0, 10**9) for i in range(num_seqs)]
        self.weighing.begin(self.seqs)

    def run(self, num_steps: int, first: int = 0) -> Run:
        run = Run(drafted=[])
        for at in range(first, first + num_steps):
            self._step(at, run)
        return run

    def _step(self, at: int, run: Run) -> None:
        weighing, scheduled = self.weighing, [ScheduledSeq(seq, 19, 1, sampled=True) for seq in self.seqs]
        group = dict.fromkeys(scheduled, LENGTH)
        weighing.start(Step(scheduled, 512, 512))
        lengths: dict[Sequence, int] = {}
        if self.is_whole:
            lengths = {each.seq: length for each, length in weighing.choose("none", group).items()}
            asking = self.asking * len(lengths)
            weighing.learn("none", {seq: Asked(length) for seq, length in lengths.items()}, asking)
            for seq, length in lengths.items():
                draft = self._draft(at, seq)
                cut = Draft(draft.tokens[:length], draft.parents[:length])
                weighing.verify(seq, Proposals([("none", cut)]), range(length))
        else:
            there, asking = {each: Proposals() for each in scheduled}, 0.0
            looked_up, source = (self.looked_up, "looked up") if self.is_head else (self.is_right, "source")
            if looked_up is not None:
                selected = weighing.choose(LOOKUPS, group)
                for each in selected:
                    there[each].add(source, self._draft(at, each.seq, looked_up))
                asking = 0.0 if self.is_head else self.asking * len(selected)
                weighing.learn(LOOKUPS, {each.seq: Asked(1) for each in selected}, asking)
            if self.is_head:
                late = weighing.choose("head", group, there, is_one_pass=not self.passes)
                self.num_asked += len(late)
                for each, length in late.items():
                    there[each].add("head", _cut(self.shaped(self._draft(at, each.seq)), length))
                asking = self._passes(list(late.values())) if self.passes else self.asking * len(late)
                weighing.learn("head", {each.seq: Asked(length) for each, length in late.items()}, asking)
            proposals = [(each.seq, found) for each, found in there.items() if len(found)]
            for (seq, found), nodes in zip(proposals, weighing.admit(proposals, 512), strict=True):
                weighing.verify(seq, found, nodes)
                lengths[seq] = len(nodes)
        verdicts = {seq: self._verdict(at, seq, lengths.get(seq, 0)) for seq in self.seqs}
        weighing.record(verdicts)
        drafted, num_seqs = sum(lengths.values()), len(self.seqs)
        seconds = self.slower(at) * self.takes(num_seqs + drafted) + asking
        weighing.end_step(drafted, seconds)
        if self.learns:
            self.cost.observe(num_seqs + drafted, 20 * num_seqs, 0, 0.0, seconds - asking)
        num_tokens = sum(len(verdict.tokens) for verdict in verdicts.values())
        run.seconds += seconds
        run.plain += num_tokens * self.slower(at) * self.takes(num_seqs) / num_seqs
        assert run.drafted is not None
        run.drafted.append(drafted)

    def _passes(self, lengths: list[int]) -> float:
        """Seconds of passes that make such drafts together."""
        rows = [sum(length > depth for length in lengths) for depth in range(LENGTH)]
        return sum(self.asking * (1 + 0.05 * (each - 1)) for each in rows if each)

    def _draft(self, at: int, seq: Sequence, is_right: Acceptance | None = None) -> Draft:
        right = [(is_right or self.is_right)(at, int(seq.request_id), depth) for depth in range(LENGTH)]
        return Draft.chain(
            [RIGHT if r else WRONG for r in right], confidence=np.full(LENGTH, self.confidence, np.float32)
        )

    def _verdict(self, at: int, seq: Sequence, length: int) -> Verdict:
        accepted = 0
        while accepted < length and self.is_right(at, int(seq.request_id), accepted):
            accepted += 1
        return Verdict([RIGHT] * (accepted + 1), list(range(accepted)))


def _cut(draft: Draft, length: int) -> Draft:
    assert draft.confidence is not None
    return Draft(draft.tokens[:length], draft.parents[:length], confidence=draft.confidence[:length])


def _with_siblings(draft: Draft) -> Draft:
    """Each token behind one that is wrong for sure, in a draft of as many nodes."""
    tokens = [token for right in draft.tokens.tolist() for token in (OTHER, right)][: len(draft)]
    parents = [node // 2 * 2 - 1 for node in range(len(draft))]
    return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), confidence=draft.confidence)


def chance(*parts: float) -> float:
    """A number in [0, 1) that follows from others."""
    return math.sin(sum((i + 1) * 12.9898 * part for i, part in enumerate(parts)) + 78.233) * 43758.5453 % 1.0


ADVERSARIES: dict[str, Acceptance] = {
    "never": lambda at, seq, depth: False,
    "every other step": lambda at, seq, depth: at % 2 == 0,
    "ten and ten": lambda at, seq, depth: at // 10 % 2 == 0,
    "a hundred and a hundred": lambda at, seq, depth: at // 100 % 2 == 0,
    "five hundred good ones first": lambda at, seq, depth: at < 500,
    "drifting": lambda at, seq, depth: chance(at, seq, depth) < 0.5 + 0.5 * math.sin(at / 200),
    "one in three": lambda at, seq, depth: chance(at, seq, depth) < 1 / 3,
    "one bad among good": lambda at, seq, depth: seq != 0,
    "one good among bad": lambda at, seq, depth: seq == 0,
}


@pytest.mark.each_choice(rounds=2)
@pytest.mark.parametrize("takes", [flat, steep])
@pytest.mark.parametrize("num_seqs", [1, 6])
@pytest.mark.parametrize("name", ADVERSARIES)
def test_the_loss_is_bounded(name: str, num_seqs: int, takes: Callable[[int], float]) -> None:
    run = Machine(takes, ADVERSARIES[name], num_seqs).run(1200)
    assert run.seconds <= 1.02 * run.plain + 8 * takes(num_seqs)


@pytest.mark.each_choice(rounds=2)
@pytest.mark.parametrize("asking", [2e-5, PLAIN / 4, 5 * PLAIN])
@pytest.mark.parametrize("num_seqs", [1, 6])
@pytest.mark.parametrize("name", ["never", "ten and ten", "five hundred good ones first", "one good among bad"])
def test_the_loss_is_bounded_where_drafts_are_verified_whole(name: str, num_seqs: int, asking: float) -> None:
    """Together the sequences of a step spend no more than there is."""
    run = Machine(steep, ADVERSARIES[name], num_seqs, asking / num_seqs, is_whole=True).run(800)
    assert run.seconds <= 1.02 * run.plain + 4 * asking + 8 * steep(num_seqs)


@pytest.mark.each_choice(rounds=2)
@pytest.mark.parametrize("asking", [PLAIN / 4, 5 * PLAIN])
@pytest.mark.parametrize("num_seqs", [1, 6])
@pytest.mark.parametrize("name", ["never", "ten and ten", "drifting", "one good among bad"])
def test_the_loss_is_bounded_where_asking_takes_a_while(name: str, num_seqs: int, asking: float) -> None:
    run = Machine(steep, ADVERSARIES[name], num_seqs, asking / num_seqs, is_head=True).run(800)
    assert run.seconds <= 1.02 * run.plain + 4 * asking + 8 * steep(num_seqs)


@pytest.mark.each_choice
@pytest.mark.parametrize("asking", [PLAIN / 20, PLAIN])
@pytest.mark.parametrize("num_seqs", [1, 6])
@pytest.mark.parametrize("name", ADVERSARIES)
def test_the_loss_is_bounded_where_each_token_takes_a_pass(name: str, num_seqs: int, asking: float) -> None:
    run = Machine(steep, ADVERSARIES[name], num_seqs, asking, passes=True).run(800)
    assert run.seconds <= 1.02 * run.plain + 4 * LENGTH * asking + 8 * steep(num_seqs)


@pytest.mark.parametrize("num_seqs", [1, 6])
def test_drafts_of_passes_are_as_long_as_pays(num_seqs: int) -> None:
    for depth, least, most in ((LENGTH, 0.8 * LENGTH, LENGTH), (2, 1.9, 2.7)):
        machine = Machine(flat, lambda at, seq, own, depth=depth: own < depth, num_seqs, PLAIN / 8, passes=True)  # type: ignore[misc]
        machine.run(300)
        run = machine.run(200, first=300)
        assert run.drafted is not None
        assert least <= np.mean(run.drafted) / num_seqs <= most
        assert run.seconds < 0.85 * run.plain


@pytest.mark.parametrize("num_seqs", [1, 6])
def test_what_takes_a_while_is_asked_where_it_pays(num_seqs: int) -> None:
    """Nearly always if it is mostly right; seldom where it is wrong, or too slow, or what costs nothing is as good."""
    good: Acceptance = lambda at, seq, depth: chance(at, seq, depth) < 0.7  # noqa: E731
    machine = Machine(flat, good, num_seqs, PLAIN / 4 / num_seqs, is_head=True)
    run = machine.run(600)
    assert machine.num_asked > (0.9 if num_seqs == 1 else 0.75) * 600 * num_seqs
    assert run.seconds < (0.8 if num_seqs == 1 else 0.9) * run.plain
    for is_right, asking, looked_up in (
        (ADVERSARIES["never"], PLAIN / 4, None),
        (good, 4 * PLAIN, None),
        (good, PLAIN / 4, good),
    ):
        machine = Machine(flat, is_right, num_seqs, asking / num_seqs, is_head=True, looked_up=looked_up)
        machine.run(300)
        before = machine.num_asked
        machine.run(300, first=300)
        assert machine.num_asked - before < 0.1 * 300 * num_seqs


def test_a_tree_is_as_good_as_its_best_branch() -> None:
    """Half of its nodes are wrong."""
    good: Acceptance = lambda at, seq, depth: chance(at, seq, depth) < 0.7  # noqa: E731
    machine = Machine(flat, good, asking=PLAIN / 2, is_head=True, shaped=_with_siblings)
    machine.run(1000)
    before = machine.num_asked
    run = machine.run(400, first=1000)
    assert machine.num_asked - before > 0.9 * 400
    assert run.seconds < 0.9 * run.plain


def test_what_takes_a_while_is_asked_again_when_it_has_become_good() -> None:
    machine = Machine(flat, lambda at, seq, depth: at >= 600, asking=PLAIN / 4, is_head=True)
    machine.run(600)
    machine.run(400, first=600)
    before = machine.num_asked
    machine.run(100, first=1000)
    assert machine.num_asked - before > 80


@pytest.mark.parametrize("num_seqs", [1, 16])
def test_whole_drafts_are_as_long_as_pays(num_seqs: int) -> None:
    right = Machine(flat, lambda at, seq, depth: True, num_seqs, is_whole=True).run(500)
    assert right.drafted is not None
    assert max(right.drafted[-100:]) > 0.6 * num_seqs * LENGTH
    assert right.seconds < 0.6 * right.plain
    two = Machine(flat, lambda at, seq, depth: depth < 2, num_seqs, is_whole=True).run(500)
    assert two.drafted is not None
    assert max(two.drafted[-100:]) <= 3 * num_seqs


@pytest.mark.each_choice
@pytest.mark.parametrize("knows", [lambda rows: PLAIN, lambda rows: PLAIN * rows], ids=["too cheap", "too dear"])
@pytest.mark.parametrize("name", ADVERSARIES)
def test_costs_that_were_measured_wrong_are_put_right(name: str, knows: Callable[[int], float]) -> None:
    run = Machine(steep, ADVERSARIES[name], 4, knows=knows).run(1200)
    assert run.seconds <= 1.02 * run.plain + 80 * steep(4)


SLOWER: dict[str, Callable[[int], float]] = {
    "now and then": lambda at: 1.5 if at // 100 % 2 else 1.0,
    "from now on": lambda at: 2.0 if at > 50 else 1.0,
    "a pause at the start": lambda at: 8.0 if at == 1 else 1.0,
    "pauses": lambda at: 5.0 if at % 40 == 7 else 1.0,
    "restless": lambda at: 0.8 + 0.5 * chance(at),
}

KINDS: dict[str, dict[str, Any]] = {
    "looked up": {},
    "whole": {"is_whole": True, "asking": PLAIN / 8},
    "a pass": {"is_head": True, "asking": PLAIN / 8},
    "passes": {"passes": True, "asking": PLAIN / 16},
}


@pytest.mark.each_choice(rounds=4)
@pytest.mark.parametrize("drifts", ["", "now and then", "restless"])
@pytest.mark.parametrize("num_seqs", [1, 6])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("times", [1.4, 1.9, None])
def test_whatever_is_believed_the_loss_is_bounded(times: float | None, kind: str, num_seqs: int, drifts: str) -> None:
    """Steps with drafts take so many times what is believed, or each number of rows half to three times, and nothing is
    learned of it; also where the machine drifts."""

    def takes(rows: int) -> float:
        wrong = times or 0.5 * 6 ** chance(rows)
        return flat(num_seqs) if rows <= num_seqs else max(flat(num_seqs), flat(rows) * wrong)

    often: Acceptance = lambda at, seq, depth: chance(at, seq, depth) < 0.45  # noqa: E731
    slower = SLOWER[drifts] if drifts else lambda at: 1.0
    run = Machine(takes, often, num_seqs, knows=flat, learns=False, slower=slower, **KINDS[kind]).run(800)
    assert run.seconds <= 1.02 * run.plain + (24 if drifts else 8) * flat(num_seqs)


@pytest.mark.each_choice
@pytest.mark.parametrize(("num_seqs", "share"), [(1, 0.9), (8, 0.4)])
@pytest.mark.parametrize(("times", "steps"), [(1.6, 400), (2.2, 600), (3.5, 800), (10.0, 1000)])
def test_rows_that_seemed_dear_are_tried(times: float, steps: int, num_seqs: int, share: float) -> None:
    """The start was measured while something else ran: a row more seemed to make steps so many times longer. Several
    sequences have many numbers of rows, of which each is measured by itself."""
    drafted = calm = 0
    for text in range(3):  # one alone says little
        often: Acceptance = lambda at, seq, depth, text=text: chance(at + 977 * text, seq, depth) < 0.6  # type: ignore[misc]  # noqa: E731
        machine = Machine(flat, often, num_seqs, knows=lambda rows: flat(rows) * (times if rows > num_seqs else 1.0))
        machine.run(steps)
        drafted += sum(machine.run(200, first=steps).drafted or ())
        calm += sum(Machine(flat, often, num_seqs).run(200).drafted or ())
    assert drafted > share * calm


@pytest.mark.parametrize("num_seqs", [1, 6])
@pytest.mark.parametrize("takes", [flat, steep])
def test_a_drafter_that_lies_about_its_confidence(takes: Callable[[int], float], num_seqs: int) -> None:
    run = Machine(takes, ADVERSARIES["never"], num_seqs, confidence=1.0).run(1200)
    assert run.seconds <= 1.02 * run.plain + 8 * takes(num_seqs)


@pytest.mark.parametrize("name", ["never", "a hundred and a hundred", "one in three"])
@pytest.mark.parametrize("asking", [PLAIN / 20, PLAIN / 2, 5 * PLAIN])
def test_a_slow_drafter(asking: float, name: str) -> None:
    run = Machine(flat, ADVERSARIES[name], asking=asking).run(1200)
    assert run.seconds <= 1.02 * run.plain + 4 * asking + 8 * PLAIN


@pytest.mark.parametrize("num_seqs", [1, 16])
def test_right_drafts_are_made_at_full_length(num_seqs: int) -> None:
    run = Machine(flat, lambda at, seq, depth: True, num_seqs).run(500)
    assert run.seconds < 1.3 / (1 + LENGTH) * run.plain * flat(num_seqs * (1 + LENGTH)) / flat(num_seqs)


@pytest.mark.parametrize(("num_seqs", "most"), [(1, LENGTH), (2, 5), (16, 42)])
def test_drafts_make_nobody_else_wait_long(num_seqs: int, most: int) -> None:
    """On a slow machine, where right drafts pay at any length: 8 ms for each sequence, if there are several. What rows
    take that were not measured lately is still looked at."""
    run = Machine(lambda rows: 0.02 + 0.003 * (rows - 1), lambda at, seq, depth: True, num_seqs).run(200)
    assert run.drafted is not None
    assert sum(drafted > most for drafted in run.drafted) <= 200 / 32
    assert sum(drafted == most for drafted in run.drafted) > 150


@pytest.mark.parametrize("name", SLOWER)
def test_a_slow_machine_is_no_fault_of_the_drafts(name: str) -> None:
    """Drafts that pay are made all the time; a run with exact times of which none is slow is what to compare with."""
    often: Acceptance = lambda at, seq, depth: chance(at, seq, depth) < 0.6  # noqa: E731
    calm = Machine(flat, often).run(600).drafted
    slow = Machine(flat, often, slower=SLOWER[name]).run(600)
    assert calm is not None and slow.drafted is not None
    assert sum(map(bool, slow.drafted)) > 0.85 * sum(map(bool, calm))


@pytest.mark.parametrize("name", ADVERSARIES)
def test_a_slow_machine_hides_no_loss(name: str) -> None:
    """But for two steps each time that it changes."""
    run = Machine(steep, ADVERSARIES[name], 4, slower=SLOWER["now and then"]).run(1200)
    assert run.seconds <= 1.02 * run.plain + (8 + 2 * 12) * steep(4)


@pytest.mark.parametrize("num_seqs", [1, 16])
@pytest.mark.parametrize("bad", [50, 600])
def test_drafting_begins_again_within_32_steps(bad: int, num_seqs: int) -> None:
    machine = Machine(flat, lambda at, seq, depth: at >= bad, num_seqs)
    machine.run(bad)
    after = machine.run(32, first=bad).drafted
    assert after is not None
    assert after[-1] >= num_seqs * LENGTH / 2 or max(after) >= num_seqs * LENGTH / 2


def test_what_is_worth_nothing_is_not_drafted() -> None:
    """A chance that does not pay for a row of a large batch, and would for a row of a small one."""
    often: Acceptance = lambda at, seq, depth: chance(at, seq, depth) < 0.3  # noqa: E731
    drafted = Machine(steep, often, 8).run(1000).drafted
    alone = Machine(flat, often).run(1000).drafted
    assert drafted is not None and alone is not None
    assert sum(drafted[500:]) < 0.02 * 500 * 8
    assert sum(alone[500:]) > 300
