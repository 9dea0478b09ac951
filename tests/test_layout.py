"""Whether replicas and a model's processes suit a machine: cores, heads, memory, devices, and a port."""

from __future__ import annotations

import json
import mmap
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve import layout as module
from specserve.cache.sizing import GIB
from specserve.cli.main import run
from specserve.config import EngineConfig
from specserve.errors import CapacityError
from specserve.layout import Layout, check, estimate
from specserve.models.loader import check_tensors, load_model, native_spec, part_bytes
from specserve.models.sharding import Shard
from specserve.ops import choice
from specserve.testing import fake_cuda, write_tiny_model

PLENTY = 2**36


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "llama")


@pytest.fixture
def ops() -> Any:
    return choice.choose_ops(torch.device("cpu"), "auto", "auto", 1)


OTHERS = ("num_prefill", "num_api_processes", "num_elsewhere", "divides_experts")


def laid_out(replicas: int = 1, ranks: int = 1, threads: int | None = None, stages: int = 1, **more: Any) -> Layout:
    sizes: dict[str, Any] = {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages, "threads": threads}
    others = {name: more.pop(name) for name in OTHERS if name in more}
    return Layout(EngineConfig(**sizes, **more), replicas, **others)


APART = {"ranks_listen": "10.0.0.1:7400", "ranks_secret_file": "secret"}


def rows_of(layout: Layout, folder: Path | None, ops: Any, free: int = PLENTY) -> tuple[dict[str, str], list[str]]:
    rows, faults = check(layout, folder, ops, "cpu", free)
    return dict(rows), [str(fault) for fault in faults]


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (laid_out(2, 2), "4 (2 replicas, 2 of each model) with 2 threads each, on 8 usable cores"),
        (laid_out(2, 1, 4), "2 (2 replicas, one of each model) with 4 threads each, on 8 usable cores"),
        (laid_out(2, 1, 8), "more threads than cores, which slow each other down; --threads 4 is each one's share"),
        (laid_out(8, 2), "more processes than cores, which slow each other down; start at most 8"),
        (
            laid_out(3, num_prefill=1),
            "1 of which compute prompts for the others, one of each model) with 2 threads each, on 8 usable cores",
        ),
        (laid_out(1, 2, num_api_processes=3), "cores; 3 that answer HTTP, and a coordinator"),
        (
            laid_out(1, 4, **APART),
            "(of the 4 of the model, each on a host of its own) with 8 threads each, on 8 usable cores",
        ),
        (
            laid_out(num_elsewhere=2),
            "2 at other addresses: run specserve doctor on their machines, with their options",
        ),
    ],
)
def test_threads_are_held_against_cores(layout: Layout, said: str, ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: 8)
    monkeypatch.delenv("SPECSERVE_THREADS", raising=False)
    rows, faults = rows_of(layout, None, ops)
    assert rows["processes"].endswith(said)
    assert layout.num_elsewhere or "specserve pull" in rows["model"]
    assert not faults


def test_heads_are_divided_or_the_numbers_that_divide_are_named(folder: Path, ops: Any) -> None:
    rows, faults = rows_of(laid_out(1, 2), folder, ops)
    assert rows["KV heads"] == "1 + 1"
    assert not faults
    rows, (fault,) = rows_of(laid_out(1, 3), folder, ops)
    assert rows["KV heads"] == fault
    assert "--tensor-parallel-size is 3" in fault
    assert "it may be 1, 2, 4" in fault


def test_layers_are_divided_into_no_more_stages_than_there_are(folder: Path, ops: Any) -> None:
    rows, faults = rows_of(laid_out(stages=2), folder, ops)
    assert rows["layers"] == "1 + 2 in 2 stages"
    assert not faults
    (fault,) = rows_of(laid_out(stages=9), folder, ops)[1]
    assert "--pipeline-parallel-size is 9" in fault


