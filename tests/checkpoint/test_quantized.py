"""Quantised checkpoints: numbers are exactly those of the layout's definition, models of them generate what models of
their numbers do, and what contradicts itself is refused by name."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from specserve.checkpoint.bitstream import unpack
from specserve.checkpoint.folder import read_config
from specserve.checkpoint.packed import packed_path
from specserve.checkpoint.quantized import QuantizedWeights
from specserve.cli.inspect import inspect
from specserve.config import EngineConfig
from specserve.doctor import examine
from specserve.engine.build import build
from specserve.errors import ModelError
from specserve.kernels.reference import Kernels
from specserve.llm import LLM
from specserve.models import loader
from specserve.models.heads.origin import TargetOrigin
from specserve.models.loader import check_tensors, load_model
from specserve.models.rounding import how_kept, relative_error
from specserve.ops import Ops
from specserve.ops.packing import Quantized
from specserve.testing import PagedDecoder, write_tiny_model
from specserve.testing.causal_models import write_tiny_causal_model
from specserve.types import SamplingParams
from tests.checkpoint.layouts import (
    Awq,
    Compressed,
    Float8,
    Gptq,
    Layout,
    edit_config,
    int32,
    numbers_in,
    quantize,
    to_words,
    write_quantized,
)

PROMPT = torch.randint(0, 293, (24,), generator=torch.Generator().manual_seed(5)).tolist()
LAYOUTS: dict[str, Layout] = {
    "gptq": Gptq(),
    "gptq-symmetric": Gptq(symmetric=True),
    "gptq-2-bits": Gptq(bits=2),
    "gptq-3-bits": Gptq(bits=3),
    "gptq-8-bits": Gptq(bits=8, symmetric=True),
    "gptq-8-bits-asymmetric": Gptq(bits=8, version="gptq"),
    "gptq-v2": Gptq(version="gptq_v2"),
    "gptq-v2-3-bits": Gptq(bits=3, version="gptq_v2", group=64),
    "gptq-act-order": Gptq(act_order=True),
    "gptq-act-order-3-bits": Gptq(bits=3, act_order=True, symmetric=True),
    "gptq-one-group": Gptq(group=-1, act_order=True),
    "gptq-small-groups": Gptq(group=16),
    "gptq-without-order": Gptq(has_order=False),
    "awq": Awq(),
    "awq-one-group": Awq(group=-1),
    "awq-small-groups": Awq(group=16),
    "w4a16": Compressed(),
    "w4a16-asymmetric": Compressed(symmetric=False),
    "w4a16-channels": Compressed(strategy="channel", symmetric=False),
    "w4a16-act-order": Compressed(act_order=True),
    "w8a16": Compressed(bits=8, strategy="channel"),
    "w8a16-groups": Compressed(bits=8, group=16, symmetric=False),
    "w3a16": Compressed(bits=3),
    "w8a8": Compressed("int-quantized", bits=8, strategy="channel"),
    "w8a8-asymmetric": Compressed("int-quantized", bits=8, strategy="channel", symmetric=False),
    "w8a8-tensor": Compressed("int-quantized", bits=8, strategy="tensor"),
    "fp8-tensor": Compressed("float-quantized", bits=8, strategy="tensor"),
    "fp8-channels": Compressed("float-quantized", bits=8, strategy="channel"),
    "fp8-as-first-written": Compressed(
        "naive-quantized", 8, "tensor", config={"quantization_status": "frozen", "kv_cache_scheme": {"num_bits": 8}}
    ),
    "fp8-blocks": Compressed("float-quantized", bits=8, strategy="block"),
    "mxfp4": Compressed("mxfp4-pack-quantized"),
    "fp8": Float8(),
    "fp8-odd-blocks": Float8(block=(48, 24)),
    "fp8-one-scale": Float8(block=None),
}


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> None:
    torch.set_num_threads(1)


def make_ops(name: str, isa: str = "auto") -> Ops:
    """Kernels by name: reference or native, then how they keep weights. Skips native ones that were not built; with
    SPECSERVE_REQUIRE_NATIVE=1 that fails."""
    backend, weights = name.split("-")
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    if backend == "reference":
        reference: Ops = Kernels(torch.device("cpu"), dtype)
        return reference
    required = os.environ.get("SPECSERVE_REQUIRE_NATIVE") == "1"
    if importlib.util.find_spec("specserve.kernels._native") is None and not required:
        pytest.skip("Built without native kernels.")
    module: Any = importlib.import_module("specserve.kernels.cpu")
    if isa != "auto" and isa not in module.instruction_sets():
        pytest.skip(f"This processor or build has no {isa}.")
    native: Ops = module.Kernels(dtype, weights if weights.startswith("int") else "none", threads=1, isa=isa)
    return native


def logits(folder: Path, ops: Ops) -> Tensor:
    return PagedDecoder(load_model(folder, ops), 1, 32).chunks(0, PROMPT, 8)


def write_plain(folder: Path, tensors: dict[str, Tensor], architecture: str = "llama", **overrides: Any) -> Path:
    """The same model without quantisation."""
    write_tiny_model(folder, architecture, seed=1, **{"num_hidden_layers": 1, **overrides})
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


# Numbers


@given(bits=st.integers(1, 8), rows=st.integers(1, 3), words=st.integers(1, 9), seed=st.integers(0, 99))
def test_numbers_of_a_stream_of_bits(bits: int, rows: int, words: int, seed: int) -> None:
    packed = torch.randint(-(2**31), 2**31, (rows, words), generator=torch.Generator().manual_seed(seed)).int()
    found = unpack(packed, bits)
    assert found.shape == (rows, words * 32 // bits)
    for row, numbers in zip(packed.tolist(), found.tolist(), strict=True):
        assert numbers == numbers_in(row, len(numbers), bits)
        assert to_words(numbers, bits)[: words - 1] == row[: words - 1]


@pytest.mark.parametrize("name", LAYOUTS)
def test_numbers_are_those_of_the_layout(name: str, tmp_path: Path) -> None:
    wanted = write_quantized(tmp_path, LAYOUTS[name])
    tensors = check_tensors(tmp_path)
    assert set(tensors) == set(wanted)
    for each in wanted:
        assert torch.equal(tensors[each][:].float(), wanted[each]), each
    assert len(tensors.quantized.matrices) == 7


@pytest.mark.each_choice(rounds=2)
@pytest.mark.parametrize("name", ["gptq", "gptq-3-bits", "gptq-act-order", "awq", "w4a16-asymmetric", "w8a8", "fp8"])
@pytest.mark.parametrize("kernels", ["reference-float32", "reference-bfloat16", "native-float32", "native-bfloat16"])
def test_floats_are_those_of_the_numbers(name: str, kernels: str, tmp_path: Path) -> None:
    tensors = write_quantized(tmp_path / "quantized", LAYOUTS[name])
    plain = write_plain(tmp_path / "plain", tensors)
    assert torch.equal(*(logits(folder, make_ops(kernels)) for folder in (tmp_path / "quantized", plain)))


@pytest.mark.parametrize("name", ["gptq-act-order", "awq", "w4a16-asymmetric", "w8a8"])
def test_text_is_that_of_the_numbers(name: str, tmp_path: Path) -> None:
    tensors = write_quantized(tmp_path / "quantized", LAYOUTS[name])
    plain = write_plain(tmp_path / "plain", tensors)
    texts = []
    for folder in (tmp_path / "quantized", plain):
        with LLM(str(folder), device="cpu", dtype="float32", quantization="none", kv_cache_gib=0.01, threads=1) as llm:
            greedy = llm.generate(["a test", "of the"], SamplingParams(max_tokens=12, temperature=0))
            drawn = llm.generate(["a test"], SamplingParams(max_tokens=12, temperature=0.9, seed=3))
            texts.append([output.outputs[0].token_ids for output in [*greedy, *drawn]])
    assert texts[0] == texts[1] and len(set(texts[0][0])) > 1


FUSED = {"phi3": {"sliding_window": None, "head_dim": None}, "glm": {}}


@pytest.mark.each_choice(rounds=2)
@pytest.mark.parametrize("architecture", FUSED)
@pytest.mark.parametrize("name", ["gptq", "gptq-act-order", "awq", "w4a16-asymmetric", "fp8-blocks"])
def test_rows_of_a_fused_matrix_are_those_of_its_parts(architecture: str, name: str, tmp_path: Path) -> None:
    overrides = FUSED[architecture]
    tensors = write_quantized(tmp_path / "quantized", LAYOUTS[name], architecture, **overrides)
    plain = write_plain(tmp_path / "plain", tensors, architecture, **overrides)
    one, other = (check_tensors(folder) for folder in (tmp_path / "quantized", plain))
    assert all(torch.equal(one[each][:].float(), other[each][:].float()) for each in other)
    gate = one["model.layers.0.mlp.gate_proj.weight"]
    assert isinstance(gate, Quantized) == (name != "fp8-blocks")


@pytest.mark.parametrize("architecture", ["internlm2", "qwen", "opt_350m"])
@pytest.mark.parametrize("name", ["gptq", "gptq-act-order", "awq"])
def test_names_of_a_family_and_rows_by_head_go_with_quantised_matrices(
    architecture: str, name: str, tmp_path: Path
) -> None:
    def in_layers(module: str) -> bool:
        return ".layers." in module or ".h." in module

    layout = LAYOUTS[name]
    tensors = write_quantized(tmp_path / "quantized", layout, architecture, modules=in_layers)
    plain = write_plain(tmp_path / "plain", tensors, architecture)
    one, other = (check_tensors(folder) for folder in (tmp_path / "quantized", plain))
    assert all(torch.equal(one[each][:].float(), other[each][:].float()) for each in other)
    assert isinstance(one["model.layers.0.self_attn.k_proj.weight"], Quantized)
    ops = make_ops("native-float32")
    assert torch.equal(logits(tmp_path / "quantized", ops), logits(plain, ops))


@pytest.mark.parametrize("layout", [Gptq(), Awq()])
def test_models_that_run_through_transformers_have_them_too(layout: Gptq | Awq, tmp_path: Path) -> None:
    folder = write_tiny_causal_model(tmp_path / "quantised", "stablelm", seed=3, vocab_size=320)
    plain = quantize(folder, layout, lambda module: module.endswith("_proj"))
    same = write_tiny_causal_model(tmp_path / "plain", "stablelm", seed=3, vocab_size=320)
    save_file(plain, same / "model.safetensors", {"format": "pt"})
    ops = make_ops("native-float32")
    assert torch.equal(logits(folder, ops), logits(same, ops))


def test_an_lm_head_may_be_quantised(tmp_path: Path) -> None:
    wanted = write_quantized(
        tmp_path, Gptq(config={"lm_head": True}), modules=lambda module: module.endswith(("_proj", "lm_head"))
    )["lm_head.weight"]
    head = check_tensors(tmp_path)["lm_head.weight"]
    assert isinstance(head, Quantized) and torch.equal(head[:], wanted)
    assert torch.equal(TargetOrigin(tmp_path).head(), wanted)


def test_rules_of_gptqmodel_say_how_modules_are_stored(tmp_path: Path) -> None:
    rules = {
        "-:.*o_proj": {},
        r"+:.*\.(gate|up)_proj": {"bits": 8, "group_size": 64},
        ".*down_proj": {"bits": 2, "group_size": -1},
        ".*": {"desc_act": True},
    }
    act_order = Gptq(act_order=True)
    others: dict[str, Layout] = {
        "gate_proj": Gptq(bits=8, group=64),
        "up_proj": Gptq(bits=8, group=64),
        "down_proj": Gptq(bits=2, group=-1),
    }
    wanted = write_quantized(
        tmp_path,
        act_order,
        modules=lambda module: module.endswith("_proj") and "o_proj" not in module,
        others=others,
    )
    edit_config(tmp_path, quantization_config=Gptq(config={"dynamic": rules}).settings())
    tensors = check_tensors(tmp_path)
    assert all(torch.equal(tensors[each][:].float(), wanted[each]) for each in wanted)
    assert isinstance(tensors["model.layers.0.self_attn.o_proj.weight"], Tensor)
    kinds = tensors.quantized.describe()
    assert all(words in kinds for words in ("int8, groups of 64 (2", "int2, one group", "act-order (3")), kinds


def test_groups_of_modules_differ(tmp_path: Path) -> None:
    int4, int8 = Compressed(), Compressed(bits=8, strategy="channel")
    fp8 = Compressed("float-quantized", bits=8, strategy="channel")
    wanted = write_quantized(tmp_path, int4, others={"down_proj": int8, "o_proj": fp8})
    groups = {
        "group_0": {"targets": ["Linear"], "weights": int4.weights(), "format": "pack-quantized"},
        "group_1": {"targets": ["re:.*down_proj$"], "weights": int8.weights(), "format": "pack-quantized"},
        "group_2": {
            "targets": ["model.layers.0.self_attn.o_proj"],
            "weights": fp8.weights(),
            "input_activations": {"num_bits": 8, "type": "float"},
            "format": "float-quantized",
        },
    }
    settings = {**int4.settings(), "format": "mixed-precision", "config_groups": groups}
    edit_config(tmp_path, quantization_config=settings)
    tensors = check_tensors(tmp_path)
    assert all(torch.equal(tensors[each][:].float(), wanted[each]) for each in wanted)
    assert "activations are rounded as the kernels do it" in tensors.quantized.notes[0]


# GPTQ's zeros


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zeros_of_0_survive_the_first_version_as_gptqmodel_writes_it(bits: int, tmp_path: Path) -> None:
    """It takes 1 from each place of a word, and a zero of 0 borrows from the next; adding gives it back."""
    write_quantized(tmp_path, Gptq(bits=bits))
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    zeros = torch.randint(0, 2**bits, tensors[f"{name}.scales"].shape, generator=torch.Generator().manual_seed(1))
    zeros[:, ::3] = 0
    less = sum(1 << shift for shift in range(0, 32, bits))
    words = [[(word - less) % 2**32 for word in to_words(row, bits)] for row in zeros.tolist()]
    tensors[f"{name}.qzeros"] = int32([[word - 2**32 if word >= 2**31 else word for word in row] for row in words])
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found = check_tensors(tmp_path)[f"{name}.weight"]
    assert isinstance(found, Quantized) and found.zeros is not None
    assert torch.equal(found.zeros.T.long(), zeros)


def test_zeros_of_3_bits_are_added_to_one_by_one(tmp_path: Path) -> None:
    write_quantized(tmp_path, Gptq(bits=3))
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    zeros = torch.arange(64).repeat(2, 1) % 8
    tensors[f"{name}.qzeros"] = int32([to_words([(n - 1) % 8 for n in row], 3) for row in zeros.tolist()])
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found = check_tensors(tmp_path)[f"{name}.weight"]
    assert isinstance(found, Quantized) and found.zeros is not None
    assert torch.equal(found.zeros.T.long(), zeros)


def test_the_version_of_the_format_decides_and_packed_weights_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(loader, "_WORTH_BYTES", 0)
    folder, ops = tmp_path / "model", make_ops("native-int8")
    write_quantized(folder, Gptq())
    first = logits(folder, ops)
    assert packed_path(folder.resolve(), ops).exists() and torch.equal(first, logits(folder, ops))
    edit_config(folder, quantization_config=Gptq(version="gptq_v2").settings())
    other = logits(folder, ops)
    assert not torch.equal(first, other)
    edit_config(folder, quantization_config=Gptq(version="gptq").settings())
    assert torch.equal(first, logits(folder, ops))


# Kept or rounded again

INT4 = ["gptq", "gptq-symmetric", "awq", "w4a16-asymmetric"]
BY_KERNELS = [("native-int8", name) for name in [*INT4, "gptq-8-bits", "w8a8", "mxfp4"]]
BY_KERNELS += [("native-int4", name) for name in INT4]


@pytest.mark.each_choice(rounds=2)
@pytest.mark.parametrize(("kernels", "name"), BY_KERNELS)
@pytest.mark.parametrize("isa", ["auto", "avx2", "portable"])
def test_integers_are_closer_than_numbers_rounded_again(name: str, kernels: str, isa: str, tmp_path: Path) -> None:
    tensors = write_quantized(tmp_path / "quantized", LAYOUTS[name])
    plain = write_plain(tmp_path / "plain", tensors)
    ops = make_ops(kernels, isa)
    exact = logits(plain, make_ops("reference-float32"))
    kept, rounded = logits(tmp_path / "quantized", ops), logits(plain, ops)
    assert (kept - exact).norm() <= (rounded - exact).norm()
    assert (kept - exact).norm() < 0.1 * exact.norm()


# What is said of it


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gptq-symmetric", "GPTQ int4, groups of 32: kept in int8"),
        ("gptq-act-order", "GPTQ int4, groups of 32, act-order: rounded to int8, error 0."),
        ("fp8", "FP8 float8 (E4M3), blocks of 32 x 32: rounded to int8, error 0."),
    ],
)
def test_the_line_at_the_start_says_what_became_of_it(name: str, said: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, LAYOUTS[name])
    make_ops("native-int8")  # skips where there are none
    built = build(EngineConfig(model=str(tmp_path), device="cpu", quantization="int8", kv_cache_gib=0.01, threads=1))
    assert f"in int8 (checkpoint: {said}" in built.summary


@pytest.mark.parametrize("name", LAYOUTS)
def test_by_default_weights_take_4_bits_where_these_keep_what_is_stored(name: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, LAYOUTS[name])
    options: Any = {"device": "cpu", "kv_cache_gib": 0.01, "threads": 1}
    kept = how_kept(QuantizedWeights(tmp_path, read_config(tmp_path)), make_ops("native-int4")).count("kept")
    built = build(EngineConfig(model=str(tmp_path), **options))
    assert built.quantization == ("int4" if kept else "int8")
    asked = build(EngineConfig(model=str(tmp_path), quantization="int8", **options))
    assert asked.quantization == "int8"


def test_by_default_weights_take_8_bits_where_a_matrix_is_not_quantised(tmp_path: Path) -> None:
    write_quantized(tmp_path, Gptq(symmetric=True), modules=lambda module: module.endswith(("q_proj", "up_proj")))
    make_ops("native-int4")
    assert build(EngineConfig(model=str(tmp_path), device="cpu", kv_cache_gib=0.01)).quantization == "int8"


def test_inspect_says_it_for_every_way_to_store_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_quantized(tmp_path, Gptq(), others={"down_proj": Gptq(bits=8, group=64)})
    edit_config(
        tmp_path,
        quantization_config=Gptq(config={"dynamic": {".*down_proj": {"bits": 8, "group_size": 64}}}).settings(),
    )
    make_ops("native-int8")
    inspect(str(tmp_path))
    said = " ".join(capsys.readouterr().out.split())
    assert "weights GPTQ int4, groups of 32 (6 of them); int8, groups of 64 (1 of them)" in said
    assert "as int4 GPTQ int4, groups of 32: kept in int4 but for what float16 rounds" in said
    assert "int8, groups of 64: rounded to int4, error" in said and "(int8 rounds less)" in said
    assert "as int8 GPTQ int4, groups of 32: kept in int8; int8, groups of 64: rounded to int8" in said


def test_doctor_says_it_and_finds_what_is_broken(tmp_path: Path) -> None:
    write_quantized(tmp_path, Gptq(symmetric=True))
    models = examine(str(tmp_path))[-1]
    assert models.fault is None and dict(models.rows)["weights"].startswith("GPTQ int4, groups of 32: ")
    edit_config(tmp_path, quantization_config={"quant_method": "hqq"})
    models = examine(str(tmp_path))[-1]
    assert models.fault is not None and "hqq" in dict(models.rows)["weights"]
    edit_config(tmp_path, quantization_config=Gptq(group=128).settings())
    assert "group_size of 128" in str(examine(str(tmp_path))[-1].fault)


def test_errors_are_measured_by_what_is_multiplied_with(tmp_path: Path) -> None:
    ops = make_ops("native-int8")
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(40, 64, generator=generator)
    step = numbers.view(40, 2, 32).abs().amax(2, keepdim=True).div(127).half().float()
    rounded = ((numbers.view(40, 2, 32) / step).round() * step).view(40, 64)
    wanted = float((rounded - numbers).norm() / numbers.norm())
    assert relative_error(ops, numbers) == pytest.approx(wanted, rel=1e-3)
    assert relative_error(ops, rounded) < 1e-5
    assert relative_error(ops, torch.zeros(40, 64)) == 0
    assert relative_error(make_ops("reference-float32"), numbers) < 1e-6


# What is passed over, and what is refused


def test_biases_of_zeros_that_old_tools_write_are_passed_over(tmp_path: Path) -> None:
    write_quantized(tmp_path, Gptq())
    tensors = load_file(tmp_path / "model.safetensors")
    zeros = {f"{name.removesuffix('.qweight')}.bias": torch.zeros(64) for name in tensors if "qweight" in name}
    save_file(tensors | zeros, tmp_path / "model.safetensors")
    assert not [name for name in check_tensors(tmp_path) if name.endswith("bias")]
    save_file(tensors | zeros | {"model.layers.0.mlp.up_proj.bias": torch.ones(64)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"up_proj\.bias, which config\.json does not account for"):
        check_tensors(tmp_path)


def test_scales_of_activations_and_of_a_kv_cache_are_said_to_be_passed_over(tmp_path: Path) -> None:
    write_quantized(tmp_path, Compressed("int-quantized", bits=8, strategy="channel"))
    tensors = load_file(tmp_path / "model.safetensors")
    attention = "model.layers.0.self_attn"
    scales = {f"{attention}.q_proj.input_scale": torch.ones(1), f"{attention}.k_scale": torch.ones(1)}
    save_file(tensors | scales, tmp_path / "model.safetensors")
    edit_config(
        tmp_path,
        quantization_config=Compressed(
            "int-quantized", bits=8, strategy="channel", config={"kv_cache_scheme": {"num_bits": 8}}
        ).settings(),
    )
    tensors_found = check_tensors(tmp_path)
    assert not [name for name in tensors_found if name.endswith("scale")]
    assert any("KV cache" in note for note in tensors_found.quantized.notes)


def test_settings_beside_config_json_are_read(tmp_path: Path) -> None:
    for number, (layout, name, settings) in enumerate(
        [
            (Gptq(), "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False, "sym": False}),
            (Awq(), "quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}),
        ]
    ):
        folder = tmp_path / str(number)
        wanted = write_quantized(folder, layout)
        edit_config(folder, quantization_config=None)
        with pytest.raises(ModelError, match=r"does not account for|lacks"):
            check_tensors(folder)
        (folder / name).write_text(str(settings).replace("'", '"').replace("True", "true").replace("False", "false"))
        tensors = check_tensors(folder)
        assert all(torch.equal(tensors[each][:].float(), wanted[each]) for each in wanted)


Q = "model.layers.0.self_attn.q_proj"
Change = Callable[[dict[str, Tensor]], object]
BROKEN: dict[str, tuple[Layout, Change, dict[str, Any], str]] = {
    "missing zeros": (Gptq(), lambda t: t.pop(f"{Q}.qzeros"), {}, rf"{Q} .* has no qzeros"),
    "missing scales": (Gptq(), lambda t: t.pop(f"{Q}.scales"), {}, rf"{Q} .* has no scales"),
    "wrong group size": (
        Gptq(),
        lambda t: None,
        {"group_size": 64},
        r"scales has shape \(2, 64\); .*of 64, implies \(1, 64\)",
    ),
    "wrong bits": (Gptq(), lambda t: None, {"bits": 8}, r"g_idx has shape|scales has shape|rows of words"),
    "bits that do not divide": (Gptq(), lambda t: None, {"bits": 3}, "rows of words, which 3 bits"),
    "bits that nobody has": (Gptq(), lambda t: None, {"bits": 5}, "gives bits as 5"),
    "bits that are text": (Gptq(), lambda t: None, {"bits": "4"}, "gives bits as '4'"),
    "no group size": (Gptq(), lambda t: None, {"group_size": None}, "gives group_size as None"),
    "absent order": (Gptq(has_order=False), lambda t: None, {"desc_act": True}, "has no g_idx"),
    "order out of range": (Gptq(), lambda t: t[f"{Q}.g_idx"].fill_(2), {}, "groups 2 to 2; .* scales of 2"),
    "order below 0": (Gptq(), lambda t: t[f"{Q}.g_idx"].sub_(1), {}, "groups -1 to 0"),
    "order of zeros": (Gptq(), lambda t: t[f"{Q}.g_idx"].zero_(), {}, "all inputs the group 0"),
    "NaN scale": (Gptq(), lambda t: t[f"{Q}.scales"][1, 3:4].fill_(float("nan")), {}, f"{Q}.weight holds NaN"),
    "infinite scale": (Awq(), lambda t: t[f"{Q}.scales"][1, 3:4].fill_(float("inf")), {}, f"{Q}.weight holds NaN"),
    "wrong outputs": (
        Gptq(),
        lambda t: t.update({f"{Q}.{part}": t[f"{Q}.{part}"][:, :n] for part, n in (("qweight", 32), ("scales", 32))}),
        {},
        r"qzeros has shape",
    ),
    "another model's": (
        Awq(),
        lambda t: (
            t.update({f"{Q}.{part}": t[f"{Q}.{part}"][:, :4] for part in ("qweight", "qzeros")})
            or t.update({f"{Q}.scales": t[f"{Q}.scales"][:, :32]})
        ),
        {},
        r"q_proj.weight has shape \(32, 64\); config.json implies \(64, 64\)",
    ),
    "floats for words": (Gptq(), lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"].float()}), {}, "holds F32"),
    "unknown format": (Gptq(), lambda t: None, {"checkpoint_format": "marlin"}, "'marlin'; supported are gptq"),
    "two formats": (Gptq(version="gptq"), lambda t: None, {"format": "gptq_v2"}, "'gptq', 'gptq_v2'"),
    "rotated": (Gptq(), lambda t: None, {"rotation": "hadamard"}, "rotation"),
    "excluded": (Gptq(), lambda t: None, {"dynamic": {"-:.*q_proj": {}}}, "dynamic .* says not"),
    "bad rule": (Gptq(), lambda t: None, {"dynamic": {"+:(": {}}}, "no regular expression"),
    "no rules": (Gptq(), lambda t: None, {"dynamic": ["x"]}, "must be an object"),
    "both": (Gptq(), lambda t: t.update({f"{Q}.weight": torch.zeros(64, 64)}), {}, "quantised and not quantised"),
    "awq's version": (Awq(), lambda t: None, {"version": "gemv"}, "'gemv'; supported is gemm"),
    "awq's zeros": (Awq(), lambda t: t.pop(f"{Q}.qzeros"), {}, "has no qzeros"),
    "awq's groups": (Awq(), lambda t: None, {"group_size": 128}, "group_size of 128, implies"),
    "awq's exceptions": (Awq(), lambda t: None, {"modules_to_not_convert": ["self_attn"]}, "modules_to_not_convert"),
    "ignored": (Compressed(), lambda t: None, {"ignore": [f"re:.*{Q}"]}, "ignore .* says not"),
    "no target": (
        Compressed(),
        lambda t: None,
        {"config_groups": {"a": {"targets": ["re:nothing"], "weights": Compressed().weights()}}},
        "no targets",
    ),
    "zeros of compressed-tensors": (
        Compressed(symmetric=False),
        lambda t: t.pop(f"{Q}.weight_zero_point"),
        {},
        "has no weight_zero_point",
    ),
    "order of compressed-tensors": (
        Compressed(act_order=True),
        lambda t: t.pop(f"{Q}.weight_g_idx"),
        {},
        "has no weight_g_idx",
    ),
    "range of its order": (Compressed(act_order=True), lambda t: t[f"{Q}.weight_g_idx"].add_(1), {}, "1 to 2"),
    "its shape": (Compressed(), lambda t: t[f"{Q}.weight_shape"].sub_(1), {}, r"is \[63, 63\]"),
    "its scales": (Compressed(), lambda t: t.pop(f"{Q}.weight_scale"), {}, "lacks .*q_proj"),
    "its groups": (Compressed(group=16), lambda t: None, {"config_groups": {"a": None}}, "does not say how"),
    "NVFP4": (Compressed(), lambda t: None, {"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized.*W4A16"),
    "sparse": (Compressed(), lambda t: None, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    "rotated by it": (Compressed(), lambda t: None, {"transform_config": {"config_groups": {}}}, "transform_config"),
    "not compressed": (
        Compressed("int-quantized", bits=8, strategy="channel"),
        lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].float()}),
        {"quantization_status": "frozen"},
        "holds F32; the layout has I8",
    ),
    "exponent of NaN": (
        Compressed("mxfp4-pack-quantized"),
        lambda t: t[f"{Q}.weight_scale"].fill_(255),
        {},
        "holds NaN",
    ),
    "fp8 of odd blocks": (Float8(), lambda t: None, {"weight_block_size": [32]}, "two positive numbers"),
    "fp8 without blocks": (Float8(), lambda t: None, {"weight_block_size": None}, "holds F8_E4M3|does not account for"),
    "fp8 without a scale": (Float8(block=None), lambda t: t.pop(f"{Q}.weight_scale"), {}, "holds F8_E4M3"),
    "fp8's exceptions": (Float8(), lambda t: None, {"modules_to_not_convert": [Q]}, "says not"),
    "fp8's scales": (Float8(), lambda t: None, {"weight_block_size": [64, 64]}, "weight_scale_inv has shape"),
    "NaN in float8": (
        Float8(),
        lambda t: t.update({f"{Q}.weight": torch.full((64, 64), float("nan")).to(torch.float8_e4m3fn)}),
        {},
        f"{Q}.weight holds NaN",
    ),
    "unknown method": (Gptq(), lambda t: None, {"quant_method": "gtpq"}, "Did you mean 'gptq'"),
    "no method": (Gptq(), lambda t: None, {"quant_method": None}, "quant_method"),
    "bitsandbytes": (Gptq(), lambda t: None, {"quant_method": "bitsandbytes"}, "--quantization int4"),
    "HQQ": (Gptq(), lambda t: None, {"quant_method": "hqq"}, "hqq.* use a GPTQ"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_checkpoints_are_refused_by_name(case: str, tmp_path: Path) -> None:
    layout, change, settings, words = BROKEN[case]
    write_quantized(tmp_path, layout, modules=lambda module: module == Q)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    edit_config(tmp_path, quantization_config={**layout.settings(), **settings})
    with pytest.raises(ModelError, match=words) as error:
        load_model(tmp_path, make_ops("reference-float32"))
    assert str(error.value).startswith(str(tmp_path))


VALUES = [None, 0, -1, 3, 16, 2**40, 1e9, "x", "re:(", [], [0, 0], ["re:("], {}, {"+:(": {}}, {"-:.*": 1}, True, False]


def settings_in(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from settings_in(inner, (*path, key))


@pytest.mark.parametrize("name", ["gptq-3-bits", "awq", "w4a16-act-order", "w8a8", "fp8-blocks", "fp8"])
def test_no_setting_is_worse_than_refused_by_name(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    write_quantized(tmp_path, layout, modules=lambda module: module == Q)
    found: list[str] = []
    for path in settings_in(layout.settings()):
        for value in VALUES:
            settings: Any = json.loads(json.dumps(layout.settings()))
            place = settings
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            edit_config(tmp_path, quantization_config=settings)
            try:
                check_tensors(tmp_path)[f"{Q}.weight"][:]
            except ModelError as error:
                found.append(str(error))
    assert found and not [message for message in found if "a value of the wrong kind" in message]


def test_a_tied_head_that_is_quantised_apart_is_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path, Gptq(), modules=lambda module: module.endswith(("_proj", "lm_head")))
    edit_config(tmp_path, tie_word_embeddings=True)
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        load_model(tmp_path, make_ops("reference-float32"))


# By the format's own library


@pytest.mark.parametrize(
    ("preset", "form"),
    [
        ({"num_bits": 4, "strategy": "group", "group_size": 32}, "pack-quantized"),
        ({"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}, "pack-quantized"),
        ({"num_bits": 3, "strategy": "group", "group_size": 64, "symmetric": False}, "pack-quantized"),
        ({"num_bits": 8, "strategy": "channel"}, "pack-quantized"),
        ({"num_bits": 8, "strategy": "channel"}, "int-quantized"),
        ({"num_bits": 8, "strategy": "tensor"}, "int-quantized"),
        ({"num_bits": 8, "strategy": "channel", "type": "float"}, "float-quantized"),
        ({"num_bits": 8, "strategy": "block", "type": "float", "block_structure": [32, 32]}, "float-quantized"),
    ],
)
def test_what_compressed_tensors_writes_is_read(preset: dict[str, Any], form: str, tmp_path: Path) -> None:
    """Its own numbers, which are in the scales' dtype, bfloat16, are ours rounded to that."""
    library: Any = pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    base: Any = importlib.import_module("compressed_tensors.compressors.base")
    quantization: Any = importlib.import_module("compressed_tensors.quantization")
    weights = quantization.QuantizationArgs(**preset)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights, format=form)
    compressor = base.BaseCompressor.get_value_from_registry(form)
    write_tiny_model(tmp_path, "llama", seed=1, num_hidden_layers=1)
    stored, wanted = load_file(tmp_path / "model.safetensors"), dict[str, Tensor]()
    for seed, name in enumerate([name for name in stored if "_proj" in name]):
        weight, module = stored.pop(name), name.removesuffix(".weight")
        shape = Compressed(form, strategy=preset["strategy"], group=preset.get("group_size", 1), block=(32, 32))
        scale_shape = shape._scale_shape((weight.shape[0], weight.shape[1]))
        generator = torch.Generator().manual_seed(seed)
        scale = (0.02 * (0.5 + torch.rand(scale_shape, generator=generator))).bfloat16()
        zero = torch.randint(-3, 4, scale_shape, generator=generator, dtype=torch.int8)
        state = {"weight": weight.bfloat16(), "weight_scale": scale}
        state |= {} if preset.get("symmetric", True) else {"weight_zero_point": zero}
        compressed = compressor.compress(state, scheme)
        wanted[name] = compressor.decompress(compressed, scheme)["weight"]
        stored |= {f"{module}.{part}": tensor.contiguous() for part, tensor in compressed.items()}
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    settings = quantization.QuantizationConfig(
        config_groups={"group_0": scheme}, format=form, quantization_status="compressed", ignore=["lm_head"]
    )
    edit_config(tmp_path, quantization_config=settings.model_dump(mode="json"))
    tensors = check_tensors(tmp_path)
    assert library.__version__ and len(wanted) == 7
    for name, numbers in wanted.items():
        assert torch.equal(tensors[name][:].to(numbers.dtype), numbers), name
