"""The Python SDK: LLM for scripts, whose engine runs in the calling thread. For asyncio there is async_llm.py.

from specserve import LLM, SamplingParams
with LLM(drafter="ngram") as llm:
    print(llm.chat([{"role": "user", "content": "Hello!"}], SamplingParams(max_tokens=64))[0].outputs[0].text)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence as Many
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress

from specserve.adapters import AdapterInfo, AdapterSource
from specserve.beams import EarlyStopping
from specserve.checkpoint.generation_config import AUTO, check_named, stated_by
from specserve.checkpoint.pooling import CONFIG as POOLING_CONFIG, read_pooling
from specserve.config import DEFAULT_MODEL, EngineConfig
from specserve.engine.build import Built, build
from specserve.engine.compiling import Compiling
from specserve.engine.counters import Counters
from specserve.engine.engine import Engine
from specserve.engine.port import LocalPort
from specserve.engine.request import Request
from specserve.errors import EngineError, Interrupted, ModelError, SpecserveError
from specserve.machine.ownership import Ownership, interrupted_after, interrupted_between
from specserve.outputs import Chunk, Collector, CompletionOutput, RequestOutput
from specserve.prompts import (
    Messages,
    Prediction,
    Prompt,
    Requests,
    adapter_each,
    as_conversations,
    as_prompts,
    one_each,
)
from specserve.speculation.host import DraftHost
from specserve.speculation.lookup import makers
from specserve.terminal import console
from specserve.types import Event, SamplingParams

__all__ = ["LLM", "Chunk", "CompletionOutput", "RequestOutput"]


class LLM:
    """An engine in this process. Options are the fields of EngineConfig. A context manager; close() frees the memory.

    Calls without `params` are sampled as the checkpoint's generation_config.json recommends, or another file or folder;
    with `generation_config="none"` as SamplingParams say. `sampling_params` gives these defaults to what a caller sets.

    Every call that generates takes, for all its prompts, `drafter`: a name to draft with instead of the engine's own
    drafter, "none" for plain decoding; and `prediction`: text or token ids that the answer will mostly be, which it
    drafts from unless a drafter is named. Neither changes an answer (with the default verification), only its time.
    `adapter` is the name of a LoRA adapter, of the option `lora` or loaded since, that the answers come from; where
    there may be many prompts, one for all or one for each.

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
            built = self._build(progress)
            self._torch_threads = torch.get_num_threads()
        finally:
            torch.set_num_threads(threads)
        self.tokenizer = built.tokenizer
        self.device, self.dtype, self.threads = built.device, built.dtype, built.threads
        self.quantization, self.summary = built.quantization, built.summary
        self._requests = Requests(self.tokenizer, stated_by(generation_config, built.folder))
        self._loader, self._folder = built.loader, built.folder
        self._port: LocalPort | None = LocalPort(
            built.engine, Compiling(built.compiler, built.tokenizer.markers), built.loader
        )

    def _build(self, progress: bool) -> Built:
        return build(self.config, progress=progress)

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
        adapter: str | Many[str | None] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete one prompt or many, in order. A prompt is text or a list of token ids; `params` is one for all or
        one for each, None the model's. Raises InputError for the first bad one, before anything runs; on Ctrl-C
        Interrupted, a KeyboardInterrupt that has the outputs which had ended."""
        batch, fields = as_prompts(prompts), self._requests.fields(drafter, prediction)
        each = zip(batch, one_each(params, len(batch)), adapter_each(adapter, len(batch)), strict=True)
        return self._run([self._requests.of_prompt(p, s, adapter=a, **fields) for p, s, a in each], progress)

    def chat(
        self,
        messages: Messages | Many[Messages],
        params: SamplingParams | Many[SamplingParams] | None = None,
        *,
        drafter: str | None = None,
        prediction: Prediction | None = None,
        adapter: str | Many[str | None] | None = None,
        progress: bool = False,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or a list of them, through the model's chat
        template; `template` goes to it. What a model that reasons thinks first is the outputs' `reasoning`."""
        batch, fields = as_conversations(messages), self._requests.fields(drafter, prediction)
        each = zip(batch, one_each(params, len(batch)), adapter_each(adapter, len(batch)), strict=True)
        return self._run([self._requests.of_chat(m, s, template, adapter=a, **fields) for m, s, a in each], progress)

    def beam_search(
        self,
        prompts: Prompt | Many[Prompt],
        params: SamplingParams | None = None,
        *,
        beam_width: int = 4,
        n: int | None = None,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        adapter: str | Many[str | None] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Of each prompt the n likeliest texts that beam search finds, best first; None: as many as beams. `params`
        rule what may come, and for how long; nothing is drawn. docs/beam-search.md has the meanings. Raises as
        `generate`."""
        params = params or self._requests.params(False, {"temperature": 0})
        params = dataclasses.replace(
            params,
            n=beam_width if n is None else n,
            beam_width=beam_width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        return self.generate(prompts, params, adapter=adapter, progress=progress)

    def embed(
        self, prompts: Prompt | Many[Prompt], *, dimensions: int | None = None, adapter: str | None = None
    ) -> list[NDArray[np.float32]]:
        """The embedding of each prompt, float32 [numbers], by a model that was made for that; or the first `dimensions`
        numbers of it, of length 1 again. Raises ModelError for other models, InputError as `generate`."""
        pooling = read_pooling(self._folder)
        if pooling is None:
            raise ModelError(f"{self.config.model} was not made for embeddings: its folder has no {POOLING_CONFIG}.")
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        fields = self._requests.fields("none", None, adapter=adapter, embeds=True)
        outputs = self._run([self._requests.of_prompt(each, params, **fields) for each in as_prompts(prompts)], False)
        if failed := [each.outputs[0].error for each in outputs if each.outputs[0].error is not None]:
            raise EngineError(failed[0])
        return [pooling.embedding(output.embedding or b"", dimensions) for output in outputs]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        drafter: str | None = None,
        prediction: Prediction | None = None,
        adapter: str | None = None,
        explain: bool = False,
    ) -> Iterator[Chunk]:
        """Complete one prompt and yield its text as it comes. Leaving the loop early aborts the request. With `explain`
        each chunk has `explained`: who proposed what in its step, what was accepted, and what the step took."""
        fields = self._requests.fields(drafter, prediction, adapter=adapter, explain=explain)
        return self._stream(self._requests.of_prompt(prompt, params, **fields))

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        drafter: str | None = None,
        prediction: Prediction | None = None,
        adapter: str | None = None,
        explain: bool = False,
        **template: Any,
    ) -> Iterator[Chunk]:
        """Answer one conversation and yield the text as it comes."""
        fields = self._requests.fields(drafter, prediction, adapter=adapter, explain=explain)
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
            self._loader.heads.reopen()

    def load_adapter(
        self, name: str, path: str | Path, *, pinned: bool = False, head: str | Path | None = None
    ) -> AdapterInfo:
        """Load a LoRA adapter from a folder that PEFT saved, to be named by calls from now on; one of that name is
        replaced, and calls that run end with the one they began with. One that is `pinned` always has a slot; `head`
        names the draft head of its sequences, None: the folder "head" in its own, where there is one. Raises
        ConfigError where the engine takes no adapters, ModelError for one that does not fit, and CapacityError."""
        info = self._loader.load(AdapterSource(name, str(path), pinned, str(head or "")))
        try:
            with self.exclusive() as engine:
                engine.adapters.add(info)
        except SpecserveError:
            self._loader.drop(info)
            raise
        return info

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; calls that run end with it. Raises InputError for a name that there is not."""
        with self.exclusive() as engine:
            engine.adapters.remove(name)

    def adapters(self) -> dict[str, AdapterInfo]:
        """Those that calls may name."""
        with self.exclusive() as engine:
            return dict(engine.adapters.listed)

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
                with interrupted_between() as interrupt:
                    while not all(collector.finished for collector in collectors):
                        self._step(collectors)
                        show(sum(collector.finished for collector in collectors))
                        interrupt()
            except KeyboardInterrupt as error:
                ended = [out if each.finished else None for each, (_, out) in zip(collectors, made, strict=True)]
                raise Interrupted(ended) from error
        return [output for _, output in made]

    def _stream(self, made: tuple[Request, RequestOutput]) -> Iterator[Chunk]:
        with self._submitted([made]) as (collector,):
            while not collector.finished:
                with interrupted_after():
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
        """One engine step, unless all of `awaited` are whole. Its events go to all streams; its failure ends them, and
        an interruption would."""
        with self._exclusive_port() as port:
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


@contextmanager
def _progress_bar(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes how many requests have finished."""
    if not shown:
        yield lambda done: None
        return
    with Progress(console=console(stderr=True)) as bar:
        task = bar.add_task("Generating", total=total)
        yield lambda done: bar.update(task, completed=done)
