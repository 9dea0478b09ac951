"""A process that turns conversations, and long texts, into tokens: a model's chat template is its author's program, and
may take what time and memory it likes. Imports neither torch nor transformers.

    python -m specserve.text.worker FOLDER DESCRIPTOR PARENT

DESCRIPTOR is a Unix socket on which Worker (in copies.py) first tells what an operator says of the template, and then
orders copies of this process (fork): a byte names one, which takes the place of that copied before under this name; the
answer is the exit status of the latter, or 0, and a socket. On that come jobs, one after the other, and go answers, as
frames. A job that takes more than its seconds of CPU time ends the copy by SIGPROF; one that wants more memory than
there is for it fails.
"""

from __future__ import annotations

import array
import gc
import io
import json
import mmap
import os
import signal
import socket
import struct
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from specserve.errors import InputError, ModelError
from specserve.machine.lifeline import end_with, fork, limited
from specserve.machine.memory import limit_memory
from specserve.machine.pausing import pausing
from specserve.text.chat import TemplateOptions
from specserve.text.control import UnpreparedError
from specserve.text.encoding import use_own_threads_only
from specserve.text.tokenizer import Tokenizer

READY = PREPARE = b"\xff"  # said once it has started; an order to make what a text with control tokens needs
_MSGPACK, _JSON = b"m", b"j"
STATUS, LENGTH = struct.Struct("=i"), struct.Struct("=I")
_MEMORY = 2**31  # bytes beyond what it has once it has started
_NICE = 5  # of a copy that works on long texts, behind the engine, whose streams go on meanwhile


class Job(NamedTuple):
    """A conversation, and the keyword arguments of Tokenizer.chat_ids, or a plain text, and those of Tokenizer.encode.
    `seconds` of CPU time are what it may take. A conversation's text of more than `most` characters is not tokenized.
    `is_long`: others go first."""

    given: list[dict[str, Any]] | str
    options: dict[str, Any]
    seconds: float
    most: int | None = None
    is_long: bool = True


class Answer(msgspec.Struct, kw_only=True):
    """The `text`, its `ids`, int32 as bytes, and names of what the template left `unread`; or `num_characters` of a
    text that is too long, and `fewest`, the tokens that it has at least, None where that is not known; or why there is
    neither: `refused`, with the parameter at fault, for what is wrong in the conversation, `failed` for what is wrong
    with the model's template, or that it needs `preparing`: PREPARE comes first."""

    text: str = ""
    ids: bytes | None = None
    unread: tuple[str, ...] = ()
    num_characters: int | None = None
    fewest: int | None = None
    refused: str | None = None
    param: str | None = None
    failed: str | None = None
    preparing: bool = False


def told(template: TemplateOptions) -> bytes:
    """The frame that says what an operator does."""
    return _frame(json.dumps([template.text, dict(template.values)]).encode())


def written(job: Job) -> bytes:
    """The frame of a job: msgpack, or JSON, which is slower, for what that cannot say: integers of more than 64 bits
    and halves of surrogate pairs."""
    try:
        return _frame(_MSGPACK + msgspec.msgpack.encode(job))
    except (OverflowError, UnicodeEncodeError):
        return _frame(_JSON + json.dumps(job).encode())


def _job(frame: bytes) -> Job:
    fields = msgspec.msgpack.decode(frame[1:]) if frame[:1] == _MSGPACK else json.loads(frame[1:])
    return Job(*fields)


def _frame(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message


def answer(tokenizer: Tokenizer, job: Job) -> Answer:
    try:
        if isinstance(job.given, str):
            return Answer(ids=_packed(tokenizer.encode(job.given, **job.options)))
        text, ids, unread = tokenizer.bounded_chat_ids(job.given, job.most, **job.options)
        if ids is None:
            return Answer(num_characters=len(text), fewest=tokenizer.fewest_tokens(text))
        return Answer(text=text, ids=_packed(ids), unread=unread)
    except UnpreparedError:
        return Answer(preparing=True)
    except InputError as error:
        return Answer(refused=str(error), param=error.param)
    except (ModelError, MemoryError) as error:
        return Answer(failed=str(error) or "It takes more memory than one request may to turn this into tokens.")


def _packed(ids: list[int]) -> bytes:
    return array.array("i", ids).tobytes()


def _serve(stream: io.BufferedRWPair, tokenizer: Tokenizer) -> None:
    is_nice = False
    while length := stream.read(LENGTH.size):
        job = _job(stream.read(*LENGTH.unpack(length)))
        if job.is_long and not is_nice:
            os.nice(_NICE)
            is_nice = True
        with limited(job.seconds), pausing() if job.is_long else nullcontext():
            message = msgspec.msgpack.encode(answer(tokenizer, job))
        stream.write(_frame(message))
        stream.flush()


def _num_bytes() -> int:
    """Of this process's address space."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[0]) * mmap.PAGESIZE


def main(folder: str, descriptor: str, parent: str) -> None:
    end_with(int(parent))
    use_own_threads_only()
    control = socket.socket(fileno=int(descriptor))
    (length,) = LENGTH.unpack(control.recv(LENGTH.size, socket.MSG_WAITALL))
    template = TemplateOptions(*json.loads(control.recv(length, socket.MSG_WAITALL)))
    tokenizer = Tokenizer(Path(folder), template)
    limit_memory(_num_bytes() + _MEMORY)
    gc.freeze()  # copies share what nobody looks at
    control.sendall(READY)
    pids: dict[bytes, int] = {}

    def serve(connection: socket.socket) -> None:
        control.close()
        _serve(connection.makefile("rwb"), tokenizer)

    while order := control.recv(1):
        if order == PREPARE:
            tokenizer.prepare()
            control.sendall(PREPARE)
            continue
        status = 0
        if order in pids:
            os.kill(pids[order], signal.SIGKILL)  # it may have ended itself already
            status = os.waitstatus_to_exitcode(os.waitpid(pids[order], 0)[1])
        pids[order], connection = fork(serve)
        socket.send_fds(control, [STATUS.pack(status)], [connection.fileno()])
        connection.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
