"""`serve --prefill-replicas 1` as a process: answers, metrics, and what it refuses at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PROMPT = [(7 * i + 3 * i * i) % 280 for i in range(100)]
BODIES: list[dict[str, Any]] = [
    {"prompt": [number, *PROMPT], "max_tokens": 20, "ignore_eos": True, "return_token_ids": True, **sampling}
    for number in range(5, 8)
    for sampling in ({"temperature": 0}, {"temperature": 1, "seed": number})
]
OPTIONS = ("--data-parallel-size=2", "--prefill-replicas=1", "--prefill-min-tokens=50")


def tokens(served: Any, body: dict[str, Any]) -> list[int]:
    found: list[int] = served.post("/v1/completions", body).json["choices"][0]["token_ids"]
    return found


def test_prompts_are_computed_elsewhere(tiny: Path, tmp_path: Path, serving_process: Any, shared_server: Any) -> None:
    expected = [tokens(shared_server, body) for body in BODIES]
    with serving_process(tiny, tmp_path, *OPTIONS, "--drafter=ngram", "--no-adaptive") as served:
        served.until(lambda: {each["state"] for each in served.get("/stats").json["replicas"]} == {"ready"}, 120)
        assert [tokens(served, body) for body in BODIES] == expected
        stats = served.get("/stats").json
        assert [each["role"] for each in stats["replicas"]] == ["decode", "prefill"]
        assert stats["prefill"]["num_prompts"] == {"here": 3, "elsewhere": 3}, "each was cached for its second request"
        places = stats["prefill"]["num_prompt_tokens"]
        assert sum(places.values()) == sum(len(body["prompt"]) for body in BODIES)
        assert places["elsewhere"] == places["cached"] == 3 * 96
        assert stats["prefill"]["num_transfer_failures"] == 0
        assert stats["requests"]["length"] == len(BODIES), "who computes a prompt alone ends no request"
        text = served.get("/metrics").body.decode()
        assert 'specserve:prompts_total{model_name="' in text
        assert 'replica_prompts_received_total{model_name="' in text
        assert served.end() == 0
    assert "Traceback" not in served.said


def test_a_server_that_prefills_nowhere_else_counts_here(shared_server: Any) -> None:
    before = shared_server.get("/stats").json["prefill"]
    tokens(shared_server, BODIES[0])
    after = shared_server.get("/stats").json["prefill"]
    assert after["num_prompts"] == {"here": before["num_prompts"]["here"] + 1, "elsewhere": 0}
