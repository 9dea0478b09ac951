"""The Python SDK: LLM for scripts, AsyncLLM for servers. Knows prompts, conversations and outputs; the engine does the
rest.

    from specserve import LLM, SamplingParams
    with LLM(drafter="ngram") as llm:
        print(llm.chat([{"role": "user", "content": "Hello!"}], SamplingParams(max_tokens=64))[0].outputs[0].text)
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence as Many
from contextlib import aclosing, contextmanager
from typing import Any, TypeAlias, TypeGuard

from rich.console import Console
from rich.progress import Progress

from specserve.config import DEFAULT_MODEL, EngineConfig
from specserve.engine.build import Built, build
from specserve.engine.counters import Counters
from specserve.engine.loop import EngineLoop
from specserve.engine.outputs import Chunk, Collector, CompletionOutput, RequestOutput
from specserve.engine.request import Request
from specserve.errors import ConfigError, EngineError, InputError, SpecserveError
from specserve.models.tokenizer import Tokenizer
from specserve.speculation.base import DraftHost, create
from specserve.types import Event, SamplingParams

__all__ = ["LLM", "AsyncLLM", "Chunk", "CompletionOutput", "RequestOutput"]

Prompt: TypeAlias = str | Many[int] | Mapping[str, Any]  # text, ids, or vLLM's {"prompt": ...} / {"prompt_token_ids": ...}
Messages: TypeAlias = Many[Mapping[str, Any]]


class _Requests:
    """Makes requests from prompts, each with an id of its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._ids = itertools.count()

    def of_prompt(self, prompt: Prompt, params: SamplingParams) -> tuple[Request, RequestOutput]:
        if isinstance(prompt, Mapping):
            prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
        text = prompt if isinstance(prompt, str) else None
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return self._make(text, ids, params)

    def of_chat(self, messages: Messages, params: SamplingParams, **template: Any) -> tuple[Request, RequestOutput]:
        text = self.tokenizer.render_chat(messages, **template)
        return self._make(text, self.tokenizer.encode(text, add_special_tokens=False), params)

    def _make(self, text: str | None, ids: list[int], params: SamplingParams) -> tuple[Request, RequestOutput]:
        request = Request(id=f"request-{next(self._ids)}", prompt_ids=ids, params=params, bad_ids=self._bad_ids(params))
        completions = [CompletionOutput(index) for index in range(params.n)]
        return request, RequestOutput(request.id, text, ids, completions)

    def _bad_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each bad word as it is written at the start of a text and after a space, as vLLM does."""
        forms = (form for word in params.bad_words for form in (word.lstrip(), " " + word.lstrip()))
        return tuple(tuple(self.tokenizer.encode(form, add_special_tokens=False)) for form in forms)


class LLM:
    """An engine in this process. Options are the fields of EngineConfig. A context manager; close() frees the memory.

    Raises ConfigError, ModelError or CapacityError when it cannot start.
    """

    def __init__(self, model: str = DEFAULT_MODEL, *, progress: bool = False, **options: Any) -> None:
        self.config = EngineConfig(model=model, **options)
        self._built: Built | None = build(self.config, progress=progress)
        self.tokenizer = self._built.tokenizer
        self.device, self.dtype, self.threads = self._built.device, self._built.dtype, self._built.threads
        self.summary = self._built.summary
        self._requests = _Requests(self.tokenizer)
        self._collectors: dict[str, Collector] = {}

    @property
    def engine(self) -> Any:
        """The engine itself, for tests and measurements."""
        if self._built is None:
            raise EngineError("This LLM was closed. Make a new one.")
        return self._built.engine

    def generate(
        self,
        prompts: Prompt | Many[Prompt],
        params: SamplingParams | Many[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete one prompt or many, in order. A prompt is text or a list of token ids; `params` is one for all or
        one for each. Raises InputError for the first bad one, before anything runs."""
        batch = [prompts] if _is_prompt(prompts) else list(prompts)
        each = _each(params, len(batch))
        return self._run([self._requests.of_prompt(p, s) for p, s in zip(batch, each, strict=True)], each, progress)

    def chat(
        self,
        messages: Messages | Many[Messages],
        params: SamplingParams | Many[SamplingParams] | None = None,
        *,
        progress: bool = False,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or a list of them, through the model's chat
        template; `template` goes to it."""
        batch = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        each = _each(params, len(batch))
        made = [self._requests.of_chat(m, s, **template) for m, s in zip(batch, each, strict=True)]
        return self._run(made, each, progress)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Complete one prompt and yield its text as it comes. Leaving the loop early aborts the request."""
        chosen = params or SamplingParams()
        return self._stream(self._requests.of_prompt(prompt, chosen), chosen)

    def stream_chat(self, messages: Messages, params: SamplingParams | None = None, **template: Any) -> Iterator[Chunk]:
        """Answer one conversation and yield the text as it comes."""
        chosen = params or SamplingParams()
        return self._stream(self._requests.of_chat(messages, chosen, **template), chosen)

    def use_drafter(self, name: str, num_speculative_tokens: int | None = None, **options: Any) -> None:
        """Draft with another drafter from now on; "none" is plain decoding. Only while nothing runs."""
        if self.engine.has_work:
            raise ConfigError("The drafter can only be changed while no request is running.")
        old: DraftHost = self.engine.drafters
        self.engine.drafters = DraftHost(create(name, options), self.engine.limits.vocab_size, old.timeout_s)
        old.close()
        if num_speculative_tokens is not None:
            self.engine.num_speculative_tokens = num_speculative_tokens

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes that no running request uses."""
        self.engine.cache.reset_prefix_cache()

    def counters(self) -> Counters:
        """A snapshot of the engine's totals."""
        return self.engine.counters.snapshot()

    def close(self) -> None:
        if self._built is not None:
            self._built.engine.drafters.close()
            self._built = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(
        self, made: list[tuple[Request, RequestOutput]], params: list[SamplingParams], progress: bool
    ) -> list[RequestOutput]:
        with self._collect(made, params) as collectors, _progress_bar(len(made), progress) as show:
            while not all(collector.finished for collector in collectors):
                self._step()
                show(sum(collector.finished for collector in collectors))
        return [output for _, output in made]

    def _stream(self, made: tuple[Request, RequestOutput], params: SamplingParams) -> Iterator[Chunk]:
        with self._collect([made], [params]) as (collector,):
            while collector.chunks or not collector.finished:
                if collector.chunks:
                    yield collector.chunks.popleft()
                else:
                    self._step()

    @contextmanager
    def _collect(
        self, made: list[tuple[Request, RequestOutput]], params: list[SamplingParams]
    ) -> Iterator[list[Collector]]:
        """Queue requests all together or not at all; whatever still runs at the end is aborted."""
        engine = self.engine
        try:
            for (request, output), chosen in zip(made, params, strict=True):
                engine.add(request)
                self._collectors[request.id] = Collector(output, chosen, self.tokenizer, engine.abort)
            yield [self._collectors[request.id] for request, _ in made]
        finally:
            for request, _ in made:
                engine.abort(request.id)
                self._collectors.pop(request.id, None)

    def _step(self) -> None:
        """One engine step; what it says goes to every stream that is open, whoever asked for the step."""
        for event in self.engine.step():
            if event.request_id in self._collectors:
                self._collectors[event.request_id].push(event)


class AsyncLLM:
    """An engine on a thread of its own, for asyncio. Cancelling a call or leaving a stream aborts its request."""

    def __init__(self, model: str = DEFAULT_MODEL, *, progress: bool = False, **options: Any) -> None:
        self.config = EngineConfig(model=model, **options)
        built = build(self.config, progress=progress)
        self.tokenizer, self.summary = built.tokenizer, built.summary
        self.engine = built.engine  # its counters may be read; everything else belongs to the loop's thread
        self._requests = _Requests(self.tokenizer)
        self._loop = EngineLoop(built.engine)

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestOutput:
        """Complete one prompt; many calls at once are batched by the engine."""
        return await self._whole(*self._requests.of_prompt(prompt, params or SamplingParams()))

    async def chat(self, messages: Messages, params: SamplingParams | None = None, **template: Any) -> RequestOutput:
        """Answer one conversation."""
        return await self._whole(*self._requests.of_chat(messages, params or SamplingParams(), **template))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Chunk]:
        """Complete one prompt and yield its text as it comes."""
        return self._stream(*self._requests.of_prompt(prompt, params or SamplingParams()))

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, **template: Any
    ) -> AsyncIterator[Chunk]:
        """Answer one conversation and yield the text as it comes."""
        return self._stream(*self._requests.of_chat(messages, params or SamplingParams(), **template))

    async def close(self) -> None:
        """Stop after the step that is running; requests that are still open get an EngineError."""
        await asyncio.to_thread(self._loop.close)
        self.engine.drafters.close()

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
        collector = Collector(output, request.params, self.tokenizer, self._loop.abort)
        events: asyncio.Queue[Event | SpecserveError] = asyncio.Queue()
        put = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, events.put_nowait)
        self._loop.add(request, put)
        try:
            while not collector.finished:
                event = await events.get()
                if isinstance(event, SpecserveError):
                    raise event
                collector.push(event)
                while collector.chunks:
                    yield collector.chunks.popleft()
        finally:
            if not collector.finished:
                self._loop.abort(request.id)


def _is_prompt(prompts: Prompt | Many[Prompt]) -> TypeGuard[Prompt]:
    """Text, one mapping or one list of ids; anything else is a list of prompts."""
    return isinstance(prompts, str | Mapping) or bool(prompts and isinstance(prompts[0], int))


def _each(params: SamplingParams | Many[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InputError(f"{len(params)} sampling parameters for {count} prompts; give one for all or one for each.")
    return list(params)


@contextmanager
def _progress_bar(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes how many requests have finished."""
    if not shown:
        yield lambda done: None
        return
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("Generating", total=total)
        yield lambda done: bar.update(task, completed=done)
