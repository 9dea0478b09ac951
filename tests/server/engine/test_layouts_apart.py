"""Layouts of which something is elsewhere, with several processes that answer: prompts that are computed apart, engines
at another address, and a model whose second process has joined from another host. Who is lost, and what is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.test_hosts import Others, free_port
from tests.processes import is_alive
from tests.server.engine.test_layouts import KILL, NATIVE, SOME, STOP, check_end, expected, folder, rounds_of
from tests.server.engine.test_remote_processes import Process, ending
from tests.server.rounds import API, BODIES, COMMAND, ENGINE, JOINED, OPTIONS, PROMPTS, STALL_S, Loss, Rounds

__all__ = ["expected", "folder", "rounds_of"]  # fixtures
HEARTBEAT_S = 1.0
RoundsOf = Callable[..., Rounds]
ENGINE_OPTIONS = {**OPTIONS, "threads": 1, "max-num-seqs": 4, "drafter": "ngram", "stall-timeout-s": STALL_S}


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_bytes(b"a secret of twenty characters")
    return path


def test_prompts_that_are_computed_apart(
    folder: Path, rounds_of: RoundsOf, tmp_path: Path, serving_process: Any
) -> None:
    """Who answers is lost with its streams; who computes prompts costs nobody anything."""
    sizes = {"api-processes": 2, "data-parallel-size": 2, "prefill-replicas": 1, "prefill-min-tokens": 1}
    options = {**OPTIONS, **sizes, "stall-timeout-s": STALL_S, "drafter": "ngram"}
    losses = [
        Loss(ENGINE, KILL, "none", 1),
        Loss(ENGINE, KILL),
        Loss(ENGINE, STOP, "none", 1),
        Loss(API, KILL, SOME),
        Loss(ENGINE, STOP),
    ]
    with serving_process(folder, tmp_path, "--admin", "--no-adaptive", **options) as served:
        rounds = rounds_of(served)
        assert served.get("/stats").json["replicas"][0]["num_prompts_received"] == len(PROMPTS)
        rounds.run(losses)
        check_end(served)


def test_engines_at_other_addresses(
    folder: Path, rounds_of: RoundsOf, secret: Path, tmp_path: Path, serving_process: Any
) -> None:
    """Their processes, and those that have started these, which somebody starts again."""
    own = [f"--{name}={value}" for name, value in ENGINE_OPTIONS.items()]

    def engine(number: int, port: int = 0) -> Process:
        told = ["engine", str(folder), f"--listen=127.0.0.1:{port}", f"--secret-file={secret}", "--no-adaptive", *own]
        return Process(tmp_path / str(number), *told)

    engines = [engine(0), engine(1)]

    def back() -> None:
        for number, each in enumerate(engines):
            if each.process.poll() is not None:
                engines[number] = engine(number, each.port)

    named = [f"--engine=127.0.0.1:{each.port}" for each in engines]
    more = [f"--engine-secret-file={secret}", f"--engine-heartbeat-s={HEARTBEAT_S}", "--max-queue=24"]
    nothing = dict.fromkeys(("threads", "max-num-seqs", "kv-cache-gib", "max-model-len"))
    losses = [
        Loss(COMMAND, KILL, SOME, 1),
        Loss(ENGINE, KILL, SOME),
        Loss(COMMAND, STOP, SOME, 2, stays=True),
        Loss(API, KILL, SOME),
        Loss(ENGINE, STOP, SOME, 1),
    ]
    with (
        ending(engines),
        serving_process(folder, tmp_path, "--admin", *named, *more, **nothing, **{"api-processes": 2}) as served,
    ):
        rounds = rounds_of(served, lambda: [each.process.pid for each in engines])
        rounds.run(losses, back)
        refused = served.post("/v1/completions", {**BODIES[0], "n": 33})
        assert "completions to do and takes 32 at most" in refused.error["message"], "8 places and 24 that wait"
        for each in engines:
            each.process.kill()
        served.until(lambda: served.get("/health").status == 503)
        served.until(lambda: served.post("/v1/completions", BODIES[0]).status == 503)
        check_end(served)


@contextmanager
def joining(folder: Path, secret: Path, port: int, log: Path) -> Iterator[Others]:
    with ExitStack() as stack:
        others = Others(stack, log)
        others.start(folder, secret, port)
        yield others


@pytest.mark.skipif(not NATIVE, reason="Built without native kernels.")
def test_a_model_whose_second_process_has_joined(
    folder: Path, rounds_of: RoundsOf, secret: Path, tmp_path: Path, serving_process: Any
) -> None:
    """That one, also where it stands still, and the command that has started it, which somebody starts again."""
    port = free_port()
    told = [f"--ranks-listen=127.0.0.1:{port}", f"--ranks-secret-file={secret}", "--no-adaptive", "--drafter=ngram"]
    options = {**OPTIONS, "tensor-parallel-size": 2, "stall-timeout-s": STALL_S, "api-processes": 2}
    losses = [
        Loss(JOINED, KILL),
        Loss(COMMAND, KILL, "all", 1),
        Loss(API, KILL, SOME),
        Loss(JOINED, STOP),
        Loss(ENGINE, KILL),
    ]
    with (
        joining(folder, secret, port, tmp_path / "log") as others,
        serving_process(folder, tmp_path, "--admin", *told, **options) as served,
    ):

        def back() -> None:
            if others.processes[-1].poll() is not None:
                others.start(folder, secret, port)

        rounds = rounds_of(served, lambda: [others.processes[-1].pid])
        rounds.run(losses, back)
        check_end(served)
        assert is_alive(others.processes[-1].pid), "it waits for another server"
