"""Requests as the routes see them: prompts in, chunks of text out. Knows the tokenizer and the engine's supervisor;
knows no HTTP and no JSON."""

from __future__ import annotations

import asyncio
import functools
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from specserve.engine.outputs import Chunk, Collector, CompletionOutput, RequestOutput
from specserve.errors import InputError, PromptTooLongError
from specserve.sampling import bad_words
from specserve.server.engine.client import EngineClient, RefusedError, Subscription
from specserve.server.engine.messages import QUEUE_TIMEOUT, Ready, Submit
from specserve.server.engine.supervisor import State, Supervisor
from specserve.server.metrics import Metrics
from specserve.server.tool_use import ToolUse, constraint, format_for, reader
from specserve.server.trials import Trials
from specserve.server.wire.answer import AnswerParser
from specserve.server.wire.errors import WireError, unavailable
from specserve.server.wire.tool_calls import keeping_delimiters
from specserve.structured.base import RefusedError as StructureRefusedError
from specserve.structured.spec import Structured
from specserve.structured.tags import ignored_formats
from specserve.text.tokenizer import Tokenizer
from specserve.text.tools import CallFormat
from specserve.types import BadWords, Event, SamplingParams

T = TypeVar("T")
_AT_ONCE = 128  # of the engine's messages on one call: of a step there are no more, of a backlog
_INLINE_CHARACTERS = 4096  # text that is tokenized sooner than a thread would begin to
_LONG_CHARACTERS = 2**20  # text that takes seconds; hardly a prompt, but /tokenize counts what is none yet
_FORMAT = re.compile(r'"format"\s*:\s*"')  # of a schema; a tag's own is an object
_WORDS = {State.LOADING: "is loading", State.RESTARTING: "has failed and is being started again"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One prompt as ids, and everything that goes with it; the fields are Request's."""

    prompt_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    priority: int = 0
    salt: bytes = b""
    drafter: str | None = None
    prediction: Sequence[int] = ()
    bad_words: BadWords | None = None  # params.bad_words as ids; see Service.prepare
    source: str = "structured"  # the request's field that params.structured comes from
    is_slow: bool = False  # whether params.structured takes long to compile; see Service.prepare


class _Answer:
    """One prompt's request while it runs."""

    def __init__(self, ask: Ask, name: str, client: EngineClient, subscription: Subscription, service: Service) -> None:
        completions = [CompletionOutput(index) for index in range(ask.params.n)]
        self.output = RequestOutput(name, ask.prompt, ask.prompt_ids, completions)
        self.subscription = subscription
        self.client = client
        self._metrics = service.metrics
        self._events: deque[Event] = deque()  # taken from the subscription and not yet passed on
        self._collector = Collector(self.output, ask.params, service.tokenizer, self._stop, lazily=True)

    def take(self, most: int) -> list[Chunk]:
        """What has come since the last time, in so many messages of the engine."""
        if not self._events:
            self._events = deque(self.subscription.take())
        for _ in range(min(len(self._events), most)):
            self._collector.push(self._events.popleft())
        chunks = list(self._collector.chunks)
        self._collector.chunks.clear()
        return chunks

    def _stop(self, name: str, index: int) -> None:
        """A stop string, which the engine cannot see, has ended a completion."""
        self.client.abort(self.subscription, index)
        self._metrics.stopped(self.subscription.number, index)


class Answers:
    """The requests of one call, one for each prompt. Iterate over what they say; `outputs` grow with it. A context
    manager: whatever still runs when it is left is aborted."""

    def __init__(self, answers: list[_Answer], news: asyncio.Event) -> None:
        self.outputs = [answer.output for answer in answers]
        self._answers = answers
        self._news = news

    async def __aiter__(self) -> AsyncIterator[list[tuple[int, Chunk]]]:
        """What has come since the last time, as (prompt, chunk); nothing after `poke`. Raises EngineError when the
        engine is gone, and WireError when it refused one of the requests or one has waited too long."""
        while not all(output.finished for output in self.outputs):
            await self._news.wait()
            self._news.clear()
            said: list[tuple[int, Chunk]] = []
            for prompt, answer in enumerate(self._answers):
                said += [(prompt, chunk) for chunk in _taken(answer, _AT_ONCE - len(said))]
            yield said
            if len(said) >= _AT_ONCE:  # there may be more, and others wait too
                self._news.set()
                await asyncio.sleep(0)

    async def whole(self) -> list[RequestOutput]:
        """The outputs when all completions have ended."""
        async for _ in self:
            pass
        return self.outputs

    def poke(self) -> None:
        """Let whoever iterates look up, though there is nothing new."""
        self._news.set()

    def expire(self) -> None:
        """End those that still wait for their first step."""
        for answer in self._answers:
            answer.client.expire(answer.subscription)

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *exception: object) -> None:
        for answer in self._answers:
            answer.client.abort(answer.subscription)


