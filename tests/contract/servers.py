"""Servers as the command line starts them, and what must hold of each when a client has left. Knows no client."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

KEY = "contract-key"
MODEL = "smollm2-135m"
COMMON = ("--port=0", f"--api-key={KEY}", "--kv-cache-gib=0.5", "--status-interval-s=0")
KINDS: dict[str, tuple[str, ...]] = {
    "drafting": ("--drafter=ngram",),
    "plain": ("--drafter=none",),
    # Answers that nobody limits end soon, though a small model may not end them: Codex's prompt takes 6,300 tokens.
    "bounded": ("--max-model-len=7168",),
    # One request at a time, none waits, and none lasts: what a full and impatient server says.
    "narrow": ("--drafter=none", "--max-num-seqs=1", "--max-queue=0", "--request-timeout-s=6"),
    # Thousands of requests for whatever can be asked for: a random model of a few layers, and short answers.
    "tiny": ("--drafter=ngram", "--max-model-len=96", "--admin", f"--served-model-name={MODEL}"),
}
_START_S = 300.0
_IDLE_S = 60.0
_LISTENING = re.compile(r"Listening on (http://\S+?);")


@dataclass(frozen=True)
class Server:
    """A server's process, where it listens and the file of what it says."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON body of a GET."""
        request = Request(self.url + path, headers={"Authorization": f"Bearer {KEY}"})
        try:
            with urlopen(request, timeout=60) as reply:
                return reply.status, json.load(reply)
        except HTTPError as error:
            return error.code, json.load(error)

    def faults(self) -> list[str]:
        """What is wrong with a server whose clients have left: it has ended, its engine is another one or still at
        work, or something happened that nobody foresaw."""
        if self.process.poll() is not None:
            return [f"the server has ended with status {self.process.returncode}"]
        found = []
        stats = self._when_idle()
        if stats["num_restarts"]:
            found.append("the engine was started again")
        if not _is_idle(stats):
            found.append(f"not idle {_IDLE_S:g} s after the last request: {stats['num_running']} running")
        if "Traceback" in self.log.read_text("utf-8", "replace"):
            found.append(f"a traceback in {self.log}")
        return found

    def _when_idle(self) -> dict[str, Any]:
        end = time.monotonic() + _IDLE_S
        while True:
            stats: dict[str, Any] = self.get("/stats")[1]
            if _is_idle(stats) or time.monotonic() > end:
                return stats
            time.sleep(0.05)


def _is_idle(stats: dict[str, Any]) -> bool:
    blocks = stats["kv_cache"]
    return not stats["num_running"] and not stats["num_waiting"] and blocks["num_free_blocks"] == blocks["num_blocks"]


@contextmanager
def serving(kind: str, log: Path) -> Iterator[Server]:
    """A server of one of the KINDS, ready. Raises RuntimeError with what it said when it does not become ready."""
    model = str(tiny_model(log.parent / "tiny")) if kind == "tiny" else MODEL
    command = [sys.executable, "-m", "specserve", "serve", model, *COMMON, *KINDS[kind]]
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream)
    try:
        yield _ready(process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tiny_model(folder: Path) -> Path:
    """The folder of a small random model, which is written if it is not there."""
    if not (folder / "config.json").is_file():
        program = "import pathlib, sys; from specserve.testing import write_tiny_model as write"
        program += "; write(pathlib.Path(sys.argv[1]), 'llama')"
        subprocess.run([sys.executable, "-c", program, str(folder)], check=True)
    return folder


def _ready(process: subprocess.Popen[bytes], log: Path) -> Server:
    end = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < end:
        said = _LISTENING.search(log.read_text("utf-8", "replace"))
        if said is not None:
            server = Server(process, log, said[1])
            if server.get("/health")[0] == 200:
                return server
        time.sleep(0.1)
    raise RuntimeError(f"The server did not become ready. It said:\n{log.read_text('utf-8', 'replace')}")
