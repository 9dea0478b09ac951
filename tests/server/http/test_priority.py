"""Priorities over HTTP: refused as long as the operator has not asked for them, as anybody could set them. Where one
has, test_lifecycle.py looks."""

from __future__ import annotations

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
