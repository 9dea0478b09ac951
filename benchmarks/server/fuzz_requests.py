"""Random requests of all endpoints and dialects, right ones and ones that are wrong somewhere. The same numbers give
the same requests."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_MOST_TOKENS = 24
_TEXTS = (
    "the cat sat on the mat",
    "x",
    "",
    " ",
    "\n",
    "\x00",
    "é😀",
    "a" * 300,
    "<tool_call>",
    "{",
    "<|end|>",
    "\ufffd",
)
_WORDS = ("yes", "no", "maybe", "0", "a", "b", "ab", "the", " ", '"', "é")
_REGEXES = (
    "[a-z]+",
    r"\d{3}",
    "(a|b)*a(a|b){5}",
    "a{2,5}",
    r"\s*",
    "x?",
    "(yes|no)!",
    ".*",
    "[",
    "(?=a)b",
    "",
    "a" * 900,
)
_GRAMMARS = (
    'start: "a" start | "b"',
    'root ::= "a" root | "b"',
    'start: "yes" | "no"',
    "start: nothing",
    "root ::=",
    "(",
)
_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 0.5, 1e308, -1e308, 2**31, 2**63, 2**70, -(2**40), "", "x", "\x00", "0.7", [], {}),
    *([None], [[]], [1, "x"], {"": 0}, {"a": {"b": [{}]}}, "\ud800", "x" * 5000, [0] * 3000, {"type": "object"}),
)
_HEADERS: tuple[dict[str, str], ...] = (
    {"Content-Type": "text/plain"},
    {"Content-Type": "application/json; charset=utf-16"},
    {"Content-Encoding": "gzip", "Content-Type": "application/json"},
    {"Authorization": "Bearer nobody", "Content-Type": "application/json"},
    {"X-Long": "x" * 7000, "Content-Type": "application/json"},
    {"Expect": "something", "Content-Type": "application/json"},
)
_GETS = (
    "/v1/models",
    "/v1/models/none",
    "/health",
    "/stats",
    "/metrics",
    "/version",
    "/server_info",
    "/tokenizer_info",
)
_POSTS = ("/v1/nothing", "/v1/models", "/", "/v1/completions/", "/..%2f..%2fetc/passwd")
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Request:
    """`body` is what is sent. `fields` are those of a completion that nothing was done to, which has the same tokens
    whenever it is asked; None for others. The client leaves after `leave_s`."""

    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    fields: dict[str, Any] | None = None
    is_wrong: bool = False
    leave_s: float | None = None


class Requests:
    """`vocab_size`: ids are below it; `most`: the longest prompt and output together."""

    def __init__(self, numbers: random.Random, vocab_size: int, most: int) -> None:
        self._numbers, self._vocab_size, self._most = numbers, vocab_size, most
        self._makers: Sequence[tuple[float, str, Callable[[], dict[str, Any]]]] = (
            (0.35, COMPLETIONS, self._completion),
            (0.3, CHAT, self._chat),
            (0.1, "/v1/messages", self._messages),
            (0.1, "/v1/responses", self._responses),
            (0.03, "/v1/messages/count_tokens", self._messages),
            (0.06, "/tokenize", lambda: {"prompt": self._text()}),
            (0.06, "/detokenize", lambda: {"tokens": self._ids(20)}),
        )

    def next(self) -> Request:
        numbers = self._numbers
        if numbers.random() < 0.04:
            method = numbers.choice(("GET", "GET", "DELETE", "PUT", "HEAD", "OPTIONS"))
            return Request(method, numbers.choice((*_GETS, *_POSTS, COMPLETIONS)), is_wrong=method != "GET")
        _, path, make = numbers.choices(self._makers, [share for share, _, _ in self._makers])[0]
        fields = make()
        leave_s = numbers.uniform(0, 0.3) if numbers.random() < 0.05 else None
        if numbers.random() < 0.5:
            return self._spoilt(path, fields, leave_s)
        return Request("POST", path, written(fields), _JSON, fields, leave_s=leave_s)

    # --- what is right, or nearly -------------------------------------------------------------------------------------

    def _text(self) -> str:
        return "".join(self._numbers.choices(_TEXTS, k=self._numbers.randint(1, 4)))

    def _ids(self, most: int) -> list[int]:
        return [self._numbers.randrange(self._vocab_size) for _ in range(self._numbers.randint(1, most))]

    def _some(self, fields: dict[str, Callable[[], Any]], share: float) -> dict[str, Any]:
        return {name: make() for name, make in fields.items() if self._numbers.random() < share}

    def _sampling(self) -> dict[str, Any]:
        numbers = self._numbers
        penalties = ("presence_penalty", "frequency_penalty")
        fields: dict[str, Callable[[], Any]] = {
            "temperature": lambda: numbers.choice((0, 0, 0.7, 1.0, 2.0)),
            "top_k": lambda: numbers.choice((-1, 0, 1, 5)),
            "top_p": lambda: numbers.uniform(0.01, 1),
            "min_p": numbers.random,
            "repetition_penalty": lambda: numbers.uniform(0.5, 2),
            **{name: lambda: numbers.uniform(-2, 2) for name in penalties},
            "logit_bias": lambda: {str(token): numbers.choice((-100, -1, 3, 100)) for token in self._ids(30)},
            "allowed_token_ids": lambda: self._ids(40),
            "bad_words": lambda: numbers.choices(_WORDS, k=numbers.randint(1, 8)),
            "min_tokens": lambda: numbers.randint(0, 3),
            "ignore_eos": lambda: numbers.random() < 0.5,
            "stop": lambda: numbers.choices(_WORDS, k=numbers.randint(1, 4)),
            "stop_token_ids": lambda: self._ids(20),
            "include_stop_str_in_output": lambda: True,
            "skip_special_tokens": lambda: False,
            "cache_salt": lambda: numbers.choice(("a", "b")),
            "n": lambda: numbers.randint(1, 3),
            "speculative": lambda: numbers.choice(({"drafter": "ngram"}, {"drafter": "none"}, {"num_tokens": 3})),
            "user": lambda: {"name": self._text()},
            "metadata": lambda: {"a": [{}] * 50},
        }
        most = max(3, min(_MOST_TOKENS, self._most // 4))
        always = {"max_tokens": numbers.randint(3, most), "seed": numbers.randrange(2**31), "return_token_ids": True}
        stream = {"stream": True} if numbers.random() < 0.4 else {}
        return {**always, **self._some(fields, 0.12), **self._structured(), **stream}

    def _structured(self) -> dict[str, Any]:
        numbers = self._numbers
        if numbers.random() > 0.3:
            return {}
        kinds: tuple[Callable[[], dict[str, Any]], ...] = (
            lambda: {"guided_json": self._schema(3)},
            lambda: {
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": self._schema(3)}}
            },
            lambda: {"response_format": {"type": "json_object"}},
            lambda: {"guided_regex": numbers.choice(_REGEXES)},
            lambda: {"guided_choice": numbers.choices(_WORDS, k=numbers.randint(1, 5))},
            lambda: {"guided_grammar": numbers.choice(_GRAMMARS)},
            lambda: {"structured_outputs": {"regex": numbers.choice(_REGEXES)}},
        )
        return numbers.choice(kinds)()

    def _schema(self, depth: int) -> Any:
        numbers = self._numbers
        leaves: tuple[Any, ...] = (
            *({"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"type": "null"}, {}, True, False),
            {"enum": numbers.choices(_WORDS, k=3)},
            {"const": self._text()},
            {"type": "string", "pattern": numbers.choice(_REGEXES)},
            {"type": "string", "format": numbers.choice(("date", "uuid", "email", "url", "nothing"))},
            {"type": "string", "minLength": numbers.randint(0, 9), "maxLength": numbers.randint(0, 9)},
            {"type": "integer", "minimum": numbers.randint(-9, 9), "maximum": numbers.randint(-9, 9)},
            {"$ref": numbers.choice(("#", "#/$defs/a", "http://127.0.0.1:1/a"))},
        )
        if depth == 0 or numbers.random() < 0.4:
            return numbers.choice(leaves)
        inner = [self._schema(depth - 1) for _ in range(numbers.randint(1, 3))]
        names = [f"p{i}" for i in range(len(inner))]
        return numbers.choice(
            (
                {"type": "object", "properties": dict(zip(names, inner, strict=True)), "required": names[:1]},
                {"type": "object", "additionalProperties": inner[0]},
                {"type": "array", "items": inner[0], "maxItems": numbers.randint(0, 4)},
                {numbers.choice(("anyOf", "oneOf", "allOf")): inner},
                {"not": inner[0]},
            )
        )

    def _completion(self) -> dict[str, Any]:
        numbers, length = self._numbers, max(1, min(60, self._most // 4))
        prompts = (self._text, lambda: self._ids(length), lambda: [self._ids(5), self._ids(5)], lambda: ["a", "b"])
        own = {"logprobs": lambda: numbers.randint(0, 20), "echo": lambda: True}
        return {"prompt": numbers.choice(prompts)(), **self._sampling(), **self._some(own, 0.15)}

    def _chat(self) -> dict[str, Any]:
        numbers = self._numbers
        own: dict[str, Callable[[], Any]] = {
            "logprobs": lambda: True,
            "prediction": lambda: {"type": "content", "content": self._text() * 3},
            "tools": self._tools,
            "tool_choice": lambda: numbers.choice(("none", "auto", "required")),
        }
        return {"messages": self._conversation(), **self._sampling(), **self._some(own, 0.15)}

    def _conversation(self) -> list[dict[str, Any]]:
        roles = ("user", "assistant") if self._numbers.random() < 0.9 else ("system", "tool", "user")
        turns = 2 * self._numbers.randint(0, 1) + 1
        return [{"role": roles[turn % len(roles)], "content": self._text()} for turn in range(turns)]

    def _tools(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "f", "parameters": self._schema(2)}}]

    def _messages(self) -> dict[str, Any]:
        numbers = self._numbers
        own: dict[str, Callable[[], Any]] = {
            "system": self._text,
            "temperature": numbers.random,
            "stop_sequences": lambda: list(_WORDS[:2]),
            "stream": lambda: True,
            "tools": lambda: [{"name": "f", "input_schema": self._schema(2)}],
        }
        always = {"model": "any", "messages": self._conversation(), "max_tokens": numbers.randint(1, _MOST_TOKENS)}
        return {**always, **self._some(own, 0.3)}

    def _responses(self) -> dict[str, Any]:
        numbers = self._numbers
        own: dict[str, Callable[[], Any]] = {
            "instructions": self._text,
            "temperature": numbers.random,
            "stream": lambda: True,
            "text": lambda: {"format": {"type": "json_schema", "name": "a", "schema": self._schema(2)}},
            "tools": lambda: [{"type": "function", "name": "f", "parameters": self._schema(2)}],
        }
        always = {"input": self._text(), "max_output_tokens": numbers.randint(1, _MOST_TOKENS)}
        return {**always, **self._some(own, 0.3)}

    # --- what is wrong ------------------------------------------------------------------------------------------------

    def _spoilt(self, path: str, fields: dict[str, Any], leave_s: float | None) -> Request:
        numbers, headers = self._numbers, _JSON
        body = written(fields)
        match numbers.randrange(8):
            case 0:
                body = body[: numbers.randrange(len(body))]
            case 1:
                body = self._flipped(body)
            case 2:
                headers = numbers.choice(_HEADERS)
            case 3:
                body = written(numbers.choice(_ODD))
            case 4:
                path = numbers.choice((*_POSTS, COMPLETIONS, CHAT, "/v1/messages", "/v1/responses"))
            case 5:
                fields.pop(numbers.choice(list(fields)))
                body = written(fields)
            case _:
                for name in numbers.sample(list(fields), numbers.randint(1, min(2, len(fields)))):
                    fields[name] = self._odd(fields[name])
                body = written(fields)
        return Request("POST", path, body, headers, is_wrong=True, leave_s=leave_s)

    def _odd(self, value: Any) -> Any:
        """Something else in its place or, often, somewhere inside it."""
        if isinstance(value, dict) and value and self._numbers.random() < 0.6:
            name = self._numbers.choice(list(value))
            return {**value, name: self._odd(value[name])}
        if isinstance(value, list) and value and self._numbers.random() < 0.6:
            place = self._numbers.randrange(len(value))
            return [*value[:place], self._odd(value[place]), *value[place + 1 :]]
        return self._numbers.choice(_ODD)

    def _flipped(self, body: bytes) -> bytes:
        spoilt = bytearray(body)
        for _ in range(self._numbers.randint(1, 4)):
            spoilt[self._numbers.randrange(len(spoilt))] = self._numbers.randrange(256)
        return bytes(spoilt)


def written(value: Any) -> bytes:
    return json.dumps(value).encode()
