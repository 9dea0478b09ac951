"""LoRA adapters (arXiv 2106.09685) as a model's own layers have them, read from folders that PEFT saved."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specserve.cache.sizing import free_memory
from specserve.checkpoint.peft import PeftAdapter, PeftLayer, read_peft
from specserve.errors import CapacityError, ModelError
from specserve.files import reading
from specserve.models.loader import check_tensors
from specserve.models.product import LowRank
from specserve.models.spec import DecoderSpec
from specserve.models.tensors import CheckedTensors

_TABLE, _HEAD = "model.embed_tokens", "lm_head"
_MIB = 2**20
# How far a model's own weights may be from those that PEFT saved, by their root mean square: where they are floats,
# which a dtype rounds, and where a GGUF file has them as integers of few bits.
_ROUNDED, _QUANTISED = 0.005, 0.1


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter's numbers. `weights` are by the names of DecoderSpec.shapes() without ".weight", or "lm_head"."""

    base: str  # the model that it says it was made for; "" where it says none
    rank: int  # its largest
    digest: str  # of its numbers, hex
    weights: Mapping[str, LowRank]


def read_adapter(folder: Path, model: Path, max_rank: int | None = None) -> Adapter:
    """The adapter in `folder` for the model in the folder `model`, of any rank with None. Raises ModelError, which says
    what of it does not fit, and CapacityError."""
    with reading(folder):
        found = read_peft(folder)
        if max_rank is not None and found.rank > max_rank:
            raise ModelError(
                f"{folder}: the adapter has rank {found.rank}, and this engine takes up to {max_rank}. Start it with "
                f"--max-lora-rank {found.rank}."
            )
        needed, free = 8 * found.num_elements, free_memory(torch.device("cpu"))
        if needed > free:
            raise CapacityError(
                f"{folder}: reading the adapter takes {needed / _MIB:,.0f} MiB, and {free / _MIB:,.0f} MiB are free."
            )
        tensors = check_tensors(model)
        if not isinstance(tensors.spec, DecoderSpec):
            raise ModelError(f"{model} runs through transformers, and adapters need a model that is native.")
        weights = _weights(found, tensors, model)
        _check_base_weights(found, tensors)
    return Adapter(found.base, found.rank, _digest(weights), weights)


def _weights(found: PeftAdapter, tensors: CheckedTensors, model: Path) -> dict[str, LowRank]:
    shapes = dict(tensors.spec.shapes())
    shapes.setdefault(f"{_HEAD}.weight", shapes[f"{_TABLE}.weight"])
    weights: dict[str, LowRank] = {}
    for layer in found.layers:
        parts = tensors.parts(f"{layer.module}.weight")
        if any(part not in shapes for part, _ in parts):
            made_for = f" It was made for {found.base}." if found.base else ""
            raise ModelError(f"{found.folder} changes {layer.module}, which {model} does not have.{made_for}")
        names = [part.removesuffix(".weight") for part, _ in parts]
        if layer.is_embedding != (names == [_TABLE]):
            kind = "an embedding" if layer.is_embedding else "a linear layer"
            raise ModelError(f"{found.folder} has {layer.a}, and {layer.module} of {model} is not {kind}.")
        if twice := [name for name in names if name in weights]:
            raise ModelError(f"{found.folder} changes {twice[0]} twice, once as {layer.module}.")
        a, b = (_floats(found, name) for name in (layer.a, layer.b))
        _check_shape(found, layer, sum(shapes[part][0] for part, _ in parts), shapes[parts[0][0]], model)
        for name, (_, rows) in zip(names, parts, strict=True):
            weights[name] = LowRank(a, b[rows] * layer.scaling)
    return weights


def _check_shape(found: PeftAdapter, layer: PeftLayer, outputs: int, shape: tuple[int, ...], model: Path) -> None:
    """A module of so many outputs and the inputs of `shape`, or an embedding of that shape."""
    wanted = (shape[0], shape[1]) if layer.is_embedding else (shape[1], outputs)
    own = found.infos[layer.a].shape[1], found.infos[layer.b].shape[0]
    if own != wanted:
        made_for = f"it was made for {found.base}" if found.base else "it was made for another model"
        raise ModelError(
            f"{found.folder}: {layer.module} maps {own[0]} numbers to {own[1]}, and that of {model} {wanted[0]} to "
            f"{wanted[1]}: {made_for}."
        )


def _floats(found: PeftAdapter, name: str) -> Tensor:
    values = found.read(name).float()
    if not bool(values.isfinite().all()):
        raise ModelError(f"{found.folder}: {name} holds NaN or infinite numbers: its training went wrong.")
    return values


def _check_base_weights(found: PeftAdapter, tensors: CheckedTensors) -> None:
    """PEFT saves embeddings that are adapted, and those that were resized: the former are the model's own."""
    for module, name in found.base_weights.items():
        own = tensors.parts(f"{module}.weight")[0][0]
        own = f"{_TABLE}.weight" if own not in tensors else own
        stored, wanted = found.read(name).float(), tensors.spec.shapes().get(own)
        is_own = stored.shape == wanted
        if is_own:
            mine = torch.as_tensor(tensors[own][:]).float()
            most = _QUANTISED if own in tensors.blocks else _ROUNDED
            is_own = bool((stored - mine).square().mean().sqrt() <= most * mine.square().mean().sqrt())
        if not is_own:
            raise ModelError(
                f"{found.folder} brings {name}, {list(stored.shape)}, which is not the model's own: layers that were "
                "resized or trained as a whole are not supported. Merge the adapter into its model with PEFT."
            )


def _digest(weights: Mapping[str, LowRank]) -> str:
    digest = hashlib.sha256()
    for name, parts in sorted(weights.items()):
        digest.update(f"{name} {[tuple(part.shape) for part in parts]}".encode())
        for part in parts:
            digest.update(part.contiguous().numpy().data)
    return digest.hexdigest()
