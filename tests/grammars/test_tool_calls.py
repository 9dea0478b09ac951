"""Calls that a grammar lets through are found by the reader of answers: every way of writing them, by chance."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from specserve.grammars.llguidance import LlguidanceBackend
from specserve.server.tool_use import ToolUse, constraint, reader
from specserve.server.wire.answer import CallItem, TextItem, items_of
from specserve.structured.spec import Structured
from specserve.structured.vocabulary import vocabulary
from specserve.testing import tiny_tokenizer, write_tiny_model
from specserve.text.tokenizer import Tokenizer
from specserve.text.tools import call_format

PET = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "old": {"type": "boolean"}, "legs": {"type": "integer"}},
    "required": ["kind", "old"],
    "additionalProperties": False,
}
PET["properties"]["legs"].update(minimum=0, maximum=9)  # type: ignore[index]
TOOLS = [
    {"type": "function", "function": {"name": "feed", "parameters": PET, "strict": True}},
    {"type": "function", "function": {"name": "now", "strict": True}},
]
SOURCES = {
    "hermes": "<tool_call>",
    "tags": "<tool_call><function=",
    "named": "[TOOL_CALLS][ARGS]",
    "list": "[TOOL_CALLS]",
    "llama": '<|start_header_id|>"parameters":',
}
MOST = 3000  # tokens of a walk


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")
    return vocabulary(Tokenizer(folder), tiny_tokenizer().get_vocab_size())


def walked(backend: LlguidanceBackend, asked: Structured, words: Any, seed: int) -> str | None:
    """A text of which every token was drawn from what may come, the end as soon as it may; None if it has none."""
    noise, state = np.random.default_rng(seed), backend.compile(asked).start()
    row, text = np.zeros(words.num_words, np.int32), b""
    for _ in range(MOST):
        state.fill(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        assert len(allowed), "a dead end"
        if set(words.eos_ids) & set(allowed.tolist()) and noise.random() < 0.7:
            return text.decode()
        token = int(noise.choice([token for token in allowed.tolist() if token not in words.eos_ids] or allowed))
        if token in words.eos_ids:
            return text.decode()
        assert state.advance(token)
        text += words.tokens[token]
    return None


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("must_call", [True, "feed"], ids=["required", "named"])
def test_what_must_be_called_is_found(words: Any, source: str, must_call: Any) -> None:
    backend, written = LlguidanceBackend(words), call_format(None, source, ())
    assert written is not None
    use = ToolUse(TOOLS, must_call)
    asked = constraint(use, written, None)
    assert asked is not None
    several = 0
    for seed in range(25):
        text = walked(backend, asked, words, seed)
        assert text is not None
        parser = reader(use, written, "")()
        items = items_of(parser.push(text) + parser.finish())
        calls = [item for item in items if isinstance(item, CallItem)]
        assert calls and calls == items, text
        assert {call.name for call in calls} <= ({"feed"} if must_call == "feed" else {"feed", "now"})
        several += len(calls) > 1
        for call in calls:
            schema = PET if call.name == "feed" else {"maxProperties": 0}
            assert jsonschema_rs.is_valid(schema, json.loads(call.arguments)), text
    assert bool(several) == (must_call is True and written.style.separator is not None)  # type: ignore[union-attr]


@pytest.mark.parametrize("source", [SOURCES["hermes"], SOURCES["list"]], ids=["hermes", "list"])
def test_an_answer_that_is_json_or_calls(words: Any, source: str) -> None:
    backend, written = LlguidanceBackend(words), call_format(None, source, ())
    assert written is not None
    use = ToolUse(TOOLS)
    for asked in (Structured.json({"const": {"a": 1}}), Structured.regex("[xy]{3}"), Structured.choice(["p", "q\n"])):
        made = constraint(use, written, asked)
        assert made is not None
        kinds = set()
        for seed in range(25):
            text = walked(backend, made, words, seed)
            assert text is not None
            parser = reader(use, written, "")()
            items = items_of(parser.push(text) + parser.finish())
            kinds.add(type(items[0]))
            if isinstance(items[0], TextItem):
                assert len(items) == 1
                assert text in ('{"a": 1}', "p", "q\n") or set(text) <= {"x", "y"}
        assert kinds == {TextItem, CallItem}


def test_lark_and_calls_do_not_go_together() -> None:
    written = call_format(None, SOURCES["hermes"], ())
    assert written is not None
    with pytest.raises(ValueError, match="beside a lark they cannot be called"):
        constraint(ToolUse(TOOLS), written, Structured.grammar('start: "a"'))


def test_free_text_needs_no_grammar() -> None:
    written = call_format(None, SOURCES["hermes"], ())
    assert written is not None
    assert constraint(ToolUse([{"function": {"name": "f"}}]), written, None) is None
