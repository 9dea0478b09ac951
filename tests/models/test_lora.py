"""Adapters that PEFT itself makes and saves, against PEFT's own answers; and what is refused, by its name."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from specserve.checkpoint.peft import TENSORS
from specserve.checkpoint.weights import Weights
from specserve.errors import CapacityError, ModelError
from specserve.kernels.reference import Kernels
from specserve.models import lora
from specserve.models.decoder import Decoder
from specserve.models.loader import load_model
from specserve.models.lora import read_adapter
from specserve.testing import Feed, PagedDecoder, write_adapter, write_tiny_model

PROMPT = list(range(11, 52))
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# By family: layers as its checkpoints name them, and the tiny model's own settings.
CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", ALL, {}, {}),
    "llama-patterns": (
        "llama",
        ALL,
        {},
        {
            "rank_pattern": {"q_proj": 7, r"layers\.1\.mlp\.up_proj": 1},
            "alpha_pattern": {"o_proj": 50},
            "lora_alpha": 3,
        },
    ),
    "llama-rslora": ("llama", ALL, {}, {"use_rslora": True, "lora_alpha": 5}),
    "llama-embedding-and-head": ("llama", ("embed_tokens", "lm_head", "k_proj"), {}, {}),
    "llama-tied-embedding": ("llama", ("embed_tokens", "k_proj"), {"tie_word_embeddings": True}, {}),
    "qwen2": ("qwen2", ALL, {}, {}),
    "qwen3": ("qwen3", ALL, {}, {}),
    "gemma3": ("gemma3", ("embed_tokens", *ALL), {}, {}),
    "granite": ("granite", ("lm_head", *ALL), {}, {}),
    "smollm3": ("smollm3", ALL, {}, {}),
    "olmo2": ("olmo2", ALL, {}, {}),
    "phi3": ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), {}, {}),
    "glm": ("glm", ("q_proj", "o_proj", "gate_up_proj", "down_proj"), {}, {}),
    "gpt2": ("gpt2", ("c_attn", "c_proj", "c_fc", "wte"), {}, {"fan_in_fan_out": True}),
    "gpt_neox": ("gpt_neox", ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "embed_out"), {}, {}),
    "gptj": ("gptj", ("q_proj", "v_proj", "out_proj", "fc_in", "fc_out"), {}, {}),
    "gpt_bigcode": ("gpt_bigcode", ("c_attn", "c_proj", "c_fc"), {}, {}),
    "bloom": ("bloom", ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"), {}, {}),
    "falcon": ("falcon", ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"), {}, {}),
    "opt": ("opt", ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"), {}, {}),
    "starcoder2": ("starcoder2", ("q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"), {}, {}),
    "mistral": ("mistral", ALL, {}, {}),
    "ernie4_5": ("ernie4_5", ("lm_head", *ALL), {}, {}),
    "helium": ("helium", ALL, {}, {}),
    "olmo3": ("olmo3", ALL, {}, {}),
    "mpt": ("mpt", ("Wqkv", "out_proj", "up_proj", "down_proj", "wte"), {}, {}),
    "olmoe": ("olmoe", ("q_proj", "k_proj", "v_proj", "o_proj", "lm_head"), {}, {}),
    "qwen2_moe-shared-expert": ("qwen2_moe", ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), {}, {}),
    "mixtral": ("mixtral", ("q_proj", "k_proj", "v_proj", "o_proj"), {}, {}),
    "qwen3_moe": ("qwen3_moe", ("q_proj", "v_proj"), {}, {}),
}


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_peft(case: str, tmp_path: Path) -> None:
    family, targets, overrides, settings = CASES[case]
    model = write_tiny_model(tmp_path / "model", family, **overrides)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        config = peft.LoraConfig(
            **{"r": 4, "lora_alpha": 6, **settings},
            target_modules=list(targets),
            init_lora_weights=False,
            task_type="CAUSAL_LM",
        )
        torch.manual_seed(1)
        adapted = peft.get_peft_model(base, config)
        adapted.save_pretrained(tmp_path / "adapter")
    with torch.inference_mode():
        wanted = adapted.eval()(torch.tensor([PROMPT])).logits[0]
        with adapted.disable_adapter():
            plain = adapted(torch.tensor([PROMPT])).logits[0]
    decoder = load_model(model, Kernels(torch.device("cpu"), torch.float32))
    assert isinstance(decoder, Decoder)
    decoder.hold_adapters(2, 8)
    decoder.place_adapter(1, decoder.pack_adapter(read_adapter(tmp_path / "adapter", model, 8).weights))
    found = PagedDecoder(decoder, 1, 64).chunks(0, PROMPT, 64, adapter=1)[:, : wanted.shape[1]]
    assert (wanted - plain).abs().mean() > 0.01, "the adapter says something"
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


# --- families whose code transformers does not have: the adapter against its model with the adapter merged -----------

LLAMA = ("embed_tokens", "lm_head", *ALL)
# By family: layers as its checkpoints name them, and the tiny model's own settings.
MERGED: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "aquila": ("aquila", LLAMA, {}),
    "internlm": ("internlm", LLAMA, {}),
    "mimo": ("mimo", LLAMA, {}),
    "baichuan": ("baichuan", ("W_pack", "embed_tokens", "lm_head", "o_proj", "gate_proj", "down_proj"), {}),
    "baichuan-alibi": ("baichuan", ("W_pack",), {"max_position_embeddings": None}),
    "internlm2": ("internlm2", ("wqkv", "wo", "w1", "w2", "w3", "tok_embeddings", "output"), {}),
    "internlm2-multihead": ("internlm2", ("wqkv",), {"num_key_value_heads": None}),
    "qwen": ("qwen", ("c_attn", "c_proj", "w1", "w2", "wte", "lm_head"), {}),
}


@pytest.mark.parametrize("case", MERGED)
def test_answers_are_those_of_the_merged_model(case: str, tmp_path: Path) -> None:
    family, targets, overrides = MERGED[case]
    model = write_tiny_model(tmp_path / "model", family, **overrides)
    tensors = load_file(model / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    adapter = write_adapter(tmp_path / "adapter", shapes, rank=5, targets=targets, lora_alpha=7)
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in load_file(adapter / TENSORS)} == set(targets)
    merged = shutil.copytree(model, tmp_path / "merged")
    save_file(with_adapter(tensors, adapter, 7 / 5), merged / "model.safetensors", {"format": "pt"})
    adapted, plain = decoder_of(model), decoder_of(merged)
    adapted.hold_adapters(1, 8)
    adapted.place_adapter(0, adapted.pack_adapter(read_adapter(adapter, model, 8).weights))
    found, wanted = (PagedDecoder(each, 2, 64) for each in (adapted, plain))
    logits, expected = found.chunks(0, PROMPT, 64, adapter=0), wanted.chunks(0, PROMPT, 64)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert (found.chunks(1, PROMPT, 64) - logits).abs().mean() > 0.01, "the adapter says something"
    for _ in range(16):
        tokens = [int(each[-1].argmax()) for each in (logits, expected)]
        assert tokens[0] == tokens[1]
        (logits,), (expected,) = found.step(Feed(0, tokens[:1], adapter=0)), wanted.step(Feed(0, tokens[:1]))


def decoder_of(folder: Path) -> Decoder:
    decoder = load_model(folder, Kernels(torch.device("cpu"), torch.float32))
    assert isinstance(decoder, Decoder)
    return decoder


def with_adapter(tensors: dict[str, Tensor], adapter: Path, scaling: float) -> dict[str, Tensor]:
    """The tensors of a checkpoint with those of an adapter's folder merged, by the names that both have."""
    parts, merged = load_file(adapter / TENSORS), dict(tensors)
    for name in parts:
        module, _, side = name.removeprefix("base_model.model.").partition(".lora_")
        if side == "A.weight":
            merged[f"{module}.weight"] = tensors[f"{module}.weight"] + scaling * parts[_other(name)] @ parts[name]
        elif side == "embedding_A":
            merged[f"{module}.weight"] = tensors[f"{module}.weight"] + scaling * (parts[_other(name)] @ parts[name]).T
    return merged


