"""POST /tokenize and /detokenize, GET /tokenizer_info: the tokenizer over HTTP, in vLLM's shapes. Needs no engine's
step."""

from __future__ import annotations

import functools

from aiohttp import web

from specserve.server.http.bodies import parsed
from specserve.server.http.completions import conversation_of
from specserve.server.http.context import context
from specserve.server.http.respond import ignore, json_response, sized_response
from specserve.server.wire.fields import Limits
from specserve.server.wire.openai.requests import read
from specserve.server.wire.openai.tokenization import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
    detokenize_body,
    read_tokenize,
    tokenize_body,
)
from specserve.text.tokenizer import Tokenizer

_read_detokenize = functools.partial(read, DetokenizeRequest)


async def tokenize(request: web.Request) -> web.StreamResponse:
    """POST /tokenize."""
    server = context(request)
    server.admission.check()
    body: TokenizeRequest = await parsed(request, read_tokenize)
    server.check_model(body.model)
    if isinstance(body, TokenizeChatRequest):
        conversation, template = conversation_of(server, body)
        text, ids, unread = await server.service.prompts.chat_ids(conversation, **template)
        ignore(request, body.as_sent(unread))
        if body.add_special_tokens:
            server.service.prompts.check_characters(len(text), "messages")
            ids = await server.service.prompts.encode(text)
    else:
        server.service.prompts.check_characters(len(body.prompt), "prompt")
        ids = await server.service.prompts.encode(body.prompt, body.add_special_tokens)
    spell = functools.partial(_spelled, server.service.tokenizer) if body.return_token_strs else None
    reply = functools.partial(tokenize_body, ids, server.limits.max_model_len, spell)
    return await sized_response(request, len(ids), reply)


async def detokenize(request: web.Request) -> web.StreamResponse:
    """POST /detokenize."""
    server = context(request)
    body: DetokenizeRequest = await parsed(request, _read_detokenize)
    server.check_model(body.model)
    text = await server.service.threads.run(len(body.tokens), server.service.tokenizer.decode, body.tokens, False)
    return await sized_response(request, len(text), functools.partial(detokenize_body, text))


async def tokenizer_info(request: web.Request) -> web.Response:
    """GET /tokenizer_info: what a client needs to build prompts itself; lm-eval reads eos_token."""
    server = context(request)
    limits: Limits = server.limits
    return json_response({**server.service.tokenizer.info(), "model_max_length": limits.max_model_len})


def _spelled(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", "replace")
