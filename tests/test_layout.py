"""Whether replicas and a model's processes suit a machine: cores, heads, memory, devices, and a port."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve import layout as module
from specserve.cli.main import run
from specserve.layout import Layout, check
from specserve.ops import choice
from specserve.testing import write_tiny_model

PLENTY = 2**36


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "llama")


@pytest.fixture
def ops() -> Any:
    return choice.choose_ops(torch.device("cpu"), "auto", "auto", 1)


def rows_of(layout: Layout, folder: Path | None, ops: Any, free: int = PLENTY) -> tuple[dict[str, str], list[str]]:
    rows, faults = check(layout, folder, ops, "cpu", free)
    return dict(rows), [str(fault) for fault in faults]


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (Layout(2, 2), "4 (2 replicas, 2 of each model) with 2 threads each, on 8 usable cores"),
        (Layout(2, 1, 4), "2 (2 replicas, one of each model) with 4 threads each, on 8 usable cores"),
        (Layout(2, 1, 8), "more threads than cores, which slow each other down; --threads 4 is each one's share"),
        (Layout(8, 2), "more processes than cores, which slow each other down; start at most 8"),
    ],
)
def test_threads_are_held_against_cores(layout: Layout, said: str, ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: 8)
    monkeypatch.delenv("SPECSERVE_THREADS", raising=False)
    rows, faults = rows_of(layout, None, ops)
    assert rows["processes"].endswith(said)
    assert "specserve pull" in rows["model"]
    assert not faults


def test_heads_are_divided_or_the_numbers_that_divide_are_named(folder: Path, ops: Any) -> None:
    rows, faults = rows_of(Layout(1, 2), folder, ops)
    assert rows["KV heads"] == "1 + 1"
    assert not faults
    rows, (fault,) = rows_of(Layout(1, 3), folder, ops)
    assert rows["KV heads"] == fault
    assert "--tensor-parallel-size is 3" in fault
    assert "it may be 1, 2, 4" in fault


def test_layers_are_divided_into_no_more_stages_than_there_are(folder: Path, ops: Any) -> None:
    rows, faults = rows_of(Layout(num_stages=2), folder, ops)
    assert rows["layers"].endswith(" in 2 stages")
    assert not faults
    (fault,) = rows_of(Layout(num_stages=9), folder, ops)[1]
    assert "--pipeline-parallel-size is 9" in fault


def test_experts_are_divided_among_replicas(folder: Path, tmp_path: Path, ops: Any) -> None:
    mixtral = write_tiny_model(tmp_path / "mixtral", "mixtral")
    rows, faults = rows_of(Layout(2, divides_experts=True), mixtral, ops)
    assert rows["experts"] == "2 + 3"
    assert not faults
    for layout, model, words in (
        (Layout(6, divides_experts=True), mixtral, "--data-parallel-size is 6, and the model has 5 experts"),
        (Layout(2, divides_experts=True), folder, "this model has no experts"),
    ):
        rows, (fault,) = rows_of(layout, model, ops)
        assert words in fault
        assert rows["experts"] == fault


def test_a_model_that_cannot_be_divided_is_a_fault_only_where_it_is_to_be(tmp_path: Path, ops: Any) -> None:
    other = write_tiny_model(tmp_path / "olmo2", "olmo2")
    assert rows_of(Layout(2, 1), other, ops)[1] == []
    (fault,) = rows_of(Layout(1, 2), other, ops)[1]
    assert "run in one process" in fault


def test_memory_is_that_of_all_engines(folder: Path, ops: Any) -> None:
    rows, faults = rows_of(Layout(2, 1), folder, ops)
    assert "GiB that are free; each engine's KV cache has" in rows["memory"]
    assert not faults
    _, (fault,) = rows_of(Layout(2, 1), folder, ops, free=500_000_000)
    assert "Start fewer replicas, free some memory" in fault
    lines = [rows_of(Layout(number, 1), folder, ops, 2**31)[0]["memory"] for number in (1, 2)]
    one, two = (int(line.split(", ", 2)[2].removesuffix(" tokens").replace(",", "")) for line in lines)
    assert 0 < two < one / 2, "what a step works on each has for itself"


def test_weights_that_are_not_packed_are_there_for_each(folder: Path, ops: Any) -> None:
    plain = choice.choose_ops(torch.device("cpu"), "float32", "none", 1)
    spec = module.native_spec(folder)
    single = sum(module._weight_bytes(spec, plain, 1))
    counts = spec.shapes()
    table = counts["model.embed_tokens.weight"]
    floats = sum(torch.Size(shape).numel() for shape in counts.values()) * 4
    assert single == floats + (torch.Size(table).numel() * 4 if spec.tied_embeddings else 0)
    assert sum(module._weight_bytes(spec, plain, 2)) > single, "each process has the embedding"


def test_gpus_are_refused_before_a_start(folder: Path, ops: Any) -> None:
    _, faults = check(Layout(2, 1), folder, ops, "cuda:0", PLENTY)
    assert "start with --device cpu" in str(faults[0])
    assert check(Layout(1, 1, 2), folder, ops, "cuda:0", PLENTY)[1] == []


def test_doctor_shows_a_layout_and_ends_with_what_is_wrong_in_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", str(folder), "--json"]) == 0
    assert "Layout" not in json.loads(capsys.readouterr().out)
    assert run(["doctor", str(folder), "--tensor-parallel-size=2", "--data-parallel-size=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["Layout"]
    assert found["processes"].startswith("4 (2 replicas, 2 of each model)")
    assert found["KV heads"] == "1 + 1"
    assert run(["doctor", str(folder), "--tensor-parallel-size=3", "--json"]) == 2
    out, err = capsys.readouterr()
    assert "it may be 1, 2, 4" in json.loads(out)["Layout"]["KV heads"]
    assert "it may be 1, 2, 4" in " ".join(err.split())
    divided = ["doctor", str(folder), "--enable-expert-parallel", "--data-parallel-size=2"]
    for more, words in (([], "this model has no experts"), (["--tensor-parallel-size=2"], "must be one process")):
        assert run([*divided, *more]) == 2
        assert words in " ".join(capsys.readouterr().err.split())
    assert run(["doctor", str(folder), "--data-parallel-size=65"]) == 2
    assert "data_parallel_size" in capsys.readouterr().err


def test_doctor_says_whether_a_port_is_free(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(["doctor", str(folder), f"--port={port}", "--json"]) == 2
        out, err = capsys.readouterr()
        assert "cannot be listened on" in json.loads(out)["Port"]["listening"]
        assert "Choose another --port" in " ".join(err.split())
    assert run(["doctor", str(folder), f"--port={port}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["Port"]["listening"] == f"127.0.0.1:{port} is free"
