"""What routes need of the engine and the tokenizer: texts and conversations become requests, which it starts."""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar, overload

from specserve.engine.inputs import bad_word_ids
from specserve.errors import InputError, PromptTooLongError
from specserve.server.answers import Answers, Prepared
from specserve.server.chats import QUICK, Chats, listed
from specserve.server.engine.messages import Ready
from specserve.server.engine.supervisor import State, Supervisor
from specserve.server.grammar_validator import GrammarValidator
from specserve.server.metrics import Metrics
from specserve.server.tool_use import ToolUse, constraint, format_for, reader
from specserve.server.wire.answer import AnswerParser
from specserve.server.wire.errors import unavailable
from specserve.server.wire.tools.calls import keeping_delimiters
from specserve.structured.base import RefusedError as StructureRefusedError
from specserve.structured.spec import Structured
from specserve.structured.tags import ignored_formats
from specserve.text.reasoning_split import splitting
from specserve.text.tokenizer import ChatPrompt, Tokenizer
from specserve.text.tools import CallFormat
from specserve.text.worker import Answer as Rendered

T = TypeVar("T")
_INLINE_CHARACTERS = 4096  # text that is tokenized sooner than a thread would begin to
_INLINE_ENTRIES = 1024  # whose characters are counted in as little time
_NUM_THREADS = 2
_FORMAT = re.compile(r'"format"\s*:\s*"')  # of a schema; a tag's own is an object
_WORDS = {State.LOADING: "is loading", State.RESTARTING: "has failed and is being started again"}


