"""YaRN, dynamic NTK and longrope: tables against transformers' own, logits of tiny models, and that no sequence meets
two sets of frequencies."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specserve.errors import ConfigError, ModelError
from specserve.kernels.reference import Kernels
from specserve.llm import LLM
from specserve.models.config import read_rope
from specserve.models.heads.layers import read_layers, write_layers
from specserve.models.loader import find_architecture, load_model
from specserve.models.positions import Rope
from specserve.models.rotary import rotary_tables
from specserve.models.spec import DecoderSpec, shorten
from specserve.testing import PagedDecoder, tiny_config, unequal_rows, write_tiny_model

CPU = torch.device("cpu")
PROMPT = torch.randint(0, 293, (45,), generator=torch.Generator().manual_seed(5)).tolist()
ORIGINAL = 32  # tokens: PROMPT goes beyond
SHORT, LONG = [1.0 + 0.01 * i for i in range(8)], [1.0, 1.05, 1.3, 2.0, 4.0, 9.0, 16.0, 30.0]
YARN: dict[str, dict[str, Any]] = {
    "plain": {"factor": 4.0},
    "bounds": {"factor": 8.0, "beta_fast": 24.0, "beta_slow": 2.0},
    "not truncated": {"factor": 32.0, "truncate": False},
    "attention_factor": {"factor": 4.0, "attention_factor": 1.3},
    "mscale": {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0},
    "mscale alone": {"factor": 40.0, "mscale": 0.707},
}


def config_of(scaling: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    return tiny_config("llama", rope_scaling=scaling, **overrides)


def theirs(config: dict[str, Any], length: int) -> tuple[torch.Tensor, float]:
    """transformers' frequencies for a sequence of that many tokens, and its factor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = transformers.LlamaConfig(**config)
        found: tuple[torch.Tensor, float] = ROPE_INIT_FUNCTIONS[read.rope_parameters["rope_type"]](read, CPU, length)
    return found


def check_tables(config: dict[str, Any], max_len: int) -> None:
    frequencies, factor = theirs(config, max_len)
    angles = torch.outer(torch.arange(max_len).float(), frequencies)
    cos, sin = rotary_tables(read_rope(config), 16, max_len, CPU)
    torch.testing.assert_close(cos, (angles.cos() * factor).repeat(1, 2), rtol=0, atol=2e-6)
    torch.testing.assert_close(sin[:, 8:], angles.sin() * factor, rtol=0, atol=2e-6)
    assert torch.equal(sin[:, :8], -sin[:, 8:])


@pytest.mark.parametrize("case", YARN)
def test_yarn_tables_equal_transformers(case: str) -> None:
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 64, **YARN[case]}
    check_tables(config_of(scaling, max_position_embeddings=300), 300)


@pytest.mark.parametrize("max_len", [20, ORIGINAL, ORIGINAL + 1, 64, 128])
def test_dynamic_tables_equal_transformers_for_a_sequence_of_max_len(max_len: int) -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    check_tables(config_of(scaling, max_position_embeddings=ORIGINAL), max_len)


@pytest.mark.parametrize("extra", [{}, {"factor": 3.0}, {"attention_factor": 1.25}])
@pytest.mark.parametrize("max_len", [20, ORIGINAL, ORIGINAL + 1, 100])
def test_longrope_tables_equal_transformers_for_a_sequence_of_max_len(max_len: int, extra: dict[str, float]) -> None:
    scaling = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, **extra}
    scaling["original_max_position_embeddings"] = ORIGINAL
    check_tables(config_of(scaling, max_position_embeddings=100), max_len)


def test_a_part_of_a_head_that_does_not_rotate_is_not_multiplied() -> None:
    rope = Rope(scaling="yarn", factor=4.0, original_max_position_embeddings=64, fraction=0.5, attention_factor=1.5)
    cos, sin = rotary_tables(rope, 16, 20, CPU)
    assert torch.equal(cos[:, 4:8], torch.ones(20, 4)) and not sin[:, 4:8].any()
    assert torch.equal(cos[0, :4], torch.full((4,), 1.5))


MODELS: dict[str, dict[str, Any]] = {
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": ORIGINAL}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "longrope": {
        "max_position_embeddings": 64,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": SHORT,
            "long_factor": LONG,
            "original_max_position_embeddings": ORIGINAL,
        },
    },
}


