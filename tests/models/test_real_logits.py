"""The real SmolLM2 against transformers on the same folder: logits, greedy text, and the same bits in any company, with
the reference kernels and the native ones."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from specserve.kernels.reference import Kernels
from specserve.models.decoder import Decoder
from specserve.models.loader import load_model
from specserve.ops import Ops
from specserve.testing import Feed, PagedDecoder

TEXT = (
    "The tide tables for the harbour are printed each December.\n"
    "def mean(values: list[float]) -> float:\n    return sum(values) / len(values)\n"
    '{"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"]}\n'
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 東京は晴れです。\n"
)


def make_ops(name: str) -> Ops:
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
    native: Ops = module.Kernels(dtype, weights if weights.startswith("int") else "none", threads=2)
    return native


@pytest.fixture(scope="module")
def prompt(smollm2: Path) -> list[int]:
    torch.set_num_threads(1)
    ids: list[int] = transformers.AutoTokenizer.from_pretrained(smollm2)(TEXT)["input_ids"]
    return ids


@pytest.fixture(scope="module")
def expected(smollm2_safetensors: Path, prompt: list[int]) -> torch.Tensor:
    """The logits of transformers, float32 [tokens, vocab]."""
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # transformers deprecates itself
        reference = transformers.AutoModelForCausalLM.from_pretrained(
            smollm2_safetensors, dtype=torch.float32
        )  # in evaluation mode
        logits: torch.Tensor = reference(torch.tensor([prompt])).logits[0]
    return logits


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, smollm2: Path) -> Decoder:
    """Loaded by the kernels of that name; tests of the same ones run together."""
    return load_model(smollm2, make_ops(request.param), max_len=512)


@pytest.mark.parametrize("model", ["reference-float32", "native-float32"], indirect=True)
def test_logits_equal_transformers_at_every_position(prompt: list[int], expected: torch.Tensor, model: Decoder) -> None:
    paged = PagedDecoder(model, 2, 160)
    (whole,) = paged.step(Feed(0, prompt))
    chunks = [paged.step(Feed(1, prompt[i : i + 50]))[0] for i in range(0, len(prompt), 50)]
    assert torch.equal(whole, torch.cat(chunks))
    error = (whole - expected).abs().max() / expected.abs().max()
    assert error < 1e-4, f"relative error {error:.1e}"
    assert torch.equal(whole.argmax(-1), expected.argmax(-1))


def test_reads_a_folder_that_transformers_wrote_of_the_same_model(
    smollm2: Path, smollm2_safetensors: Path, tmp_path: Path
) -> None:
    """The converted folder and one saved by transformers give the same bits: no tensor is permuted or scaled twice."""
    ops = Kernels(torch.device("cpu"), torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2_safetensors, dtype=torch.bfloat16)
        theirs.save_pretrained(tmp_path)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    ours, saved = (PagedDecoder(load_model(folder, ops, max_len=512), 1, 32) for folder in (smollm2, tmp_path))
    feed = Feed(0, [1, 4093, 253, 3, 28, 198, 1789, 17])
    assert torch.equal(ours.step(feed)[0], saved.step(feed)[0])


@pytest.mark.parametrize(
    "model",
    ["reference-float32", "reference-bfloat16", "native-float32", "native-bfloat16", "native-int8", "native-int4"],
    indirect=True,
)
def test_a_row_has_the_same_bits_in_any_company(prompt: list[int], model: Decoder) -> None:
    paged = PagedDecoder(model, 5, 160)
    paged.step(*(Feed(seq, prompt[:100]) for seq in range(3)), Feed(3, prompt[:37]))
    text = prompt[100:104]
    alone = torch.cat([paged.step(Feed(0, [token]))[0] for token in text])
    tree = Feed(1, [text[0], 11, text[1], 12, text[2], 13, text[3]], [-1, 0, 0, 2, 2, 4, 4])
    (_, nodes, _) = paged.step(Feed(4, prompt[:9]), tree, Feed(3, prompt[37:68]))
    assert torch.equal(nodes[[0, 2, 4, 6]], alone)
    (chain,) = paged.step(Feed(2, prompt[100:141]))
    assert torch.equal(chain[:4], alone)


@pytest.mark.parametrize(
    ("model", "least"),
    [("reference-bfloat16", 0.9), ("native-bfloat16", 0.9), ("native-int8", 0.9), ("native-int4", 0.65)],
    indirect=["model"],
)
def test_rounded_weights_mostly_choose_the_same_token(
    prompt: list[int], expected: torch.Tensor, model: Decoder, least: float
) -> None:
    """Weights of fewer bits are an approximation; how good a one is the model's own affair, but it is that model."""
    paged = PagedDecoder(model, 1, 160)
    (logits,) = paged.step(Feed(0, prompt))
    same = (logits.argmax(-1) == expected.argmax(-1)).float().mean()
    assert same > least, f"the same token at {same:.0%} of positions"
