"""`specserve ps`: servers that run, that load and that were killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specserve.cli.main import run
from specserve.server import running


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def told(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert run(["ps", "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_a_server_is_shown_while_it_runs(
    home: Path, tiny: Path, tmp_path: Path, serving_process: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving_process(tiny, tmp_path, "--served-model-name=mine") as server:
        address = f"http://127.0.0.1:{server.port}"
        [row] = told(capsys)
        assert (row["models"], row["folder"], row["state"]) == (["mine"], str(tiny), "ready")
        assert (row["address"], row["pid"]) == (address, server.process.pid)
        assert run(["ps"]) == 0
        header, line = capsys.readouterr().out.splitlines()
        assert header.split() == ["pid", "model", "address", "since", "state"]
        assert line.split()[:3] == [str(server.process.pid), "mine", address] and line.split()[-1] == "ready"
        server.end()
        assert told(capsys) == []
    assert list((home / "run").iterdir()) == []


def test_what_a_killed_server_left_is_not_shown_and_goes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import os, pathlib\nfrom specserve.server.running import registered\n"
        "with registered('http://127.0.0.1:9', ['x'], pathlib.Path('/')):\n    os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert len(list((home / "run").iterdir())) == 1
    assert told(capsys) == []
    assert list((home / "run").iterdir()) == []


def test_one_that_does_not_answer_is_silent(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for address in ("http://127.0.0.1:9", f"unix:{home}/none"):
        with running.registered(address, ("x",), home):
            assert [row["state"] for row in told(capsys)] == ["silent"]


def test_a_later_process_of_the_same_number_is_another(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running.registered("http://127.0.0.1:9", ("x",), home):
        path = home / "run" / f"{os.getpid()}.json"
        values = json.loads(path.read_text())
        path.write_text(json.dumps(values | {"started": values["started"] - 1}))
        assert told(capsys) == []
        (home / "run" / "7.json").write_text("{broken")
        assert told(capsys) == []
