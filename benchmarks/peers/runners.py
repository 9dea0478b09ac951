"""The comparison's side of a runner: start it, ask it, hold it still while others run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from wire import Answer, Setup

HERE = Path(__file__).parent
LOG_TAIL = 15  # lines of its log that a failed runner is quoted with


class RunnerError(Exception):
    """A runner ended, or said nothing for too long. The message quotes its log."""


class Runner:
    """One engine in a process group of its own, stopped (SIGSTOP) except while it starts or answers: an engine whose
    idle threads spin would otherwise take the cores from the others.

    `unsupported` says why the engine cannot run this setup, None if it can. `ready_s` is how long it took to start.
    """

    def __init__(self, peer: str, setup: Setup, log: Path, timeout_s: float) -> None:
        self.peer, self.setup, self._log, self._timeout = peer, setup, log, timeout_s
        command = [_python(peer, Path(setup.home)), str(HERE / f"run_{peer}.py"), json.dumps(asdict(setup))]
        begun = time.perf_counter()
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=_environment(peer, setup.threads),
                start_new_session=True,
            )
        try:
            hello = self._read()
        except BaseException:  # a key press included: the group does not hear of it
            self.close()
            raise
        self.ready_s = time.perf_counter() - begun
        self.about: dict[str, Any] = hello.get("ready", {})
        self.unsupported: str | None = hello.get("unsupported")
        self._signal(signal.SIGSTOP)

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool) -> Answer:
        """New tokens of each prompt, all at once. Raises RunnerError."""
        request = {"prompts": prompts, "max_tokens": max_tokens, "ignore_eos": ignore_eos}
        return Answer(**self._ask(request))

    def reset(self) -> None:
        """Make the engine forget earlier requests. Raises RunnerError."""
        self._ask({"reset": True})

    def close(self) -> None:
        self._signal(signal.SIGKILL)  # the group: some engines are several processes
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None, "it was opened with a pipe"
        with self._running():
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                raise RunnerError(self._failure("ended")) from None
            return self._read()

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _read(self) -> dict[str, Any]:
        """The next reply. A runner that takes longer than the timeout is killed, which ends the wait."""
        assert self._process.stdout is not None, "it was opened with a pipe"
        watch = threading.Timer(self._timeout, self._signal, [signal.SIGKILL])
        begun = time.monotonic()
        watch.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watch.cancel()
        if not line:
            late = time.monotonic() - begun >= self._timeout
            raise RunnerError(self._failure(f"said nothing for {self._timeout:.0f} s" if late else "ended"))
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _failure(self, what: str) -> str:
        tail = self._log.read_text("utf-8", errors="replace").splitlines()[-LOG_TAIL:]
        return f"{self.peer} {what}. The end of {self._log}:\n" + "\n".join(f"  {line}" for line in tail)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has ended; the next read says so
            os.killpg(self._process.pid, number)


def _python(peer: str, home: Path) -> str:
    """The interpreter of a peer's own environment; specserve runs in this one."""
    if peer == "specserve":
        return sys.executable
    path = home / peer / "venv" / "bin" / "python"
    if not path.exists():
        raise RunnerError(f"{peer} is not installed: {path} is not there. Run benchmarks/peers/setup.sh {peer} first.")
    return str(path)


def _environment(peer: str, threads: int) -> dict[str, str]:
    """Nothing of this process's Python leaks into a peer's, and no engine looks for a model elsewhere."""
    ours = {"VIRTUAL_ENV", "PYTHONPATH"} if peer != "specserve" else set()
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
