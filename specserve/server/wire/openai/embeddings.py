"""Embeddings in OpenAI's shapes."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypedDict

from specserve.server.wire.fields import MAX_COUNT, Name, Wire
from specserve.server.wire.openai.requests import Prompts


class EmbeddingRequest(Wire):
    """POST /v1/embeddings. `input` is a tuple of texts or of lists of ids, one entry where one was sent."""

    model: Name | None = None
    """The model's name in /v1/models; null is the one served."""
    input: Prompts
    """Text or token ids, or a list of inputs of one kind."""
    encoding_format: Literal["float", "base64"] = "float"
    """Numbers, or the bytes of float32 numbers, little-endian, in base64."""
    dimensions: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    """Only so many of the first numbers, of length 1 again; for models that were trained for that."""
    user: Name | None = None
    """Accepted and not used."""


class EmbeddingEntry(TypedDict):
    object: Literal["embedding"]
    index: int
    """Of the input."""
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingReply(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingEntry]
    model: str
    usage: EmbeddingUsage


def embedding_body(model: str, vectors: Sequence[NDArray[Any]], num_tokens: int, encoding: str) -> EmbeddingReply:
    """`vectors` float32 [numbers] of each input, of so many tokens together."""
    data: list[EmbeddingEntry] = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(vector.tobytes()).decode() if encoding == "base64" else vector.tolist(),
        }
        for index, vector in enumerate(vectors)
    ]
    usage: EmbeddingUsage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}
