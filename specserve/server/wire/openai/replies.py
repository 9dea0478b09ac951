"""The bodies of chat completions and completions, whole, and of the list of models.

A completion that ended by an error, or because the server had to drop it, is an error of the whole response: a client
that looks at `choices` alone shall not take it for an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from specserve.errors import NoTokenLeftError
from specserve.outputs import Chunk, CompletionOutput, RequestOutput
from specserve.server.wire.answer import AnswerParser, CallItem, PlainText, TextItem, items_of, parts_of
from specserve.server.wire.errors import COMPLETION_FAILED, WireError, unavailable
from specserve.server.wire.openai.bodies import (
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    Completion,
    CompletionChoice,
    FinishReason,
    ModelCard,
    ModelList,
    TextLogprobs,
    ToolCall,
    Totals,
)
from specserve.server.wire.openai.logprobs import CompletionLogprobs, Vocabulary, chat_logprobs, joined
from specserve.server.wire.openai.usage import metrics, usage

AnyAnswer = TypeVar("AnyAnswer", Chunk, CompletionOutput)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What all bodies of one response share. `created` is in seconds since 1970; `tool_parser` makes what finds calls
    of tools in one completion, None where none are looked for; the rest is as in the request."""

    id: str
    created: int
    model: str
    vocabulary: Vocabulary
    echo: bool = False
    echoes_only: bool = False
    return_token_ids: bool = False
    include_usage: bool = False
    skip_special_tokens: bool = True
    tool_parser: Callable[[], AnswerParser] | None = None

    def head(self, kind: str) -> dict[str, Any]:
        """The fields that every event begins with; `kind` is its `object`."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def totals(self, outputs: Sequence[RequestOutput], now: float) -> Totals:
        """`usage` and `metrics`; `now` is time.perf_counter()."""
        if self.echoes_only:
            outputs = [replace(output, outputs=list(map(self.to_send, output.outputs))) for output in outputs]
        return {"usage": usage(outputs), "metrics": metrics(outputs, now)}

    def to_send(self, answer: AnyAnswer) -> AnyAnswer:
        """What is sent of an answer: where the request is for the prompt alone, its end."""
        if not self.echoes_only:
            return answer
        reason = answer.finish_reason and "length"
        return replace(answer, text="", token_ids=[], logprobs=None, finish_reason=reason, stop_reason=None)

    def answer_parser(self) -> AnswerParser:
        """What tells one completion's calls from its text."""
        return self.tool_parser() if self.tool_parser else PlainText()

    @property
    def hidden(self) -> frozenset[int]:
        """Ids that are not part of the text."""
        return self.vocabulary.special_ids if self.skip_special_tokens else frozenset()


def chat_body(reply: Reply, output: RequestOutput, now: float) -> ChatCompletion:
    """`chat.completion`. Raises WireError for an output that did not end well."""
    raise_failure(output.outputs)
    totals = reply.totals([output], now)
    body: ChatCompletion = {
        "id": reply.id,
        "object": "chat.completion",
        "created": reply.created,
        "model": reply.model,
        "choices": [_chat_choice(reply, completion) for completion in output.outputs],
        "usage": totals["usage"],
        "metrics": totals["metrics"],
    }
    if reply.return_token_ids:
        body["prompt_token_ids"] = output.prompt_token_ids
    return body


def _chat_choice(reply: Reply, completion: CompletionOutput) -> ChatChoice:
    logprobs = completion.logprobs
    parser = reply.answer_parser()
    message = chat_message(parser, completion)
    choice: ChatChoice = {
        "index": completion.index,
        "message": message,
        "logprobs": None if logprobs is None else chat_logprobs(logprobs, reply.vocabulary),
        "finish_reason": finish_reason(completion, parser.called),
        "stop_reason": completion.stop_reason,
    }
    if completion.beam is not None:
        choice["cumulative_logprob"], choice["score"] = completion.beam
    if reply.return_token_ids:
        choice["token_ids"] = completion.token_ids
    return choice


