"""The addresses of Ollama's API, as `routes` has all others."""

from __future__ import annotations

from typing import Any

from specserve.server.http import embeddings, ollama
from specserve.server.openapi import NDJSON, Route
from specserve.server.wire.ollama_api import bodies
from specserve.server.wire.ollama_api.requests import (
    EmbedRequest,
    GenerateRequest,
    OldEmbedRequest,
    OllamaChatRequest,
    ShowRequest,
)

_READS = (400, 404, 408, 413, 415, 500, 503, 504)
_GROUP = "Ollama"
_SHORT = {"num_predict": 64, "temperature": 0}


def _refused(method: str, what: str, name: str) -> Route:
    return Route(
        method=method,
        path=f"/api/{what}",
        handler=ollama.refusing(what),
        name=name,
        summary="Not offered; the error says what to do instead.",
        group=_GROUP,
        error=bodies.OllamaError,
        errors=(400,),
    )


def _told(path: str, handler: Any, name: str, summary: str, reply: Any) -> Route:
    return Route(
        method="GET",
        path=path,
        handler=handler,
        name=name,
        summary=summary,
        group=_GROUP,
        replies={200: reply},
        error=bodies.OllamaError,
    )


OLLAMA_ROUTES = (
    Route(
        method="POST",
        path="/api/chat",
        handler=ollama.chat,
        name="ollamaChat",
        summary="Answer a conversation, in the words of Ollama's API; streamed unless `stream` is false.",
        group=_GROUP,
        request=OllamaChatRequest,
        example={"messages": [{"role": "user", "content": "Name three rivers of Europe."}], "options": _SHORT},
        replies={200: bodies.OllamaChatReply},
        event=bodies.OllamaChatReply,
        event_media=NDJSON,
        error=bodies.OllamaError,
        errors=(429, *_READS),
    ),
    Route(
        method="POST",
        path="/api/generate",
        handler=ollama.generate,
        name="ollamaGenerate",
        summary="Answer a question, or continue a text, in the words of Ollama's API; streamed unless `stream` is "
        "false.",
        group=_GROUP,
        request=GenerateRequest,
        example={"prompt": "Name three rivers of Europe.", "stream": False, "options": _SHORT},
        replies={200: bodies.GenerateReply},
        event=bodies.GenerateReply,
        event_media=NDJSON,
        error=bodies.OllamaError,
        errors=(429, *_READS),
    ),
    Route(
        method="POST",
        path="/api/show",
        handler=ollama.show,
        name="ollamaShow",
        summary="What the model is and can do, in the words of Ollama's API.",
        group=_GROUP,
        request=ShowRequest,
        replies={200: bodies.ShowReply},
        error=bodies.OllamaError,
        errors=_READS,
    ),
    _told("/api/tags", ollama.tags, "ollamaTags", "The models that this server has.", bodies.TagsReply),
    _told("/api/ps", ollama.ps, "ollamaPs", "The models that are loaded.", bodies.PsReply),
    _told("/api/version", ollama.version, "ollamaVersion", "Whose requests are understood.", bodies.OllamaVersion),
    _refused("POST", "pull", "ollamaPull"),
    _refused("POST", "push", "ollamaPush"),
    _refused("POST", "create", "ollamaCreate"),
    _refused("POST", "copy", "ollamaCopy"),
    _refused("DELETE", "delete", "ollamaDelete"),
    Route(
        method="POST",
        path="/api/embed",
        handler=embeddings.embed,
        name="ollamaEmbed",
        summary="Embed texts, in the words of Ollama's API, with a model that was made for that.",
        group=_GROUP,
        request=EmbedRequest,
        example={"input": "Why is the sky blue?"},
        replies={200: bodies.EmbedReply},
        error=bodies.OllamaError,
        errors=(429, *_READS),
    ),
    Route(
        method="POST",
        path="/api/embeddings",
        handler=embeddings.old_embed,
        name="ollamaEmbeddings",
        summary="Embed one text, in Ollama's older way.",
        group=_GROUP,
        request=OldEmbedRequest,
        example={"prompt": "Why is the sky blue?"},
        replies={200: bodies.OldEmbedReply},
        error=bodies.OllamaError,
        errors=(429, *_READS),
    ),
)
