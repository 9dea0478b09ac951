"""POST /v1/embeddings, and Ollama's /api/embed and /api/embeddings: states of texts, of models made for that."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiohttp import web
from numpy.typing import NDArray

from specserve.checkpoint.pooling import Pooling
from specserve.engine.request import Request
from specserve.errors import ModelError
from specserve.outputs import RequestOutput
from specserve.server.answers import Prepared
from specserve.server.http.bodies import parsed
from specserve.server.http.context import Context, context
from specserve.server.http.ollama import check_tag
from specserve.server.http.respond import Call, respond
from specserve.server.wire.errors import not_offered
from specserve.server.wire.ollama_api.requests import EmbedRequest, OldEmbedRequest
from specserve.server.wire.openai.embeddings import EmbeddingRequest, embedding_body
from specserve.server.wire.openai.replies import raise_failure
from specserve.server.wire.openai.requests import read
from specserve.types import SamplingParams

Vectors = Sequence[NDArray[Any]]
_PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
_read = functools.partial(read, EmbeddingRequest)
_read_embed = functools.partial(read, EmbedRequest)
_read_old = functools.partial(read, OldEmbedRequest)


async def embeddings(request: web.Request) -> web.StreamResponse:
    """POST /v1/embeddings."""
    server = context(request)
    server.admission.check()
    body: EmbeddingRequest = await parsed(request, _read)
    pooling = pooling_of(server)  # first: what it says of the model says more than that another one is not served
    server.check_model(body.model)
    name = server.adapter_of(body.model) or server.names[0]

    def reply(vectors: Vectors, num_tokens: int) -> Mapping[str, Any]:
        return embedding_body(name, vectors, num_tokens, body.encoding_format)

    return await _embed(request, pooling, body.input, body.model, body.dimensions, reply)


async def embed(request: web.Request) -> web.StreamResponse:
    """POST /api/embed."""
    server = context(request)
    server.admission.check()
    body: EmbedRequest = await parsed(request, _read_embed)
    pooling = pooling_of(server)
    check_tag(server, body.name)

    def reply(vectors: Vectors, num_tokens: int) -> Mapping[str, Any]:
        found = [vector.tolist() for vector in vectors]
        return {"model": body.model or server.names[0], "embeddings": found, "prompt_eval_count": num_tokens}

    return await _embed(request, pooling, body.input, body.name, body.dimensions, reply, cuts=body.truncate)


async def old_embed(request: web.Request) -> web.StreamResponse:
    """POST /api/embeddings, Ollama's older way: one text."""
    server = context(request)
    server.admission.check()
    body: OldEmbedRequest = await parsed(request, _read_old)
    pooling = pooling_of(server)
    check_tag(server, body.name)

    def reply(vectors: Vectors, num_tokens: int) -> Mapping[str, Any]:
        return {"embedding": vectors[0].tolist()}

    return await _embed(request, pooling, (body.prompt,), body.name, None, reply, cuts=True)


async def _embed(
    request: web.Request,
    pooling: Pooling,
    inputs: Sequence[str | list[int]],
    name: str | None,
    dimensions: int | None,
    reply: Callable[[Vectors, int], Mapping[str, Any]],
    cuts: bool = False,
) -> web.StreamResponse:
    """`cuts` texts that the context has no room for, but for their last token, whose state is the embedding."""
    server = context(request)
    most = server.limits.max_model_len - 1
    with server.admission.enter(len(inputs)) as place:
        listed = await asyncio.gather(*(_ids(server, each, cuts) for each in inputs))
        listed = [[*ids[: most - 1], ids[-1]] if cuts and len(ids) > most else ids for ids in listed]
        requests = [
            Request(
                id=server.service.new_id(),
                prompt_ids=ids,
                params=_PARAMS,
                drafter="none",
                adapter=server.adapter_of(name),
                embeds=True,
            )
            for ids in listed
        ]

        def body(outputs: Sequence[RequestOutput], now: float) -> Mapping[str, Any]:
            for output in outputs:
                raise_failure(output.outputs)
            vectors = [pooling.embedding(output.embedding or b"", dimensions) for output in outputs]
            return reply(vectors, sum(map(len, listed)))

        prepared = [Prepared(each) for each in requests]
        call = Call(requests=prepared, stream=False, place=place, body=body, events=_no_events)
        return await respond(request, call)


async def _ids(server: Context, text: str | list[int], cuts: bool) -> list[int]:
    if not isinstance(text, str):
        return text
    if cuts:
        server.service.prompts.check_characters(len(text), "input")
    else:
        await server.service.prompts.check_length(text)
    return await server.service.prompts.encode(text)


def pooling_of(server: Context) -> Pooling:
    """Raises WireError for a model that was not made for embeddings."""
    found = server.pooling
    if isinstance(found, ModelError):
        raise not_offered(f"This server gives no embeddings: {found}", param="model")
    if found is None:
        raise not_offered(
            f"This server gives no embeddings: {server.names[0]} generates text. Serve a model that was made for them: "
            "one whose folder has modules.json and 1_Pooling/config.json, such as Qwen3-Embedding.",
            param="model",
        )
    return found


def _no_events(outputs: Sequence[RequestOutput]) -> Any:
    raise AssertionError("embeddings come whole")