def chat_message(parser: AnswerParser, completion: CompletionOutput) -> ChatMessage:
    """The assistant's message: its text, its reasoning if it is told apart, and its calls if it made any."""
    items = items_of(parts_of(parser, replace(completion, logprobs=None)))
    content = "".join(item.text for item in items if isinstance(item, TextItem))
    calls: list[ToolCall] = [
        {"id": item.id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
        for item in items
        if isinstance(item, CallItem)
    ]
    message: ChatMessage = {"role": "assistant", "content": content, "refusal": None}
    if completion.reasoning:
        message["reasoning_content"] = completion.reasoning
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    return message


def completion_body(reply: Reply, outputs: Sequence[RequestOutput], now: float) -> Completion:
    """`text_completion` of all prompts of a call, in order: prompt p's completion i is choice p * n + i. Raises
    WireError for an output that did not end well."""
    for output in outputs:
        raise_failure(output.outputs)
    choices = [_completion_choice(reply, output, reply.to_send(one)) for output in outputs for one in output.outputs]
    for index, choice in enumerate(choices):
        choice["index"] = index
    return {
        "id": reply.id,
        "object": "text_completion",
        "created": reply.created,
        "model": reply.model,
        "choices": choices,
        **reply.totals(outputs, now),
    }


def _completion_choice(reply: Reply, output: RequestOutput, completion: CompletionOutput) -> CompletionChoice:
    echoed = EchoedPrompt(reply, output)
    choice: CompletionChoice = {
        "index": 0,
        "text": echoed.text + completion.text,
        "logprobs": echoed.logprobs_with(completion),
        "finish_reason": finish_reason(completion),
        "stop_reason": completion.stop_reason,
    }
    if completion.beam is not None:
        choice["cumulative_logprob"], choice["score"] = completion.beam
    if reply.return_token_ids:
        choice["prompt_token_ids"] = output.prompt_token_ids
        choice["token_ids"] = completion.token_ids
    return choice


class EchoedPrompt:
    """What stands before a completion's own text: nothing, or the prompt if it was to be echoed. `scores` goes on with
    the completion's tokens."""

    def __init__(self, reply: Reply, output: RequestOutput) -> None:
        self.text = prompt_text(reply, output) if reply.echo else ""
        self.scores = CompletionLogprobs(reply.vocabulary, reply.hidden)
        self._ids = output.prompt_token_ids
        self._entries = output.prompt_logprobs if reply.echo else None

    def logprobs_with(self, completion: CompletionOutput) -> TextLogprobs | None:
        """`logprobs` of the prompt and the completion after it; None if none were asked for."""
        prompt: TextLogprobs | None = None
        if self._entries is None:
            self.scores.skip(len(self.text))
        else:
            prompt = self.scores.prompt(self._ids, self._entries, self.text)
        if completion.logprobs is None:
            return prompt
        part = self.scores.part(completion.token_ids, completion.logprobs)
        return part if prompt is None else joined(prompt, part)

    def pieces(self) -> Iterator[tuple[str, TextLogprobs | None]]:
        """The prompt's text and its `logprobs`, in pieces that are made when they are wanted: the text with the first,
        and tokens with each."""
        if self._entries is None:
            self.scores.skip(len(self.text))
            yield self.text, None
            return
        text = self.text
        for part in self.scores.prompt_parts(self._ids, self._entries, text):
            yield text, part
            text = ""


def prompt_text(reply: Reply, output: RequestOutput) -> str:
    """The prompt as it was sent; of a prompt that came as ids, what they spell."""
    if output.prompt is not None:
        return output.prompt
    shown = (token for token in output.prompt_token_ids if token not in reply.hidden)
    return b"".join(map(reply.vocabulary.token_bytes, shown)).decode("utf-8", "replace")


def finish_reason(completion: CompletionOutput | Chunk, called: bool | None = None) -> FinishReason:
    """Why a completion ended that ended well; `called` as AnswerParser says it."""
    reason = completion.finish_reason
    assert reason == "stop" or reason == "length", "only the end of what ended well is told as one"
    return "tool_calls" if called and reason == "stop" else reason


def raise_failure(completions: Sequence[CompletionOutput | Chunk]) -> None:
    """Raise WireError for the first of these that did not end well."""
    for completion in completions:
        if completion.finish_reason == "error":
            message = completion.error or "The completion failed; the server's log says why."
            if completion.error_code == NoTokenLeftError.code:
                raise WireError(400, "invalid_request_error", message, code=completion.error_code)
            raise WireError(500, "server_error", message, code=COMPLETION_FAILED)
        if completion.finish_reason == "abort":
            raise unavailable("The server dropped this request before its end. Send it again.", code="aborted")


def model_list(
    names: Sequence[str], created: int, max_model_len: int, runs: str, adapters: Mapping[str, str] | None = None
) -> ModelList:
    """GET /v1/models; `adapters` are the folders of LoRA adapters of the first model, by name."""
    shared = created, max_model_len, runs
    cards = [model_card(name, *shared, root=root, parent=names[0]) for name, root in (adapters or {}).items()]
    return {"object": "list", "data": [*(model_card(name, *shared) for name in names), *cards]}


def model_card(
    name: str, created: int, max_model_len: int, runs: str, *, root: str = "", parent: str | None = None
) -> ModelCard:
    """GET /v1/models/{id}; `max_model_len` is vLLM's addition, in tokens, as are root and parent of adapters, and
    `runs` ours."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "specserve",
        "root": root or name,
        "parent": parent,
        "max_model_len": max_model_len,
        "runs": runs,
    }
