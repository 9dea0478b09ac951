"""Converts a folder whose weights torch.save wrote, pytorch_model.bin or shards of it, into one of safetensors.

Nothing in the files is run (specserve.checkpoint.pickled). What the folder has beside its weights is copied, and a
tokenizer.json made where it has only the older files of a tokenizer.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from specserve.checkpoint.folder import read_config
from specserve.checkpoint.pickled import PickledWeights, place_of
from specserve.checkpoint.safetensors_file import Entry, write
from specserve.checkpoint.tokenizer_files import make_tokenizer, old_tokenizer
from specserve.errors import ModelError
from specserve.files import reading

_log = logging.getLogger(__name__)
_COPIED = ("*.json", "*.jinja")
_NOT_COPIED = "*.index.json"
_HEADS = ("lm_head.weight", "embed_out.weight")  # those that a tied model has as its embeddings
_PIECE = 1 << 24  # numbers that are copied at once
Progress = Callable[[int], object]


def convert(folder: Path, files: list[Path], target: Path, progress: Progress) -> None:
    """Write the model in `folder`, whose weights are `files`, into `target`, file by file. `progress` is told the bytes
    of each piece written. Raises ModelError for what is no file of tensors alone, and for tensors that are there twice.
    """
    target.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    with reading(folder):
        old = None if (folder / "tokenizer.json").exists() else old_tokenizer(folder)  # before what takes long
        is_tied = _ties(folder)
        for number, path in enumerate(files, start=1):
            name = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
            for tensor in _convert_file(path, target / name, is_tied, progress):
                if tensor in places:
                    raise ModelError(f"Tensor {tensor!r} is in {path} and in another of its files.")
                places[tensor] = name
        if len(files) > 1:
            (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}), "utf-8")
        _copy_others(folder, target)
        if old is not None:
            _log.info("%s has no tokenizer.json: made of %s.", folder, make_tokenizer(old, target))


def _convert_file(path: Path, target: Path, is_tied: bool, progress: Progress) -> list[str]:
    """The names of what was written."""
    weights = PickledWeights(path, may_share=True)
    if strange := [name for name, info in weights.infos.items() if info.dtype.startswith("torch.")]:
        raise ModelError(f"{path}: {strange[0]} holds {weights.infos[strange[0]].dtype}, which safetensors do not.")
    names = [name for name in weights if not (is_tied and _is_second(name, weights))]
    entries = [Entry(name, info.dtype, info.shape, info.num_bytes) for name in names for info in [weights.infos[name]]]
    write(target, entries, (piece for name in names for piece in _pieces(weights[name])), progress)
    return names


def _ties(folder: Path) -> bool:
    """Whether its head is its embedding: what config.json says, or else what it means that it says nothing."""
    config = read_config(folder)
    if config.get("tie_word_embeddings") is not None:
        return bool(config["tie_word_embeddings"])
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # here: it takes seconds to import

    kind = config["model_type"]
    return kind in CONFIG_MAPPING and bool(getattr(CONFIG_MAPPING[kind](), "tie_word_embeddings", False))


def _is_second(name: str, weights: PickledWeights) -> bool:
    """Whether it is a head that has no numbers of its own."""
    own = place_of(weights[name])
    return name.endswith(_HEADS) and any(
        place_of(tensor) == own for other, tensor in weights.items() if not other.endswith(_HEADS)
    )


def _pieces(tensor: Tensor) -> Iterator[bytes]:
    """Its bytes, row after row."""
    numbers = tensor.detach()
    if not numbers.is_contiguous():
        numbers = numbers.contiguous()
    numbers = numbers.view(-1)
    for start in range(0, len(numbers), _PIECE):
        yield numbers[start : start + _PIECE].view(torch.uint8).numpy().tobytes()


def _copy_others(folder: Path, target: Path) -> None:
    for pattern in _COPIED:
        for path in folder.glob(pattern):
            if path.is_file() and not path.match(_NOT_COPIED):
                shutil.copyfile(path, target / path.name)
