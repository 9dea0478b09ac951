"""How a server starts and ends where it is not left to do so in peace: Ctrl-C in a terminal, closed streams, no folder,
options that cannot be. Each is a process, as the command line starts it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

OPTIONS = ["--port=0", "--threads=1", "--max-num-seqs=2", "--kv-cache-gib=0.01", "--max-model-len=2048"]


@contextmanager
def running(command: Sequence[str], **popen: Any) -> Iterator[subprocess.Popen[str]]:
    """A process group of its own, as a terminal would have it."""
    with subprocess.Popen(command, text=True, start_new_session=True, **popen) as process:
        try:
            yield process
        finally:
            process.kill()  # if it has not ended


def command(model: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "specserve", "serve", str(model), *OPTIONS, *options]


def until(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"it ended with {process.returncode}"
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.005)


def children(process: subprocess.Popen[str]) -> list[str]:
    try:
        return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text("utf-8").split()
    except OSError:
        return []


def has_ended(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text("utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(("moment", "expected"), [("importing", 130), ("loading", 0), ("ready", 0)])
def test_ctrl_c_ends_a_server_and_nothing_is_said(moment: str, expected: int, tiny: Path, tmp_path: Path) -> None:
    """Whatever the server does when it comes: all of the terminal's processes get it, and none has a traceback. Once it
    listens that is success."""
    log = tmp_path / "log"
    with log.open("wb") as stream, running(command(tiny), stdout=stream, stderr=stream) as process:
        said = {"loading": "Listening on", "ready": "Ready on"}  # when the process starts that tries grammars
        until(lambda: bool(children(process)) and said.get(moment, "") in log.read_text("utf-8"), process)
        os.killpg(process.pid, signal.SIGINT)
        status = process.wait(60)
    text = log.read_text("utf-8")
    assert status == expected, text
    assert "Traceback" not in text and "KeyboardInterrupt" not in text
    assert [line for line in text.splitlines() if " ERROR " in line] == []


@pytest.mark.parametrize("is_stuck", [False, True])
def test_ctrl_c_twice_cuts_off_what_runs(is_stuck: bool, tiny: Path, tmp_path: Path) -> None:
    """At once, though draining may take 1000 s and even where the engine does not react; a third one changes nothing.
    The log says what was cut off, and so does the answer to its client; no process is left."""
    log = tmp_path / "log"
    with (
        log.open("wb") as stream,
        running(command(tiny, "--drain-timeout-s=1000"), stdout=stream, stderr=stream) as process,
    ):
        until(lambda: "Ready on" in log.read_text("utf-8"), process)
        (port,) = set(re.findall(r"on http://127\.0\.0\.1:(\d+)", log.read_text("utf-8")))
        below = [int(pid) for pid in children(process)]
        (engine,) = [pid for pid in below if "server.engine.process" in Path(f"/proc/{pid}/cmdline").read_text("utf-8")]
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
        body = {"prompt": "x", "max_tokens": 2000, "n": 2, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        while (line := response.readline()).startswith(b":") or not line.strip():
            assert line, "the stream has ended"
        assert line.startswith(b"data: ") and b"error" not in line
        os.kill(engine, signal.SIGSTOP)  # so that it does not end before
        os.killpg(process.pid, signal.SIGINT)
        until(lambda: "Draining 1 requests" in log.read_text("utf-8"), process)
        if not is_stuck:
            os.kill(engine, signal.SIGCONT)
        for _ in range(2):
            os.killpg(process.pid, signal.SIGINT)
        status = process.wait(60)
        assert b"The server is ending" in response.read()
        connection.close()
    text = log.read_text("utf-8")
    assert status == 130, text
    assert "1 requests are cut off and told so: a second signal." in text
    assert "Traceback" not in text and "KeyboardInterrupt" not in text
    assert all(has_ended(pid) for pid in below)


@pytest.mark.parametrize(
    ("option", "complaint", "listens"),
    [
        ("--drafter=nosuch", "Unknown drafter 'nosuch'. Known: auto, ", False),
        ("--drafter=ngra", "Did you mean 'ngram'?", False),
        ("--root-path=/v1", "--root-path is '/v1', and this server has /v1/chat/completions itself; ", False),
        ("--drafter=draft_model", "Drafter 'draft_model' needs", True),
        ("--drafter-options.nosuch=1", "'nosuch'", True),
    ],
)
def test_what_cannot_be_served_is_status_2(option: str, complaint: str, listens: bool, tiny: Path) -> None:
    """As for every other command; and where it can be known before, nothing is listened on."""
    with running(command(tiny, option), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    (line,) = [line for line in err.splitlines() if line.startswith("specserve: ")]
    assert complaint in line
    assert "Starting another" not in err, "it would fail again"
    assert ("Listening" in err) == listens
    assert "Traceback" not in out + err


def test_an_address_that_is_taken_is_told_in_one_line(tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"--port={taken.getsockname()[1]}"
        with running(command(tiny, port), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            out, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    assert "--port" in err
    assert "Traceback" not in out + err


def test_without_streams_and_without_a_folder(tiny: Path, tmp_path: Path) -> None:
    """As some supervisors start programs: every stream closed, the working folder gone."""
    folder, path = tmp_path / "gone", tmp_path / "s"
    folder.mkdir()
    script = f'cd {folder} && rmdir {folder} && exec "$@" <&- >&- 2>&-'
    with running(["sh", "-c", script, "sh", *command(tiny, f"--uds={path}")]) as process:
        until(lambda: health(path) == 200, process)
        process.terminate()
        assert process.wait(60) == 0


def health(path: Path) -> int | None:
    """The status of GET /health over a Unix socket; None while nobody listens."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    try:
        connection.sock.connect(str(path))
        connection.request("GET", "/health")
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()
