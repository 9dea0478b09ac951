"""llama.cpp's server on this machine's loopback; its speculation is one of its n-gram methods. Knows nothing of the
other engines.

Replies are not streamed, so that a token costs no HTTP; the time to the first one is the server's own figure.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from wire import Answer, Setup, serve

SPECULATION = {"spec-type": "ngram-map-k"}
HOST = "127.0.0.1"
START_S = 120


class LlamaCpp:
    """Options are llama-server's own, without the dashes in front: `spec-ngram-map-k-size-n`, `backend-sampling`."""

    def __init__(self, setup: Setup) -> None:
        assert setup.gguf is not None, "the comparison gives every peer that reads GGUF its file"
        flags = _flags(setup)
        folder = Path(setup.home) / "llamacpp"
        self._command = [str(folder / "build" / "bin" / "llama-server"), *_fixed(setup)]
        for name, value in flags.items():
            self._command += [f"--{name}", value] if value else [f"--{name}"]
        self._pool = ThreadPoolExecutor(setup.streams)
        self._server, self._port = _start(self._command)
        self.about: dict[str, Any] = {"llama.cpp": _version(folder), **flags}

    def generate(self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool) -> Answer:
        bodies = [json.dumps(_request(ids, max_tokens, ignore_eos)) for ids in prompts]
        begun = time.perf_counter()
        replies = list(self._pool.map(self._post, bodies))
        total = time.perf_counter() - begun
        first = replies[0]["timings"]["prompt_ms"] / 1e3 if len(prompts) == 1 else None
        return Answer(ids=[reply["tokens"] for reply in replies], total_s=total, ttft_s=first)

    def reset(self) -> None:
        """A new server: some n-gram methods keep what they saw, and nothing else makes them forget."""
        self.close()
        self._server, self._port = _start(self._command)

    def close(self) -> None:
        self._server.terminate()
        self._server.wait()

    def _post(self, body: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection(HOST, self._port)
        connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        if response.status != 200:
            raise SystemExit(f"llama-server answered {response.status}: {text}")
        reply: dict[str, Any] = json.loads(text)
        return reply


def _request(ids: list[int], max_tokens: int, ignore_eos: bool) -> dict[str, Any]:
    return {
        "prompt": ids,
        "n_predict": max_tokens,
        "ignore_eos": ignore_eos,
        "temperature": 0.0,
        "samplers": ["temperature"],  # at 0 the most likely token; the samplers before it would only take time
        "cache_prompt": False,
        "return_tokens": True,
        "stream": False,
    }


def _flags(setup: Setup) -> dict[str, str]:
    """The options, without those of speculation where there is none."""
    if setup.speculation:
        return {**SPECULATION, **setup.options}
    return {name: value for name, value in setup.options.items() if not name.startswith("spec-")}


def _fixed(setup: Setup) -> list[str]:
    """The server shares one context between all slots; prompts are not kept, neither in slots nor in memory."""
    options = {
        "model": setup.gguf,
        "threads": setup.threads,
        "threads-batch": setup.threads,
        "parallel": setup.streams,
        "ctx-size": setup.context * setup.streams,
        "host": HOST,
        "cache-ram": 0,
        "ctx-checkpoints": 0,
    }
    return [part for name, value in options.items() for part in (f"--{name}", str(value))] + [
        "--no-webui",
        "--no-cache-prompt",
    ]


def _start(command: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    """A server that answers, and its port. Raises SystemExit if it ends or does not answer in time."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    server = subprocess.Popen([*command, "--port", str(port)], stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + START_S
    while not _healthy(port):
        if server.poll() is not None or time.monotonic() > deadline:
            server.kill()
            raise SystemExit(f"llama-server did not start: {' '.join(command)}")
        time.sleep(0.05)
    return server, port


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _version(folder: Path) -> str:
    """The package the sources came in; the build itself knows no release."""
    lines = (folder / "sources" / "PKG-INFO").read_text("utf-8").splitlines()
    version = next(line.partition(": ")[2] for line in lines if line.startswith("Version: "))
    return f"in llama-cpp-python {version}"


if __name__ == "__main__":
    serve(LlamaCpp)
