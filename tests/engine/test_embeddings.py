"""Embeddings: the last token's final state, as transformers has it, whatever runs beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from specserve import LLM, SamplingParams
from specserve.checkpoint.pooling import read_pooling
from specserve.engine.request import Request
from specserve.errors import InputError, ModelError
from specserve.testing import check_integrity, write_tiny_model

TEXTS: list[Any] = ["the cat sat on the mat", "and then", [5, 9, 31, 7], "x " * 60]


def write_pooling(folder: Path, mode: str = "lasttoken", *kinds: str) -> Path:
    """What sentence-transformers saves beside a model."""
    listed = ["Transformer", "Pooling", *(kinds or ("Normalize",))]
    modules = [{"idx": i, "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(listed)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{each}": each == mode for each in ("cls_token", "mean_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))
    return folder


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pooling(write_tiny_model(tmp_path_factory.mktemp("embedder"), "qwen3"))


def test_they_are_transformers_last_states(embedder: Path) -> None:
    model = transformers.AutoModel.from_pretrained(embedder, dtype=torch.float32).eval()
    with LLM(str(embedder), dtype="float32", max_model_len=256) as llm:
        found = llm.embed(TEXTS)
        for vector, text in zip(found, TEXTS, strict=True):
            ids = llm.tokenizer.encode(text) if isinstance(text, str) else text
            with torch.inference_mode():
                state = model(torch.tensor([ids])).last_hidden_state[0, -1]
            np.testing.assert_allclose(vector, torch.nn.functional.normalize(state, dim=0).numpy(), atol=1e-5)
        short = llm.embed(TEXTS[0], dimensions=16)[0]
        np.testing.assert_allclose(short, found[0][:16] / np.linalg.norm(found[0][:16]), rtol=1e-5)
        for wrong in (0, 65):
            with pytest.raises(InputError, match=f"dimensions is {wrong}; the model has 64"):
                llm.embed("a", dimensions=wrong)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_they_do_not_depend_on_company(embedder: Path, quantization: str) -> None:
    """In chunks, preempted, from prefixes, beside requests that generate with drafts."""
    options: dict[str, Any] = {"quantization": quantization, "max_model_len": 256}
    with LLM(str(embedder), prefix_caching=False, **options) as llm:
        alone = [llm.embed(text)[0].tobytes() for text in TEXTS]
    block = 16 * 3 * 2 * 2 * 24 * 2  # bytes: tokens, layers, keys and values, heads, their size, of two bytes each
    crowded = {"max_num_batched_tokens": 20, "max_num_seqs": 8, "kv_cache_gib": 18 * block / 2**30, "drafter": "ngram"}
    with LLM(str(embedder), adaptive=False, **options, **crowded) as llm, llm.exclusive() as engine:
        pooling = read_pooling(embedder)
        assert pooling is not None
        found: dict[str, bytes] = {}
        for turn in range(2):
            params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
            for i in range(3):
                engine.add(Request(id=f"text {turn} {i}", prompt_ids=[5, 9, 5, 9, 5, 9, i], params=params))
            for _ in range(60):  # until they leave little of the cache
                engine.step()
            for i, text in enumerate(TEXTS):
                ids = llm.tokenizer.encode(text) if isinstance(text, str) else text
                one = SamplingParams(temperature=0, max_tokens=1)
                engine.add(Request(id=f"{turn} {i}", prompt_ids=ids, params=one, embeds=True))
            while engine.has_work:
                for event in engine.step():
                    assert event.error is None
                    if event.embedding is not None:
                        found[event.request_id] = pooling.embedding(event.embedding).tobytes()
                check_integrity(engine.cache, [*engine.scheduler.running, *engine.scheduler.waiting])
        assert engine.counters.num_preemptions > 0
    assert found == {f"{turn} {i}": alone[i] for turn in range(2) for i in range(len(TEXTS))}


def test_models_that_are_not_made_for_it_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "llama")
    assert read_pooling(folder) is None
    with LLM(str(folder)) as llm, pytest.raises(ModelError, match="was not made for embeddings"):
        llm.embed("a")
    with pytest.raises(ModelError, match=r"sets pooling_mode_mean_tokens; of causal models only"):
        read_pooling(write_pooling(folder, "mean_tokens"))
    with pytest.raises(ModelError, match=r"has 'Dense'"):
        read_pooling(write_pooling(folder, "lasttoken", "Dense"))
    (folder / "modules.json").write_text('{"a": 1}')
    with pytest.raises(ModelError, match="must hold a list"):
        read_pooling(folder)
    (folder / "modules.json").write_text("[3]")
    with pytest.raises(ModelError, match="is no list of modules"):
        read_pooling(folder)
    write_pooling(folder)
    (folder / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ModelError, match="1_Pooling"):
        read_pooling(folder)


def test_without_a_norm_a_state_stays_as_long_as_it_is(embedder: Path) -> None:
    plain = read_pooling(embedder)
    assert plain is not None and plain.normalizes
    numbers = np.array([3.0, 4.0], np.float32)
    assert plain.embedding(numbers.tobytes()).tolist() == pytest.approx([0.6, 0.8])
    assert type(plain)(False).embedding(numbers.tobytes()).tolist() == [3.0, 4.0]
    assert type(plain)(False).embedding(numbers.tobytes(), 1).tolist() == [1.0]
    assert plain.embedding(np.zeros(2, np.float32).tobytes()).tolist() == [0.0, 0.0]
