"""Whose answers a request drafts from: nobody's without a key, unless the client or the operator says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ASKED = {"prompt": list(range(60, 90)), "max_tokens": 24, "temperature": 1, "seed": 3, "ignore_eos": True}
KEYS = ("sk-first", "sk-second")


def num_steps(served: Any, key: str | None = None, **fields: Any) -> int:
    """Of an answer that is the same each time: fewer steps where drafts come from the one before."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    reply = served.post("/v1/completions", {**ASKED, **fields}, headers=headers)
    assert reply.status == 200
    return int(reply.json["metrics"]["speculative_decoding"]["num_spec_steps"])


def test_without_keys_nothing_is_kept_but_within_a_salt(server: Any) -> None:
    first, again = num_steps(server), num_steps(server)
    assert first == again
    assert [num_steps(server, cache_salt=salt) == first for salt in ("one", "two", "one")] == [True, True, False]
    assert num_steps(server) == first


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_so_it_is_in_every_api(server: Any, path: str) -> None:
    """Told by the server's own counters: the same conversation again is drafted for as it was at first."""
    said = f"stone thing {path}"
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 24, "temperature": 0}
    asked["messages"] = [{"role": "user", "content": said}]
    if path == "/v1/responses":
        asked = {"model": "tiny", "max_output_tokens": 24, "temperature": 0, "input": said}

    def drafted() -> tuple[int, int]:
        before = server.get("/stats").json["speculation"]["sources"]["suffix"]
        assert server.post(path, asked).status == 200
        after = server.get("/stats").json["speculation"]["sources"]["suffix"]
        return tuple(after[name] - before[name] for name in ("num_draft_tokens", "num_accepted_tokens"))

    assert drafted() == drafted()


def test_the_operator_may_let_all_share(serving_process: Any, tiny: Path, tmp_path: Path) -> None:
    with serving_process(tiny, tmp_path, "--no-adaptive", "--share-drafts") as served:
        first = num_steps(served)
        assert num_steps(served) < first


def test_a_key_is_a_tenant(serving_process: Any, tiny: Path, tmp_path: Path) -> None:
    keys = [f"--api-key={key}" for key in KEYS]
    with serving_process(tiny, tmp_path, "--no-adaptive", *keys, key=KEYS[0]) as served:
        first, other, again = (num_steps(served, key) for key in (*KEYS, KEYS[0]))
        assert first == other > again
