"""Draft heads on disk. Checkpoints are made here with the names, shapes and keys of those who publish them, written out
and not taken from the code that reads them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specserve.errors import ModelError
from specserve.models.heads.formats import fits, is_head, read_head, write_head
from specserve.models.heads.spec import BlockSpec, EagleSpec, HeadSpec, MedusaSpec, TargetShape
from specserve.models.heads.speculators import Verifier
from specserve.models.spec import DecoderSpec, RmsNorm, Rope
from specserve.testing import llama_spec

HIDDEN, INNER, VOCAB, DRAFT, RANK = 16, 24, 40, 12, 3
Config = dict[str, Any]
Tensors = dict[str, Tensor]

LLAMA: Config = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "vocab_size": VOCAB,
}
QWEN3: Config = LLAMA | {"model_type": "qwen3", "head_dim": 4, "num_hidden_layers": 2, "rope_theta": 1_000_000}
VERIFIER = {"speculators_config": {"algorithm": "x", "verifier": {"name_or_path": "org/target", "architectures": []}}}


def made(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    generator = torch.Generator().manual_seed(len(shapes))
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def layer(prefix: str, attention_in: int = HIDDEN, qk_norm: bool = False) -> dict[str, tuple[int, ...]]:
    """The tensors of a decoder layer that all have."""
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (16, attention_in),
        "self_attn.k_proj.weight": (8, attention_in),
        "self_attn.v_proj.weight": (8, attention_in),
        "self_attn.o_proj.weight": (HIDDEN, 16),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    if qk_norm:
        shapes |= {"self_attn.q_norm.weight": (4,), "self_attn.k_norm.weight": (4,)}
    return {prefix + name: shape for name, shape in shapes.items()}


def vocabulary() -> Tensors:
    """Draft id i is the target's 3 i + 1."""
    ids = 3 * torch.arange(DRAFT) + 1
    return {"d2t": ids - torch.arange(DRAFT), "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)}


def eagle_1() -> tuple[Config, Tensors]:
    """yuhuili/EAGLE-LLaMA3-Instruct-8B; see eagle/model/cnets1.py."""
    shapes = {"embed_tokens.weight": (VOCAB, HIDDEN), "fc.weight": (HIDDEN, 2 * HIDDEN), **layer("layers.0.")}
    return LLAMA | {"bias": False}, made(shapes)


def eagle_3() -> tuple[Config, Tensors]:
    """yuhuili/EAGLE3-LLaMA3.1-Instruct-8B; see eagle/model/cnets.py."""
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        **layer("midlayer.", 2 * HIDDEN),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT, HIDDEN),
    }
    return LLAMA | {"draft_vocab_size": DRAFT}, made(shapes) | vocabulary()


def specforge() -> tuple[Config, Tensors]:
    """A SpecForge EAGLE-3.1 draft; see configs/qwen3-30B-A3B-eagle3.1.json."""
    config, tensors = eagle_3()
    own = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    norms = {f"fc_norm.{i}.weight": torch.ones(HIDDEN) for i in range(3)}
    flags = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": own, "fc_norm": True, "norm_output": True}
    return config | flags, tensors | norms | {"embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}


def speculators_eagle() -> tuple[Config, Tensors]:
    """speculators/models/eagle.py; HASS, whose fc has a bias."""
    shapes = {
        "fusion_fc.weight": (HIDDEN, 2 * HIDDEN),
        "fusion_fc.bias": (HIDDEN,),
        **layer("transformer."),
    }
    config = {
        "speculators_model_type": "eagle",
        "transformer_layer_config": LLAMA,
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "layernorms": False,
        "fusion_bias": True,
    }
    return config | VERIFIER, made(shapes)


def speculators_eagle_3() -> tuple[Config, Tensors]:
    """speculators/models/eagle3."""
    _, tensors = eagle_3()
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": LLAMA,
        "draft_vocab_size": DRAFT,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "target_hidden_size": None,
    }
    own = {"input_norm.weight": torch.ones(3 * HIDDEN), "embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}
    return config | VERIFIER, renamed | own


def dflash_body(num_taps: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, num_taps * HIDDEN)}
    shapes |= {"hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for index in range(2):
        shapes |= layer(f"layers.{index}.", qk_norm=True) | {f"layers.{index}.input_layernorm.weight": (HIDDEN,)}
    return shapes


def dflash() -> tuple[Config, Tensors]:
    """z-lab/Qwen3-4B-DFlash-b16; SpecForge's configs/qwen3-4b-dflash.json has the same keys."""
    config = QWEN3 | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 8,
        "dflash_config": {"mask_token_id": 39, "target_layer_ids": [1, 4]},
        "num_target_layers": 6,
        "layer_types": ["full_attention"] * 2,
    }
    return config, made(dflash_body(2))


