"""JSON-Schema-Test-Suite, or what of it lies in a data folder beside the repository, against each backend and against
all of them in turn. What passed once passes for ever, and nothing that does not fit was ever accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specserve.structured.suite import check, entries_of, totals
from specserve.structured.trial import Trial
from specserve.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
NAME = "json-schema-suite-dev.json"
# Of 192 groups; may only improve.
BASELINES = {
    "llguidance": {"passed": 160, "refused": 28, "wrong_rejects": 4},
    "xgrammar": {"passed": 18, "refused": 174, "wrong_rejects": 0},
    "auto": {"passed": 160, "refused": 28, "wrong_rejects": 4},
}


@pytest.mark.parametrize("backend", BASELINES)
def test_the_suite_goes_as_well_as_ever(smollm2: Path, backend: str) -> None:
    if backend != "llguidance":
        pytest.importorskip("xgrammar")
    baseline = BASELINES[backend]
    file = next(ROOT.parent.glob(f"*/data/{NAME}"), None)
    if file is None:
        pytest.skip(f"No folder beside the repository has data/{NAME}.")
    entries = entries_of(json.loads(file.read_text("utf-8")))
    trial = Trial(smollm2, Tokenizer(smollm2).vocab_size, backend, limit_s=10.0)
    try:
        groups = list(check(entries, trial))
    finally:
        trial.close()
    found = totals(groups)
    assert sum(found.values()) == len(entries) == sum(baseline.values())
    assert [group for group in groups if group.outcome in ("wrong_accept", "crashed", "timed_out")] == []
    assert found["passed"] >= baseline["passed"]
    assert found["refused"] <= baseline["refused"]
    assert all(group.reason for group in groups if group.outcome == "refused"), "who is refused is told why"
