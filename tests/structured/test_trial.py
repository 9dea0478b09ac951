"""The worker that may hang or die: what it says, and that the next question is answered whatever the last one did."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings, strategies as st

from specserve.cli.main import run
from specserve.errors import EngineError, InputError
from specserve.structured import suite, trial as module
from specserve.structured.spec import Structured
from specserve.structured.trial import Outcome, Trial
from specserve.testing import write_tiny_model

GROUPS: list[dict[str, Any]] = [
    {"schema": {"type": "integer", "minimum": 2}, "tests": [{"data": 2, "valid": True}, {"data": 1, "valid": False}]},
    {"schema": {"enum": [{"b": 1, "a": 2.0}]}, "tests": [{"data": {"a": 2, "b": 1}, "valid": True}]},
    {"schema": {"const": [1, "é\n"]}, "tests": [{"data": [1.0, "é\n"], "valid": True}]},
    {"schema": {"not": {"multipleOf": 2}}, "tests": [{"data": 1, "valid": True}]},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def trial(tiny: Path) -> Iterator[Trial]:
    trial = Trial(tiny, 293, limit_s=30.0)
    yield trial
    trial.close()


def test_what_is_accepted_and_what_is_refused(trial: Trial) -> None:
    asked = Structured.choice(["yes", "no"])
    assert trial.run(asked, ["yes", "ye", "no", "maybe"]) == Outcome([True, False, True, False])
    assert trial.run(asked) == Outcome()
    refused = trial.run(Structured.json({"not": {"multipleOf": 2}}))
    assert "multipleOf" in str(refused.refused)
    assert trial.run(Structured.regex("a+"), ["aaa"]) == Outcome([True])


@pytest.mark.parametrize("missing", ["llguidance", "xgrammar", "outlines_core"])
def test_a_worker_does_without_a_package_that_is_missing(
    missing: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an installation without extras. Python imports `sitecustomize` when it starts."""
    for package in {"llguidance", "xgrammar"} - {missing}:
        pytest.importorskip(package)
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{missing!r}] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    trial = Trial(tiny, 293, limit_s=30.0)
    try:
        assert trial.run(Structured.regex("a+"), ["aa", "ab"]) == Outcome([True, False])
        asked = Structured.json({"type": "object", "additionalProperties": False})
        assert trial.run(asked, ["{}", "[]"]) == Outcome([True, False])
    finally:
        trial.close()


def waits(trial: Trial) -> int:
    """How often its worker has given up its core by itself."""
    status = Path(f"/proc/{trial.process_id}/status").read_text()
    return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])


@pytest.mark.skipif(importlib.util.find_spec("specserve.kernels._native") is None, reason="no native kernels here")
def test_a_worker_gives_its_core_up_while_it_compiles_and_not_while_it_waits(trial: Trial) -> None:
    trial.run(Structured.choice(["a"]))
    before = waits(trial)
    for first in range(10):
        trial.run(Structured.choice([f"{first} word number {i}" for i in range(5000)]))
    busy = waits(trial)
    assert busy - before > 5 * 10, "it waits once or twice for each job, and more often within it"
    time.sleep(0.3)
    assert waits(trial) <= busy + 2, "a worker that has nothing to do was woken"


def endless() -> Structured:
    """500 characters that take minutes to compile."""
    return Structured.json({"allOf": [{"type": "string", "pattern": f".*w{i}.*"} for i in range(16)]})


def test_one_that_takes_too_long_is_killed_and_the_next_is_answered(tiny: Path) -> None:
    """By CPU time, and without a new start: a copy of the worker compiles, and takes milliseconds to replace."""
    trial = Trial(tiny, 293)
    assert trial.run(Structured.regex("a"), ["a"]) == Outcome([True])
    worker, copy = trial._process, trial.process_id
    for _ in range(2):
        assert trial.run(endless(), limit_s=0.1) == Outcome(timed_out=True)
        assert trial.run(Structured.regex("a"), ["a"]) == Outcome([True])
    assert trial._process is worker
    assert trial.process_id != copy
    assert worker is not None
    assert worker.poll() is None
    trial.close()


