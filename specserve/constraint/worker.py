"""A process that compiles what nobody may wait for, and says what it would accept: it may hang, or die, and is then
killed and started anew by a Trial. Knows the tokenizer and the backends; imports neither torch nor transformers.

    python -m specserve.constraint.worker FOLDER SIZE BACKEND BYTES PARENT

On stdin a job a line, {"kind", "text", "outputs", "seconds"}; on stdout an answer each: {"refused": why}, {"accepted":
[...]}, whether each output may be said from its beginning to its end, or {"timed_out": true}, {"cancelled": true} or
{"crashed": how} of a job whose process was killed.

To start takes a second, which is too long for each constraint that has to be killed. So a copy of this process (fork)
compiles, one job after the other, and where a job takes more than its seconds of CPU time, or SIGTERM ends it, the
copy is replaced within milliseconds. A copy has no threads but its own: backends keep none that compiling needs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specserve.constraint.base import Grammar, RefusedError, Vocabulary
from specserve.constraint.compiler import Compiler
from specserve.constraint.vocabulary import vocabulary
from specserve.lifeline import end_with
from specserve.models.tokenizer import Tokenizer
from specserve.structured import Structured

READY = "ready"
_NICE = 5  # behind the engine, whose streams go on while a grammar is tried
# A core changes hands at a scheduler's tick, which may be every 4 ms: then a stream that waits for one waits for all of
# that. So a trial gives its core up after each of these times (in microseconds), for the other one.
_RUN_US, _PAUSE_US = 1000, 100


def accepts(grammar: Grammar, output: str, words: Vocabulary) -> bool:
    """Whether a text, split as the tokenizer does, may be said and may end where it does."""
    state = grammar.start()
    return all(state.advance(token) for token in (*words.encode(output), words.eos_ids[0]))


@contextmanager
def pausing() -> Iterator[None]:
    """Gives the core up often, where there are native kernels, which can."""
    if importlib.util.find_spec("specserve.kernels._native") is None:
        yield
        return
    from specserve.kernels import _native

    _native.pause_often(_RUN_US, _PAUSE_US)
    try:
        yield
    finally:
        _native.pause_no_more()


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Has SIGPROF end this process after so many seconds of CPU time: how busy others are condemns no constraint."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def answer(compiler: Compiler, words: Vocabulary, job: dict[str, Any]) -> dict[str, Any]:
    try:
        grammar = compiler.compile(Structured(job["kind"], job["text"]))
        return {"accepted": [accepts(grammar, output, words) for output in job["outputs"]]}
    except RefusedError as error:
        return {"refused": str(error).removeprefix("structured: ")}
    except MemoryError:
        return {"refused": "compiling it takes too much memory."}


class Copy:
    """A copy of this process that answers one job after the other, and another one once it was killed."""

    def __init__(self, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._answer = answer
        self._begin()

    def ask(self, line: str) -> dict[str, Any]:
        """What it says to a job; what became of it, if it says nothing."""
        if self._was_cancelled:  # too late for the job that it was meant for
            self._replace()
        try:
            self._stream.write(line)
            self._stream.flush()
            told = self._stream.readline()
        except OSError:
            told = ""
        if told.endswith("\n"):
            found: dict[str, Any] = json.loads(told)
            return found
        was_cancelled, status = self._was_cancelled, self._replace()
        if was_cancelled:
            return {"cancelled": True}
        return {"timed_out": True} if status == -signal.SIGPROF else {"crashed": f"the process ended with {status}"}

    def cancel(self, *_: object) -> None:
        """A signal's handler."""
        self._was_cancelled = True
        os.kill(self._pid, signal.SIGKILL)

    def _replace(self) -> int:
        """The exit status of the one that was killed."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until there is a copy that it could be for
        self._stream.close()
        status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self._begin()
        return status

    def _begin(self) -> None:
        self._was_cancelled = False
        parent, (ours, theirs) = os.getpid(), socket.socketpair()
        with warnings.catch_warnings():  # Python 3.12 warns of threads that the copy will not have
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if not self._pid:
            ours.close()
            self._serve(theirs, parent)
        theirs.close()
        self._stream = ours.makefile("rw", encoding="utf-8")
        ours.close()
        signal.signal(signal.SIGTERM, self.cancel)

    def _serve(self, connection: socket.socket, parent: int) -> None:
        """In the copy; never returns."""
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            end_with(parent)
            stream = connection.makefile("rw", encoding="utf-8")
            while line := stream.readline():
                job = json.loads(line)
                with pausing(), limited(job["seconds"]):
                    told = self._answer(job)
                stream.write(json.dumps(told) + "\n")
                stream.flush()
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(1)


def main(folder: str, size: str, backend: str, max_bytes: str, parent: str) -> None:
    end_with(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it reaches the whole group; the other side decides
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_AS, (int(max_bytes), int(max_bytes)))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    words = vocabulary(Tokenizer(Path(folder)), int(size))
    compiler = Compiler(lambda: words, backend)
    compiler.prepare()
    copy = Copy(lambda job: answer(compiler, words, job))
    print(READY, file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(copy.ask(line)), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
