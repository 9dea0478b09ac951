"""What no request may do to others, at default time-outs: servers with a vocabulary of 150,000 and a context of 32,768,
and the oracle of time and memory around every case.

While a case runs, watcher.py streams two known greedy requests and polls /health in a process of its own. Afterwards:
the largest gap of the streams, the longest hold of the event loop and the peak memory of both processes are within what
the case may take; the streams' tokens are those of all cases before, and a canary's those of an idle server; the engine
is the same process, nothing runs or waits, every block is free, no descriptor is left open.

Limits are of processor time as much as of time (see watcher.py), so that a machine that others use as well is no
finding, and a multiple of what the rule allows: that is 10 ms, and what broke it took seconds.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest

from specserve.testing import tiny_tokenizer, write_tiny_model

VOCABULARY = 150_000
CONTEXT = 32_768
SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SHAPE = {**SIZE, "num_key_value_heads": 1, "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
# Every draft is made that is asked for; the KV cache holds three contexts. Time-outs are left.
DEFAULTS = {"adaptive": "false", "max-model-len": CONTEXT, "max-num-seqs": 16, "kv-cache-gib": 0.012}
CALLS = "{% if tools %}<tool_call><function={{ tools[0]['function']['name'] }}>{% endif %}"  # the template of Qwen
PIECES = ("<tool_call>\n<function=f>\n<parameter=", "a" * 64)  # tokens that hostile answers are made of

HELD_S = 0.5  # a gap of the streams, in time and processor time; the rule allows 10 ms beyond the model's own step
LOOP_S = 0.25  # an answer of /health, likewise
LATE_S = 20.0  # either, by the wall clock alone: an engine that waits and does nothing
GROWTH_MIB = 192  # of either process at its peak, beyond what a case says it needs
SAMPLE_S = 5.0  # of steps whose processor time is taken
IDLE_S = 20.0  # until all that a case began has ended

_STREAM = {"max_tokens": 30_000, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True}
STREAMS = [
    {**_STREAM, "prompt": "the cat sat on the mat"},
    {**_STREAM, "prompt": [9, 8, 7] * 12, "speculative": {"drafter": "ngram"}},
]
CANARY = {"prompt": [5, 6, 7, 8], "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one case may take: seconds a stream's gap and a hold of the event loop, MiB at the peak of a process."""

    gap_s: float = HELD_S
    loop_s: float = LOOP_S
    api_mib: float = GROWTH_MIB
    engine_mib: float = GROWTH_MIB
    late_s: float = LATE_S
    api_s: float = math.inf  # processor time of the API process in all


