"""The self-test of kernels at start: what it finds, and who serves then. On a CUDA device, or one that is faked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specserve.errors import ConfigError
from specserve.llm import LLM
from specserve.models.loader import check_tensors
from specserve.models.uses import uses_of
from specserve.ops import Ops
from specserve.ops.choice import choose_ops, reference_for
from specserve.ops.selftest import Findings, self_test
from specserve.ops.selftest.attention import CHECKS as OF_ATTENTION
from specserve.ops.selftest.checks import CHECKS as OF_ROWS
from specserve.ops.selftest.trust import trusted
from specserve.ops.selftest.uses import ALL, Uses
from specserve.registry import KERNELS
from specserve.testing import fake_cuda, write_tiny_model
from specserve.types import SamplingParams

SMALL = {"hidden": 64, "width": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
CPU = torch.device("cpu")


@pytest.fixture
def ops(cuda: torch.device) -> Ops:
    return choose_ops(cuda, "float32", "none", 1)


def on(ops: Ops, *forms: str, num_rows: int = 3, only: tuple[str, ...] = ("",)) -> Findings:
    """The self-test with these forms, of the checks whose names begin with one of `only`."""
    checks = [check for check in (*OF_ROWS, *OF_ATTENTION) if check.name.startswith(only)]
    uses = Uses(**SMALL, forms=frozenset(forms))
    return self_test(ops, reference_for(ops), uses, num_rows=num_rows, checks=checks)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever trusts kernels looks at few ops and fewer rows: more than the reference pads."""
    some = [
        check for check in (*OF_ROWS, *OF_ATTENTION) if check.name.startswith(("LM head", "adding and", "attention"))
    ]
    monkeypatch.setattr("specserve.ops.selftest.trust.self_test", partial(self_test, num_rows=5, checks=some))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_kernels_of_cpus_pass(name: str, dtype: str) -> None:
    """With the padding that callers owe to kernels, see Ops.row_multiple."""
    if KERNELS.missing(name) is not None:
        pytest.skip("the native kernels are not built")
    ops = choose_ops(CPU, dtype, "none", 1, without=[other for other in ("cpu", "reference") if other != name])
    found = self_test(
        ops, reference_for(ops), Uses(**SMALL), num_rows=17 if (name, dtype) == ("reference", "float32") else 4
    )
    assert not found.faults
    assert found.num_checks == len(OF_ROWS) + len(OF_ATTENTION)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_integers_are_tested_too(quantization: str) -> None:
    if KERNELS.missing("cpu") is not None:
        pytest.skip("the native kernels are not built")
    ops = choose_ops(CPU, "float32", quantization, 1)
    assert not self_test(ops, reference_for(ops), Uses(**SMALL), num_rows=3).faults


def test_those_of_a_gpu_pass_but_for_what_they_do_not_have(ops: Ops) -> None:
    found = on(ops, *(ALL - {"experts"}), num_rows=2)
    assert not found.faults
    assert found.num_checks == len(OF_ROWS) + len(OF_ATTENTION) - 1
    assert "checks passed in" in str(found)


def test_the_reference_of_a_gpu_passes(cuda: torch.device) -> None:
    ops = choose_ops(cuda, "float32", "none", 1, without=["triton"])
    assert ops.name == "reference"
    assert not on(ops, "window", "experts", "adapters", num_rows=2).faults


Change = Callable[[Tensor], Tensor]


def off(by: float) -> Change:
    return lambda found: found + by


def of_many(found: Tensor, few: int = 2) -> Tensor:
    """Another order of sums where there are several rows."""
    return found * (1 + 2e-7 * (len(found) > few))


@pytest.mark.parametrize(
    ("module", "function", "change", "check", "said"),
    [
        ("linear", "linear", off(0.01), "linear layer", "linear layer: it is off by"),
        ("linear", "linear", of_many, "linear layer of odd", "row 0 of 3 has other bits than alone"),
        ("linear", "gated", of_many, "gated", "gated layer with silu: row 0 of 3"),
        ("rows", "embed", off(1), "embedding", "embedding: it is off by"),
        ("rows", "argmax", off(1), "best tokens", "best tokens: 3 of its 3 integers are wrong"),
        ("attention", "attention", of_many, "attention in a window", "attention in a window: row 0 of"),
        ("attention", "attention", lambda found: found.masked_fill(found > 0.1, torch.nan), "attention", "off by inf"),
    ],
)
def test_a_kernel_that_is_wrong_is_named(
    ops: Ops, monkeypatch: pytest.MonkeyPatch, module: str, function: str, change: Change, check: str, said: str
) -> None:
    found_in = vars(type(ops))["argmax"].__globals__[f"_{module}"]
    plain = getattr(found_in, function)
    monkeypatch.setattr(found_in, function, lambda *args, **named: change(plain(*args, **named)))
    found = on(ops, "window", "gated silu", only=(check,))
    assert found.faults
    assert said in " ".join(map(str, found.faults))
    assert bool(found.wrong) == (change is not of_many)


