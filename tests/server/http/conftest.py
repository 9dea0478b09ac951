"""What a server must be after a hostile case: the oracle that wraps every one of them, and the servers they go to.

A case gets a client that keeps all it hears. While it runs, four streams of known greedy requests run beside it.
Afterwards: their tokens and log-probabilities are those of each alone, bit for bit; a canary gets the tokens that the
SDK gives; the engine is the same process; nothing runs or waits and every block of the cache is free; both processes
hold the descriptors they held before and about the memory; and nothing that was heard has a traceback, a path of this
machine or an API key in it.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from specserve.testing import tiny_tokenizer, write_tiny_model

API_MIB, ENGINE_MIB = 48, 48  # what a case may leave behind in memory: allocators keep what they got
BROKEN_TOKEN = 200  # what reads it overflows: a prompt that holds it cannot be computed
WIDER = 16  # rows of the LM head beyond the tokenizer's ids
UNFORESEEN = "Error handling request"  # aiohttp's words for an exception that nobody caught
ROOM = {"max-num-seqs": 16, "max-model-len": 512, "stall-timeout-s": 1000}
KEYS = ("sk-first-tenant-key", "sk-second-tenant-key")

CANARY = {"prompt": [5, 6, 7, 8], "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
_LONG = {"max_tokens": 400, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "logprobs": 1}
BACKGROUND: list[dict[str, Any]] = [
    {**_LONG, "prompt": "the cat sat on the mat"},
    {**_LONG, "prompt": [9, 8, 7] * 12, "speculative": {"drafter": "ngram"}},
    {**_LONG, "prompt": "and then", "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {**_LONG, "prompt": list(range(30, 70)), "logit_bias": {"40": 1.5, "41": -3}},
]
_SECRETS = re.compile(rb"Traceback|File \"|root:x:|\.py\b")


# --- a client that keeps what it hears --------------------------------------------------------------------------------


class Talk:
    """A raw connection of a case."""

    def __init__(self, connection: socket.socket, heard: list[bytes]) -> None:
        self.socket = connection
        self._heard = heard

    def send(self, data: bytes) -> bool:
        """Whether the other side still took it."""
        try:
            self.socket.sendall(data)
        except OSError:
            return False
        return True

    def rest(self) -> bytes:
        """Everything until the other side closes; what it sent before a reset counts."""
        received = bytearray()
        try:
            while piece := self.socket.recv(65536):
                received += piece
        except ConnectionResetError:
            pass
        finally:
            self.socket.close()
        self._heard.append(bytes(received))
        return bytes(received)

    def until(self, text: bytes) -> bytes:
        """What comes up to this text and a bit more; fails at the end of the connection."""
        received = bytearray()
        while text not in received:
            piece = self.socket.recv(65536)
            assert piece, f"closed before {text!r}; heard {bytes(received[-500:])!r}"
            received += piece
        self._heard.append(bytes(received))
        return bytes(received)

    def close(self) -> None:
        self.socket.close()

    def reset(self) -> None:
        """Close without a goodbye."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


class Case:
    """A server as one hostile case sees it. `api_mib` is what the API process may have grown by afterwards."""

    def __init__(self, served: Any) -> None:
        self.served = served
        self.api_mib = API_MIB
        self.heard: list[bytes] = []
        self._talks: list[Talk] = []

    def ask(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        reply = self.served.ask(method, path, body, **options)
        self.heard += [reply.body, repr(dict(reply.headers)).encode()]
        return reply

    def post(self, path: str, body: Any, **options: Any) -> Any:
        return self.ask("POST", path, body, **options)

    def get(self, path: str, **options: Any) -> Any:
        return self.ask("GET", path, **options)

    def complete(self, **fields: Any) -> Any:
        """POST /v1/completions; a prompt, greedy and short unless the fields say otherwise."""
        return self.post("/v1/completions", {"prompt": "x", "max_tokens": 4, "temperature": 0, **fields})

    def chat(self, content: Any = "x", **fields: Any) -> Any:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0, **fields}
        return self.post("/v1/chat/completions", body)

    def raw(self, data: bytes = b"", timeout: float = 280) -> Talk:
        talk = Talk(self.served.raw(data, timeout), self.heard)
        self._talks.append(talk)
        return talk

    def stream(self, **fields: Any) -> Talk:
        """A stream of completions that nobody has read from yet."""
        body = {"prompt": "x", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True, **fields}
        return self.raw(self.request(body))

    def request(self, body: Any, path: str = "/v1/completions", headers: str = "") -> bytes:
        """The bytes of a POST; the connection ends with the answer."""
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        key = f"Authorization: Bearer {self.served.key}\r\n" if self.served.key else ""
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        return f"{head}{key}{headers}Content-Length: {len(text)}\r\n\r\n".encode() + text

    def stats(self) -> Any:
        return self.served.get("/stats").json

    def start_workers(self) -> None:
        """After some were killed: those that are there before a case are there after it."""
        start_workers(self.served)

    def end(self) -> None:
        for talk in self._talks:
            talk.close()


