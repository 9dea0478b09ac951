"""The package's own clients and its load generator against the running server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specserve import Client
from specserve.cli.main import run
from specserve.errors import ServerError

MESSAGES = [{"role": "user", "content": "Hello there"}]
LONG = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}


@pytest.fixture
def client(server: Any) -> Any:
    with Client(f"http://127.0.0.1:{server.port}") as client:
        yield client


def test_calls_give_what_the_server_says(client: Client, server: Any) -> None:
    assert client.health() == {"status": "ready"}
    assert client.models() == server.get("/v1/models").json
    assert client.stats()["num_running"] == 0
    ids = client.tokenize("the cat sat")["tokens"]
    assert client.detokenize(ids) == {"prompt": "the cat sat"}
    assert client.tokenize(messages=MESSAGES)["count"] > len(ids)


def test_streams_say_what_whole_answers_say(client: Client) -> None:
    fields = {"temperature": 0, "max_tokens": 12}
    whole = client.chat(MESSAGES, **fields)
    chunks = list(client.stream_chat(MESSAGES, **fields, stream_options={"include_usage": True}))
    texts = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
    assert "".join(texts) == whole["choices"][0]["message"]["content"]
    usage = chunks[-1].get("usage")
    assert usage is not None
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
    text = client.complete("the cat sat", **fields)["choices"][0]["text"]
    assert "".join(c["text"] for chunk in client.stream("the cat sat", **fields) for c in chunk["choices"]) == text


def test_leaving_a_stream_ends_its_request(client: Client, server: Any) -> None:
    for _ in client.stream("the cat sat", **LONG):
        break
    server.until(server.is_idle)


def test_refusals_have_their_field(client: Client) -> None:
    with pytest.raises(ServerError, match="temperature") as caught:
        client.complete("a", temperature=-1)
    assert (caught.value.status, caught.value.param, caught.value.should_retry) == (400, "temperature", False)
    with pytest.raises(ServerError) as caught:
        list(client.stream_chat(MESSAGES, model="none"))
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_bench_serve_counts_what_the_server_counts(server: Any, tmp_path: Path, endpoint: str) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "the cat sat"}\n{"prompt": "on the mat"}\n')
    counted = ("--num-requests", "6", "--max-tokens", "20", "--ignore-eos", "--token-ids")
    where = ("--url", f"http://127.0.0.1:{server.port}", "--endpoint", endpoint, "--prompts", str(prompts))
    before = server.get("/stats").json["tokens"]
    assert run(["bench", "serve", *where, *counted, "--concurrency", "2", "--json", str(tmp_path / "o.json")]) == 0
    found = json.loads((tmp_path / "o.json").read_text())
    (load,) = found["loads"]
    assert (found["model"], load["completed"], load["output_tokens"]) == ("tiny", 6, 120)
    after = server.get("/stats").json["tokens"]
    assert after["num_generated"] - before["num_generated"] == 7 * 20  # the warm-up too
    for record in load["records"]:
        assert sum(record["chunk_tokens"]) <= 20  # what came after the last text is in no chunk
        assert 0 < record["ttft_ms"] <= record["chunk_ms"][-1] <= record["e2e_ms"]
        assert record["usage"]["completion_tokens"] == 20