def test_experts_are_divided_among_replicas(folder: Path, tmp_path: Path, ops: Any) -> None:
    mixtral = write_tiny_model(tmp_path / "mixtral", "mixtral")
    rows, faults = rows_of(laid_out(2, divides_experts=True), mixtral, ops)
    assert rows["experts"] == "2 + 3"
    assert not faults
    for layout, model, words in (
        (laid_out(6, divides_experts=True), mixtral, "--data-parallel-size is 6, and the model has 5 experts"),
        (laid_out(2, divides_experts=True), folder, "this model has no experts"),
    ):
        rows, (fault,) = rows_of(layout, model, ops)
        assert words in fault
        assert rows["experts"] == fault


def test_a_model_that_cannot_be_divided_is_a_fault_only_where_it_is_to_be(tmp_path: Path, ops: Any) -> None:
    other = write_tiny_model(tmp_path / "olmo2", "olmo2")
    assert rows_of(laid_out(2, 1), other, ops)[1] == []
    (fault,) = rows_of(laid_out(1, 2), other, ops)[1]
    assert "run in one process" in fault


def test_memory_is_that_of_all_engines(folder: Path, ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "own_memory", lambda: 2**27)
    one, two, four = (estimate(laid_out(*sizes), folder, ops, PLENTY) for sizes in ((1,), (2,), (2, 2)))
    assert (two.weights, two.step) == (2 * one.weights, 2 * one.step), "weights that are not packed each has alone"
    assert two.processes - one.processes == pytest.approx(2**27, rel=0.01)
    assert four.processes - two.processes == 2 * 2**27
    assert one.kv == two.kv == four.kv
    rows, faults = rows_of(laid_out(2, 1), folder, ops)
    assert re.fullmatch(r"weights [\d.]+ GiB, processes .* in all, of 64\.00 GiB that are free, .*", rows["memory"])
    assert rows["KV cache"].startswith("of each engine: 32768 tokens in 2048 blocks of 16")
    assert not faults
    _, (fault,) = rows_of(laid_out(2, 1), folder, ops, free=400_000_000)
    assert "Start fewer replicas, a smaller model or --quantization int4, or free some memory" in fault
    with pytest.raises(CapacityError, match=r"(?s)One sequence of max_model_len .* Or: Start a smaller model"):
        estimate(laid_out(kv_cache_gib=1e-5), folder, ops, PLENTY)
    left = estimate(laid_out(kv_cache_gib=0.5), folder, ops, PLENTY)
    assert left.kv == pytest.approx(0.5 * GIB, rel=0.01)


