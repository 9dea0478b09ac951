"""Which GPU an engine takes, what a start says of one that it cannot take, and that all of it is on the one chosen."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve.doctor import examine
from specserve.errors import CapacityError, ConfigError
from specserve.llm import LLM
from specserve.ops import choice
from specserve.ops.device import choose_device, within_memory
from specserve.registry import KERNELS
from specserve.testing import fake_cuda, write_tiny_model
from specserve.types import SamplingParams

TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)
NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver"

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """torch for CUDA that cannot use a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return monkeypatch


def failing(error: Exception) -> Any:
    def init() -> None:
        raise error

    return init


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError(TOO_OLD),
            r"driver is too old: it knows CUDA 11\.4, and torch .* is built for CUDA 13\.0\. Update",
        ),
        (RuntimeError(NO_DRIVER), "there is no NVIDIA driver"),
        (RuntimeError("No CUDA GPUs are available"), "the driver shows no GPU; CUDA_VISIBLE_DEVICES is '7'"),
        (RuntimeError("CUDA unknown error - this may be due to\nmore"), "CUDA does not start: CUDA unknown error"),
    ],
)
def test_why_a_gpu_cannot_be_used(without: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    without.setenv("CUDA_VISIBLE_DEVICES", "7")
    without.setattr(torch.cuda, "init", failing(error))
    for name in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match=f"--device {name}: .*{said}.* Or use --device cpu"):
            choose_device(name)
    assert dict(next(each.rows for each in examine("none") if each.title == "Device"))["gpu"].startswith("none usable")


def test_torch_for_cpus_says_so(without: pytest.MonkeyPatch) -> None:
    without.setattr(torch.version, "cuda", None)
    without.setattr(torch.version, "hip", None)
    with pytest.raises(ConfigError, match=r"--device cuda: torch .* is a build for CPUs alone. Install one for CUDA"):
        choose_device("cuda")


def test_a_gpu_that_is_left_unused_is_told(
    without: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    without.setattr(torch.cuda, "init", failing(RuntimeError(TOO_OLD)))
    assert choose_device("auto", tmp_path) == torch.device("cpu")
    assert not caplog.records
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert choose_device("auto", tmp_path) == torch.device("cpu")
    assert "This machine has a GPU, and the engine runs on the CPU: the NVIDIA driver is too old" in caplog.text


@pytest.fixture(params=[0, 2])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    monkeypatch.delenv("SPECSERVE_ISA", raising=False)
    with fake_cuda(index=request.param) as found:
        yield found


@no_gpu
def test_a_gpu_has_its_number(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 0)
    assert choose_device(str(device)) == device
    there = "cuda:0" if device.index == 0 else "cuda:0 to cuda:2"
    with pytest.raises(ConfigError, match=f"--device cuda:5 is not there: torch sees {there} here[.]"):
        choose_device("cuda:5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,0")
    with pytest.raises(ConfigError, match=r"here \(CUDA_VISIBLE_DEVICES is '3,1,0', and they are numbered within it\)"):
        choose_device("cuda:5")
    for wrong in ("gpu", "mps", "cuda:x"):
        with pytest.raises(ConfigError, match="Use auto, cpu, cuda or cuda:N"):
            choose_device(wrong)


@no_gpu
def test_an_engine_is_on_the_gpu_that_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors, launches and captures, on the thread that built it and on another."""
    monkeypatch.delenv("SPECSERVE_ISA", raising=False)
    folder = write_tiny_model(tmp_path / "tiny", "llama", seed=3)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "threads": 1, "adaptive": False}
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with fake_cuda(index=2) as device:
        monkeypatch.setattr(KERNELS.find("triton"), "buckets", (4, 8))
        monkeypatch.setattr("specserve.engine.build.tested", lambda ops, *asked: ops)
        with LLM(str(folder), device="cuda:2", **options) as llm:
            assert llm.device == str(device)
            found = []
            thread = threading.Thread(target=lambda: found.append(llm.generate(["Tell."], [greedy])))
            thread.start()
            thread.join()
            assert found[0][0].outputs[0].token_ids == llm.generate(["Tell."], [greedy])[0].outputs[0].token_ids
        with pytest.raises(RuntimeError, match=r"cuda:1, and cuda:2 is to compute"):
            torch.zeros(1, device="cuda:1")


@no_gpu
def test_doctor_looks_at_the_gpu_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECSERVE_ISA", raising=False)
    monkeypatch.setattr("specserve.doctor.self_test", lambda ops, twin: f"asked of {ops.device}")
    with fake_cuda(index=1):
        rows = {section.title: dict(section.rows) for section in examine("none", device_name="cuda:1")}
    assert "on cuda:1" in rows["Memory"]["free for an engine"]
    assert "what an engine on cuda:1 takes" in rows["Kernels"]["chosen"]
    assert rows["Kernels"]["self-test"] == "asked of cuda:1"
    assert list(rows["Device"])[-2:] == ["cuda:0", "cuda:1"]


@no_gpu
def test_without_triton_a_start_says_what_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("SPECSERVE_ISA", raising=False)
    plain = type(KERNELS).missing
    monkeypatch.setattr(type(KERNELS), "missing", lambda own, name: "triton" if name == "triton" else plain(own, name))
    with fake_cuda() as device:
        ops = choice.choose_ops(device, "auto", "auto", 1)
        assert ops.name == "reference"
        choice.warn_of_lacking(ops)
        assert choice.lacking(ops) == caplog.messages[0]
    assert "On cuda:0 the reference kernels serve" in caplog.messages[0]
    assert "triton needs the package 'triton', which is not installed." in caplog.messages[0]
    assert "cpu" not in caplog.messages[0]


def test_memory_that_is_too_small_is_told_with_what_to_lower() -> None:
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1 is free."
    )
    said = r"cuda:0 ran out of memory: it takes 2\.50 GiB more.*--kv-cache-gib.*--max-num-batched-tokens"
    with pytest.raises(CapacityError, match=said), within_memory():
        raise error
    with pytest.raises(ValueError, match="other"), within_memory():
        raise ValueError("other")
