"""A server that drafts with a head: answers are those without it, and statistics say who drafted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specserve.models.heads.formats import write_head
from specserve.models.heads.spec import EagleSpec, TargetShape
from specserve.models.heads.speculators import Verifier
from specserve.testing import llama_spec, tiny_tokenizer, write_tiny_model
from specserve.testing.heads import random_weights

ASKED: list[dict[str, Any]] = [
    {"prompt": "the cat sat on the mat", "max_tokens": 24, "temperature": 0},
    {"prompt": [9, 8, 7] * 4, "max_tokens": 24, "temperature": 0.9, "seed": 7, "n": 3},
    {"prompt": "and then", "max_tokens": 12, "temperature": 0.8, "seed": 3, "guided_regex": "[a-f]{4,9}"},
]


@pytest.fixture(scope="module")
def server(serving_process: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("head")
    words = tiny_tokenizer().get_vocab_size()
    target = write_tiny_model(folder / "target", "llama", vocab_size=words)
    layers = llama_spec(
        vocab_size=40, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, max_len=512
    )
    shape = TargetShape(hidden_size=64, num_layers=3, vocab_size=words)
    spec = EagleSpec(target=shape, layers=layers, version=3, hidden_layers=(0, 1, 2), has_head=True)
    write_head(folder / "eagle", spec, random_weights(spec.shapes()), torch.arange(40), Verifier("tiny"))
    flags = "--drafter=auto", f"--drafter-options.head={folder / 'eagle'}", "--no-adaptive"
    with serving_process(target, folder, "--served-model-name=tiny", *flags, **{"max-num-seqs": 8}) as served:
        yield served


def said(server: Any, body: dict[str, Any], **more: Any) -> Any:
    free = {} if "guided_regex" in body else {"ignore_eos": True}
    reply = server.post("/v1/completions", {**body, **free, "return_token_ids": True, **more})
    assert reply.status == 200, reply.body
    return reply


@pytest.mark.parametrize("body", ASKED, ids=["greedy", "sampled", "grammar"])
def test_answers_are_those_without_it(server: Any, body: dict[str, Any]) -> None:
    plain = said(server, body, speculative={"drafter": "none"}).json["choices"]
    drafted = said(server, body).json
    assert drafted["choices"] == plain
    by_source = drafted["metrics"]["speculative_decoding"]["by_source"]
    assert by_source["eagle"]["num_draft_tokens"] > 0
    streamed: dict[int, list[int]] = {}
    for event in said(server, body, stream=True).events[:-1]:
        for choice in event["choices"]:
            streamed.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
    assert streamed == {choice["index"]: choice["token_ids"] for choice in plain}


def test_who_drafts(server: Any) -> None:
    assert server.get("/server_info").json["engine"]["drafter"] == "auto"
    assert b"specserve:source_num_draft_tokens_total{" in server.get("/metrics").body
    assert b'source="eagle"' in server.get("/metrics").body
    for name in ("eagle", "block"):
        asked = {**ASKED[0], "speculative": {"drafter": name}}
        assert server.post("/v1/completions", asked).status == 400, "who runs a model is the engine's to choose"
