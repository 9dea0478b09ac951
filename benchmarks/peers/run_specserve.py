"""specserve as one of the engines compared: in this process, through its SDK, or with the option `http` through its own
server, which with `replicas` has that many engines that share the threads."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from http_server import START_S, HttpServer
from wire import Answer, Engine, Setup, serve

from specserve.config import DEFAULT_NUM_SPECULATIVE_TOKENS, DTYPES
from specserve.llm import LLM
from specserve.registry import AUTO
from specserve.types import SamplingParams
from specserve.version import __version__

HTTP, REPLICAS = "http", "replicas"  # options of a server
NAMES = {"f32": "float32", "bf16": "bfloat16"}


class Drafting:
    """The options: `drafter`, `num_speculative_tokens`; anything else goes to the drafter, numbers as numbers."""

    def __init__(self, setup: Setup) -> None:
        options = {name: value for name, value in setup.options.items() if name not in (HTTP, REPLICAS)}
        self.drafter = options.pop("drafter", AUTO) if setup.speculation else "none"
        self.num_tokens = int(options.pop("num_speculative_tokens", DEFAULT_NUM_SPECULATIVE_TOKENS))
        self.options = {k: _number(v) for k, v in options.items()} if setup.speculation else {}
        self.about: dict[str, Any] = {
            "specserve": __version__,
            "drafter": self.drafter,
            "num_speculative_tokens": self.num_tokens if setup.speculation else 0,
            **self.options,
        }


class InProcess:
    """The SDK."""

    def __init__(self, setup: Setup) -> None:
        self._drafting = drafting = Drafting(setup)
        self._llm = LLM(
            setup.model,
            **_weights(setup.weights),
            threads=setup.threads,
            max_model_len=setup.context,
            max_num_seqs=setup.streams,
            prefix_caching=False,
            drafter=drafting.drafter,  # named at the start: a drafter that is a model has KV to plan
            num_speculative_tokens=drafting.num_tokens,
            drafter_options=drafting.options,
        )
        self.about = self._drafting.about | {"dtype": self._llm.dtype, "device": self._llm.device}
        self.reset()

    def generate(self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool) -> Answer:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)
        begun = time.perf_counter()
        outputs = [output.outputs[0] for output in self._llm.generate(prompts, params)]
        total = time.perf_counter() - begun
        for output in outputs:
            if output.finish_reason == "error":
                raise SystemExit(f"A request failed: {output.error}")
        first = outputs[0].stats.first_token
        assert first is not None, "a finished request has a first token"
        return Answer(
            ids=[output.token_ids for output in outputs],
            total_s=total,
            ttft_s=first - begun if len(prompts) == 1 else None,
        )

    def reset(self) -> None:
        """A new drafter: those that learn across requests begin with nothing."""
        drafting = self._drafting
        self._llm.use_drafter(drafting.drafter, drafting.num_tokens, **drafting.options)
        self._llm.reset_prefix_cache()


class OverHttp:
    """`specserve serve`, as its users start it; the time to the first token is the server's own figure."""

    def __init__(self, setup: Setup) -> None:
        drafting = Drafting(setup)
        replicas = int(setup.options.get(REPLICAS, 1))
        if replicas < 1 or setup.threads % replicas:
            raise SystemExit(f"{replicas} replicas cannot share {setup.threads} threads evenly: change --threads.")
        options = {
            "data-parallel-size": replicas,
            "threads": setup.threads // replicas,
            "max-model-len": setup.context,
            "max-num-seqs": setup.streams,
            "drafter": drafting.drafter,
            "num-speculative-tokens": drafting.num_tokens,
            **{f"drafter-options.{name}": value for name, value in drafting.options.items()},
            **_weights(setup.weights),
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        self._command = [sys.executable, "-m", "specserve", "serve", setup.model, *flags, "--no-prefix-caching"]
        self._pool = ThreadPoolExecutor(setup.streams)
        self._start()
        self.about = drafting.about | {HTTP: True, REPLICAS: replicas}

    def generate(self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool) -> Answer:
        shared = {"max_tokens": max_tokens, "ignore_eos": ignore_eos, "temperature": 0, "return_token_ids": True}
        bodies = [json.dumps({"prompt": ids, **shared}) for ids in prompts]
        begun = time.perf_counter()
        replies = list(self._pool.map(partial(self._server.post, "/v1/completions"), bodies))
        total = time.perf_counter() - begun
        first = replies[0]["metrics"]["time_to_first_token_ms"] / 1e3 if len(prompts) == 1 else None
        return Answer(ids=[reply["choices"][0]["token_ids"] for reply in replies], total_s=total, ttft_s=first)

    def reset(self) -> None:
        """A new server: drafters that learn across requests begin with nothing."""
        self._server.close()
        self._start()

    def _start(self) -> None:
        """Until every engine is there: the first one makes the server healthy, while others still load."""
        self._server = HttpServer(self._command)
        deadline = time.monotonic() + START_S
        while any(each["state"] != "ready" for each in self._server.get("/stats").get("replicas", ())):
            if time.monotonic() > deadline:
                self._server.close()
                raise SystemExit(f"Not all engines were ready within {START_S} s.")
            time.sleep(0.05)


def _weights(name: str) -> dict[str, Any]:
    """A dtype, or else the name of a quantization, which specserve itself checks."""
    dtype = NAMES.get(name, name)
    return {"dtype": dtype} if dtype in DTYPES else {"quantization": name}


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _start(setup: Setup) -> Engine:
    if REPLICAS in setup.options and HTTP not in setup.options:
        raise SystemExit("specserve.replicas is an option of its server: add --set specserve.http.")
    return OverHttp(setup) if HTTP in setup.options else InProcess(setup)


if __name__ == "__main__":
    serve(_start)
