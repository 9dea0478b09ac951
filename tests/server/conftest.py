"""A running server, as the command line starts it, and a client that sends exactly what it is told."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from specserve.testing import write_tiny_model

TINY = {"threads": 1, "max-num-seqs": 4, "kv-cache-gib": 0.01, "max-model-len": 256, "drain-timeout-s": 5}
START_S = 120.0


@dataclass(frozen=True)
class Reply:
    """A whole response. `json` of its body, `events` of a stream's."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found = self.json["error"]
        assert isinstance(found, dict)
        return found

    @property
    def events(self) -> list[Any]:
        """The data of each event; the end mark as it is."""
        data = [line.removeprefix("data: ") for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [event if event == "[DONE]" else json.loads(event) for event in data]


@dataclass
class Served:
    """`specserve serve` as a process of its own. `log` is the file of what it says."""

    process: subprocess.Popen[bytes]
    log: Path
    key: str | None = None
    port: int = field(default=0)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60,
    ) -> Reply:
        """One request on a connection of its own. A body that is no bytes is sent as JSON."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        sent = dict(headers or {})
        if self.key is not None:
            sent.setdefault("Authorization", f"Bearer {self.key}")
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            sent.setdefault("Content-Type", "application/json")
        try:
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any, **options: Any) -> Reply:
        return self.ask("POST", path, body, **options)

    def get(self, path: str, **options: Any) -> Reply:
        return self.ask("GET", path, **options)

    def raw(self, data: bytes = b"", timeout: float = 30) -> socket.socket:
        """A connection on which `data` was sent as it is."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=timeout)
        connection.sendall(data)
        return connection

    @property
    def engine_pid(self) -> int | None:
        """The engine's process, while there is one."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text("utf-8").split()
        return int(children[0]) if children else None

    @property
    def trial_workers(self) -> list[int]:
        """Its processes in which constraints are tried."""
        found = []
        for folder in Path("/proc").iterdir():
            try:
                is_ours = f"PPid:\t{self.process.pid}\n" in (folder / "status").read_text("utf-8")
                is_worker = b"structured.worker" in (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if is_ours and is_worker:
                found.append(int(folder.name))
        return found

    def wait_until_ready(self, seconds: float = START_S) -> None:
        """Ready, and with the worker that a server starts then: its pipes are no leak of a request."""
        self.until(lambda: self.get("/health").status == 200, seconds)
        self.until(lambda: bool(self.trial_workers), seconds)

    def until(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        """Waits for a condition; fails with the log when it does not come about, or the server has ended."""
        end, pause = time.monotonic() + seconds, 0.001
        while time.monotonic() < end:
            assert self.process.poll() is None, f"the server has ended:\n{self.said}"
            if condition():
                return
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        pytest.fail(f"not within {seconds} s; the server said:\n{self.said}")

    @property
    def said(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def is_idle(self) -> bool:
        """Whether nothing runs or waits and every block of the cache is free."""
        stats = self.get("/stats").json
        blocks = stats["kv_cache"]
        busy = stats["num_running"] or stats["num_waiting"]
        return not busy and blocks["num_free_blocks"] == blocks["num_blocks"]

    def end(self, number: int = signal.SIGTERM, seconds: float = 30) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(seconds)


@contextmanager
def serving(model: str | Path, folder: Path, *options: str, key: str | None = None, ready: bool = True, **named: Any):
    """A server for `model`; `named` options replace those for tiny models, or leave them out where they are None;
    `options` are added as they are."""
    arguments = [f"--{name}={value}" for name, value in {**TINY, **named}.items() if value is not None]
    command = [sys.executable, "-m", "specserve", "serve", str(model), "--port=0", *arguments, *options]
    log = folder / "server.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    served = Served(process, log, key)
    try:
        listening = re.compile(r"Listening on https?://127\.0\.0\.1:(\d+)")
        served.until(lambda: listening.search(served.said) is not None, START_S)
        found = listening.search(served.said)
        assert found is not None
        served.port = int(found[1])
        if ready:
            served.wait_until_ready()
        yield served
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.fixture(scope="session")
def serving_process() -> Any:
    """`serving`, for the conftest files below this one."""
    return serving


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small random model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="session")
def shared_server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of the small model that all tests share; what it is after a test is as it was before."""
    folder = tmp_path_factory.mktemp("server")  # every draft is made that is asked for, whatever it costs
    with serving(tiny, folder, "--served-model-name=tiny", "--admin", "--no-adaptive") as served:
        yield served


@pytest.fixture
def server(shared_server: Served) -> Iterator[Served]:
    """The shared server. Afterwards: the same engine, idle, nothing leaked."""
    engine, already_said = shared_server.engine_pid, len(shared_server.said)
    yield shared_server
    shared_server.until(shared_server.is_idle)
    assert shared_server.engine_pid == engine, shared_server.said
    assert "Error handling request" not in shared_server.said[already_said:], "an exception that nobody caught"
