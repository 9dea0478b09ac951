"""JSON-Schema-Test-Suite, or what of it lies in a data folder beside the repository, against the backend of requests.
What passed once passes for ever, and nothing that does not fit was ever accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specserve.constraint.suite import check, entries_of, totals
from specserve.constraint.trial import Trial
from specserve.models.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
NAME = "json-schema-suite-dev.json"
BASELINE = {"passed": 79, "refused": 109, "wrong_rejects": 4}  # of 192 groups; may only improve


def test_the_suite_goes_as_well_as_ever(smollm2: Path) -> None:
    file = next(ROOT.parent.glob(f"*/data/{NAME}"), None)
    if file is None:
        pytest.skip(f"No folder beside the repository has data/{NAME}.")
    entries = entries_of(json.loads(file.read_text("utf-8")))
    trial = Trial(smollm2, Tokenizer(smollm2).vocab_size, limit_s=10.0)
    try:
        groups = list(check(entries, trial))
    finally:
        trial.close()
    found = totals(groups)
    assert sum(found.values()) == len(entries) == sum(BASELINE.values())
    assert [group for group in groups if group.outcome in ("wrong_accept", "crashed", "timed_out")] == []
    assert found["passed"] >= BASELINE["passed"]
    assert found["refused"] <= BASELINE["refused"]
    assert all(group.reason for group in groups if group.outcome == "refused"), "who is refused is told why"
