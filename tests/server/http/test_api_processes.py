"""`serve --api-processes 2` as a process: whichever of the two answers, it is the same server; what the death of one
ends and what it leaves; drain and end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from specserve.checkpoint.weights import Weights
from specserve.testing import write_adapter
from tests.processes import num_descriptors, running, stopped

PROCESS = "specserve.server.api_processes.process"
COMPLETION = {"prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
LONG = {**COMPLETION, "max_tokens": 200}
BODIES: list[tuple[str, dict[str, Any]]] = [
    *(
        ("/v1/completions", {**COMPLETION, "prompt": [number, 6, 7, 8] * 6, "max_tokens": 40, **sampling})
        for number in range(5, 8)
        for sampling in ({"temperature": 0}, {"temperature": 1, "seed": number, "logprobs": 2})
    ),
    ("/v1/completions", {"prompt": "the cat sat", "max_tokens": 60, "temperature": 0, "stop": ['"', "e"], "n": 2}),
    ("/v1/completions", {"prompt": "the cat", "max_tokens": 12, "seed": 3, "structured_outputs": {"regex": "[ab]{8}"}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi é 中"}], "max_tokens": 20, "seed": 1}),
    ("/tokenize", {"prompt": "the cat sat on the mat", "return_token_strs": True}),
]


def processes(served: Any, module: str = PROCESS) -> list[int]:
    """Those that the server has started of this module, by their rows."""
    return running(served.process.pid, module)


@contextmanager
def through(served: Any, pid: int) -> Iterator[None]:
    """New connections are this process's."""
    with stopped(*(each for each in processes(served) if each != pid)):
        yield


def rows(served: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = served.get("/stats").json["api_processes"]
    return found


def all_ready(served: Any) -> bool:
    return len(processes(served)) == 2 and [each["state"] for each in rows(served)] == ["ready", "ready"]


def said(served: Any, path: str, body: dict[str, Any]) -> Any:
    """A whole answer, and the same as a stream's texts, without what differs from call to call."""
    reply = served.post(path, body)
    assert reply.status == 200, reply.body
    found = reply.json
    for name in ("id", "created", "metrics", "usage"):
        found.pop(name, None)
    if path == "/tokenize":
        return found
    events = served.post(path, {**body, "stream": True}).events
    assert events[-1] == "[DONE]"
    texts: dict[int, str] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return found, texts


@pytest.fixture(scope="module")
def adapters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    shapes = {name: info.shape for name, info in Weights(tiny).infos.items()}
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / str(i), shapes, rank=4, seed=i, size=0.5) for i in range(2)]


@pytest.fixture(scope="module")
def shared(tiny: Path, adapters: list[Path], tmp_path_factory: pytest.TempPathFactory, serving_process: Any) -> Any:
    options = ["--api-processes=2", "--admin", "--no-adaptive", f"--lora=first={adapters[0]}", "--max-loras=2"]
    named = {"served-model-name": "tiny", "max-queue": 4, "stall-timeout-s": 8}
    with serving_process(tiny, tmp_path_factory.mktemp("served"), *options, **named) as server:
        yield server


@pytest.fixture
def server(shared: Any) -> Iterator[Any]:
    """Afterwards both processes answer, nothing runs, and no request is counted."""
    shared.until(lambda: all_ready(shared), 120)
    before = len(shared.said)
    yield shared
    shared.until(lambda: all_ready(shared), 120)
    shared.until(shared.is_idle)
    assert [each["num_requests"] for each in rows(shared)] == [0, 0]
    assert "Traceback" not in shared.said[before:]


def test_answers_are_those_of_one_process(server: Any, shared_server: Any) -> None:
    for path, body in BODIES:
        expected = said(shared_server, path, body)
        for pid in processes(server):
            with through(server, pid):
                assert said(server, path, body) == expected


