"""`specserve top` against a server that says what Metrics says: the frame, the key, errors, a server that returns."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port
from rich.console import Console

from specserve.cli import top as cli_top
from specserve.cli.main import run
from specserve.errors import ConfigError
from specserve.server.engine.messages import Gauges
from specserve.server.metrics import Metrics
from specserve.types import Event, SequenceStats

Handler = Callable[[web.Request], web.Response]
Outcome = tuple[int, str, str]
Top = Callable[..., Outcome]
SECONDS = {"draft": 0.5, "forward": 3.0, "sample": 0.25, "host": 0.25}
GAUGES = Gauges(2, 1, 75, 100, 40, 90, 80, 3, 64, 16, 5, SECONDS, {"suffix": 0.25, "ngram": 0.125})


def figures(model: str = "smollm2-135m", adapter: str | None = None) -> dict[str, Any]:
    """GET /stats after two requests, 3700 s after the start, in the second after they ended."""
    now = 1000.0
    metrics = Metrics(model, lambda: now)
    now = 4700.0
    metrics.begin("1", 1, 11, adapter)
    metrics.begin("2", 1, 5)
    drafted = SequenceStats(
        4699.0,
        4699.0,
        4699.25,
        4700.0,
        num_steps=4,
        num_drafts=3,
        num_draft_tokens=10,
        num_accepted_tokens=5,
        drafter="ngram",
        by_source={"ngram": [8, 4], "jump_forward": [2, 1]},
    )
    metrics.notify(Event("1", 0, [1] * 9, finish_reason="length", stats=drafted))
    metrics.notify(Event("2", 0, [1], finish_reason="stop", stats=SequenceStats(4699.0, 4699.0, 4699.5, 4700.0, 1)))
    metrics.refused(429)
    return metrics.stats(GAUGES, 2, "ready")


@contextmanager
def serving(handler: Handler) -> Iterator[str]:
    """A server in a thread of its own; its address."""
    loop, started, address = asyncio.new_event_loop(), threading.Event(), []

    async def answer(request: web.Request) -> web.Response:
        return handler(request)

    async def start() -> TestServer:
        app = web.Application()
        app.router.add_get("/stats", answer)
        server = TestServer(app)
        await server.start_server()
        address.append(str(server.make_url("")).rstrip("/"))
        return server

    def serve() -> None:
        server = loop.run_until_complete(start())
        started.set()
        loop.run_forever()
        loop.run_until_complete(server.close())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert started.wait(30)
        yield address[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@pytest.fixture
def top(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Top:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("SPECSERVE_DEBUG", "SPECSERVE_API_KEY", "SPECSERVE_URL"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> Outcome:
        status = run(("top", *arguments))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def rows(out: str) -> list[list[str]]:
    """The words of each line inside the frame."""
    return [line.strip("│ ").split() for line in out.splitlines() if line.startswith("│")]


def test_replicas_have_a_table(top: Top) -> None:
    replica = {
        "state": "ready", "num_restarts": 3, "num_requests": 1234, "num_running": 5, "num_waiting": 6,
        "kv_cache_usage": 0.25, "num_steps": 9, "prefix_hit_rate": None, "role": "both",
    }  # fmt: skip
    stats = figures()
    with serving(lambda request: web.json_response(stats)) as address:
        assert "replica" not in top(address, "--once")[1]
    stats["replicas"] = [replica, {**replica, "state": "restarting", "prefix_hit_rate": 0.5}]
    with serving(lambda request: web.json_response(stats)) as address:
        status, out, _ = top(address, "--once")
    assert status == 0
    assert ["0", "ready", "5", "6", "25%", "-", "1,234", "3"] in rows(out)
    assert ["1", "restarting", "5", "6", "25%", "50%", "1,234", "3"] in rows(out)
    assert "elsewhere" not in out
    stats["replicas"][1]["role"] = "prefill"
    stats["prefill"]["num_prompts"] = {"here": 30, "elsewhere": 10}
    with serving(lambda request: web.json_response(stats)) as address:
        status, out, _ = top(address, "--once")
    assert ["1", "restarting", "(prefill)", "5", "6", "25%", "50%", "1,234", "3"] in rows(out)
    assert "Computed elsewhere: 10 of 40 prompts, 0 failures." in out


def test_processes_that_answer_have_a_line(top: Top) -> None:
    stats = figures()
    with serving(lambda request: web.json_response(stats)) as address:
        assert "API processes" not in top(address, "--once")[1]
    process = {"state": "ready", "num_restarts": 0, "num_requests": 7}
    stats["api_processes"] = [process, {"state": "restarting", "num_restarts": 2, "num_requests": 0}]
    with serving(lambda request: web.json_response(stats)) as address:
        status, out, _ = top(address, "--once")
    assert status == 0
    assert ["API", "processes:", "answering", "7", "(ready),", "0", "(restarting)", "2", "restarts"] in rows(out)


def test_one_frame(top: Top) -> None:
    with serving(lambda request: web.json_response(figures())) as address:
        status, out, err = top(address, "--once")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert f"smollm2-135m at {address}" in lines[0]
    assert "ready, up 1 h 1 min, 2 restarts" in lines[-1]
    found = [" ".join(row) for row in rows(out)]
    assert found[:2] == [
        "running 2 waiting 1 1.1 tokens/s out 1.8 in 10 out and 16 in so far",
        "ended: stop 1, length 1 refused: 429 1",
    ]
    assert found[2].startswith("KV 25%")
    assert found[2].endswith("25 of 100 blocks 3 preemptions prefix cache hits 25%")
    assert found[4:12] == [
        "latency, ms p50 p90 p99",
        "time to first token 250.0 500.0 500.0",
        "per token after it 93.8 93.8 93.8",
        "end to end 1,000.0 1,000.0 1,000.0",
        "",
        "drafter tokens a step now accepted drafts steps",
        "all 2.00 5.00 50% 3 5",
        "ngram 2.25 50% 3 4",
    ]
    assert found[12:] == [
        "none 1.00 - 0 1",
        "",
        "draft tokens by source drafted accepted share ms a step",
        "jump_forward 2 1 50% -",
        "ngram 8 4 50% 3.125",
        "suffix 0 0 - 6.250",
        "",
        "40 steps 100.00 ms each: draft 12%, forward 75%, sample 6%, host 6% 5 drafts dropped",
    ]


@pytest.mark.parametrize("flags", [("--json",), ("--once", "--json"), ("--json", "o.json")])
def test_the_figures_as_json(top: Top, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]) -> None:
    monkeypatch.chdir(tmp_path)
    with serving(lambda request: web.json_response(figures())) as address:
        status, out, err = top(address, *flags)
    assert (status, err) == (0, "")
    told = Path("o.json").read_text() if "o.json" in flags else out
    assert json.loads(told) == json.loads(json.dumps(figures())) | {"uptime_s": json.loads(told)["uptime_s"]}
    assert out.startswith("╭" if "o.json" in flags else "{")


def test_adapters_that_answered_have_a_table(top: Top) -> None:
    def found(adapter: str | None) -> list[str]:
        with serving(lambda request: web.json_response(figures(adapter=adapter))) as address:
            status, out, err = top(address, "--once")
        assert (status, err) == (0, "")
        return [" ".join(row) for row in rows(out)]

    shown = found("fr\x1b[2J")
    at = shown.index("adapter ended tokens out tokens a step accepted")
    assert shown[at + 1 : at + 3] == ["fr\\x1b[2J 1 9 2.25 50%", ""]
    assert not [row for row in found(None) if row.startswith("adapter")]


def test_a_server_that_has_done_nothing(top: Top) -> None:
    with serving(lambda request: web.json_response(Metrics("m").stats(None, 0, "loading"))) as address:
        status, out, _ = top(address.removeprefix("http://") + "/", "--once")
    assert status == 0
    assert "loading, up 0 s" in out
    assert "ended: none" in out
    assert "time to first token - - -" in [" ".join(row) for row in rows(out)]


def test_markup_and_control_characters_of_a_server_are_text(top: Top) -> None:
    with serving(lambda request: web.json_response(figures("[red]m\x1b[2J\n"))) as address:
        status, out, _ = top(address, "--once")
    assert status == 0
    assert "[red]m\\x1b[2J\\n at" in out


@pytest.mark.parametrize("by_environment", [True, False])
def test_the_key_is_sent(top: Top, monkeypatch: pytest.MonkeyPatch, by_environment: bool) -> None:
    def handler(request: web.Request) -> web.Response:
        good = request.headers.get("Authorization") == "Bearer sesame"
        return web.json_response(figures()) if good else web.json_response({"error": {}}, status=401)

    with serving(handler) as address:
        status, out, err = top(address, "--once")
        assert (status, out) == (2, "")
        assert "wants an API key: give it with --api-key or in SPECSERVE_API_KEY" in err
        if by_environment:
            monkeypatch.setenv("SPECSERVE_API_KEY", "sesame")
        assert top(address, "--once", *([] if by_environment else ["--api-key", "sesame"]))[0] == 0


def test_no_server(top: Top) -> None:
    port = unused_port()
    status, out, err = top(f"http://127.0.0.1:{port}", "--once")
    assert (status, out) == (1, "")
    assert f"No server at http://127.0.0.1:{port}" in err
    assert "Start one with `specserve serve`." in err
    assert len(err.splitlines()) == 1


def test_a_server_that_never_answers(top: Top, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_top, "_TIMEOUT_S", 0.05)
    release = threading.Event()

    def handler(request: web.Request) -> web.Response:
        release.wait(30)
        return web.json_response({})

    with serving(handler) as address:
        status, _, err = top(address, "--once")
        release.set()
    assert status == 1
    assert "does not answer in time" in err


@pytest.mark.parametrize(
    ("response", "status", "words"),
    [
        (lambda: web.Response(status=404), 2, "not what a specserve server"),
        (lambda: web.Response(text="<html>"), 2, "not what a specserve server"),
        (lambda: web.Response(body=b"\xff\xfe\xff"), 2, "not what a specserve server"),
        (lambda: web.json_response([1]), 2, "not what a specserve server"),
        (lambda: web.json_response({"model": "m"}), 2, "not what a specserve server"),
        (lambda: web.json_response(figures() | {"tokens": 5}), 2, "not what a specserve server"),
        (lambda: web.json_response(figures() | {"model": None}), 2, "not what a specserve server"),
        (lambda: web.Response(status=503), 1, "answers with status 503"),
    ],
)
def test_answers_that_are_no_figures(top: Top, response: Callable[[], web.Response], status: int, words: str) -> None:
    with serving(lambda request: response()) as address:
        found, out, err = top(address, "--once")
    assert (found, out) == (status, "")
    assert words in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("url", ["ftp://x", "http://", "unix:///x", "http://[::1"])
def test_no_address(top: Top, url: str) -> None:
    status, _, err = top(url, "--once")
    assert status == 2
    assert "is no address of a server. Write it as http://127.0.0.1:8000" in err


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "x"])
def test_no_interval(top: Top, interval: str) -> None:
    assert top("--interval", interval)[0] == 2


def test_help(top: Top) -> None:
    status, out, _ = top("--help")
    assert status == 0
    for words in ("--interval", "--once", "--api-key", "SPECSERVE_API_KEY", "Watch a running server"):
        assert words in out


def test_the_live_view_outlasts_its_server_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ready, gone, ready again: the last figures stay with the reason under them, then new ones come."""
    monkeypatch.setenv("TERM", "xterm")  # a dumb one shows the last frame alone
    answers = iter([figures("first"), None, figures("second"), figures("third")])
    screen = io.StringIO()

    def handler(request: web.Request) -> web.Response:
        stats = next(answers, "end")
        if stats == "end":
            return web.json_response({"error": {}}, status=401)  # which no wait will change, so it ends the view
        return web.Response(status=503) if stats is None else web.json_response(stats)

    with serving(handler) as address, pytest.raises(ValueError, match="wants an API key"):
        asyncio.run(cli_top._watch(address, None, 0.01, Console(file=screen, width=120, force_terminal=True)))
    shown = screen.getvalue()
    order = [shown.index(word) for word in ("first at", "status 503. Still trying.", "second at", "third at")]
    assert order == sorted(order)
    assert "first at" in shown[: order[1]].rpartition("╭")[2]


