"""A step that begins before the one before it is spoken of, on an executor that computes by itself: what is generated
stays what it is, whatever ends, comes or fails meanwhile, and nobody reads what the next step overwrites."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from specserve.config import EngineConfig
from specserve.engine.build import build
from specserve.engine.engine import Engine
from specserve.engine.request import Request
from specserve.runtime.executor import LocalExecutor, MakeMasks, StepOutput
from specserve.runtime.pack import StepInput
from specserve.speculation.base import Needs, StepReport
from specserve.speculation.constants import EXPLORED
from specserve.speculation.host import DraftHost
from specserve.speculation.sources import SourceCost
from specserve.structured.base import Grammar
from specserve.structured.spec import Structured
from specserve.testing import write_tiny_model
from specserve.types import Draft, SamplingParams
from tests.engine.beams import beams
from tests.engine.test_engine import GREEDY, block_bytes, finish, make as make_alone, prompt, requests, scripted
from tests.engine.test_under_way import Tokens, check, check_idle, drive

WORDS = Structured.regex("(the|and) [a-z]{3,8}")
PLAIN = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=20, ignore_eos=True, logprobs=2)


class Forgetful(LocalExecutor):
    """Computes by itself, it says; what came of a step is gone when the next one begins. Counts those that begin while
    the engine has not told what the last one gave."""

    def __init__(self, local: LocalExecutor) -> None:
        super().__init__(local.runner, local.sampler, local.storage, local._timed)
        self.is_asynchronous = True
        self.num_steps = self.num_ahead = self.num_rows = 0
        self.engine: Engine | None = None
        self._shown: list[torch.Tensor] = []

    def start(self, step: StepInput) -> None:
        with torch.inference_mode():
            for tensor in self._shown:
                tensor.fill_(torch.nan)
        if self.engine is not None:
            self.num_steps += 1
            self.num_rows += int(step.rows.query_starts[-1])
            self.num_ahead += self.engine.counters.num_steps + 1 < self.num_steps
        super().start(step)

    def finish(self, masks: MakeMasks) -> StepOutput:
        out = super().finish(masks)
        found = (*out.taps.values(), out.hidden)
        self._shown = [each for each in found if each is not None]
        return out


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


@pytest.fixture(scope="module")
def grammar(tiny: Path) -> Grammar:
    built = build(EngineConfig(model=str(tiny), dtype="float32", max_model_len=160, drafter="none", adaptive=False))
    return built.compiler.compile(WORDS)


@pytest.fixture(scope="module")
def alone(tiny: Path, grammar: Grammar) -> Tokens:
    """Of one step at a time, one request after the other, without drafts."""
    engine, found = make_alone(tiny, prefix_caching=False), Tokens()
    for request in wishes():
        found |= drive(engine, [request], grammar=grammar)
    return found


def wishes() -> list[Request]:
    """With penalties and without, greedy and drawn, several completions, grammars, beams."""
    others = [
        SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=2, prompt_logprobs=2),
        SamplingParams(temperature=0, max_tokens=20, structured=WORDS),
        beams(3, ignore_eos=True),
    ]
    plain = [Request(id=f"plain{i}", prompt_ids=prompt(i), params=[PLAIN, SEEDED][i % 2]) for i in range(8)]
    more = [Request(id=f"other{i}", prompt_ids=prompt(8 + i, 40), params=p) for i, p in enumerate(others)]
    return requests(16) + plain + more


def plain(count: int = 8) -> list[Request]:
    return [each for each in wishes() if each.id.startswith("plain")][:count]


def make(tiny: Path, blocks: int | None = None, **options: Any) -> tuple[Engine, Forgetful]:
    settings = {"dtype": "float32", "max_model_len": 160, "max_step_ms": 1e9, "drafter": "none", "adaptive": False}
    if blocks is not None:
        settings["kv_cache_gib"] = blocks * block_bytes(make_alone(tiny)) / 2**30
    engine = build(EngineConfig(model=str(tiny), **{**settings, **options}), connect=Forgetful).engine
    executor = engine.executor
    assert isinstance(executor, Forgetful)
    executor.engine = engine
    return engine, executor


@pytest.mark.parametrize("drafting", [None, {"accuracy": 0.7}, {"accuracy": 0.8, "decoys": 2}])
@pytest.mark.parametrize("blocks", [None, 30])
def test_what_is_generated_stays_what_it_is(
    tiny: Path, alone: Tokens, grammar: Grammar, drafting: dict[str, Any] | None, blocks: int | None
) -> None:
    engine, executor = make(tiny, blocks, max_num_batched_tokens=48)
    if drafting is not None:
        engine.use(DraftHost(scripted(alone, **drafting), engine.limits.vocab_size, 10.0), 5)
    assert drive(engine, wishes(), grammar=grammar) == alone
    check_idle(engine)
    assert blocks is None or engine.counters.num_preemptions > 0
    # Of these few have no penalties, no grammar and nobody beside them who does.
    assert (executor.num_ahead > 0) == (drafting is None)


def test_every_step_of_plain_decoding_begins_ahead(tiny: Path, alone: Tokens) -> None:
    engine, executor = make(tiny)
    some = [Request(id=f"plain{i}", prompt_ids=prompt(i), params=PLAIN) for i in (0, 2, 4)]
    assert drive(engine, some) == {(each.id, 0): alone[each.id, 0] for each in some}
    assert (executor.num_steps, executor.num_ahead) == (24, 23)


def test_whoever_ends_is_in_no_step_that_follows(tiny: Path, alone: Tokens) -> None:
    """A stop token cannot be foreseen: what was packed for its sequence too is packed again."""
    engine, executor = make(tiny)
    tokens = alone["plain0", 0]
    stop = next(token for token in tokens[4:] if token not in tokens[: tokens.index(token)] and token != tokens[0])
    ends = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop_token_ids=[stop])
    found = drive(engine, [Request(id="ends", prompt_ids=prompt(0), params=ends), *plain(4)[2:3]])
    assert found == {("ends", 0): tokens[: tokens.index(stop) + 1], ("plain2", 0): alone["plain2", 0]}
    assert (executor.num_steps, executor.num_ahead) == (24, 22)
    assert executor.num_rows == engine.counters.num_rows, "no row is computed for nobody"
    check_idle(engine)


def test_who_waits_begins_when_there_is_a_seat(tiny: Path, alone: Tokens) -> None:
    engine, executor = make(tiny, max_num_seqs=2)
    first, second, third = plain(3)
    drive(engine, [first], num_steps=4)
    assert executor.num_ahead == 4 and len(engine.scheduler.under_way) == 1
    engine.add(second)
    engine.step()  # it had begun
    assert not engine.scheduler.under_way
    engine.step()
    assert [seq.request_id for seq in engine.scheduler.running] == ["plain0", "plain1"]
    engine.add(third)
    before = executor.num_ahead
    engine.step()
    engine.step()
    assert executor.num_ahead == before + 2, "there is no seat"
    found = drive(engine, [])
    assert found["plain2", 0] == alone["plain2", 0]
    check_idle(engine)


NOT_AHEAD = {
    "penalties": SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, presence_penalty=0.5),
    "bias": SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logit_bias={5: 3.0}),
    "a grammar": SamplingParams(temperature=0, max_tokens=9, structured=WORDS),
    "beams": beams(2, max_tokens=9, ignore_eos=True),
}


@pytest.mark.parametrize("what", NOT_AHEAD)
def test_more_than_a_token_hangs_on_the_step_before(tiny: Path, grammar: Grammar, what: str) -> None:
    engine, executor = make(tiny)
    drive(engine, [Request(id="own", prompt_ids=prompt(1), params=NOT_AHEAD[what])], grammar=grammar)
    assert executor.num_ahead == 0 < executor.num_steps


def test_least_tokens_hold_a_step_up_until_there_are_so_many(tiny: Path) -> None:
    engine, executor = make(tiny)
    drive(engine, [Request(id="own", prompt_ids=prompt(1), params=SamplingParams(temperature=0, max_tokens=16,
                   ignore_eos=True, min_tokens=6))])  # fmt: skip
    assert (executor.num_steps, executor.num_ahead) == (16, 9)


@settings(max_examples=min(25, settings().max_examples))
@given(data=st.data())
def test_any_order_of_arrivals_and_aborts_keeps_the_invariants(
    tiny: Path, alone: Tokens, grammar: Grammar, data: st.DataObject
) -> None:
    engine, _ = make(tiny, data.draw(st.integers(30, 44)), max_num_batched_tokens=24, max_num_seqs=4)
    coming, found, aborted = data.draw(st.permutations(wishes()[10:])), Tokens(), set[str]()
    while coming or engine.has_work:
        if coming and (not engine.has_work or data.draw(st.integers(0, 9)) == 0):
            request = coming.pop()
            engine.add(request, None if request.params.structured is None else grammar)
        if engine.requests and data.draw(st.integers(0, 19)) == 0:
            aborted.add(victim := data.draw(st.sampled_from(sorted(engine.requests))))
            engine.abort(victim)
            check(engine)
        for event in engine.step() if engine.has_work else ():
            assert event.error is None
            found.setdefault((event.request_id, event.index), []).extend(event.tokens)
        check(engine)
    check_idle(engine)
    for key, tokens in found.items():
        assert tokens == alone[key] or (key[0] in aborted and tokens == alone[key][: len(tokens)])


def test_a_step_that_is_left_halfway_was_never_begun(
    tiny: Path, alone: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, executor = make(tiny)
    found = drive(engine, plain(), num_steps=5)
    assert engine.scheduler.under_way

    def cut_off(masks: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(executor, "finish", cut_off)
        engine.step()
    check(engine)
    assert not engine.scheduler.under_way and all(not seq.under_way for seq in engine.scheduler.running)
    for key, tokens in drive(engine, []).items():
        found.setdefault(key, []).extend(tokens)
    assert found == {key: alone[key] for key in found} and len(found) == 8


def test_what_is_aborted_under_way_is_spoken_of_no_more(tiny: Path, alone: Tokens) -> None:
    engine, _ = make(tiny)
    drive(engine, plain(4), num_steps=6)
    (event,) = engine.abort("plain1")
    assert event.finish_reason == "abort"
    check(engine)
    for _ in range(2):
        assert {event.request_id for event in engine.step()} == {"plain0", "plain2", "plain3"}
    for name in ("plain0", "plain2", "plain3"):
        engine.abort(name)
    assert engine.has_work, "a step is under way"
    assert finish(engine) == []
    check_idle(engine)
    assert drive(engine, plain(2)) == {(f"plain{i}", 0): alone[f"plain{i}", 0] for i in range(2)}


@pytest.mark.parametrize("pays", [True, False])
def test_drafts_are_asked_for_again_where_they_may_pay(tiny: Path, monkeypatch: pytest.MonkeyPatch, pays: bool) -> None:
    """Look-ups that find nothing are asked in every eighth step alone, or where they seem not to pay as seldom as is
    allowed for trying them; the others begin ahead. Those that find something are asked in each."""
    engine, executor = make(tiny, drafter="ngram", adaptive=True, max_model_len=1024)
    end_step, seconds = engine.drafting.end_step, 0.1 * EXPLORED if pays else 40 * EXPLORED
    monkeypatch.setattr(engine.drafting, "end_step", lambda drafted, _: end_step(drafted, 0.001))
    monkeypatch.setattr(SourceCost, "of", lambda cost, length, num_seqs=1: 0.001 * seconds if length else 0.0)

    (host,) = engine.policy.own.parts
    asked, draft = list[int](), Draft.empty()

    def propose(seqs: Any, budget: list[int]) -> Any:
        if any(budget):
            asked.append(executor.num_steps)
        return [draft if most else Draft.empty() for most in budget]

    monkeypatch.setattr(host, "propose", propose)
    long = SamplingParams(temperature=1.0, seed=1, max_tokens=600, ignore_eos=True)
    engine.add(Request(id="drawn", prompt_ids=prompt(3), params=long))
    weighing = engine.drafting.weighing
    assert weighing is not None
    if not pays:
        for record in weighing._records.values():
            record.gain = 0.0
    while executor.num_steps < 400:
        engine.step()
    gaps = [after - before for before, after in itertools.pairwise(asked[40 if pays else 1 :])]
    assert len(gaps) > (20 if pays else 5) and not any(gap % (8 if pays else 40) for gap in gaps), gaps
    assert executor.num_ahead > 300
    draft, before = Draft.chain([5]), executor.num_ahead
    finish(engine)
    assert not pays or executor.num_ahead - before < 40, "it is asked again"


class Silent:
    """A drafter that has nothing to say, and may be asked."""

    needs = Needs()
    num_asked = 0

    def begin(self, seq: Any) -> None: ...

    def propose(self, requests: list[Any]) -> list[Draft]:
        self.num_asked += 1
        return [Draft.empty()] * len(requests)

    def observe(self, step: StepReport) -> None: ...

    def end(self, seq: Any) -> None: ...


def test_a_drafter_that_is_not_weighed_is_asked_in_every_step(tiny: Path) -> None:
    engine, executor = make(tiny)
    engine.use(DraftHost(drafter := Silent(), engine.limits.vocab_size, 10.0), 3)
    drive(engine, plain(1))
    assert executor.num_ahead == 0
    assert drafter.num_asked == executor.num_steps - 2, (
        "neither the prompt's step nor the last one has room for a draft"
    )


class Reading(Silent):
    """One that reads a layer of the target."""

    needs = Needs(hidden_layers=(1,))
    shown = 0

    def observe(self, step: StepReport) -> None:
        rows = [each.first_row for each in step.seqs]
        assert step.hidden[1][rows].isfinite().all()
        self.shown += 1


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_a_drafter_that_reads_the_target_s_layers_is_shown_them(tiny: Path, num_tokens: int) -> None:
    """They are gone when the next step begins, also where that drafter is not asked."""
    engine, executor = make(tiny)
    engine.use(DraftHost(drafter := Reading(), engine.limits.vocab_size, 10.0), num_tokens)
    drive(engine, plain(1))
    assert executor.num_ahead == (0 if num_tokens else 23) and drafter.shown == executor.num_steps
    assert engine.policy.num_dropped == 0


def test_steps_take_what_they_take_together(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of each is counted, and none of it twice, where the host works while the next one is computed."""
    engine, executor = make(tiny)
    took: list[float] = []
    monkeypatch.setattr(engine.scheduler.cost, "observe", lambda *load: took.append(load[-1]))
    close = engine._close

    def slowly(step: Any) -> None:
        time.sleep(0.003)
        close(step)

    monkeypatch.setattr(engine, "_close", slowly)
    engine.add(Request(id="own", prompt_ids=prompt(1), params=GREEDY))
    inside = 0.0
    while engine.has_work:
        begun = time.perf_counter()
        engine.step()
        inside += time.perf_counter() - begun
    assert executor.num_ahead == 23 and 0.9 * inside < sum(took) <= inside
