"""Answers in the shape of the types that OpenAI's and Anthropic's Python packages have for them, as JSON lines.

    build/contract/clients/bin/python tests/contract/answers_of_types.py COUNT SEED

Runs with a Python that has both packages; imports nothing of specserve. Each line is {"api", "answer"}: a chat message,
a list of output items or a list of content blocks. Every text that is no choice of few holds a word of its own, `w` and
digits, so that whoever sends the answer can look for it.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from anthropic.types import ContentBlock
from openai.types.chat import ChatCompletionMessage
from openai.types.responses import ResponseOutputItem
from pydantic import BaseModel

_NONE = type(None)
_DEPTH = 6  # of objects inside each other
# Text that might be taken for something else, around the word.
_AROUND = (
    "{}",
    "{}",
    "{}",
    " {} ",
    '{{"a": "{}"',
    '{{"a": "{}"}}',
    "[{}]",
    "<think>{}</think>",
    "</tool_call>{}",
    "é\n{}",
)


class Maker:
    def __init__(self, seed: int) -> None:
        self._numbers = random.Random(seed)
        self._words = (f"w{number}" for number in itertools.count(10**6 + 10**5 * (seed % 10)))

    def value(self, kind: Any, depth: int = 0) -> Any:
        """A value of a type, as JSON has it. What is too deep is left out, or None."""
        numbers, origin, inner = self._numbers, get_origin(kind), get_args(kind)
        if origin is Annotated:
            return self.value(inner[0], depth)
        if origin is Literal:
            return numbers.choice(inner)
        if origin in (Union, types.UnionType):
            return self.value(
                numbers.choice([one for one in inner if one is not _NONE or numbers.random() < 0.5]), depth
            )
        if origin in (list, tuple):
            return [] if depth > _DEPTH else [self.value(inner[0], depth + 1) for _ in range(numbers.randint(0, 2))]
        if origin is dict or kind is dict:
            return {
                self.text(): self.value(inner[1] if inner else str, depth + 1) for _ in range(numbers.randint(0, 2))
            }
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return self._object(kind, depth)
        made = {bool: lambda: numbers.random() < 0.5, int: lambda: numbers.randint(0, 9), float: numbers.random}
        return made[kind]() if kind in made else None if kind is _NONE else self.text()

    def text(self) -> str:
        return self._numbers.choice(_AROUND).format(next(self._words))

    def _object(self, kind: type[BaseModel], depth: int) -> dict[str, Any]:
        made = {}
        for name, field in kind.model_fields.items():
            may_lack = not field.is_required()
            if not may_lack or (depth < _DEPTH and self._numbers.random() < 0.6):
                made[field.alias or name] = self.value(field.annotation, depth + 1)
        return made

    def answer(self, api: str) -> Any:
        if api == "chat":
            return self._object(ChatCompletionMessage, 0)
        kind = ResponseOutputItem if api == "responses" else ContentBlock
        return [self.value(kind) for _ in range(self._numbers.randint(1, 3))]


def main(count: int, seed: int) -> None:
    maker = Maker(seed)
    for i in range(count):
        api = ("chat", "responses", "messages")[i % 3]
        print(json.dumps({"api": api, "answer": maker.answer(api)}), flush=i % 100 == 99)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
