"""What `bench --schema` says: a run's masks and misfits as figures, and a table that fits a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from specserve.bench.compare import Reply, Run
from specserve.bench.structured import checker, structured_figures, structured_table
from specserve.cli.options import load_schema
from specserve.errors import ConfigError, InputError
from specserve.structured.spec import Structured
from specserve.types import SequenceStats

SCHEMA = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}, "required": ["day"]}


def reply(text: str, reason: str, forced: int, stood: int) -> Reply:
    stats = SequenceStats(num_jump_forward_tokens=forced, num_accepted_jump_forward_tokens=stood)
    return Reply(0, 0, [1] * 10, text, stats, reason)


def a_run() -> Run:
    run = Run("ngram", seconds={"mask": 0.25, "total": 5.0})
    run.replies = [
        reply('{"day": "2026-02-28"}', "stop", 4, 4),
        reply('{"day": "2026-02-30"}', "stop", 3, 1),  # no such day
        reply("{", "stop", 0, 0),  # no JSON
        reply('{"day": ', "length", 1, 0),
    ]
    for milliseconds, count in ((1, 98), (64, 2)):
        run.mask_per_step.add(milliseconds / 1e3, count)
    run.mask_per_row.add(1e-5, 7)
    return run


def test_figures() -> None:
    figures = structured_figures(a_run(), checker(Structured.json(SCHEMA)))
    assert figures["mask_share"] == 0.05
    assert figures["mask_ms_per_step"] == {"p50": pytest.approx(1, rel=0.1), "p99": pytest.approx(64, rel=0.1)}
    assert figures["mask_ms_per_row"]["p99"] == pytest.approx(0.01, rel=0.1)
    assert (figures["jump_forward_tokens"], figures["accepted_jump_forward_tokens"], figures["jump_forward_share"]) == (
        8,
        5,
        0.125,
    )
    assert (figures["ended_outputs"], figures["cut_off_outputs"], figures["invalid_outputs"]) == (3, 1, 2)


def test_where_nobody_checks_no_output_is_said_to_fit() -> None:
    figures = structured_figures(a_run(), None)
    assert figures["invalid_outputs"] is None
    assert "?" in text_of({"drafter": "ngram", "structured": figures})


def test_the_table_fits_a_terminal_whole() -> None:
    text = text_of({"drafter": "prediction", "structured": structured_figures(a_run(), None)})
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def text_of(*runs: dict[str, object]) -> str:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(structured_table(runs))
    return captured.get()


def test_a_schema_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA), "utf-8")
    assert load_schema(file) == Structured.json(json.dumps(SCHEMA))
    file.write_text("{", "utf-8")
    with pytest.raises(InputError, match="no JSON"):
        load_schema(file)
    with pytest.raises(ConfigError, match="--schema"):
        load_schema(tmp_path / "none.json")
