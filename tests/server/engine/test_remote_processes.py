"""`specserve engine` and `specserve serve --engine` as processes: over TLS, killed, stopped, and told to end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from specserve.cli.main import run
from specserve.llm import LLM
from specserve.testing import write_tiny_model
from specserve.types import SamplingParams

OPTIONS = {"threads": 1, "max-num-seqs": 4, "kv-cache-gib": 0.01, "max-model-len": 2048}
HEARTBEAT_S = 1.0


class Process:
    """One that says where it listens. Its log is a file."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "log"
        with self._log.open("ab") as stream:
            command = [sys.executable, "-m", "specserve", *arguments]
            self.process = subprocess.Popen(command, stdout=stream, stderr=stream)
        listening = re.compile(r"Listening on (?:https?://)?127\.0\.0\.1:(\d+)")
        self.until(lambda: listening.search(self.said))
        found = listening.search(self.said)
        assert found is not None
        self.port = int(found[1])

    @property
    def said(self) -> str:
        return self._log.read_text("utf-8", "replace")

    def until(self, condition: Callable[[], object], seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"it has ended:\n{self.said}"
            assert time.monotonic() < end, f"not within {seconds} s:\n{self.said}"
            time.sleep(0.01)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)

    def get(self, path: str) -> tuple[int, Any]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        with closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def complete(self, prompt: list[int], **fields: Any) -> Any:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        with closing(connection):
            body = json.dumps({"prompt": prompt, "temperature": 0, **fields}).encode()
            connection.request("POST", "/v1/completions", body)
            return json.loads(connection.getresponse().read())

    def states(self) -> list[str]:
        return [each["state"] for each in self.get("/stats")[1]["replicas"]]


class Stream(threading.Thread):
    """A long answer that is read as it comes: `error` and `seconds`, when it came after `clock`."""

    def __init__(self, server: Process) -> None:
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self.error = ""
        self.ended = 0.0
        self._connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = {"prompt": [5, 6, 7], "max_tokens": 2000, "temperature": 0, "stream": True, "ignore_eos": True}
        self._connection.request("POST", "/v1/completions", json.dumps(body).encode())
        self.start()

    def run(self) -> None:
        with closing(self._connection), self._connection.getresponse() as response:
            for line in response:
                if b'"error"' in line:
                    self.error = line.decode()
                    break
                self.begun.set()
            self.ended = time.monotonic()


