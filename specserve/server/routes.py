"""Every address of the server as data: what is sent there, what comes back, who may call it. Knows the wire types; what
answers a route is nothing it knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specserve.server.wire import bodies, translated_bodies
from specserve.server.wire.anthropic import CountTokensRequest, MessagesRequest
from specserve.server.wire.openai_responses import ResponsesRequest
from specserve.server.wire.requests import ChatCompletionRequest, CompletionRequest, ResetPrefixCacheRequest
from specserve.server.wire.tokenization import DetokenizeRequest, TokenizeRequest

JSON, EVENTS, HTML = "application/json", "text/event-stream", "text/html"
METRICS = "text/plain"

_RUNS = (500, 503)
_READS = (400, 408, 413, 415, *_RUNS, 504)
_GENERATES = (404, 429, *_READS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One method of one path. Types are what pydantic.TypeAdapter takes.

    `request` is a POST's body, and `example` one that works, the model's name aside. `replies` has the type of the body
    by HTTP status, JSON where `media` says nothing else; `event` is what `data:` holds when the answer is streamed.
    `errors` are the statuses, besides 401, that come with an `error`. `needs_key` is false for what is open even where
    keys are asked for.
    """

    method: str
    path: str
    name: str
    summary: str
    group: str
    replies: Mapping[int, Any] = field(default_factory=dict)
    media: str = JSON
    request: Any = None
    example: Mapping[str, Any] = field(default_factory=dict)
    event: Any = None
    error: Any = bodies.ErrorBody
    errors: tuple[int, ...] = ()
    needs_key: bool = True


