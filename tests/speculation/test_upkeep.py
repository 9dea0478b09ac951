"""A drafter that is told of steps rests where it does not pay for that, and is tried again ever more seldom."""

from __future__ import annotations

import itertools
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, strategies as st

from specserve import LLM
from specserve.bench.drive import NoTarget
from specserve.checkpoint.trials import Trial, TrialFile, all_trials
from specserve.doctor import examine
from specserve.engine import recall
from specserve.runtime.cost import ROWS, DecodeCost
from specserve.runtime.pack import Step
from specserve.speculation.base import DraftRequest, Needs, SequenceView, StepReport
from specserve.speculation.constants import (
    MOST_HALVED,
    TRIAL_LOSES,
    TRIAL_PAYS,
    TRIAL_STEPS,
    UPKEEP_SHARE,
)
from specserve.speculation.controller import DraftController
from specserve.speculation.host import DraftHost
from specserve.speculation.policy import Policy
from specserve.speculation.upkeep import Upkeep
from specserve.speculation.weighing import Weighing
from specserve.testing import write_tiny_model
from specserve.types import Draft, SamplingParams, ScheduledSeq, Sequence, Verdict

VOCABULARY = 50
PLAIN = 0.01


def run(upkeep: Upkeep, saved: float, num_steps: int, plain: float = PLAIN) -> None:
    for _ in range(num_steps):
        upkeep.charge(0.001)
        upkeep.took(saved + 0.001, plain, plain)


def steps_at_rest(upkeep: Upkeep) -> int:
    assert upkeep.is_resting
    count = 0
    while upkeep.is_resting:
        upkeep.took(0.0, PLAIN, PLAIN)
        count += 1
    return count


def test_a_trial_ends_after_its_steps_and_says_what_was_saved() -> None:
    upkeep = Upkeep()
    run(upkeep, -0.0001, TRIAL_STEPS - 1)
    assert not upkeep.is_resting, "nobody knows yet"
    run(upkeep, -0.0001, 1)
    assert upkeep.is_resting
    assert (upkeep.num_failed, upkeep.num_steps) == (1, TRIAL_STEPS)
    assert upkeep.saved == pytest.approx(-0.0001 * TRIAL_STEPS)
    pays = Upkeep()
    run(pays, 0.0001, 10 * TRIAL_STEPS)
    assert (pays.is_resting, pays.num_failed) == (False, 0)


def test_one_that_loses_much_rests_at_once() -> None:
    upkeep = Upkeep()
    run(upkeep, -PLAIN, TRIAL_LOSES - 1)
    assert not upkeep.is_resting
    run(upkeep, -PLAIN, 2)
    assert upkeep.is_resting


def test_it_is_tried_again_ever_more_seldom_and_who_pays_is_trusted() -> None:
    upkeep, waited = Upkeep(), []
    for _ in range(MOST_HALVED + 3):
        run(upkeep, -0.0001, TRIAL_STEPS)
        waited.append(steps_at_rest(upkeep))
    first = TRIAL_PAYS / UPKEEP_SHARE
    assert waited[0] == pytest.approx(first, rel=0.01)
    for before, after in itertools.pairwise(waited[: MOST_HALVED + 1]):
        assert after == pytest.approx(2 * before, rel=0.01)
    assert waited[-1] == pytest.approx(waited[-2], rel=0.01)
    run(upkeep, 0.001, TRIAL_STEPS)
    assert upkeep.num_failed == 0
    run(upkeep, -0.001, 10 * TRIAL_PAYS + TRIAL_STEPS)
    assert upkeep.is_resting
    assert steps_at_rest(upkeep) < 2 * first


def test_what_it_saved_long_ago_does_not_count() -> None:
    upkeep = Upkeep()
    run(upkeep, 0.005, 2000)
    run(upkeep, -0.001, 10 * TRIAL_PAYS + 1)
    assert upkeep.is_resting, "of 10 s that it saved, 4 plain steps count"


@given(st.lists(st.tuples(st.floats(-0.002, 0.002), st.integers(1, 400)), max_size=30))
def test_what_trials_lose_is_bounded(stretches: list[tuple[float, int]]) -> None:
    """Whatever it saves and loses when: over all time no more than its share, and what one trial and its gains may."""
    upkeep, lost, total = Upkeep(), 0.0, 0.0
    for saved, count in stretches:
        for _ in range(count):
            total += PLAIN
            lost -= 0.0 if upkeep.is_resting else saved
            upkeep.took(saved, PLAIN, PLAIN)
            assert lost <= UPKEEP_SHARE * total + (TRIAL_LOSES + TRIAL_PAYS + 1) * PLAIN


