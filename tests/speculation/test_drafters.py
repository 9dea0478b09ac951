"""Several drafters at once: whose sequence is whose, what may be made on demand, and that none costs others drafts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import specserve.drafters
from specserve import registry
from specserve.drafters.ngram import NgramDrafter
from specserve.errors import InputError
from specserve.registry import DRAFTERS
from specserve.speculation.base import NONE, DraftHost
from specserve.speculation.drafters import Drafters
from specserve.speculation.lookup import create
from specserve.types import Draft, SamplingParams, Sequence, Verdict

VOCABULARY = 50

# A drafter that drafts its own token as often as it is asked to, and remembers what it heard.
RECORDER = """
from specserve.types import Draft

class RecordingDrafter:
    wants_hidden = {wants_hidden}
    made = []

    def __init__(self, token={token}):
        self.token, self.heard = token, []
        self.made.append(self)

    def begin(self, seq):
        self.heard.append(("begin", seq))

    def propose(self, seqs, budget):
        self.heard.append(("propose", list(seqs), list(budget)))
        return [Draft.chain([self.token] * count) for count in budget]

    def commit(self, seqs, verdicts, hidden):
        self.heard.append(("commit", list(seqs), list(verdicts), hidden))

    def end(self, seq):
        self.heard.append(("end", seq))
"""
FAILING = "    def propose(self, seqs, budget):\n        raise RuntimeError('planted')\n"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A further folder of drafters, with three recorders; the third wants hidden states."""
    for name, token in (("one", 1), ("two", 2), ("three", 3)):
        text = RECORDER.format(token=token, wants_hidden=name == "three")
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "failing.py").write_text(RECORDER.format(token=9, wants_hidden=False) + "\n" + FAILING)
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(specserve.drafters, "__path__", [*specserve.drafters.__path__, str(tmp_path)])
        yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("specserve.drafters."):
            del sys.modules[name]
            vars(specserve.drafters).pop(name.rpartition(".")[2], None)


def make_seq(drafter: str | None = None) -> Sequence:
    return Sequence(
        request_id="r", index=0, tokens=[1, 2, 3], num_prompt=3,
        params=SamplingParams(), seed=0, max_tokens=99, drafter=drafter,
    )  # fmt: skip


def plain() -> Drafters:
    return Drafters(DraftHost(None, VOCABULARY, 5.0))


def begun(drafters: Drafters, *names: str | None) -> list[Sequence]:
    seqs = [make_seq(name) for name in names]
    for seq in seqs:
        drafters.require(seq.drafter)
        drafters.begin(seq)
    drafters.propose(seqs, [0] * len(seqs))  # as in a step with their prompts
    return seqs


def recorder(name: str) -> Any:
    """The only instance of a planted drafter."""
    (made,) = importlib.import_module(f"specserve.drafters.{name}").RecordingDrafter.made
    return made


def ids(drafts: list[Draft]) -> list[list[int]]:
    return [draft.tokens.tolist() for draft in drafts]


def test_each_drafter_is_called_once_with_its_own_and_drafts_come_in_the_batchs_order(folder: Path) -> None:
    drafters = plain()
    a, b, c, d, e, f = begun(drafters, "one", "two", None, "one", NONE, "two")
    batch = [f, a, c, d, e, b]
    assert ids(drafters.propose(batch, [1, 2, 3, 4, 5, 0])) == [[2], [1, 1], [], [1, 1, 1, 1], [], []]
    verdicts = [Verdict([i], []) for i in range(6)]
    drafters.commit(batch, verdicts, None)
    for seq in batch:
        drafters.end(seq)
    assert recorder("one").heard == [
        ("begin", a), ("begin", d), ("propose", [a, d], [2, 4]),
        ("commit", [a, d], [verdicts[1], verdicts[3]], None), ("end", a), ("end", d),
    ]  # fmt: skip
    assert recorder("two").heard == [
        ("begin", b), ("begin", f), ("propose", [f], [1]),
        ("commit", [f, b], [verdicts[0], verdicts[5]], None), ("end", f), ("end", b),
    ]  # fmt: skip


def test_hidden_states_go_to_who_wants_them_row_by_row(folder: Path) -> None:
    drafters = plain()
    seqs = begun(drafters, "three", "one", "three", None)
    assert drafters.wants_hidden
    verdicts = [Verdict([5, 6], [0]), Verdict([7, 8, 9], [0, 1]), Verdict([4], []), Verdict([3], [])]
    hidden = torch.arange(7.0)[:, None] * torch.ones(1, 2)  # [tokens of all verdicts, 2]
    drafters.commit(seqs, verdicts, hidden)
    _, told, heard, rows = recorder("three").heard[-1]
    assert (told, heard) == ([seqs[0], seqs[2]], [verdicts[0], verdicts[2]])
    assert rows.tolist() == [[0, 0], [1, 1], [5, 5]]
    assert recorder("one").heard[-1] == ("commit", [seqs[1]], [verdicts[1]], None)
    for seq in (seqs[0], seqs[2]):
        drafters.end(seq)
    assert not drafters.wants_hidden, "nobody is left who does"


