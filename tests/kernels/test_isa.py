"""The instruction set: who chooses it, what it decides, and that one that is not there is refused."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve.cli.main import run
from specserve.config import EngineConfig
from specserve.doctor import examine
from specserve.errors import ConfigError
from specserve.kernels import reference
from specserve.llm import LLM
from specserve.ops import choice
from specserve.ops.isa import VARIABLE, choose_isa
from specserve.runtime.executor import local
from specserve.testing import write_tiny_model
from specserve.types import SamplingParams

CPU = torch.device("cpu")
REQUIRED = os.environ.get("SPECSERVE_REQUIRE_NATIVE") == "1"
needs_native = pytest.mark.skipif(
    importlib.util.find_spec("specserve.kernels._native") is None and not REQUIRED,
    reason="Built without native kernels.",
)


@pytest.fixture(autouse=True)
def nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


def available() -> list[str]:
    found: list[str] = importlib.import_module("specserve.kernels.cpu").instruction_sets()
    return found


def test_an_option_then_the_environment_then_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ["avx512", "avx2", "portable"]
    assert choose_isa("auto", found, "some") == "avx512"
    monkeypatch.setenv(VARIABLE, "avx2")
    assert choose_isa("auto", found, "some") == "avx2"
    assert choose_isa("portable", found, "some") == "portable"
    monkeypatch.setenv(VARIABLE, "auto")
    assert choose_isa("auto", found, "some") == "avx512"
    monkeypatch.setenv(VARIABLE, "")
    assert choose_isa("auto", found, "some") == "avx512"


def test_one_that_is_not_there_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--isa is avx512, .* some kernels .*: avx2, portable\."):
        choose_isa("avx512", ["avx2", "portable"], "some")
    with pytest.raises(ConfigError, match="Only those of CPUs have any"):
        choose_isa("avx2", [], "some")
    assert choose_isa("auto", [], "some") == ""
    monkeypatch.setenv(VARIABLE, "avx512")
    with pytest.raises(ConfigError, match="SPECSERVE_ISA is avx512"):
        choose_isa("auto", ["portable"], "some")


def test_a_name_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--isa: .*'avx3'.* avx2"):
        EngineConfig(isa="avx3")
    monkeypatch.setenv(VARIABLE, "avx3")
    with pytest.raises(ConfigError, match=r"SPECSERVE_ISA: .*'avx3'.* avx2"):
        choice.choose_ops(CPU, "auto", "auto", 1)


@needs_native
def test_it_decides_the_automatic_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    for isa in available():
        monkeypatch.setenv(VARIABLE, isa)
        ops: Any = choice.choose_ops(CPU, "auto", "auto", 1)
        assert (ops.instruction_set, ops.quantization) == (isa, "int8")
        assert ops.dtype == (torch.bfloat16 if isa == "avx512" else torch.float32)
        assert ops.kv_dtype == (torch.float16 if isa in ("avx_vnni", "avx2") else ops.dtype)
        for dtype in (torch.bfloat16, torch.float32):
            asked: Any = choice.choose_ops(CPU, str(dtype).removeprefix("torch."), "int8", 1)
            assert asked.dtype == asked.kv_dtype == dtype, "who asks for it gets it"


@needs_native
def test_the_environment_decides_for_kernels_and_engines_alike(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a direct call of Kernels and the SDK take, and where an engine says so."""
    module: Any = importlib.import_module("specserve.kernels.cpu")
    monkeypatch.setenv(VARIABLE, "portable")
    assert module.Kernels(torch.float32, "none", 1).instruction_set == "portable"
    with LLM(str(tiny), threads=1, kv_cache_gib=0.01) as llm:
        assert (local(llm.engine.executor).runner.ops.instruction_set, llm.dtype) == ("portable", "float32")
        assert "(cpu kernels, portable)" in llm.summary
        assert llm.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids
    with LLM(str(tiny), threads=1, kv_cache_gib=0.01, isa=available()[0]) as llm:
        assert local(llm.engine.executor).runner.ops.instruction_set == available()[0], (
            "an option wins over the environment"
        )


@needs_native
def test_flags_environment_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def shown(*flags: str) -> str:
        assert run(["doctor", *flags]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  instruction set ")]
        return line.split()[2]

    assert shown() == available()[0]
    Path("specserve.toml").write_text('isa = "portable"\n', "utf-8")
    assert shown() == "portable"
    monkeypatch.setenv(VARIABLE, available()[0])
    assert shown() == available()[0], "the environment wins over the file"
    assert shown("--isa", "portable") == "portable"
    assert run(["doctor", "--isa", "sse9"]) == 2
    assert "portable" in capsys.readouterr().err


def test_the_reference_has_what_torch_has(without_native: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    for dtype, quantization in (("auto", "auto"), ("float32", "none")):
        ops = choice.choose_ops(CPU, dtype, quantization, 1, "avx2")
        assert (ops.name, ops.instruction_set, ops.dtype) == ("reference", "avx2", torch.float32)
    with pytest.raises(ConfigError, match=r"avx512, which the reference kernels .*: avx2\."):
        choice.choose_ops(CPU, "auto", "auto", 1, "avx512")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert reference.instruction_sets() == ["portable"]


def test_doctor_refuses_what_is_not_there(tiny: Path, without_native: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    with pytest.raises(ConfigError, match="avx512"):
        examine(str(tiny), "avx512")
    rows = dict(next(section for section in examine(str(tiny)) if section.title == "Kernels").rows)
    assert rows["instruction set"].startswith("avx2 ")


@pytest.mark.parametrize("multiplies", [True, False])
def test_the_references_bfloat16_needs_no_products_of_it(monkeypatch: pytest.MonkeyPatch, multiplies: bool) -> None:
    """Where oneDNN has no bfloat16 products they are those of float32, of the same rounded numbers: the same results
    but for the rounding of a sum. Rows of 4 and of 32 are the same bits either way."""
    if multiplies and not reference._multiplies(torch.bfloat16):
        pytest.skip("oneDNN does not multiply bfloat16 here.")
    monkeypatch.setattr(reference, "_multiplies", lambda dtype: multiplies)
    ops = reference.Kernels(CPU, torch.bfloat16)
    assert ops.weight_dtype == (torch.bfloat16 if multiplies else torch.float32)
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(32, 96, generator=generator).bfloat16(), torch.randn(50, 96, generator=generator)
    bias = torch.randn(50, generator=generator)
    packed = ops.pack(weight, bias)
    whole = ops.linear(x, packed)
    right = x.double() @ weight.bfloat16().double().T + bias.bfloat16().double()
    assert whole.dtype == torch.bfloat16
    torch.testing.assert_close(whole.double(), right, rtol=2.0**-8, atol=1e-2)
    assert torch.equal(ops.linear(x[8:12], packed), whole[8:12])
