"""Turns what a caller gives (text, ids, conversations, a prediction) into requests. Knows the tokenizer; no engine."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence as Many
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, cast

from specserve.engine.outputs import CompletionOutput, RequestOutput
from specserve.engine.request import Request
from specserve.errors import InputError
from specserve.sampling import bad_words
from specserve.structured.compiler import Compiler
from specserve.structured.reasoning import wrapped
from specserve.text.tokenizer import Tokenizer
from specserve.types import SamplingParams

# Text, token ids, or vLLM's {"prompt": text} and {"prompt_token_ids": ids}.
Prompt: TypeAlias = str | list[int] | Mapping[str, Any]
Messages: TypeAlias = Many[Mapping[str, Any]]
Prediction: TypeAlias = str | list[int]


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a call asks for all its prompts beside how they are sampled; the fields are Request's."""

    drafter: str | None
    prediction: tuple[int, ...]
    priority: int = 0


class Requests:
    """Makes requests from prompts, each with an id of its own."""

    def __init__(self, tokenizer: Tokenizer, compiler: Compiler) -> None:
        self.tokenizer = tokenizer
        self._compiler = compiler
        self._ids = itertools.count()

    def wishes(self, drafter: str | None, prediction: Prediction | None, priority: int = 0) -> Wishes:
        """A predicted text gets no special tokens: it stands inside an answer. Raises InputError."""
        if isinstance(prediction, str):
            prediction = self.tokenizer.encode(prediction, add_special_tokens=False)
        elif not isinstance(prediction, list | tuple | None):
            raise InputError(f"prediction is {prediction!r}; it must be text or a list of token ids.", "prediction")
        return Wishes(drafter, tuple(prediction or ()), priority)

    def of_prompt(self, prompt: Prompt, params: SamplingParams, wishes: Wishes) -> tuple[Request, RequestOutput]:
        if isinstance(prompt, Mapping):
            return self.of_prompt(_unwrap(prompt), params, wishes)
        if isinstance(prompt, str):
            return self._make(prompt, self.tokenizer.encode(prompt), params, wishes)
        return self._make(None, list(prompt), params, wishes)

    def of_chat(
        self, messages: Messages, params: SamplingParams, wishes: Wishes, **template: Any
    ) -> tuple[Request, RequestOutput]:
        text, ids = self.tokenizer.chat_ids(messages, **template)
        return self._make(text, ids, params, wishes)

    def compiled(self, request: Request) -> Request:
        """The request with its grammar, if it is to be structured: behind the reasoning of models that reason. May take
        a second or more, once for each grammar. Raises RefusedError."""
        asked = request.params.structured
        if asked is None:
            return request
        grammar = self._compiler.compile(asked)
        return replace(request, grammar=wrapped(grammar, request.prompt_ids, self.tokenizer.reasoning))

    def _make(
        self, text: str | None, ids: list[int], params: SamplingParams, wishes: Wishes
    ) -> tuple[Request, RequestOutput]:
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        request = Request(
            id=f"request-{next(self._ids)}",
            prompt_ids=ids,
            params=params,
            bad_words=bad_words.of_texts(params.bad_words, encode),
            priority=wishes.priority,
            drafter=wishes.drafter,
            prediction=wishes.prediction,
        )
        completions = [CompletionOutput(index) for index in range(params.n)]
        return request, RequestOutput(request.id, text, ids, completions)


def _unwrap(prompt: Mapping[str, Any]) -> str | list[int]:
    for key in ("prompt_token_ids", "prompt"):
        if key in prompt:
            return cast("str | list[int]", prompt[key])
    raise InputError(
        f"A prompt mapping has 'prompt' or 'prompt_token_ids', not {', '.join(map(repr, prompt))}.", "prompt"
    )