DSPARK_HEADS: dict[str, tuple[int, ...]] = {
    "markov_head.markov_w1.weight": (VOCAB, RANK),
    "markov_head.markov_w2.weight": (VOCAB, RANK),
    "confidence_head.proj.weight": (1, HIDDEN + RANK),
    "confidence_head.proj.bias": (1,),
}


def dspark() -> tuple[Config, Tensors]:
    """deepseek-ai/dspark_qwen3_4b_block7, all keys at the top."""
    config = QWEN3 | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 7,
        "mask_token_id": 39,
        "target_layer_ids": [1, 4],
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return config, made(dflash_body(2) | DSPARK_HEADS)


def speculators_dspark() -> tuple[Config, Tensors]:
    """speculators/models/dspark, with a draft vocabulary."""
    config = {
        "speculators_model_type": "dspark",
        "transformer_layer_config": QWEN3,
        "draft_vocab_size": DRAFT,
        "block_size": 8,
        "mask_token_id": 39,
        "aux_hidden_state_layer_ids": [2, 5],
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
    }
    heads = {"markov_head.markov_w1.weight": (VOCAB, RANK), "markov_head.markov_w2.weight": (DRAFT, RANK)}
    own = {"lm_head.weight": (DRAFT, HIDDEN), "embed_tokens.weight": (VOCAB, HIDDEN), "verifier_norm.weight": (HIDDEN,)}
    return config | VERIFIER, made(dflash_body(2) | heads | own) | vocabulary()


