"""The programs of benchmarks/server: they run against a small model, and say so when a promise is broken."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "server"
PROGRAMS = (
    *("aborts", "beside", "kill", "saturated", "streams", "overload", "overhead", "startup"),
    *("fuzz_server", "fuzz_conversations", "layouts", "prefill"),
)
SHARED = ("client", "findings", "prompts", "served", "sdk_turn", "fuzz_requests")
TINY = ("--threads=1", "--max-num-seqs=4", "--kv-cache-gib=0.01", "--max-model-len=256")


@pytest.fixture(scope="module")
def programs() -> Iterator[SimpleNamespace]:
    """All of them as modules: scripts that import each other by the names of their files."""
    sys.path.insert(0, str(FOLDER))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in (*SHARED, *PROGRAMS)})
    sys.path.remove(str(FOLDER))
    for name in (*SHARED, *PROGRAMS):
        del sys.modules[name]


def run(program: str, model: Path, folder: Path, *options: str) -> dict[str, Any]:
    """What a program wrote, after it has ended with 0."""
    told = folder / "told.json"
    command = [sys.executable, str(FOLDER / f"{program}.py"), f"--model={model}", f"--json={told}", *options]
    ended = subprocess.run([*command, "--", *TINY], capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(told.read_text("utf-8"))
    assert found["broken"] == []
    return found["figures"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_says_how_it_is_called(
    programs: SimpleNamespace, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as left:
        getattr(programs, name).main()
    assert left.value.code == 0
    assert f"python benchmarks/server/{name}.py" in capsys.readouterr().out


def test_beside(tiny: Path, tmp_path: Path) -> None:
    options = ("--seconds=0.1", "--rounds=1", "--scale=0.001", "--conversations=3")
    figures = run("beside", tiny, tmp_path, *options)
    names = [name.partition(": answers")[0] for name in figures if name.endswith(": answers")]
    assert len(names) == 7
    for name in names:
        assert figures[f"{name}: answers"] > 0
        assert figures[f"{name}: /health, longest"] > 0
        assert figures[f"{name}: the longest gap grows by, mark"] == 20
    assert set(figures["structured answers: statuses"]) == {"200"}


def test_prefill(tiny: Path, tmp_path: Path) -> None:
    """Between two engines with roles, over TCP."""
    options = ("--way=tcp", "--streams=2", "--max-tokens=40", "--length=150", "--rounds=1")
    figures = run("prefill", tiny, tmp_path, *options)
    assert figures["prompts computed elsewhere"] == figures["prompts"] > 0
    assert figures["KV of a prompt awaited, mean"] > 0
    assert figures["the latter over the former, mark"] == 1.2


def test_layouts(tiny: Path, tmp_path: Path) -> None:
    layouts = ("--layout=", "--layout=--data-parallel-size=2")
    figures = run(
        "layouts", tiny, tmp_path, *layouts, "--streams=3", "--rounds=1", "--turns=1", "--prompt=8", "--max-tokens=4"
    )
    assert figures["no options: throughput over the first layout's"] == 1
    assert figures["--data-parallel-size=2: requests"] > 0


def test_aborts(tiny: Path, tmp_path: Path) -> None:
    figures = run("aborts", tiny, tmp_path, "--requests=40", "--concurrency=16", "--canary-every=20")
    assert figures["requests"] == 40
    assert figures["canaries right"] == 4
    assert figures["blocks not free when idle"] == 0
    assert (
        sum(figures[f"  {moment}"] for moment in ("queued", "prefill", "stream", "last token", "whole", "kept")) == 40
    )


def test_kill(tiny: Path, tmp_path: Path) -> None:
    figures = run("kill", tiny, tmp_path, "--rounds=1", "--streams=6")
    assert (figures["rounds"], figures["clients told"], figures["processes left behind"]) == (1, 6, 0)


def test_fuzz_server(tiny: Path, tmp_path: Path) -> None:
    figures = run("fuzz_server", tiny, tmp_path, "--requests=200", "--canary-every=50", "--seed=1")
    assert (figures["requests"], figures["canaries right"]) == (200, 6)
    assert figures["compared with themselves alone"] > 10
    assert figures["of them wrong in some way"] > 50
    assert figures["  answered 200"] > 50
    assert figures["  answered 400"] > 20


# --- what makes a program fail ----------------------------------------------------------------------------------------


def findings_of(programs: SimpleNamespace, folder: Path) -> Any:
    return programs.findings.Findings("test", argparse.Namespace(json=folder / "told.json", seed=0))


def exit_status(programs: SimpleNamespace, findings: Any, error: BaseException | None = None) -> object:
    async def body() -> None:
        if error is not None:
            raise error

    with pytest.raises(SystemExit) as left:
        programs.findings.finish(findings, body)
    return left.value.code


def test_a_missed_mark_breaks_no_promise(programs: SimpleNamespace, tmp_path: Path) -> None:
    findings = findings_of(programs, tmp_path)
    findings.figure("slow", 2.0, "s", most=1.0)
    findings.require(True, "kept")
    assert exit_status(programs, findings) == 0
    assert json.loads((tmp_path / "told.json").read_text("utf-8"))["figures"]["slow, mark"] == 1.0


def test_a_broken_promise_is_told_and_fails(
    programs: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = findings_of(programs, tmp_path)
    for _ in range(2):
        findings.require(False, "Blocks leaked.")
    assert exit_status(programs, findings) == 1
    assert "BROKEN: Blocks leaked. (2 times)" in capsys.readouterr().out


def test_a_wrong_canary_fails_from_inside_a_group_of_tasks(programs: SimpleNamespace, tmp_path: Path) -> None:
    findings = findings_of(programs, tmp_path)
    wrong = ExceptionGroup("tasks", [ExceptionGroup("inner", [programs.prompts.WrongCanary("other tokens")])])
    assert exit_status(programs, findings, wrong) == 1
    assert json.loads((tmp_path / "told.json").read_text("utf-8"))["broken"] == ["other tokens"]


def test_a_canary_with_other_tokens_is_wrong(programs: SimpleNamespace) -> None:
    answers = [[1, 2], [1, 2], [1, 3]]

    class Fake:
        async def ask(self, path: str, body: dict[str, Any]) -> Any:
            return heard(programs, [*events([answers.pop(0)]), b"data: [DONE]\n\n"])

    canary = programs.prompts.Canary(programs.prompts.Prompts([5, 6, 7], 100, random.Random(0)))

    async def play() -> None:
        await canary.check(Fake())
        await canary.check(Fake())
        with pytest.raises(programs.prompts.WrongCanary, match=r"\[1, 3\] instead of \[1, 2\]"):
            await canary.check(Fake())

    asyncio.run(play())


# --- what a client makes of a response --------------------------------------------------------------------------------


def events(tokens: Sequence[list[int]]) -> list[bytes]:
    choices = [json.dumps({"choices": [{"token_ids": ids}]}, separators=(",", ":")) for ids in tokens]
    return [f"data: {choice}\n\n".encode() for choice in choices]


def heard(programs: SimpleNamespace, pieces: Sequence[bytes]) -> Any:
    """A stream that came in these pieces, a second apart."""
    reading = programs.client.Reading(begun=0.0, status=200)
    for second, piece in enumerate(pieces, 1):
        reading.hear(piece, float(second))
    reading.end()
    return reading


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_stream_is_read_whatever_pieces_it_comes_in(programs: SimpleNamespace, size: int) -> None:
    data = b"".join([b": ping\n\n", *events([[1], [2, 3]]), b"data: [DONE]\n\n"])
    reading = heard(programs, [data[start : start + size] for start in range(0, len(data), size)])
    assert (reading.tokens, reading.num_heard, reading.ended_well, reading.trouble) == ([1, 2, 3], 2, True, None)


def test_times_are_of_events_with_tokens(programs: SimpleNamespace) -> None:
    reading = heard(programs, [b'data: {"choices":[]}\n\n', *events([[1, 2], [3], [4, 5]]), b"data: [DONE]\n\n"])
    assert (reading.first_s, reading.gaps_s, reading.per_token_s) == (2.0, [1.0, 1.0], 2 / 3)


@pytest.mark.parametrize(
    ("end", "trouble"),
    [
        (b"", "without its end mark"),
        (b'data: {"choices": [', "middle of an event"),
        (b"data: nothing\n\n", "no JSON"),
        (b'data: {"error": {"message": "The engine is gone."}}\n\n', "The engine is gone."),
    ],
)
def test_a_stream_that_ends_otherwise_has_not_ended_well(programs: SimpleNamespace, end: bytes, trouble: str) -> None:
    reading = heard(programs, [*events([[1]]), end])
    assert not reading.ended_well
    assert trouble in reading.trouble


@pytest.mark.parametrize(
    ("end", "is_told"),
    [(b'data: {"error": {"message": "Gone."}}\n\n', True), (b"", False), (b'data: {"error": {"mess', False)],
)
def test_only_an_error_in_words_tells_a_client(programs: SimpleNamespace, end: bytes, is_told: bool) -> None:
    caller = programs.kill.Caller(None, [1], 1)
    caller.last = heard(programs, [*events([[1]]), end])
    assert caller.is_told is is_told


def test_sockets_that_nobody_reads_are_counted(programs: SimpleNamespace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as reader:
        port = listener.getsockname()[1]
        sender, _ = listener.accept()
        with sender:
            assert programs.streams.num_unsent(port) == 0
            sender.setblocking(False)
            with pytest.raises(BlockingIOError):
                while True:
                    sender.send(b"x" * 2**16)
            assert programs.streams.num_unsent(port) == 1
            sender.shutdown(socket.SHUT_WR)
            while reader.recv(2**16):
                pass
            end = time.monotonic() + 30
            while programs.streams.num_unsent(port) and time.monotonic() < end:
                time.sleep(0.01)  # until the last bytes were acknowledged
            assert programs.streams.num_unsent(port) == 0


# --- figures ----------------------------------------------------------------------------------------------------------


def test_percentiles(programs: SimpleNamespace) -> None:
    percentile = programs.findings.percentile
    assert (percentile([3, 1, 2], 50), percentile([1, 2], 50), percentile([7], 99)) == (2, 1.5, 7)
    assert percentile(range(101), 99) == 99


def test_memory_is_compared_from_a_fifth_of_the_run_on(programs: SimpleNamespace) -> None:
    """What grows before that is not counted, and one sample that stands out means nothing."""
    sampler = programs.served.Sampler(None, None)
    sizes = [1, 50, 100, 100, 100, 120, 120, 120, 120, 150, 150]
    sampler.samples = [programs.served.Sample(i / 10, {"API": size}) for i, size in enumerate(sizes)]
    assert sampler.growth("API") == pytest.approx(0.5)
    assert sampler.growth("engine") is None


def test_plans_of_a_seed_are_the_same_and_of_all_kinds(programs: SimpleNamespace) -> None:
    sizes = programs.aborts.Sizes(short=96, long=1024, output=32, prefill_s=1.0, whole_s=1.0)
    first, second = (list(programs.aborts.plans(500, sizes, random.Random(3))) for _ in range(2))
    assert first == second
    assert {each.moment for each in first} == {*programs.aborts.MOMENTS, programs.aborts.KEPT}
    assert all((each.seconds is None) == (each.moment in ("stream", "last token", "kept")) for each in first)
    assert all(1 <= each.num_events <= each.max_tokens for each in first if each.num_events is not None)


def test_random_requests_of_a_seed_are_the_same(programs: SimpleNamespace) -> None:
    def made(seed: int) -> list[Any]:
        requests = programs.fuzz_requests.Requests(random.Random(seed), vocab_size=290, most=255)
        return [requests.next() for _ in range(300)]

    first = made(3)
    assert first == made(3)
    assert first != made(4)
    assert 0.3 < sum(request.is_wrong for request in first) / len(first) < 0.7
    assert {"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"} <= {r.path for r in first}


EVENT = b'data: {"choices":[]}\n\n'
FAULT = b'data: {"error":{"message":"Gone.","type":"server_error"}}\n\n'


@pytest.mark.parametrize(
    ("status", "kind", "body", "trouble"),
    [
        (200, "application/json", b'{"choices":[]}', None),
        (400, "application/json", b'{"error":{"message":"No."}}', None),
        (503, "application/json", b'{"error":{"message":"Later."}}', None),
        (500, "application/json", b'{"error":{"message":"Gone."}}', "fault of the server"),
        (200, "application/json", b'{"choices":[', "no JSON"),
        (400, "application/json", b"{}", "says nothing"),
        (404, "text/plain", b"404: Not Found", "as text/plain"),
        (200, "text/event-stream", EVENT + b"data: [DONE]\n\n", None),
        (200, "text/event-stream", b'event: message_stop\ndata: {"type":"message_stop"}\n\n', None),
        (200, "text/event-stream", EVENT, "without its end"),
        (200, "text/event-stream", EVENT + b"data: [DO", "middle of an event"),
        (200, "text/event-stream", EVENT + b"data: {\n\ndata: [DONE]\n\n", "no JSON"),
        (200, "text/event-stream", EVENT + FAULT, "fault of the server"),
    ],
)
def test_responses_that_keep_no_promise_are_told(
    programs: SimpleNamespace, status: int, kind: str, body: bytes, trouble: str | None
) -> None:
    request = programs.fuzz_requests.Request("POST", "/v1/completions")
    told = list(programs.fuzz_server.troubles(request, programs.fuzz_server.Answer(status, kind, body)))
    assert told == [] if trouble is None else any(trouble in each for each in told), told


def test_options_of_the_command_line_go_before_those_of_a_program(programs: SimpleNamespace) -> None:
    merged = programs.served._merged(["--max-queue=4", "--no-admin"], {"max-queue": 32, "admin": True, "port": 1})
    assert merged == ["--max-queue=4", "--no-admin", "--port=1"]
    assert programs.served._merged([], {"prefix-caching": False, "admin": True}) == ["--no-prefix-caching", "--admin"]


# --- conversations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_fuzz_conversations_finds_what_is_lost(programs: Any, api: str) -> None:
    """A text that is neither in the prompt nor named; one that is named by what it stands in is not lost."""
    answers: dict[str, Any] = {
        "chat": {"role": "assistant", "content": "w1000001", "audio": {"id": "w1000002"}},
        "responses": [{"type": "message", "role": "assistant", "id": "w1000002", "content": "w1000001"}],
        "messages": [{"type": "text", "text": "w1000001", "citations": [{"title": "w1000002"}]}],
    }
    fuzz = programs.fuzz_conversations
    body = fuzz.request_of(api, [answers[api]])
    history = "input" if api == "responses" else "messages"
    found = dict(fuzz.words_in(body[history], history))
    assert set(found) == {"w1000001", "w1000002"}
    lost = {"chat": "messages.audio", "responses": "input.id", "messages": "messages.content.citations"}[api]
    assert fuzz.is_named(found["w1000002"], {lost})
    assert not fuzz.is_named(found["w1000002"], {f"{history}.other"})
    chat = fuzz.as_chat(api, body, fuzz.Limits(vocab_size=1000, max_model_len=1000))
    assert "w1000001" in str(chat) and chat["messages"][-1]["role"] == "user"
