"""Draft heads on disk: reads those of every format that is known, says whether one fits a target, writes our own.

A reader of a format is a module beside this one; it knows the format's names, keys and numbering of layers, and cites
where it was published.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from specserve.checkpoint.folder import read_json
from specserve.errors import ModelError
from specserve.files import reading
from specserve.models.config import Config
from specserve.models.heads import block_repo, eagle_repo, medusa_repo, mtp_repo, speculators
from specserve.models.heads.int8 import quantization_config, to_int8
from specserve.models.heads.spec import BlockSpec, EagleSpec, HeadSpec, MedusaSpec, TargetShape
from specserve.models.heads.speculators import Verifier
from specserve.models.heads.tensors import (
    Found,
    HeadTensors,
    Stored,
    check_d2t,
    check_numbers,
    open_tensors,
    read_d2t,
)


@dataclass(frozen=True, slots=True)
class Head:
    """A draft head. `weights` has the tensors of spec.shapes(), as stored, each read and its numbers checked when it is
    taken. `d2t`, int64 [draft vocabulary], is what to add to a draft id for the target's, None where they are the same.
    `format` is whose layout the files have, `verifier` the target they name, if they do."""

    spec: HeadSpec
    weights: HeadTensors
    d2t: Tensor | None
    format: str
    verifier: str | None


def read_head(folder: Path, num_target_layers: int = 0) -> Head:
    """The head in `folder`, which is of whichever format `is_head` finds. `num_target_layers`, where it is known, is
    the layers of the target: EAGLE-3's own checkpoints leave the choice of the layers that they read to it.

    Names, shapes, dtypes and d2t are checked at once. Raises ModelError saying what is wrong: an unknown format, a
    missing key, a value of the wrong kind, a feature that is not supported; a missing, unknown, misshapen or pickled
    tensor, one with NaN.
    """
    with reading(folder):
        return _read(folder, num_target_layers)


def _read(folder: Path, num_target_layers: int) -> Head:
    config, stored = _open(folder)
    reader = _reader(folder, config, stored)
    if reader is None:
        raise ModelError(
            f"{folder} holds no draft head that is known: config.json is none of speculators, DFlash, DSpark or "
            "Medusa, and the tensors are not EAGLE's, which have fc.weight and one decoder layer."
        )
    found = reader(config, stored, num_target_layers)
    return _checked(found, stored, folder)


def read_next_token_layers(folder: Path) -> Head:
    """The next-token layers that the model in `folder` brings. Raises ModelError as `read_head` does."""
    with reading(folder):
        config, stored = _open(folder)
        return _checked(mtp_repo.read(config, stored), stored, folder)


def has_next_token_layers(folder: Path) -> bool:
    """Whether the model in `folder` brings any, perhaps broken ones."""
    return any(folder.glob("*.safetensors")) and mtp_repo.is_head(open_tensors(folder))


def _checked(found: Found, stored: Stored, folder: Path) -> Head:
    _check_spec(found.spec)
    weights = HeadTensors(found.spec.shapes(), stored, found.names, folder)
    return Head(found.spec, weights, read_d2t(stored, found.spec, folder), found.format, found.verifier)


def is_head(folder: Path) -> bool:
    """Whether `folder` has a draft head of a known format, perhaps a broken one, and no model of its own. Raises
    ModelError for files that cannot be read."""
    with reading(folder):
        config, stored = _open(folder)
        return _reader(folder, config, stored) is not None


def _open(folder: Path) -> tuple[Config, Stored]:
    """The configuration may be absent: Medusa heads tell all but their target by their tensors."""
    stored = open_tensors(folder)
    path = folder / "config.json"
    return (read_json(path) if path.exists() else {}), stored


def _reader(folder: Path, config: Config, stored: Stored) -> Callable[[Config, Stored, int], Found] | None:
    if speculators.is_head(config):
        return speculators.read
    if medusa_repo.is_head(config, {path.name for path in folder.iterdir()}):
        return medusa_repo.read
    if block_repo.is_head(config):
        return block_repo.read
    if eagle_repo.is_head({eagle_repo.canonical(name) for name in stored.infos}):
        return eagle_repo.read
    return None


def _check_spec(spec: HeadSpec) -> None:
    """What the tensors' shapes cannot tell: that the target has the layers that the head reads, and each once, and that
    the head has of its own what it cannot take from the target. Raises ModelError."""
    for name, least in (("hidden_size", 1), ("vocab_size", 1), ("num_layers", 0)):
        value = getattr(spec.target, name)
        if type(value) is not int or value < least:
            raise ModelError(f"The target's {name} is {value!r}; it must be a whole number of at least {least}.")
    taps = list(hidden_layers(spec))
    if any(type(tap) is not int or tap < 0 for tap in taps) or len(set(taps)) != len(taps):
        raise ModelError(f"The head reads the outputs of layers {taps} of its target; they count from 0, each once.")
    if spec.target.num_layers and max(taps, default=0) >= spec.target.num_layers:
        raise ModelError(
            f"The head reads the output of layer {max(taps)} of a target with layers 0 to {spec.target.num_layers - 1}."
        )
    if isinstance(spec, MedusaSpec):
        return
    if spec.has_draft_vocab and not (spec.has_head or spec.shares_head):
        raise ModelError(
            f"The head has {spec.layers.vocab_size:,} draft ids of the target's {spec.target.vocab_size:,} and no LM "
            "head of its own, which it then needs."
        )
    if spec.layers.hidden_size != spec.target.hidden_size and not (spec.has_embedding and spec.has_head):
        raise ModelError(
            f"The head's hidden size is {spec.layers.hidden_size} and its target's {spec.target.hidden_size}, so it "
            "needs an embedding and an LM head of its own, and lacks one."
        )


def hidden_layers(spec: HeadSpec) -> tuple[int, ...]:
    """The target's layers, counted from 0, whose outputs the head reads; none of heads that read the final norm's."""
    return spec.hidden_layers if isinstance(spec, BlockSpec | EagleSpec) else ()


def fits(spec: HeadSpec, target: TargetShape) -> None:
    """Raise ModelError with the figures if the head cannot draft for `target`."""
    taps, wrong = hidden_layers(spec), []
    if spec.target.hidden_size != target.hidden_size:
        wrong.append(
            f"hidden states of {spec.target.hidden_size:,} numbers, and the target's have {target.hidden_size:,}"
        )
    if spec.target.vocab_size != target.vocab_size:
        wrong.append(f"a vocabulary of {spec.target.vocab_size:,} ids, and the target's has {target.vocab_size:,}")
    if spec.target.num_layers not in (0, target.num_layers):
        wrong.append(f"a target of {spec.target.num_layers} layers, and this one has {target.num_layers}")
    elif max(taps, default=0) >= target.num_layers:
        wrong.append(f"the output of layer {max(taps)}, and the target has layers 0 to {target.num_layers - 1}")
    if wrong:
        raise ModelError(
            f"The draft head was made for {'; for '.join(wrong)}. Use a head that was trained for this target."
        )


def write_head(
    folder: Path,
    spec: HeadSpec,
    weights: Mapping[str, Tensor],
    d2t: Tensor | None,
    verifier: Verifier,
    *,
    int8: bool = False,
) -> None:
    """Write the head for `verifier` in the format of `speculators`, so that `read_head` gives the same back, or with
    `int8` matrices rounded to int8. Files that are there are replaced, each when its successor is whole.

    Raises ModelError for weights that are not those of spec.shapes(), NaN, a wrong d2t and what the format cannot say.
    """
    _check_spec(spec)
    shapes, tensors = spec.shapes(), dict[str, Tensor]()
    if set(shapes) != set(weights):
        missing, strange = sorted(set(shapes) - set(weights)), sorted(set(weights) - set(shapes))
        raise ModelError(f"The head's spec and its weights differ: missing {missing}, unknown {strange}.")
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise ModelError(f"{name} has shape {tuple(weights[name].shape)}; the head's spec says {shape}.")
        check_numbers(name, weights[name])
        # A copy: safetensors refuses tensors that share memory.
        stored, tensor = speculators.stored_name(spec, name), weights[name].detach().cpu().clone().contiguous()
        tensors |= to_int8(stored, tensor) if int8 else {stored: tensor}
    if spec.has_draft_vocab != (d2t is not None):
        raise ModelError("d2t is for heads with a draft vocabulary of their own, and they need one.")
    if d2t is not None:
        tensors["d2t"] = d2t.detach().cpu().clone()
        ids = check_d2t(tensors["d2t"], spec, "d2t")
        tensors["t2d"] = torch.zeros(spec.target.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    settings = speculators.config_of(spec, verifier)
    if int8:
        settings["quantization_config"] = quantization_config()
    config = json.dumps(settings, indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / ".partial"
    partial.write_bytes(save(tensors))  # save_file gives a file that its owner alone may read
    os.replace(partial, folder / "model.safetensors")
    partial.write_text(config, encoding="utf-8")
    os.replace(partial, folder / "config.json")
