"""POST /v1/chat/completions and /v1/completions: from the fields of a body to requests to the engine."""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from aiohttp import web

from specserve.engine.request import Request
from specserve.errors import InputError, PromptTooLongError
from specserve.server.answers import Prepared
from specserve.server.http.bodies import parsed
from specserve.server.http.context import Context, context
from specserve.server.http.respond import Call, ignore, respond
from specserve.server.tool_use import ToolUse, describe_tools
from specserve.server.wire.answer import AnswerParser
from specserve.server.wire.fields import Limits
from specserve.server.wire.openai.replies import chat_body, completion_body
from specserve.server.wire.openai.requests import ChatCompletionRequest, CompletionRequest, TemplateFields, read
from specserve.server.wire.openai.sampling_fields import SamplingFields
from specserve.server.wire.openai.stream import ChatStream, CompletionStream
from specserve.server.wire.translated import in_own_words, own_names

_AS_SENT: Mapping[str, str] = MappingProxyType({})
_read_chat = functools.partial(read, ChatCompletionRequest)
_read_completion = functools.partial(read, CompletionRequest)


async def chat(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    server = context(request)
    server.admission.check()
    body: ChatCompletionRequest = await parsed(request, _read_chat)
    accept(request, body)
    with server.admission.enter(body.num_choices) as place:
        prepared, parser = await prepare_chat(server, body)
        reply = server.reply(response_id("chatcmpl", body), body, tool_parser=parser)
        call = Call(
            requests=[prepared],
            stream=body.stream,
            place=place,
            body=lambda outputs, now: chat_body(reply, outputs[0], now),
            events=lambda outputs: ChatStream(reply, outputs[0]),
        )
        return await respond(request, call)


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    server = context(request)
    server.admission.check()
    body: CompletionRequest = await parsed(request, _read_completion)
    accept(request, body)
    with server.admission.enter(body.num_choices) as place:
        reply = server.reply(response_id("cmpl", body), body, echo=body.echo, echoes_only=body.echoes_only)
        call = Call(
            requests=await prepare_completions(server, body),
            stream=body.stream,
            place=place,
            body=functools.partial(completion_body, reply),
            events=functools.partial(CompletionStream, reply),
        )
        return await respond(request, call)


def accept(request: web.Request, body: SamplingFields) -> None:
    """Checks what only a server knows of a request, and keeps for the answer's headers what of it is ignored."""
    server = context(request)
    server.check_model(body.model)
    limits: Limits = server.limits
    if names := body.ignored(limits):
        ignore(request, names)
    if isinstance(body, ChatCompletionRequest):
        ignore_unrendered_tools(request, body)


def ignore_unrendered_tools(request: web.Request, body: ChatCompletionRequest) -> None:
    """Tools that none may call mean nothing to a model whose chat template takes none."""
    if body.tools and not body.callable_tools and not context(request).service.tokenizer.takes_tools:
        ignore(request, ["tools"])


def response_id(prefix: str, body: SamplingFields) -> str:
    """The request's own id where it has one, after OpenAI's prefix."""
    return f"{prefix}-{body.request_id or secrets.token_hex(12)}"


async def prepare_chat(
    server: Context, body: ChatCompletionRequest, names: Mapping[str, str] = _AS_SENT
) -> tuple[Prepared, Callable[[], AnswerParser] | None]:
    """The request for a conversation's next message, and what finds calls of tools in it. `names` are those of fields
    as they were sent, where they are not chat's."""
    server.service.wake_engine()
    conversation, template = conversation_of(server, body)
    try:
        prompt, ids, unread = await server.service.prompts.chat_prompt(conversation, **template)
    except InputError as error:
        if not names or type(error) is not InputError:
            raise
        raise in_own_words(error, names) from error
    predicted = body.prediction.content if body.prediction else ""
    prediction = await _prediction_ids(server, predicted) if predicted else []
    prepared = _prepare(server, body, ids, prompt, prediction)
    ignored = tuple(own_names(body.as_sent(unread), names))
    prepared = replace(prepared, source=names.get(prepared.source, prepared.source), ignored=ignored)
    tools = ToolUse(body.callable_tools, body.must_call, body.parallel_tool_calls)
    prepared, parser = await server.service.with_tools(prepared, tools)
    return await server.service.with_reasoning_apart(prepared), parser


def conversation_of(server: Context, body: TemplateFields) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages and the keyword arguments of Service.chat_ids. A model whose chat template takes no tools hears in
    words of those that it may call, and nothing of others."""
    conversation, template, tokenizer = body.conversation(), body.template_options(), server.service.tokenizer
    if not body.tools or tokenizer.takes_tools:
        return conversation, template
    if body.callable_tools:
        use = ToolUse(body.callable_tools, body.must_call)
        conversation = describe_tools(conversation, use, tokenizer.call_format)
    return conversation, {**template, "tools": None}


async def _prediction_ids(server: Context, text: str) -> list[int]:
    try:
        await server.service.prompts.check_length(text)
    except PromptTooLongError as error:
        raise InputError(
            f"The prediction has at least {error.num_tokens} tokens and the context is {error.limit + 1}; an answer "
            "cannot be longer. Leave out what is not likely to come.",
            "prediction",
        ) from error
    return await server.service.prompts.encode(text, add_special_tokens=False)


async def prepare_completions(server: Context, body: CompletionRequest) -> list[Prepared]:
    """The requests for a completion of each prompt."""
    prompts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    if not prompts:
        return [_prepare(server, body, ids, None) for ids in body.prompt if not isinstance(ids, str)]
    server.service.wake_engine()
    for prompt in prompts:
        await server.service.prompts.check_length(prompt)
    encoded = await asyncio.gather(*map(server.service.prompts.encode, prompts))
    return [_prepare(server, body, ids, prompt) for ids, prompt in zip(encoded, prompts, strict=True)]


def _prepare(
    server: Context, body: SamplingFields, ids: list[int], prompt: str | None, prediction: Sequence[int] = ()
) -> Prepared:
    request = Request(
        id=server.service.new_id(),
        prompt_ids=ids,
        params=body.sampling_params,
        priority=body.priority,
        salt=body.salt,
        drafter=body.speculative.drafter if body.speculative else None,
        prediction=tuple(prediction),
        explain=bool(body.speculative and body.speculative.explain),
        adapter=server.adapter_of(body.model),
    )
    return Prepared(request, prompt, body.constraint[0] if body.constraint else "structured")
