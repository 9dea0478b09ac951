"""Tries constraints in a process that can be killed: compiling one takes what time and memory its author likes."""

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

from specserve.errors import EngineError
from specserve.machine.lifeline import without_interrupts
from specserve.structured.compiler import AUTO
from specserve.structured.spec import Structured
from specserve.structured.worker import READY

_START_S = 60.0
_MAX_BYTES = 3 * 2**30
# Between two looks at whether a worker that says nothing computes: one that others keep from the cores still does.
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a trial: `accepted` says of each output whether it may be said; `refused` why nothing may. Neither:
    the process was killed after the limit (`timed_out`) or because nobody waits (`cancelled`), or died (`crashed` says
    how)."""

    accepted: list[bool] = field(default_factory=list)
    refused: str | None = None
    timed_out: bool = False
    cancelled: bool = False
    crashed: str | None = None


class Trial:
    """One worker, started when it is first needed and again after it was killed. Calls come one after the other,
    whatever thread they are from. `limit_s` is what each of them may take, in seconds of CPU time, beyond the worker's
    own start: that a machine has other work is no constraint's fault. One that waits and computes nothing hangs, and
    ends soon."""

    def __init__(self, folder: Path, vocab_size: int, backend: str = AUTO, limit_s: float = 2.0) -> None:
        self._command = [sys.executable, "-m", "specserve.structured.worker", str(folder), str(vocab_size), backend]
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._one_call = threading.Lock()
        self._changing = threading.Lock()  # of which call it is
        self._call: threading.Event | None = None
        self._said = b""
        self.is_ready = False  # a call would not have to start a worker

    def run(
        self,
        asked: Structured,
        outputs: Sequence[str] = (),
        limit_s: float | None = None,
        cancelled: threading.Event | None = None,
    ) -> Outcome:
        """Compile, take the first mask, and look which outputs would be accepted. `limit_s` takes the place of the
        trial's own; `cancelled` is what `cancel` knows this call by. Raises EngineError when no worker can be
        started."""
        seconds = self._limit_s if limit_s is None else limit_s
        with self._one_call:
            if self._process is not None and self._process.poll() is not None:
                self._end()  # it was killed while it had nothing to do, which is nobody's fault
            if self._process is None:
                self._start()
            job = {"kind": asked.kind, "text": asked.text, "outputs": list(outputs), "seconds": seconds}
            with self._changing:
                if cancelled is not None and cancelled.is_set():
                    return Outcome(cancelled=True)
                self._call = cancelled
            line = self._ask(json.dumps(job))
            with self._changing:
                self._call = None
            if line is None:
                return self._killed()
        return Outcome(**json.loads(line))

    def cancel(self, call: threading.Event) -> None:
        """End the call that knows this event, whether it runs or has yet to begin; its outcome says so."""
        with self._changing:
            call.set()
            if self._call is call and self._process is not None:
                self._process.terminate()

    @property
    def process_id(self) -> int | None:
        """Of the worker's copy that compiles; None while there is none."""
        if self._process is None:
            return None
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8").split()
        return int(children[0]) if children else None

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
            self._process, self.is_ready = None, False

    def _start(self) -> None:
        self._said = b""
        command = [*self._command, str(_MAX_BYTES), str(os.getpid())]
        pipe = subprocess.PIPE
        with without_interrupts():
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
        assert self._process.stdin is not None, "it is a pipe"
        os.set_blocking(self._process.stdin.fileno(), False)  # a worker that hangs reads no more than a pipe holds
        if self._line(_START_S) != READY:
            self._end()
            raise EngineError("The process that tries grammars did not start; its log says why.")
        self.is_ready = True

    def _ask(self, job: str) -> str | None:
        """The answer; None if it hangs or has ended."""
        assert self._process is not None and self._process.stdin is not None, "a worker runs"
        left = memoryview(job.encode() + b"\n")
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdin, selectors.EVENT_WRITE)
            try:
                while left:
                    if not selector.select(2 * _LOOK_S):
                        return None
                    left = left[os.write(self._process.stdin.fileno(), left) :]
            except BrokenPipeError:
                return None
        used = -1.0
        while (line := self._line(_LOOK_S)) is None and self._process.poll() is None:
            before, used = used, self._seconds_used()
            if used == before:
                break
        return line

    def _seconds_used(self) -> float:
        """CPU time of the copy that compiles."""
        try:
            process = self.process_id
            return 0.0 if process is None else time.clock_gettime((~process << 3) | 2)  # as clock_getcpuclockid does
        except OSError:  # it has just ended
            return 0.0

    def _line(self, seconds: float) -> str | None:
        """What the worker says next; None if it says nothing within so many seconds, or has ended."""
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
