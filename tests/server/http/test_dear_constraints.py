"""Constraints that take long to compile cost those who send them: a server as it is by default, and nobody else waits."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DEAR = 10


def dear(name: str) -> dict[str, Any]:
    """A request of about 5 KB whose schema takes minutes to compile."""
    words = [f"{name}{i}{'x' * 300}" for i in range(16)]
    schema = {"allOf": [{"type": "string", "pattern": f".*{word}.*"} for word in words]}
    return {"prompt": "x", "max_tokens": 4, "guided_json": schema}


def innocent(*words: str) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 8, "guided_choice": list(words)}


def trial_seconds(api: int) -> float:
    """CPU time of all processes in which this server has tried constraints."""

    def used(pid: int, since: int) -> int:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        return sum(map(int, fields[since:15]))

    def children(pid: int) -> list[int]:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8").split()))

    found = used(api, 13)  # those that are gone
    for worker in children(api)[1:]:  # the first is the engine
        found += used(worker, 11) + sum(used(copy, 11) for copy in children(worker))
    return found / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def ordinary(tiny: Path, serving_process: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serving_process(tiny, tmp_path_factory.mktemp("ordinary")) as served:
        assert served.post("/v1/completions", innocent("warm", "up")).status == 200
        yield served


def begun(served: Any, bodies: list[dict[str, Any]]) -> list[tuple[threading.Thread, list[Any]]]:
    """Requests that wait for their answers on threads of their own."""
    found = []
    for body in bodies:
        replies: list[Any] = []
        thread = threading.Thread(
            target=lambda body=body, replies=replies: replies.append(served.post("/v1/completions", body, timeout=280))
        )
        thread.start()
        found.append((thread, replies))
    return found


def is_at_rest(served: Any) -> bool:
    """Whether nothing is tried."""
    before = trial_seconds(served.process.pid)
    time.sleep(0.5)
    return trial_seconds(served.process.pid) - before <= 0.02


def test_dropped_ones_cost_nobody_anything(ordinary: Any) -> None:
    """They are gone from the queue with their clients, and what runs of them ends."""
    before = trial_seconds(ordinary.process.pid)
    for i in range(DEAR):
        body = dear(f"dropped{i}")
        text = json.dumps(body).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        ordinary.raw(head % len(text) + text).close()
    reply = ordinary.post("/v1/completions", innocent("yes", "no"))
    assert reply.json["choices"][0]["text"] in ("yes", "no")
    ordinary.until(lambda: is_at_rest(ordinary))
    assert trial_seconds(ordinary.process.pid) - before < 2.0, "ten of them would be 20"


def test_cheap_ones_do_not_wait_behind_dear_ones(ordinary: Any) -> None:
    asking = begun(ordinary, [dear(f"waiting{i}") for i in range(DEAR)])
    ordinary.until(lambda: ordinary.get("/stats").status == 200 and trial_seconds(ordinary.process.pid) > 0)
    time.sleep(0.5)
    before = trial_seconds(ordinary.process.pid)
    for i in range(3):
        reply = ordinary.post("/v1/completions", innocent(f"a{i}", f"b{i}"))
        assert reply.status == 200
    used = trial_seconds(ordinary.process.pid) - before
    assert sum(not replies for _, replies in asking) >= DEAR // 2, "most of the dear ones still wait"
    assert used < 4.0, "what was tried meanwhile; all of them would be 20"
    for thread, replies in asking:
        thread.join(280)
        assert (replies[0].status, replies[0].error["param"]) == (400, "guided_json")
        assert "longer than 2 s" in replies[0].error["message"]


@pytest.mark.parametrize(
    ("options", "status", "code"),
    [({"queue-timeout-s": 1}, 503, "queue_timeout"), ({"request-timeout-s": 1, "queue-timeout-s": 0}, 504, "timeout")],
    ids=["queue", "request"],
)
def test_deadlines_hold_for_trials(
    tiny: Path, serving_process: Any, tmp_path: Path, options: dict[str, float], status: int, code: str
) -> None:
    """Each takes 2 s, the last one 10."""
    with serving_process(tiny, tmp_path, **options) as served:
        asking = begun(served, [{**dear(f"late{i}"), "stream": i % 2 == 0} for i in range(5)])
        for thread, _ in asking:
            thread.join(280)
        for _, (reply,) in asking:
            assert (reply.status, reply.error["code"]) == (status, code)
            assert ("retry-after" in reply.headers) == (status == 503)
        served.until(lambda: is_at_rest(served))
