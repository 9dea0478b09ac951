"""benchmarks/gpu_engine.py, on the CPU and small: every section has its figures, and a text that changes is told."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specserve.bench import random_target
from specserve.testing import tiny_config, write_tiny_model

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def program() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("gpu_engine")
    sys.path.remove(str(FOLDER))
    for name in ("gpu_engine", "vs_transformers"):
        del sys.modules[name]


@pytest.fixture
def small(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    sizes = {"ROWS": (1, 3), "CONCURRENCY": (1, 2), "NUM_PROMPTS": 3, "NUM_TOKENS": 8, "CONTEXT": 40, "REPEATS": 2}
    for name, value in {**sizes, "MODEL_LEN": 2048, "SHAPES": ("tiny",), "WEIGHTS": program.WEIGHTS[:1]}.items():
        monkeypatch.setattr(program, name, value)
    monkeypatch.setitem(random_target.SHAPES, "tiny", tiny_config("llama"))
    return program


class Kept:
    """A report that keeps sections, and raises what they do."""

    def __init__(self) -> None:
        self.sections: dict[str, Any] = {}

    def section(self, name: str, measure: Callable[[], Any]) -> None:
        if not name.startswith("attention"):  # a GPU's
            self.sections[name] = measure()


def test_sections_have_figures(small: ModuleType, tmp_path: Path) -> None:
    report = Kept()
    small.measure_engines(report, str(write_tiny_model(tmp_path / "tiny", "llama", seed=3)), "cpu")
    own, peers, shape = (report.sections[name] for name in ("engine bfloat16", "transformers", "shape tiny"))
    assert own["steps"]["rows"] == [1, 3]
    assert [min(each.values()) > 0 for each in report.sections["ahead"].values()] == [True, True]
    assert [(cell["concurrency"], cell["temperature"]) for cell in own["grid"]["cells"][::2]] == [
        (1, 0.0), (1, 0.8), (2, 0.0), (2, 0.8),
    ]  # fmt: skip
    assert {cell["repeats"] for cell in own["grid"]["cells"]} == {2}
    assert peers["ratio"].keys() == {"transformers", "transformers, compiled"}
    assert min(peers["tokens_per_second"].values()) > 0
    assert [each["cost"] for each in shape["drafters"]] == ["0", "0.08"]
