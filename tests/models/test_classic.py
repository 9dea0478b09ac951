"""Checkpoints of classic decoders as tools of their time wrote them, and what their configurations may not ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specserve.errors import ModelError
from specserve.kernels.reference import Kernels
from specserve.models.fusing import rows_by_head
from specserve.models.loader import find_architecture, load_model
from specserve.models.names import Names
from specserve.models.spec import DecoderSpec, LayerNorm, LearnedPositions
from specserve.testing import PagedDecoder, tiny_config, write_tiny_model

CPU = torch.device("cpu")
PROMPT = list(range(5, 25))


def logits(folder: Path) -> torch.Tensor:
    return PagedDecoder(load_model(folder, Kernels(CPU, torch.float32)), 1, 32).chunks(0, PROMPT, 20)


def rewrite(folder: Path, rename: Any, more: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file({rename(name): tensor for name, tensor in load_file(path).items()} | more, path)


@pytest.mark.parametrize(
    ("family", "prefix", "masks"),
    [
        ("gpt2", "transformer.", ["h.0.attn.bias", "h.0.attn.masked_bias"]),
        ("gptj", "transformer.", ["transformer.h.1.attn.bias", "transformer.h.1.attn.masked_bias"]),
        ("gpt_neox", "", ["gpt_neox.layers.2.attention.bias", "gpt_neox.layers.2.attention.rotary_emb.inv_freq"]),
        ("opt", "model.", ["decoder.version"]),
        ("bloom", "transformer.", []),
    ],
)
def test_old_checkpoints_have_shorter_names_and_masks(
    tmp_path: Path, family: str, prefix: str, masks: list[str]
) -> None:
    folder = write_tiny_model(tmp_path, family)
    wanted = logits(folder)
    rewrite(folder, lambda name: name.removeprefix(prefix), {name: torch.ones(1, 1, 4, 4) for name in masks})
    assert torch.equal(logits(folder), wanted)


def test_names_are_renamed_whole() -> None:
    names = Names(base="base.", layers="h", once={"model.norm": "ln"}, each={"mlp.up_proj": "ln"}, unread=("mask",))
    assert names.rename("base.ln.weight") == names.rename("ln.weight") == "model.norm.weight"
    assert names.rename("base.h.12.ln.bias") == "model.layers.12.mlp.up_proj.bias"
    assert names.rename("base.h.3.mask") is None
    for unknown in ("base.x.weight", "base.ln.other", "x.h.1.ln.weight"):
        assert names.rename(unknown) == unknown
    for name in ("model.norm.bias", "model.layers.0.mlp.up_proj.weight"):
        assert names.rename(names.stored(name)) == name
    assert names.stored("lm_head.weight") == "lm_head.weight"


def test_a_tensor_too_many_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "gpt_neox")
    rewrite(folder, str, {"gpt_neox.layers.7.attention.query_key_value.weight": torch.zeros(4)})
    with pytest.raises(ModelError, match=r"layers\.7\.attention\.query_key_value\.weight, which config\.json does not"):
        load_model(folder, Kernels(CPU, torch.float32))


def test_transposed_matrices_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "gpt2")
    rewrite(folder, str, {"transformer.h.1.mlp.c_fc.weight": torch.zeros(96, 64)})
    with pytest.raises(ModelError, match=r"c_fc\.weight has shape \(96, 64\); config\.json implies \(64, 96\)"):
        load_model(folder, Kernels(CPU, torch.float32))


def test_rows_of_each_kv_head_lie_together() -> None:
    config = tiny_config("falcon", new_decoder_architecture=True, num_kv_heads=2, hidden_size=16)
    rows = rows_by_head(find_architecture(config).spec(config), "model.layers.0.self_attn.x.weight")
    q, k, v = (each.view(-1, 4)[:, 0].tolist() for each in rows)  # the first row of each head
    assert (q, k, v) == ([0, 4, 16, 20], [8, 24], [12, 28])


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("opt", {"word_embed_proj_dim": 0}, "word_embed_proj_dim as 0"),
    ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
    ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
    ("opt", {"activation_function": "tanh"}, "'tanh' is not supported; supported are gelu, gelu_fast, gelu_new"),
    ("opt", {"ffn_dim": 0}, "intermediate_size as 0"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ("gpt2", {"n_embd": None}, "no hidden_size"),
    ("gpt_bigcode", {"add_cross_attention": True}, "add_cross_attention"),
    ("gptj", {"rotary_dim": 20}, "rotary_dim is 20, and heads have 16"),
    ("gptj", {"rotary_dim": None}, "rotary_dim as None"),
    ("gpt_neox", {"layer_norm_eps": "small"}, "layer_norm_eps"),
    ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
    ("mpt", {"no_bias": False}, "no_bias"),
    ("mpt", {"logit_scale": 0.5}, "logit_scale"),
    ("mpt", {"attn_config": {"clip_qkv": 6}}, "clip_qkv"),
    ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln"),
    ("mpt", {"attn_config": {"prefix_lm": True}}, "prefix_lm"),
    ("mpt", {"attn_config": {"alibi": False}}, "alibi"),
    ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, "multiquery_attention"),
    ("mpt", {"attn_config": 3}, "attn_config as 3"),
]


@pytest.mark.parametrize(("family", "changes", "words"), REFUSED)
def test_what_is_not_supported_is_named(family: str, changes: dict[str, Any], words: str) -> None:
    config = json.loads(json.dumps(tiny_config(family, **changes)))
    with pytest.raises(ModelError) as error:
        find_architecture(config).spec(config)
    assert words in str(error.value)


def test_learned_positions_bound_the_context() -> None:
    config = tiny_config("gpt2")
    spec: DecoderSpec = find_architecture(config).spec(config)
    assert (spec.positions, spec.max_len) == (LearnedPositions(1024), 1024)
    with pytest.raises(ModelError, match="1000 learned positions are too few for 1024"):
        DecoderSpec(
            vocab_size=9,
            hidden_size=64,
            max_len=1024,
            layers=spec.layers,
            final_norm=LayerNorm(1e-5),
            positions=LearnedPositions(1000),
        )
