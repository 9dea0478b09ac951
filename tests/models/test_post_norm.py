"""Layers that norm the residual stream itself, and embeddings of another size than layers, as in OPT-350M: what draft
heads see of such a model, and which forms are refused."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from specserve.errors import ModelError
from specserve.kernels.reference import Kernels
from specserve.models.decoder import Decoder
from specserve.models.heads.origin import TargetOrigin
from specserve.models.loader import check_memory, load_model, num_weight_bytes
from specserve.models.spec import DecoderSpec, PostNorm, RmsNorm, Sequential
from specserve.testing import llama_spec, write_tiny_model
from specserve.testing.heads import hidden_states

CPU = torch.device("cpu")
PROMPT = torch.randint(0, 293, (20,), generator=torch.Generator().manual_seed(5)).tolist()


def loaded(folder: Path) -> Decoder:
    model = load_model(folder, Kernels(CPU, torch.float32))
    assert isinstance(model, Decoder)
    return model


def their_states(folder: Path) -> tuple[Tensor, ...]:
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        found = theirs(torch.tensor([PROMPT]), output_hidden_states=True)
        states: tuple[Tensor, ...] = found.hidden_states
        return states


def test_layers_show_the_stream_that_the_next_one_reads(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "opt_350m", num_hidden_layers=4)
    target, wanted = loaded(folder), their_states(folder)
    first, third, last = hidden_states(target, PROMPT, (0, 2, 3))
    torch.testing.assert_close(first, wanted[1][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(third, wanted[3][0], atol=1e-4, rtol=1e-4)
    table = load_file(folder / "model.safetensors")["model.decoder.embed_tokens.weight"]
    torch.testing.assert_close(target.head(last), wanted[4][0] @ table.T, atol=1e-4, rtol=1e-4)  # projected by then


def test_heads_of_such_a_model_read_tables_of_its_hidden_size(tmp_path: Path) -> None:
    """Its embedding and its LM head as they are trained with are those that it runs with."""
    folder = write_tiny_model(tmp_path, "opt_350m")
    target, origin = loaded(folder), TargetOrigin(folder)
    assert (target.spec.hidden_size, target.spec.table_size) == (64, 32)
    ids = torch.tensor(PROMPT)
    embedded = target.embed(ids).clone()
    torch.testing.assert_close(embedded, origin.embedding()[ids], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(target.lm_head(embedded), embedded @ origin.head().T, atol=1e-4, rtol=1e-4)
    assert origin.norm().shape == (64,)
    assert origin.fingerprint() != TargetOrigin(write_tiny_model(tmp_path / "other", "opt_350m", seed=1)).fingerprint()


def test_memory_is_that_of_the_narrow_tables(tmp_path: Path) -> None:
    spec = loaded(write_tiny_model(tmp_path, "opt_350m")).spec
    plain = dataclasses.replace(spec, embedding_size=None)
    tables = 2 * spec.vocab_size * (64 - 32) - 2 * 64 * 32
    assert num_weight_bytes(plain, torch.float32) - num_weight_bytes(spec, torch.float32) == 4 * tables
    check_memory(spec, Kernels(CPU, torch.float32), num_weight_bytes(spec, torch.float32))


def test_forms_that_go_with_no_others_are_refused() -> None:
    plain: DecoderSpec = llama_spec(
        vocab_size=293, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, max_len=64
    )
    (layer,) = plain.layers
    post = dataclasses.replace(layer, residual=PostNorm())
    both = dataclasses.replace(plain, layers=(post, post))
    assert "model.norm.weight" not in both.shapes()
    assert both.final_norm_name == "model.layers.1.post_attention_layernorm"
    for other in (layer, dataclasses.replace(layer, residual=Sequential(multiplier=0.5))):
        with pytest.raises(ModelError, match="go with no others"):
            dataclasses.replace(plain, layers=(post, other))
    with pytest.raises(ModelError, match="norm of embeddings that are projected"):
        dataclasses.replace(plain, embedding_size=32, embedding_norm=RmsNorm(1e-5))