@dataclass
class Case:
    """A server as one case sees it. `figures` are what was measured of it, once it is over."""

    served: Any
    figures: dict[str, float] = field(default_factory=dict)

    def complete(self, timeout: float = 60, **fields: Any) -> Any:
        """POST /v1/completions; a prompt, greedy and short unless the fields say otherwise."""
        body = {"prompt": "x", "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
        return self.served.post("/v1/completions", body, timeout=timeout)

    def chat(self, timeout: float = 60, **fields: Any) -> Any:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "temperature": 0, **fields}
        return self.served.post("/v1/chat/completions", body, timeout=timeout)

    def at_once(self, bodies: Sequence[Any], path: str = "/v1/completions", timeout: float = 60) -> list[Any]:
        """All of them at the same time, and their replies. Bytes are sent as they are."""
        headers = {"Content-Type": "application/json"}

        def post(body: Any) -> Any:
            return self.served.post(path, body, headers=headers, timeout=timeout)

        with ThreadPoolExecutor(len(bodies)) as threads:
            return list(threads.map(post, bodies))

    @staticmethod
    def written(body: Any) -> bytes:
        """JSON, made before anybody waits for it."""
        return json.dumps(body).encode()

    def drop(self, body: Any, seconds: float, path: str = "/v1/completions") -> None:
        """Send a request and leave after so long."""
        text = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(text)}\r\n\r\n"
        connection = self.served.raw(head.encode() + text)
        time.sleep(seconds)
        connection.close()

    def stats(self) -> Any:
        return self.served.get("/stats").json

    def step_s(self, **fields: Any) -> float:
        """Processor time of the engine for a step that generates for this completion, from its first tokens to its end
        or for SAMPLE_S of them."""
        body = {"prompt": "x", "temperature": 0, "ignore_eos": True, **fields, "stream": True}
        connection = HTTPConnection("127.0.0.1", self.served.port, timeout=60)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200, response.read()[:300]
            response.readline()
            begun, before = time.monotonic(), self._work()
            while response.readline() and time.monotonic() - begun < SAMPLE_S:
                pass
            after = self._work()
        finally:
            connection.close()
        return (after[1] - before[1]) / (after[0] - before[0])

    def _work(self) -> tuple[int, float]:
        """Steps of the engine so far, and its processor time."""
        return self.stats()["steps"]["num_steps"], processor_s(self.served.engine_pid)


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Watcher:
    """watcher.py, running."""

    def __init__(self, served: Any) -> None:
        orders = {"port": served.port, "api": served.process.pid, "engine": served.engine_pid, "streams": STREAMS}
        command = [sys.executable, "-I", str(Path(__file__).with_name("watcher.py"))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._say(json.dumps(orders))
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        assert said == "watching\n", said

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def end(self) -> dict[str, Any]:
        told, _ = self._process.communicate("end\n", timeout=60)
        found: dict[str, Any] = json.loads(told)
        return found


class Measurement:
    """What a server's processes did and held from here until `end`."""

    def __init__(self, served: Any, memory: Any) -> None:
        self._memory = memory
        self.processes = {"api": served.process.pid, "engine": served.engine_pid}
        self.descriptors = {name: memory.descriptors(pid) for name, pid in self.processes.items()}
        self._mib = {name: memory.memory_mib(pid) for name, pid in self.processes.items()}
        for pid in self.processes.values():
            memory.forget_peak(pid)
        self._watcher = Watcher(served)
        self._api_s = processor_s(self.processes["api"])
        self.runs: list[list[dict[str, Any]]] = []  # of each stream its responses

    def end(self, figures: dict[str, float]) -> str:
        """Fills a case's figures, and says them."""
        figures["api_s"] = processor_s(self.processes["api"]) - self._api_s
        told = self._watcher.end()
        self.runs = told["runs"]
        figures |= {
            "gap_s": max(gaps["held_s"] for gaps in told["gaps"]),
            "loop_s": told["loop"]["held_s"],
            "late_s": max(delays["longest_s"] for delays in (*told["gaps"], told["loop"])),
        }
        for name, pid in self.processes.items():
            peak = self._memory.memory_mib(pid, "VmHWM") if Path(f"/proc/{pid}/clear_refs").exists() else math.inf
            figures[f"{name}_mib"] = peak - self._mib[name]
        said = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        print("measured:", said)
        return f"Measured: {said}"


class Oracle:
    """Of one model. Remembers what streams and canary say, so that every case is compared with all before it."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._known: list[list[int]] = [[] for _ in STREAMS]
        self._canary: list[int] | None = None

    @contextmanager
    def around(self, served: Any, bounds: Bounds, num_pipes: int = 0) -> Iterator[Case]:
        """One case on an idle server, and everything that must be so after it. `num_pipes`: descriptors that the server
        may open for processes of its own."""
        self._check_canary(served)
        measurement, case = Measurement(served, self._memory), Case(served)
        try:
            yield case
        except BaseException as error:
            error.add_note(f"The case did not end by itself. {measurement.end(case.figures)}")
            raise
        said = measurement.end(case.figures)
        assert served.engine_pid == measurement.processes["engine"], f"The engine was started again. {said}"
        over = {name: most for name, most in asdict(bounds).items() if case.figures[name] > most}
        assert not over, f"More than may be, {over}. {said}"
        self._check_streams(measurement.runs, said)
        served.until(served.is_idle, IDLE_S)
        for name, pid in measurement.processes.items():
            most = measurement.descriptors[name] + num_pipes
            served.until(lambda pid=pid, most=most: self._memory.descriptors(pid) <= most)
        self._check_canary(served)

    def _check_streams(self, runs: list[list[dict[str, Any]]], said: str) -> None:
        for place, responses in enumerate(runs):
            for response in responses:
                assert (response["status"], response["errors"]) == ("200", []), f"A stream beside it failed. {said}"
                known, tokens = self._known[place], response["tokens"]
                both = min(len(known), len(tokens))
                assert known[:both] == tokens[:both], f"A stream beside it got other tokens than before. {said}"
                self._known[place] = max(known, tokens, key=len)

    def _check_canary(self, served: Any) -> None:
        tokens = served.post("/v1/completions", CANARY).json["choices"][0]["token_ids"]
        self._canary = self._canary or tokens
        assert tokens == self._canary


# --- servers ----------------------------------------------------------------------------------------------------------


def write_large_model(folder: Path) -> Path:
    """A model whose LM head costs what a large one's does, and whose layers cost nothing. Its tokenizer knows every id:
    behind the small one's tokens, which is all that texts are cut into, PIECES and words."""
    write_tiny_model(folder, "llama", **SHAPE)
    tokenizer = json.loads(tiny_tokenizer().to_str())
    vocabulary = tokenizer["model"]["vocab"]
    first = 1 + max([*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])])
    letters = "etaoinshrdlu"
    words = ("Ġ" + "".join(word) for word in itertools.product(letters, repeat=5))
    pieces = [piece.replace("\n", "Ċ").replace(" ", "Ġ") for piece in PIECES]
    vocabulary |= dict(
        zip([*pieces, *itertools.islice(words, VOCABULARY - first - len(pieces))], itertools.count(first))
    )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    config["chat_template"] += CALLS
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return folder


