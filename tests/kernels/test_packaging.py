"""The native module as it was built: where it lies, that only the kernels of an instruction set use it, and how old the
system's libraries may be."""

from __future__ import annotations

import importlib
import logging
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

import specserve.kernels
from specserve import LLM
from specserve.doctor import examine
from specserve.errors import ConfigError
from specserve.ops import choice
from specserve.testing import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
NEEDED = os.environ.get("SPECSERVE_REQUIRE_NATIVE") == "1"
# What the libraries of manylinux_2_28 have: glibc 2.28 and those of GCC 8.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (8, 0, 0)}


@pytest.fixture(scope="module")
def native() -> Path:
    """The file of the native module. Skips when it was not built; with SPECSERVE_REQUIRE_NATIVE=1 that fails."""
    try:
        return Path(str(importlib.import_module("specserve.kernels._native").__file__))
    except ModuleNotFoundError as error:
        if NEEDED:
            pytest.fail(f"SPECSERVE_REQUIRE_NATIVE=1, but: {error}")
        pytest.skip(f"Built without native kernels: {error}")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


def start(folder: Path) -> str:
    """What an engine says of itself."""
    with LLM(str(folder), threads=1, kv_cache_gib=0.01, max_model_len=160, drafter="none", adaptive=False) as llm:
        return llm.summary


@pytest.fixture(scope="module")
def objdump() -> str:
    """The program's path. Skips without it; with SPECSERVE_REQUIRE_NATIVE=1 that fails."""
    found = shutil.which("objdump")
    if found is None:
        assert not NEEDED, "SPECSERVE_REQUIRE_NATIVE=1, but there is no objdump (package binutils)"
        pytest.skip("There is no objdump (package binutils).")
    return found


