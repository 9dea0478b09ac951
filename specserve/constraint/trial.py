"""Tries constraints in a process that can be killed: compiling one takes what time and memory its author likes. Knows
processes; knows no backend."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specserve.constraint.compiler import AUTO
from specserve.constraint.worker import READY
from specserve.errors import EngineError
from specserve.structured import Structured

_START_S = 60.0
_MAX_BYTES = 3 * 2**30


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a trial: `accepted` says of each output whether it may be said; `refused` why nothing may. Neither:
    the process was killed after the limit (`timed_out`), or died (`crashed` says how)."""

    accepted: list[bool] = field(default_factory=list)
    refused: str | None = None
    timed_out: bool = False
    crashed: str | None = None


class Trial:
    """One worker, started when it is first needed and again after it was killed. Calls come one after the other,
    whatever thread they are from. `limit_s` is for each of them, beyond the worker's own start."""

    def __init__(self, folder: Path, vocab_size: int, backend: str = AUTO, limit_s: float = 2.0) -> None:
        self._command = [sys.executable, "-m", "specserve.constraint.worker", str(folder), str(vocab_size), backend]
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._one_call = threading.Lock()
        self._said = b""

    def run(self, asked: Structured, outputs: Sequence[str] = ()) -> Outcome:
        """Compile, take the first mask, and look which outputs would be accepted. Raises EngineError when no worker
        can be started."""
        with self._one_call:
            if self._process is not None and self._process.poll() is not None:
                self._end()  # it was killed while it had nothing to do, which is nobody's fault
            if self._process is None:
                self._start()
            job = {"kind": asked.kind, "text": asked.text, "outputs": list(outputs)}
            line = self._ask(json.dumps(job))
            if line is None:
                return self._killed()
            told = json.loads(line)
        return Outcome(told.get("accepted", []), told.get("refused"))

    @property
    def process_id(self) -> int | None:
        """Of the worker; None while there is none."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the worker; whoever waits for it is told that it crashed."""
        process = self._process
        if process is not None:
            process.kill()
        with self._one_call:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> None:
        self._said = b""
        command = [*self._command, str(_MAX_BYTES), str(os.getpid())]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
        if self._line(_START_S) != READY:
            self._end()
            raise EngineError("The process that tries grammars did not start; its log says why.")

    def _ask(self, job: str) -> str | None:
        """The answer; None if none came in time."""
        assert self._process is not None and self._process.stdin is not None, "a worker runs"
        try:
            self._process.stdin.write(job.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._line(self._limit_s)

    def _line(self, seconds: float) -> str | None:
        assert self._process is not None and self._process.stdout is not None, "a worker runs"
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._said:
                if not selector.select(max(0.0, end - time.monotonic())):
                    return None
                piece = os.read(self._process.stdout.fileno(), 2**16)
                if not piece:
                    return None
                self._said += piece
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()

    def _killed(self) -> Outcome:
        assert self._process is not None, "a worker runs"
        try:
            status = self._process.wait(0.2)  # one that died is gone by now
        except subprocess.TimeoutExpired:
            self._end()
            return Outcome(timed_out=True)
        self._end()
        return Outcome(crashed=f"the process ended with status {status}")