class Servers:
    """One server for each set of options; one that a case has broken is started anew for the next."""

    def __init__(self, stack: ExitStack, serving: Any, model: Path, folder: Path) -> None:
        self._stack, self._serving, self._model, self._folder = stack, serving, model, folder
        self._running: dict[str, Any] = {}

    def get(self, model: Path | None = None, **options: Any) -> Any:
        """The server of a model, the large one or another, with these options."""
        model = model or self._model
        name = json.dumps([str(model), options])
        served = self._running.get(name)
        if served is None or not _comes_to_rest(served):
            if served is not None:
                served.process.kill()
            folder = self._folder / str(len(list(self._folder.iterdir())))
            folder.mkdir()
            started = self._serving(model, folder, "--served-model-name=tiny", **{**DEFAULTS, **options})
            self._running[name] = served = self._stack.enter_context(started)
            served.model = model
        return served


def _comes_to_rest(served: Any) -> bool:
    try:
        served.until(lambda: served.get("/health", timeout=1).status == 200 and served.is_idle(), 5)
    except (AssertionError, OSError, HTTPException, pytest.fail.Exception):
        return False
    return True


@pytest.fixture(scope="session")
def servers(serving_process: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    model = write_large_model(tmp_path_factory.mktemp("large-model"))
    with ExitStack() as stack:
        yield Servers(stack, serving_process, model, tmp_path_factory.mktemp("large-servers"))


@pytest.fixture
def large(servers: Servers) -> Any:
    """The server of the large model, at rest."""
    return servers.get()


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the large one's context and a small vocabulary, for what costs the engine nothing."""
    shape = {name: value for name, value in SHAPE.items() if name != "vocab_size"}
    return write_tiny_model(tmp_path_factory.mktemp("narrow-model"), "llama", **shape)


Bounded = Callable[..., AbstractContextManager[Case]]


@pytest.fixture(scope="session")
def bounded(memory: Any) -> Bounded:
    """`bounded(served, gap_s=1.0)`: the oracle around a case that may take more than others of something."""
    oracles: dict[Path, Oracle] = {}

    def around(served: Any, num_pipes: int = 0, **bounds: float) -> AbstractContextManager[Case]:
        oracle = oracles.setdefault(served.model, Oracle(memory))
        return oracle.around(served, Bounds(**bounds), num_pipes)

    return around