def test_q_ends_it_and_leaves_the_terminal_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, (keys, terminal) = [], os.openpty()

    def handler(request: web.Request) -> web.Response:
        asked.append(request)
        if len(asked) == 2:
            os.write(keys, b"xq")
        return web.json_response(figures())

    try:
        before = termios.tcgetattr(terminal)
        with open(terminal, closefd=False) as stdin, serving(handler) as address:
            monkeypatch.setattr(sys, "stdin", stdin)
            screen = Console(file=io.StringIO(), width=120, force_terminal=True)
            asyncio.run(asyncio.wait_for(cli_top._watch(address, None, 0.01, screen), 30))
        assert termios.tcgetattr(terminal) == before
    finally:
        os.close(keys)
        os.close(terminal)


@pytest.mark.parametrize("width", [30, 45, 60])
def test_narrow_terminals_show_all_figures(top: Top, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    with serving(lambda request: web.json_response(figures())) as address:
        wide = top(address, "--once")[1]
        monkeypatch.setenv("COLUMNS", str(width))
        status, narrow, _ = top(address, "--once")
    assert status == 0
    assert max(map(len, narrow.splitlines())) <= width
    inside = [words for row in rows(wide) for words in row if any(letter.isdigit() for letter in words)]
    found = [words for row in rows(narrow) for words in row]
    assert not [words for words in inside if words not in found]


def test_ctrl_c_is_the_end_and_no_error(top: Top, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_top, "_watch", interrupted)
    assert top() == (0, "", "")


def test_frames_are_of_this_version_alone() -> None:
    """Every figure that a frame shows must be there."""
    cli_top.frame("x", figures())
    for name in figures().keys() - {"num_restarts"}:
        with pytest.raises(ConfigError):
            cli_top.frame("x", {key: value for key, value in figures().items() if key != name})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9, "0 s"), (59, "59 s"), (60, "1 min 0 s"), (3_725, "1 h 2 min"), (90_061, "1 d 1 h"), (10**7, "115 d 17 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert cli_top._duration(seconds) == text