def test_what_is_counted_is_counted_once_for_all(server: Any) -> None:
    """Whoever is asked tells of all requests, and of refusals and stop strings that only one process knew of."""
    before = server.get("/stats").json
    for pid in processes(server):
        with through(server, pid):
            assert server.post("/v1/completions", COMPLETION).status == 200
            stopping = {"prompt": [9, 8, 7] * 5, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
            text = server.post("/v1/completions", stopping).json["choices"][0]["text"]
            assert server.post("/v1/completions", {**stopping, "stop": text[3:5]}).status == 200
            assert server.post("/v1/completions", {"prompt": "x", "max_tokens": -1}).status == 400
    for pid in processes(server):
        with through(server, pid):
            after, text = server.get("/stats").json, server.get("/metrics").body.decode()
            ended = {name: after["requests"][name] - before["requests"][name] for name in after["requests"]}
            assert ended == {"stop": 2, "length": 4, "abort": 0, "error": 0}
            assert after["refused"]["400"] - before["refused"].get("400", 0) == 2
            assert (
                f'request_success_total{{finished_reason="stop",model_name="tiny"}} {after["requests"]["stop"]}.0'
                in text
            )
            for row in (1, 2):
                assert f'specserve:api_process_ready{{api_process="{row}",model_name="tiny"}} 1.0\n' in text
            assert server.get("/server_info").json["options"]["api_processes"] == 2
            assert set(server.get("/server_info").json["timeline"]) >= {"load", "total"}


def test_adapters_are_known_to_all_at_once(server: Any, adapters: list[Path]) -> None:
    def answer(pid: int, name: str) -> Any:
        with through(server, pid):
            return server.post("/v1/completions", {**COMPLETION, "model": name})

    first, second = processes(server)
    plain = answer(first, "tiny").json["choices"][0]["token_ids"]
    for one, other in ((first, second), (second, first)):
        assert answer(other, "late").status == 404
        with through(server, one):
            load = {"lora_name": "late", "lora_path": str(adapters[1])}
            assert server.post("/v1/load_lora_adapter", load | {"lora_path": "/nowhere"}).status == 400
        # Both run while it is loaded: the answer comes when both know of it.
        assert server.post("/v1/load_lora_adapter", load).status == 200
        for pid in (other, one):
            found = answer(pid, "late").json["choices"][0]["token_ids"]
            assert found != plain
            with through(server, pid):
                assert [card["id"] for card in server.get("/v1/models").json["data"]] == ["tiny", "first", "late"]
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "late"}).status == 200
        assert {answer(pid, "late").status for pid in (one, other)} == {404}
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "late"}).status == 404
    assert server.post("/reset_prefix_cache", {}).status == 200


def test_the_queue_is_one(server: Any) -> None:
    """Four places and four that wait: of those that fill it none is refused, wherever they come in, and the next is by
    both processes."""
    bodies = [{**COMPLETION, "prompt": [number, 7, 7]} for number in range(8)]
    with stopped(server.engine_pid), ThreadPoolExecutor(8) as pool:
        asking = []
        for number, body in enumerate(bodies):
            asking.append(pool.submit(server.post, "/v1/completions", body))
            server.until(lambda number=number: sum(each["num_requests"] for each in rows(server)) == number + 1)  # type: ignore[misc]
        for pid in processes(server):
            with through(server, pid):
                reply = server.post("/v1/completions", COMPLETION)
                assert (reply.status, reply.error["code"]) == (429, "overloaded")
                assert "8 completions to do and takes 8" in reply.error["message"]
        os.kill(server.engine_pid, signal.SIGCONT)
        assert [each.result(60).status for each in asking] == [200] * 8