def _taken(answer: _Answer, most: int) -> list[Chunk]:
    try:
        return answer.take(most) if most > 0 else []
    except RefusedError as error:
        if error.code == QUEUE_TIMEOUT:
            raise unavailable(f"{error} Send it again.", code=QUEUE_TIMEOUT) from error
        raise WireError(400, "invalid_request_error", str(error), param=error.param, code=error.code) from error


class Service:
    """What all routes share. Long texts are tokenized on threads: they must not hold up other streams."""

    def __init__(
        self, supervisor: Supervisor, tokenizer: Tokenizer, metrics: Metrics, trials: Trials, num_threads: int = 2
    ) -> None:
        self.trials = trials
        self.supervisor = supervisor
        self.tokenizer = tokenizer
        self.metrics = metrics
        self._pool = ThreadPoolExecutor(num_threads, "specserve-text")
        self._long_pool = ThreadPoolExecutor(1, "specserve-long-text")  # so that prompts wait for prompts alone

    @property
    def ready(self) -> Ready:
        """The engine that takes requests. Raises WireError while there is none."""
        supervisor = self.supervisor
        if supervisor.state is not State.READY or supervisor.ready is None:
            what = _WORDS.get(supervisor.state, "has ended")
            raise unavailable(f"The engine {what}. Send the request again in a moment.", code=supervisor.state.value)
        return supervisor.ready

    def expect(self) -> None:
        """Have an engine that rests ready for a request whose prompt is to be tokenized: it would take 0.1 ms to wake
        up. Raises EngineError while there is none."""
        self.supervisor.client.expect()

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text of any length; a prompt is first to be held to `check_length`."""
        return await self._tokenized(len(text), functools.partial(self.tokenizer.encode, text, add_special_tokens))

    async def chat_ids(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> tuple[str, list[int]]:
        """A conversation through the chat template, as text and ids, of any length; see Tokenizer.chat_ids."""
        size = await self._num_characters([messages, template], _LONG_CHARACTERS)
        return await self._chat_ids(size, messages, template)

    async def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> tuple[str, list[int]]:
        """As `chat_ids`, of a conversation that is to be answered. Raises PromptTooLongError as `check_length` does; a
        template may leave some of the conversation out."""
        limit = self.ready.max_model_len
        size = await self._num_characters([messages, template], max(limit, _LONG_CHARACTERS))
        if size > limit:
            text = await self.on_thread(functools.partial(self.tokenizer.render_chat, messages, **template))
            await self.check_length(text)
        return await self._chat_ids(size, messages, template)

    async def _num_characters(self, value: Any, enough: int) -> int:
        """num_characters; to count many takes as long as to work on them."""
        size = num_characters(value, _INLINE_CHARACTERS)
        return size if size <= _INLINE_CHARACTERS else await self.on_thread(num_characters, value, enough)

    async def _chat_ids(
        self, size: int, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any]
    ) -> tuple[str, list[int]]:
        if size <= _INLINE_CHARACTERS:
            found = self.tokenizer.quick_chat_ids(messages, **template)
            if found is not None:
                return found
            size = _INLINE_CHARACTERS + 1
        return await self._tokenized(size, functools.partial(self.tokenizer.chat_ids, messages, **template))

    async def check_length(self, text: str) -> None:
        """Raises PromptTooLongError for a text that no context of this size can hold, whatever its tokens are:
        megabytes take seconds to tokenize."""
        await self.run(len(text), self._check_length, len(text))

    async def with_tools(self, ask: Ask, use: ToolUse) -> tuple[Ask, Callable[[], AnswerParser] | None]:
        """What is asked so that calls of tools can be found in the answer, or must be, and what finds them
        (Reply.tool_parser), None without tools. Raises InputError for a model whose way of writing calls is not
        known, and for calls that cannot be enforced."""
        if not use.tools:
            return ask, None
        written = format_for(use, self.tokenizer.call_format)
        asked = constraint(use, written, ask.params.structured)
        make = await self.on_thread(self._reader, use, written, ask.prompt or "")
        params = replace(keeping_delimiters(written, ask.params), structured=asked)
        return replace(ask, params=params, source="tools" if asked else ask.source), make

    def _reader(self, use: ToolUse, written: CallFormat, prompt: str) -> Callable[[], AnswerParser]:
        """The first loads a parser, and finds out whether the model reasons."""
        return reader(use, written, prompt, reasons=self.tokenizer.reasoning is not None)

    async def run(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function whose work grows with `size`, a number of characters: on a thread if there are many."""
        return await self.on_thread(function, *arguments) if size > _INLINE_CHARACTERS else function(*arguments)

    async def on_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def prepare(self, ask: Ask, tenant: bytes = b"", client: bytes = b"") -> Ask:
        """What is to be asked, with its bad words as ids and its prefix cache apart from that of other tenants.
        `tenant` has the same length for all of them, so no salt that a client may choose leads to another's cache.
        `client` is who has a turn where constraints wait to be tried; the tenant where there are tenants.
        Raises InputError for a constraint that cannot be enforced, and WireError, 429, where too many wait."""
        asked = ask.params.structured
        is_slow = asked is not None and await self._try(asked, ask.source, tenant or client)
        size = sum(map(len, ask.params.bad_words))
        encode = functools.partial(self.tokenizer.encode, add_special_tokens=False)
        words = await self.run(size, bad_words.of_texts, ask.params.bad_words, encode)
        return replace(ask, bad_words=words, salt=tenant + ask.salt, is_slow=is_slow)

    async def _try(self, asked: Structured, source: str, client: bytes) -> bool:
        try:
            return await self.trials.check(asked, self.ready.vocab_size, client)
        except StructureRefusedError as error:
            raise InputError(f"{source}{str(error).removeprefix('structured')}", source) from error

    async def ignored(self, asks: Sequence[Ask]) -> list[str]:
        """What of the constraints of prepared requests says nothing of the answer, by name: formats that JSON Schema
        does not define."""
        found: list[str] = []
        for asked in dict.fromkeys(ask.params.structured for ask in asks):
            if asked is not None and _FORMAT.search(asked.text):
                found += await self.run(len(asked.text), ignored_formats, asked)
        return [f"format.{name}" for name in dict.fromkeys(found)]

    def start(self, asks: Sequence[Ask], name: str) -> Answers:
        """Ask the engine what was prepared; `name` is the answer's. Raises WireError while there is none, and
        PromptTooLongError; then nothing was asked."""
        ready = self.ready
        for ask in asks:
            if len(ask.prompt_ids) >= ready.max_model_len:
                reason = f"the context is {ready.max_model_len} tokens and needs room for one more"
                raise PromptTooLongError(len(ask.prompt_ids), ready.max_model_len - 1, reason)
        news = asyncio.Event()
        return Answers([self._submit(ask, name, news) for ask in asks], news)

    def _submit(self, ask: Ask, name: str, news: asyncio.Event) -> _Answer:
        assert (ask.bad_words is None) == (not ask.params.bad_words), "prepare makes ids of bad words"
        submit = Submit(
            id="",
            prompt_ids=ask.prompt_ids,
            params=ask.params,
            bad_words=ask.bad_words,
            priority=ask.priority,
            salt=ask.salt,
            drafter=ask.drafter,
            prediction=list(ask.prediction),
            is_slow=ask.is_slow,
        )
        client = self.supervisor.client
        subscription = client.submit(submit, ask.params.n, news)
        self.metrics.begin(subscription.number, ask.params.n, len(ask.prompt_ids))
        return _Answer(ask, name, client, subscription, self)

    def close(self) -> None:
        self.trials.close()
        for pool in (self._pool, self._long_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _tokenized(self, size: int, function: Callable[[], T]) -> T:
        if size <= _INLINE_CHARACTERS:
            return function()
        pool = self._pool if size <= _LONG_CHARACTERS else self._long_pool
        return await asyncio.get_running_loop().run_in_executor(pool, function)

    def _check_length(self, num_characters: int) -> None:
        limit = self.ready.max_model_len
        if num_characters <= limit or (longest := self.tokenizer.longest_token) is None:
            return
        fewest = -(-num_characters // longest)
        if fewest >= limit:
            reason = f"the context is {limit} tokens, and no token stands for more than {longest} characters"
            raise PromptTooLongError(fewest, limit - 1, reason, counted=False)


def num_characters(value: Any, enough: int) -> int:
    """Characters of all texts inside lists and objects, and one for everything else: what work on it grows with. Counts
    no further than to `enough`."""
    total, left = 0, [value]
    while left and total <= enough:
        entry = left.pop()
        total += len(entry) if isinstance(entry, str) else 1
        if isinstance(entry, Mapping):
            left += entry.values()
        elif isinstance(entry, list | tuple):
            left += entry
    return total
