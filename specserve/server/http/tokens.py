"""POST /tokenize and /detokenize, GET /tokenizer_info: the tokenizer over HTTP, in vLLM's shapes. Needs no engine's
step."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from aiohttp import web

from specserve.server.http.bodies import parsed
from specserve.server.http.context import context
from specserve.server.http.respond import json_response
from specserve.server.wire.fields import Limits
from specserve.server.wire.requests import read
from specserve.server.wire.tokenization import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
    detokenize_body,
    read_tokenize,
    tokenize_body,
)
from specserve.text.tokenizer import Tokenizer

_read_detokenize = functools.partial(read, DetokenizeRequest)


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize."""
    server = context(request)
    server.admission.check()
    asked: TokenizeRequest = await parsed(request, read_tokenize)
    server.check_model(asked.model)
    if isinstance(asked, TokenizeChatRequest):
        text, ids = await server.service.chat_ids(asked.conversation(), **asked.template_options())
        if asked.add_special_tokens:
            ids = await server.service.encode(text)
    else:
        ids = await server.service.encode(asked.prompt, asked.add_special_tokens)
    strings = (
        await server.service.run(len(ids), _spellings, server.service.tokenizer, ids)
        if asked.return_token_strs
        else None
    )
    return json_response(tokenize_body(ids, server.limits.max_model_len, strings))


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize."""
    server = context(request)
    asked: DetokenizeRequest = await parsed(request, _read_detokenize)
    server.check_model(asked.model)
    text = await server.service.run(len(asked.tokens), server.service.tokenizer.decode, asked.tokens, False)
    return json_response(detokenize_body(text))


async def tokenizer_info(request: web.Request) -> web.Response:
    """GET /tokenizer_info: what a client needs to build prompts itself; lm-eval reads eos_token."""
    server = context(request)
    limits: Limits = server.limits
    return json_response({**server.service.tokenizer.info(), "model_max_length": limits.max_model_len})


def _spellings(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in ids]
