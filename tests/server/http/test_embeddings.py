"""Embeddings over HTTP, in OpenAI's shapes and Ollama's."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specserve import LLM
from specserve.testing import write_tiny_model

MODULES = [{"type": f"sentence_transformers.models.{kind}"} for kind in ("Transformer", "Pooling", "Normalize")]
TEXTS = ["the cat sat", "on the mat", "and then"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("embedder"), "qwen3")
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    return folder


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[np.ndarray[Any, Any]]:
    with LLM(str(folder), threads=1, max_model_len=256) as llm:
        return list(llm.embed(TEXTS))


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory, serving_process: Any) -> Iterator[Any]:
    named = {"served-model-name": "embedder"}
    with serving_process(folder, tmp_path_factory.mktemp("served"), **named) as served:
        yield served
        served.until(served.is_idle)


def test_openais_shapes(server: Any, wanted: list[np.ndarray[Any, Any]]) -> None:
    reply = server.post("/v1/embeddings", {"model": "embedder", "input": TEXTS}).json
    assert [each["index"] for each in reply["data"]] == [0, 1, 2]
    assert (reply["object"], reply["model"], reply["data"][0]["object"]) == ("list", "embedder", "embedding")
    for entry, vector in zip(reply["data"], wanted, strict=True):
        assert np.array_equal(np.array(entry["embedding"], np.float32), vector)
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] > 3
    packed = server.post("/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"}).json
    assert np.array_equal(np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), np.float32), wanted[0])
    ids = server.post("/tokenize", {"prompt": TEXTS[0]}).json["tokens"]
    for sent in (ids, [ids]):
        (entry,) = server.post("/v1/embeddings", {"input": sent}).json["data"]
        assert np.array_equal(np.array(entry["embedding"], np.float32), wanted[0])
    short = server.post("/v1/embeddings", {"input": TEXTS[0], "dimensions": 8}).json["data"][0]["embedding"]
    assert len(short) == 8 and np.linalg.norm(short) == pytest.approx(1.0)


def test_ollamas_shapes(server: Any, wanted: list[np.ndarray[Any, Any]]) -> None:
    reply = server.post("/api/embed", {"model": "embedder:latest", "input": TEXTS}).json
    assert reply["model"] == "embedder:latest" and reply["prompt_eval_count"] > 3
    assert np.array_equal(np.array(reply["embeddings"], np.float32), np.stack(wanted))
    old = server.post("/api/embeddings", {"model": "embedder", "prompt": TEXTS[0]}).json
    assert np.array_equal(np.array(old["embedding"], np.float32), wanted[0])
    long = {"model": "embedder", "input": "the cat " * 400}
    assert len(server.post("/api/embed", long).json["embeddings"][0]) == 64
    assert server.post("/api/embed", {**long, "truncate": False}).status == 400
    assert "embedding" in server.post("/api/show", {}).json["capabilities"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": ["a"] * 129}, "input"),
        ({"input": [99999]}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 65}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a " * 400}, None),
    ],
)
def test_what_is_wrong_is_said(server: Any, body: dict[str, Any], param: str | None) -> None:
    reply = server.post("/v1/embeddings", body)
    assert reply.status == 400, reply.json
    assert param is None or reply.error["param"] == param
    assert server.post("/v1/embeddings", {"input": "a", "model": "other"}).status == 404
