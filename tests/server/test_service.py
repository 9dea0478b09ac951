"""What routes ask of the service about chats and tools, without an engine."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specserve.engine.request import Request
from specserve.errors import EngineError, InputError
from specserve.server.answers import Prepared
from specserve.server.chats import Chats
from specserve.server.engine.keeper import State
from specserve.server.grammar_validator import GrammarValidator
from specserve.server.metrics import Metrics
from specserve.server.prompts import num_characters
from specserve.server.service import Service
from specserve.server.tool_use import ToolUse
from specserve.server.wire.answer import Arguments, Call, Text
from specserve.testing import write_tiny_model
from specserve.text.tokenizer import Tokenizer
from specserve.types import Event, SamplingParams, SequenceStats

TOOLS = [{"type": "function", "function": {"name": "now"}}]
TURN = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}<|start|>assistant\n"


def service(folder: Path, template: str, **stated: Any) -> Service:
    """One whose model has this chat template, and these entries in tokenizer_config.json."""
    path = write_tiny_model(folder, "llama") / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template, **stated}))
    supervisor: Any = SimpleNamespace(state=State.READY, ready=SimpleNamespace(max_model_len=256))
    return Service(supervisor, Tokenizer(folder), Metrics("tiny"), GrammarValidator(folder), Chats(folder), 2**20)


def prepared(prompt: str = "") -> Prepared:
    return Prepared(Request(id="0", prompt_ids=[1], params=SamplingParams(max_tokens=5)), prompt)


class Port:
    """An engine that keeps whom to tell of what."""

    def __init__(self) -> None:
        self.listeners: dict[str, Any] = {}
        self.aborted: list[tuple[str, int | None]] = []

    def submit(self, request: Request, listener: Any) -> None:
        self.listeners[request.id] = listener

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.aborted.append((request_id, index))


def test_what_the_engine_is_done_with_is_told_once(tmp_path: Path) -> None:
    """Each completion, however it ends: by itself, by a stop string that is found here, or with the whole request."""
    made = service(tmp_path, TURN)
    port = Port()
    made.supervisor.place = lambda request: port  # type: ignore[method-assign, assignment, return-value]
    params = SamplingParams(max_tokens=5, n=3, stop=("a",))
    ended: list[None] = []

    async def run() -> None:
        requests = [Prepared(Request(id=name, prompt_ids=[1], params=params)) for name in "ab"]
        with made.start(requests, lambda: ended.append(None)) as answers:
            port.listeners["a"](Event("a", 0, [], finish_reason="length", stats=SequenceStats()))
            assert len(ended) == 1, "nobody has taken it"
            (letter,) = made.tokenizer.encode("a", False)
            port.listeners["a"](Event("a", 1, [letter], stats=SequenceStats()))
            await anext(aiter(answers))
            assert (len(ended), port.aborted) == (2, [("a", 1)])
            port.listeners["a"](Event("a", 1, [], finish_reason="stop", stats=SequenceStats()))
            assert len(ended) == 2
            for name in "ab":
                port.listeners[name](EngineError("The engine is gone."))
        assert len(ended) == 6

    asyncio.run(run())
    made.close()


def test_calls_are_found_after_the_prompt_as_it_is(tmp_path: Path) -> None:
    made = service(tmp_path, TURN + "{% if tools %}<tool_call>{% endif %}<think>\n")
    answer = 'so <tool_call>{"name": "now"}</tool_call>'

    async def run() -> None:
        chat = await made.prompts.chat_ids([{"role": "user", "content": "<|end|>"}], tools=None)
        prompt = chat.text
        assert chat == made.tokenizer.chat_ids([{"role": "user", "content": "<|end|>"}])
        asked, parser = await made.with_tools(prepared(prompt), ToolUse(TOOLS))
        assert asked == prepared(prompt)
        assert parser is not None
        first = parser()
        assert first.push(answer) + first.finish() == [Text(answer)], "the prompt has begun the reasoning"
        second = parser()
        parts = second.push(f"</think>{answer}") + second.finish()
        assert [type(part) for part in parts] == [Text, Call, Arguments]
        assert await made.with_tools(prepared(), ToolUse([])) == (prepared(), None)

    asyncio.run(run())
    made.close()


def test_special_tokens_that_delimit_calls_stay_in_the_text(tmp_path: Path) -> None:
    end = "<|end|>"
    fields = {"tool_calls": {"open": end, "content": "json"}, "content": {"content": "text"}}
    made = service(tmp_path, "{{ tools }}", response_template={"start_anchor": "a", "fields": fields})
    asked, parser = asyncio.run(made.with_tools(prepared(), ToolUse(TOOLS)))
    assert asked.request.params == SamplingParams(max_tokens=5, skip_special_tokens=False)
    assert parser is not None
    made.close()


def test_a_model_whose_calls_nobody_knows_takes_no_tools(tmp_path: Path) -> None:
    made = service(tmp_path, "{{ tools }}")
    with pytest.raises(InputError, match=r'chat template is of no known family.*tool_choice "none"') as caught:
        asyncio.run(made.with_tools(prepared(), ToolUse(TOOLS)))
    assert caught.value.param == "tools"
    made.close()


def test_large_bodies_are_read_in_turn_and_for_half_of_the_time(tmp_path: Path) -> None:
    made = service(tmp_path, TURN)
    spans: list[tuple[float, float]] = []

    def work(seconds: float) -> float:
        begun = time.perf_counter()
        time.sleep(seconds)
        spans.append((begun, time.perf_counter()))
        return seconds

    async def many() -> list[float]:
        return await asyncio.gather(*(made.threads.in_turn(work, seconds) for seconds in (0.02, 0.01, 0.015)))

    try:
        assert asyncio.run(many()) == [0.02, 0.01, 0.015]
    finally:
        made.close()
    for (begun, ended), (following, _) in itertools.pairwise(spans):
        assert following - ended >= 0.9 * (ended - begun), "clocks are not exact"


def test_a_failure_ends_its_turn(tmp_path: Path) -> None:
    made = service(tmp_path, TURN)

    async def two() -> list[object]:
        return await asyncio.gather(
            made.threads.in_turn(int, "x"), made.threads.in_turn(int, "7"), return_exceptions=True
        )

    try:
        failure, number = asyncio.run(two())
    finally:
        made.close()
    assert isinstance(failure, ValueError)
    assert number == 7


def test_characters_are_counted_in_all_texts() -> None:
    conversation = [{"role": "user", "content": ["ab", {"c": "def", "d": 1}]}] * 3
    entries, characters = 1 + 3 * (1 + 2 + 2 + 2), 1 + 3 * (1 + 4 + 1 + 2 + 1 + 3 + 1)
    assert num_characters(conversation, 10**9) == num_characters(conversation, 10**9, entries) == characters
    assert num_characters(conversation, 10**9, entries - 1) is None
    assert 10 < num_characters(conversation, 10) < characters
