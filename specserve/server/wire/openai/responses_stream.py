"""Answers as clients of OpenAI's Responses API read them, whole and as events.

Rules: response.created and in_progress, then each item with added, its content, and done, then the whole response as
completed, incomplete or failed. Events are numbered; nothing comes after the last, not even [DONE].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specserve.outputs import RequestOutput
from specserve.server.wire.answer import (
    AnswerParser,
    Arguments,
    CallItem,
    Item,
    PlainText,
    Reasoning,
    ReasoningItem,
    Text,
    TextItem,
    items_of,
    parts_of,
)
from specserve.server.wire.errors import WireError
from specserve.server.wire.item_stream import ItemStream, is_cut
from specserve.server.wire.json.pieces import AT_ONCE, LongText, json_text
from specserve.server.wire.openai.logprobs import chat_logprobs
from specserve.server.wire.openai.replies import Reply, raise_failure
from specserve.server.wire.openai.responses import ResponsesRequest
from specserve.server.wire.openai.stream import Event
from specserve.server.wire.openai.usage import metrics, usage
from specserve.types import TokenLogprobs


def response_body(
    reply: Reply, request: ResponsesRequest, output: RequestOutput, now: float, parser: AnswerParser | None = None
) -> dict[str, Any]:
    """`response`; `now` is time.perf_counter(), `parser` tells calls from text. Raises WireError for an output that did
    not end well."""
    raise_failure(output.outputs)
    (completion,) = output.outputs
    parser = parser or PlainText()
    items = items_of(parts_of(parser, completion))
    cut = is_cut(completion, parser)
    outputs = [_item(reply, item, cut and item is items[-1]) for item in items]
    return _ended(reply, request, output, outputs, cut, now)


class ResponseStream(ItemStream):
    """The events of one response."""

    def __init__(
        self, reply: Reply, request: ResponsesRequest, output: RequestOutput, parser: AnswerParser | None = None
    ) -> None:
        super().__init__(reply, output, parser)
        self._request = request
        self._ended_items: list[dict[str, Any]] = []  # items that have ended
        self._num_events = 0
        self._num_scores = 0  # log-probabilities so far: events that have all of them are long

    def end(self, now: float) -> list[Event]:
        assert self.finished and not self.failed, "end before the end"
        cut = is_cut(self._output.outputs[0], self._parser)
        response = _ended(self._reply, self._request, self._output, self._ended_items, cut, now)
        return [self._event(f"response.{response['status']}", response=response)]

    def fail(self, error: WireError) -> list[Event]:
        """response.failed, with the items that have ended; response.created before it if nothing was told yet, as
        OpenAI's clients want that first."""
        self.failure = error
        events = [] if self._begun else self._begin(0, self._output)
        failed = {"status": "failed", "error": _error(error), "output": self._ended_items}
        return [*events, self._event("response.failed", response=_response(self._reply, self._request, **failed))]

    def _begin(self, index: int, output: RequestOutput) -> list[Event]:
        response = _response(self._reply, self._request, status="in_progress")
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def _open(self, item: Item) -> list[Event]:
        empty = {"status": "in_progress"} if isinstance(item, CallItem) else {"status": "in_progress", "content": []}
        added = {**_item(self._reply, item, cut=False), **empty}
        events = [self._event("response.output_item.added", output_index=item.index, item=added)]
        if not isinstance(item, CallItem):
            events.append(self._event("response.content_part.added", **self._at(item), part=_part(self._reply, item)))
        return events

    def _grow(self, item: Item, part: Reasoning | Text | Arguments) -> Event:
        if isinstance(part, Text):
            self._num_scores += len(part.scores)
            scores = _scores(self._reply, part.scores)
            return self._event("response.output_text.delta", **self._at(item), delta=part.text, logprobs=scores)
        kind = "reasoning_text" if isinstance(part, Reasoning) else "function_call_arguments"
        return self._event(f"response.{kind}.delta", **self._at(item), delta=part.text)

    def _close(self, item: Item, cut: bool) -> list[Event]:
        whole = _item(self._reply, item, cut)
        self._ended_items.append(whole)
        at = self._at(item)
        if not isinstance(item, CallItem):
            part = _part(self._reply, item)
            content = {name: part[name] for name in ("text", "logprobs") if name in part}
            events = [
                self._event(f"response.{part['type']}.done", **at, **content),
                self._event("response.content_part.done", **at, part=part),
            ]
        else:
            call = {"name": item.name, "arguments": item.arguments}
            events = [self._event("response.function_call_arguments.done", **at, **call)]
        return [*events, self._event("response.output_item.done", output_index=item.index, item=whole)]

    def _at(self, item: Item) -> dict[str, Any]:
        """Where an event belongs."""
        content = {} if isinstance(item, CallItem) else {"content_index": 0}
        return {"item_id": _item_id(self._reply, item), "output_index": item.index, **content}

    def _event(self, kind: str, /, **fields: Any) -> Event:
        number = self._num_events
        self._num_events += 1
        body = {"type": kind, "sequence_number": number, **fields}
        is_long = self._num_scores > AT_ONCE and not kind.endswith(".delta")
        return LongText(body) if is_long else json_text(body)


