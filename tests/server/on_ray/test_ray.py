"""`serve --backend ray` on two real Ray nodes of this machine: its answers, what dies with a node, what comes back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(500)]

ENGINE, ACTOR = "specserve.server.engine.process", "ray::RayEngine"
TOLD_S = 1.0  # in which clients learn that their engine is gone
BACK_S = 120.0  # Ray takes 20 s to know that a node is gone
BODIES: list[dict[str, Any]] = [
    {"prompt": [number, 6, 7, 8] * 6, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True, **sampling}
    for number in range(5, 9)
    for sampling in ({"temperature": 0}, {"temperature": 1, "seed": number})
]
PROMPTS = [[number, 6, 7, 8] * 6 for number in range(5, 9)]
STREAM = {"max_tokens": 2000, "ignore_eos": True, "temperature": 0, "stream": True, "return_token_ids": True}
SIZE = {"max-model-len": 2048, "kv-cache-gib": 0.03}  # room for streams that do not end before they are looked at


@contextmanager
def serving_on(cluster: Any, serving_process: Any, tiny: Path, folder: Path, *options: str) -> Iterator[Any]:
    words = ("--backend=ray", f"--ray-address={cluster.address}", "--drafter=ngram", "--no-adaptive", *options)
    with serving_process(tiny, folder, *words, ready=False, **SIZE) as served:
        yield served


def states(served: Any) -> list[str]:
    return [each["state"] for each in served.get("/stats").json.get("replicas", ())]


def num_ready(served: Any) -> int:
    return states(served).count("ready")


def answers(served: Any) -> list[list[int]]:
    """To all of BODIES at once."""
    with ThreadPoolExecutor(len(BODIES)) as pool:
        replies = list(pool.map(lambda body: served.post("/v1/completions", body), BODIES))
    assert {reply.status for reply in replies} == {200}, [reply.body for reply in replies]
    return [reply.json["choices"][0]["token_ids"] for reply in replies]


@dataclass
class Heard:
    """What a stream's client has heard: its tokens, the error if there was one, and time.monotonic() of its end."""

    tokens: list[int]
    error: Any = None
    ended: float = 0.0


def listen(port: int, prompt: list[int], heard: Heard) -> Heard:
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    body = json.dumps({**STREAM, "prompt": prompt}).encode()
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    for line in connection.getresponse():
        name, _, data = line.decode().strip().partition(": ")
        if name == "data" and data != "[DONE]":  # not a comment, which keeps the connection
            event = json.loads(data)
            heard.error = event.get("error", heard.error)
            heard.tokens += [token for choice in event.get("choices", ()) for token in choice.get("token_ids") or ()]
    heard.ended = time.monotonic()
    connection.close()
    return heard


