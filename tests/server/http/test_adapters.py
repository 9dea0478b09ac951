"""LoRA adapters over HTTP: by `model` in every API, listed with their parent, loaded, replaced and unloaded while
streams run, and there again after a crash."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specserve.adapters import AdapterInfo
from specserve.checkpoint.weights import Weights
from specserve.server.engine.supervisor import Supervisor
from specserve.testing import write_adapter

PROMPT = [5, 9, 31, 9, 31, 7, 9, 31]
COMPLETION = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def adapters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    shapes = {name: info.shape for name, info in Weights(tiny).infos.items()}
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / str(i), shapes, rank=4 + i, seed=i, size=0.5) for i in range(3)]


@pytest.fixture(scope="module")
def served(tiny: Path, adapters: list[Path], tmp_path_factory: pytest.TempPathFactory, serving_process: Any) -> Any:
    options = ["--lora", f"one={adapters[0]}", "--lora", f"two={adapters[1]},pinned", "--max-loras", "3", "--admin"]
    named = {"served-model-name": "tiny", "max-num-seqs": 16}
    with serving_process(tiny, tmp_path_factory.mktemp("served"), *options, **named) as server:
        yield server


@pytest.fixture
def server(served: Any) -> Iterator[Any]:
    yield served
    served.until(served.is_idle)


def tokens(server: Any, **fields: Any) -> list[int]:
    reply = server.post("/v1/completions", COMPLETION | fields)
    assert reply.status == 200, reply.json
    return list(reply.json["choices"][0]["token_ids"])


def load(server: Any, name: str, path: Path | str, **fields: Any) -> Any:
    return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **fields})


def unload(server: Any, name: str) -> Any:
    return server.post("/v1/unload_lora_adapter", {"lora_name": name})


def test_adapters_are_listed_with_their_parent(server: Any, adapters: list[Path]) -> None:
    listed = {each["id"]: each for each in server.get("/v1/models").json["data"]}
    assert list(listed) == ["tiny", "one", "two"]
    assert (listed["tiny"]["parent"], listed["one"]["parent"]) == (None, "tiny")
    assert (listed["tiny"]["root"], listed["one"]["root"]) == ("tiny", str(adapters[0]))
    assert server.get("/v1/models/two").json["parent"] == "tiny"
    anthropic = server.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json
    assert [each["id"] for each in anthropic["data"]] == ["tiny", "one", "two"]
    assert [each["name"] for each in server.get("/api/tags").json["models"]] == [
        "tiny:latest",
        "one:latest",
        "two:latest",
    ]


def test_every_api_answers_from_the_adapter_that_it_names(server: Any) -> None:
    answers = [tokens(server, model=name) for name in (None, "tiny", "one", "two", "one")]
    assert answers[0] == answers[1] and answers[2] == answers[4]
    assert len({tuple(each) for each in answers}) == 3
    reply = server.post("/v1/completions", {**COMPLETION, "model": "one"})
    assert reply.json["model"] == "one"


def test_metrics_tell_adapters_apart(server: Any) -> None:
    def counted(name: str) -> dict[str, dict[str, int]]:
        return dict(server.get("/stats").json["adapters"].get(name, {}))

    before = counted("two")
    assert len(tokens(server, model="two")) == len(tokens(server)) == 12
    after = counted("two")
    assert {name: after[name] - before.get(name, 0) for name in ("num_completions", "num_generated_tokens")} == {
        "num_completions": 1,
        "num_generated_tokens": 12,
    }
    text = server.get("/metrics").body.decode()
    assert f'adapter_num_completions_total{{adapter="two",model_name="tiny"}} {after["num_completions"]}.0' in text
    assert 'adapter_slot_loads_total{model_name="tiny"}' in text
    asked = {
        "/v1/chat/completions": (CHAT, lambda body: body["choices"][0]["message"]["content"]),
        "/v1/messages": (CHAT, lambda body: body["content"][0]["text"]),
        "/v1/responses": (
            {"input": "Hello", "max_output_tokens": 8, "temperature": 0},
            lambda body: body["output"][0]["content"][0]["text"],
        ),
        "/api/chat": (
            {"messages": CHAT["messages"], "options": {"num_predict": 8, "temperature": 0}, "stream": False},
            lambda body: body["message"]["content"],
        ),
    }
    found = {}
    for path, (body, read) in asked.items():
        texts = {}
        for name in ("tiny", "one", "two"):
            sent = f"{name}:latest" if path.startswith("/api/") else name
            reply = server.post(path, {**body, "model": sent})
            assert (reply.status, reply.json["model"]) == (200, sent), reply.json
            texts[name] = read(reply.json)
        found[path] = texts
    assert all(len(set(texts.values())) == 3 for texts in found.values()), found
    assert len({tuple(texts.values()) for texts in found.values()}) == 1, found


def test_a_stream_says_which_adapter(server: Any) -> None:
    reply = server.post("/v1/chat/completions", {**CHAT, "model": "two", "stream": True})
    assert {event["model"] for event in reply.events if isinstance(event, dict)} == {"two"}


def test_loading_replacing_and_unloading(server: Any, adapters: list[Path]) -> None:
    first, second = tokens(server, model="one"), tokens(server, model="two")
    card = load(server, "new", adapters[0])
    assert (card.status, card.json["id"], card.json["parent"]) == (200, "new", "tiny")
    assert tokens(server, model="new") == first
    taken = load(server, "new", adapters[1])
    assert (taken.status, taken.error["param"]) == (400, None) and "is loaded" in taken.error["message"]
    assert load(server, "new", adapters[1], load_inplace=True).status == 200
    assert tokens(server, model="new") == second
    assert unload(server, "new").status == 200
    assert (server.post("/v1/completions", {**COMPLETION, "model": "new"})).status == 404
    gone = unload(server, "new")
    assert (gone.status, gone.error["code"]) == (404, "model_not_found")


def test_what_is_wrong_is_said(server: Any, adapters: list[Path], tiny: Path, tmp_path: Path) -> None:
    unknown = server.post("/v1/completions", {**COMPLETION, "model": "onee"})
    assert unknown.status == 404 and "one" in unknown.error["message"]
    cases = {
        "is not a folder": load(server, "x", tmp_path / "none"),
        "adapter_config.json": load(server, "x", tiny),
        "is the model's own name": load(server, "tiny", adapters[0]),
        "lora_path": server.post("/v1/load_lora_adapter", {"lora_name": "x"}),
        "There is no draft head": load(server, "x", adapters[0], head_path=str(tmp_path / "none")),
    }
    for words, reply in cases.items():
        assert reply.status == 400 and words in reply.error["message"], reply.json
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        evil = {"Origin": "http://evil.example", "Content-Type": "application/json"}
        assert server.post(path, b"{}", headers=evil).status == 403
        assert server.post(path, b"{}", headers={"Content-Type": "text/plain"}).status == 415


def test_without_admin_nobody_loads(tiny: Path, tmp_path: Path, serving_process: Any, adapters: list[Path]) -> None:
    with serving_process(tiny, tmp_path) as server:
        assert load(server, "x", adapters[0]).status == 404
    (other := tmp_path / "other").mkdir()
    with serving_process(tiny, other, "--admin") as server:
        off = load(server, "x", adapters[0])
        assert off.status == 400 and "takes no adapters" in off.error["message"]


def test_changes_beside_streams_lose_and_mix_nothing(server: Any, adapters: list[Path]) -> None:
    """200 rounds of loading, replacing and unloading while 16 clients ask: each gets the answer of one adapter or of
    the other, whole, or is told that there is none."""
    wanted = [tokens(server, model=name) for name in ("one", "two")]
    plain, ends, wrong = tokens(server), threading.Event(), list[Any]()
    counts = [0, 0]

    def ask(number: int) -> None:
        for i in itertools.count():
            if ends.is_set():
                return
            name = (None, "changing", "one", "two")[(number + i) % 4]
            reply = server.post("/v1/completions", {**COMPLETION, "model": name})
            if reply.status == 404 and name == "changing":
                counts[1] += 1
                continue
            found = reply.json["choices"][0]["token_ids"] if reply.status == 200 else reply.json
            expected = {None: [plain], "one": wanted[:1], "two": wanted[1:], "changing": wanted}[name]
            counts[0] += 1
            if found not in expected:
                wrong.append((name, found))

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for client in clients:
        client.start()
    try:
        for i in range(200):
            assert load(server, "changing", adapters[i % 2], load_inplace=True).status == 200
            if i % 3 == 2:
                assert unload(server, "changing").status == 200
    finally:
        ends.set()
        for client in clients:
            client.join()
    assert wrong == [] and counts[0] > 200, counts
    unload(server, "changing")
    server.until(server.is_idle)
    assert [each["id"] for each in server.get("/v1/models").json["data"]] == ["tiny", "one", "two"]


def test_the_next_engine_is_given_the_heads_that_are_still_there(adapters: list[Path], tmp_path: Path) -> None:
    (head := tmp_path / "head").mkdir()
    own = {"rank": 4, "base": "", "num_bytes": 1, "digest": "00"}
    infos = {
        name: AdapterInfo(name=name, path=str(adapters[0]), head=str(folder), is_pinned=name == "two", **own)
        for name, folder in {"one": head, "two": head, "three": tmp_path / "gone"}.items()
    }
    last = SimpleNamespace(ready=SimpleNamespace(max_loras=5), adapters=infos, _options={})
    given: Any = Supervisor._engine_options(last)  # type: ignore[arg-type]
    at = adapters[0]
    assert given["lora"] == [f"one={at},head={head}", f"two={at},pinned,head={head}", f"three={at}"]


def test_an_engine_that_comes_back_has_them_again(
    tiny: Path, adapters: list[Path], tmp_path: Path, serving_process: Any
) -> None:
    lost = shutil.copytree(adapters[2], tmp_path / "lost")
    (folder := tmp_path / "served").mkdir()
    with serving_process(tiny, folder, "--lora", f"one={adapters[0]}", "--admin") as server:
        assert load(server, "late", adapters[1], pinned=True).status == 200
        assert load(server, "lost", lost).status == 200
        before = [tokens(server, model=name) for name in (None, "one", "late")]
        shutil.rmtree(lost)
        os.kill(server.engine_pid, signal.SIGKILL)
        server.until(lambda: server.get("/health").status != 200)
        server.wait_until_ready()
        assert [tokens(server, model=name) for name in (None, "one", "late")] == before
        assert [each["id"] for each in server.get("/v1/models").json["data"]][1:] == ["one", "late"]
        assert "'lost'" in server.said
