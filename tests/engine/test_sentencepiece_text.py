"""Text of models whose tokenizer is a SentencePiece model: streamed, stopped and constrained, with drafts, and with
characters that exist only as tokens of single bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from specserve import LLM, SamplingParams
from specserve.structured.spec import Structured
from specserve.testing import write_tiny_model
from tests.checkpoint.sentencepiece_models import trained

RARE = "ёж👩🏽日本"  # in bytes alone: but for the last two they are in no sentence
KINDS = [
    pytest.param((kind, prefix), id=f"{kind}-{'prefix' if prefix else 'plain'}")
    for kind in ("bpe", "unigram")
    for prefix in (True, False)
]


@pytest.fixture(scope="module", params=KINDS)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    kind, prefix = request.param
    home, folder = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("model")
    write_model(folder, trained(kind, True, add_dummy_prefix=prefix))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECSERVE_HOME", str(home))
        with LLM(str(folder), device="cpu", kv_cache_gib=0.01, threads=1, max_model_len=256, drafter="ngram") as llm:
            yield llm


def write_model(folder: Path, tokenizer: bytes) -> None:
    write_tiny_model(folder, "llama", vocab_size=512, num_hidden_layers=1)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    (folder / "tokenizer.model").write_bytes(tokenizer)


def texts_of(llm: LLM, params: SamplingParams) -> set[str]:
    """Of one prompt with drafts and without."""
    prompt = f"the cat {RARE}"
    answers = [llm.generate(prompt, params, drafter=drafter)[0].outputs[0] for drafter in ("ngram", "none")]
    assert answers[0].token_ids == answers[1].token_ids
    return {answer.text for answer in answers}


@pytest.mark.parametrize("seed", range(4))
def test_text_is_the_bytes_of_its_tokens_however_it_arrives(llm: LLM, seed: int) -> None:
    params = SamplingParams(max_tokens=60, temperature=2.0, seed=seed, ignore_eos=True)
    answer = llm.generate(f"the cat {RARE}", params)[0].outputs[0]
    visible = [token for token in answer.token_ids if token not in llm.tokenizer.special_ids]
    spelled = b"".join(map(llm.tokenizer.token_bytes, visible)).decode("utf-8", "replace")
    assert answer.text == spelled and "\u2581" not in spelled
    assert texts_of(llm, params) == {spelled}
    parts = [chunk.text for chunk in llm.stream(f"the cat {RARE}", params)]
    assert "".join(parts) == spelled and len(parts) > 1


@pytest.mark.parametrize("seed", range(3))
def test_a_regular_expression_holds_in_characters_made_of_bytes(llm: LLM, seed: int) -> None:
    pattern = r"(ё|ж|👩🏽|日本| кот){3,6}\."
    params = SamplingParams(max_tokens=120, temperature=1.5, seed=seed, structured=Structured.regex(pattern))
    (text,) = texts_of(llm, params)
    assert re.fullmatch(pattern, text)


@pytest.mark.parametrize("seed", range(3))
def test_a_json_schema_holds_in_characters_made_of_bytes(llm: LLM, seed: int) -> None:
    values = ["ёж 👩🏽", "日本  語", "\u2581"]
    schema = {
        "type": "object",
        "properties": {"имя": {"enum": values}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["имя", "n"],
        "additionalProperties": False,
    }
    params = SamplingParams(max_tokens=160, temperature=1.5, seed=seed, structured=Structured.json(schema))
    (text,) = texts_of(llm, params)
    found = json.loads(text)
    assert found["имя"] in values and 0 <= found["n"] <= 9 and len(found) == 2


def test_a_stop_string_may_end_inside_characters_made_of_bytes(llm: LLM) -> None:
    params = SamplingParams(max_tokens=80, seed=1, stop=["ж👩"], structured=Structured.regex("кот ёж👩🏽 日本"))
    assert texts_of(llm, params) == {"кот ё"}


def test_a_prompt_that_ends_in_a_space_continues_there(llm: LLM) -> None:
    """What follows is text as it stands: no space is put before it, and none is taken away."""
    params = SamplingParams(max_tokens=40, seed=1, structured=Structured.regex("  ёж  a"))
    (answer,) = llm.generate("the ", params)
    assert answer.outputs[0].text == "  ёж  a"
