"""Decoders with adapters in their slots: equal to merged weights, and no row depends on what stands beside it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specserve.errors import ModelError
from specserve.kernels.cpu import Kernels as Native
from specserve.kernels.reference import Kernels as Reference
from specserve.models.decoder import Decoder
from specserve.models.loader import check_tensors
from specserve.models.product import LowRank
from specserve.ops import Ops
from specserve.testing import Feed, PagedDecoder, write_tiny_model

FAMILIES = ("llama", "qwen2", "gemma3", "granite", "phi3", "gpt2", "gpt_neox", "bloom", "opt", "qwen2_moe", "gptj")
NO_ADAPTERS = ("norm", "experts.", ".gate.weight", "shared_expert_gate", "embed_positions")
SLOTS = 4


def ops(name: str) -> Ops:
    return Reference(torch.device("cpu"), torch.float32) if name == "reference" else Native(torch.float32, "none", 2)


def adapted_names(decoder: Decoder) -> list[str]:
    """Layers that take adapters."""
    shapes = decoder.spec.shapes()
    named = [name.removesuffix(".weight") for name in shapes if name.endswith(".weight")]
    names = [name for name in named if not any(part in f"{name}.weight" for part in NO_ADAPTERS)]
    if decoder.spec.embedding_norm is not None:
        names.remove("model.embed_tokens")
    return [*names, "lm_head"] if decoder.spec.tied_embeddings else names


def random_adapter(decoder: Decoder, rank: int, seed: int, names: list[str] | None = None) -> dict[str, LowRank]:
    generator = torch.Generator().manual_seed(seed)
    shapes, found = decoder.spec.shapes(), {}
    for name in adapted_names(decoder) if names is None else names:
        out, inputs = shapes.get(f"{name}.weight", shapes["model.embed_tokens.weight"])
        if name == "model.embed_tokens":
            out, inputs = inputs, out
        a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        found[name] = LowRank(a, torch.randn(out, rank, generator=generator) * 0.1)
    return found


def merged(weights: dict[str, Tensor], adapter: dict[str, LowRank]) -> dict[str, Tensor]:
    """The same model with an adapter in its weights."""
    found = dict(weights)
    for name, (a, b) in adapter.items():
        delta = (b @ a).T if name == "model.embed_tokens" else b @ a
        found[f"{name}.weight"] = found[f"{name}.weight"] + delta
    return found


Adapted = tuple[Decoder, dict[str, Tensor]]


@pytest.fixture(scope="module", params=itertools.product(FAMILIES, ("reference", "cpu")), ids="-".join)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Decoder, dict[str, Tensor]]:
    """A decoder with slots, and its weights with a head of its own."""
    family, kernels = request.param
    folder: Path = write_tiny_model(tmp_path_factory.mktemp(family), family, tie_word_embeddings=False)
    tensors = check_tensors(folder)
    weights = {name: torch.as_tensor(tensors[name][:]) for name in tensors}
    decoder = Decoder(tensors.spec, weights, ops(kernels))  # type: ignore[arg-type]
    decoder.hold_adapters(SLOTS, 8)
    return decoder, weights


def test_rows_are_those_of_merged_weights(model: Adapted) -> None:
    decoder, weights = model
    prompt = list(range(7, 40))
    paged = PagedDecoder(decoder, SLOTS + 1, 64)
    wanted = []
    for slot, rank in enumerate((1, 8, 3)):
        adapter = random_adapter(decoder, rank, seed=slot)
        decoder.place_adapter(slot, decoder.pack_adapter(adapter))
        alone = PagedDecoder(Decoder(decoder.spec, merged(weights, adapter), decoder.ops), 1, 64)
        wanted.append(alone.chunks(0, prompt, 40))
    wanted.append(PagedDecoder(Decoder(decoder.spec, weights, decoder.ops), 1, 64).chunks(0, prompt, 40))
    slots = (0, 1, 2, -1)
    found = paged.step(*(Feed(seq, prompt, adapter=slot) for seq, slot in enumerate(slots)))
    for own, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, right, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[3], wanted[3])  # without an adapter: not a bit
    assert not torch.allclose(found[0], found[1], atol=1e-2)
    for slot in (0, 1, 2, -1):
        again = PagedDecoder(decoder, 1, 64).chunks(0, prompt, 5, adapter=slot)
        assert torch.equal(again, found[slot]), slot


def test_an_empty_slot_and_one_that_was_emptied_are_no_adapter(model: Adapted) -> None:
    decoder, _ = model
    prompt = list(range(7, 20))
    decoder.place_adapter(0, decoder.pack_adapter(random_adapter(decoder, 4, seed=1)))
    changed = PagedDecoder(decoder, 1, 64).chunks(0, prompt, 40, adapter=0)
    decoder.place_adapter(0, None)
    plain = PagedDecoder(decoder, 1, 64).chunks(0, prompt, 40)
    assert not torch.equal(changed, plain)
    for slot in (0, SLOTS - 1):
        assert torch.equal(PagedDecoder(decoder, 1, 64).chunks(0, prompt, 40, adapter=slot), plain)


def test_layers_that_take_none_are_refused(model: Adapted) -> None:
    decoder, _ = model
    name = next(name for name in decoder.spec.shapes() if "norm" in name).removesuffix(".weight")
    with pytest.raises(ModelError, match=f"changes {name}, which takes no adapters"):
        decoder.pack_adapter({name: LowRank(torch.zeros(1, 1), torch.zeros(1, 1))})
