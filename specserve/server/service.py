"""What routes need of the engine: prompts become requests that it can take, which are started."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from specserve.errors import InputError, PromptTooLongError
from specserve.prompts import bad_word_ids
from specserve.server.answers import Answers, Prepared
from specserve.server.api_processes.engines import CoordinatedEngines
from specserve.server.chats import Chats
from specserve.server.engine.group import ReplicaGroup
from specserve.server.engine.keeper import EngineKeeper, State
from specserve.server.engine.messages import Ready
from specserve.server.grammar_validator import Validator
from specserve.server.metrics import RequestCounter
from specserve.server.prompts import Prompts
from specserve.server.threads import Threads
from specserve.server.tool_use import ToolUse, constraint, format_for, reader
from specserve.server.wire.answer import AnswerParser
from specserve.server.wire.errors import WireError, unavailable
from specserve.server.wire.tools.calls import keeping_delimiters
from specserve.structured.base import RefusedError as StructureRefusedError
from specserve.structured.spec import Structured
from specserve.structured.tags import ignored_formats
from specserve.text.reasoning_split import splitting
from specserve.text.tokenizer import Tokenizer
from specserve.text.tools import CallFormat

_FORMAT = re.compile(r'"format"\s*:\s*"')  # of a schema; a tag's own is an object
_WORDS = {
    State.LOADING: "is loading",
    State.RESTARTING: "has failed and is being started again",
    State.STALLED: "cannot be reached",
}
Engines: TypeAlias = EngineKeeper | ReplicaGroup[Any] | CoordinatedEngines


def no_engine(state: State) -> WireError:
    """What a request is told in this state, which is not READY."""
    what = _WORDS.get(state, "has ended")
    return unavailable(f"The engine {what}. Send the request again in a moment.", code=state.value)


class Service:
    """What all routes share. `prompts` makes ids of texts, `threads` does what would hold up other streams."""

    def __init__(
        self,
        supervisor: Engines,
        tokenizer: Tokenizer,
        metrics: RequestCounter,
        validator: Validator,
        chats: Chats,
        max_characters: int,
        reasoning_apart: bool = True,
        ids: str = "",
    ) -> None:
        """`max_characters` are the most of a text that is tokenized though nothing bounds its tokens;
        `reasoning_apart`: whether the reasoning in answers to conversations is told apart. `ids` begins the ids of
        requests: those of another process with the same engines begin otherwise."""
        self._reasoning_apart = reasoning_apart
        self._knows_reasoning = False  # of the model; to find it out takes a while
        self.validator, self.chats = validator, chats
        self.supervisor = supervisor
        self.tokenizer = tokenizer
        self.metrics = metrics
        self._ids, self._numbers = ids, itertools.count()
        self.threads = Threads()
        self.prompts = Prompts(tokenizer, chats, self.threads, max_characters, lambda: self.ready.max_model_len)

    def new_id(self) -> str:
        """Of a request to the engine."""
        return f"{self._ids}{next(self._numbers)}"

    @property
    def ready(self) -> Ready:
        """The engine that takes requests. Raises WireError while there is none."""
        supervisor = self.supervisor
        if supervisor.state is not State.READY or supervisor.ready is None:
            raise no_engine(supervisor.state)
        return supervisor.ready

    async def warm(self) -> None:
        """Make ready what the first conversation and the first long text would wait for, and others with them."""
        await self.threads.on_thread(lambda: self.tokenizer.bound)
        await self.chats.prepare()
        await self._know_reasoning()

    def wake_engine(self) -> None:
        """Have an engine that rests ready for a request whose prompt is to be tokenized: it would take 0.1 ms to wake
        up. Raises EngineError while there is none."""
        self.supervisor.wake_engine()

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
        make = await self.threads.on_thread(self._reader, use, written, prepared)
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
        split = await self.threads.run(
            len(request.prompt_ids), splitting, self.tokenizer, request.params, request.prompt_ids
        )
        return replace(prepared, split=split) if split else prepared

    async def _know_reasoning(self) -> None:
        """Find out once how the model reasons."""
        if not self._knows_reasoning:
            if await self.threads.on_thread(lambda: self.tokenizer.markers) is not None:
                await self.chats.teach(self.tokenizer)
            await self.threads.on_thread(lambda: self.tokenizer.reasoning)
            self._knows_reasoning = True

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
            begins = await self.threads.run(len(request.prompt_ids), self.tokenizer.beginning, request.prompt_ids)
            prepared = prepared.having(compiles_slowly=is_slow, beginning=begins)
        ids = await self.threads.run(sum(map(len, words)), bad_word_ids, request.params, self.tokenizer)
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
                found += await self.threads.run(len(structured.text), ignored_formats, structured)
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
        return Answers(requests, self.supervisor.place, self.tokenizer, self.metrics, end_one)

    def close(self) -> None:
        self.validator.close()
        self.chats.close()
        self.threads.close()
