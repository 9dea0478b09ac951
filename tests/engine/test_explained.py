"""What an engine tells of drafts: who proposed what and what stood, with drafters whose proposals are known."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import msgspec
import pytest

from specserve.config import EngineConfig
from specserve.engine.build import Built, build
from specserve.engine.engine import Engine
from specserve.engine.request import Request
from specserve.speculation.base import DraftRequest, Needs
from specserve.speculation.host import DraftHost
from specserve.speculation.planner import Planner
from specserve.speculation.weighing import Weighing
from specserve.structured.spec import Structured
from specserve.testing import write_tiny_model
from specserve.types import Draft, Event, SamplingParams

PROMPT = (5, 9, 13, 40)
PARAMS = SamplingParams(temperature=0, max_tokens=13, ignore_eos=True)


class Knows:
    """Proposes the next `count` tokens of the answer, but for those at the places `wrong`."""

    __module__ = "specserve.drafters.knows"  # only what our own look up is weighed
    needs = Needs(observes=False)

    own: Collection[int] = range(9)  # whose text that is

    def __init__(self, answer: list[int], count: int, wrong: Collection[int] = ()) -> None:
        self.answer, self.count, self.wrong = answer, count, wrong

    def begin(self, seq: Any) -> None: ...
    def observe(self, step: Any) -> None: ...
    def end(self, seq: Any) -> None: ...

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        drafts = []
        for seq, room in requests:
            begin = len(seq.tokens) - seq.num_prompt
            tokens = self.answer[begin : begin + min(self.count, room)]
            said = [(t + 1) % 256 if i in self.wrong else t for i, t in enumerate(tokens)]
            drafts.append(Draft.chain(said, own=self.own))
        return drafts


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)
    options: dict[str, Any] = {"drafter": "none", "adaptive": False, "max_step_ms": 1e9}
    return build(EngineConfig(model=str(folder), dtype="float32", max_model_len=160, **options))


@pytest.fixture(scope="module")
def answer(built: Built) -> list[int]:
    return ids(run(built.engine, request()))


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is proposed is verified, however long steps take."""
    monkeypatch.setattr(Weighing, "choose", lambda self, name, group, **more: dict(group))
    all_nodes = lambda self, found, most, asking=0.0: [list(range(len(each))) for each in found]  # noqa: E731
    monkeypatch.setattr(Planner, "choose", all_nodes)


def request(name: str = "r", **fields: Any) -> Request:
    return Request(id=name, prompt_ids=list(PROMPT), params=PARAMS, **fields)


def run(engine: Engine, *requests: Request) -> list[Event]:
    for each in requests:
        engine.add(each)
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    return events


def ids(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.tokens]


def two(engine: Engine, answer: list[int], adaptive: bool) -> None:
    """Have `right` propose three tokens that will come, and `half` one of these and a wrong one."""
    size = engine.limits.vocab_size
    right = DraftHost(Knows(answer, 3), size, 10.0, "right")
    half = DraftHost(Knows(answer, 2, {1}), size, 10.0, "half")
    engine.use(DraftHost(None, size, 10.0, "both", [right, half]), 3, adaptive)


@pytest.fixture
def both(built: Built, answer: list[int], everything: None) -> Iterator[Engine]:
    two(built.engine, answer, adaptive=True)
    yield built.engine
    built.engine.use(DraftHost(None, built.engine.limits.vocab_size, 10.0), 0)


# --- by source --------------------------------------------------------------------------------------------------------


def test_a_token_counts_for_all_who_proposed_it(both: Engine, answer: list[int]) -> None:
    """Each of the three steps verifies the next three tokens, the first of them both drafters', and a wrong one."""
    before = both.counters.snapshot()
    events = run(both, request())
    assert ids(events) == answer
    stats = events[-1].stats
    assert stats is not None
    assert stats.by_source == {"right": [9, 9], "half": [6, 3]}
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 12, 9)
    spent = {name: s - before.draft_seconds.get(name, 0.0) for name, s in both.counters.draft_seconds.items()}
    assert set(spent) == {"right", "half"}
    assert min(spent.values()) > 0
    assert sum(spent.values()) < both.counters.seconds["draft"] - before.seconds["draft"]


def test_without_weighing_those_of_the_first_come_first(built: Built, answer: list[int]) -> None:
    """As much of what several propose as there may be: here all of the first's, one of which is the second's too."""
    two(built.engine, answer, adaptive=False)
    stats = run(built.engine, request())[-1].stats
    assert stats is not None
    assert stats.by_source == {"right": [9, 9], "half": [3, 3]}
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (9, 9)


