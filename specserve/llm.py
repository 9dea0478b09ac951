"""The Python SDK: LLM for scripts, whose engine runs in the calling thread, and AsyncLLM for asyncio, whose engine has
a thread of its own.

    from specserve import LLM, SamplingParams
    with LLM(drafter="ngram") as llm:
        print(llm.chat([{"role": "user", "content": "Hello!"}], SamplingParams(max_tokens=64))[0].outputs[0].text)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence as Many
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from rich.progress import Progress

from specserve.checkpoint.generation_config import AUTO, check_named, stated_by
from specserve.config import DEFAULT_MODEL, EngineConfig
from specserve.engine.build import build
from specserve.engine.compiling import Compiling
from specserve.engine.counters import Counters
from specserve.engine.engine import Engine
from specserve.engine.outputs import Chunk, Collector, CompletionOutput, RequestOutput
from specserve.engine.port import LocalPort, ThreadPort
from specserve.engine.request import Request
from specserve.errors import EngineError, Interrupted, SpecserveError
from specserve.machine.ownership import Ownership, interrupted_after
from specserve.prompts import Messages, Prediction, Prompt, Requests, as_conversations, as_prompts, one_each
from specserve.speculation.host import DraftHost
from specserve.speculation.lookup import makers
from specserve.terminal import console
from specserve.types import Event, SamplingParams

__all__ = ["LLM", "AsyncLLM", "Chunk", "CompletionOutput", "RequestOutput"]


class LLM:
    """An engine in this process. Options are the fields of EngineConfig. A context manager; close() frees the memory.

    Calls without `params` are sampled as the checkpoint's generation_config.json recommends, or another file or folder;
    with `generation_config="none"` as SamplingParams say. `sampling_params` gives these defaults to what a caller sets.

    Every call that generates takes, for all its prompts, `drafter`: a name to draft with instead of the engine's own
    drafter, "none" for plain decoding; and `prediction`: text or token ids that the answer will mostly be, which it
    drafts from unless a drafter is named. Neither changes an answer (with the default verification), only its time.

    Several threads may call it: their requests run in the same steps, each thread waits for its own, and a step is
    taken by whoever's turn it is. For asyncio there is AsyncLLM.

    It belongs to the process that made it. After a fork (os.fork, or multiprocessing with that start method) calls in
    the child raise EngineError, since the engine's threads are not there: make one in each process, or start processes
    with "spawn".

    torch's number of threads is the engine's while a call runs a step, and the caller's own in between. It is one for
    the whole process: other threads that use torch meanwhile see it change.

    Raises ConfigError, ModelError or CapacityError when it cannot start.
    """

    def __init__(
        self, model: str = DEFAULT_MODEL, *, generation_config: str = AUTO, progress: bool = False, **options: Any
    ) -> None:
        self.config = EngineConfig(model=model, **options)
        check_named(generation_config)
        self._owner = Ownership()
        threads = torch.get_num_threads()
        try:
            built = build(self.config, progress=progress)
            self._torch_threads = torch.get_num_threads()
        finally:
            torch.set_num_threads(threads)
        self.tokenizer = built.tokenizer
        self.device, self.dtype, self.threads = built.device, built.dtype, built.threads
        self.quantization, self.summary = built.quantization, built.summary
        self._requests = Requests(self.tokenizer, stated_by(generation_config, built.folder))
        self._port: LocalPort | None = LocalPort(built.engine, Compiling(built.compiler, built.tokenizer.markers))

    @property
    def engine(self) -> Engine:
        """The engine itself, for tests and measurements; who steps it does so within `exclusive`. Raises EngineError
        after close(), and in a process that was forked since."""
        return self._open_port().engine

    @contextmanager
    def exclusive(self) -> Iterator[Engine]:
        """The engine to oneself: calls of other threads wait until the block ends, and torch has the engine's number of
        threads. Raises EngineError as `engine` does."""
        with self._exclusive_port() as port:
            yield port.engine

    def generate(
        self,
        prompts: Prompt | Many[Prompt],
        params: SamplingParams | Many[SamplingParams] | None = None,
        *,
        drafter: str | None = None,
        prediction: Prediction | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete one prompt or many, in order. A prompt is text or a list of token ids; `params` is one for all or
        one for each, None the model's. Raises InputError for the first bad one, before anything runs; on Ctrl-C
        Interrupted, a KeyboardInterrupt that has the outputs which had ended."""
        batch = as_prompts(prompts)
        fields = self._requests.fields(drafter, prediction)
        each = zip(batch, one_each(params, len(batch)), strict=True)
        return self._run([self._requests.of_prompt(p, s, **fields) for p, s in each], progress)

    def chat(
        self,
        messages: Messages | Many[Messages],
        params: SamplingParams | Many[SamplingParams] | None = None,
        *,
        drafter: str | None = None,
        prediction: Prediction | None = None,
        progress: bool = False,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or a list of them, through the model's chat
        template; `template` goes to it. What a model that reasons thinks first is the outputs' `reasoning`."""
        batch = as_conversations(messages)
        fields = self._requests.fields(drafter, prediction)
        each = zip(batch, one_each(params, len(batch)), strict=True)
        return self._run([self._requests.of_chat(m, s, template, **fields) for m, s in each], progress)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        drafter: str | None = None,
        prediction: Prediction | None = None,
        explain: bool = False,
    ) -> Iterator[Chunk]:
        """Complete one prompt and yield its text as it comes. Leaving the loop early aborts the request. With `explain`
        each chunk has `explained`: who proposed what in its step, what was accepted, and what the step took."""
        fields = self._requests.fields(drafter, prediction, explain=explain)
        return self._stream(self._requests.of_prompt(prompt, params, **fields))

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        drafter: str | None = None,
        prediction: Prediction | None = None,
        explain: bool = False,
        **template: Any,
    ) -> Iterator[Chunk]:
        """Answer one conversation and yield the text as it comes."""
        fields = self._requests.fields(drafter, prediction, explain=explain)
        return self._stream(self._requests.of_chat(messages, params, template, **fields))

    def sampling_params(self, *, chat: bool = True, **fields: Any) -> SamplingParams:
        """These fields, and else what calls of `chat`, or of `generate`, have without `params`. Raises InputError."""
        return self._requests.params(chat, fields)

    def use_drafter(self, name: str, num_speculative_tokens: int | None = None, **options: Any) -> None:
        """Draft with another drafter from now on where a call names none. Only while nothing runs."""
        with self.exclusive() as engine:
            vocab_size, timeout_s = engine.limits.vocab_size, self.config.drafter_timeout_s
            host = DraftHost.of(name, makers(name, options), engine.policy.context.reopened(), vocab_size, timeout_s)
            k = engine.policy.num_tokens if num_speculative_tokens is None else num_speculative_tokens
            engine.use(host, k, self.config.adaptive)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes that no running request uses."""
        with self._exclusive_port() as port:
            port.reset_prefix_cache()

    def counters(self) -> Counters:
        """A snapshot of the engine's totals."""
        with self.exclusive() as engine:
            return engine.counters.snapshot()

    def close(self) -> None:
        """Free the memory. In a process that was forked since, that is the parent's affair."""
        if self._port is not None and self._owner.is_here:
            with self._owner:
                self._port.close()
        self._port = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, made: list[tuple[Request, RequestOutput]], progress: bool) -> list[RequestOutput]:
        with self._submitted(made) as collectors, _progress_bar(len(made), progress) as show:
            try:
                while not all(collector.finished for collector in collectors):
                    self._step(collectors)
                    show(sum(collector.finished for collector in collectors))
            except KeyboardInterrupt as error:
                ended = [out if each.finished else None for each, (_, out) in zip(collectors, made, strict=True)]
                raise Interrupted(ended) from error
        return [output for _, output in made]

    def _stream(self, made: tuple[Request, RequestOutput]) -> Iterator[Chunk]:
        with self._submitted([made]) as (collector,):
            while not collector.finished:
                self._step([collector])
                while collector.chunks:
                    yield collector.chunks.popleft()
            yield from collector.chunks  # of the step that another thread took

    @contextmanager
    def _submitted(self, made: list[tuple[Request, RequestOutput]]) -> Iterator[list[_Answer]]:
        """Queue requests all together or not at all; whatever still runs at the end is aborted."""
        port = self._open_port()
        try:
            grammars = [port.compile(request) for request, _ in made]
            collectors = [_Answer(output, request.params, self.tokenizer, port.abort) for request, output in made]
            with self._exclusive_port():
                for (request, _), grammar, collector in zip(made, grammars, collectors, strict=True):
                    port.add(request, grammar, collector.push)
            yield collectors
        finally:
            if self._owner.is_here:
                with self._owner:
                    for request, _ in made:
                        port.abort(request.id)

    def _step(self, awaited: list[_Answer]) -> None:
        """One engine step, unless all of `awaited` are whole. Its events go to all streams; its failure ends them."""
        with self._exclusive_port() as port, interrupted_after():
            if failures := [answer.failure for answer in awaited if answer.failure is not None]:
                raise failures[0]
            try:
                if not all(answer.finished for answer in awaited):
                    port.step()
            except BaseException as error:
                port.fail(EngineError(f"A step of the engine failed: {type(error).__name__}: {error}"))
                raise

    def _open_port(self) -> LocalPort:
        self._owner.check()
        if self._port is None:
            raise EngineError("This LLM was closed. Make a new one.")
        return self._port

    @contextmanager
    def _exclusive_port(self) -> Iterator[LocalPort]:
        with self._owner:
            port, threads = self._open_port(), torch.get_num_threads()
            torch.set_num_threads(self._torch_threads)
            try:
                yield port
            finally:
                torch.set_num_threads(threads)


