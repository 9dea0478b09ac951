"""Who answers a conversation: an engine in this process, or a server."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specserve.cli.answer import check
from specserve.cli.conversation.saved import Message
from specserve.cli.conversation.settings import request_fields
from specserve.cli.figures import Figures
from specserve.errors import InputError, ServerError, SpecserveError, unknown
from specserve.types import SamplingParams

if TYPE_CHECKING:
    from specserve.client import Client
    from specserve.llm import LLM, Chunk


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of an answer. The last one has its figures and why it ended; `chunk` is the engine's."""

    text: str = ""
    reasoning: str = ""
    chunk: Chunk | None = None
    figures: Figures | None = None
    finish_reason: str | None = None


class ChatModel(ABC):
    """One that answers. `given` are the sampling parameters that somebody set, by name."""

    name: str
    drafter: str | None = None  # None: as it was started

    @property
    @abstractmethod
    def summary(self) -> str:
        """One line: what answers."""

    @abstractmethod
    def stream(self, messages: Sequence[Message], given: Mapping[str, Any], explain: bool) -> Iterator[Piece]:
        """An answer as it comes. Closing the iterator stops it. Raises SpecserveError."""

    @abstractmethod
    def switch(self, name: str) -> None:
        """Let another model answer. Raises SpecserveError, with the model as it was."""

    @abstractmethod
    def draft_with(self, drafter: str | None) -> None:
        """Let another drafter draft; None: the one it was started with. Raises SpecserveError."""

    @abstractmethod
    def names(self) -> list[str]:
        """The models that are known to be there."""

    @abstractmethod
    def close(self) -> None:
        """Free what it holds."""


class LocalModel(ChatModel):
    """An engine here. `start` makes one for a model's name; `params` makes what an engine samples with; `adapter` is
    the LoRA adapter that answers."""

    def __init__(
        self,
        name: str,
        start: Callable[[str], LLM],
        params: Callable[[LLM, Mapping[str, Any]], SamplingParams],
        adapter: str | None = None,
    ) -> None:
        self._start, self._params, self._adapter = start, params, adapter
        self._stack = ExitStack()
        self._open(name)

    def _open(self, name: str) -> None:
        self.llm = self._stack.enter_context(self._start(name))
        self.name = name

    @property
    def summary(self) -> str:
        return self.llm.summary

    def stream(self, messages: Sequence[Message], given: Mapping[str, Any], explain: bool) -> Iterator[Piece]:
        num_tokens = 0
        params = self._params(self.llm, given)
        chunks = self.llm.stream_chat(list(messages), params, adapter=self._adapter, explain=explain)
        with closing(chunks):  # type: ignore[type-var]
            for chunk in chunks:
                check(chunk)
                num_tokens += len(chunk.token_ids)
                figures = Figures.of_stats(chunk.stats, num_tokens) if chunk.finish_reason and chunk.stats else None
                yield Piece(chunk.text, chunk.reasoning, chunk, figures, chunk.finish_reason)

    def switch(self, name: str) -> None:
        """The other one is fetched first; only then this one makes room for it."""
        from specserve.checkpoint import catalog

        catalog.resolve(name, progress=sys.stderr.isatty())
        before = self.name
        self._stack.close()
        try:
            self._open(name)
            self.draft_with(self.drafter)
        except (SpecserveError, KeyboardInterrupt):
            print(f"Loading {before} again.", file=sys.stderr)
            self._stack.close()
            self._open(before)
            self.draft_with(self.drafter)
            raise

    def draft_with(self, drafter: str | None) -> None:
        config = self.llm.config
        if drafter is None:
            if self.drafter is not None:
                self.llm.use_drafter(config.drafter, **config.drafter_options)
        else:
            self.llm.use_drafter(drafter)
        self.drafter = drafter

    def names(self) -> list[str]:
        from specserve.checkpoint.installed import installed

        return sorted({entry.name for entry in installed()} | {self.name})

    def close(self) -> None:
        self._stack.close()


class ServedModel(ChatModel):
    """A model of a server with OpenAI's API; without a name, the first that it lists."""

    def __init__(self, client: Client, url: str, name: str | None) -> None:
        self._client, self._url = client, url
        self.name = name or ""
        try:
            self._names = [model["id"] for model in client.models()["data"]]
        except ServerError as error:
            if error.status != 404 or name is None:
                raise
            self._names = []  # it lists none: whoever uses it knows their names
        if name is None:
            if not self._names:
                raise InputError(f"{url} lists no models. Name one with --model.", "model")
            self.name = self._names[0]
        else:
            self.switch(name)

    @property
    def summary(self) -> str:
        others = len(self._names) - 1
        return f"{self.name} at {self._url}" + (
            f", one of {others + 1} models: /model shows them." if others > 0 else ""
        )

    def stream(self, messages: Sequence[Message], given: Mapping[str, Any], explain: bool) -> Iterator[Piece]:
        started = time.perf_counter()
        first: float | None = None
        usage: Mapping[str, Any] = {}
        metrics: Mapping[str, Any] = {}
        reason: str | None = None
        fields = request_fields(given, self.drafter)
        options = {"include_usage": True}
        with self._client.stream_chat(messages, model=self.name, stream_options=options, **fields) as stream:
            for chunk in stream:
                body: Mapping[str, Any] = chunk
                usage, metrics = body.get("usage") or usage, body.get("metrics") or metrics
                for choice in body.get("choices") or ():
                    delta = choice.get("delta") or {}
                    text = delta.get("content") or ""
                    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
                    reason = choice.get("finish_reason") or reason
                    if text or reasoning:
                        first = first or time.perf_counter()
                        yield Piece(text, reasoning)
        ended = time.perf_counter()
        first = first or ended
        yield Piece(
            figures=Figures.of_server(usage, metrics, first - started, ended - first), finish_reason=reason or "stop"
        )

    def switch(self, name: str) -> None:
        if self._names and name not in self._names:
            raise InputError(f"{unknown('model', name, self._names)} These are served at {self._url}.", "model")
        self.name = name

    def draft_with(self, drafter: str | None) -> None:
        """The server says with the next answer whether it has that drafter."""
        self.drafter = drafter

    def names(self) -> list[str]:
        return self._names or [self.name]

    def close(self) -> None:
        self._client.close()
