"""The catalog's entries: each is of an architecture that runs natively, has the published number of parameters, and its
figures are those of the kernels and of the KV cache."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from specserve.cache import sizing
from specserve.cache.storage import KVStorage
from specserve.checkpoint import catalog, fitting
from specserve.checkpoint.entries import MODELS, WEIGHT_BITS, CatalogModel, short_name
from specserve.errors import ConfigError
from specserve.models.loader import find_architecture, native_model_types, num_packed_bytes
from specserve.models.spec import DecoderSpec
from specserve.ops.choice import choose_ops
from specserve.registry import DRAFTERS

CPU = torch.device("cpu")
ALL = pytest.mark.parametrize("name", MODELS)


def spec(model: CatalogModel) -> DecoderSpec:
    shape = model.shape
    config: dict[str, Any] = {
        "model_type": model.model_type,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.mlp,
        "max_position_embeddings": model.context,
        "tie_word_embeddings": shape.tied,
        **(model.config or {}),
    }
    assert model.model_type in native_model_types()
    found: DecoderSpec = find_architecture(config).spec(config)
    return found


@ALL
def test_the_parameters_are_those_that_the_shape_implies(name: str) -> None:
    model = MODELS[name]
    described = spec(model)
    assert sum(math.prod(shape) for shape in described.shapes().values()) == model.parameters
    own = model.shape.matrices + model.shape.table * (1 if model.shape.tied else 2)
    assert 0.999 < own / model.parameters <= 1, "norms and biases are little"


@ALL
def test_the_kv_cache_is_as_large_as_told(name: str) -> None:
    model = MODELS[name]
    per_block = KVStorage.bytes_per_block(spec(model).kv_shapes, 16, torch.bfloat16)
    assert model.kv_bytes(16) == per_block
    assert model.kv_bytes(10**9) == model.kv_bytes(model.context)


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
@ALL
def test_the_memory_is_what_kernels_take(name: str, kind: str) -> None:
    try:
        ops = choose_ops(CPU, "bfloat16", "none" if kind == "bfloat16" else kind, 1)
    except ConfigError:
        pytest.skip("Without native kernels there are no quantised weights.")
    if ops.layout is None:
        pytest.skip("These kernels do not pack.")
    assert MODELS[name].weight_bytes(kind) == pytest.approx(num_packed_bytes(spec(MODELS[name]), ops), rel=0.02)


def test_names_can_be_typed_and_drafters_exist() -> None:
    for name, model in MODELS.items():
        assert name == short_name(name) == name.lower()
        assert short_name("-".join(name.split("-")[:1]) + ":" + "-".join(name.split("-")[1:])) == name
        assert model.draft is None or MODELS[model.draft].parameters < model.parameters
        assert model.head is None or model.head[0] in DRAFTERS.names()
        assert catalog.hub_name(model.hub_id) is not None
    assert len({model.hub_id for model in MODELS.values()}) == len(MODELS)
    assert set(catalog.CATALOG) <= set(MODELS)
    assert all(WEIGHT_BITS[kind] > 0 for kind in WEIGHT_BITS)


def test_the_kv_cache_takes_the_share_that_an_engine_gives_it() -> None:
    assert fitting.KV_SHARE == sizing.MAX_SHARE