def test_one_that_is_killed_ends_its_own_streams_only(server: Any, num_rounds: int) -> None:
    """Round after round: its requests end in the engine at once, and nothing is left behind."""
    count = max(2, num_rounds)  # each of the two
    expected = server.post("/v1/completions", LONG).json["choices"][0]["token_ids"]
    server.until(server.is_idle)
    before, open_before = server.get("/stats").json, num_descriptors(server.process.pid)
    for number in range(count):
        pids = processes(server)
        killed = pids[number % 2]
        streams = []
        with stopped(server.engine_pid):
            for pid in (killed, *(each for each in pids if each != killed)):
                with through(server, pid):
                    streams.append(Streaming(server, LONG))
                    running = len(streams)
                    server.until(lambda running=running: sum(each["num_requests"] for each in rows(server)) == running)  # type: ignore[misc]
            os.kill(killed, signal.SIGKILL)
            assert streams[0].rest() is None, "its connection ends"
            assert server.get("/health").status == 200
        assert streams[1].rest() == expected
        server.until(server.is_idle, 5)
        server.until(lambda: all_ready(server), 120)
    after = server.get("/stats").json
    assert after["requests"]["abort"] - before["requests"]["abort"] == count
    assert sum(each["num_restarts"] for each in after["api_processes"]) == count
    assert after["num_restarts"] == 0, "of the engine"
    assert num_descriptors(server.process.pid) <= open_before + 1
    assert len(processes(server)) == 2
    assert "ended with status -9. Starting another" in server.said


def test_one_that_stands_still_is_replaced(server: Any) -> None:
    """Nobody who comes meanwhile waits for it."""
    pids = processes(server)
    with stopped(server.engine_pid), through(server, pids[0]):
        stream = Streaming(server, LONG)
        server.until(lambda: sum(each["num_requests"] for each in rows(server)) == 1)
    os.kill(pids[0], signal.SIGSTOP)
    for _ in range(20):
        assert server.post("/v1/completions", COMPLETION, timeout=5).status == 200
    server.until(lambda: pids[0] not in processes(server), 30)
    assert stream.rest() is None
    server.until(lambda: all_ready(server), 120)
    assert processes(server) != pids
    assert "stood still for 8 s. Starting another" in server.said


def test_a_coordinator_that_stands_still_is_told_of(server: Any) -> None:
    """By those who answer, whatever they are asked; once it goes on, all do."""
    pids = processes(server)
    with stopped(server.process.pid):
        server.until(lambda: server.get("/live").status == 503, 30)
        for path in ("/live", "/health", "/ready"):
            reply = server.get(path)
            assert (reply.status, reply.json) == (503, {"status": "stalled"})
        reply = server.post("/v1/completions", COMPLETION)
        assert (reply.status, reply.error["code"]) == (503, "stalled")
    server.until(lambda: server.get("/health").status == 200, 10)
    assert server.post("/v1/completions", COMPLETION).status == 200
    assert processes(server) == pids


def test_sigterm_drains_all(tiny: Path, tmp_path: Path, serving_process: Any) -> None:
    """Those of all processes finish, others are told, and no process is left."""
    with serving_process(tiny, tmp_path, "--api-processes=2", **{"drain-timeout-s": 60}) as served:
        served.until(lambda: all_ready(served), 120)
        pids = processes(served)
        with ThreadPoolExecutor(4) as pool:
            with stopped(served.engine_pid):
                streams = []
                for pid in pids:
                    with through(served, pid):
                        streams.append(Streaming(served, LONG))
                        served.until(lambda: sum(each["num_requests"] for each in rows(served)) == len(streams))
                for pid in (*pids, served.process.pid):  # a supervisor of services may tell all of them
                    os.kill(pid, signal.SIGTERM)
                served.until(lambda: served.get("/health").json["status"] == "draining")
                for pid in pids:
                    with through(served, pid):
                        assert served.post("/v1/completions", COMPLETION).error["code"] == "draining"
            found = list(pool.map(Streaming.rest, streams))
        assert found[0] == found[1]
        assert len(found[0] or ()) == 200
        assert served.process.wait(30) == 0
        assert processes(served) == []
    assert "Traceback" not in served.said