def _other(name: str) -> str:
    return name.replace("lora_A", "lora_B").replace("lora_embedding_A", "lora_embedding_B")


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


@pytest.fixture
def adapter(tiny: Path, tmp_path: Path) -> Path:
    shapes = {name: info.shape for name, info in Weights(tiny).infos.items()}
    return write_adapter(tmp_path / "adapter", shapes, rank=4, base_model_name_or_path="somebody/base")


def configured(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def stored(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return rewrite


Q = "base_model.model.model.layers.0.self_attn.q_proj"
A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "has no adapter_config.json"),
    "config is no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "is not valid JSON"),
    "config is a list": (lambda f: (f / "adapter_config.json").write_text("[]"), "must hold an object"),
    "no tensors": (lambda f: (f / "adapter_model.safetensors").unlink(), r"has no adapter_model.safetensors"),
    "pickled": (
        lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"),
        "only as adapter_model.bin, a pickle",
    ),
    "cut": (lambda f: (f / "adapter_model.safetensors").write_bytes(b"\x10"), "truncated or no safetensors file"),
    "other kind": (configured(peft_type="IA3"), "peft_type is 'IA3'; only LORA"),
    "dora": (configured(use_dora=True), r"sets use_dora \(DoRA\), which is not supported"),
    "modules_to_save": (configured(modules_to_save=["lm_head"]), "sets modules_to_save"),
    "biases": (configured(bias="all"), "bias is 'all'"),
    "tokens": (configured(trainable_token_indices=[1]), "sets trainable_token_indices"),
    "pissa": (configured(init_lora_weights="pissa_niter_16"), "changed the model's own weights"),
    "no rank": (configured(r=0), "r is 0; it must be a positive number"),
    "alpha is text": (configured(lora_alpha="x"), "lora_alpha is 'x'"),
    "patterns are a list": (configured(rank_pattern=["x"]), "rank_pattern is"),
    "pattern is none": (configured(alpha_pattern={"(": 2}), "alpha_pattern is"),
    "alpha of a layer": (
        configured(alpha_pattern={"q_proj": "x"}),
        r"lora_alpha of model\.layers\.0\.self_attn\.q_proj",
    ),
    "alpha of a layer is 0": (configured(alpha_pattern={"q_proj": 0}), "is 0; it must be a positive number"),
    "alpha is enormous": (configured(lora_alpha=10**400), "lora_alpha is"),
    "an embedding's parts of a linear layer": (
        stored(lambda t: t.update({f"{Q}.lora_embedding_A": t.pop(A), f"{Q}.lora_embedding_B": t.pop(B)})),
        "q_proj of .* is not an embedding",
    ),
    "rank of a layer": (configured(rank_pattern={"q_proj": 2}), "has rank 4, and adapter_config.json says 2"),
    "A without B": (stored(lambda t: t.pop(B)), "lacks lora_B of model.layers.0.self_attn.q_proj"),
    "B without A": (stored(lambda t: t.pop(A)), "lacks lora_A"),
    "ranks differ": (stored(lambda t: t.update({B: t[B][:, :2].clone()})), "the ranks differ"),
    "a vector": (stored(lambda t: t.update({A: t[A][0].clone()})), "must be a matrix of floats"),
    "integers": (stored(lambda t: t.update({A: t[A].int()})), "must be a matrix of floats"),
    "nan": (stored(lambda t: t[B].fill_(float("nan"))), r"q_proj\.lora_B\.weight holds NaN"),
    "infinite": (stored(lambda t: t[A].fill_(float("inf"))), "holds NaN or infinite"),
    "other width": (stored(lambda t: t.update({A: t[A][:, :32].clone()})), "it was made for somebody/base"),
    "other height": (stored(lambda t: t.update({B: t[B][:32].clone()})), "maps 64 numbers to 32"),
    "unknown layer": (
        stored(lambda t: t.update({name.replace("q_proj", "x_proj"): t[name].clone() for name in (A, B)})),
        r"changes model\.layers\.0\.self_attn\.x_proj, which .* does not have. It was made for somebody/base",
    ),
    "layer too many": (
        stored(lambda t: t.update({name.replace("s.0", "s.9"): t[name].clone() for name in (A, B)})),
        r"changes model\.layers\.9",
    ),
    "strange tensor": (stored(lambda t: t.update({"x": t[A].clone()})), "has x, which is no part"),
    "nothing": (stored(lambda t: [t.pop(name) for name in list(t)]), "has no lora_A and lora_B"),
    "two adapters": (
        stored(lambda t: t.update({A.replace("lora_A", "lora_A.other"): t[A].clone()})),
        "has several adapters",
    ),
    "a resized head": (
        stored(lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(7, 64)})),
        "is not the model's own",
    ),
    "a trained head": (
        stored(lambda t: t.update({"base_model.model.lm_head.weight": torch.randn(293, 64)})),
        "is not the model's own",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_adapters_are_refused(case: str, tiny: Path, adapter: Path) -> None:
    read_adapter(adapter, tiny, 4)
    damage, words = BROKEN[case]
    damage(adapter)
    with pytest.raises(ModelError, match=words) as raised:
        read_adapter(adapter, tiny, 4)
    assert str(adapter) in str(raised.value) and "\n" not in str(raised.value)


def test_a_head_saved_beside_an_adapter_is_the_models_own_or_refused(tiny: Path, adapter: Path) -> None:
    head, name = Weights(tiny)["lm_head.weight"].float(), "base_model.model.lm_head.weight"
    stored(lambda t: t.update({name: head.bfloat16().float()}))(adapter)
    read_adapter(adapter, tiny, 4)
    stored(lambda t: t.update({name: head * 1.02}))(adapter)
    with pytest.raises(ModelError, match="is not the model's own"):
        read_adapter(adapter, tiny, 4)


def test_a_layer_that_is_changed_twice_is_refused(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", "phi3")
    shapes = {name: info.shape for name, info in Weights(model).infos.items()}
    adapter = write_adapter(tmp_path / "adapter", shapes, rank=4, targets=("qkv_proj",))
    parts = {"A": torch.zeros(4, 64), "B": torch.zeros(64, 4)}
    stored(lambda t: t.update({f"{Q}.lora_{side}.weight": part for side, part in parts.items()}))(adapter)
    with pytest.raises(ModelError, match=r"changes model\.layers\.0\.self_attn\.q_proj twice"):
        read_adapter(adapter, model, 4)


def test_a_folder_that_is_none_and_a_rank_too_high(tiny: Path, adapter: Path) -> None:
    with pytest.raises(ModelError, match="is not a folder"):
        read_adapter(adapter / "none", tiny, 4)
    with pytest.raises(ModelError, match=r"rank 4, and this engine takes up to 3. Start it with --max-lora-rank 4"):
        read_adapter(adapter, tiny, 3)


def test_memory_that_does_not_suffice_is_said_with_figures(
    tiny: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "free_memory", lambda device: 1000)
    with pytest.raises(CapacityError, match=r"takes 0 MiB, and 0 MiB are free"):
        read_adapter(adapter, tiny, 4)


def test_adapters_of_the_same_numbers_have_the_same_digest(tiny: Path, adapter: Path, tmp_path: Path) -> None:
    first = read_adapter(adapter, tiny, 4)
    other = tmp_path / "other"
    adapter.rename(other)
    assert read_adapter(other, tiny, 4).digest == first.digest
    configured(lora_alpha=5)(other)
    assert read_adapter(other, tiny, 4).digest != first.digest


@pytest.mark.parametrize(
    ("family", "targets"), [("mixtral", ("gate", "down_proj")), ("qwen2_moe", ("gate", "shared_expert_gate"))]
)
def test_adapters_of_experts_and_routers_are_refused(family: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", family)
    decoder = load_model(model, Kernels(torch.device("cpu"), torch.float32))
    assert isinstance(decoder, Decoder)
    decoder.hold_adapters(1, 8)
    shapes = {name.removeprefix("x"): shape for name, shape in decoder.spec.shapes().items()}
    for target in targets:
        folder = write_adapter(tmp_path / target, shapes, rank=2, targets=(target,))
        with pytest.raises(ModelError, match=r"takes no adapters|does not have"):
            decoder.pack_adapter(read_adapter(folder, model, 8).weights)
