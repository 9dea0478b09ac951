"""A model whose processes are on several hosts (here one): they join over TCP, have the same bits as processes that
share memory, and whoever is lost, wrong or hostile is told, and keeps nobody waiting."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specserve import EngineConfig, SamplingParams
from specserve.cache.storage import KVStorage
from specserve.checkpoint.weights import Weights
from specserve.errors import CapacityError, ConfigError, EngineError
from specserve.models.loader import native_spec
from specserve.parallel import hosts, joined
from specserve.parallel.address import Address
from specserve.parallel.handshake import PREAMBLE, LinkError, engine_handshake, server_handshake
from specserve.parallel.hosts import Gate, SealedConnection, join, shake
from specserve.parallel.joined import JoinedRank
from specserve.parallel.messages import AddWeights, Begin, Command, DropAdapter, Weights as Sent
from specserve.server.engine.process import check_shared
from specserve.testing import write_adapter, write_tiny_model
from tests.models.test_architectures import make_ops
from tests.parallel.test_tensor_parallel import GREEDY, PROMPTS, answers, make, pytestmark as pytestmark

SECRET = b"a secret of twenty characters"
TOLD_S = 5.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3, num_key_value_heads=4)


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_bytes(SECRET)
    return path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Others:
    """Some `specserve rank`, as other hosts run them."""

    def __init__(self, stack: ExitStack, log: Path) -> None:
        self._stack, self._log, self.processes = stack, log, list[subprocess.Popen[bytes]]()

    def start(self, model: Path, secret: Path, port: int, count: int = 1) -> None:
        own = ["--join", f"127.0.0.1:{port}", "--secret-file", str(secret), "--threads", "1"]
        for _ in range(count):
            with self._log.open("ab") as stream:
                command = [sys.executable, "-m", "specserve", "rank", str(model), *own]
                process = subprocess.Popen(command, stdout=stream, stderr=stream)
            self.processes.append(process)
            self._stack.callback(self._end, process)

    @property
    def said(self) -> str:
        return self._log.read_text("utf-8")

    def children(self) -> list[int]:
        """The processes that compute."""
        ids = [str(each.pid) for each in self.processes]
        found = subprocess.run(["ps", "-o", "pid=", "--ppid", ",".join(ids)], capture_output=True, text=True)
        return [int(each) for each in found.stdout.split()]

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        process.wait(10)


@pytest.fixture
def others(tmp_path: Path) -> Iterator[Others]:
    with ExitStack() as stack:
        yield Others(stack, tmp_path / "log")


def apart(port: int, secret: Path) -> dict[str, Any]:
    return {"ranks_listen": f"127.0.0.1:{port}", "ranks_secret_file": str(secret)}


def test_they_say_what_processes_of_one_host_say(tiny: Path, secret: Path, others: Others, tmp_path: Path) -> None:
    """Again and again: who has computed a part of one model goes on to the next."""
    port = free_port()
    others.start(tiny, secret, port, 2)
    shapes = {name: info.shape for name, info in Weights(tiny).infos.items()}
    adapter = write_adapter(tmp_path / "a", shapes, 3, ("q_proj", "o_proj", "down_proj", "lm_head"))
    whole = KVStorage.bytes_per_block(native_spec(tiny).kv_shapes, 16, torch.float32)
    for options in (
        {"drafter": "ngram", "kv_cache_gib": 60 * whole / 2**30},
        {"drafter": "suffix", "quantization": "int8", "dtype": "auto"},
    ):
        found, num_blocks = [], []
        for where in ({}, apart(port, secret)):
            with make(tiny, 3, max_loras=1, **options, **where) as llm:
                num_blocks.append(llm.engine.executor.num_blocks)
                found.append(answers(llm))
                llm.load_adapter("a", adapter)
                found[-1] += answers(llm, adapter="a")
        assert found[0] == found[1]
        assert "kv_cache_gib" not in options or num_blocks[1] > 1.5 * num_blocks[0], "each host has memory of its own"
    assert len(re.findall(r"Process [12] of 3 of the model at 127\.0\.0\.1", others.said)) == 4


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_one_that_ends_is_told_and_comes_back(tiny: Path, secret: Path, others: Others, how: int) -> None:
    port = free_port()
    others.start(tiny, secret, port, 2)
    with make(tiny, 3, **apart(port, secret)) as llm:
        expected = answers(llm)
        stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
        next(stream)
        os.kill(others.children()[0], how)
        begun = time.monotonic()
        with pytest.raises(EngineError, match=r"rocess \d? ?of the model has ended"):
            for _ in stream:
                pass
        assert time.monotonic() - begun < TOLD_S
    with make(tiny, 3, **apart(port, secret)) as llm:
        assert answers(llm) == expected


@pytest.fixture
def through(proxy: Any) -> Iterator[Callable[[int], Any]]:
    """A way to a port, that can be cut: it runs on a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    ways = list[Any]()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(10)

    def made(port: int) -> Any:
        ways.append(run(proxy(port).__aenter__()))
        return SimpleNamespace(port=ways[-1].port, cut=lambda: loop.call_soon_threadsafe(ways[-1].cut))

    yield made
    for way in ways:
        run(way.__aexit__(None, None, None))
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_way_that_is_cut_is_told_and_mended(
    tiny: Path, secret: Path, others: Others, through: Callable[[int], Any], num_rounds: int
) -> None:
    port = free_port()
    way = through(port)
    threading.Timer(0.5, others.start, (tiny, secret, way.port)).start()
    expected = None
    for _ in range(num_rounds):
        with make(tiny, 2, **apart(port, secret)) as llm:
            assert answers(llm) == (expected := expected or answers(llm))
            stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
            next(stream)
            way.cut()
            begun = time.monotonic()
            with pytest.raises(EngineError, match="has ended: it was killed, or crashed"):
                for _ in stream:
                    pass
            assert time.monotonic() - begun < TOLD_S
    with make(tiny, 2, **apart(port, secret)) as llm:
        assert answers(llm) == expected


