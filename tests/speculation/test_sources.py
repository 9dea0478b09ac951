"""Drafters that run a model: what their drafts take by length, and what reading a prompt costs before the first one,
which is lent and paid back or not done at all. Times are exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from specserve.runtime.cost import ROWS, StepCost
from specserve.runtime.pack import Step
from specserve.speculation.sources import Asked, SourceCost
from specserve.speculation.tree import Proposals
from specserve.speculation.weighing import Weighing
from specserve.types import Draft, SamplingParams, ScheduledSeq, Sequence, Verdict

PLAIN = 0.010  # seconds of a step without drafts
PER_DRAFT_TOKEN = 0.15 * PLAIN
PER_READ_TOKEN = 0.01 * PLAIN
PROMPT, OUTPUT = 200, 120  # tokens; reading a prompt takes as long as two steps
MOST = 5  # tokens of a draft
RIGHT = 1

Rate = Callable[[int], float]  # of a sequence's number: how likely a draft's token is right, if the one before is


def takes(rows: int) -> float:
    return PLAIN * (1 + 0.02 * (rows - 1))


def drafting(lengths: list[int]) -> float:
    """Seconds of the passes that make such drafts together."""
    passes = [sum(length > depth for length in lengths) for depth in range(MOST)]
    return sum(PER_DRAFT_TOKEN * (1 + 0.05 * (rows - 1)) for rows in passes if rows)


@dataclass
class Outcome:
    seconds: float = 0.0
    plain: float = 0.0  # that plain decoding takes for the same
    read: list[int] = field(default_factory=list)  # the sequences that were read


def run(rate: Rate, num_seqs: int, at_once: int = 1, seed: int = 0) -> Outcome:
    """So many sequences, one after another on `at_once` places."""
    draws, out = np.random.default_rng(seed), Outcome()
    cost = StepCost()
    cost.decoding.begin(np.array([takes(rows) for rows in ROWS]))
    weighing = Weighing(cost.decoding)
    unread: dict[Sequence, int] = {}
    next_one = 0
    while next_one < num_seqs or unread:
        while len(unread) < at_once and next_one < num_seqs:
            seq = Sequence(str(next_one), 0, [0] * (PROMPT + 1), PROMPT, SamplingParams(), 0, OUTPUT)
            seq.drafter = "model"
            weighing.begin([seq])
            unread[seq] = PROMPT
            next_one += 1
        scheduled = [ScheduledSeq(seq, len(seq.tokens) - 1, 1, sampled=True) for seq in unread]
        weighing.start(Step(scheduled, 512, 512))
        asked = {}
        lengths = weighing.choose("model", dict.fromkeys(scheduled, MOST), unread=unread)
        for seq in (each.seq for each in scheduled if each in lengths):
            asked[seq] = Asked(next(length for each, length in lengths.items() if each.seq is seq), unread[seq])
            out.read += [int(seq.request_id)] * (unread[seq] >= PROMPT)
        reading = sum(each.unread for each in asked.values()) * PER_READ_TOKEN
        asking = reading + drafting([each.length for each in asked.values()])
        weighing.learn("model", asked, asking)
        verdicts, drafted = {}, sum(each.length for each in asked.values())
        for seq in unread:
            length, accepted = asked[seq].length if seq in asked else 0, 0
            while accepted < length and draws.random() < rate(int(seq.request_id)):
                accepted += 1
            if length:
                draft = Draft.chain([RIGHT] * accepted + [0] * (length - accepted))
                weighing.verify(seq, Proposals([("model", draft)]), range(length))
            verdicts[seq] = Verdict([RIGHT] * (accepted + 1), list(range(accepted)))
        weighing.record(verdicts)
        rows = len(unread) + drafted
        seconds = takes(rows) + asking
        weighing.end_step(drafted, seconds)
        cost.observe(rows, sum(len(seq.tokens) for seq in unread), 0, 0.0, seconds - asking)
        out.seconds += seconds
        for seq, verdict in verdicts.items():
            out.plain += len(verdict.tokens) * takes(len(unread)) / len(unread)
            seq.tokens += verdict.tokens
            unread[seq] = 0 if seq in asked else unread[seq] + len(verdict.tokens)
        for seq in [seq for seq in unread if seq.num_output >= OUTPUT]:
            weighing.end(seq)
            del unread[seq]
    return out


def test_a_good_model_reads_every_prompt_and_is_faster() -> None:
    told = run(lambda seq: 0.8, 20)
    assert told.read == list(range(20))
    assert told.seconds < 0.75 * told.plain


@pytest.mark.parametrize("at_once", [1, 8])
def test_a_bad_model_costs_no_more_than_the_ledger_allows(at_once: int) -> None:
    told = run(lambda seq: 0.05, 100, at_once)
    assert 1 <= len(told.read) < 45
    assert told.seconds <= 1.02 * told.plain + 2 * PROMPT * PER_READ_TOKEN + 6 * takes(at_once)


def test_who_becomes_good_is_read_again() -> None:
    told = run(lambda seq: 0.0 if seq < 60 else 0.8, 160)
    assert len([seq for seq in told.read if seq >= 130]) > 20
    assert len([seq for seq in told.read if seq < 60]) < 25


def test_who_becomes_bad_is_soon_left_alone() -> None:
    told = run(lambda seq: 0.8 if seq < 60 else 0.0, 160)
    assert len([seq for seq in told.read if seq < 60]) > 40
    assert len([seq for seq in told.read if seq >= 100]) < 25
    assert told.seconds < told.plain


def test_lengths_nobody_asked_for() -> None:
    cost = SourceCost()
    assert (cost.of(3), cost.reading(100)) == (0.0, 0.0)
    assert cost.learn([Asked(2, 0)], 0.002) == (0.002, [0.0])
    assert cost.of(2) == 0.002
    assert cost.of(1) == 0.002, "a shorter one may take as long"
    assert cost.of(4) == pytest.approx(0.004)
    counted, read = cost.learn([Asked(2, 100), Asked(2, 300)], 0.044)
    assert counted == pytest.approx(0.004)
    assert read == pytest.approx([0.01, 0.03])
    assert cost.reading(50) == pytest.approx(0.005)
    assert cost.reading(1) == 0.0, "that is read on the way"
    assert cost.learn([Asked(2, 0)], 10.0)[0] == pytest.approx(8 * 0.002), "the machine paused"


def test_passes_are_shared() -> None:
    cost = SourceCost()
    assert cost.of(3, 1) == 0.0, "nothing is known"
    assert cost.learn([Asked(2)], 0.010)[0] == 0.010
    for _ in range(3):
        cost.learn([Asked(2)], 0.002)
    assert (cost.of(2, 1), cost.of(1, 1), cost.of(4, 1)) == (0.002, 0.002, 0.004)
    assert cost.of(2, 9) == 0.002, "nobody asked for so many yet"
    cost.learn([Asked(2), Asked(1), Asked(2), Asked(2)], 0.004)
    assert (cost.of(2, 1), cost.of(2, 4), cost.of(2, 7), cost.of(2, 30)) == (0.002, 0.001, 0.001, 0.001)
    for _ in range(6):
        cost.learn([Asked(2)], 0.002)
    assert cost.learn([Asked(2)], 1.0)[0] == pytest.approx(8 * 0.002), "the machine paused"
    assert 0.002 < cost.of(2, 1) < 0.004
