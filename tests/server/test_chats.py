"""Conversations that become tokens in another process: the same tokens as in this one, whatever templates do, and
however processes end."""

from __future__ import annotations

import array
import asyncio
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from specserve.errors import EngineError, InputError, TextError
from specserve.server import chats as module
from specserve.server.chats import QUICK, Chats
from specserve.testing import SPECIAL_TOKENS, write_tiny_model
from specserve.text.chat import ChatTemplate
from specserve.text.tokenizer import ChatPrompt, Tokenizer
from tests.processes import is_alive

TURNS = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}{{ m.more }}<|end|>\n{% endfor %}{{ extra }}"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LOOPS = "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}" + TURNS


def written(folder: Path, template: str = TURNS) -> Path:
    path = write_tiny_model(folder, "llama") / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return folder


def says(content: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **more}]


@asynccontextmanager
async def chats(folder: Path, limit_s: float = 2.0) -> AsyncIterator[Chats]:
    made = Chats(folder, limit_s)
    try:
        yield made
    finally:
        made.close()


def run(folder: Path, test: Callable[[Chats], Awaitable[None]], **options: Any) -> None:
    async def whole() -> None:
        async with chats(folder, **options) as made:
            await test(made)

    asyncio.run(whole())


async def ids(made: Chats, messages: list[dict[str, Any]], size: int = 10, **options: Any) -> ChatPrompt:
    found = await made.render(messages, options, size, None)
    assert found.ids is not None
    return ChatPrompt(found.text, array.array("i", found.ids).tolist(), found.unread)


CHATS = [
    says("hello"),
    says(f"a {SPECIAL_TOKENS[-1]} b <|start|>"),
    says("é가👩‍👩‍👧\x00\u2028", more={"a": [10**20, -1.5, None, True]}),
    says("word " * QUICK),
    [{"role": role, "content": str(i)} for i in range(500) for role in ("user", "assistant")],
]


def test_tokens_are_those_of_this_process(tmp_path: Path) -> None:
    tokenizer = Tokenizer(written(tmp_path))

    async def test(made: Chats) -> None:
        for messages in CHATS:
            for options in ({}, {"extra": {"x": [1, "<|end|>"]}, "add_generation_prompt": False}):
                expected = tokenizer.chat_ids(messages, **options)
                for size in (10, QUICK + 1):  # in either copy
                    assert await ids(made, messages, size, **options) == expected
        found = await asyncio.gather(*(ids(made, says(str(i)), i * 1000) for i in range(100)))
        assert found == [tokenizer.chat_ids(says(str(i))) for i in range(100)], "each has its own answer"

    run(tmp_path, test)


def test_plain_texts_too(tmp_path: Path) -> None:
    tokenizer = Tokenizer(written(tmp_path))

    async def test(made: Chats) -> None:
        for text in ("", "hello", f"é {SPECIAL_TOKENS[0]} \x00", "the cat sat " * QUICK):
            for special in (False, True):
                found = await made.encode(text, special)
                assert found.ids is not None
                assert array.array("i", found.ids).tolist() == tokenizer.encode(text, special)
        with pytest.raises(InputError, match="valid Unicode"):
            await made.encode("\ud800", True)

    run(tmp_path, test)


def test_a_text_that_takes_too_long(tmp_path: Path) -> None:
    async def test(made: Chats) -> None:
        with pytest.raises(TextError, match=r"tokenizer did not end within 0\.1 s"):
            await made.encode("the " * 2**20, True)

    run(written(tmp_path), test, limit_s=0.1 - 1e-5 * 2**22)  # what its length gives it taken away


def test_long_texts_are_told_of(tmp_path: Path) -> None:
    tokenizer = Tokenizer(written(tmp_path))

    async def test(made: Chats) -> None:
        messages = says("hello " * 100)
        text, *_ = tokenizer.chat_ids(messages)
        assert (await made.render(messages, {}, 10, len(text))).text == text
        found = await made.render(messages, {}, 10, len(text) - 1)
        assert (found.num_characters, found.fewest, found.ids) == (len(text), tokenizer.fewest_tokens(text), None)

    run(tmp_path, test)


def test_what_is_wrong_is_said_as_in_this_process(tmp_path: Path) -> None:
    tokenizer = Tokenizer(written(tmp_path))

    async def test(made: Chats) -> None:
        for messages, options in (
            (says("a"), {"continue_final_message": True}),
            (says("a", more="\ud800"), {}),
            ([{"content": "a"}], {}),
        ):
            with pytest.raises(InputError) as here:
                tokenizer.chat_ids(messages, **options)
            with pytest.raises(InputError) as there:
                await made.render(messages, options, 10, None)
            assert (str(there.value), there.value.param) == (str(here.value), here.value.param)

    run(tmp_path, test)


@pytest.mark.parametrize(
    "template",
    [
        LOOP,
        "{{ ('a' * 10**9) * 30 }}",  # which compiling it would do
        "{{ 'a'|center(10**10) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ broken",
        "(" * 10 + "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% set x = namespace(a=messages) %}{% for i in range(99999) %}{% set x.a = [x.a, x.a] %}{% endfor %}{{ x.a }}",
    ],
    ids=["loop", "constant", "filter", "recursion", "syntax", "nested", "growth"],
)
def test_templates_that_do_no_good(tmp_path: Path, template: str) -> None:
    """The first conversation, as the tenth, is told so, and one after another."""

    async def test(made: Chats) -> None:
        await made.prepare()
        for size in (10, QUICK + 1):
            with pytest.raises(TextError, match="chat template"):
                await made.render(says("a"), {}, size, None)

    run(written(tmp_path, template), test, limit_s=0.3)


