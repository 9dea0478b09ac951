"""Sampling values of a checkpoint: where they are read, which requests get them, and that they are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specserve.checkpoint.generation_config import stated_by
from specserve.errors import ConfigError
from specserve.server.http.routes import ROUTES
from specserve.server.openapi import document
from specserve.server.wire.anthropic_api.requests import MessagesRequest
from specserve.server.wire.fields import Limits
from specserve.server.wire.openai.requests import ChatCompletionRequest, CompletionRequest, read
from specserve.server.wire.openai.responses import ResponsesRequest
from specserve.server.wire.translated import read_translated
from specserve.types import SamplingParams

STATED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
WHOLE = {**STATED, "min_p": None, "do_sample": True, "max_new_tokens": 99, "eos_token_id": 2}
LIMITS = Limits(vocab_size=1000, max_model_len=256, sampling=tuple(STATED.items()))
MESSAGES = [{"role": "user", "content": "a"}]


def written(folder: Path, content: Any, name: str = "generation_config.json") -> Path:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder / name


def params(api: str, **fields: Any) -> SamplingParams:
    if api == "completions":
        return read(CompletionRequest, json.dumps({"prompt": "a", **fields}).encode(), LIMITS).sampling_params
    own: dict[str, Any] = {"input": "a"} if api == "responses" else {"messages": MESSAGES, "max_tokens": 5}
    body = json.dumps({**own, **fields}).encode()
    if api == "chat":
        return read(ChatCompletionRequest, body, LIMITS).sampling_params
    kind: Any = ResponsesRequest if api == "responses" else MessagesRequest
    return read_translated(kind, body, LIMITS).as_chat(LIMITS).sampling_params


def values(found: SamplingParams) -> dict[str, Any]:
    return {name: getattr(found, name) for name in STATED}


def test_a_model_states_them_or_a_file_or_nobody(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert stated_by("auto", tmp_path) == {}
    written(tmp_path, WHOLE)
    file = written(tmp_path / "other", {"temperature": 0.1})
    assert stated_by("auto", tmp_path) == STATED
    assert stated_by("none", tmp_path) == {}
    assert stated_by(str(tmp_path / "other"), tmp_path) == {"temperature": 0.1}
    assert stated_by(str(file), tmp_path) == {"temperature": 0.1}


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "not valid JSON"), ([1], "must hold an object"), ({"temperature": -1}, "temperature"),
     ({"top_k": "many"}, "top_k"), ({"top_p": True}, "top_p")],
)  # fmt: skip
def test_what_is_wrong_with_them_is_told_at_start(tmp_path: Path, content: Any, words: str) -> None:
    file = written(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        stated_by("auto", tmp_path)
    assert words in str(caught.value)
    assert f"--generation-config {file}: " in str(caught.value)
    assert "--generation-config none" in str(caught.value)


def test_a_file_that_is_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        stated_by(str(tmp_path / "nowhere.json"), tmp_path)


@pytest.mark.parametrize("api", ["completions", "chat", "responses", "messages"])
def test_requests_get_what_they_leave_out(api: str) -> None:
    assert values(params(api)) == STATED
    assert values(params(api, temperature=None, top_p=0.5)) == {**STATED, "top_p": 0.5}
    plain = values(SamplingParams())
    assert values(params(api, temperature=0)) == {**plain, "temperature": 0}, "greedy is greedy"
    assert values(params(api, temperature=1)) == {**STATED, "temperature": 1}


def test_a_response_tells_what_was_used() -> None:
    asked = read_translated(ResponsesRequest, b'{"input": "a"}', LIMITS)
    assert {name: asked.echo()[name] for name in ("temperature", "top_p")} == {"temperature": 0.6, "top_p": 0.95}


def test_the_document_has_them_as_defaults() -> None:
    schemas = document(ROUTES, "tiny", LIMITS, [], False)["components"]["schemas"]
    for kind in ("ChatCompletionRequest", "CompletionRequest"):
        fields = schemas[kind]["properties"]
        assert {name: fields[name]["default"] for name in STATED} == STATED
        assert (fields["min_p"]["default"], fields["seed"]["default"]) == (0.0, None)
    assert schemas["MessagesRequest"]["properties"]["temperature"]["default"] == 0.6
