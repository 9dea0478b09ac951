"""A draft head's tensors under their canonical names, checked, whatever file and names they were stored under."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from specserve.checkpoint.gguf_index import INDEX as GGUF_INDEX
from specserve.checkpoint.pickled import PickledWeights
from specserve.errors import ModelError, near_misses
from specserve.models.heads.int8 import Int8Weights
from specserve.models.heads.spec import HeadSpec, MedusaSpec, Shapes

Stored: TypeAlias = Int8Weights | PickledWeights

_PICKLED = ("medusa_lm_head.pt", "pytorch_model.bin")
_FLOATS = ("F32", "BF16", "F16")
# What follows from the configuration, tables that are read apart, and the verifier's own weights, which `speculators`
# keeps beside a head to train it.
_NO_WEIGHTS = re.compile(r".*\.inv_freq|.*rotary_emb\..*|d2t|t2d|verifier_norm\.weight|verifier_lm_head\.weight")


@dataclass(frozen=True, slots=True)
class Found:
    """What a reader of one format makes of a checkpoint. `names` has the stored name of each canonical one, also of
    tensors that the spec does not account for, which are then refused by name."""

    spec: HeadSpec
    names: Mapping[str, str]
    format: str
    verifier: str | None = None


def open_tensors(folder: Path) -> Stored:
    """The tensors of `folder`: those of its safetensors files or its GGUF file, else of a file of torch.save's under a
    name that draft heads have. Raises ModelError."""
    if any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.safetensors.index.json", GGUF_INDEX)):
        return Int8Weights(folder)
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder.")
    for name in _PICKLED:
        if (folder / name).exists():
            return PickledWeights(folder / name)
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    raise ModelError(
        f"{folder} has neither a .safetensors file nor {' or '.join(_PICKLED)}"
        + (f", only {', '.join(others)}" if others else "")
        + ". Save the head's tensors as model.safetensors."
    )


def canonical_names(stored: Collection[str], rename: Callable[[str], str]) -> dict[str, str]:
    """The stored name of each canonical one, without tensors that are no weights of the head. Raises ModelError for two
    that would be one."""
    found: dict[str, str] = {}
    for name in stored:
        if _NO_WEIGHTS.fullmatch(name.removeprefix("model.")):
            continue
        own = rename(name)
        if own in found:
            raise ModelError(f"{found[own]} and {name} are the same tensor of the head, {own}.")
        found[own] = name
    return found


class HeadTensors(Mapping[str, Tensor]):
    """The tensors of `shapes`, float32, bfloat16 or float16 as stored, memory-mapped where the file allows. Names,
    shapes and dtypes are checked at once, and numbers when a tensor is taken. Raises ModelError naming the tensor."""

    def __init__(self, shapes: Shapes, stored: Stored, names: Mapping[str, str], folder: Path) -> None:
        self._stored = stored
        self._names = {name: names[name] for name in shapes if name in names}
        self._folder = folder
        self._check_names(shapes, names)
        for name, wanted in shapes.items():
            info = stored.infos[names[name]]
            if info.shape != wanted:
                raise ModelError(
                    f"{folder}: {names[name]} has shape {info.shape}; by the configuration and the other tensors it "
                    f"must have {wanted}."
                )
            if info.dtype not in _FLOATS:
                raise ModelError(f"{folder}: {names[name]} holds {info.dtype}; supported are {', '.join(_FLOATS)}.")

    @property
    def num_bytes(self) -> int:
        return sum(self._stored.infos[stored].num_bytes for stored in self._names.values())

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(self._stored.infos[stored].shape) for stored in self._names.values())

    def _check_names(self, shapes: Shapes, names: Mapping[str, str]) -> None:
        strange = [stored for name, stored in names.items() if name not in shapes]
        if missing := [name for name in shapes if name not in names]:
            raise ModelError(f"{self._folder} lacks {_some(missing)}{_near(missing[0], strange)}.")
        if strange:
            raise ModelError(
                f"{self._folder} has {_some(strange)}, which a head of its configuration does not have"
                f"{_near(strange[0], list(shapes))}. It may be of an architecture that is not supported."
            )

    def __getitem__(self, name: str) -> Tensor:
        stored = self._names[name]
        tensor = self._stored[stored]
        check_numbers(f"{self._folder}: {stored}", tensor)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def check_numbers(name: str, tensor: Tensor) -> None:
    """Raise ModelError for NaN and infinity: they would draft nonsense without a word."""
    if not all(bound.isfinite() for bound in torch.aminmax(tensor)):
        raise ModelError(
            f"{name} holds NaN or infinite numbers, so its file is damaged or its training went wrong. Get it again."
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more tensors" if len(names) > 4 else "")


def _near(name: str, others: list[str]) -> str:
    near = near_misses(name, others, 2, 0.8)
    return f" (near {name}: {', '.join(near)})" if near else ""


# --- the reduced vocabulary -------------------------------------------------------------------------------------------


def draft_vocab_size(spec: HeadSpec) -> int:
    """Ids that the head proposes from."""
    return spec.draft_vocab_size if isinstance(spec, MedusaSpec) else spec.layers.vocab_size


def read_d2t(stored: Stored, spec: HeadSpec, folder: Path) -> Tensor | None:
    """d2t, int64 [draft vocabulary]: what to add to a draft id for the target's, or None where the ids are the target's
    own. t2d, a bool for each of the target's ids, must agree if it is there. Raises ModelError."""
    if "d2t" not in stored.infos:
        if spec.has_draft_vocab:
            raise ModelError(
                f"{folder} lacks d2t: its {draft_vocab_size(spec):,} draft ids cannot be told from the target's "
                f"{spec.target.vocab_size:,}."
            )
        return None
    ids = check_d2t(stored["d2t"], spec, f"{folder}: d2t")
    if "t2d" in stored.infos:
        t2d = stored["t2d"]
        if t2d.dtype != torch.bool or tuple(t2d.shape) != (spec.target.vocab_size,):
            raise ModelError(
                f"{folder}: t2d is {_kind(t2d)}; for a target of {spec.target.vocab_size:,} ids it must be "
                f"bool [{spec.target.vocab_size}]."
            )
        # EAGLE leaves both tables zero where all ids are the target's.
        if not torch.equal(t2d.nonzero().flatten(), ids) and (spec.has_draft_vocab or bool(t2d.any())):
            raise ModelError(f"{folder}: t2d and d2t name different ids of the target, so one of them is wrong.")
    return stored["d2t"] if spec.has_draft_vocab else None


def check_d2t(d2t: Tensor, spec: HeadSpec, name: str) -> Tensor:
    """The target's ids that the draft ids stand for, int64 [draft vocabulary]. Raises ModelError."""
    size, limit = draft_vocab_size(spec), spec.target.vocab_size
    if d2t.dtype != torch.int64 or tuple(d2t.shape) != (size,):
        raise ModelError(f"{name} is {_kind(d2t)}; for {size:,} draft ids it must be int64 [{size}].")
    ids = torch.arange(size) + d2t
    if size and (bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= limit):
        raise ModelError(
            f"{name} is no table of offsets: i + d2t[i] must ascend from at least 0 to below the target's {limit:,} "
            f"ids, and goes from {int(ids.min())} to {int(ids.max())}. A table of the target's ids themselves becomes "
            "one by subtracting arange."
        )
    return ids


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