@pytest.mark.parametrize("ranks", [1, 2])
def test_bytes_of_parts_are_those_that_are_loaded(tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a file that is large enough to be kept packed: its embedding, and all else."""
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "home"))
    folder = write_tiny_model(tmp_path / "m", "llama", hidden_size=512, intermediate_size=2048)
    ops = choice.choose_ops(torch.device("cpu"), "auto", "int8", 1)
    tensors, spec = check_tensors(folder), native_spec(folder)
    for rank in range(ranks):
        peers = None if ranks == 1 else ops.peers(mmap.mmap(-1, 2**25), rank, ranks)
        load_model(folder, ops, peers=peers)
        model = load_model(folder, ops, peers=peers)
        found = part_bytes(tensors, spec, ops, Shard(rank, ranks), range(spec.num_layers))
        assert model.num_mapped_bytes == pytest.approx(found.mapped, rel=0.001)


def test_of_processes_on_several_hosts_each_has_its_part(folder: Path, ops: Any) -> None:
    together, apart = (estimate(laid_out(1, 2, **how), folder, ops, PLENTY) for how in ({}, APART))
    assert together.weights == pytest.approx(2 * apart.weights, rel=0.01)
    assert together.processes > apart.processes
    assert apart.kv == together.kv / 2
    rows, faults = rows_of(laid_out(1, 2, **APART), folder, ops)
    assert "on this host" in rows["memory"] and "this process's part" in rows["KV cache"]
    assert rows["other hosts"].startswith("1, each with specserve rank --join 10.0.0.1:7400: weights up to ")
    assert rows["other hosts"].endswith("for the KV cache up to 1.00 of what this host's takes")
    assert not faults


@pytest.mark.parametrize(
    ("layout", "count", "said"),
    [
        (laid_out(2, 1), 2, "start with --device cpu"),
        (laid_out(1, 2), 1, "--tensor-parallel-size 2 takes cuda:0 to cuda:1, and torch sees cuda:0 to cuda:0 here"),
        (laid_out(1, 2), 2, None),
        (laid_out(1, 2, stages=2), 4, "--pipeline-parallel-size: processes with a GPU each divide layers"),
        (laid_out(1, 1, 2), 1, None),
    ],
)
def test_what_gpus_do_not_do_is_told_before_a_start(
    folder: Path, ops: Any, layout: Layout, count: int, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    faults = check(layout, folder, ops, "cuda:0", PLENTY)[1]
    assert not faults if said is None else said in str(faults[0])


def test_each_gpu_holds_its_part(folder: Path, ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECSERVE_ISA", raising=False)
    with fake_cuda() as device:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        there = choice.choose_ops(device, "auto", "auto", 1)
        one, two = (estimate(laid_out(1, ranks), folder, there, PLENTY) for ranks in (1, 2))
        assert one.weights / 2 < two.weights < one.weights, "but for the embedding and the norms, which each has"
        assert two.kv == one.kv / 2
        rows = dict(check(laid_out(1, 2), folder, there, "cuda:0", PLENTY)[0])
    assert "on each GPU" in rows["memory"] and "each process's part" in rows["KV cache"]


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--data-parallel-size 2 --prefill-replicas 2", "one at least must answer"),
        ("--tensor-parallel-size 2 --ranks-listen 127.0.0.1:0", "belong together"),
        ("--ranks-listen 127.0.0.1:0 --ranks-secret-file {secret}", "it needs tensor_parallel_size of at least 2"),
        ("--tensor-parallel-size 2 --data-parallel-size 2 {apart}", "belong to one engine"),
        ("--tensor-parallel-size 2 {apart}.no", "--ranks-secret-file"),
        ("--engine 10.0.0.2:7000 --data-parallel-size 2", "a server has the ones or the others"),
        ("--data-parallel-size 2 --kv-cache-gib 1e6", "kv_cache_gib is 1e+06"),
    ],
)
def test_doctor_refuses_what_a_start_refuses(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, said: str
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of twenty characters")
    apart = f"--ranks-listen 127.0.0.1:0 --ranks-secret-file {secret}"
    assert run(["doctor", str(folder), *options.format(secret=secret, apart=apart).split()]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_doctor_says_who_joins_where(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "secret").write_text("a secret of twenty characters")
    own = ["doctor", str(folder), "--tensor-parallel-size=2", f"--ranks-secret-file={tmp_path / 'secret'}", "--json"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run([*own, f"--ranks-listen=127.0.0.1:{port}"]) == 2
        assert "Choose another --ranks-listen" in json.loads(capsys.readouterr().out)["Ranks"]["this host"]
    for address, said in ((f"127.0.0.1:{port}", "has the first process"), ("192.0.2.1:7400", "has not that address")):
        assert run([*own, f"--ranks-listen={address}"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert said in found["Ranks"]["this host"] and f"--join {address}" in found["Ranks"]["this host"]
        assert found["Layout"]["processes"].startswith("1 (of the 2 of the model")
    assert run(["doctor", str(folder), "--engine=10.0.0.2:7000", "--api-processes=2", "--json"]) == 0
    assert "no engine here, 1 at" in json.loads(capsys.readouterr().out)["Layout"]["processes"]


def test_doctor_says_whether_a_port_is_free(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(["doctor", str(folder), f"--port={port}", "--json"]) == 2
        out, err = capsys.readouterr()
        assert "cannot be listened on" in json.loads(out)["Port"]["listening"]
        assert "Choose another --port" in " ".join(err.split())
    assert run(["doctor", str(folder), f"--port={port}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["Port"]["listening"] == f"127.0.0.1:{port} is free"
