"""Every address of the server as one table: who answers it, what is sent there, what comes back, who may call it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from aiohttp import web
from typing_extensions import TypeAliasType

from specserve.server.http import completions, embeddings, info, pages, tokens, translated
from specserve.server.http.context import context
from specserve.server.http.ollama_routes import OLLAMA_ROUTES
from specserve.server.http.respond import json_response
from specserve.server.openapi import HTML, METRICS, SCRIPT, Route, document
from specserve.server.wire.anthropic_api import bodies as anthropic_bodies
from specserve.server.wire.anthropic_api.models import PAGE_PARAMETERS, PARAMETERS
from specserve.server.wire.anthropic_api.requests import CountTokensRequest, MessagesRequest
from specserve.server.wire.fields import Limits
from specserve.server.wire.openai import bodies, responses_bodies
from specserve.server.wire.openai.embeddings import EmbeddingReply, EmbeddingRequest
from specserve.server.wire.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    LoadAdapterRequest,
    ResetPrefixCacheRequest,
    UnloadAdapterRequest,
)
from specserve.server.wire.openai.responses import ResponsesRequest
from specserve.server.wire.openai.tokenization import DetokenizeRequest, TokenizeRequest

ModelsError = TypeAliasType("ModelsError", bodies.ErrorBody | anthropic_bodies.AnthropicError)

_LONG = 2**20  # characters' worth of work: it takes as long as a large text, so it is done on a thread

_RUNS = (500, 503)
_READS = (400, 408, 413, 415, *_RUNS, 504)
_GENERATES = (404, 429, *_READS)


async def openapi(request: web.Request) -> web.Response:
    """GET /openapi.json."""
    server = context(request)
    stated = (server.names[0], server.limits, server.needs_key, server.options.root_path)
    return json_response(await server.service.threads.run(_LONG, _document, *stated))


@functools.lru_cache(maxsize=4)
def _document(model: str, limits: Limits, needs_key: bool, root_path: str) -> Mapping[str, Any]:
    return document(ROUTES, model, limits, sorted(limits.drafters), needs_key, root_path)


ROUTES = (
    Route(
        method="POST",
        path="/v1/chat/completions",
        handler=completions.chat,
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
        handler=completions.completions,
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
        handler=translated.responses,
        name="createResponse",
        summary="Answer a conversation, in the words of OpenAI's Responses API. Nothing is kept.",
        group="Generation",
        request=ResponsesRequest,
        example={"input": "Name three rivers of Europe.", "max_output_tokens": 64, "temperature": 0},
        replies={200: responses_bodies.ResponseReply},
        event=dict[str, Any],
        errors=_GENERATES,
    ),
    Route(
        method="POST",
        path="/v1/messages",
        handler=translated.messages,
        name="createMessage",
        summary="Answer a conversation, in the words of Anthropic's Messages API.",
        group="Generation",
        request=MessagesRequest,
        example={
            "messages": [{"role": "user", "content": "Name three rivers of Europe."}],
            "max_tokens": 64,
            "temperature": 0,
        },
        replies={200: anthropic_bodies.AnthropicReply},
        event=dict[str, Any],
        error=anthropic_bodies.AnthropicError,
        errors=_GENERATES,
    ),
    Route(
        method="POST",
        path="/v1/messages/count_tokens",
        handler=translated.count_tokens,
        name="countMessageTokens",
        summary="How many tokens the prompt of a message would have.",
        group="Tokens",
        request=CountTokensRequest,
        example={"messages": [{"role": "user", "content": "Name three rivers of Europe."}]},
        replies={200: anthropic_bodies.CountTokensReply},
        error=anthropic_bodies.AnthropicError,
        errors=(404, *_READS),
    ),
    Route(
        method="POST",
        path="/v1/embeddings",
        handler=embeddings.embeddings,
        name="createEmbedding",
        summary="Embed texts, with a model that was made for that.",
        group="Generation",
        request=EmbeddingRequest,
        example={"input": "The food was delicious and the waiter was friendly."},
        replies={200: EmbeddingReply},
        errors=(429, *_READS),
    ),
    Route(
        method="GET",
        path="/v1/models",
        handler=info.models,
        name="listModels",
        summary="The models that this server has.",
        group="Models",
        parameters=PAGE_PARAMETERS,
        replies={200: bodies.ModelList | anthropic_bodies.ModelPage},
        error=ModelsError,
        errors=(400,),
    ),
    Route(
        method="GET",
        path="/v1/models/{id}",
        handler=info.model,
        name="getModel",
        summary="One model. Its name may hold slashes, as they are or as %2F.",
        group="Models",
        parameters=PARAMETERS,
        replies={200: bodies.ModelCard | anthropic_bodies.ModelInfo},
        error=ModelsError,
        errors=(404,),
    ),
    *OLLAMA_ROUTES,
    Route(
        method="POST",
        path="/tokenize",
        handler=tokens.tokenize,
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
        handler=tokens.detokenize,
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
        handler=tokens.tokenizer_info,
        name="getTokenizerInfo",
        summary="The tokenizer's special tokens and chat template.",
        group="Tokens",
        replies={200: bodies.TokenizerInfo},
    ),
    Route(
        method="GET",
        path="/live",
        handler=info.live,
        name="getLive",
        summary="Whether the server runs, also while its engine loads, restarts or drains: for a liveness check.",
        group="Server",
        replies={200: bodies.HealthReply, 503: bodies.HealthReply},
        needs_key=False,
    ),
    Route(
        method="GET",
        path="/health",
        handler=info.health,
        name="getHealth",
        summary="Whether the server works: 503 while it loads or drains, and when the engine is dead or stalled.",
        group="Server",
        replies={200: bodies.HealthReply, 503: bodies.HealthReply},
        needs_key=False,
    ),
    Route(
        method="GET",
        path="/ready",
        handler=info.health,
        name="getReady",
        summary="Whether the server takes new requests.",
        group="Server",
        replies={200: bodies.HealthReply, 503: bodies.HealthReply},
        needs_key=False,
    ),
    Route(
        method="GET",
        path="/version",
        handler=info.version,
        name="getVersion",
        summary="The version of specserve.",
        group="Server",
        replies={200: bodies.VersionReply},
    ),
    Route(
        method="GET",
        path="/server_info",
        handler=info.server_info,
        name="getServerInfo",
        summary="How the server was started: model, device, drafter, limits.",
        group="Server",
        replies={200: dict[str, Any]},
    ),
    Route(
        method="GET",
        path="/stats",
        handler=info.stats,
        name="getStats",
        summary="What the server does now: rates, latencies, acceptance, use of the KV cache.",
        group="Server",
        replies={200: dict[str, Any]},
    ),
    Route(
        method="GET",
        path="/metrics",
        handler=info.metrics,
        name="getMetrics",
        summary="Metrics in Prometheus' text format.",
        group="Server",
        replies={200: str},
        media=METRICS,
    ),
    Route(
        method="POST",
        path="/reset_prefix_cache",
        handler=info.reset_prefix_cache,
        name="resetPrefixCache",
        summary="Forget the KV of all prompts. Only with --admin.",
        group="Server",
        request=ResetPrefixCacheRequest,
        replies={200: bodies.HealthReply},
        errors=(403, 404, *_READS),
    ),
    Route(
        method="POST",
        path="/v1/load_lora_adapter",
        handler=info.load_adapter,
        name="loadLoraAdapter",
        summary="Load a LoRA adapter from a folder on the server. Only with --admin.",
        group="Server",
        request=LoadAdapterRequest,
        example={"lora_name": "fr", "lora_path": "/adapters/fr"},
        replies={200: bodies.ModelCard},
        errors=(403, 404, *_READS),
    ),
    Route(
        method="POST",
        path="/v1/unload_lora_adapter",
        handler=info.unload_adapter,
        name="unloadLoraAdapter",
        summary="Forget a LoRA adapter. Only with --admin.",
        group="Server",
        request=UnloadAdapterRequest,
        example={"lora_name": "fr"},
        replies={200: bodies.HealthReply},
        errors=(403, 404, *_READS),
    ),
    Route(
        method="GET",
        path="/openapi.json",
        handler=openapi,
        name="getOpenapi",
        summary="This document.",
        group="Server",
        replies={200: dict[str, Any]},
    ),
    Route(
        method="GET",
        path="/docs",
        handler=pages.docs,
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
        handler=pages.playground,
        name="getPlayground",
        summary="A page for people who want to talk with the model and see which drafts it accepts.",
        group="Server",
        replies={200: str},
        media=HTML,
        needs_key=False,
    ),
    Route(
        method="GET",
        path="/static/{name}",
        handler=pages.static,
        name="getStatic",
        summary="A script of the pages. Its name holds a folder: playground/app.js.",
        group="Server",
        replies={200: str},
        media=SCRIPT,
        errors=(404,),
        needs_key=False,
    ),
)