@contextmanager
def streams(served: Any, engines: list[int]) -> Iterator[list[Future[Heard]]]:
    """Streams that are in the middle of their answers: in the block all engines stand still."""
    heard = [Heard([]) for _ in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        asking = [pool.submit(listen, served.port, *each) for each in zip(PROMPTS, heard, strict=True)]
        served.until(lambda: all(each.tokens for each in heard))
        for pid in engines:
            os.kill(pid, signal.SIGSTOP)
        assert not any(each.done() for each in asking), "they ended too soon for this test"
        try:
            yield asking
        finally:
            for pid in engines:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


def test_two_nodes_serve_as_one_and_one_dies(
    cluster: Any, tiny: Path, tmp_path: Path, serving_process: Any, shared_server: Any
) -> None:
    expected = answers(shared_server)
    cluster.add("a")
    cluster.add("b")
    with serving_on(cluster, serving_process, tiny, tmp_path, "--replicas=2") as served:
        served.until(lambda: num_ready(served) == 2, BACK_S)
        assert answers(served) == expected
        counts = [each["num_requests"] for each in served.get("/stats").json.get("replicas", ())]
        assert sum(counts) == len(BODIES) and min(counts) > 0
        (first,), (second,) = (cluster.processes(node, ENGINE) for node in "ab")

        # A node dies in the middle of answers: who waits for it knows at once, and nobody else notices.
        with streams(served, [first, second]) as asking:
            killed = time.monotonic()
            cluster.kill("b")
            served.until(lambda: any(each.done() for each in asking))
            time.sleep(TOLD_S / 2)
            lost = [each.result() for each in asking if each.done()]
            assert 0 < len(lost) < len(asking)
            assert max(each.ended for each in lost) - killed < TOLD_S
        replies = [each.result(BACK_S) for each in asking]
        for prompt, reply in zip(PROMPTS, replies, strict=True):
            again = listen(served.port, prompt, Heard([]))
            assert (reply.error is not None) == (reply in lost)
            assert again.error is None
            assert again.tokens[: len(reply.tokens)] == reply.tokens
            assert reply in lost or again.tokens == reply.tokens
        assert served.get("/health").status == 200

        # There is room for it elsewhere: it is back without anybody's doing.
        cluster.add("c")
        served.until(lambda: num_ready(served) == 2, BACK_S)
        assert len(cluster.processes("c", ENGINE)) == 1
        assert answers(served) == expected
        assert served.end() == 0
        served_ended = time.monotonic()
        while cluster.processes("a", ACTOR) or cluster.processes("c", ENGINE):
            assert time.monotonic() - served_ended < 10
            time.sleep(0.05)
    assert "Traceback" not in served.said


def what_is_left(cluster: Any, served: Any) -> tuple[int, int, int]:
    """Descriptors and threads of the server, processes of the node."""
    own = Path(f"/proc/{served.process.pid}")
    return len(os.listdir(own / "fd")), len(os.listdir(own / "task")), len(cluster.processes("a", ""))


def is_replaced(cluster: Any, word: str, killed: int) -> bool:
    found = cluster.processes("a", word)
    return killed not in found and len(found) == 2


def test_nothing_is_left_of_engines_that_were_killed_again_and_again(
    cluster: Any, tiny: Path, tmp_path: Path, serving_process: Any, num_rounds: int
) -> None:
    """Actors and engines by turns. Ray restarts the one, the actor the other."""
    cluster.add("a", 2)
    with serving_on(cluster, serving_process, tiny, tmp_path, "--replicas=2") as served:
        served.wait_until_ready()
        served.until(lambda: num_ready(served) == 2, BACK_S)
        expected, before = answers(served), (0, 0, 0)
        for number in range(max(6, num_rounds)):
            word = (ENGINE, ACTOR)[number % 2]
            killed = cluster.processes("a", word)[number // 2 % 2]
            os.kill(killed, signal.SIGKILL)
            served.until(lambda word=word, killed=killed: is_replaced(cluster, word, killed), BACK_S)
            served.until(lambda: num_ready(served) == 2, BACK_S)
            assert answers(served) == expected
            if number == 1:
                before = what_is_left(cluster, served)
        served.until(lambda: what_is_left(cluster, served) == before)
        assert len(states(served)) == 2
        served.until(served.is_idle)

        # Nobody is left to end them but Ray.
        served.process.kill()
        killed = time.monotonic()
        while cluster.processes("a", ENGINE) or cluster.processes("a", ACTOR):
            assert time.monotonic() - killed < 20
            time.sleep(0.05)


def test_there_are_engines_again_once_there_is_a_head_again(
    cluster: Any, tiny: Path, tmp_path: Path, serving_process: Any
) -> None:
    """At the same address, without memory of the cluster that it had."""
    cluster.add("a")
    with serving_on(cluster, serving_process, tiny, tmp_path) as served:
        served.until(lambda: num_ready(served) == 1, BACK_S)
        expected, address = answers(served), cluster.address
        cluster.kill("a")
        served.until(lambda: served.get("/health").status == 503)
        cluster.add("a")
        assert cluster.address == address
        served.until(lambda: num_ready(served) == 1, BACK_S)
        assert answers(served) == expected
        assert served.end() == 0
        assert cluster.processes("a", ENGINE) == []


def test_there_are_as_many_engines_as_the_load_needs(
    cluster: Any, tiny: Path, tmp_path: Path, serving_process: Any
) -> None:
    cluster.add("a", 2)
    options = ("--min-replicas=1", "--max-replicas=2", "--target-wait-ms=2", "--api-processes=2")
    with serving_on(cluster, serving_process, tiny, tmp_path, *options) as served:
        served.until(lambda: num_ready(served) == 1, BACK_S)
        served.until(lambda: {served.get("/health").status for _ in range(8)} == {200})  # all processes know
        expected = answers(served)
        with ThreadPoolExecutor(8) as pool:
            end = time.monotonic() + BACK_S
            while num_ready(served) < 2:
                assert time.monotonic() < end
                list(pool.map(lambda body: served.post("/v1/completions", body), BODIES))
            assert answers(served) == expected
        assert "there will be 2" in served.said
        served.until(lambda: len(cluster.processes("a", ENGINE)) == 1, BACK_S)
        assert answers(served) == expected
        assert served.end() == 0


def test_ranks_of_an_engine_lie_on_one_node_that_has_room_for_them(
    cluster: Any, tiny: Path, tmp_path: Path, serving_process: Any
) -> None:
    cluster.add("a")
    cluster.add("b")
    with serving_on(cluster, serving_process, tiny, tmp_path, "--tensor-parallel-size=2") as served:
        served.until(lambda: "It needs a node with 2 CPUs free. The cluster has 2 nodes" in served.said, BACK_S)
        assert served.get("/health").status == 503
        cluster.add("c", 2)
        served.until(lambda: served.get("/health").status == 200, BACK_S)
        assert [len(answer) for answer in answers(served)] == [40] * len(BODIES)
        assert len(cluster.processes("c", "specserve.parallel.rank")) == 1
        assert served.end() == 0


def test_a_model_that_is_not_on_a_node_ends_the_start(cluster: Any, tiny: Path, tmp_path: Path) -> None:
    """As everything that the next start of an engine cannot do either."""
    cluster.add("a")
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    weights = next(model.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    done = start(model, f"--ray-address={cluster.address}")
    assert done.returncode == 2
    assert weights.name in done.stderr and "Traceback" not in done.stderr
    assert cluster.processes("a", ACTOR) == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--ray-address=127.0.0.1:1",), "the Ray cluster cannot be used"),
        (("--ray-address=head",), "it must be HOST:PORT"),
        (("--ray-address=ray://127.0.0.1:10001",), "needs the address of its head"),
        (("--data-parallel-size=2",), "Give --replicas with --backend ray"),
        (("--engine=127.0.0.1:7000",), "Leave it out with --backend ray"),
    ],
)
def test_what_cannot_be_ends_the_start(tiny: Path, options: tuple[str, ...], text: str) -> None:
    done = start(tiny, *options)
    assert done.returncode == 2
    assert text in " ".join(done.stderr.split()) and "Traceback" not in done.stderr


def start(model: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A server that is expected to end by itself."""
    command = [sys.executable, "-m", "specserve", "serve", str(model), "--port=0", "--backend=ray", "--threads=1"]
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=BACK_S)
