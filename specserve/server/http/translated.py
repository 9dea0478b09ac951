"""POST /v1/messages, /v1/messages/count_tokens and /v1/responses: other APIs' words for a chat completion."""

from __future__ import annotations

import functools
import secrets

from aiohttp import web

from specserve.server.http.bodies import parsed
from specserve.server.http.completions import conversation_of, ignore_unrendered_tools, prepare_chat
from specserve.server.http.context import context
from specserve.server.http.respond import Call, ignore, json_response, respond
from specserve.server.wire.anthropic_api.requests import CountTokensRequest, MessagesRequest
from specserve.server.wire.anthropic_api.stream import MessageStream, count_tokens_body, message_body
from specserve.server.wire.json.text import LONG
from specserve.server.wire.openai.requests import ChatCompletionRequest
from specserve.server.wire.openai.responses import ResponsesRequest
from specserve.server.wire.openai.responses_stream import ResponseStream, response_body
from specserve.server.wire.translated import TranslatedRequest, own_names, read_translated

_read_messages = functools.partial(read_translated, MessagesRequest)
_read_count = functools.partial(read_translated, CountTokensRequest)
_read_responses = functools.partial(read_translated, ResponsesRequest)


async def messages(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages."""
    server = context(request)
    server.admission.check()
    body: MessagesRequest = await parsed(request, _read_messages)
    chat = await _accepted(request, body)
    with server.admission.enter(chat.num_choices) as place:
        prepared, parser = await prepare_chat(server, chat, body.own_names)
        reply = server.reply(f"msg_{secrets.token_hex(12)}", chat, tool_parser=parser)
        call = Call(
            requests=[prepared],
            stream=body.stream,
            place=place,
            body=lambda outputs, now: message_body(reply, outputs[0], now, reply.answer_parser()),
            events=lambda outputs: MessageStream(reply, outputs[0], reply.answer_parser()),
        )
        return await respond(request, call)


async def count_tokens(request: web.Request) -> web.Response:
    """POST /v1/messages/count_tokens."""
    server = context(request)
    server.admission.check()
    body: CountTokensRequest = await parsed(request, _read_count)
    chat = await _accepted(request, body)
    conversation, template = conversation_of(server, chat)
    _, ids, unread = await server.service.prompts.chat_ids(conversation, **template)
    ignore(request, own_names(chat.as_sent(unread), body.own_names))
    return json_response(count_tokens_body(len(ids)))


async def responses(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses."""
    server = context(request)
    server.admission.check()
    body: ResponsesRequest = await parsed(request, _read_responses)
    chat = await _accepted(request, body)
    with server.admission.enter(chat.num_choices) as place:
        prepared, parser = await prepare_chat(server, chat, body.own_names)
        reply = server.reply(f"resp_{secrets.token_hex(12)}", chat, tool_parser=parser)
        call = Call(
            requests=[prepared],
            stream=body.stream,
            place=place,
            body=lambda outputs, now: response_body(reply, body, outputs[0], now, reply.answer_parser()),
            events=lambda outputs: ResponseStream(reply, body, outputs[0], reply.answer_parser()),
        )
        return await respond(request, call)


async def _accepted(request: web.Request, body: TranslatedRequest) -> ChatCompletionRequest:
    """The same request as chat's, checked; what of it is ignored is kept for the answer's headers."""
    server = context(request)
    server.check_model(body.model)
    limits = server.limits
    if names := body.ignored(limits):
        ignore(request, names)
    size = request.content_length or LONG  # unknown where it came in chunks
    chat = await server.service.threads.run(size, body.as_chat, limits)
    ignore_unrendered_tools(request, chat)
    return chat