class Service:
    """What all routes share. Long texts are tokenized on threads: they must not hold up other streams."""

    def __init__(
        self,
        supervisor: Supervisor,
        tokenizer: Tokenizer,
        metrics: Metrics,
        validator: GrammarValidator,
        chats: Chats,
        max_characters: int,
        reasoning_apart: bool = True,
    ) -> None:
        """`max_characters` are the most of a text that is tokenized though nothing bounds its tokens;
        `reasoning_apart`: whether the reasoning in answers to conversations is told apart."""
        self._max_characters = max_characters
        self._reasoning_apart = reasoning_apart
        self._knows_reasoning = False  # of the model; to find it out takes a while
        self.validator, self.chats = validator, chats
        self.supervisor = supervisor
        self.tokenizer = tokenizer
        self.metrics = metrics
        self._ids = itertools.count()
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "specserve-text")
        self._turn = asyncio.Lock()

    def new_id(self) -> str:
        """Of a request to the engine."""
        return str(next(self._ids))

    @property
    def ready(self) -> Ready:
        """The engine that takes requests. Raises WireError while there is none."""
        supervisor = self.supervisor
        if supervisor.state is not State.READY or supervisor.ready is None:
            what = _WORDS.get(supervisor.state, "has ended")
            raise unavailable(f"The engine {what}. Send the request again in a moment.", code=supervisor.state.value)
        return supervisor.ready

    async def warm(self) -> None:
        """Make ready what the first conversation and the first long text would wait for, and others with them."""
        await self.on_thread(lambda: self.tokenizer.bound)
        await self.chats.prepare()
        await self._know_reasoning()

    def wake_engine(self) -> None:
        """Have an engine that rests ready for a request whose prompt is to be tokenized: it would take 0.1 ms to wake
        up. Raises EngineError while there is none."""
        self.supervisor.client.wake_engine()

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, which is first to be held to `check_length` or `check_characters`."""
        if len(text) > QUICK:
            return (await self._prompt_of(await self.chats.encode(text, add_special_tokens))).ids
        return await self.run(len(text), self.tokenizer.encode, text, add_special_tokens)

    async def chat_ids(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> ChatPrompt:
        """A conversation through the chat template, as text and ids; see Tokenizer.chat_ids. Raises InputError as
        `check_characters` does, and what Chats.render does."""
        size = await self._num_characters([messages, template], self._max_characters)
        self.check_characters(size, "messages")
        found = await self.chats.render(messages, template, size, self._max_characters)
        self.check_characters(found.num_characters or 0, "messages")
        return await self._prompt_of(found)

    async def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> ChatPrompt:
        """As `chat_ids`, of a conversation that is to be answered. Raises PromptTooLongError as `check_length` does; a
        template may leave out fields that are long."""
        limit = self.ready.max_model_len
        size = await self._num_characters([messages, template], sys.maxsize)
        found = await self.chats.render(messages, template, size, limit * self.tokenizer.longest_spelling)
        if found.num_characters is not None:  # it may still fit
            self._check_size(found.num_characters, found.fewest)
            found = await self.chats.render(messages, template, max(size, found.num_characters), None)
        return await self._prompt_of(found)

    async def _num_characters(self, value: Any, enough: int) -> int:
        """num_characters; to count what many texts have takes as long as to work on them."""
        size = num_characters(value, enough, _INLINE_ENTRIES)
        return await self.on_thread(num_characters, value, enough) if size is None else size

    async def _prompt_of(self, found: Rendered) -> ChatPrompt:
        assert found.ids is not None, "the text is not too long"
        return ChatPrompt(found.text, await self.run(len(found.ids), listed, found.ids), found.unread)

    async def check_length(self, text: str) -> None:
        """Raises PromptTooLongError for a text that no context of this size can hold, whatever its tokens are:
        megabytes take seconds to tokenize."""
        await self.run(len(text), self._check_length, text)

    async def with_tools(self, prepared: Prepared, use: ToolUse) -> tuple[Prepared, Callable[[], AnswerParser] | None]:
        """The request whose answer may have calls of tools, or must, and what finds them (Reply.tool_parser), None
        without tools. Raises InputError for a model whose way of writing calls is not known, and for calls that cannot
        be enforced."""
        if not use.tools:
            return prepared, None
        params = prepared.request.params
        written = format_for(use, self.tokenizer.call_format, self.tokenizer.takes_tools)
        structured = constraint(use, written, params.structured)
        await self._know_reasoning()
        make = await self.on_thread(self._reader, use, written, prepared)
        prepared = prepared.having(params=replace(keeping_delimiters(written, params), structured=structured))
        return replace(prepared, source="tools" if structured else prepared.source), make

    def _reader(self, use: ToolUse, written: CallFormat, prepared: Prepared) -> Callable[[], AnswerParser]:
        """The first loads a parser."""
        beginning = self.tokenizer.beginning(prepared.request.prompt_ids)
        return reader(use, written, prepared.prompt or "", beginning, self._reasoning_apart)

    async def with_reasoning_apart(self, prepared: Prepared) -> Prepared:
        """The request, with its final parameters, of a conversation in whose answer there may be reasoning."""
        if not self._reasoning_apart:
            return prepared
        await self._know_reasoning()
        request = prepared.request
        split = await self.run(len(request.prompt_ids), splitting, self.tokenizer, request.params, request.prompt_ids)
        return replace(prepared, split=split) if split else prepared

    async def _know_reasoning(self) -> None:
        """Find out once how the model reasons."""
        if not self._knows_reasoning:
            if await self.on_thread(lambda: self.tokenizer.markers) is not None:
                await self.chats.teach(self.tokenizer)
            await self.on_thread(lambda: self.tokenizer.reasoning)
            self._knows_reasoning = True

    async def run(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function whose work grows with `size`, a number of characters: on a thread if there are many."""
        return await self.on_thread(function, *arguments) if size > _INLINE_CHARACTERS else function(*arguments)

    async def in_turn(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call on a thread a function that seldom lets others run: one at a time, with a rest as long as the work
        behind it. However many come at once, half of the time is for those who are sent tokens."""
        await self._turn.acquire()
        begun = time.perf_counter()
        try:
            return await self.on_thread(function, *arguments)
        finally:
            asyncio.get_running_loop().call_later(time.perf_counter() - begun, self._turn.release)

    async def on_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def prepare(
        self, prepared: Prepared, tenant: bytes = b"", client: bytes = b"", shares_drafts: bool = False
    ) -> Prepared:
        """The request with its bad words as ids, and with its prefix cache apart from that of other tenants. `tenant`
        has the same length for all of them, so no salt that a client may choose leads to another's cache. `client` is
        who has a turn where constraints wait to be tried; the tenant where there are tenants. What is nobody's, by
        tenant and salt, drafts by itself unless all `shares_drafts`. Raises InputError for a constraint that cannot be
        enforced, and WireError, 429, where too many wait."""
        request = prepared.request
        structured, words = request.params.structured, request.params.bad_words
        if structured is not None:
            is_slow = await self._try(structured, prepared.source, tenant or client)
            await self._know_reasoning()
            begins = await self.run(len(request.prompt_ids), self.tokenizer.beginning, request.prompt_ids)
            prepared = prepared.having(compiles_slowly=is_slow, beginning=begins)
        ids = await self.run(sum(map(len, words)), bad_word_ids, request.params, self.tokenizer)
        salt = tenant + request.salt
        private = not salt and not shares_drafts
        return prepared.having(bad_words=ids, salt=salt, private=private)

    async def _try(self, structured: Structured, source: str, client: bytes) -> bool:
        try:
            return await self.validator.check(structured, self.ready.vocab_size, client)
        except StructureRefusedError as error:
            raise InputError(f"{source}{str(error).removeprefix('structured')}", source) from error

    async def ignored(self, requests: Sequence[Prepared]) -> list[str]:
        """What of prepared requests says nothing to the model, by name: what no chat template reads, and in constraints
        formats that JSON Schema does not define."""
        found: list[str] = []
        for structured in dict.fromkeys(prepared.request.params.structured for prepared in requests):
            if structured is not None and _FORMAT.search(structured.text):
                found += await self.run(len(structured.text), ignored_formats, structured)
        unread = (name for prepared in requests for name in prepared.ignored)
        return [*dict.fromkeys(unread), *(f"format.{name}" for name in dict.fromkeys(found))]

    def start(self, requests: Sequence[Prepared], end_one: Callable[[], None] = lambda: None) -> Answers:
        """Submit what was prepared; `end_one` is called whenever the engine is done with a completion. Raises WireError
        while there is no engine, and PromptTooLongError; then nothing was submitted."""
        limit = self.ready.max_model_len
        for prepared in requests:
            num_tokens, params = len(prepared.request.prompt_ids), prepared.request.params
            if num_tokens >= limit:
                reason = f"the context is {limit} tokens and needs room for one more"
                raise PromptTooLongError(num_tokens, limit - 1, reason)
            assert (prepared.request.bad_words is None) == (not params.bad_words), "prepare makes ids of bad words"
        return Answers(requests, self.supervisor.client, self.tokenizer, self.metrics, end_one)

    def close(self) -> None:
        self.validator.close()
        self.chats.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _check_length(self, text: str) -> None:
        if len(text) > self.ready.max_model_len:
            self._check_size(len(text), self.tokenizer.fewest_tokens(text))

    def _check_size(self, num_characters: int, fewest: int | None) -> None:
        """Of a text that has so many tokens at least, None if nobody knows."""
        limit, longest = self.ready.max_model_len, self.tokenizer.longest_spelling
        if fewest is None:
            self.check_characters(num_characters, "prompt", limit * longest)
        elif fewest >= limit:
            reason = f"the context is {limit} tokens, and no token stands for as much as this would take"
            raise PromptTooLongError(fewest, limit - 1, reason, counted=False)

    def check_characters(self, num_characters: int, param: str, at_least: int = 0) -> None:
        """Raises InputError for a text that takes more time and memory to tokenize than one request may have, where
        nothing bounds its tokens. `at_least` are taken whatever the option says."""
        limit = max(self._max_characters, at_least)
        if num_characters > limit:
            raise InputError(
                f"{param} has more than {limit} characters, the most of one text that this server tokenizes. Send it "
                "in parts, or start the server with a larger --max-tokenize-characters.",
                param,
            )


@overload
def num_characters(value: Any, enough: int) -> int: ...
@overload
def num_characters(value: Any, enough: int, num_entries: int) -> int | None: ...
def num_characters(value: Any, enough: int, num_entries: int = sys.maxsize) -> int | None:
    """Characters of all texts inside lists and objects, and one for everything else: what work on it grows with. Counts
    no further than to `enough`. None if there are more than so many entries."""
    total, left, num_left = 0, [value], num_entries
    while left and total <= enough:
        if not num_left:
            return None
        num_left -= 1
        entry = left.pop()
        total += len(entry) if isinstance(entry, str) else 1
        if isinstance(entry, Mapping):
            left += entry.values()
        elif isinstance(entry, list | tuple):
            left += entry
    return total
