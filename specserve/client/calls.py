"""`AsyncClient`: each call of the API as a method."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import aiohttp

from specserve.client.transport import Transport, broken, load, read_to_end
from specserve.errors import InputError, unknown
from specserve.server.wire.fields import Wire
from specserve.server.wire.openai.bodies import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    DetokenizeReply,
    HealthReply,
    ModelList,
    TokenizeReply,
)
from specserve.server.wire.openai.requests import ChatCompletionRequest, CompletionRequest
from specserve.server.wire.openai.sampling_fields import SamplingFields
from specserve.server.wire.openai.stream import DONE
from specserve.server.wire.openai.tokenization import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from specserve.server.wire.openai.unsupported import REFUSED

T = TypeVar("T")
Messages: TypeAlias = Sequence[Mapping[str, Any]]
Prompt: TypeAlias = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


class AsyncStream(Generic[T]):
    """The chunks of one answer, read once: `async for chunk in stream`. The request is sent when reading begins.
    Leaving early, by `break`, `async with`, `close` or cancellation, closes the connection, which aborts the request.

    Raises ServerError when the server refuses, sends an error in mid-stream, or ends without its end mark.
    """

    def __init__(self, transport: Transport, path: str, body: Mapping[str, Any]) -> None:
        self._transport, self._path, self._body = transport, path, body
        self._used = False
        self._response: aiohttp.ClientResponse | None = None

    async def __aiter__(self) -> AsyncIterator[T]:
        if self._used:
            raise InputError("This stream was read or closed before. Call the client again for another answer.")
        self._used = True
        try:
            self._response = await self._transport.stream(self._path, self._body)
            async for data in self._transport.events(self._response):
                if data == DONE:
                    await read_to_end(self._response)
                    return
                yield load(data)
            raise broken("The server closed the connection before the end of its answer.")
        finally:
            self._drop()

    async def __aenter__(self) -> AsyncStream[T]:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; an answer that still comes is aborted."""
        self._used = True
        self._drop()

    def _drop(self) -> None:
        if self._response is not None:
            self._response.close()


class AsyncClient:
    """A client for asyncio, of one event loop: that of its first request.

    `base_url` is the server's address, with or without /v1 [default: SPECSERVE_BASE_URL, else http://127.0.0.1:8000];
    `api_key` is sent as a bearer token [default: SPECSERVE_API_KEY]; `timeout` in seconds holds for a whole answer, and
    in a stream for the silence between its parts (None: no limit); `uds` is the path of a Unix socket to use instead of
    TCP; `max_retries`: requests that met overload, a failure or no server are sent again that often, as the headers
    Retry-After and x-should-retry ask; one that timed out is not, and a stream that has begun is not.

    `**fields` are the request's other fields, as the API has them; an unknown name is an InputError before anything is
    sent. Every call raises ServerError.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float | None = 600.0,
        uds: str | os.PathLike[str] | None = None,
        max_retries: int = 2,
    ) -> None:
        self._transport = Transport(base_url, api_key, timeout, uds, max_retries)

    async def chat(self, messages: Messages, **fields: Any) -> ChatCompletion:
        """Answer a conversation."""
        body = _body(ChatCompletionRequest, fields, messages=messages)
        answer: ChatCompletion = await self._transport.json("POST", "/v1/chat/completions", body)
        return answer

    def stream_chat(self, messages: Messages, **fields: Any) -> AsyncStream[ChatCompletionChunk]:
        """Answer a conversation, chunk by chunk. stream_options={"include_usage": True} brings usage and metrics in a
        last chunk that has no choices."""
        body = _body(ChatCompletionRequest, fields, messages=messages, stream=True)
        return AsyncStream(self._transport, "/v1/chat/completions", body)

    async def complete(self, prompt: Prompt, **fields: Any) -> Completion:
        """Continue a prompt, as text or token ids, or several."""
        answer: Completion = await self._transport.json(
            "POST", "/v1/completions", _body(CompletionRequest, fields, prompt=prompt)
        )
        return answer

    def stream(self, prompt: Prompt, **fields: Any) -> AsyncStream[CompletionChunk]:
        """Continue a prompt, chunk by chunk."""
        body = _body(CompletionRequest, fields, prompt=prompt, stream=True)
        return AsyncStream(self._transport, "/v1/completions", body)

    async def models(self) -> ModelList:
        """The models that are served."""
        answer: ModelList = await self._transport.json("GET", "/v1/models")
        return answer

    async def tokenize(
        self, prompt: str | None = None, *, messages: Messages | None = None, **fields: Any
    ) -> TokenizeReply:
        """The token ids of a text, or of a conversation as the chat template renders it."""
        answer: TokenizeReply = await self._transport.json(
            "POST", "/tokenize", _tokenize_body(prompt, messages, fields)
        )
        return answer

    async def detokenize(self, tokens: Sequence[int], **fields: Any) -> DetokenizeReply:
        """The text of token ids."""
        answer: DetokenizeReply = await self._transport.json(
            "POST", "/detokenize", _body(DetokenizeRequest, fields, tokens=tokens)
        )
        return answer

    async def health(self) -> HealthReply:
        """How the server is, now: asked once. Raises ServerError with status 503 while it takes no requests."""
        answer: HealthReply = await self._transport.json("GET", "/health", max_retries=0)
        return answer

    async def stats(self) -> dict[str, Any]:
        """The server's figures at this moment."""
        answer: dict[str, Any] = await self._transport.json("GET", "/stats")
        return answer

    async def close(self) -> None:
        """Close all connections; answers that still come are aborted."""
        await self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


# --- fields -----------------------------------------------------------------------------------------------------------


def _body(kind: type[Wire], fields: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    """A request's fields. Raises InputError for a name that the server would not read; one that it knows and refuses is
    sent, for its answer says what to do instead."""
    misplaced = kind.misplaced if issubclass(kind, SamplingFields) else {}
    known = set(kind.model_fields) - own.keys() - {"stream"}
    for name in fields:
        if name == "stream":
            raise InputError("stream is no field here: stream_chat and stream give an answer chunk by chunk.", name)
        if name in misplaced:
            raise InputError(f"{name} does not belong here. {misplaced[name]}", name)
        if name not in known and name not in REFUSED:
            raise InputError(unknown("field", name, known), name)
    return {**fields, **own}


def _tokenize_body(prompt: str | None, messages: Messages | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    if (prompt is None) == (messages is None):
        raise InputError("tokenize takes a prompt or messages. Give one of them.", "prompt")
    if messages is not None:
        return _body(TokenizeChatRequest, fields, messages=messages)
    return _body(TokenizeTextRequest, fields, prompt=prompt)