@pytest.mark.parametrize("adaptive", [False, True])
def test_what_a_grammar_forces_is_its_own(built: Built, everything: None, adaptive: bool) -> None:
    size, text = built.engine.limits.vocab_size, "the other stone"
    asked = Structured.choice([text])
    forced = built.tokenizer.encode(text, add_special_tokens=False)
    half = DraftHost(Knows(forced, 2, {1}), size, 10.0, "half")
    built.engine.use(DraftHost(None, size, 10.0, "both", [half]), 3, adaptive)
    params = SamplingParams(temperature=0, max_tokens=40, structured=asked)
    built.engine.add(Request(id="bound", prompt_ids=list(PROMPT), params=params), built.compiler.compile(asked))
    events = run(built.engine)
    stats = events[-1].stats
    assert stats is not None
    assert set(stats.by_source) == {"jump_forward"}
    assert stats.by_source["jump_forward"] == [stats.num_draft_tokens, stats.num_accepted_tokens]
    assert stats.num_accepted_tokens > 5


# --- step by step -----------------------------------------------------------------------------------------------------


def test_each_step_is_explained_to_whom_asked(both: Engine, answer: list[int]) -> None:
    """Two requests in the same steps; one asks. What is known: who proposed which of the next tokens."""
    events = run(both, request("told", explain=True), request("other"))
    assert [ids([e for e in events if e.request_id == name]) for name in ("told", "other")] == [answer, answer]
    assert all(e.explained is None for e in events if e.request_id == "other")
    first, *steps = [e.explained for e in events if e.request_id == "told"]
    assert first is not None
    assert (first.room, first.proposed, first.tokens, first.path) == (0, {}, [], [])
    assert (first.num_rows, first.plain_s, first.expected_s) == (2 * len(PROMPT), None, None), "prompts"
    assert len(steps) == 3
    for number, step in enumerate(steps):
        assert step is not None
        come = answer[1 + 4 * number :]
        assert (step.room, step.proposed, step.num_rows) == (3, {"right": 3, "half": 2}, 2 * (1 + 4))
        assert step.tokens == [*come[:3], (come[1] + 1) % 256]
        assert step.parents == [-1, 0, 1, 0]
        assert step.sources == [["right", "half"], ["right"], ["right"], ["half"]]
        assert step.path == [0, 1, 2]
        assert step.seconds > 0
        assert step.allowance_s is not None
    assert sum(len(s.path) for s in steps if s) == 9
    known = [(s.plain_s, s.expected_s) for s in steps if s and s.plain_s is not None]
    assert len(known) >= 2, "what a step costs is known after one"
    assert all(expected > plain > 0 for plain, expected in known if expected is not None)


def test_events_keep_what_they_said(both: Engine) -> None:
    """A later step does not change what an earlier event holds, and all of it crosses a socket."""
    both.add(request(explain=True))
    events: list[Event] = []
    sent: list[bytes] = []
    while both.has_work:
        events += both.step()
        sent.append(msgspec.msgpack.encode(events[-1]))
    assert [msgspec.msgpack.decode(each, type=Event).explained for each in sent] == [e.explained for e in events]
    assert len({id(event.explained) for event in events}) == len(events)


def test_without_weighing_no_cost_is_expected(built: Built, answer: list[int]) -> None:
    two(built.engine, answer, adaptive=False)
    steps = [event.explained for event in run(built.engine, request(explain=True))][1:]
    assert [(s.plain_s, s.expected_s, s.allowance_s) for s in steps if s] == [(None, None, None)] * 3
    assert [s.sources for s in steps if s] == [[["right", "half"], ["right"], ["right"]]] * 3
    assert [s.proposed for s in steps if s] == [{"right": 3, "half": 2}] * 3


def test_an_aborted_request_has_nothing_more_to_explain(both: Engine) -> None:
    both.add(request(explain=True))
    both.step()
    (event,) = both.abort("r")
    assert (event.tokens, event.explained) == ([], None)


def test_forced_tokens_are_explained_as_the_grammars(built: Built, everything: None) -> None:
    built.engine.use(DraftHost(None, built.engine.limits.vocab_size, 10.0), 0, adaptive=True)
    params = SamplingParams(temperature=0, max_tokens=40, structured=Structured.choice(["the other stone"]))
    asked = Request(id="bound", prompt_ids=list(PROMPT), params=params, explain=True)
    built.engine.add(asked, built.compiler.compile(params.structured))
    steps = [event.explained for event in run(built.engine)]
    forced = [step for step in steps if step is not None and step.tokens]
    assert forced
    for step in forced:
        assert step.proposed == {"jump_forward": len(step.tokens)}
        assert step.sources == [["jump_forward"]] * len(step.tokens)
