"""Replay: what a recording says about a drafter, against counts made by hand and against decoding itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from specserve.bench.drive import NoTarget
from specserve.bench.replay import Record, accepted_path, read_records, replay, replay_file
from specserve.drafters.ngram import NgramDrafter
from specserve.errors import ConfigError, InputError
from specserve.speculation.base import DraftRequest, Needs, SequenceView, StepReport
from specserve.testing import path_to
from specserve.types import Draft

NO_TARGET: Any = NoTarget()


class Scripted:
    """Drafts what it is given, step by step, and remembers what it heard."""

    def __init__(self, drafts: list[Draft], needs: Needs | None = None) -> None:
        self.drafts = list(drafts)
        self.needs = needs or Needs()
        self.heard: list[tuple[str, Any]] = []
        self.told: list[Any] = []

    def begin(self, seq: SequenceView) -> None:
        self.heard.append(("begin", list(seq.tokens)))

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        self.heard.append(("propose", requests[0].num_tokens))
        return [self.drafts.pop(0)]

    def observe(self, step: StepReport) -> None:
        (report,) = step.seqs
        assert report.verdict is not None
        self.told.append(step.top)
        self.heard.append(("observe", (list(report.seq.tokens), report.verdict.tokens, report.verdict.path)))

    def end(self, seq: SequenceView) -> None:
        self.heard.append(("end", list(seq.tokens)))


def test_counts_by_hand() -> None:
    """Output 1 to 9: a chain half right, an empty draft, a tree whose second branch is right, and a chain all right."""
    tree = Draft(np.array([9, 5, 8, 6], np.int32), np.array([-1, -1, 0, 1], np.int32))
    drafter = Scripted([Draft.chain([1, 2, 0, 0]), Draft.empty(), tree, Draft.chain([8])])
    replay(drafter, [Record([50], list(range(1, 10)), "math")], 4)
    assert [what for name, what in drafter.heard if name == "observe"] == [
        ([50, 1, 2, 3], [1, 2, 3], [0, 1]),
        ([50, 1, 2, 3, 4], [4], []),
        ([50, 1, 2, 3, 4, 5, 6, 7], [5, 6, 7], [1, 3]),
        ([50, *range(1, 10)], [8, 9], [0]),
    ]
    assert [what for name, what in drafter.heard if name == "propose"] == [4, 4, 4, 1]
    assert [name for name, _ in drafter.heard][:: len(drafter.heard) - 1] == ["begin", "end"]


def test_figures_by_hand() -> None:
    drafts = [Draft.chain([1, 2, 0]), Draft.chain([4, 0]), Draft.chain([6])]
    report = replay(Scripted(drafts), [Record([50], [1, 2, 3, 4, 5, 6, 7], "math")], 4)
    tally = report.overall
    assert (tally.num_records, tally.num_steps, tally.num_tokens) == (1, 3, 7)
    assert (tally.num_draft_tokens, tally.num_accepted_tokens) == (6, 4)
    assert tally.tokens_per_step == pytest.approx(7 / 3)
    assert tally.acceptance_by_position == [1.0, 0.5, 0.0]
    assert tally.microseconds_per_step > 0


def test_categories_add_up() -> None:
    records = [Record([1, 2, 1], [2, 1, 2], "a"), Record([3], [3, 3, 3, 3], "b"), Record([5], [6], "a")]
    report = replay(NgramDrafter(NO_TARGET), records, 3)
    assert set(report.categories) == {"a", "b"}
    assert report.categories["a"].num_records == 2
    for name in ("num_records", "num_steps", "num_tokens", "num_draft_tokens", "num_accepted_tokens"):
        assert getattr(report.overall, name) == sum(getattr(tally, name) for tally in report.categories.values())
    assert json.loads(json.dumps(report.summary()))["categories"]["b"]["tokens"] == 4


@given(
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    output=st.lists(st.integers(0, 2), min_size=1, max_size=30),
    budget=st.integers(1, 6),
)
def test_every_output_token_is_emitted_once(prompt: list[int], output: list[int], budget: int) -> None:
    tally = replay(NgramDrafter(NO_TARGET), [Record(prompt, output)], budget).overall
    assert tally.num_tokens == len(output) == tally.num_steps + tally.num_accepted_tokens
    assert tally.num_draft_tokens == sum(tally.drafted_by_position) <= tally.num_steps * budget
    assert len(tally.drafted_by_position) <= budget


@given(st.data())
def test_accepted_path_is_the_longest_branch_that_agrees(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 8))
    parents = [data.draw(st.integers(-1, i - 1)) for i in range(length)]
    nodes = {(parent, data.draw(st.integers(0, 2))): None for parent in parents}
    parents = [parent for parent, _ in nodes]
    if any(parent >= i for i, parent in enumerate(parents)):
        return
    draft = Draft(np.array([t for _, t in nodes], np.int32), np.array(parents, np.int32))
    rest = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    branches = [path_to(draft, node) for node in range(-1, len(draft))]
    agree = [p for p in branches if len(p) < len(rest) and [int(draft.tokens[i]) for i in p] == rest[: len(p)]]
    assert accepted_path(draft, rest) == max(agree, key=len)


@pytest.mark.parametrize(
    ("drafts", "word"),
    [([Draft.chain([1, 2, 3])], "budget"), ([Draft.chain([-1])], "vocabulary"), (["text"], "type")],
)
def test_an_invalid_draft_is_an_error_here(drafts: list[Any], word: str) -> None:
    with pytest.raises(ConfigError, match=rf"Scripted made an invalid draft \({word}\)"):
        replay(Scripted(drafts), [Record([1], [1, 2, 3, 4, 5])], 2)


def test_hidden_states_cannot_be_replayed() -> None:
    with pytest.raises(ConfigError, match="hidden states"):
        replay(Scripted([], needs=Needs(hidden_layers=(0,))), [Record([1], [1])], 2)
    with pytest.raises(ConfigError, match="at least 1"):
        replay(NgramDrafter(NO_TARGET), [Record([1], [1])], 0)


def test_best_tokens_are_told_where_they_are_known() -> None:
    """Output 1 to 5: a tree whose second branch is right, then nothing. A rejected node's row says nothing."""
    tree = Draft(np.array([9, 1, 2, 8], np.int32), np.array([-1, -1, 1, 1], np.int32))
    drafter = Scripted([tree, Draft.empty()], needs=Needs(top_k=2))
    top = [[position, 10 + position, 20 + position] for position in range(1, 6)]
    replay(drafter, [Record([50], [1, 2, 3, 4, 5], top=top)], 4)
    nothing = [-1, -1]
    assert [np.array(told).tolist() for told in drafter.told] == [
        [[1, 11], nothing, [2, 12], [3, 13], nothing],
        [[4, 14]],
        [[5, 15]],
    ]
    for lacking in (None, [[1, 2], [1, 2], [1], [1, 2], [1, 2]]):
        with pytest.raises(ConfigError, match=r"needs the target's 2 best tokens .* --record-top 2"):
            replay(drafter, [Record([50], [1, 2, 3, 4, 5], top=lacking)], 4)