class _Answer(Collector):
    """Of a call of LLM. Its events may come from another call's step: what fails here is this call's alone."""

    failure: Exception | None = None

    @property
    def finished(self) -> bool:
        return self.failure is None and super().finished  # the step that is asked for then raises

    def push(self, event: Event | SpecserveError) -> None:
        try:
            if self.failure is None:  # else the text has a hole
                super().push(event)
        except Exception as error:
            self.failure = error


class AsyncLLM:
    """An engine on a thread of its own, for asyncio. Cancelling a call or leaving a stream aborts its request. Calls of
    a lower `priority` (-64 to 64) run first, and are preempted last when memory is short; a step lets a call pass 16
    earlier ones, so each has its turn. All else as for LLM.

    Any thread and event loop may call it. It belongs to the process that made it: after a fork calls in the child raise
    EngineError. torch's number of threads is set for the whole process (1 where native kernels serve, else `threads`),
    as the engine's steps run beside the caller's own code."""

    def __init__(
        self, model: str = DEFAULT_MODEL, *, generation_config: str = AUTO, progress: bool = False, **options: Any
    ) -> None:
        self.config = EngineConfig(model=model, **options)
        check_named(generation_config)
        built = build(self.config, progress=progress)
        self.tokenizer, self.summary = built.tokenizer, built.summary
        self.engine = built.engine  # its counters may be read; everything else belongs to the port's thread
        self._requests = Requests(self.tokenizer, stated_by(generation_config, built.folder))
        self._owner = Ownership()
        self._port = ThreadPort(LocalPort(built.engine, Compiling(built.compiler, built.tokenizer.markers)))

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        drafter: str | None = None,
        prediction: Prediction | None = None,
    ) -> RequestOutput:
        """Complete one prompt; many calls at once are batched by the engine."""
        fields = self._requests.fields(drafter, prediction, priority=priority)
        return await self._whole(*self._requests.of_prompt(prompt, params, **fields))

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        drafter: str | None = None,
        prediction: Prediction | None = None,
        **template: Any,
    ) -> RequestOutput:
        """Answer one conversation."""
        fields = self._requests.fields(drafter, prediction, priority=priority)
        return await self._whole(*self._requests.of_chat(messages, params, template, **fields))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        drafter: str | None = None,
        prediction: Prediction | None = None,
        explain: bool = False,
    ) -> AsyncIterator[Chunk]:
        """Complete one prompt and yield its text as it comes."""
        fields = self._requests.fields(drafter, prediction, priority=priority, explain=explain)
        return self._stream(*self._requests.of_prompt(prompt, params, **fields))

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        drafter: str | None = None,
        prediction: Prediction | None = None,
        explain: bool = False,
        **template: Any,
    ) -> AsyncIterator[Chunk]:
        """Answer one conversation and yield the text as it comes."""
        fields = self._requests.fields(drafter, prediction, priority=priority, explain=explain)
        return self._stream(*self._requests.of_chat(messages, params, template, **fields))

    def sampling_params(self, *, chat: bool = True, **fields: Any) -> SamplingParams:
        """As LLM.sampling_params."""
        return self._requests.params(chat, fields)

    async def close(self) -> None:
        """Stop after the step that is running; requests that are still open get an EngineError."""
        if self._owner.is_here:  # else the threads are the parent's
            await asyncio.to_thread(self._port.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _whole(self, request: Request, output: RequestOutput) -> RequestOutput:
        async with aclosing(self._stream(request, output)) as chunks:
            async for _ in chunks:
                pass
        return output

    async def _stream(self, request: Request, output: RequestOutput) -> AsyncGenerator[Chunk]:
        self._owner.check()
        collector = Collector(output, request.params, self.tokenizer, self._port.abort)
        events: asyncio.Queue[Event | SpecserveError] = asyncio.Queue()
        self._port.submit(request, partial(_hand_over, asyncio.get_running_loop(), events))
        try:
            while not collector.finished:
                collector.push(await events.get())
                while collector.chunks:
                    yield collector.chunks.popleft()
        finally:
            if not collector.finished:
                self._port.abort(request.id)


def _hand_over(loop: asyncio.AbstractEventLoop, events: asyncio.Queue[Any], event: Event | SpecserveError) -> None:
    """From the engine's thread to the loop's. Nobody listens any more once the loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(events.put_nowait, event)


@contextmanager
def _progress_bar(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes how many requests have finished."""
    if not shown:
        yield lambda done: None
        return
    with Progress(console=console(stderr=True)) as bar:
        task = bar.add_task("Generating", total=total)
        yield lambda done: bar.update(task, completed=done)
