"""A server whose paths have something before them where clients see them, with a chat template of the operator's, and a
model that states sampling values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from specserve.errors import ConfigError
from specserve.server.http.app import check_root_path
from specserve.server.http.context import CONTEXT, route_path
from specserve.testing import write_tiny_model

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %} {{ mood }}"
STATED = {"temperature": 0.7, "top_p": 0.9}


@pytest.fixture(scope="module")
def server(serving_process: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("proxy")
    model = write_tiny_model(folder / "model", "llama")
    (model / "generation_config.json").write_text(json.dumps({**STATED, "eos_token_id": 289}))
    (folder / "chat.jinja").write_text(TEMPLATE)
    flags = (
        "--served-model-name=tiny", "--root-path=/llm/v2", "--api-key=sk-1", f"--chat-template={folder / 'chat.jinja'}",
        '--default-chat-template-kwargs={"mood": "calm"}',
    )  # fmt: skip
    with serving_process(model, folder, *flags, key="sk-1") as served:
        yield served


@pytest.mark.parametrize("before", ["", "/llm/v2"])
def test_paths_are_known_with_and_without_what_is_before_them(server: Any, before: str) -> None:
    """Some proxies leave it there, some take it away."""
    assert server.get(f"{before}/v1/models").json["data"][0]["id"] == "tiny"
    assert server.get(f"{before}/v1/models/tiny").status == 200
    assert server.get(f"{before}/health").status == 200
    document = server.get(f"{before}/openapi.json").json
    assert document["servers"] == [{"url": "/llm/v2"}]
    assert "/v1/models" in document["paths"]
    assert b"<script>" in server.get(f"{before}/docs").body
    assert server.get(f"{before}/llm/v1/models").status == 404
    wrong = server.post(f"{before}/v1/messages", {"messages": []})
    assert (wrong.status, wrong.json["type"]) == (400, "error"), "in the words of its API"


def test_what_the_model_states_is_used_and_told(server: Any) -> None:
    told = server.get("/server_info").json
    assert told["sampling_defaults"] == STATED
    assert (told["options"]["generation_config"], told["options"]["root_path"]) == ("auto", "/llm/v2")
    body = {"prompt": "the cat", "max_tokens": 12, "seed": 5, "ignore_eos": True, "return_token_ids": True}

    def ids(**more: Any) -> Any:
        return server.post("/v1/completions", {**body, **more}).json["choices"][0]["token_ids"]

    assert ids() == ids(**STATED) != ids(temperature=1, top_p=1)


@pytest.mark.parametrize(
    ("values", "mood"), [({}, "calm"), ({"chat_template_kwargs": {"mood": "wild"}}, "wild"), ({"tools": []}, "calm")]
)
def test_the_template_is_the_operators(server: Any, values: dict[str, Any], mood: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **values}
    tokens = server.post("/tokenize", body).json["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json["prompt"] == f"user: hi {mood}"
    assert server.get("/tokenizer_info").json["chat_template"] == TEMPLATE
    reply = server.post("/v1/chat/completions", {**body, "max_tokens": 2, "ignore_eos": True, "return_token_ids": True})
    assert reply.json["prompt_token_ids"] == tokens


@pytest.mark.parametrize(
    ("root", "own"),
    [
        ("/v1", "/v1/chat/completions"),
        ("/v1/messages", "/v1/messages"),
        ("/v1/models/llm", "/v1/models"),
        ("/health/llm", "/health"),
        ("/docs", "/docs"),
    ],
)
def test_a_path_that_is_confused_with_the_servers_own_is_refused(root: str, own: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"--root-path is '{root}', and this server has {own} itself; .*such as /llm"
    ):
        check_root_path(root)


@pytest.mark.parametrize("root", ["", "/llm", "/v1/llm", "/v1/mess", "/healthy", "/api/v1"])
def test_others_stand_before_every_path(root: str) -> None:
    check_root_path(root)
    for path in ("/v1/messages", "/health", "/llm/v1/messages"):
        request: Any = SimpleNamespace(app={CONTEXT: SimpleNamespace(options=SimpleNamespace(root_path=root))})
        request.path = path
        assert route_path(request) == (path if root != "/llm" else path.removeprefix("/llm"))
        request.path = root + path
        assert route_path(request) == path