def test_who_is_alone_gets_everything_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual case takes no detour: nothing is sorted out where all sequences have one drafter."""
    drafters = plain()
    (other,) = begun(drafters, "two")
    seqs = begun(drafters, "three", "three")
    drafters.end(other)
    monkeypatch.delattr(Drafters, "_shares")
    assert ids(drafters.propose(seqs, [1, 2])) == [[3], [3, 3]]
    hidden = torch.zeros(2, 2)
    drafters.commit(seqs, [Verdict([1], []), Verdict([2], [])], hidden)
    assert recorder("three").heard[-1][-1] is hidden


def test_a_drafter_that_fails_loses_its_own_drafts_only(folder: Path) -> None:
    drafters = plain()
    seqs = begun(drafters, "one", "failing", "two", "failing")
    assert ids(drafters.propose(seqs, [1, 1, 1, 1])) == [[1], [], [2], []]
    assert drafters.num_dropped == 2


def test_a_drafter_that_breaks_the_contract_loses_its_own_drafts_only(folder: Path) -> None:
    drafters = plain()
    seqs = begun(drafters, "one", "two", "one", "two")
    recorder("two").token = VOCABULARY
    assert ids(drafters.propose(seqs, [2, 2, 2, 2])) == [[1, 1], [], [1, 1], []]
    assert drafters.num_dropped == 2


def test_a_drafter_that_is_switched_off_leaves_the_others(folder: Path) -> None:
    drafters = plain()
    one, two, none = begun(drafters, "one", "two", None)
    assert [drafters.can_draft(seq) for seq in (one, two, none)] == [True, True, False]
    drafters._hosts["one"].close()
    assert [drafters.can_draft(seq) for seq in (one, two, none)] == [False, True, False]
    assert ids(drafters.propose([one, two, none], [1, 1, 1])) == [[], [2], []]
    for seq in (one, two, none):
        drafters.end(seq)


def test_the_engines_own_drafter_answers_to_its_name(folder: Path) -> None:
    own = NgramDrafter(prompt_lookup_max=2)
    drafters = Drafters(DraftHost(own, VOCABULARY, 5.0, "ngram"))
    assert drafters.active
    seqs = begun(drafters, None, "ngram")
    assert set(own._indexes) == set(seqs), "one drafter, with the engine's options"


def test_replacing_keeps_what_was_counted_and_forgets_the_rest(folder: Path) -> None:
    drafters = plain()
    (seq,) = begun(drafters, "failing")
    drafters.propose([seq], [3])
    with pytest.raises(AssertionError):
        drafters.replace(DraftHost(NgramDrafter(), VOCABULARY, 5.0, "ngram"))
    drafters.end(seq)
    first, old = recorder("failing"), drafters._hosts["failing"]
    drafters.replace(DraftHost(NgramDrafter(), VOCABULARY, 5.0, "ngram"))
    assert drafters.num_dropped == 1
    assert drafters.active
    assert not old.active
    (seq,) = begun(drafters, "failing")
    drafters.propose([seq], [3])
    assert drafters.num_dropped == 2
    assert recorder_count("failing") == 2
    assert len(first.heard) == 2, "begin and end"
    drafters.end(seq)
    drafters.replace(DraftHost(None, VOCABULARY, 5.0))
    assert drafters.num_dropped == 2
    assert not drafters.active


def recorder_count(name: str) -> int:
    return len(importlib.import_module(f"specserve.drafters.{name}").RecordingDrafter.made)


def test_sequences_may_end_after_the_close(folder: Path) -> None:
    drafters = plain()
    seqs = begun(drafters, "one", None, "two")
    drafters.close()
    assert ids(drafters.propose(seqs, [1, 1, 1])) == [[], [], []]
    for seq in seqs:
        drafters.end(seq)
    assert drafters._host_of == {}


@settings(max_examples=60)
@given(st.data())
def test_any_coming_and_going(data: st.DataObject) -> None:
    """Against drafters that know the answer by themselves: a sequence's draft is its drafter's token, always."""
    hosts = {name: Constant(token) for token, name in enumerate(("a", "b", "c"), 1)}
    drafters = Drafters(DraftHost(hosts["a"], VOCABULARY, 5.0, "a"))
    for name in ("b", "c"):  # as `require` would have made them from files
        drafters._hosts[name] = DraftHost(hosts[name], VOCABULARY, 5.0, name)
    try:
        live: list[Sequence] = []
        for _ in range(data.draw(st.integers(1, 12))):
            if live and data.draw(st.booleans()):
                drafters.end(live.pop(data.draw(st.integers(0, len(live) - 1))))
            else:
                live += begun(drafters, data.draw(st.sampled_from([None, "a", "b", "c", NONE])))
            batch = data.draw(st.permutations(live))
            budget = [data.draw(st.integers(0, 3)) for _ in batch]
            drafts = drafters.propose(batch, budget)
            tokens = {None: 1, "a": 1, "b": 2, "c": 3, NONE: 0}
            expected = [[tokens[s.drafter]] * n * (s.drafter != NONE) for s, n in zip(batch, budget, strict=True)]
            assert ids(drafts) == expected
        for name, host in hosts.items():
            assert host.live == {seq for seq in live if (seq.drafter or "a") == name}
        assert drafters.num_dropped == 0
    finally:
        drafters.close()


class Constant:
    """Drafts one token; asserts that it hears of its own sequences only."""

    wants_hidden = False

    def __init__(self, token: int) -> None:
        self.token = token
        self.live: set[Sequence] = set()

    def begin(self, seq: Sequence) -> None:
        assert seq not in self.live
        self.live.add(seq)

    def propose(self, seqs: list[Sequence], budget: list[int]) -> list[Draft]:
        assert self.live.issuperset(seqs)
        return [Draft.chain([self.token] * count) for count in budget]

    def commit(self, seqs: list[Sequence], verdicts: list[Verdict], hidden: torch.Tensor | None) -> None: ...

    def end(self, seq: Sequence) -> None:
        self.live.remove(seq)


# --- what a request may bring about ----------------------------------------------------------------------------------


def refused(drafters: Drafters, name: Any) -> str:
    """The message of a refusal, which names the parameter and leaves everything as it was."""
    before = dict(drafters._hosts)
    with pytest.raises(InputError) as caught:
        drafters.require(name)
    assert caught.value.param == "drafter"
    assert drafters._hosts == before
    return str(caught.value)


def test_an_unknown_name_has_near_misses(folder: Path) -> None:
    message = refused(Drafters(DraftHost(NgramDrafter(), VOCABULARY, 5.0, "mine")), "ngrm")
    assert "Unknown drafter 'ngrm'. Did you mean 'ngram'" in message
    assert all(name in message for name in ("mine", "none", "one", "prediction"))
    for name in ("", "../ngram", "ngram.NgramDrafter", "zoo"):
        assert f"Unknown drafter {name!r}" in refused(plain(), name)


@pytest.mark.parametrize("name", [5, ["ngram"], {"name": "ngram"}, b"ngram"])
def test_a_name_is_text(name: Any) -> None:
    assert f"drafter is {name!r}; it must be the name" in refused(plain(), name)


def test_drafters_of_other_packages_are_only_the_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("plugin", "specserve.drafters.ngram:NgramDrafter", DRAFTERS.package)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    assert "One of another package must be the engine's --drafter" in refused(plain(), "plugin")
    own = Drafters(DraftHost(create("plugin", {}), VOCABULARY, 5.0, "plugin"))
    own.require("plugin")
    (seq,) = begun(own, "plugin")
    assert own.can_draft(seq)


NEEDY = "class NeedyDrafter:\n    def __init__(self, model, head, depth=3, *more, **options): pass\n"
VERBS = "".join(f"    def {verb}(self, *args): pass\n" for verb in DRAFTERS.parts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (NEEDY + VERBS, "needs model, head, which no request can give: it must be the engine's --drafter"),
        ("class ADrafter:\n    def begin(self, seq): pass\n", "has no propose, commit, end"),
        ("import a_package_that_is_not_there\n", "needs the package 'a_package_that_is_not_there'"),
        ("raise RuntimeError('planted')\n", "cannot be made: RuntimeError: planted"),
        (f"class ADrafter:\n    def __init__(self): 1 / 0\n{VERBS}", "cannot be made: ZeroDivisionError"),
    ],
)
def test_what_cannot_be_made_is_the_requests_error(folder: Path, text: str, message: str) -> None:
    (folder / "wrong.py").write_text(text)
    assert message in refused(plain(), "wrong")


def test_options_with_defaults_are_no_hindrance(folder: Path) -> None:
    drafters = plain()
    for name in ("ngram", "prediction", "one", NONE, None):
        drafters.require(name)
    drafters.require("one")
    assert recorder_count("one") == 1, "made once"
    assert sorted(drafters._hosts) == ["ngram", "none", "one", "prediction"]