# --- the streams beside it --------------------------------------------------------------------------------------------


def tokens_of(event: Any) -> list[tuple[int, float]]:
    """Token ids and log-probabilities of an event of a stream of completions."""
    found = []
    for choice in event["choices"]:
        if choice.get("token_ids"):
            found += list(zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True))
    return found


class Beside(threading.Thread):
    """Streams one request again and again and compares as it comes."""

    def __init__(self, served: Any, body: dict[str, Any], expected: list[tuple[int, float]], may_fail: bool) -> None:
        super().__init__(daemon=True)
        self.failure: str | None = None
        self.num_tokens = 0
        self._served, self._body, self._expected, self._may_fail = served, body, expected, may_fail
        self._ending = threading.Event()
        self._connection: HTTPConnection | None = None
        self.start()

    def wait_for(self, num_tokens: int) -> None:
        """Until so many tokens have come in all."""
        while self.num_tokens < num_tokens and self.is_alive():
            time.sleep(0.002)

    def end(self) -> None:
        self._ending.set()
        if self._connection is not None and self._connection.sock is not None:
            try:
                self._connection.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self.join(60)

    def run(self) -> None:
        while not self._ending.is_set() and self.failure is None:
            try:
                self._once()
            except (OSError, HTTPException, ValueError, AttributeError) as error:
                if not self._ending.is_set() and not self._may_fail:
                    self.failure = f"a stream beside it broke: {error!r}"
                self._ending.wait(0.02)

    def _once(self) -> None:
        self._connection = connection = HTTPConnection("127.0.0.1", self._served.port, timeout=280)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._served.key}"}
        try:
            connection.request("POST", "/v1/completions", json.dumps({**self._body, "stream": True}), headers)
            response = connection.getresponse()
            if response.status in (429, 503):
                self._ending.wait(0.02)  # told to come again, which is no harm
                return
            self._follow(response)
        finally:
            connection.close()

    def _follow(self, response: Any) -> None:
        at = 0
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                if not self._may_fail:
                    self.failure = f"a stream beside it was told {event}"
                return
            tokens = tokens_of(event)
            if tokens != self._expected[at : at + len(tokens)]:
                self.failure = f"a stream beside it got {tokens}, not {self._expected[at : at + len(tokens)]}"
                return
            at += len(tokens)
            self.num_tokens += len(tokens)
        if at != len(self._expected) and not self._ending.is_set() and not self._may_fail:
            self.failure = f"a stream beside it ended after {at} tokens"