def test_nothing_is_left(tiny: Path, secret: Path, others: Others, num_rounds: int) -> None:
    port = free_port()
    others.start(tiny, secret, port)
    found = []
    for _ in range(max(4, num_rounds)):
        with make(tiny, 2, **apart(port, secret)) as llm:
            llm.generate(PROMPTS[0], GREEDY)
        del llm
        gc.collect()
        found.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert found[-1] == found[1]


def test_another_model_is_refused(tiny: Path, secret: Path, others: Others, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", "llama", seed=4, num_key_value_heads=4)
    with closing(Gate(Address("127.0.0.1", 0), SECRET, str(tiny), "its digest")) as gate:
        others.start(other, secret, gate.address.port)
        assert others.processes[0].wait(60) == 1
    assert f"It serves {tiny}, and {other} holds other files: name the same model here." in others.said


def test_wrong_options_are_said(tiny: Path, secret: Path, tmp_path: Path) -> None:
    port = free_port()
    for options, said in (
        ({"ranks_listen": f"127.0.0.1:{port}"}, "belong together"),
        ({"ranks_listen": "nowhere", "ranks_secret_file": str(secret)}, "HOST:PORT"),
        ({**apart(port, secret), "ranks_secret_file": str(tmp_path / "none")}, "--ranks-secret-file"),
        ({**apart(port, secret), "pipeline_parallel_size": 2}, "pipeline_parallel_size 1"),
    ):
        with pytest.raises(ConfigError, match=said):
            make(tiny, 2, **options)
    with pytest.raises(ConfigError, match="at least 2"):
        make(tiny, 1, **apart(port, secret))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="nothing can listen at"):
        make(tiny, 2, **apart(taken.getsockname()[1], secret))


def test_replicas_are_refused(secret: Path) -> None:
    config = EngineConfig(tensor_parallel_size=2, **apart(1, secret))
    check_shared(config, 1)
    with pytest.raises(ConfigError, match="--data-parallel-size is 2, and processes that join"):
        check_shared(config, 2)


def test_a_cache_that_another_host_has_no_room_for_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = object.__new__(JoinedRank)
    rank._model, rank._ops = SimpleNamespace(spec=native_spec(tiny)), make_ops("native-float32")
    monkeypatch.setattr(joined, "free_memory", lambda device: 2**20)
    with pytest.raises(CapacityError, match=r"0\.00 GiB are free there. Give the first process a smaller"):
        rank.begin(Begin(10**6, 16, 16, 16, 0, 64, []))


@pytest.fixture
def gate() -> Iterator[Gate]:
    with closing(Gate(Address("127.0.0.1", 0), SECRET, "model", "digest")) as gate:
        yield gate


def test_a_wrong_secret_is_refused(gate: Gate) -> None:
    with pytest.raises(LinkError, match="another secret"):
        join(gate.address, b"another secret, as long", lambda welcome: None)


def test_an_unknown_host_is_said() -> None:
    with pytest.raises(LinkError, match=r"no\.such\.host\.invalid is unknown"):
        join(Address("no.such.host.invalid", 1), SECRET, lambda welcome: None)


def test_whatever_comes_to_the_gate_holds_nobody_up(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "HANDSHAKE_S", 1.0)
    rng = random.Random(5)
    silent = [socket.create_connection(("127.0.0.1", gate.address.port)) for _ in range(5)]
    for i in range(60):
        with socket.create_connection(("127.0.0.1", gate.address.port)) as end:
            begin = PREAMBLE if i % 2 else b""
            with suppress(OSError):
                end.sendall(begin + rng.randbytes(rng.choice((0, 3, 12, 200, 70_000))))
    joined, own = join(gate.address, SECRET, lambda welcome: None)
    end, session = gate.admit()
    SealedConnection(end, Command, session).send(DropAdapter("x"))
    assert joined.receive() == DropAdapter("x")
    assert own == "127.0.0.1"
    for each in (*silent, end):
        each.close()
    joined.close()


def sealed() -> tuple[SealedConnection, SealedConnection, socket.socket]:
    """Two ends, and the second one's socket."""
    found: dict[str, Any] = {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname())
        second, _ = server.accept()

    def greet() -> None:
        found["second"] = shake(second, engine_handshake(SECRET, "m", "d", lambda: None)).session

    thread = threading.Thread(target=greet)
    thread.start()
    agreed = shake(first, server_handshake(SECRET, 5.0, lambda welcome: None))
    thread.join()
    return SealedConnection(first, Command, agreed.session), SealedConnection(second, Command, found["second"]), second


def test_messages_of_any_size_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_PIECE_BYTES", 1000)
    first, second, _ = sealed()
    for size in (0, 4, 996, 4000, 8004):
        message = AddWeights("d" * 7, "w", Sent((1, size // 4), bytes(size), (0, 0), b""))
        second.send(message)
        second.send(DropAdapter("next"))
        assert first.receive() == message
        assert first.receive() == DropAdapter("next")
    first.close()
    second.close()


def test_frames_that_are_changed_or_repeated_end_a_connection() -> None:
    for change in (
        lambda frame: frame[:-1] + bytes([frame[-1] ^ 1]),
        lambda frame: frame * 2,
        lambda frame: frame[:-3],
    ):
        first, second, end = sealed()
        message = second._session.seal(b"\0" + second.encoded(DropAdapter("x")))
        end.sendall(change(message))
        second.close()
        with pytest.raises(EOFError):
            for _ in range(2):
                first.receive()
        first.close()