def test_files_are_read_once(tiny: Path, tmp_path: Path) -> None:
    """TLS on a Unix socket with a key from a pipe, which can be read by one process alone: one that is started later
    has them, too. When the server itself is killed, nobody goes on."""
    cert, key = certificate(tmp_path)
    path, pipe = tmp_path / "socket", tmp_path / "keys"
    os.mkfifo(pipe)
    options = [
        f"--uds={path}",
        f"--tls-cert={cert}",
        f"--tls-key={key}",
        f"--api-key-file={pipe}",
        "--stall-timeout-s=60",
    ]
    with starting(tiny, tmp_path / "log", *options) as served:
        pipe.write_text("sk-from-a-pipe\n")
        served.until(lambda: "Listening on unix:" in served.said, 120)
        cert.unlink()
        key.unlink()
        first, second = processes(served)
        os.kill(first, signal.SIGKILL)
        served.until(lambda: "Starting another" in served.said, 10)
        served.until(lambda: len(processes(served)) == 2 and " 401 " in over_tls(path, "sk-wrong"), 60)
        (later,) = set(processes(served)) - {first, second}
        for pid in (later, second):  # what comes before it takes connections waits for it
            with through(served, pid):
                assert " 401 " in over_tls(path, "sk-wrong")
                assert " 401 " not in over_tls(path, "sk-from-a-pipe")
        served.process.kill()
        served.process.wait()
        end = time.monotonic() + 10
        while any(Path(f"/proc/{pid}/cmdline").exists() for pid in (later, second)):
            assert time.monotonic() < end
            time.sleep(0.01)


def test_what_no_process_can_serve_ends_the_start(tiny: Path, tmp_path: Path) -> None:
    """The cause is that of one process, and so is the status."""
    broken = shutil.copytree(tiny, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{}")
    said = []
    for number in (1, 2):
        log = tmp_path / f"log{number}"
        with starting(broken, log, "--port=0", num_processes=number) as served:
            assert served.process.wait(120) == 2, served.said
        said.append(served.said.splitlines()[-1])
    assert said[0] == said[1]
    assert "tokenizer.json" in said[0]


# --- clients ----------------------------------------------------------------------------------------------------------


class Streaming:
    """A stream whose request was sent."""

    def __init__(self, served: Any, body: dict[str, Any]) -> None:
        text = json.dumps({**body, "stream": True})
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._socket = served.raw(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode(), timeout=60)

    def rest(self) -> list[int] | None:
        """All of its tokens; None where the connection ended before the stream did."""
        received = bytearray()
        try:
            while b"[DONE]" not in received:
                piece = self._socket.recv(65536)
                if not piece:
                    return None
                received += piece
        except ConnectionError:
            return None
        finally:
            self._socket.close()
        events = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
        return [token for event in events for choice in event["choices"] for token in choice.get("token_ids") or ()]


def certificate(folder: Path) -> Sequence[Path]:
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return cert, key


def over_tls(path: Path, key: str) -> str:
    """The status line of an answer."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    head = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {key}\r\n\r\n"
    with socket.socket(socket.AF_UNIX) as plain:
        plain.settimeout(30)
        plain.connect(str(path))
        with context.wrap_socket(plain) as secure:
            secure.sendall(head.encode())
            return secure.recv(65536).decode().partition("\r\n")[0]


@contextmanager
def starting(model: Path, log: Path, *options: str, num_processes: int = 2) -> Iterator[Served]:
    """A server that has yet to listen."""
    command = [sys.executable, "-m", "specserve", "serve", str(model), "--threads=1", "--kv-cache-gib=0.01"]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, f"--api-processes={num_processes}", *options], stdout=stream, stderr=stream
        )
    try:
        yield Served(process, log)
    finally:
        process.kill()
        process.wait()


class Served:
    """A server that no client of the other tests can ask."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log

    @property
    def said(self) -> str:
        return self._log.read_text()

    def until(self, condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < end, self.said
            time.sleep(0.02)
