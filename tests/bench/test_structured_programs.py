"""The programs of benchmarks/structured: cases are what they say, a real model's outputs fit with free rows beside
them, and what does not fit, or is not what it was alone, ends with 1."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import pytest

from specserve import SamplingParams
from specserve.testing import write_tiny_model

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "structured"
NAMES = ("cases", "speed", "validity")


@pytest.fixture(scope="module")
def programs() -> Iterator[SimpleNamespace]:
    sys.path.insert(0, str(FOLDER))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    sys.path.remove(str(FOLDER))
    for name in NAMES:
        del sys.modules[name]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


def run(program: Any, monkeypatch: pytest.MonkeyPatch, told: Path, *options: str) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["program", f"--json={told}", *options])
    status = program.main()
    return status, json.loads(told.read_text("utf-8"))


def test_a_real_models_outputs_fit_and_free_rows_are_what_they_are_alone(
    programs: SimpleNamespace, smollm2: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = ("--schemas=40", "--seed=4", "--limit=4", "--drafter=ngram,prediction", "--batch=8", "--max-tokens=80")
    status, figures = run(programs.validity, monkeypatch, tmp_path / "told.json", f"--model={smollm2}", *options)
    assert status == 0
    assert [each["temperature"] for each in figures["runs"]] == [0.0, 0.0, 1.0, 1.0]
    for each in figures["runs"]:
        assert (each["invalid"], each["failed"], each["free_differs"], each["faults"]) == (0, 0, 0, [])
        assert each["fits"] + each["cut_off"] == each["free"] == 4
        assert each["fits"] >= 2, "too few ended within their limit to tell anything"
        assert each["accepted"] >= each["forced_and_accepted"] > 0
    (predicted, *_) = (each for each in figures["runs"] if each["drafter"] == "prediction")
    assert predicted["accepted"] > predicted["tokens"] / 2, "what it said before is followed"


def few(tiny: Path) -> tuple[str, ...]:
    return f"--model={tiny}", "--schemas=6", "--drafter=none", "--temperature=1", "--max-tokens=120"


def test_a_misfit_ends_with_1(
    programs: SimpleNamespace, tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(programs.validity, "fits", lambda schema, text: False)
    status, figures = run(programs.validity, monkeypatch, tmp_path / "told.json", *few(tiny))
    (tally,) = figures["runs"]
    assert status == 1
    assert tally["invalid"] == len(tally["faults"]) > 0


def test_a_constrained_row_that_differs_from_the_first_drafters_ends_with_1(
    programs: SimpleNamespace, tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    params, seeds = programs.validity.Trial._params, count()

    def seeded_anew(self: Any, case: int, is_bound: bool, temperature: float) -> SamplingParams:
        made: SamplingParams = params(self, case, is_bound, temperature)
        return replace(made, seed=next(seeds)) if is_bound else made

    monkeypatch.setattr(programs.validity.Trial, "_params", seeded_anew)
    status, figures = run(programs.validity, monkeypatch, tmp_path / "told.json", *few(tiny), "--drafter=none,grammar")
    first, second = figures["runs"]
    assert status == 1
    assert first["bound_differs"] == 0 < second["bound_differs"]
    assert second["free_differs"] == 0


def test_a_free_row_that_differs_ends_with_1(
    programs: SimpleNamespace, tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(programs.validity.Trial, "_free_alone", lambda self, case, temperature: (1, 2, 3))
    status, figures = run(programs.validity, monkeypatch, tmp_path / "told.json", *few(tiny))
    (tally,) = figures["runs"]
    assert status == 1
    assert tally["free_differs"] == tally["free"] == 6


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"day": "2026-02-28"}', True),
        ('{"day": "2026-02-30"}', False),
        ('{"day": 3}', False),
        ('{"day": "2026', False),
    ],
)
def test_the_oracle_asserts_formats_and_takes_json_alone(programs: SimpleNamespace, text: str, expected: bool) -> None:
    schema = {"properties": {"day": {"type": "string", "format": "date"}}}
    assert programs.validity.fits(schema, text) is expected


def test_made_schemas_are_the_same_each_time_and_differ(programs: SimpleNamespace) -> None:
    made = list(islice(programs.cases.made_schemas(5), 300))
    assert made == list(islice(programs.cases.made_schemas(5), 300))
    assert len(programs.cases.distinct(made, 300)) > 290
    for schema in made:
        jsonschema_rs.validator_for(schema)  # raises for what is no schema
    text = json.dumps(made)
    for keyword in ("anyOf", "$ref", "enum", "const", "format", "pattern", "maxItems", "minimum", "maxLength"):
        assert text.count(f'"{keyword}"') > 10, keyword


def test_tool_calls_become_json_schemas(programs: SimpleNamespace, tmp_path: Path) -> None:
    file = tmp_path / "tools.jsonl"
    parameters = {"type": "dict", "properties": {"a": {"type": "float"}, "b": {"type": "any"}}, "required": ["a"]}
    tool = {"name": "f", "description": "Does it.", "parameters": parameters}
    file.write_text(json.dumps({"question": [[{"content": "Do it."}]], "function": [tool]}) + "\n", "utf-8")
    (case,) = programs.cases.tool_calls(file)
    assert "f: Does it." in case.prompt
    assert "Do it." in case.prompt
    assert case.schema == {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {}},
        "required": ["a"],
        "additionalProperties": False,
    }


def test_speed_times_pairs(
    programs: SimpleNamespace, tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tools = tmp_path / "tools.jsonl"
    parameters = {"type": "dict", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    tool = {"name": "f", "description": "Does it.", "parameters": parameters}
    tools.write_text(json.dumps({"question": [[{"content": "Do it."}]], "function": [tool]}) + "\n", "utf-8")
    told = tmp_path / "told.json"
    options = ("speed", f"--tools={tools}", f"--model={tiny}", "--drafter=ngram", "--repeats=1", f"--json={told}")
    monkeypatch.setattr(sys, "argv", list(options))
    programs.speed.main()
    (figures,) = json.loads(told.read_text("utf-8"))["drafters"]
    assert (figures["cases"], figures["invalid"], figures["cut off"]) == (1, 0, 0)