def test_a_long_one_holds_up_no_quick_one(tmp_path: Path) -> None:
    async def test(made: Chats) -> None:
        await ids(made, says("a"))
        long = asyncio.create_task(ids(made, says("loop"), QUICK + 1))
        for _ in range(20):
            await ids(made, says("a"))
        assert not long.done()
        long.cancel()

    run(written(tmp_path, LOOPS), test, limit_s=60)


def test_who_leaves_is_not_waited_for(tmp_path: Path) -> None:
    """Neither by those who come after, nor where one leaves before his turn."""

    async def test(made: Chats) -> None:
        await made.prepare()
        first = asyncio.create_task(ids(made, says("loop"), QUICK + 1))
        others = [asyncio.create_task(ids(made, says("loop"), QUICK + 1)) for _ in range(3)]
        await asyncio.sleep(0.1)
        for task in (others[1], first, others[0], others[2]):
            task.cancel()
        assert await ids(made, says("a"), QUICK + 1) == await ids(made, says("a"))
        ended = await asyncio.gather(first, *others, return_exceptions=True)
        assert {type(each) for each in ended} == {asyncio.CancelledError}

    run(written(tmp_path, LOOPS), test, limit_s=600)


def process_of(made: Chats) -> int:
    process = made._worker._process
    assert process is not None
    return process.pid


def copies_of(made: Chats) -> list[int]:
    pid = process_of(made)
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8").split()))


def test_a_process_that_is_killed_is_started_again(tmp_path: Path) -> None:
    async def test(made: Chats) -> None:
        expected = await ids(made, says("a"))
        for _ in range(2):
            os.kill(process_of(made), signal.SIGKILL)
            assert await ids(made, says("a")) == expected
            assert await ids(made, says("a"), QUICK + 1) == expected
            for pid in copies_of(made):
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.1)
            assert await ids(made, says("a"), QUICK + 1) == expected

    run(written(tmp_path), test)


def test_nothing_is_left_when_it_ends(tmp_path: Path) -> None:
    pids: list[int] = []

    async def test(made: Chats) -> None:
        await made.prepare()
        pids.extend([process_of(made), *copies_of(made)])
        assert len(pids) == 3

    gc.collect()  # what tests before it left would hide what this one leaves
    before = len(os.listdir("/proc/self/fd"))
    run(written(tmp_path), test)
    assert len(os.listdir("/proc/self/fd")) <= before
    end = time.monotonic() + 30
    while any(map(is_alive, pids)):
        assert time.monotonic() < end, pids
        time.sleep(0.01)


def test_one_that_starts_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it ends, by those who wait for a signal to end the server; and none is started afterwards."""
    sleeper = tmp_path / "python"
    sleeper.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(600)\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    rescued: list[int] = []

    def rescue(pid: int) -> None:
        rescued.append(pid)
        os.kill(pid, signal.SIGKILL)

    async def test() -> None:
        made = Chats(tmp_path)
        asked = [asyncio.create_task(ids(made, says("a"), size)) for size in (10, QUICK + 1)]
        while made._worker._process is None:
            await asyncio.sleep(0.01)
        late = threading.Timer(20, rescue, [process_of(made)])
        late.start()
        made.close()
        late.cancel()
        ended = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(each) for each in ended] == [EngineError] * 2
        assert made._worker._process is None

    asyncio.run(test())
    assert not rescued


def test_one_that_does_not_start_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def test(made: Chats) -> None:
        for _ in range(2):
            with pytest.raises(EngineError, match="did not start"):
                await made.render(says("a"), {}, 10, None)

    run(tmp_path / "nothing", test)
    assert "tokenizer.json is missing" in capfd.readouterr().err


def test_where_reasoning_begins_is_found_out_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process runs no template for it, and one that fails there leaves it unknown."""
    template = TURNS + "<|start|>assistant\n<think>\n"
    expected = Tokenizer(written(tmp_path, template)).reasoning
    assert expected is not None
    assert expected.header is not None
    tokenizer = Tokenizer(tmp_path)
    monkeypatch.setattr(ChatTemplate, "render", None)

    run(tmp_path, lambda made: made.teach(tokenizer))
    assert tokenizer.reasoning == expected

    looping = Tokenizer(written(tmp_path, template + LOOP))
    run(tmp_path, lambda made: made.teach(looping), limit_s=0.1)
    assert looping.reasoning is not None
    assert looping.reasoning.header is None


def test_one_that_stands_still_is_no_fault_of_the_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told as what it is, and where reasoning begins is found out another time."""
    expected = Tokenizer(written(tmp_path, TURNS + "<|start|>assistant\n<think>\n")).reasoning
    tokenizer = Tokenizer(tmp_path)
    monkeypatch.setattr(ChatTemplate, "render", None)

    async def test(made: Chats) -> None:
        await made.prepare()
        for pid in copies_of(made):
            os.kill(pid, signal.SIGSTOP)
        with monkeypatch.context() as soon, pytest.raises(EngineError, match=r"did not end within 0\.2 s by the clock"):
            soon.setattr(module, "_STUCK", 0.1)
            await made.teach(tokenizer)
        assert tokenizer.questions == {}
        await made.teach(tokenizer)
        assert tokenizer.reasoning == expected

    run(tmp_path, test)


def test_nor_is_one_that_was_killed(tmp_path: Path) -> None:
    tokenizer = Tokenizer(written(tmp_path, LOOP))

    async def test(made: Chats) -> None:
        await made._long.connect()
        teaching = asyncio.create_task(made.teach(tokenizer))
        while not teaching.done():
            await asyncio.sleep(0.05)
            for pid in copies_of(made):
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="was killed"):
            await teaching
        assert tokenizer.questions == {}

    run(tmp_path, test, limit_s=600)
