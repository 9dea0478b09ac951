"""A model on two GPUs that are faked, each in a process of its own: texts are those of one, whatever drafts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve.checkpoint.weights import Weights
from specserve.errors import ConfigError, EngineError
from specserve.llm import LLM
from specserve.parallel import ranks
from specserve.testing import write_adapter, write_tiny_model
from specserve.types import SamplingParams

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, and perhaps not another")

OTHER = """
from specserve.parallel import rank
from specserve.registry import KERNELS
from specserve.testing import fake_cuda

with fake_cuda(index=1):
    KERNELS.find("triton").buckets = 1, 4, 16, 40
    rank.main()
"""
PROMPTS = ["Tell of the first one.", "Say it again, say it again, say it"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1, seed=3, top_p=0.9, max_tokens=12, ignore_eos=True),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("cuda") / "tiny", "llama", seed=3, tie_word_embeddings=False, num_hidden_layers=2
    )


@pytest.fixture
def two(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them."""
    plain = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        assert command[1:3] == ["-m", "specserve.parallel.rank"]
        return plain([sys.executable, "-c", OTHER, *command[3:]], **options)

    monkeypatch.setattr(ranks.subprocess, "Popen", start)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def engine(tiny: Path, size: int, **options: Any) -> LLM:
    chosen = {"dtype": "float32", "max_model_len": 96, "adaptive": False, "threads": 1, **options}
    return LLM(str(tiny), device="cuda", tensor_parallel_size=size, max_num_batched_tokens=48, **chosen)


def said(llm: LLM, **options: Any) -> list[list[int]]:
    outputs = llm.generate([each for each in PROMPTS for _ in PARAMS], PARAMS * len(PROMPTS), **options)
    return [output.outputs[0].token_ids for output in outputs]


def test_texts_are_those_of_one_gpu(tiny: Path, two: None, tmp_path: Path) -> None:
    shapes = {name: info.shape for name, info in Weights(tiny).infos.items()}
    write_adapter(tmp_path / "own", shapes, 4, ("q_proj", "o_proj", "down_proj", "lm_head"))
    lora = (f"own={tmp_path / 'own'}",)
    with engine(tiny, 1, drafter="none", lora=lora) as llm:
        plain, adapted = said(llm), said(llm, adapter="own")
    assert plain != adapted
    with engine(tiny, 2, drafter="none", lora=lora) as llm:
        assert "cuda:0" in llm.summary and "2 processes" in llm.summary
        assert said(llm) == plain
        assert said(llm, adapter="own") == adapted
        alone = [llm.generate([prompt], [params])[0].outputs[0].token_ids for prompt in PROMPTS for params in PARAMS]
        assert alone == plain
        for drafter in ("ngram", "recycle", "auto", "none"):  # of which some read what is captured anew in both
            llm.use_drafter(drafter)
            assert said(llm) == plain


def test_a_row_s_sum_is_in_one_order(tiny: Path, two: None) -> None:
    """Of bfloat16, where sums in another order would be seen."""
    with engine(tiny, 2, dtype="bfloat16", drafter="none") as llm:
        plain = said(llm)
        llm.use_drafter("auto")
        assert said(llm) == plain


def test_a_process_that_ends_is_told(tiny: Path, two: None) -> None:
    with engine(tiny, 2, drafter="none") as llm:
        said(llm)
        executor: Any = llm.engine.executor
        (process,) = executor._ranks._processes
        process.kill()
        process.wait()
        with pytest.raises(EngineError, match="Process 1 of the model has ended"):
            said(llm)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tensor_parallel_size": 3}, "size 3 takes cuda:0 to cuda:2, and torch sees cuda:0 to cuda:1 here"),
        ({"pipeline_parallel_size": 2}, "pipeline-parallel-size: processes with a GPU each divide layers"),
        ({"tensor_parallel_size": 2, "attention": "flash"}, "--attention flash: several GPUs compute it exactly"),
    ],
)
def test_what_gpus_do_not_do_is_refused(tiny: Path, two: None, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        LLM(str(tiny), device="cuda", dtype="float32", **options)
