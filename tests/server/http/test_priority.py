"""Priorities over HTTP: refused as long as the operator has not asked for them, as anybody could set them."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

PROMPTS = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}


@pytest.mark.parametrize("path", PROMPTS)
def test_they_are_closed_by_default(server: Any, path: str) -> None:
    for priority in (-5, 1, 2**31 - 1):
        reply = server.post(path, {**PROMPTS[path], "max_tokens": 1, "priority": priority})
        assert (reply.status, reply.error["param"]) == (400, "priority")
        assert "--scheduling-policy priority" in reply.error["message"]
    for priority in (0, None):
        assert server.post(path, {**PROMPTS[path], "max_tokens": 1, "priority": priority}).status == 200
    told = server.get("/openapi.json").json["components"]["schemas"]["CompletionRequest"]["properties"]["priority"]
    assert (told["minimum"], told["maximum"]) == (0, 0)


def test_the_operator_opens_them(tiny: Path, serving_process: Any, tmp_path: Path) -> None:
    options = {"scheduling-policy": "priority", "max-num-seqs": 1, "stall-timeout-s": 1000}
    with serving_process(tiny, tmp_path, **options) as served:
        ended: list[int] = []

        def ask(path: str, priority: int) -> None:
            asked = {**PROMPTS[path], "max_tokens": 60, "ignore_eos": True, "priority": priority}
            assert served.post(path, asked).status == 200
            ended.append(priority)

        ask("/v1/completions", 7)
        os.kill(served.engine_pid, signal.SIGSTOP)
        threads = []
        for path, priority in (("/v1/completions", 1), ("/v1/completions", 0), ("/v1/chat/completions", -1)):
            threads.append(threading.Thread(target=ask, args=(path, priority)))
            threads[-1].start()
            time.sleep(0.3)
        os.kill(served.engine_pid, signal.SIGCONT)
        for thread in threads:
            thread.join(60)
        assert ended == [7, -1, 0, 1]
