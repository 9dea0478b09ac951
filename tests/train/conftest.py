"""A tiny target with a few prompts, and heads for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specserve.testing import write_tiny_model
from specserve.train.config import TrainingOptions

CPU = {"device": "cpu", "dtype": "float32", "quantization": "none", "threads": 2}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("train") / "tiny", "llama", seed=3)


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"prompt": f"Tell of the {n}th one.", "category": "odd" if n % 2 else "even"} for n in range(24)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


@pytest.fixture
def options(tmp_path: Path, prompt_file: Path) -> Callable[..., TrainingOptions]:
    """Options of a run of a few steps, with some of them replaced."""

    def make(**own: Any) -> TrainingOptions:
        few = {
            "prompts": prompt_file,
            "out": tmp_path / "head",
            "max_tokens": 16,
            "max_length": 96,
            "temperatures": (0.0, 1.0),
            "streams": 4,
            "draft_vocab_size": 200,
            "depth": 3,
            "anchors": 4,
            "bigram_rank": 8,
            "epochs": 2.0,
            "batch_tokens": 256,
            "evaluate_every": 5,
            "checkpoint_minutes": 0.0,
        }
        return TrainingOptions(**{**few, **own})

    return make


@pytest.fixture(scope="session")
def target(tiny: Path) -> Any:
    """The tiny target on a CPU, for answers of up to 96 tokens."""
    from specserve.train.target import Target

    return Target(tiny, 96, **CPU)


@pytest.fixture
def engine() -> dict[str, Any]:
    """How the target runs."""
    return dict(CPU)
