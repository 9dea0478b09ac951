"""`serve --data-parallel-size 2` as a process: its answers, what an engine's death ends and what it leaves, its end."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ENGINE = "specserve.server.engine.process"
BODIES: list[dict[str, Any]] = [
    {"prompt": [number, 6, 7, 8] * 6, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True, **sampling}
    for number in range(5, 9)
    for sampling in ({"temperature": 0}, {"temperature": 1, "seed": number})
]


def engines(served: Any) -> list[int]:
    """The processes of engines that name the server as their parent, from the first one started on."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if ENGINE in words and words[-2] == str(served.process.pid):
            found.append(int(folder.name))
    return sorted(found)


def replicas(served: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = served.get("/stats").json["replicas"]
    return found


def all_ready(served: Any) -> bool:
    return [each["state"] for each in replicas(served)] == ["ready", "ready"]


def answers(served: Any) -> list[list[int]]:
    """To all of BODIES at once."""
    with ThreadPoolExecutor(len(BODIES)) as pool:
        replies = list(pool.map(lambda body: served.post("/v1/completions", body), BODIES))
    return [reply.json["choices"][0]["token_ids"] for reply in replies]


def test_two_engines_serve_as_one(tiny: Path, tmp_path: Path, serving_process: Any, shared_server: Any) -> None:
    expected = answers(shared_server)
    with serving_process(tiny, tmp_path, "--data-parallel-size=2", "--drafter=ngram", "--no-adaptive") as served:
        served.until(lambda: all_ready(served), 120)
        assert answers(served) == expected
        counts = [each["num_requests"] for each in replicas(served)]
        assert sum(counts) == len(BODIES)
        assert min(counts) > 0

        # One dies while both have requests: its clients are told, the others' answers are whole.
        first, second = engines(served)
        for pid in (first, second):
            os.kill(pid, signal.SIGSTOP)
        with ThreadPoolExecutor(len(BODIES)) as pool:
            asking = [pool.submit(served.post, "/v1/completions", body) for body in BODIES]
            served.until(lambda: sum(each["num_requests"] for each in replicas(served)) == 2 * len(BODIES))
            os.kill(second, signal.SIGKILL)
            os.kill(first, signal.SIGCONT)
            replies = [each.result(60) for each in asking]
        lost = [reply for reply in replies if reply.status != 200]
        assert {(reply.status, reply.error["code"]) for reply in lost} == {(500, "engine_error")}
        assert 0 < len(lost) < len(BODIES)
        for reply, tokens in zip(replies, expected, strict=True):
            if reply.status == 200:
                assert reply.json["choices"][0]["token_ids"] == tokens
        assert served.get("/health").status == 200

        served.until(lambda: all_ready(served), 60)
        assert answers(served) == expected
        assert [each["num_restarts"] for each in replicas(served)] == [0, 1]
        text = served.get("/metrics").body.decode()
        assert set(re.findall(r'replica="(\d+)"', text)) == {"0", "1"}
        assert served.get("/stats").json["num_restarts"] == 1
        assert served.end() == 0
        assert engines(served) == []
    assert "Traceback" not in served.said
    assert "Replica 1: The engine's process ended with status -9. Starting another" in served.said


def test_one_engine_tells_of_no_replicas(shared_server: Any) -> None:
    assert "replicas" not in shared_server.get("/stats").json
    assert 'replica="' not in shared_server.get("/metrics").body.decode()