def medusa() -> tuple[Config, Tensors]:
    """FasterDecoding/medusa-vicuna-7b-v1.3, whose config.json miscounts its heads."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(3):
        shapes |= {f"{head}.0.linear.weight": (HIDDEN, HIDDEN), f"{head}.0.linear.bias": (HIDDEN,)}
        shapes[f"{head}.1.weight"] = (VOCAB, HIDDEN)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    return config, made(shapes)


Maker = Callable[[], tuple[Config, Tensors]]
PICKLED = {eagle_1: "pytorch_model.bin", eagle_3: "pytorch_model.bin", medusa: "medusa_lm_head.pt"}


def save(folder: Path, config: Config, tensors: Tensors, pickled: str | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled is None:
        save_file(tensors, folder / "model.safetensors")
    else:
        torch.save(tensors, folder / pickled)
    return folder


# --- reading ----------------------------------------------------------------------------------------------------------

COMMON = {"target.hidden_size": HIDDEN, "target.vocab_size": VOCAB}
EXPECTED: list[tuple[Maker, str, str | None, int, dict[str, Any]]] = [
    (eagle_1, "EAGLE", None, 0, {"version": 1, "has_embedding": True, "fc_bias": False, "hidden_layers": ()}),
    (eagle_3, "EAGLE", None, 12, {"version": 3, "hidden_layers": (1, 5, 8), "target.num_layers": 12}),
    (
        specforge,
        "SpecForge",
        None,
        0,
        {"hidden_layers": (1, 3, 4), "fc_norms": True, "norm_output": True, "has_embedding": True},
    ),
    (speculators_eagle, "speculators", "org/target", 0, {"version": 1, "fc_bias": True, "has_embedding": False}),
    (
        speculators_eagle_3,
        "speculators",
        "org/target",
        0,
        {
            "version": 3,
            "hidden_layers": (1, 3, 4),
            "norm_before_residual": True,
            "norm_before_fc": True,
            "layers.vocab_size": DRAFT,
        },
    ),
    (
        dflash,
        "DFlash",
        None,
        0,
        {
            "hidden_layers": (1, 4),
            "block_size": 8,
            "num_proposed": 7,
            "samples_anchor": False,
            "target.num_layers": 6,
            "is_causal": False,
            "layers.layers.0.attention.head_norm": RmsNorm(1e-5),
            "layers.num_layers": 2,
            "mask_token_id": 39,
            "has_head": False,
        },
    ),
    (
        dspark,
        "DSpark",
        None,
        0,
        {
            "hidden_layers": (1, 4),
            "num_proposed": 7,
            "samples_anchor": True,
            "bigram_rank": RANK,
            "has_confidence": True,
            "confidence_reads_bigram": True,
        },
    ),
    (
        speculators_dspark,
        "speculators",
        "org/target",
        0,
        {
            "hidden_layers": (1, 4),
            "num_proposed": 7,
            "samples_anchor": False,
            "bigram_rank": RANK,
            "has_confidence": False,
            "layers.vocab_size": DRAFT,
            "has_head": True,
        },
    ),
    (medusa, "Medusa", "lmsys/vicuna-7b-v1.3", 0, {"num_heads": 3, "num_layers": 1, "draft_vocab_size": VOCAB}),
]


@pytest.mark.parametrize(("make", "fmt", "verifier", "num_layers", "fields"), EXPECTED)
def test_reads(
    tmp_path: Path, make: Maker, fmt: str, verifier: str | None, num_layers: int, fields: dict[str, Any]
) -> None:
    config, tensors = make()
    folder = save(tmp_path / "head", config, tensors, PICKLED.get(make))
    assert is_head(folder)
    head = read_head(folder, num_layers)
    assert (head.format, head.verifier) == (fmt, verifier)
    for path, value in (COMMON | fields).items():
        found: Any = head.spec
        for name in path.split("."):
            found = found[int(name)] if name.isdigit() else getattr(found, name)
        assert found == value, path
    assert {name: tuple(head.weights[name].shape) for name in head.weights} == head.spec.shapes()
    floats = [name for name in tensors if name not in ("d2t", "t2d", "verifier_norm.weight")]
    assert len(floats) == len(head.weights)
    assert head.weights.num_parameters == sum(tensors[name].numel() for name in floats)
    assert (head.d2t is None) == ("d2t" not in tensors)
    if head.d2t is not None:
        assert torch.equal(head.d2t, tensors["d2t"])


RENAMED = [
    (eagle_1, "layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
    (eagle_3, "layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight"),
    (eagle_3, "layers.0.self_attn.k_proj.weight", "midlayer.self_attn.k_proj.weight"),
    (speculators_eagle, "fc.weight", "fusion_fc.weight"),
    (speculators_eagle, "layers.0.mlp.down_proj.weight", "transformer.mlp.down_proj.weight"),
    (dspark, "bigram_in.weight", "markov_head.markov_w1.weight"),
    (dspark, "bigram_out.weight", "markov_head.markov_w2.weight"),
    (dspark, "confidence.weight", "confidence_head.proj.weight"),
    (medusa, "2.1.weight", "2.1.weight"),
]


@pytest.mark.parametrize(("make", "name", "stored"), RENAMED)
def test_every_name_stands_for_its_tensor(tmp_path: Path, make: Maker, name: str, stored: str) -> None:
    config, tensors = make()
    head = read_head(save(tmp_path, config, tensors, PICKLED.get(make)), 12)
    assert torch.equal(head.weights[name], tensors[stored])


def test_names_below_model_are_the_same(tmp_path: Path) -> None:
    config, tensors = eagle_3()
    renamed = {name if name in ("d2t", "t2d") else f"model.{name}": tensor for name, tensor in tensors.items()}
    assert len(read_head(save(tmp_path, config, renamed), 12).weights) == len(tensors) - 2


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, (1, 3, 4)),  # vLLM: the input of layer i
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, (1, 3, 4)),  # SGLang: the output
        ({}, (1, 5, 8)),  # EAGLE's code: the inputs of 2, n/2 and n - 3 of 12
    ],
)
def test_ids_of_layers_are_counted_as_each_format_does(tmp_path: Path, own: Config, expected: tuple[int, ...]) -> None:
    config, tensors = eagle_3()
    spec = read_head(save(tmp_path, config | own, tensors), 12).spec
    assert isinstance(spec, EagleSpec) and spec.hidden_layers == expected


@pytest.mark.parametrize(
    ("settings", "causal", "windows"),
    [
        ({}, False, (None, None)),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}, True, (9, 9)),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "is_causal": False}, False, (9, 9)),
        ({"is_causal": True}, True, (None, None)),
    ],
)
def test_which_rows_of_a_block_see_each_other(
    tmp_path: Path, settings: Config, causal: bool, windows: tuple[int | None, ...]
) -> None:
    config, tensors = dflash()
    spec = read_head(save(tmp_path, config | settings, tensors)).spec
    assert isinstance(spec, BlockSpec) and spec.is_causal == causal
    assert tuple(layer.attention.window for layer in spec.layers.layers) == windows


def test_qwen_3_heads_are_128_wide_unless_said(tmp_path: Path) -> None:
    """As transformers has it: to_diff_dict need not write it."""
    config, tensors = dflash()
    del config["head_dim"]
    with pytest.raises(ModelError, match=r"q_norm\.weight has shape \(4,\).*\(128,\)"):
        read_head(save(tmp_path, config, tensors))


def test_medusa_needs_no_configuration(tmp_path: Path) -> None:
    _, tensors = medusa()
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    spec = read_head(tmp_path).spec
    assert isinstance(spec, MedusaSpec) and spec.num_heads == 3 and not spec.has_draft_vocab


def test_medusa_as_vllm_names_it(tmp_path: Path) -> None:
    _, tensors = medusa()
    renamed = {
        (
            f"lm_heads.{name[0]}.weight"
            if name.endswith(".1.weight")
            else f"blocks.{name[0]}.layers.0.{name.rpartition('.')[2]}"
        ): tensor
        for name, tensor in tensors.items()
    }
    head = read_head(save(tmp_path, {"model_type": "medusa"}, renamed))
    assert torch.equal(head.weights["1.0.linear.bias"], tensors["1.0.linear.bias"])
    assert torch.equal(head.weights["2.1.weight"], tensors["2.1.weight"])


def test_a_full_vocabulary_needs_no_table(tmp_path: Path) -> None:
    """EAGLE writes both tables as zeros where the draft ids are the target's."""
    config, tensors = eagle_3()
    zeros = {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
    head = read_head(
        save(tmp_path, config | {"draft_vocab_size": VOCAB}, tensors | zeros | {"lm_head.weight": torch.ones(40, 16)}),
        12,
    )
    assert head.d2t is None and not head.spec.has_draft_vocab


# --- errors -----------------------------------------------------------------------------------------------------------

LATE = "layers.1.mlp.up_proj.weight"


def without(*names: str) -> Callable[[Config, Tensors], None]:
    def change(config: Config, tensors: Tensors) -> None:
        for name in names:
            del (config if name in config else tensors)[name]

    return change


def with_config(**settings: Any) -> Callable[[Config, Tensors], None]:
    return lambda config, tensors: config.update(settings)


def with_tensors(**new: Tensor) -> Callable[[Config, Tensors], None]:
    """Double underscores are dots."""
    return lambda config, tensors: tensors.update({name.replace("__", "."): new[name] for name in new})


def renamed(old: str, new: str) -> Callable[[Config, Tensors], None]:
    return lambda config, tensors: tensors.update({new: tensors.pop(old)})


def shifted(amount: int) -> Callable[[Config, Tensors], None]:
    def change(config: Config, tensors: Tensors) -> None:
        tensors["d2t"] = tensors["d2t"] + amount
        del tensors["t2d"]

    return change


def swapped(config: Config, tensors: Tensors) -> None:
    """Two ids of the target in the wrong order."""
    ids = tensors["d2t"] + torch.arange(DRAFT)
    ids[[0, 1]] = ids[[1, 0]]
    tensors["d2t"] = ids - torch.arange(DRAFT)


def target_ids(config: Config, tensors: Tensors) -> None:
    """A table of the target's ids where offsets belong."""
    tensors["d2t"] = tensors["d2t"] + torch.arange(DRAFT)
    tensors["d2t"][-1] = VOCAB - 1
    del tensors["t2d"]


def other_t2d(config: Config, tensors: Tensors) -> None:
    tensors["t2d"] = tensors["t2d"].roll(1)


ERRORS: list[tuple[Maker, Callable[[Config, Tensors], None], str]] = [
    # tensors
    (eagle_1, without("layers.0.mlp.up_proj.weight"), r"lacks layers\.0\.mlp\.up_proj\.weight"),
    (dflash, renamed(LATE, "layers.1.mlp.upp_proj.weight"), r"lacks layers\.1\.mlp\.up_proj\.weight \(near .*upp_proj"),
    (dflash, with_tensors(norm_2__weight=torch.ones(16)), r"has norm_2\.weight, which .*near .*norm\.weight"),
    (eagle_3, with_tensors(mask_hidden=torch.ones(1, 48)), r"has mask_hidden, which"),
    (eagle_3, with_tensors(fc__weight=torch.ones(16, 32)), r"fc\.weight has shape \(16, 32\).*\(16, 48\)"),
    (eagle_3, with_tensors(fc__weight=torch.ones(16, 48, dtype=torch.int64)), r"fc\.weight holds I64.*BF16"),
    (eagle_3, with_tensors(layers__0__hidden_norm__weight=torch.ones(16)), r"are the same tensor"),
    (dspark, without("markov_head.markov_w2.weight"), r"lacks bigram_out\.weight"),
    (dspark, with_config(markov_rank=8), r"markov_w1\.weight has shape \(40, 3\).*\(40, 8\)"),
    (speculators_eagle_3, without("input_norm.weight"), r"lacks input_norm\.weight"),
    (speculators_dspark, without("lm_head.weight"), r"lacks lm_head\.weight"),
    # vocabularies
    (eagle_3, without("d2t"), r"lacks d2t: its 12 draft ids .* 40"),
    (eagle_3, swapped, r"no table of offsets"),
    (eagle_3, shifted(-2), r"no table of offsets.*goes from -1 to"),
    (eagle_3, shifted(10), r"no table of offsets.*below the target's 40 ids.* to 44"),
    (eagle_3, shifted(6), r"no table of offsets.*to 40\."),
    (eagle_3, with_tensors(d2t=-torch.arange(DRAFT)), r"no table of offsets.*from 0 to 0"),
    (eagle_3, target_ids, r"no table of offsets.*subtracting arange"),
    (eagle_3, with_tensors(d2t=torch.zeros(12, dtype=torch.int32)), r"d2t is int32 \[12\].*int64 \[12\]"),
    (eagle_3, with_tensors(d2t=torch.zeros(11, dtype=torch.int64)), r"d2t is int64 \[11\]"),
    (eagle_3, other_t2d, r"t2d and d2t name different ids"),
    (eagle_3, with_config(vocab_size=50), r"t2d is bool \[40\].*50 ids"),
    (dflash, with_config(dflash_config={"mask_token_id": 40, "target_layer_ids": [1, 4]}), r"mask_token_id is 40"),
    # configurations
    (eagle_1, without("num_attention_heads"), r"no num_attention_heads"),
    (eagle_3, without("hidden_size"), r"no hidden_size"),
    (speculators_eagle_3, without("norm_before_residual"), r"no norm_before_residual"),
    (speculators_eagle_3, without("transformer_layer_config"), r"no transformer_layer_config"),
    (speculators_dspark, without("aux_hidden_state_layer_ids"), r"no aux_hidden_state_layer_ids"),
    (speculators_dspark, without("mask_token_id"), r"no mask_token_id"),
    (dflash, without("block_size"), r"no block_size"),
    (dflash, with_config(dflash_config={"mask_token_id": 1}), r"no target_layer_ids"),
    (dflash, with_config(num_target_layers=4), r"output of layer 4 of a target with layers 0 to 3"),
    (dflash, with_config(dflash_config={"mask_token_id": 1, "target_layer_ids": [4, 4]}), r"each once"),
    (speculators_eagle_3, with_config(eagle_aux_hidden_state_layer_ids=[0, 3, 5]), r"input of layer 0"),
    (specforge, with_config(eagle_aux_hidden_state_layer_ids=[1, 3, 4]), r"contradict each other"),
    (speculators_eagle_3, with_config(target_hidden_size=32), r"fc\.weight has shape \(16, 48\).*\(16, 96\)"),
    # features
    (speculators_eagle, with_config(layernorms=True), r"layernorms is true"),
    (speculators_eagle_3, with_config(speculators_model_type="eagle33"), r"eagle33.*Did you mean 'eagle3'"),
    (speculators_eagle_3, with_config(speculators_model_type="mtp"), r"Unknown speculators_model_type 'mtp'"),
    (specforge, with_config(eagle_config={"use_aux_hidden_state": False}), r"use_aux_hidden_state is false"),
    (eagle_3, with_config(model_type="deepseek_v3"), r"'deepseek_v3'; supported are llama"),
    (eagle_3, with_config(rope_scaling={"type": "mrope", "factor": 2.0}), r"'mrope' is not supported"),
    (dspark, with_config(markov_head_type="gated"), r"markov_head_type is 'gated'"),
    (dflash, with_config(projector_type="domino"), r"projector_type is 'domino'"),
    (dflash, with_config(is_neox_style=False), r"interleaved rotary"),
    (
        dflash,
        with_config(layer_types=["sliding_attention", "full_attention"], sliding_window=9),
        r"sliding and full attention",
    ),
    (medusa, without("0.0.linear.bias", "1.0.linear.bias", "2.0.linear.bias"), r"have no bias"),
    (medusa, without("0.1.weight"), r"LM head of Medusa head 0 is missing"),
    (medusa, renamed("2.0.linear.weight", "99999999.0.linear.weight"), r"up to 99999999 .* there are 3 layers"),
    (medusa, without("1.1.weight"), r"lacks 1\.1\.weight"),
]


@pytest.mark.parametrize(("make", "change", "message"), ERRORS)
def test_refuses(tmp_path: Path, make: Maker, change: Callable[[Config, Tensors], None], message: str) -> None:
    config, tensors = make()
    change(config, tensors)
    folder = save(tmp_path / "head", config, tensors)
    if make is medusa:
        (folder / "model.safetensors").rename(folder / "medusa_lm_head.safetensors")
    with pytest.raises(ModelError, match=message) as caught:
        read_head(folder, 0 if make is dflash else 12)
    assert str(folder) in str(caught.value)


MAKERS = (
    eagle_1,
    eagle_3,
    specforge,
    speculators_eagle,
    speculators_eagle_3,
    dflash,
    dspark,
    speculators_dspark,
    medusa,
)


@pytest.mark.parametrize("make", MAKERS)
def test_a_value_of_any_kind_is_read_or_refused(tmp_path: Path, make: Maker) -> None:
    config, tensors = make()
    folder = save(tmp_path, config, tensors)
    paths = [(key,) for key in config]
    paths += [(key, inner) for key, value in config.items() if isinstance(value, dict) for inner in value]
    num_refused = 0
    for path in paths:
        for value in ("x", [], {}, ["x"], {"a": 1}, -1, 0, 1.5, None, True, 10**9, 10**20):
            changed = json.loads(json.dumps(config))
            place = changed
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            (folder / "config.json").write_text(json.dumps(changed))
            try:
                read_head(folder, 12)
            except ModelError:
                num_refused += 1
    assert num_refused > 3 * len(paths) or make is medusa


def test_the_target_must_be_known_where_the_layers_depend_on_it(tmp_path: Path) -> None:
    folder = save(tmp_path, *eagle_3())
    with pytest.raises(ModelError, match=r"layers 2, n/2 and n - 3.*--model"):
        read_head(folder)
    with pytest.raises(ModelError, match=r"at least 7 layers; this one has 6"):  # 2, 3 and 3
        read_head(folder, 6)


def test_a_block_without_a_word_on_its_anchor_is_refused(tmp_path: Path) -> None:
    """Flat configurations without DSpark's heads were published with masks that propose in place, and behind them."""
    config, tensors = dspark()
    plain = {name: tensor for name, tensor in tensors.items() if name not in DSPARK_HEADS}
    flags = {"markov_rank": 0, "enable_confidence_head": False}
    with pytest.raises(ModelError, match="no sample_from_anchor"):
        read_head(save(tmp_path, config | flags, plain))
    spec = read_head(save(tmp_path, config | flags | {"sample_from_anchor": False}, plain)).spec
    assert isinstance(spec, BlockSpec) and spec.num_proposed == 6


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_are_checked_when_a_tensor_is_taken(tmp_path: Path, value: float) -> None:
    config, tensors = eagle_1()
    tensors["fc.weight"][3, 5] = value
    head = read_head(save(tmp_path, config, tensors))
    head.weights["embed_tokens.weight"]
    with pytest.raises(ModelError, match=r"fc\.weight holds NaN or infinite"):
        head.weights["fc.weight"]


class Code:
    """An object that a pickle would make by calling something."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this ran",)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_code_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], zipped: bool) -> None:
    config, tensors = eagle_1()
    save(tmp_path, config, tensors, "pytorch_model.bin")
    torch.save(tensors | {"hook": Code()}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(ModelError, match=r"loading would run code.*save_file"):
        read_head(tmp_path)
    assert capsys.readouterr().out == ""


def test_an_old_pickle_of_tensors_is_read(tmp_path: Path) -> None:
    config, tensors = eagle_1()
    save(tmp_path, config, tensors, "pytorch_model.bin")
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(read_head(tmp_path).weights["fc.weight"], tensors["fc.weight"])


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([torch.ones(1)], "holds a list"),
        ({"state_dict": {"fc.weight": torch.ones(1)}}, r"holds a dict under 'state_dict'.*state_dict\(\) alone"),
        ({1: torch.ones(1)}, "under 1"),
    ],
)
def test_a_pickle_of_other_things_is_refused(tmp_path: Path, held: Any, message: str) -> None:
    config, _ = eagle_1()
    save(tmp_path, config, {}, "pytorch_model.bin")
    torch.save(held, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=message):
        read_head(tmp_path)


def test_a_damaged_pickle_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, *eagle_1(), "pytorch_model.bin")
    path = folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ModelError, match="damaged"):
        read_head(folder)


def test_a_folder_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", LLAMA, made({"model.norm.weight": (HIDDEN,)}))
    assert not is_head(folder)
    with pytest.raises(ModelError, match="no draft head that is known"):
        read_head(folder)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/training_args.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"only training_args\.bin"):
        is_head(tmp_path / "empty")


# --- a head and its target --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"hidden_size": 32}, r"hidden states of 16 numbers, and the target's have 32"),
        ({"vocab_size": 41}, r"a vocabulary of 40 ids, and the target's has 41"),
        ({"num_layers": 8}, r"a target of 6 layers, and this one has 8"),
    ],
)
def test_another_target_does_not_fit(tmp_path: Path, other: dict[str, int], message: str) -> None:
    spec = read_head(save(tmp_path, *dflash())).spec
    target = TargetShape(hidden_size=HIDDEN, num_layers=6, vocab_size=VOCAB)
    fits(spec, target)
    with pytest.raises(ModelError, match=message):
        fits(spec, dataclasses.replace(target, **other))


def test_a_target_with_too_few_layers_does_not_fit(tmp_path: Path) -> None:
    """Where the checkpoint does not say how many its target has."""
    spec = read_head(save(tmp_path, *speculators_eagle_3())).spec
    fits(spec, TargetShape(hidden_size=HIDDEN, num_layers=5, vocab_size=VOCAB))
    with pytest.raises(ModelError, match="output of layer 4, and the target has layers 0 to 3"):
        fits(spec, TargetShape(hidden_size=HIDDEN, num_layers=4, vocab_size=VOCAB))


# --- writing ----------------------------------------------------------------------------------------------------------

TARGET = TargetShape(hidden_size=HIDDEN, num_layers=6, vocab_size=VOCAB)


def decoder(**own: Any) -> DecoderSpec:
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": INNER,
        "max_len": 512,
        "norm": RmsNorm(1e-6),
    }
    return llama_spec(**(values | own))


def eagle_spec(version: int, layers: DecoderSpec, **own: Any) -> EagleSpec:
    return EagleSpec(version=version, target=TARGET, layers=layers, **own)


def block_spec(layers: DecoderSpec, **own: Any) -> BlockSpec:
    values = {"hidden_layers": (0, 2, 5), "block_size": 5, "mask_token_id": 7, "target": TARGET}
    return BlockSpec(layers=layers, **(values | own))


LLAMA_3_ROPE = Rope(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192)
SPECS: list[HeadSpec] = [
    eagle_spec(1, decoder()),
    eagle_spec(1, decoder(num_layers=2, qkv_bias=True, activation="gelu_tanh"), fc_bias=True, first_input_norm=True),
    eagle_spec(1, decoder(vocab_size=DRAFT), has_embedding=True, has_head=True, final_norm=True),
    eagle_spec(3, decoder(vocab_size=DRAFT), hidden_layers=(1, 2, 5), has_head=True, norm_before_residual=True),
    eagle_spec(
        3,
        decoder(num_layers=2, mlp_bias=True, qkv_bias=True, out_bias=True, rope=LLAMA_3_ROPE),
        hidden_layers=(0, 3),
        has_embedding=True,
        has_head=True,
        fc_bias=True,
        norm_before_fc=True,
        norm_output=True,
    ),
    eagle_spec(3, decoder(), hidden_layers=(1, 2, 5), fc_norms=True),
    eagle_spec(
        3,
        decoder(hidden_size=32),
        hidden_layers=(1, 2, 5),
        has_embedding=True,
        has_head=True,
    ),
    block_spec(decoder(qk_norm=True, num_layers=2), samples_anchor=False),
    block_spec(decoder(qk_norm=True), has_mask_embedding=True, is_causal=True),
    block_spec(
        decoder(qk_norm=True, vocab_size=DRAFT, window=64, rope=Rope(10_000.0, "linear", 2.0)),
        has_embedding=True,
        has_head=True,
        bigram_rank=RANK,
        has_confidence=True,
        confidence_reads_bigram=True,
    ),
    block_spec(decoder(), bigram_rank=RANK, has_confidence=True),
    block_spec(decoder(vocab_size=DRAFT), shares_head=True, has_anchor_inputs=True),
    eagle_spec(3, decoder(vocab_size=DRAFT), hidden_layers=(1, 2, 5), shares_head=True),
    MedusaSpec(target=TARGET, num_heads=3, num_layers=2, draft_vocab_size=VOCAB),
    MedusaSpec(target=TARGET, num_heads=2, draft_vocab_size=DRAFT),
]


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_written_is_read_back(tmp_path: Path, spec: HeadSpec) -> None:
    weights = made(spec.shapes())
    d2t = vocabulary()["d2t"] if spec.has_draft_vocab else None
    write_head(tmp_path / "head", spec, weights, d2t, Verifier("org/target"))
    head = read_head(tmp_path / "head")
    assert head.spec == spec
    assert (head.format, head.verifier) == ("speculators", "org/target")
    assert all(torch.equal(head.weights[name], weights[name]) for name in weights) and len(head.weights) == len(weights)
    assert (head.d2t is None) == (d2t is None)
    if d2t is not None and head.d2t is not None:
        assert torch.equal(head.d2t, d2t)
    assert sorted(path.name for path in (tmp_path / "head").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("spec", SPECS)
def test_int8_is_read_back_to_half_a_step(tmp_path: Path, spec: HeadSpec) -> None:
    weights = made(spec.shapes())
    d2t = vocabulary()["d2t"] if spec.has_draft_vocab else None
    write_head(tmp_path / "head", spec, weights, d2t, Verifier("org/target"), int8=True)
    head = read_head(tmp_path / "head")
    assert head.spec == spec and head.weights.num_parameters == sum(each.numel() for each in weights.values())
    for name, tensor in weights.items():
        rows = tensor.abs().amax(-1, keepdim=True) if tensor.ndim == 2 and len(tensor) > 1 else torch.zeros(1)
        assert bool(((head.weights[name] - tensor).abs() <= rows / 254 * 1.001).all()), name
    written = load_file(tmp_path / "head/model.safetensors")
    matrices = [name for name, tensor in written.items() if tensor.dtype == torch.int8]
    assert matrices and all(written[f"{name}_scale"].shape == (len(written[name]), 1) for name in matrices)
    assert head.weights.num_bytes < sum(4 * each.numel() for each in weights.values())
    config = json.loads((tmp_path / "head/config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"


def test_int8_is_refused_without_a_scale_for_each_row(tmp_path: Path) -> None:
    spec = SPECS[0]
    write_head(tmp_path, spec, made(spec.shapes()), None, Verifier("org/target"), int8=True)
    stored = load_file(tmp_path / "model.safetensors")
    for change, message in (
        (None, r"fusion_fc\.weight holds I8; supported are F32"),
        (torch.ones(1, 1), r"fusion_fc\.weight_scale is float32 \[1, 1\]; .* here \[16, 1\]"),
        (torch.full((16, 1), torch.inf), r"fusion_fc\.weight holds NaN or infinite"),
    ):
        tensors = dict(stored)
        del tensors["fusion_fc.weight_scale"]
        save_file(
            tensors | ({} if change is None else {"fusion_fc.weight_scale": change}), tmp_path / "model.safetensors"
        )
        with pytest.raises(ModelError, match=message):
            read_head(tmp_path).weights["fc.weight"]


def test_a_head_is_for_all_who_may_read_its_folder(tmp_path: Path) -> None:
    """A server often runs as a user of its own; the umask says who reads, not the library that writes."""
    spec = block_spec(decoder(qk_norm=True, head_dim=4))
    for umask, mode in ((0o022, 0o644), (0o077, 0o600)):
        before = os.umask(umask)
        try:
            write_head(tmp_path / f"{mode:o}", spec, made(spec.shapes()), None, Verifier("org/target"))
        finally:
            os.umask(before)
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / f"{mode:o}").iterdir()} == {mode}


def test_names_are_those_of_the_format(tmp_path: Path) -> None:
    """What the reference implementations would load."""
    spec = block_spec(decoder(qk_norm=True, num_layers=2, head_dim=4), bigram_rank=RANK)
    spec = dataclasses.replace(spec, hidden_layers=(1, 4), has_confidence=True, confidence_reads_bigram=True)
    write_head(tmp_path, spec, made(spec.shapes()), None, Verifier("org/target"))
    _, reference = dspark()
    written = load_file(tmp_path / "model.safetensors")
    assert {name: tensor.shape for name, tensor in written.items()} == {n: t.shape for n, t in reference.items()}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "dspark" and config["aux_hidden_state_layer_ids"] == [2, 5]
    assert config["transformer_layer_config"]["model_type"] == "qwen3"
    _, reference = speculators_eagle_3()
    eagle = eagle_spec(
        3,
        decoder(vocab_size=DRAFT, head_dim=4),
        hidden_layers=(1, 3, 4),
        has_embedding=True,
        has_head=True,
        norm_before_fc=True,
    )
    write_head(tmp_path, eagle, made(eagle.shapes()), vocabulary()["d2t"], Verifier("org/target"))
    written = load_file(tmp_path / "model.safetensors")
    assert {name: tensor.shape for name, tensor in written.items()} == {n: t.shape for n, t in reference.items()}
    assert torch.equal(written["t2d"], reference["t2d"])


@pytest.mark.parametrize(
    ("spec", "change", "message"),
    [
        (SPECS[0], {"fc.weight": None}, r"missing \['fc\.weight'\]"),
        (SPECS[0], {"more": torch.ones(1)}, r"unknown \['more'\]"),
        (SPECS[0], {"fc.weight": torch.ones(3)}, r"fc\.weight has shape \(3,\)"),
        (SPECS[0], {"fc.weight": torch.full((16, 32), torch.nan)}, r"fc\.weight holds NaN"),
        (eagle_spec(1, decoder(vocab_size=DRAFT)), {}, r"12 draft ids of the target's 40 and no LM head"),
        (eagle_spec(1, decoder(hidden_size=32)), {}, r"hidden size is 32 and its target's 16"),
        (block_spec(decoder(), hidden_layers=(2, 6)), {}, r"output of layer 6 of a target with layers 0 to 5"),
        (block_spec(decoder(norm=RmsNorm(1e-6, offset=1.0))), {}, r"cannot be written"),
        (block_spec(decoder(rope=Rope(interleaved=True))), {}, r"cannot be written"),
        (SPECS[3], {}, r"d2t is for heads with a draft vocabulary"),
    ],
)
def test_what_cannot_be_read_back_is_not_written(
    tmp_path: Path, spec: HeadSpec, change: dict[str, Tensor | None], message: str
) -> None:
    changed = made(spec.shapes()) | change
    weights = {name: tensor for name, tensor in changed.items() if tensor is not None}
    with pytest.raises(ModelError, match=message):
        write_head(tmp_path / "head", spec, weights, None, Verifier("org/target"))
    assert not (tmp_path / "head").exists()


def test_a_wrong_table_is_not_written(tmp_path: Path) -> None:
    spec = SPECS[3]
    with pytest.raises(ModelError, match="no table of offsets"):
        write_head(tmp_path / "head", spec, made(spec.shapes()), torch.full((DRAFT,), -1), Verifier("org/target"))