def test_prompts_count_and_are_no_steps_of_a_trial() -> None:
    upkeep = Upkeep()
    for _ in range(2 * TRIAL_STEPS):
        upkeep.charge(0.0001)
        upkeep.took(0.0, PLAIN, 0.0)
    assert not upkeep.is_resting
    assert upkeep.num_steps == 0
    run(upkeep, 0.0, TRIAL_STEPS)
    assert upkeep.is_resting


class Told:
    """Drafts a token, and remembers for whom it has been begun and of whom it is told."""

    def __init__(self, *, is_right: bool, needs: Needs | None = None) -> None:
        self.needs = needs or Needs()
        self.is_right = is_right
        self.known: set[Sequence] = set()
        self.num_told = 0

    def begin(self, seq: SequenceView) -> None:
        assert seq._seq not in self.known
        self.known.add(seq._seq)

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        assert all(seq._seq in self.known for seq, _ in requests)
        return [Draft.chain([1] * most) for _, most in requests]

    def observe(self, step: StepReport) -> None:
        assert all(each.seq._seq in self.known for each in step.seqs)
        self.num_told += 1

    def end(self, seq: SequenceView) -> None:
        self.known.remove(seq._seq)


class Roomy:
    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        return True


class Drive:
    """Steps of one sequence after another, in virtual time: a call of the clock is 10 us, telling 0.3 ms."""

    def __init__(self, drafter: Told, monkeypatch: pytest.MonkeyPatch, *, is_trimmable: bool = True) -> None:
        ticks = itertools.count(step=1e-5)
        self.late = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) + self.late)
        cost = DecodeCost()
        cost.begin(np.array([0.01 + 0.0005 * rows for rows in ROWS]))
        self.drafter, self.weighing = drafter, Weighing(cost)
        self.host = DraftHost(drafter, VOCABULARY, 5.0, "told")
        self.host.is_trimmable = is_trimmable
        self.host._worker = None  # a thread would have a clock of its own
        target: Any = NoTarget()
        policy = Policy(self.host, 3, 10**6, target, lambda phase: nullcontext())
        self.controller = DraftController(policy, cast(Any, Roomy()), lambda phase: nullcontext(), self.weighing)
        self.seqs: list[Sequence] = []

    def begin(self) -> Sequence:
        params = SamplingParams()
        seq = Sequence(request_id="r", index=0, tokens=[1, 2, 3], num_prompt=2, params=params, seed=0, max_tokens=10**6)
        self.controller.begin([seq], None)
        self.seqs.append(seq)
        return seq

    def end(self, seq: Sequence) -> None:
        self.seqs.remove(seq)
        self.controller.end(seq)

    def step(self) -> int:
        """Returns how many draft rows it had."""
        rows = enumerate(self.seqs)
        step = Step([ScheduledSeq(seq, len(seq.tokens) - 1, 1, True, first_row=row) for row, seq in rows], 99, 99)
        self.controller.draft(step)
        verdicts, accepted = {}, 0
        for each in step.seqs:
            count = len(each.draft) if self.drafter.is_right else 0
            verdicts[each.seq] = Verdict([1] * count + [1 if self.drafter.is_right else 2], list(range(count)))
            each.seq.tokens += verdicts[each.seq].tokens
            accepted += count
        told = self.drafter.num_told
        self.controller.observe(step, verdicts, {})
        self.late += 0.0003 * (self.drafter.num_told - told)
        drafted = sum(len(each.draft) for each in step.seqs)
        telling = 0.0003 * (self.drafter.num_told - told)
        self.controller.upkeep.setdefault("told", Upkeep()).charge(telling)
        self.controller.end_step(drafted, 0.01 + 0.0005 * (1 + drafted) + telling)
        return drafted


