"""Texts and conversations as prompts: within limits of length first, then as ids."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from specserve.errors import InputError, PromptTooLongError
from specserve.server.chats import QUICK, Chats, listed
from specserve.server.threads import Threads
from specserve.text.tokenizer import ChatPrompt, Tokenizer
from specserve.text.worker import Answer as Rendered

_INLINE_ENTRIES = 1024  # whose characters are counted sooner than a thread would begin to


class Prompts:
    """`max_characters` are the most of a text that is tokenized though nothing bounds its tokens; `max_model_len` is
    called while there is an engine, and raises WireError while there is none."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chats: Chats,
        threads: Threads,
        max_characters: int,
        max_model_len: Callable[[], int],
    ) -> None:
        self._tokenizer, self._chats, self._threads = tokenizer, chats, threads
        self._max_characters = max_characters
        self._max_model_len = max_model_len

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, which is first to be held to `check_length` or `check_characters`."""
        if len(text) > QUICK:
            return (await self._prompt_of(await self._chats.encode(text, add_special_tokens))).ids
        return await self._threads.run(len(text), self._tokenizer.encode, text, add_special_tokens)

    async def chat_ids(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> ChatPrompt:
        """A conversation through the chat template, as text and ids; see Tokenizer.chat_ids. Raises InputError as
        `check_characters` does, and what Chats.render does."""
        size = await self._num_characters([messages, template], self._max_characters)
        self.check_characters(size, "messages")
        found = await self._chats.render(messages, template, size, self._max_characters)
        self.check_characters(found.num_characters or 0, "messages")
        return await self._prompt_of(found)

    async def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> ChatPrompt:
        """As `chat_ids`, of a conversation that is to be answered. Raises PromptTooLongError as `check_length` does; a
        template may leave out fields that are long."""
        limit = self._max_model_len()
        size = await self._num_characters([messages, template], sys.maxsize)
        found = await self._chats.render(messages, template, size, limit * self._tokenizer.longest_spelling)
        if found.num_characters is not None:  # it may still fit
            self._check_size(found.num_characters, found.fewest)
            found = await self._chats.render(messages, template, max(size, found.num_characters), None)
        return await self._prompt_of(found)

    async def _num_characters(self, value: Any, enough: int) -> int:
        """num_characters; to count what many texts have takes as long as to work on them."""
        size = num_characters(value, enough, _INLINE_ENTRIES)
        return await self._threads.on_thread(num_characters, value, enough) if size is None else size

    async def _prompt_of(self, found: Rendered) -> ChatPrompt:
        assert found.ids is not None, "the text is not too long"
        return ChatPrompt(found.text, await self._threads.run(len(found.ids), listed, found.ids), found.unread)

    async def check_length(self, text: str) -> None:
        """Raises PromptTooLongError for a text that no context of this size can hold, whatever its tokens are:
        megabytes take seconds to tokenize."""
        if len(text) > self._max_model_len():
            self._check_size(len(text), await self._threads.run(len(text), self._tokenizer.fewest_tokens, text))

    def _check_size(self, num_characters: int, fewest: int | None) -> None:
        """Of a text that has so many tokens at least, None if nobody knows."""
        limit, longest = self._max_model_len(), self._tokenizer.longest_spelling
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
