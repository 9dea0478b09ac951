"""Draft heads of the real model: those that come along fit, draft unnamed and have learned something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specserve import LLM, SamplingParams
from specserve.models.heads import zoo
from specserve.models.heads.formats import read_head, write_head
from specserve.models.heads.origin import TargetOrigin
from specserve.models.heads.spec import BlockSpec, EagleSpec, TargetShape
from specserve.models.heads.speculators import Verifier
from specserve.testing import llama_spec
from specserve.testing.heads import random_weights

HEADS = zoo.heads()
PROMPTS = ["What is the capital of France?", "Write a function that adds two numbers.", "Count from one to ten."]


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.folder.name)
def test_a_head_is_small_and_says_how_it_was_made(head: zoo.ZooHead) -> None:
    assert sum(file.stat().st_size for file in head.folder.iterdir()) < 17e6
    assert read_head(head.folder).spec.kind == head.kind
    recipe = (head.folder / "RECIPE.md").read_text("utf-8")
    assert f"specserve train {head.kind} --prompts" in recipe
    assert " /" not in recipe, "a path of the machine that trained it"


def test_no_two_heads_are_of_one_kind_for_one_target() -> None:
    assert len({(head.kind, head.fingerprint) for head in HEADS}) == len(HEADS)


def test_heads_of_the_real_model_draft_unnamed(smollm2: Path) -> None:
    """More than one of twelve draft tokens is accepted; of a head that has learned nothing, one of thousands."""
    own = TargetOrigin(smollm2).fingerprint()
    kinds = [head.kind for head in HEADS if head.fingerprint == own]
    assert kinds
    answers = {}
    greedy = SamplingParams(max_tokens=32, temperature=0)
    for drafter in ("none", *kinds):
        with LLM(str(smollm2), drafter=drafter, adaptive=False, kv_cache_gib=0.1, max_model_len=256) as llm:
            talks = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
            found = [each.outputs[0] for each in llm.chat(talks, greedy)]
        answers[drafter] = [each.token_ids for each in found]
        if drafter != "none":
            drafted = sum(each.stats.num_draft_tokens for each in found)
            assert drafted > 60
            assert 12 * sum(each.stats.num_accepted_tokens for each in found) > drafted
    assert all(each == answers["none"] for each in answers.values())


@pytest.mark.parametrize("kind", ["eagle", "block"])
def test_a_head_that_knows_nothing_changes_nothing(smollm2: Path, tmp_path: Path, kind: str) -> None:
    shape = TargetShape(hidden_size=576, num_layers=30, vocab_size=49_152)
    layers = llama_spec(
        vocab_size=2048, hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64, intermediate_size=512, max_len=2048
    )
    common: dict[str, Any] = {"target": shape, "layers": layers, "hidden_layers": (1, 14, 26), "has_head": True}
    spec = EagleSpec(version=3, **common) if kind == "eagle" else BlockSpec(block_size=6, mask_token_id=0, **common)
    write_head(tmp_path, spec, random_weights(spec.shapes()), torch.arange(2048), Verifier("smollm2-135m"))
    prompts = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time there was"]
    params = [SamplingParams(temperature=t, seed=3, max_tokens=24) for t in (0.0, 1.0, 0.0)]
    outputs, drafted = [], 0
    for options in ({"drafter": "none"}, {"drafter": kind, "drafter_options": {"head": str(tmp_path)}}):
        with LLM(str(smollm2), adaptive=False, kv_cache_gib=0.1, max_model_len=256, **options) as llm:
            found = [each.outputs[0] for each in llm.generate(prompts, params)]
        outputs.append([each.token_ids for each in found])
        drafted = sum(each.stats.num_draft_tokens for each in found)
    assert outputs[0] == outputs[1]
    assert drafted > 100
