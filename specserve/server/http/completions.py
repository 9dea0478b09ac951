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
    asked: ChatCompletionRequest = await parsed(request, _read_chat)
    accept(request, asked)
    with server.admission.enter(asked.num_choices) as place:
        prepared, parser = await prepare_chat(server, asked)
        reply = server.reply(response_id("chatcmpl", asked), asked, tool_parser=parser)
        call = Call(
            requests=[prepared],
            stream=asked.stream,
            place=place,
            body=lambda outputs, now: chat_body(reply, outputs[0], now),
            events=lambda outputs: ChatStream(reply, outputs[0]),
        )
        return await respond(request, call)


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    server = context(request)
    server.admission.check()
    asked: CompletionRequest = await parsed(request, _read_completion)
    accept(request, asked)
    with server.admission.enter(asked.num_choices) as place:
        reply = server.reply(response_id("cmpl", asked), asked, echo=asked.echo, echoes_only=asked.echoes_only)
        call = Call(
            requests=await _prepare_completions(server, asked),
            stream=asked.stream,
            place=place,
            body=functools.partial(completion_body, reply),
            events=functools.partial(CompletionStream, reply),
        )
        return await respond(request, call)


def accept(request: web.Request, asked: SamplingFields) -> None:
    """Checks what only a server knows of a request, and keeps for the answer's headers what of it is ignored."""
    server = context(request)
    server.check_model(asked.model)
    limits: Limits = server.limits
    if names := asked.ignored(limits):
        ignore(request, names)
    if isinstance(asked, ChatCompletionRequest):
        ignore_untold_tools(request, asked)


def ignore_untold_tools(request: web.Request, asked: ChatCompletionRequest) -> None:
    """Tools that none may call mean nothing to a model whose chat template takes none."""
    if asked.tools and not asked.callable_tools and not context(request).service.tokenizer.takes_tools:
        ignore(request, ["tools"])


def response_id(prefix: str, asked: SamplingFields) -> str:
    """The request's own id where it has one, behind OpenAI's prefix."""
    return f"{prefix}-{asked.request_id or secrets.token_hex(12)}"


async def prepare_chat(
    server: Context, asked: ChatCompletionRequest, names: Mapping[str, str] = _AS_SENT
) -> tuple[Prepared, Callable[[], AnswerParser] | None]:
    """The request for a conversation's next message, and what finds calls of tools in it. `names` are those of fields
    as they were sent, where they are not chat's."""
    server.service.expect()
    conversation, template = conversation_of(server, asked)
    try:
        prompt, ids, unread = await server.service.chat_prompt(conversation, **template)
    except InputError as error:
        if not names or type(error) is not InputError:
            raise
        raise in_own_words(error, names) from error
    predicted = asked.prediction.content if asked.prediction else ""
    prediction = await _prediction_ids(server, predicted) if predicted else []
    prepared = _prepare(server, asked, ids, prompt, prediction)
    ignored = tuple(own_names(asked.as_sent(unread), names))
    prepared = replace(prepared, source=names.get(prepared.source, prepared.source), ignored=ignored)
    tools = ToolUse(asked.callable_tools, asked.must_call, asked.parallel_tool_calls)
    prepared, parser = await server.service.with_tools(prepared, tools)
    return await server.service.with_reasoning_apart(prepared), parser


def conversation_of(server: Context, asked: TemplateFields) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages and the keyword arguments of Service.chat_ids. A model whose chat template takes no tools hears in
    words of those that it may call, and nothing of others."""
    conversation, template, tokenizer = asked.conversation(), asked.template_options(), server.service.tokenizer
    if not asked.tools or tokenizer.takes_tools:
        return conversation, template
    if asked.callable_tools:
        use = ToolUse(asked.callable_tools, asked.must_call)
        conversation = describe_tools(conversation, use, tokenizer.call_format)
    return conversation, {**template, "tools": None}


async def _prediction_ids(server: Context, text: str) -> list[int]:
    try:
        await server.service.check_length(text)
    except PromptTooLongError as error:
        raise InputError(
            f"The prediction has at least {error.num_tokens} tokens and the context is {error.limit + 1}; an answer "
            "cannot be longer. Leave out what is not likely to come.",
            "prediction",
        ) from error
    return await server.service.encode(text, add_special_tokens=False)


async def _prepare_completions(server: Context, asked: CompletionRequest) -> list[Prepared]:
    prompts = [prompt for prompt in asked.prompt if isinstance(prompt, str)]
    if not prompts:
        return [_prepare(server, asked, ids, None) for ids in asked.prompt if not isinstance(ids, str)]
    server.service.expect()
    for prompt in prompts:
        await server.service.check_length(prompt)
    encoded = await asyncio.gather(*map(server.service.encode, prompts))
    return [_prepare(server, asked, ids, prompt) for ids, prompt in zip(encoded, prompts, strict=True)]


def _prepare(
    server: Context, asked: SamplingFields, ids: list[int], prompt: str | None, prediction: Sequence[int] = ()
) -> Prepared:
    request = Request(
        id=server.service.new_id(),
        prompt_ids=ids,
        params=asked.sampling_params,
        priority=asked.priority,
        salt=asked.salt,
        drafter=asked.speculative.drafter if asked.speculative else None,
        prediction=tuple(prediction),
        explain=bool(asked.speculative and asked.speculative.explain),
    )
    return Prepared(request, prompt, asked.constraint[0] if asked.constraint else "structured")