@contextmanager
def ending(processes: list[Process]) -> Iterator[None]:
    try:
        yield
    finally:
        for each in processes:
            if each.process.poll() is None:
                os.kill(each.process.pid, signal.SIGCONT)
                each.process.kill()
            each.process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A secret, an authority and the certificates of engines and server that it signed."""
    made = tmp_path_factory.mktemp("files")
    (made / "secret").write_text("0123456789abcdef0123456789abcdef\n", "utf-8")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    names = ("-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=CA:FALSE")
    for name, more in (("ca", ()), ("engine", names), ("server", names)):
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key") if more else ()
        out = ("-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
        subprocess.run(
            ["openssl", "req", "-x509", *key, *out, *more, *signed], cwd=made, check=True, capture_output=True
        )
    return made


def test_two_engines_over_tls_one_killed_one_stopped_and_all_told_to_end(
    folder: Path, files: Path, tmp_path: Path
) -> None:
    """With certificates on both sides. Text is that of an engine in this process; clients of a lost engine are told
    within a second, or a heartbeat; the other serves on; an engine at the same address is one of them again."""
    tiny = [f"--{name}={value}" for name, value in OPTIONS.items()]
    tls = [f"--tls-cert={files / 'engine.pem'}", f"--tls-key={files / 'engine.key'}", f"--tls-ca={files / 'ca.pem'}"]
    secret = f"--secret-file={files / 'secret'}"

    def engine(number: int, port: int = 0) -> Process:
        return Process(tmp_path / str(number), "engine", str(folder), f"--listen=127.0.0.1:{port}", secret, *tls, *tiny)

    engines = [engine(0), engine(1)]
    with ending(engines):
        own = [f"--engine-cert={files / 'server.pem'}", f"--engine-key={files / 'server.key'}"]
        named = [f"--engine=127.0.0.1:{each.port}" for each in engines]
        given = [f"--engine-secret-file={files / 'secret'}", f"--engine-ca={files / 'ca.pem'}", *own]
        beat = f"--engine-heartbeat-s={HEARTBEAT_S}"
        server = Process(tmp_path / "server", "serve", str(folder), "--port=0", *named, *given, beat)
        engines.append(server)
        server.until(lambda: server.get("/health")[0] == 200)
        server.until(lambda: server.states() == ["ready", "ready"])

        with LLM(str(folder), threads=1, kv_cache_gib=0.01, drafter="none") as llm:
            params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
            texts = [out.outputs[0].text for out in llm.generate([[n, 9, n, 9] for n in range(8)], params)]
        told = [server.complete([n, 9, n, 9], max_tokens=32, ignore_eos=True) for n in range(8)]
        assert [each["choices"][0]["text"] for each in told] == texts
        assert all(0 <= each["metrics"]["time_to_first_token_ms"] < 10_000 for each in told)

        for number, within_s, lose in ((0, 1.0, signal.SIGKILL), (1, HEARTBEAT_S + 1.0, signal.SIGSTOP)):
            streams = [Stream(server) for _ in range(4)]
            for each in streams:
                assert each.begun.wait(30)
            begun = time.monotonic()
            engines[number].process.send_signal(lose)
            for each in streams:
                each.join(60)
            lost = [each for each in streams if each.error]
            assert lost and all(each.ended - begun < within_s for each in lost)
            assert all(f"engine {number} is lost" in each.error for each in lost)
            if lose == signal.SIGKILL:
                assert len(lost) < len(streams), "those of the other went on"
                assert server.get("/health")[0] == 200
                assert server.complete([3, 9, 3, 9], max_tokens=32, ignore_eos=True)["choices"][0]["text"] == texts[3]
                engines[0].process.wait()
                engines[0] = engine(0, engines[0].port)
                server.until(lambda: server.states() == ["ready", "ready"])
            else:
                engines[1].process.send_signal(signal.SIGCONT)
                server.until(lambda: server.states() == ["ready", "ready"])
                assert "has gone: Nothing was heard" in engines[1].said or "has gone" in engines[1].said
        told = [server.complete([n, 9, n, 9], max_tokens=32, ignore_eos=True) for n in range(8)]
        assert [each["choices"][0]["text"] for each in told] == texts

        assert engines[0].end() == 0
        server.until(lambda: server.states()[0] != "ready")
        assert server.complete([3, 9, 3, 9], max_tokens=32, ignore_eos=True)["choices"][0]["text"] == texts[3]
        assert server.end() == 0
        engines[1].until(lambda: engines[1].said.count("has gone") >= 2)
        assert engines[1].end() == 0
        for each in engines:
            assert "Traceback" not in each.said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param("engine {}", "--secret-file is missing", id="no-secret"),
        pytest.param("engine {} --secret-file s --listen 0.0.0.0:0", "not a loopback address", id="no-tls"),
        pytest.param("engine {} --secret-file s --listen here", "--listen is 'here'; it must be", id="listen"),
        pytest.param("engine {} --tls-cert x --insecure-no-tls", "contradict each other", id="tls-or-not"),
        pytest.param("engine {} --tls-cert x --secret-file {}/config.json", "belong together", id="half-tls"),
        pytest.param("serve {} --engine 127.0.0.1:1", "--engine-secret-file is missing", id="serve-no-secret"),
        pytest.param("serve {} --engine 10.0.0.1:1", "10.0.0.1:1 is not a loopback address", id="serve-no-tls"),
        pytest.param("serve {} --engine 127.0.0.1", "--engine is '127.0.0.1'; it must be HOST:PORT", id="no-port"),
        pytest.param("serve {} --engine [::1]:5 --engine [::1]:5", "an engine serves once", id="twice"),
        pytest.param("serve {} --engine 127.0.0.1:1 --max-num-seqs 2", "--max-num-seqs: with --engine", id="theirs"),
        pytest.param("serve {} --engine 127.0.0.1:1 --data-parallel-size 2", "the ones or the others", id="both"),
        pytest.param("serve {} --engine 127.0.0.1:1 --engine-heartbeat-s 0", "engine_heartbeat_s is 0", id="heartbeat"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_obeyed(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: str, words: str
) -> None:
    status = run([word.format(folder) for word in arguments.split()])
    assert (status, words in capsys.readouterr().err) == (2, True), words


def test_a_file_names_engines_and_has_options_for_engines_here(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of the file and of the environment are left out with --engine; a table [engine] is that command's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECSERVE_MAX_NUM_SEQS", "3")
    text = 'drafter = "ngram"\n[engine]\nlisten = "0.0.0.0:1"\n[serve]\nengine = ["127.0.0.1:1"]\n'
    (tmp_path / "specserve.toml").write_text(text, "utf-8")
    assert run(["serve", str(folder)]) == 2
    assert "--engine-secret-file is missing" in capsys.readouterr().err
    assert run(["serve", str(folder), "--drafter", "ngram"]) == 2
    assert "--drafter: with --engine" in capsys.readouterr().err
    assert run(["engine", str(folder)]) == 2
    assert "0.0.0.0:1 is not a loopback address" in capsys.readouterr().err
