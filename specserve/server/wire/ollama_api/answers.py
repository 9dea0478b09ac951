"""Answers as Ollama's clients read them: whole, or as lines of JSON.

Rules: every line has the model, a time and what is new; a call of a tool comes whole, in the line after its end; the
last line has `done` true, no text, the reason and the counts. Times are in nanoseconds. After a line with `error`
nothing comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from specserve.outputs import Chunk, CompletionOutput, RequestOutput
from specserve.server.wire.answer import (
    Call,
    CallItem,
    Part,
    Reasoning,
    ReasoningItem,
    Text,
    TextItem,
    add,
    begun,
    items_of,
    parts_of,
)
from specserve.server.wire.errors import WireError
from specserve.server.wire.json.pieces import json_text
from specserve.server.wire.ollama_api.requests import ollama_error
from specserve.server.wire.openai.logprobs import chat_logprobs
from specserve.server.wire.openai.replies import Reply, finish_reason, raise_failure
from specserve.server.wire.openai.stream import Stream
from specserve.server.wire.openai.usage import metrics
from specserve.server.wire.times import rfc3339
from specserve.server.wire.tools.arguments import object_so_far
from specserve.types import TokenLogprobs

Kind: TypeAlias = Literal["chat", "generate"]
_NS_PER_MS = 1e6


def answer_body(reply: Reply, kind: Kind, output: RequestOutput, now: float) -> dict[str, Any]:
    """The whole answer; `now` is time.perf_counter(). Raises WireError for an output that did not end well."""
    raise_failure(output.outputs)
    (completion,) = output.outputs
    items = items_of(parts_of(reply.answer_parser(), replace(completion, logprobs=None)))
    thinking = "".join(item.text for item in items if isinstance(item, ReasoningItem))
    calls = [item for item in items if isinstance(item, CallItem)]
    said = {
        "content": "".join(item.text for item in items if isinstance(item, TextItem)),
        **({"thinking": thinking} if thinking else {}),
        **({"tool_calls": [_call(item, index) for index, item in enumerate(calls)]} if calls else {}),
    }
    return {**_head(reply, kind, said), **_scores(reply, completion.logprobs), **_end(output, completion, now)}


def empty_body(model: str, kind: Kind) -> dict[str, Any]:
    """The answer where nothing was asked, which has Ollama load a model; this one is loaded."""
    return {
        **_said(kind, {"content": ""}),
        "model": model,
        "created_at": rfc3339(),
        "done": True,
        "done_reason": "load",
    }


class OllamaStream(Stream):
    """The lines of one answer, of one prompt."""

    media = "application/x-ndjson"

    def __init__(self, reply: Reply, kind: Kind, output: RequestOutput) -> None:
        super().__init__(reply, [output])
        self._kind: Kind = kind
        self._output = output
        self._parser = reply.answer_parser()
        self._open: CallItem | None = None  # the call whose arguments are coming
        self._num_calls = 0

    def frame(self, event: str) -> bytes:
        return _on_one_line(event.encode()) + b"\n"

    def ping(self) -> bytes:
        """A line that says nothing new: there are no comments, and an empty line is no JSON."""
        return self.frame(json_text(self._line({})))

    def end(self, now: float) -> list[str]:
        assert self.finished and not self.failed, "end before the end"
        return [json_text({**self._line({}), **_end(self._output, self._output.outputs[0], now)})]

    def fail(self, error: WireError) -> list[str]:
        self.failure = error
        return [json_text(ollama_error(error))]

    def _begin(self, index: int, output: RequestOutput) -> Iterable[str]:
        return ()

    def _chunk_events(self, index: int, chunk: Chunk) -> list[str]:
        said = [new for part in parts_of(self._parser, replace(chunk, logprobs=None)) for new in self._told(part)]
        if chunk.finish_reason is not None:
            said += self._whole_call()
        scores = _scores(self._reply, chunk.logprobs)
        if scores and not said:
            said = [{}]
        return [json_text({**self._line(new), **(scores if i == 0 else {})}) for i, new in enumerate(said)]

    def _told(self, part: Part) -> Iterator[dict[str, Any]]:
        """What a part has the client told: of a call nothing before it is whole."""
        if isinstance(part, Text | Reasoning | Call):
            yield from self._whole_call()
        if isinstance(part, Text):
            yield {"content": part.text}
        elif isinstance(part, Reasoning):
            yield {"thinking": part.text}
        elif isinstance(part, Call):
            item = begun(part, self._num_calls)
            assert isinstance(item, CallItem)
            self._open = item
        else:
            assert self._open is not None, "arguments without a call"
            add(self._open, part)

    def _whole_call(self) -> Iterator[dict[str, Any]]:
        if self._open is not None:
            yield {"tool_calls": [_call(self._open, self._num_calls)]}
            self._num_calls += 1
            self._open = None

    def _line(self, said: dict[str, Any]) -> dict[str, Any]:
        return _head(self._reply, self._kind, {"content": "", **said})


# What ends a line for Python's str.splitlines, and so for clients of httpx, and which JSON need not escape.
_LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\x85\u2028\u2029"}


def _on_one_line(written: bytes) -> bytes:
    for end, escape in _LINE_ENDS.items():
        if end in written:
            written = written.replace(end, escape)
    return written


def _head(reply: Reply, kind: Kind, said: dict[str, Any]) -> dict[str, Any]:
    return {"model": reply.model, "created_at": rfc3339(), **_said(kind, said), "done": False}


def _said(kind: Kind, said: dict[str, Any]) -> dict[str, Any]:
    if kind == "chat":
        return {"message": {"role": "assistant", **said}}
    assert "tool_calls" not in said, "tools are of conversations"
    return {"response": said["content"], **{name: text for name, text in said.items() if name == "thinking"}}


def _call(item: CallItem, index: int) -> dict[str, Any]:
    function = {"index": index, "name": item.name, "arguments": object_so_far(item.arguments)}
    return {"id": item.id, "function": function}


def _scores(reply: Reply, logprobs: Sequence[TokenLogprobs] | None) -> dict[str, Any]:
    return {"logprobs": chat_logprobs(logprobs, reply.vocabulary)["content"]} if logprobs else {}


def _end(output: RequestOutput, completion: CompletionOutput, now: float) -> dict[str, Any]:
    """Why an answer ended, its counts and its times. Time in the queue counts for the whole alone."""
    times = metrics([output], now)
    first, later = times["time_to_first_token_ms"], times["generation_time_ms"]
    return {
        "done": True,
        "done_reason": finish_reason(completion),
        "total_duration": _nanoseconds(first + later),
        "load_duration": 0,
        "prompt_eval_count": len(output.prompt_token_ids),
        "prompt_eval_duration": _nanoseconds(first - times["queue_time_ms"]),
        "eval_count": len(completion.token_ids),
        "eval_duration": max(1, _nanoseconds(later)),  # clients divide by it
        "metrics": times,
    }


def _nanoseconds(milliseconds: float) -> int:
    return max(0, round(_NS_PER_MS * milliseconds))
