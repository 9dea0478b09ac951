"""The draft heads that come along: each fits its target, drafts for it unnamed, and has learned something."""

from __future__ import annotations

from pathlib import Path

import pytest

from specserve import LLM, SamplingParams
from specserve.models.heads import zoo
from specserve.models.heads.formats import read_head
from specserve.models.heads.origin import TargetOrigin

HEADS = zoo.heads()
PROMPTS = ["What is the capital of France?", "Write a function that adds two numbers.", "Count from one to ten."]


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.folder.name)
def test_a_head_is_small_and_says_how_it_was_made(head: zoo.ZooHead) -> None:
    assert sum(file.stat().st_size for file in head.folder.iterdir()) < 12e6
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