ROUTES = (
    Route(
        method="POST",
        path="/v1/chat/completions",
        name="createChatCompletion",
        summary="Answer a conversation.",
        group="Generation",
        request=ChatCompletionRequest,
        example={
            "messages": [{"role": "user", "content": "Name three rivers of Europe."}],
            "max_tokens": 64,
            "temperature": 0,
        },
        replies={200: bodies.ChatCompletion},
        event=bodies.ChatCompletionChunk,
        errors=_GENERATES,
    ),
    Route(
        method="POST",
        path="/v1/completions",
        name="createCompletion",
        summary="Continue a text, or several.",
        group="Generation",
        request=CompletionRequest,
        example={"prompt": "The three longest rivers of Europe are", "max_tokens": 32, "temperature": 0},
        replies={200: bodies.Completion},
        event=bodies.CompletionChunk,
        errors=_GENERATES,
    ),
    Route(
        method="POST",
        path="/v1/responses",
        name="createResponse",
        summary="Answer a conversation, in the words of OpenAI's Responses API. Nothing is kept.",
        group="Generation",
        request=ResponsesRequest,
        example={"input": "Name three rivers of Europe.", "max_output_tokens": 64, "temperature": 0},
        replies={200: translated_bodies.ResponseReply},
        event=dict[str, Any],
        errors=_GENERATES,
    ),
    Route(
        method="POST",
        path="/v1/messages",
        name="createMessage",
        summary="Answer a conversation, in the words of Anthropic's Messages API.",
        group="Generation",
        request=MessagesRequest,
        example={
            "messages": [{"role": "user", "content": "Name three rivers of Europe."}],
            "max_tokens": 64,
            "temperature": 0,
        },
        replies={200: translated_bodies.AnthropicReply},
        event=dict[str, Any],
        error=translated_bodies.AnthropicError,
        errors=_GENERATES,
    ),
    Route(
        method="POST",
        path="/v1/messages/count_tokens",
        name="countMessageTokens",
        summary="How many tokens the prompt of a message would have.",
        group="Tokens",
        request=CountTokensRequest,
        example={"messages": [{"role": "user", "content": "Name three rivers of Europe."}]},
        replies={200: translated_bodies.CountTokensReply},
        error=translated_bodies.AnthropicError,
        errors=(404, *_READS),
    ),
    Route(
        method="GET",
        path="/v1/models",
        name="listModels",
        summary="The models that this server has.",
        group="Models",
        replies={200: bodies.ModelList},
    ),
    Route(
        method="GET",
        path="/v1/models/{id}",
        name="getModel",
        summary="One model. Its name may hold slashes, as they are or as %2F.",
        group="Models",
        replies={200: bodies.ModelCard},
        errors=(404,),
    ),
    Route(
        method="POST",
        path="/tokenize",
        name="tokenize",
        summary="The token ids of a prompt, or of a conversation in the model's chat template.",
        group="Tokens",
        request=TokenizeRequest,
        example={"prompt": "Three rivers", "return_token_strs": True},
        replies={200: bodies.TokenizeReply},
        errors=(404, *_READS),
    ),
    Route(
        method="POST",
        path="/detokenize",
        name="detokenize",
        summary="The text of token ids.",
        group="Tokens",
        request=DetokenizeRequest,
        example={"tokens": [1, 2, 3]},
        replies={200: bodies.DetokenizeReply},
        errors=(404, *_READS),
    ),
    Route(
        method="GET",
        path="/tokenizer_info",
        name="getTokenizerInfo",
        summary="The tokenizer's special tokens and chat template.",
        group="Tokens",
        replies={200: bodies.TokenizerInfo},
    ),
    Route(
        method="GET",
        path="/live",
        name="getLive",
        summary="Whether the server runs, also while its engine loads, restarts or drains: for a liveness check.",
        group="Server",
        replies={200: bodies.HealthReply},
        needs_key=False,
    ),
    Route(
        method="GET",
        path="/health",
        name="getHealth",
        summary="Whether the server works: 503 while it loads or drains, and when the engine is dead or stalled.",
        group="Server",
        replies={200: bodies.HealthReply, 503: bodies.HealthReply},
        needs_key=False,
    ),
    Route(
        method="GET",
        path="/ready",
        name="getReady",
        summary="Whether the server takes new requests.",
        group="Server",
        replies={200: bodies.HealthReply, 503: bodies.HealthReply},
        needs_key=False,
    ),
    Route(
        method="GET",
        path="/version",
        name="getVersion",
        summary="The version of specserve.",
        group="Server",
        replies={200: bodies.VersionReply},
    ),
    Route(
        method="GET",
        path="/server_info",
        name="getServerInfo",
        summary="How the server was started: model, device, drafter, limits.",
        group="Server",
        replies={200: dict[str, Any]},
    ),
    Route(
        method="GET",
        path="/stats",
        name="getStats",
        summary="What the server does now: rates, latencies, acceptance, use of the KV cache.",
        group="Server",
        replies={200: dict[str, Any]},
    ),
    Route(
        method="GET",
        path="/metrics",
        name="getMetrics",
        summary="Metrics in Prometheus' text format.",
        group="Server",
        replies={200: str},
        media=METRICS,
    ),
    Route(
        method="POST",
        path="/reset_prefix_cache",
        name="resetPrefixCache",
        summary="Forget the KV of all prompts. Only with --admin.",
        group="Server",
        request=ResetPrefixCacheRequest,
        replies={200: bodies.HealthReply},
        errors=(403, 404, *_READS),
    ),
    Route(
        method="GET",
        path="/openapi.json",
        name="getOpenapi",
        summary="This document.",
        group="Server",
        replies={200: dict[str, Any]},
    ),
    Route(
        method="GET",
        path="/docs",
        name="getDocs",
        summary="This document as a page for people, which sends requests too.",
        group="Server",
        replies={200: str},
        media=HTML,
        needs_key=False,
    ),
    Route(
        method="GET",
        path="/",
        name="getPlayground",
        summary="A page for people who want to talk with the model and see which drafts it accepts.",
        group="Server",
        replies={200: str},
        media=HTML,
        needs_key=False,
    ),
)
