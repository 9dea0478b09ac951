"""Conversations, and long texts, become tokens in a process that can be stopped: what a model's chat template takes of
time and memory harms no other request."""

from __future__ import annotations

import array
import asyncio
import functools
import signal
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from specserve.errors import EngineError, InputError, TextError
from specserve.text.chat import OWN_TEMPLATE, TemplateOptions
from specserve.text.copies import Worker
from specserve.text.reasoning import QUESTIONS
from specserve.text.tokenizer import Tokenizer
from specserve.text.worker import LENGTH, Answer, Job, written

QUICK = 2**16  # characters of a conversation that takes some milliseconds
_FIRST_S = 0.1  # of CPU time, for such a one; if it needs more, it waits behind long ones
_S_PER_CHARACTER = 1e-5  # of CPU time, to tokenize, on a slow machine
_IDS_AT_ONCE = 2**14  # that become a list before another thread may run
_STUCK = 30  # times as long by the clock: a copy that does not even compute
_answer = msgspec.msgpack.Decoder(Answer).decode


class Chats:
    """Two copies of the worker: one for what is done quickly, and one for long conversations and for what has turned
    out not to be quick. `limit_s` are the seconds of CPU time that a template may take."""

    def __init__(self, folder: Path, limit_s: float = 2.0, template: TemplateOptions = OWN_TEMPLATE) -> None:
        self._limit_s = limit_s
        self._worker = Worker(folder, template)
        self._thread = ThreadPoolExecutor(1, "specserve-chats")
        self._quick, self._long = (_Line(self._worker, self._thread, name) for name in range(2))

    async def render(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], size: int, most: int | None
    ) -> Answer:
        """What Tokenizer.chat_ids makes of a conversation of `size` characters; how long it is, where that is more than
        `most` characters. Raises InputError for what is wrong in it, TextError where the template fails, and
        EngineError where there is no process to be had, or it ended or stood still through no fault of the template."""
        job = Job([dict(message) for message in messages], dict(options), self._seconds(size), most)
        if size <= QUICK:
            found = await self._quick.ask(job._replace(seconds=_FIRST_S, is_long=False))
            if isinstance(found, Answer):
                return _checked(found, job)
        return _checked(await self._long.ask(job), job)

    async def encode(self, text: str, add_special_tokens: bool) -> Answer:
        """What Tokenizer.encode makes of a long text. Raises TextError and EngineError as `render` does."""
        job = Job(text, {"add_special_tokens": add_special_tokens}, self._seconds(len(text)))
        return _checked(await self._long.ask(job), job)

    def _seconds(self, size: int) -> float:
        return self._limit_s + size * _S_PER_CHARACTER

    async def teach(self, tokenizer: Tokenizer) -> None:
        """Have this process's tokenizer know what its template makes of questions, so that it need not be run here.
        Raises EngineError as `render` does: that may pass, and is not remembered."""
        try:
            for content in QUESTIONS:
                found = await self.render([{"role": "user", "content": content}], {}, 1, None)
                tokenizer.questions[content] = listed(found.ids or b"")
        except (InputError, TextError):  # one that fails with the first question need not be run for the others
            tokenizer.questions |= dict.fromkeys(QUESTIONS)

    async def prepare(self) -> None:
        """Make ready what the first conversation would wait for: the process, and the template."""
        with suppress(InputError, TextError):  # a model without a template, or one that wants more than this
            await self.render([{"role": "user", "content": "a"}], {}, 1, None)
        await self._long.connect()

    def close(self) -> None:
        self._worker.kill()
        for line in (self._quick, self._long):
            line.close()
        self._thread.submit(self._worker.close)
        self._thread.shutdown(wait=True)


def _checked(found: Answer | int | None, job: Job) -> Answer:
    """Raises the error that an answer, or what _Line.ask says of a copy, tells of."""
    if not isinstance(found, Answer):
        what = "tokenizer" if isinstance(job.given, str) else "chat template"
        if found is None:
            how = f"stood still: it did not end within {_STUCK * job.seconds:.2g} s by the clock"
            raise EngineError(f"The process of the model's {what} {how}.")
        if found in (0, -signal.SIGKILL):  # by hand, or by a system whose memory is short
            raise EngineError(f"The process of the model's {what} was killed.")
        is_late = found == -signal.SIGPROF
        how = f"did not end within {job.seconds:.2g} s of CPU time" if is_late else "ended its process"
        raise TextError(f"The model's {what} {how} for this text.")
    if found.refused is not None:
        raise InputError(found.refused, found.param)
    if found.failed is not None:
        raise TextError(found.failed)
    return found


def listed(ids: bytes) -> list[int]:
    """Ids as they come from the worker."""
    numbers, found = array.array("i", ids), list[int]()
    for at in range(0, len(numbers), _IDS_AT_ONCE):
        found += numbers[at : at + _IDS_AT_ONCE]
    return found


class _Line:
    """Jobs for one copy, one after the other. A copy whose answer nobody waits for any more is replaced."""

    def __init__(self, worker: Worker, thread: ThreadPoolExecutor, name: int) -> None:
        self._worker, self._thread, self._name = worker, thread, name
        self._turn = asyncio.Lock()
        self._copy: asyncio.Task[_Copy] | None = None

    async def ask(self, job: Job) -> Answer | int | None:
        """The answer, or the exit status of a copy that ended over it, 0 if nobody knows why; None of one that stood
        still."""
        async with self._turn:
            found = await self._ask(job)
            if found == 0:  # the worker itself was gone, which is not the job's fault
                found = await self._ask(job)
            if isinstance(found, Answer) and found.preparing:
                await self._call(self._worker.prepare)
                self.close()
                found = await self._ask(job)
            return found

    async def connect(self) -> _Copy:
        """The copy, a new one where there is none. Whoever leaves meanwhile leaves it to the next."""
        if self._copy is not None and self._copy.done() and (self._copy.exception() or self._copy.result().has_ended):
            self.close()
        if self._copy is None:
            self._copy = asyncio.create_task(self._connected())
        return await asyncio.shield(self._copy)

    async def _ask(self, job: Job) -> Answer | int | None:
        copy = await self.connect()
        try:
            async with asyncio.timeout(_STUCK * job.seconds):
                return await copy.ask(job)
        except TimeoutError:
            self.close()
            return None
        except OSError:
            self.close()
            return (await self.connect()).status_before
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the copy, when it looks up."""
        if self._copy is not None and self._copy.done() and self._copy.exception() is None:
            self._copy.result().close()
        self._copy = None

    async def _connected(self) -> _Copy:
        return _Copy(*await self._call(functools.partial(self._worker.copy, self._name)))

    async def _call(self, function: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


class _Copy:
    """One copy's connection. `status_before`: how the copy ended whose place it has taken."""

    def __init__(self, connection: socket.socket, status_before: int) -> None:
        connection.setblocking(False)
        self._connection, self.status_before = connection, status_before

    async def ask(self, job: Job) -> Answer:
        """Raises OSError if it ends over it."""
        await asyncio.get_running_loop().sock_sendall(self._connection, written(job))
        (length,) = LENGTH.unpack(await self._read(LENGTH.size))
        return _answer(await self._read(length))

    @property
    def has_ended(self) -> bool:
        """Whether it has ended while it had nothing to do."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._connection.close()

    async def _read(self, size: int) -> bytearray:
        message = bytearray(size)
        left = memoryview(message)
        while left:
            came = await asyncio.get_running_loop().sock_recv_into(self._connection, left)
            if not came:
                raise ConnectionResetError
            left = left[came:]
        return message