def test_one_that_hangs_is_replaced(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much it is told: more than its pipe holds. One that is stopped may be looked at more often."""
    trial = Trial(tiny, 293)
    for asked in (Structured.regex("b"), Structured.regex("b" * 2**17)):
        assert trial.run(Structured.regex("a"), ["a"]) == Outcome([True])
        worker = trial._process
        assert worker is not None
        os.kill(worker.pid, signal.SIGSTOP)
        with monkeypatch.context() as soon:
            soon.setattr(module, "_LOOK_S", 0.2)
            assert trial.run(asked) == Outcome(timed_out=True)
        assert worker.returncode == -signal.SIGKILL
        assert not trial.is_ready
    trial.close()


def test_a_call_is_cancelled_and_no_other(trial: Trial) -> None:
    """While it runs, before it begins, and when it has ended already."""
    trial.run(Structured.regex("a"))
    worker = trial._process
    first, second = threading.Event(), threading.Event()
    threading.Timer(0.3, trial.cancel, [first]).start()
    assert trial.run(endless(), cancelled=first) == Outcome(cancelled=True)
    trial.cancel(first)
    assert trial.run(Structured.regex("a"), ["a"], cancelled=second) == Outcome([True])
    trial.cancel(second)
    assert trial.run(Structured.regex("a"), ["a"], cancelled=second) == Outcome(cancelled=True)
    assert trial.run(Structured.regex("a"), ["a"]) == Outcome([True])
    assert trial._process is worker


def test_one_that_is_cancelled_when_it_has_just_ended_takes_nothing_from_the_next(trial: Trial) -> None:
    trial.run(Structured.regex("a"))
    assert trial._process is not None
    for i in range(20):
        trial._process.terminate()  # what a cancel does that comes too late
        assert trial.run(Structured.regex(f"a{i}"), [f"a{i}"]) == Outcome([True])


def test_the_copy_that_compiles_dies(trial: Trial) -> None:
    """One that takes all memory, or whose compiler crashes."""
    trial.run(Structured.regex("a"))
    worker, copy = trial._process, trial.process_id
    assert copy is not None
    assert resource.prlimit(copy, resource.RLIMIT_CORE) == (0, 0), "hundreds of megabytes would be written first"
    caught = int(Path(f"/proc/{copy}/status").read_text().split("\nSigCgt:")[1].split()[0], 16)
    assert not caught >> signal.SIGSEGV - 1 & 1, "a handler that allocates may wait for itself for ever"
    threading.Timer(0.3, os.kill, (copy, signal.SIGSEGV)).start()
    assert "-11" in str(trial.run(endless()).crashed)
    assert trial.run(Structured.regex("a"), ["a"]) == Outcome([True])
    assert trial._process is worker


def test_one_that_dies_says_how_and_the_next_is_answered(tiny: Path) -> None:
    trial = Trial(tiny, 293, limit_s=60.0)
    trial.run(Structured.regex("a"))
    assert trial._process is not None
    os.kill(trial._process.pid, signal.SIGSTOP)
    threading.Timer(0.1, os.kill, (trial._process.pid, signal.SIGKILL)).start()
    outcome = trial.run(Structured.regex("b"))
    assert "-9" in str(outcome.crashed)
    assert trial.run(Structured.regex("a"), ["a"]) == Outcome([True])
    trial.close()


LIMITED = """
import resource, sys
from pathlib import Path
from specserve.structured.spec import Structured
from specserve.structured.trial import Trial
resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
trial = Trial(Path(sys.argv[1]), 293, limit_s=30.0)
outcome = trial.run(Structured.regex("a+"), ["aa"])
print(outcome.accepted, resource.prlimit(trial.process_id, resource.RLIMIT_AS))
trial.close()
"""


def test_a_worker_gets_by_with_the_memory_that_a_process_may_have(tiny: Path) -> None:
    found = subprocess.run([sys.executable, "-c", LIMITED, str(tiny)], capture_output=True, text=True, timeout=120)
    assert found.stdout == f"[True] ({2**31}, {2**31})\n", found.stderr


def test_a_worker_that_cannot_start_says_so(tmp_path: Path) -> None:
    with pytest.raises(EngineError):
        Trial(tmp_path, 293).run(Structured.regex("a"))


def test_the_worker_ends_when_nobody_asks_any_more(tiny: Path) -> None:
    trial = Trial(tiny, 293)
    trial.run(Structured.regex("a"))
    process = trial._process
    assert process is not None
    trial.close()
    assert process.poll() is not None
    end = time.monotonic() + 10
    while Path(f"/proc/{process.pid}").exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not Path(f"/proc/{process.pid}").exists()


def test_groups_are_judged_in_all_their_spellings(trial: Trial) -> None:
    groups = list(suite.check(GROUPS, trial))
    assert [group.outcome for group in groups] == ["passed", "passed", "passed", "refused"]
    assert suite.totals(groups) == {
        "passed": 3, "wrong_accepts": 0, "wrong_rejects": 0, "refused": 1, "crashed": 0, "timed_out": 0
    }  # fmt: skip
    assert suite.by_keyword(groups)["minimum"]["passed"] == 1
    assert suite.by_keyword(groups)["not"]["refused"] == 1


def test_a_wrong_truth_is_noticed(trial: Trial) -> None:
    """The check can fail: the same groups with every verdict turned round."""
    turned = [
        {**group, "tests": [{**test, "valid": not test["valid"]} for test in group["tests"]]} for group in GROUPS[:3]
    ]
    groups = list(suite.check(turned, trial))
    assert [group.outcome for group in groups] == ["wrong_accept"] * 3
    assert {wrong["mistake"] for wrong in groups[0].wrong} == {"wrong_accept", "wrong_reject"}


values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from([0.5, 2.0, "a", ""]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


@given(values)
def test_every_spelling_is_the_same_value(value: Any) -> None:
    texts = list(suite._spellings(value))
    assert len(set(texts)) == len(texts) >= 1
    assert all(json.loads(text) == value for text in texts)


schemas = st.recursive(
    st.sampled_from([True, {"type": "integer"}, {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5},
                     {"const": "a"}, {"type": "string", "maxLength": 1}, {"enum": [1, None, "a"]}, {"minimum": 3},
                     {"type": "null"}]),
    lambda inner: st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)})
    | st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)})
    | st.fixed_dictionaries({"items": inner, "maxItems": st.integers(0, 2)})
    | st.fixed_dictionaries({"properties": st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
                             "required": st.sampled_from([[], ["a"]]),
                             "additionalProperties": st.booleans()}),
    max_leaves=5,
)  # fmt: skip


@settings(max_examples=150)
@given(schemas, st.lists(values, min_size=1, max_size=6))
def test_no_random_schema_accepts_what_does_not_fit(trial: Trial, schema: Any, data: list[Any]) -> None:
    """jsonschema-rs is the truth; what is refused says nothing."""
    validator = jsonschema_rs.Draft202012Validator(schema)
    tests = [{"data": value, "valid": validator.is_valid(value)} for value in data]
    (group,) = suite.check([{"schema": schema, "tests": tests}], trial)
    assert group.outcome in ("passed", "refused"), group


def test_the_command_writes_what_it_found(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked, told = tmp_path / "groups.json", tmp_path / "told.json"
    asked.write_text(json.dumps(GROUPS))
    assert run(["grammar", "check", str(asked), "--model", str(tiny), "--json", str(told)]) == 0
    found = json.loads(told.read_text())
    assert (found["passed"], found["refused"], len(found["groups"])) == (3, 1, 4)
    assert (found["passed_share"], found["refused_share"]) == (0.75, 0.25)
    assert found["keywords"]["enum"] == {
        "passed": 1, "wrong_accepts": 0, "wrong_rejects": 0, "refused": 0, "crashed": 0, "timed_out": 0,
        "passed_share": 1.0, "refused_share": 0.0,
    }  # fmt: skip
    assert found["keywords"]["not"]["refused_share"] == 1.0
    assert "all groups" in capsys.readouterr().out
    assert run(["grammar", "check", str(asked), "--model", str(tiny), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["keywords"] == found["keywords"]


@pytest.mark.parametrize("text", ["{", "{}", '[{"schema": {}}]', '[{"schema": {}, "tests": [{"data": 1}]}]'])
def test_a_file_that_is_none_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "groups.json"
    file.write_text(text)
    assert run(["grammar", "check", str(file)]) == 2
    assert run(["grammar", "check", str(file), "--grammar-backend", "lguidance"]) == 2
    assert "llguidance" in capsys.readouterr().err


def test_entries_are_checked() -> None:
    with pytest.raises(InputError, match="Entry 1"):
        suite.entries_of([GROUPS[0], {"tests": []}])