def instructions(disassembly: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Pairs (function, mnemonic) of what `objdump -d --no-show-raw-insn` prints."""
    function = ""
    for line in disassembly:
        if heading := re.match(r"[0-9a-f]+ <(.+)>:$", line):
            function = heading[1]
        elif (operation := re.match(r"\s+[0-9a-f]+:\t(?:\{e?vex\} )?(\w+)", line)) is not None:
            yield function, operation[1]


def misplaced(disassembly: Iterable[str]) -> set[str]:
    """Functions with AVX instructions, all of which begin with a v, outside the namespaces avx2, avx512 and avx_vnni.
    What sets up a file's globals runs when the module is loaded, on every processor, whichever file that is."""
    return {
        function
        for function, mnemonic in instructions(disassembly)
        if mnemonic.startswith("v")
        and (function.startswith("_GLOBAL_") or not re.search(r"4avx2|6avx512|8avx_vnni", function))
    }


def test_it_is_not_in_the_source_tree(native: Path) -> None:
    assert native.parent.parts[-2:] == ("specserve", "kernels")
    assert not any(folder in native.parents for folder in (ROOT / "specserve", ROOT / "kernels"))


def test_its_missing_is_a_missing_module() -> None:
    with pytest.raises(ModuleNotFoundError, match=re.escape("specserve.kernels.absent")):
        importlib.import_module(f"{specserve.kernels.__name__}.absent")


def test_without_it_the_engine_takes_the_reference_or_says_what_it_lacks(without_native: None) -> None:
    cpu = torch.device("cpu")
    assert [choice.choose_ops(cpu, "auto", quantization, 1).name for quantization in ("auto", "none")] == [
        "reference"
    ] * 2
    for quantization in ("int8", "int4"):
        lacking = rf"--quantization {quantization}\. cpu needs specserve\.kernels\._native, .* C\+\+ compiler .*"
        with pytest.raises(ConfigError, match=f"{lacking} reference has no {quantization} weights: use --quantization"):
            choice.choose_ops(cpu, "auto", quantization, 1)


def test_an_engine_without_it_says_so_at_the_start(
    tiny: Path, without_native: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert "reference kernels" in start(tiny)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "cpu kernels were not built" in warning
    assert "keep weights in" in warning
    (kernels,) = [dict(section.rows) for section in examine(str(tiny)) if section.title == "Kernels"]
    assert kernels["not built"] == warning


def test_an_engine_with_it_has_nothing_to_say(tiny: Path, native: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert "cpu kernels" in start(tiny)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert not [name for section in examine(str(tiny)) for name, _ in section.rows if name == "not built"]


def test_one_that_cannot_be_loaded_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is there and broken must not make the engine slow in silence."""

    def broken(name: str) -> None:
        raise ImportError("undefined symbol", name="specserve.kernels._native", path="_native.so")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(ImportError, match="undefined symbol"):
        choice.choose_ops(torch.device("cpu"), "auto", "auto", 1)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="only x86 has several sets of instructions")
def test_wide_instructions_stay_in_their_kernels(native: Path, objdump: str) -> None:
    """Otherwise a processor without AVX dies of an illegal instruction in code that everybody runs: of an inline
    function the linker keeps one copy, and that may be the one compiled for AVX-512."""
    command = [objdump, "--disassemble", "--no-show-raw-insn", "--section=.text", str(native)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    with_avx = {function for function, mnemonic in instructions(lines) if mnemonic.startswith("v")}
    assert any("6avx512" in function for function in with_avx)
    assert any("4avx2" in function for function in with_avx)
    assert misplaced(lines) == set()


def test_misplaced_instructions_are_noticed() -> None:
    text = """
0000000000001000 <_ZN9specserve6avx5126linearEv>:
    1000:\tvaddps %zmm0,%zmm1,%zmm2
0000000000001010 <_ZN9specserve8portable6linearEv>:
    1010:\taddps  %xmm0,%xmm1
    1013:\tret
0000000000001020 <_ZNSt6vectorIfSaIfEE17_M_default_appendEm>:
    1020:\tpush   %rbp
    1021:\tvmovups %ymm0,(%rax)
0000000000001030 <_GLOBAL__sub_I_6avx512>:
    1030:\t{evex} vmovd %xmm0,%eax
"""
    assert misplaced(text.splitlines()) == {"_ZNSt6vectorIfSaIfEE17_M_default_appendEm", "_GLOBAL__sub_I_6avx512"}


def too_new(headers: str) -> set[str]:
    """Versions of libraries' symbols that `objdump -p` says a file needs and a manylinux_2_28 system does not have."""
    needed = re.findall(r"^ +0x[0-9a-f]{8} 0x[0-9a-f]{2} \d+ (\w+?)_([A-Z\d].*)$", headers, re.MULTILINE)
    assert needed
    return {
        f"{library}_{version}"
        for library, version in needed
        if not re.fullmatch(r"[\d.]+", version) or tuple(map(int, version.split("."))) > NEWEST[library]
    }


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="manylinux is about glibc")
def test_it_runs_with_older_system_libraries(native: Path, objdump: str) -> None:
    """Otherwise a wheel that was built here is of no use on machines that are older than this one: what is too new is
    defined in kernels/cpu/older_libraries.cpp."""
    command = [objdump, "--private-headers", str(native)]
    assert too_new(subprocess.run(command, capture_output=True, text=True, check=True).stdout) == set()


def test_newer_system_libraries_are_noticed() -> None:
    text = """
Version References:
  required from libm.so.6:
    0x09691a75 0x00 05 GLIBC_2.2.5
    0x069691b9 0x00 06 GLIBC_2.29
  required from libstdc++.so.6:
    0x0297f861 0x00 09 GLIBCXX_3.4.11
    0x0297f880 0x00 10 GLIBCXX_3.4.30
  required from libc.so.6:
    0x06969194 0x00 03 GLIBC_2.14
    0x0fd0e420 0x00 03 GLIBC_ABI_DT_RELR
"""
    assert too_new(text) == {"GLIBC_2.29", "GLIBCXX_3.4.30", "GLIBC_ABI_DT_RELR"}
