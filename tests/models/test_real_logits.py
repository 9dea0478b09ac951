"""The real SmolLM2 against transformers on the same folder: logits, greedy text, and the same bits in any company."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specserve.kernels.reference import Kernels
from specserve.models.loader import load_model
from specserve.testing import Feed, PagedDecoder

TEXT = (
    "The tide tables for the harbour are printed each December.\n"
    "def mean(values: list[float]) -> float:\n    return sum(values) / len(values)\n"
    '{"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"]}\n'
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 東京は晴れです。\n"
)


@pytest.fixture(scope="module")
def prompt(smollm2: Path) -> list[int]:
    torch.set_num_threads(1)
    ids: list[int] = AutoTokenizer.from_pretrained(smollm2)(TEXT)["input_ids"]
    return ids


def test_logits_equal_transformers_at_every_position(smollm2: Path, prompt: list[int]) -> None:
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # transformers deprecates itself
        reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)  # in evaluation mode
        expected = reference(torch.tensor([prompt])).logits[0]
    paged = PagedDecoder(load_model(smollm2, Kernels(torch.device("cpu"), torch.float32), max_len=512), 2, 160)
    (whole,) = paged.step(Feed(0, prompt))
    chunks = [paged.step(Feed(1, prompt[i : i + 50]))[0] for i in range(0, len(prompt), 50)]
    assert torch.equal(whole, torch.cat(chunks))
    error = (whole - expected).abs().max() / expected.abs().max()
    assert error < 1e-4, f"relative error {error:.1e}"
    assert torch.equal(whole.argmax(-1), expected.argmax(-1))


def test_reads_a_folder_that_transformers_wrote_of_the_same_model(smollm2: Path, tmp_path: Path) -> None:
    """The converted folder and one saved by transformers give the same bits: no tensor is permuted or scaled twice."""
    ops = Kernels(torch.device("cpu"), torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    ours, theirs = (PagedDecoder(load_model(folder, ops, max_len=512), 1, 32) for folder in (smollm2, tmp_path))
    feed = Feed(0, [1, 4093, 253, 3, 28, 198, 1789, 17])
    assert torch.equal(ours.step(feed)[0], theirs.step(feed)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_any_company(smollm2: Path, prompt: list[int], dtype: torch.dtype) -> None:
    paged = PagedDecoder(load_model(smollm2, Kernels(torch.device("cpu"), dtype), max_len=512), 5, 160)
    paged.step(*(Feed(seq, prompt[:100]) for seq in range(3)), Feed(3, prompt[:37]))
    text = prompt[100:104]
    alone = torch.cat([paged.step(Feed(0, [token]))[0] for token in text])
    tree = Feed(1, [text[0], 11, text[1], 12, text[2], 13, text[3]], [-1, 0, 0, 2, 2, 4, 4])
    (_, nodes, _) = paged.step(Feed(4, prompt[:9]), tree, Feed(3, prompt[37:68]))
    assert torch.equal(nodes[[0, 2, 4, 6]], alone)
    (chain,) = paged.step(Feed(2, prompt[100:141]))
    assert torch.equal(chain[:4], alone)
