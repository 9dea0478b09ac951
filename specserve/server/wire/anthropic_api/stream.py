"""Answers as Anthropic's clients read them, whole and as events.

Rules: message_start, then each content block with its start, deltas and stop, then message_delta with the reason and
the counts, then message_stop. What was read from the cache is known at the end only, so message_start counts the whole
prompt as input; message_delta has all counts anew, and Anthropic's clients take those. After an error event nothing
comes.
"""

from __future__ import annotations

import hashlib
from typing import Any

from specserve.outputs import CompletionOutput, RequestOutput
from specserve.server.wire.answer import (
    AnswerParser,
    Arguments,
    Item,
    PlainText,
    Reasoning,
    ReasoningItem,
    Text,
    TextItem,
    items_of,
    parts_of,
)
from specserve.server.wire.anthropic_api.requests import anthropic_error
from specserve.server.wire.errors import WireError
from specserve.server.wire.item_stream import ItemStream
from specserve.server.wire.json.pieces import json_text
from specserve.server.wire.openai.replies import Reply, raise_failure
from specserve.server.wire.openai.usage import metrics, usage
from specserve.server.wire.tools.arguments import object_so_far


def count_tokens_body(num_tokens: int) -> dict[str, Any]:
    """The response of /v1/messages/count_tokens."""
    return {"input_tokens": num_tokens}


def message_body(reply: Reply, output: RequestOutput, now: float, parser: AnswerParser | None = None) -> dict[str, Any]:
    """`message`; `now` is time.perf_counter(), `parser` tells calls from text. Raises WireError for an output that did
    not end well."""
    raise_failure(output.outputs)
    (completion,) = output.outputs
    parser = parser or PlainText()
    items = items_of(parts_of(parser, completion))
    return {
        **_message(reply, [_block(item) for item in items]),
        **_reasons(completion, parser),
        "usage": _usage(output),
        "metrics": metrics([output], now),
    }


class MessageStream(ItemStream):
    """The events of one message. An error event's request_id is the message's id."""

    def end(self, now: float) -> list[str]:
        assert self.finished and not self.failed, "end before the end"
        delta = {
            "type": "message_delta",
            "delta": _reasons(self._output.outputs[0], self._parser),
            "usage": _usage(self._output),
            "metrics": metrics([self._output], now),
        }
        return [json_text(delta), json_text({"type": "message_stop"})]

    def fail(self, error: WireError) -> list[str]:
        self.failure = error
        return [json_text(anthropic_error(error, self._reply.id))]

    def ping(self) -> bytes:
        return self.frame(json_text({"type": "ping"}))

    def _begin(self, index: int, output: RequestOutput) -> list[str]:
        unknown = {"stop_reason": None, "stop_sequence": None}
        message = {**_message(self._reply, []), **unknown, "usage": _counts(len(output.prompt_token_ids), 0, 0)}
        return [json_text({"type": "message_start", "message": message})]

    def _open(self, item: Item) -> list[str]:
        return [json_text({"type": "content_block_start", "index": item.index, "content_block": _block(item)})]

    def _grow(self, item: Item, part: Reasoning | Text | Arguments) -> str:
        kind, name = _DELTAS[type(part)]
        return self._delta(item, {"type": kind, name: part.text})

    def _close(self, item: Item, cut: bool) -> list[str]:
        stop = json_text({"type": "content_block_stop", "index": item.index})
        if not isinstance(item, ReasoningItem):
            return [stop]
        return [self._delta(item, {"type": "signature_delta", "signature": _signature(item)}), stop]

    def _delta(self, item: Item, delta: dict[str, str]) -> str:
        return json_text({"type": "content_block_delta", "index": item.index, "delta": delta})


_DELTAS = {
    Reasoning: ("thinking_delta", "thinking"),
    Text: ("text_delta", "text"),
    Arguments: ("input_json_delta", "partial_json"),
}


def _message(reply: Reply, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": reply.id, "type": "message", "role": "assistant", "model": reply.model, "content": content}


def _block(item: Item) -> dict[str, Any]:
    if isinstance(item, TextItem):
        return {"type": "text", "text": item.text}
    if isinstance(item, ReasoningItem):
        return {"type": "thinking", "thinking": item.text, "signature": _signature(item)}
    return {"type": "tool_use", "id": item.id, "name": item.name, "input": object_so_far(item.arguments)}


def _signature(item: ReasoningItem) -> str:
    """Clients send a thinking block back only where it has one. Nothing is made of it here; it is the text's digest."""
    return hashlib.sha256(item.text.encode()).hexdigest() if item.pieces else ""


def _reasons(completion: CompletionOutput, parser: AnswerParser) -> dict[str, Any]:
    """Why the message, all of which the parser has seen, ended. A token that ends it is Anthropic's end of turn; only
    texts are stop sequences. tool_use is told of a call alone that can be made."""
    if completion.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(completion.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    return {"stop_reason": "tool_use" if parser.called else "end_turn", "stop_sequence": None}


def _usage(output: RequestOutput) -> dict[str, Any]:
    counted = usage([output])
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    thought = counted["completion_tokens_details"]["reasoning_tokens"]
    return _counts(counted["prompt_tokens"] - cached, cached, counted["completion_tokens"], thought)


def _counts(num_read: int, num_cached: int, num_output: int, num_thought: int = 0) -> dict[str, Any]:
    """Anthropic's clients add the three input counts up; nothing is counted apart for being put into the cache."""
    return {
        "input_tokens": num_read,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
        "output_tokens_details": {"thinking_tokens": num_thought},
    }