# --- before and after -------------------------------------------------------------------------------------------------


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def memory_mib(pid: int, field: str = "VmRSS") -> float:
    """A process's memory now, or with VmHWM at most since `forget_peak`."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text("utf-8"))
    assert found is not None
    return int(found[1]) / 1024


def start_workers(served: Any) -> None:
    """Keep it busy with constraints until it has all the workers that it may have: their pipes are no leak."""
    for i in range(50):
        texts = [f"{letter}{i}{j}" for letter in "ab" for j in range(2000)]
        bodies = [{"prompt": "x", "max_tokens": 1, "guided_choice": texts[half::2]} for half in range(2)]
        threads = [threading.Thread(target=served.post, args=("/v1/completions", body)) for body in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(served.trial_workers) == 2:
            return
    raise AssertionError(f"{served.trial_workers} are not two workers")


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5", "utf-8")


def forbidden() -> re.Pattern[bytes]:
    """What no response may hold."""
    here = Path(__file__).resolve().parents[3]
    folders = {str(here), sys.prefix, sysconfig.get_path("purelib"), f"{Path.home()}/", f"{tempfile.gettempdir()}/"}
    words = [re.escape(word.encode()) for word in (*folders, *KEYS)]
    return re.compile(b"|".join([_SECRETS.pattern, *words]))


@contextmanager
def surviving(served: Any, known: dict[str, Any], may_fail: bool = False) -> Iterator[Case]:
    """One hostile case, and everything that must be so after it. With `may_fail` the streams beside it may be told of
    an error, and begin again."""
    api, engine, already_said = served.process.pid, served.engine_pid, len(served.said)
    served.until(served.is_idle)
    before = {pid: (descriptors(pid), memory_mib(pid)) for pid in (api, engine)}
    beside = [
        Beside(served, body, expected, may_fail) for body, expected in zip(BACKGROUND, known["beside"], strict=True)
    ]
    case = Case(served)
    try:
        for stream in beside:
            stream.wait_for(1)
        yield case
        for stream in beside:
            stream.wait_for(stream.num_tokens + 1)
    finally:
        case.end()
        for stream in beside:
            stream.end()
    assert [stream.failure for stream in beside if stream.failure] == []
    canary = served.post("/v1/completions", CANARY)
    assert canary.json["choices"][0]["token_ids"] == known["canary"]
    assert served.engine_pid == engine, served.said
    served.until(served.is_idle)
    for pid, bound in ((api, case.api_mib), (engine, ENGINE_MIB)):
        served.until(lambda pid=pid: descriptors(pid) <= before[pid][0])
        assert memory_mib(pid) <= before[pid][1] + bound
    assert UNFORESEEN not in served.said[already_said:], served.said
    secrets = [found for text in case.heard if (found := forbidden().search(text))]
    assert secrets == [], secrets[0].string


@pytest.fixture(scope="session")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose LM head is wider than its tokenizer, with one token that breaks whatever reads it."""
    width = tiny_tokenizer().get_vocab_size() + WIDER
    folder = write_tiny_model(tmp_path_factory.mktemp("padded"), "llama", vocab_size=width)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][[BROKEN_TOKEN, *range(width - WIDER, width)]] = 0
    _plant_overflow(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _plant_overflow(weights: dict[str, Any]) -> None:
    """All weights are finite, and what reads BROKEN_TOKEN is not: the first number of every other token is 0, and where
    it is not the first layer makes it so large that it overflows in any dtype."""
    weights["model.embed_tokens.weight"][:, 0] = 0
    weights["model.embed_tokens.weight"][BROKEN_TOKEN, 0] = 1
    weights["model.layers.0.input_layernorm.weight"][0] = 3e38


@pytest.fixture(scope="session")
def canary_tokens(padded: Path) -> list[int]:
    """What the SDK gives, in this process."""
    from specserve.llm import LLM
    from specserve.types import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=CANARY["max_tokens"], ignore_eos=True)
    with LLM(str(padded), threads=1, max_num_seqs=1, kv_cache_gib=0.01, max_model_len=512) as llm:
        return llm.generate([CANARY["prompt"]], params)[0].outputs[0].token_ids


def known_of(served: Any, canary: list[int]) -> dict[str, Any]:
    """What a server's canary and the streams say when each is alone."""
    beside = []
    for body in BACKGROUND:
        events = served.post("/v1/completions", {**body, "stream": True}).events
        beside.append([pair for event in events[:-1] for pair in tokens_of(event)])
        assert len(beside[-1]) == body["max_tokens"]
    return {"canary": canary, "beside": beside}


@pytest.fixture(scope="session")
def hostile_server(padded: Path, serving_process: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server with room for the streams and a case beside them, that makes every draft that is asked for."""
    folder = tmp_path_factory.mktemp("hostile")
    with serving_process(padded, folder, "--served-model-name=tiny", "--admin", "--no-adaptive", **ROOM) as served:
        start_workers(served)
        yield served


@pytest.fixture(scope="session")
def strict_server(padded: Path, serving_process: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server with keys, small limits and no patience."""
    limits = {"max-num-seqs": 8, "max-queue": 4, "max-body-mib": 1}
    patience = {"header-timeout-s": 1, "body-timeout-s": 1, "write-timeout-s": 1}
    options = [f"--api-key={key}" for key in KEYS]
    folder = tmp_path_factory.mktemp("strict")
    name = "--served-model-name=tiny"
    with serving_process(padded, folder, name, *options, key=KEYS[0], **{**ROOM, **limits, **patience}) as served:
        yield served


@pytest.fixture(scope="session")
def known(hostile_server: Any, canary_tokens: list[int]) -> dict[str, Any]:
    return known_of(hostile_server, canary_tokens)


Guard = Callable[..., AbstractContextManager[Case]]


@pytest.fixture(scope="session")
def guard(known: dict[str, Any]) -> Guard:
    """The oracle for any server of the padded model."""

    def guarded(served: Any, may_fail: bool = False) -> AbstractContextManager[Case]:
        return surviving(served, known, may_fail)

    return guarded


@pytest.fixture
def case(hostile_server: Any, guard: Guard) -> Iterator[Case]:
    with guard(hostile_server) as case:
        yield case


@pytest.fixture
def strict(strict_server: Any, guard: Guard) -> Iterator[Case]:
    with guard(strict_server) as case:
        yield case


@pytest.fixture(scope="session")
def vocabulary() -> int:
    """Ids of the padded model's tokenizer."""
    return tiny_tokenizer().get_vocab_size()


@pytest.fixture(scope="session")
def memory() -> Any:
    """How cases look at the memory of processes."""
    return SimpleNamespace(memory_mib=memory_mib, forget_peak=forget_peak, descriptors=descriptors)


@pytest.fixture(scope="session")
def broken_token() -> int:
    return BROKEN_TOKEN