def test_a_file_by_the_drafters_name(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    lines = [{"prompt_ids": [1, 2, 3, 1], "output_ids": [2, 3, 1, 2], "category": "qa", "top": [[2], [3], [1], [2]]}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert list(read_records(path)) == [Record([1, 2, 3, 1], [2, 3, 1, 2], "qa", [[2], [3], [1], [2]])]
    report = replay_file(path, "ngram", 3, {"prompt_lookup_min": 1})
    assert report.categories["qa"].tokens_per_step == 4.0
    with pytest.raises(ConfigError, match="needs a drafter"):
        replay_file(path, "none", 3, {})
    with pytest.raises(ConfigError, match="cannot be read"):
        replay_file(tmp_path / "missing", "ngram", 3, {})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 must be an object"),
        ('{"prompt_ids": [1]}', "line 2: output_ids must be a list"),
        ('{"prompt_ids": [], "output_ids": [1]}', "line 2: prompt_ids must be a list"),
        ('{"prompt_ids": [1, true], "output_ids": [1]}', "prompt_ids must be"),
        ('{"prompt_ids": [1], "output_ids": [-1]}', "output_ids must be"),
        ('{"prompt_ids": [1], "output_ids": [1.5]}', "output_ids must be"),
        ('{"prompt_ids": [1], "output_ids": [1], "top": 3}', "line 2: top must be"),
        (
            '{"prompt_ids": [1], "output_ids": [1], "top": [[1], [2]]}',
            "as many lists of token ids as there are output_ids",
        ),
        ('{"prompt_ids": [1], "output_ids": [1], "top": [[]]}', "top must be"),
        ('{"prompt_ids": [1], "output_ids": [1], "top": [[-1]]}', "top must be"),
    ],
)
def test_a_bad_record_names_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"prompt_ids": [1], "output_ids": [1]}\n' + line + "\n")
    with pytest.raises(InputError, match=message):
        list(read_records(path))