# --- the response object ----------------------------------------------------------------------------------------------


def _response(reply: Reply, request: ResponsesRequest, **known: Any) -> dict[str, Any]:
    """The whole object with what is known so far."""
    return {
        "id": reply.id,
        "object": "response",
        "created_at": reply.created,
        "status": None,
        "error": None,
        "incomplete_details": None,
        "model": reply.model,
        "output": [],
        "usage": None,
        **request.echo(),
        **known,
    }


def _ended(
    reply: Reply,
    request: ResponsesRequest,
    output: RequestOutput,
    items: Sequence[dict[str, Any]],
    cut: bool,
    now: float,
) -> dict[str, Any]:
    at_limit = output.outputs[0].finish_reason == "length"
    return _response(
        reply,
        request,
        status="incomplete" if cut else "completed",
        incomplete_details={"reason": "max_output_tokens"} if at_limit else None,
        output=list(items),
        usage=_usage(output),
        metrics=metrics([output], now),
    )


_PREFIXES: Mapping[type[Item], str] = {ReasoningItem: "rs", TextItem: "msg", CallItem: "fc"}


def _item_id(reply: Reply, item: Item) -> str:
    """The same in every event and in the body; no two responses share one."""
    return f"{_PREFIXES[type(item)]}_{reply.id.removeprefix('resp_')}_{item.index}"


def _item(reply: Reply, item: Item, cut: bool) -> dict[str, Any]:
    known = {"id": _item_id(reply, item), "status": "incomplete" if cut else "completed"}
    if isinstance(item, TextItem):
        return {"type": "message", **known, "role": "assistant", "content": [_part(reply, item)]}
    if isinstance(item, ReasoningItem):
        return {"type": "reasoning", **known, "summary": [], "content": [_part(reply, item)], "encrypted_content": None}
    return {"type": "function_call", **known, "call_id": item.id, "name": item.name, "arguments": item.arguments}


def _part(reply: Reply, item: TextItem | ReasoningItem) -> dict[str, Any]:
    if isinstance(item, ReasoningItem):
        return {"type": "reasoning_text", "text": item.text}
    scores = _scores(reply, item.scores)
    return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": scores}


def _scores(reply: Reply, entries: Sequence[TokenLogprobs] | None) -> list[Any]:
    """As chat has them."""
    return [] if entries is None else chat_logprobs(entries, reply.vocabulary)["content"]


def _usage(output: RequestOutput) -> dict[str, Any]:
    """OpenAI's counts under their newer names; nothing is counted apart for being put into the cache."""
    counted = usage([output])
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {**counted["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": counted["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": counted["total_tokens"],
    }


def _error(error: WireError) -> dict[str, Any]:
    """A failure inside a response. OpenAI has three codes that fit; `type` and `param` say it more exactly."""
    codes = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
    code = codes.get(error.status, "server_error")
    return {"code": code, "message": error.message, "type": error.kind, "param": error.param}