def write(folder: Path, case: str) -> Path:
    return write_tiny_model(folder, "llama", 1, **{"max_position_embeddings": ORIGINAL, **MODELS[case]})


def transformers_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize("case", MODELS)
def test_logits_equal_transformers_at_the_longest_length(case: str, tmp_path: Path) -> None:
    """transformers chooses its frequencies by the length of what it is given: so many tokens are max_model_len here."""
    folder = write(tmp_path, case)
    expected = transformers_logits(folder, PROMPT)
    for size in (45, 10):
        paged = PagedDecoder(load_model(folder, Kernels(CPU, torch.float32), len(PROMPT)), 1, 48)
        assert (paged.chunks(0, PROMPT, size) - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("case", ["dynamic", "longrope"])
def test_logits_equal_transformers_within_the_original_length(case: str, tmp_path: Path) -> None:
    folder = write(tmp_path, case)
    expected = transformers_logits(folder, PROMPT[:30])
    paged = PagedDecoder(load_model(folder, Kernels(CPU, torch.float32), ORIGINAL), 1, 48)
    assert (paged.chunks(0, PROMPT[:30], 7) - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("case", MODELS)
def test_rows_that_pass_the_original_length_have_the_same_bits_in_any_company(case: str, tmp_path: Path) -> None:
    assert unequal_rows(load_model(write(tmp_path, case), Kernels(CPU, torch.float32), 64)) == []


def spec_of(case: str) -> DecoderSpec:
    config = tiny_config("llama", **{"max_position_embeddings": ORIGINAL, **MODELS[case]})
    spec: DecoderSpec = find_architecture(config).spec(config)
    return spec


def test_what_max_len_decides_is_said_and_bounded() -> None:
    yarn, dynamic, longrope = (spec_of(case) for case in MODELS)
    assert (yarn.max_len, dynamic.max_len, longrope.max_len) == (64, ORIGINAL, 64)
    assert yarn.note == ""
    assert "unscaled" in dynamic.note
    assert "fixed for max_model_len 50" in shorten(dynamic, 50).note
    assert "long factors in all sequences" in longrope.note
    assert "short factors" in shorten(longrope, ORIGINAL).note
    for spec in (yarn, dynamic, longrope):
        assert shorten(spec, 64).max_len == 64
        with pytest.raises(ConfigError, match=r"65, but .* at most 64"):
            shorten(spec, 65)


def test_start_says_which_factors_are_used(tmp_path: Path) -> None:
    folder = write(tmp_path, "longrope")
    for max_len, words in ((None, "long factors in all"), (ORIGINAL, "short factors")):
        with LLM(str(folder), max_model_len=max_len, dtype="float32", device="cpu") as llm:
            assert words in llm.summary


def test_max_position_embeddings_may_include_yarns_factor() -> None:
    config = config_of({"type": "yarn", "original_max_position_embeddings": 512, "factor": 4.0})
    assert find_architecture(config).spec(config).max_len == 2048
    assert read_rope(config_of({"type": "yarn", "factor": None})).factor == 1.0


def test_scalings_that_cannot_be_are_refused() -> None:
    longrope = MODELS["longrope"]["rope_scaling"]
    for scaling, words in (
        ({"type": "yarn", "factor": 2.0, "rope_theta": 1.0}, "above 1"),
        ({"type": "yarn", "factor": 0.5}, "at least 1"),
        ({"type": "yarn", "factor": 2.0, "truncate": 3}, "truncate"),
        ({"type": "dynamic"}, "no factor"),
        ({"type": "dynamic", "factor": "2"}, "rotary factor"),
        ({**longrope, "long_factor": LONG[1:]}, "long_factor has 7 numbers"),
        ({**longrope, "short_factor": 2.0}, "must be a list"),
        ({**longrope, "short_factor": [*SHORT[1:], 0.0]}, "positive"),
        ({"type": "longrope", "long_factor": LONG}, "no short_factor"),
    ):
        config = config_of(scaling)
        with pytest.raises(ModelError, match=words):
            find_architecture(config).spec(config)


@pytest.mark.parametrize("case", MODELS)
def test_draft_layers_keep_their_scaling(case: str) -> None:
    spec = spec_of(case)
    config = json.loads(json.dumps(write_layers(spec, spec.vocab_size)))
    assert read_layers(config, spec.shapes(), spec.vocab_size).layers == spec.layers