def test_trees_have_bits_of_their_own(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is right for chains and rounds paths otherwise."""
    attention = vars(type(ops))["argmax"].__globals__["_attention"]
    plain = attention.attention

    def wrong(q: Tensor, kv: Tensor, plan: Any, *others: Any) -> Tensor:
        is_tree = bool((plan.prefix.cpu() < plan.visible.cpu()).any())
        return plain(q, kv, plan, *others) * (1 + 2e-7 * is_tree)

    monkeypatch.setattr(attention, "attention", wrong)
    (fault,) = on(ops, num_rows=4, only=("attention",)).faults
    assert fault.name == "attention of trees"
    assert not fault.is_wrong


def test_what_raises_is_a_fault(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*asked: Any) -> Tensor:
        raise RuntimeError("out of resource: shared memory\nRequired: 263168")

    monkeypatch.setattr(ops, "softcap", failing)
    (fault,) = on(ops, "softcap", only=("LM head",)).faults
    assert str(fault) == "LM head with a soft cap: it fails with RuntimeError: out of resource: shared memory"


def test_what_a_model_does_not_use_is_not_asked(ops: Ops) -> None:
    some = "attention", "LM head"
    assert on(ops, only=some, num_rows=2).num_checks == 4
    assert on(ops, "alibi", "softcap", only=some, num_rows=2).num_checks == 6


@pytest.mark.parametrize(
    ("family", "has", "has_not"),
    [
        ("llama", {"rms_norm", "gated silu"}, {"alibi", "window", "experts", "layer_norm"}),
        ("gemma3", {"window", "post_norm", "head_norms", "gated gelu_tanh"}, {"alibi"}),
        ("bloom", {"alibi", "layer_norm", "bias", "gelu_tanh"}, {"window"}),
        ("opt_350m", {"placed", "relu", "layer_norm"}, {"alibi"}),
        ("mixtral", {"experts"}, {"alibi"}),
    ],
)
def test_a_model_says_what_it_uses(tmp_path: Path, family: str, has: set[str], has_not: set[str]) -> None:
    spec = check_tensors(write_tiny_model(tmp_path / "tiny", family, seed=3)).spec
    uses = uses_of(spec, has_adapters=True)
    assert uses.forms <= ALL
    assert has | {"adapters"} <= uses.forms
    assert not has_not & uses.forms
    assert uses.head_dim == spec.kv_shapes[0].head_dim


def chosen(ops: Ops) -> Callable[[Collection[str]], Ops]:
    return lambda without: choose_ops(ops.device, "float32", "none", 1, without=without)


def test_the_twin_serves_in_place_of_what_fails(ops: Ops, short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(ops), "softcap", lambda self, logits, cap: logits)
    found = trusted(ops, chosen(ops), Uses(**SMALL, forms=frozenset({"softcap"})))
    assert found.ops.name == "reference"
    assert not found.findings.faults
    (line,) = found.lines
    assert "The triton kernels are refused, as they fail the self-test on cuda:0: 1 of " in line
    assert "LM head with a soft cap" in line
    assert "The reference kernels serve all ops in their place" in line


def test_where_no_others_are_left_right_numbers_serve_and_wrong_ones_do_not(
    ops: Ops, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    uses = Uses(**SMALL, forms=frozenset({"rms_norm"}))
    reference = choose_ops(ops.device, "float32", "none", 1, without=["triton"])
    plain = type(reference).norm
    with monkeypatch.context() as patch:
        patch.setattr(reference, "norm", lambda *args: of_many(plain(reference, *args), 4))
        found = trusted(reference, lambda without: chosen(reference)(["triton", *without]), uses)
    assert found.ops is reference
    assert "may depend on which others run beside it" in found.lines[0]
    monkeypatch.setattr(reference, "norm", lambda *args: 2 * plain(reference, *args))
    with pytest.raises(ConfigError, match=r"reference kernels fail the self-test on cuda:0: .*use --device cpu"):
        trusted(reference, lambda without: chosen(reference)(["triton", *without]), uses)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_an_engine_begins_with_it(
    tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("SPECSERVE_ISA", raising=False)
    folder = write_tiny_model(tmp_path / "tiny", "llama", seed=3)
    options = {"dtype": "float32", "max_model_len": 64, "threads": 1, "adaptive": False, "drafter": "none"}
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with LLM(str(folder), device="cpu", isa="auto", **options) as llm:
        wanted = llm.generate(["Tell."], [greedy])[0].outputs[0].token_ids
    with fake_cuda(), caplog.at_level(logging.WARNING):
        kernels = KERNELS.find("triton")
        monkeypatch.setattr(kernels, "buckets", (4, 8))
        attention = vars(kernels)["argmax"].__globals__["_attention"]
        monkeypatch.setattr(attention, "attention", lambda q, kv, *others: q.flatten(1).to(kv.dtype))
        with LLM(str(folder), device="cuda", **options) as llm:
            assert llm.generate(["Tell."], [greedy])[0].outputs[0].token_ids == wanted
    assert "The triton kernels are refused" in caplog.text