@pytest.mark.parametrize("is_trimmable", [True, False])
def test_who_does_not_pay_is_told_no_more_and_has_no_sequences(
    is_trimmable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = Drive(drafter := Told(is_right=False), monkeypatch, is_trimmable=is_trimmable)
    first, second = drive.begin(), drive.begin()
    for _ in range(TRIAL_STEPS):
        drive.step()
    assert drive.host.is_resting
    assert drafter.known == set()
    told = drafter.num_told
    assert 0 < told <= TRIAL_STEPS
    third = drive.begin()
    for _ in range(100):
        assert drive.step() == 0
    assert drafter.num_told == told
    for seq in (second, third):
        drive.end(seq)
    for _ in range(int(TRIAL_LOSES / UPKEEP_SHARE)):
        drive.step()
        if not drive.host.is_resting:
            break
    assert not drive.host.is_resting, "there is another trial"
    drafter.is_right = True  # the text has changed
    fourth = drive.begin()
    drafted = [drive.step() for _ in range(2 * TRIAL_STEPS)]
    assert drafter.known == {first, fourth}
    assert sum(drafted[TRIAL_STEPS:]) > TRIAL_STEPS
    assert not drive.host.is_resting
    assert drive.controller.upkeep["told"].num_failed == 0
    for seq in (first, fourth):
        drive.end(seq)
    assert drafter.known == set()
    assert not drive.controller.policy.active


def test_one_that_reads_hidden_states_gets_new_sequences_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that are there it has missed some."""
    drive = Drive(drafter := Told(is_right=False, needs=Needs(hidden_layers=(0,))), monkeypatch)
    old = drive.begin()
    monkeypatch.setattr(drive.host, "observe", lambda *rest: None)  # there are no hidden states here
    drive.controller.policy.rest(drive.host)
    drive.controller.policy.wake(drive.host)
    new = drive.begin()
    drive.step()
    assert drive.controller.policy.parts == {old: [], new: [drive.host]}
    assert drafter.known == {new}


def test_what_pays_is_told_of_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive(drafter := Told(is_right=True), monkeypatch)
    drive.begin()
    drafted = [drive.step() for _ in range(4 * TRIAL_STEPS)]
    assert drafter.num_told == 4 * TRIAL_STEPS
    assert sum(drafted) > 8 * TRIAL_STEPS
    assert drive.controller.upkeep["told"].saved > 0


def test_a_drafter_rests_at_first_that_failed_in_an_earlier_run(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive(drafter := Told(is_right=True), monkeypatch)
    drive.controller.recall({"told": 2, "other": 1})
    drive.begin()
    assert [drive.step() for _ in range(100)] == [0] * 100
    assert drafter.num_told == 0
    found: list[Any] = []
    drive.controller.keep_for_next_start = found.append
    drive.controller.close()
    assert found[0]["told"].num_failed == 2


def test_without_weighing_nobody_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive(drafter := Told(is_right=False), monkeypatch)
    drive.controller.weighing = None
    drive.begin()
    for _ in range(2 * TRIAL_STEPS):
        drive.step()
    assert drafter.num_told == 2 * TRIAL_STEPS


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path))
    return tmp_path / "drafters"


KEY = {"folder": "/models/one", "weights": "int8", "version": "1"}
FOUND = {"recycle": Trial(2, 300, -0.018, "2026-11-28")}


def test_what_was_found_is_there_at_the_next_start_of_the_same_run_alone(home: Path) -> None:
    TrialFile(KEY).write(FOUND)
    assert TrialFile(dict(reversed(KEY.items()))).read() == FOUND
    assert TrialFile({**KEY, "weights": "int4"}).read() == {}
    assert list(all_trials()) == [(KEY, FOUND)]
    assert [path.suffix for path in home.iterdir()] == [".json"], "and nothing else is left there"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"run": 1}', '{"run": {}, "drafters": {}}', "\udcff", "[" * 10_000],
    ids=["empty", "cut", "list", "object", "number", "nothing", "no UTF-8", "deep"],
)
def test_a_damaged_file_costs_another_trial_and_nothing_else(home: Path, text: str) -> None:
    file = TrialFile(KEY)
    file.write(FOUND)
    file.path.write_bytes(text.encode(errors="surrogateescape"))
    assert file.read() == {}
    assert list(all_trials()) == []
    file.write(FOUND)
    assert file.read() == FOUND


@pytest.mark.parametrize("each", [{"num_failed": -1}, {"num_failed": "2"}, {"saved": "much"}, {"more": 1}])
def test_what_no_run_wrote_is_not_believed(home: Path, each: dict[str, Any]) -> None:
    file = TrialFile(KEY)
    file.write(FOUND)
    held = json.loads(file.path.read_text())
    held["drafters"]["recycle"] |= each
    file.path.write_text(json.dumps(held))
    assert file.read() == {}


def test_a_folder_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "file" / "home"))
    file = TrialFile(KEY)
    file.write(FOUND)
    assert "not kept for the next start" in caplog.text
    assert file.read() == {}


def test_the_oldest_of_many_files_go(home: Path) -> None:
    for number in range(70):
        file = TrialFile({**KEY, "number": number})
        file.write(FOUND)
        os.utime(file.path, (number, number))
    numbers = sorted(key["number"] for key, _ in all_trials())
    assert len(numbers) <= 65
    assert numbers[-1] == 69
    assert 0 not in numbers


def test_a_run_of_few_steps_tells_nothing(home: Path) -> None:
    file, least = TrialFile(KEY), recall._LEAST_STEPS
    short = Upkeep(num_failed=1, num_steps=least - 1, seconds=1.0, saved=-0.5)
    recall._keep(file, {}, {"recycle": short})
    assert not home.exists()
    recall._keep(file, FOUND, {"recycle": short, "block": Upkeep(num_steps=least, seconds=1.0, saved=0.5)})
    assert {name: each[:3] for name, each in file.read().items()} == {
        "recycle": FOUND["recycle"][:3],
        "block": (0, least, 0.5),
    }


def test_doctor_shows_what_was_found_of_its_model(home: Path, tiny: Path) -> None:
    key = {"folder": str(tiny), "kernels": "int8 float32, avx2", "drafts": "auto, 5 tokens, coupled", "version": "1"}
    TrialFile(key).write(FOUND | {"block": Trial(0, 1200, 0.02, "2026-11-28")})
    TrialFile(key | {"drafts": "block"}).write({"block": Trial(1, 300, -0.01, "2026-11-27")})
    TrialFile(KEY).write(FOUND)
    rows = next(section for section in examine(str(tiny)) if section.title == "Drafters").rows
    where = "(int8 float32, avx2, auto, 5 tokens, coupled)"
    saved = f"saved 2.0% of the time of 1,200 steps on 2026-11-28 {where}"
    lost = "lost 1.0% of the time of 300 steps on 2026-11-27; rests at first (int8 float32, avx2, block)"
    assert rows[1][0] != rows[2][0]
    shown = {name: set(text.split("); ")) for name, text in rows[1:]}
    assert shown["recycle"] == {f"lost 1.8% of the time of 300 steps on 2026-11-28; rests at first {where}"}
    assert {part.rstrip(")") for part in shown["block"]} == {saved.rstrip(")"), lost.rstrip(")")}


def test_an_engine_begins_with_what_its_last_run_found(home: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text with a drafter that rests, that is tried and that nobody remembers; a tiny model's steps are so
    short that no drafter pays, and where the machine stands still for a while, that is known after a few."""
    monkeypatch.setattr(recall, "_LEAST_STEPS", 1)
    params = SamplingParams(temperature=0, max_tokens=40)
    prompts = [f"Count to {n}" for n in range(12)]

    def run(**options: Any) -> tuple[list[list[int]], int, dict[str, Upkeep]]:
        with LLM(str(tiny), drafter="recycle", device="cpu", **options) as llm:
            with llm.exclusive() as engine:
                drafting = engine.drafting
                rests = sum(part.is_resting for part in engine.policy.own.parts)
            texts = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts]
            return texts, rests, dict(drafting.upkeep)

    plain, rests, found = run(adaptive=False)
    assert (rests, found, list(all_trials())) == (0, {}, [])
    monkeypatch.setattr(Weighing, "_credit", lambda *_: None)
    texts, rests, found = run()
    assert (texts, rests) == (plain, 0)
    assert found["recycle"].num_failed > 0
    ((_, kept),) = all_trials()
    assert kept["recycle"].num_failed == found["recycle"].num_failed
    assert kept["recycle"].saved < 0
    texts, rests, _ = run()
    assert (texts, rests) == (plain, 1)
    assert run(adaptive_cache=False)[:2] == (plain, 0)
    assert run(num_speculative_tokens=3)[:2] == (plain, 0), "other options are another run"
