"""Turns what a caller gives (text, ids, conversations, a prediction) into requests."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence as Many
from functools import partial
from typing import Any, TypeAlias, cast

from specserve.checkpoint.generation_config import sampling_params
from specserve.engine.request import Request
from specserve.errors import InputError
from specserve.outputs import RequestOutput
from specserve.sampling import bad_words
from specserve.text.reasoning_split import splitting
from specserve.text.tokenizer import Tokenizer
from specserve.types import BadWords, SamplingParams

_log = logging.getLogger(__name__)

# Text, token ids, or vLLM's {"prompt": text} and {"prompt_token_ids": ids}.
Prompt: TypeAlias = str | list[int] | Mapping[str, Any]
Messages: TypeAlias = Many[Mapping[str, Any]]
Prediction: TypeAlias = str | list[int]


def bad_word_ids(params: SamplingParams, tokenizer: Tokenizer) -> BadWords | None:
    """params.bad_words as token ids, None for none. May take a second: the work grows with the texts."""
    return bad_words.of_texts(params.bad_words, partial(tokenizer.encode, add_special_tokens=False))


class Requests:
    """Makes requests from prompts, each with an id of its own, and the outputs they are to fill."""

    def __init__(self, tokenizer: Tokenizer, stated: Mapping[str, float]) -> None:
        """`stated` are sampling values that the model recommends."""
        self._tokenizer, self._stated = tokenizer, stated
        self._ids = itertools.count()

    def params(self, is_chat: bool, given: Mapping[str, Any]) -> SamplingParams:
        """With defaults for what is not given. Raises InputError."""
        return sampling_params(given, self._stated, is_chat)

    def fields(self, drafter: str | None, prediction: Prediction | None, **more: Any) -> dict[str, Any]:
        """Request's fields that are the same for all prompts of a call. A predicted text gets no special tokens: it
        stands inside an answer. Raises InputError."""
        if isinstance(prediction, str):
            prediction = self._tokenizer.encode(prediction, add_special_tokens=False)
        elif not isinstance(prediction, list | tuple | None):
            raise InputError(f"prediction is {prediction!r}; it must be text or a list of token ids.", "prediction")
        return {"drafter": drafter, "prediction": tuple(prediction or ()), **more}

    def of_prompt(self, prompt: Prompt, params: SamplingParams | None, **fields: Any) -> tuple[Request, RequestOutput]:
        if isinstance(prompt, Mapping):
            return self.of_prompt(_unwrap(prompt), params, **fields)
        params = params or self.params(False, {})
        if isinstance(prompt, str):
            return self._make(prompt, self._tokenizer.encode(prompt), params, fields)
        return self._make(None, list(prompt), params, fields)

    def of_chat(
        self, messages: Messages, params: SamplingParams | None, template: Mapping[str, Any], **fields: Any
    ) -> tuple[Request, RequestOutput]:
        """`template` goes to the chat template; what that does not read is logged. Reasoning is told apart in the
        answer to a conversation."""
        text, ids, unread = self._tokenizer.chat_ids(messages, **template)
        if unread:
            _log.warning("The chat template does not read %s.", ", ".join(unread))
        params = params or self.params(True, {})
        request, output = self._make(text, ids, params, fields)
        output.split = splitting(self._tokenizer, params, ids)
        return request, output

    def _make(
        self, text: str | None, ids: list[int], params: SamplingParams, fields: Mapping[str, Any]
    ) -> tuple[Request, RequestOutput]:
        name, words = f"request-{next(self._ids)}", bad_word_ids(params, self._tokenizer)
        begins = "after" if params.structured is None else self._tokenizer.beginning(ids)
        request = Request(id=name, prompt_ids=ids, params=params, bad_words=words, beginning=begins, **fields)
        return request, RequestOutput.of(request, text)


def _unwrap(prompt: Mapping[str, Any]) -> str | list[int]:
    for key in ("prompt_token_ids", "prompt"):
        if key in prompt:
            return cast("str | list[int]", prompt[key])
    raise InputError(
        f"A prompt mapping has 'prompt' or 'prompt_token_ids', not {', '.join(map(repr, prompt))}.", "prompt"
    )


def as_prompts(prompts: Prompt | Many[Prompt]) -> list[Prompt]:
    """Text, one mapping or one list of ids is one prompt; anything else is a list of prompts."""
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return list(cast(Many[Prompt], prompts))


def as_conversations(messages: Messages | Many[Messages]) -> list[Messages]:
    """One conversation, or a list of them, as a list."""
    if messages and isinstance(messages[0], Mapping):
        return [cast(Messages, messages)]
    return list(cast(Many[Messages], messages))


def adapter_each(adapter: str | Many[str | None] | None, count: int) -> list[str | None]:
    """The adapter of each of `count` prompts, None for the model's own answer. Raises InputError."""
    if adapter is None or isinstance(adapter, str):
        return [adapter] * count
    if len(adapter) != count:
        raise InputError(f"{len(adapter)} adapters for {count} prompts; give one for all or one for each.", "adapter")
    return list(adapter)


def one_each(params: SamplingParams | Many[SamplingParams] | None, count: int) -> list[SamplingParams | None]:
    """Sampling parameters for each of `count` prompts, None for the model's defaults. Raises InputError."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InputError(f"{len(params)} sampling parameters for {count} prompts; give one for all or one for each.")
    return list(params)
