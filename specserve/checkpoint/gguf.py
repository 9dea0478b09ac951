"""Makes a Hugging Face folder of a GGUF file: config.json, tokenizer, and its weights as they are or as safetensors.

What llama.cpp's converter does to a checkpoint is undone here: names, the order of rows, experts in one tensor, and
Gemma's norm weights (stored as 1 + w there). gguf_families.py has the architectures.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specserve.checkpoint import gguf_metadata as metadata
from specserve.checkpoint.gguf_families import ARCHITECTURES, Architecture, find_architecture
from specserve.checkpoint.gguf_file import GGUFFile, GGUFTensor, read
from specserve.checkpoint.gguf_index import FILE, write_index
from specserve.checkpoint.gguf_tensors import Heads, Stored, named
from specserve.checkpoint.gguf_tokenizer import as_json, generation_config, tokenizer_files
from specserve.checkpoint.safetensors_file import Entry, write
from specserve.errors import ModelError
from specserve.files import reading

__all__ = ["ARCHITECTURES", "adopt", "convert"]

Progress = Callable[[int, int], None]  # bytes of weights written, bytes in all


def convert(path: Path, folder: Path, progress: Progress | None = None) -> None:
    """Write the model of GGUF file `path` into `folder` as other programs read it; config.json is written last.

    Quantised tensors become float32, F16 and BF16 keep their type; weights are streamed in pieces of a few MiB.
    Raises ModelError for a truncated or unknown file, type, architecture, setting, tensor or tokenizer, before writing
    weights.
    """
    outputs, texts = _described(path)
    folder.mkdir(parents=True, exist_ok=True)
    _write_safetensors(folder / "model.safetensors", outputs, progress or (lambda done, total: None))
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def adopt(path: Path, folder: Path, move: bool = False) -> None:
    """Make `folder` a model folder whose weights are the GGUF file itself: moved there, or linked. Raises ModelError as
    `convert` does."""
    outputs, texts = _described(path)
    folder.mkdir(parents=True, exist_ok=True)
    if move:
        os.replace(path, folder / FILE)
    else:
        (folder / FILE).symlink_to(path.resolve())
    write_index(folder, (output.placed() for output in outputs))
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _described(path: Path) -> tuple[list[Stored], dict[str, str]]:
    """Tensors, and the texts of a model folder; config.json is the last."""
    with reading(path):
        file = read(path)
        architecture = find_architecture(file)
        metadata.refuse_changes(file, architecture.reads)
        config = _config(file, architecture)
        return _outputs(file, architecture), tokenizer_files(file) | {"config.json": as_json(config)}


def _config(file: GGUFFile, architecture: Architecture) -> dict[str, Any]:
    end = generation_config(file)
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "dtype": metadata.dtype(file),
        "vocab_size": metadata.embedding(file).shape[0],
        "tie_word_embeddings": metadata.is_tied(file),
        "bos_token_id": end.get("bos_token_id"),
        "eos_token_id": end["eos_token_id"],
    }
    return config | architecture.config(file)


def _outputs(file: GGUFFile, architecture: Architecture) -> list[Stored]:
    """Every tensor as it will be written, but for those that the config says already: rope factors, and an output
    equal to the embeddings."""
    skipped = {metadata.ROPE_FACTORS, metadata.LONG_FACTORS, metadata.SHORT_FACTORS}
    skipped |= {"output.weight"} if metadata.is_tied(file) else set()
    heads = Heads(metadata.whole(file, "attention.head_count"), metadata.num_kv_heads(file), metadata.head_dim(file))
    layers, given = metadata.num_layers(file), dict[str, str]()
    outputs: list[Stored] = []
    for tensor in [tensor for name, tensor in file.tensors.items() if name not in skipped]:
        made = _output(file, architecture, heads, tensor, layers)
        for output in made:  # two of the file's names may be one in Hugging Face's terms: blk.1 and blk.01
            if output.name in given:
                raise ModelError(f"{file.path}: {given[output.name]!r} and {tensor.name!r} are both {output.name}.")
            given[output.name] = tensor.name
        outputs.extend(made)
    _check_layers(file, layers)
    return outputs


def _output(file: GGUFFile, architecture: Architecture, heads: Heads, tensor: GGUFTensor, layers: int) -> list[Stored]:
    offset = architecture.norm_offset if tensor.name.endswith("norm.weight") else 0.0
    top = re.fullmatch(r"(\w+)\.(weight|bias)", tensor.name)
    if top and top[1] in architecture.once:
        return named([Stored(architecture.once[top[1]], tensor, tensor.shape)], "", top[2], offset)
    part = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", tensor.name)
    if part and part[2] in architecture.each and int(part[1]) < layers:
        made = architecture.arrange(part[2])(file, heads, tensor)
        return named(made, f"{architecture.layers}.{int(part[1])}.", part[3], offset)
    raise ModelError(
        f"{file.path}: tensor {tensor.name!r} is unknown in a {architecture.model_type} model of {layers} layers."
    )


def _check_layers(file: GGUFFile, layers: int) -> None:
    """All layers have the same tensors."""
    parts = {name.partition(".")[2].partition(".")[2]: None for name in file.tensors if name.startswith("blk.")}
    for part in parts:
        for layer in range(layers):
            if f"blk.{layer}.{part}" not in file.tensors:
                raise ModelError(f"{file.path} has no tensor 'blk.{layer}.{part}', which other layers have.")


def _write_safetensors(path: Path, outputs: list[Stored], progress: Progress) -> None:
    entries = [Entry(each.name, each.dtype, each.shape, each.num_bytes) for each in outputs]
    total, done = sum(entry.num_bytes for entry in entries), 0

    def tell(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    write(path, entries, (piece for output in outputs for piece in output.pieces()), tell)
