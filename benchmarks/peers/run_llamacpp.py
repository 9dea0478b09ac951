"""llama.cpp's server; its speculation is one of its n-gram methods. The time to the first token is the server's own
figure."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from http_server import HttpServer
from wire import Answer, Setup, serve

SPECULATION = {"spec-type": "ngram-map-k"}


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
        self._server = HttpServer(self._command)
        self.about: dict[str, Any] = {"llama.cpp": _version(folder), **flags}

    def generate(self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool) -> Answer:
        bodies = [json.dumps(_request(ids, max_tokens, ignore_eos)) for ids in prompts]
        begun = time.perf_counter()
        replies = list(self._pool.map(partial(self._server.post, "/completion"), bodies))
        total = time.perf_counter() - begun
        first = replies[0]["timings"]["prompt_ms"] / 1e3 if len(prompts) == 1 else None
        return Answer(ids=[reply["tokens"] for reply in replies], total_s=total, ttft_s=first)

    def reset(self) -> None:
        """A new server: some n-gram methods keep what they saw, and nothing else makes them forget."""
        self._server.close()
        self._server = HttpServer(self._command)


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
        "cache-ram": 0,
        "ctx-checkpoints": 0,
    }
    return [part for name, value in options.items() for part in (f"--{name}", str(value))] + [
        "--no-webui",
        "--no-cache-prompt",
    ]


def _version(folder: Path) -> str:
    """The package the sources came in; the build itself knows no release."""
    lines = (folder / "sources" / "PKG-INFO").read_text("utf-8").splitlines()
    version = next(line.partition(": ")[2] for line in lines if line.startswith("Version: "))
    return f"in llama-cpp-python {version}"


if __name__ == "__main__":
    serve(LlamaCpp)
