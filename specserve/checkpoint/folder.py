"""Checks a Hugging Face model folder before anything is loaded from it: config.json, which weight files, their sizes.
Imports no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from specserve import files
from specserve.checkpoint import gguf_index
from specserve.errors import ModelError
from specserve.registry import MODELS

MADE_OF = "made_of"  # in tokenizer_config.json: the older files that tokenizer.json was made of
ADAPTER_CONFIG = "adapter_config.json"  # of a LoRA adapter, as PEFT saves it
_INDEX = "model.safetensors.index.json"
_OLD_INDEX = "pytorch_model.bin.index.json"
_SINGLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MOST_JSON_BYTES = 16 << 20  # the largest published one is a tokenizer_config.json of 1 MB
_MOST_INDEX_BYTES = 64 << 20  # that of a million tensors
_MAX_HEADER_BYTES = 100 << 20  # the safetensors format's own limit
_MOST_DIMENSIONS = 64  # torch's own limit
_ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2} | {
    f"{kind}{bits}": bits // 8 for kind in "IUF" for bits in (32, 64)
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a safetensors header: `dtype` in the format's spelling (F32, BF16, ...), where it lies, its size."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


class _Entry(msgspec.Struct):
    """Of a tensor in a header. `__metadata__` has none of these."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] | None = None


_HEADER = msgspec.json.Decoder(dict[str, _Entry])  # keeps what a tensor has and nothing else, whatever is in the file


def check_folder(folder: Path) -> Path:
    """`folder` itself, once it has everything an engine needs and nothing that would run code; else ModelError."""
    check_weights(folder)
    if not (folder / "tokenizer.json").exists():
        raise ModelError(
            f"{folder} has no tokenizer.json. Save the tokenizer there with "
            "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)."
        )
    return folder


def check_weights(folder: Path) -> None:
    """As `check_folder`, of all but its tokenizer."""
    with files.reading(folder):
        read_config(folder)
        read_headers(folder)


def read_json(path: Path, most: int = _MOST_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in `path`; ModelError when it is missing, unreadable, larger than `most` bytes or something
    else."""
    try:
        value = files.read_json(path, most)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}; it must hold an object.")
    return value


def is_adapter(folder: Path) -> bool:
    """Whether an adapter is there, and no model."""
    return os.path.isfile(folder / ADAPTER_CONFIG) and not os.path.isfile(folder / "config.json")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as one flat dict. For a multimodal wrapper it is the text model's: `text_config` over the rest.

    Raises ModelError when there is none, for an adapter's folder, without `model_type`, or with `auto_map` (code of the
    model's author) that names a class of no architecture that runs natively: published Phi 3 and 4 name theirs for old
    programs.
    """
    if is_adapter(folder):
        raise ModelError(
            f"{folder} is a LoRA adapter, no model. Name its model, and the adapter by --lora NAME={folder}."
        )
    config = read_json(folder / "config.json")
    text = config.pop("text_config", None)
    if isinstance(text, Mapping):
        config |= text
    if "auto_map" in config and not _is_native(config.pop("auto_map")):
        raise ModelError(
            f"{folder / 'config.json'} has auto_map: this model needs Python code that comes with it, and specserve "
            "runs none. Use a version of the model that transformers knows itself."
        )
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{folder / 'config.json'} has no model_type, so its architecture is unknown.")
    return config


def _is_native(auto_map: Any) -> bool:
    """Whether the model's class is one of ours by name. Nothing of its code is run in either case."""
    name = auto_map.get("AutoModelForCausalLM") if isinstance(auto_map, Mapping) else None
    served = {each for names in MODELS.stating("ARCHITECTURES").values() for each in names}
    return isinstance(name, str) and name.rpartition(".")[2] in served


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of the folder's safetensors files, from their headers alone.

    Of a folder made of a GGUF file they are that file's.

    Raises ModelError naming the file for a truncated or unreadable one, a tensor that is missing or there twice, an
    index that points out of the folder, and a folder that has pickled weights only.
    """
    if (folder / gguf_index.INDEX).exists():
        path = folder / gguf_index.FILE
        stored = gguf_index.read_index(folder)
        return {name: TensorInfo(path, each.dtype, each.shape, each.num_bytes) for name, each in stored.items()}
    index = _read_index(folder)
    tensors: dict[str, TensorInfo] = {}
    for path in _weight_files(folder, index):
        for name, info in read_header(path).items():
            if name in tensors:
                raise ModelError(f"Tensor {name!r} is both in {tensors[name].file} and in {path}.")
            tensors[name] = info
    for name, file_name in index.items():
        if name not in tensors or tensors[name].file.name != file_name:
            raise ModelError(f"{folder / _INDEX} places tensor {name!r} in {file_name}, which does not have it.")
    return tensors


def old_files(folder: Path) -> list[Path]:
    """The files of a model's weights that torch.save wrote, where the folder has no others: pytorch_model.bin, or those
    of its index. Raises ModelError for an index that is wrong."""
    if any(folder.glob("*.safetensors")) or (folder / _INDEX).exists():
        return []
    if (folder / "pytorch_model.bin").is_file():
        return [folder / "pytorch_model.bin"]
    if not (folder / _OLD_INDEX).is_file():
        return []
    files = sorted({folder / name for name in weight_map(folder / _OLD_INDEX, ".bin").values()})
    if missing := [path.name for path in files if not path.is_file()]:
        raise ModelError(f"{folder / _OLD_INDEX} names {missing[0]}, which the folder does not have.")
    return files


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name; empty when the folder has no index."""
    path = folder / _INDEX
    return {} if (folder / _SINGLE).is_file() or not path.is_file() else weight_map(path, ".safetensors")


def weight_map(path: Path, suffix: str) -> dict[str, str]:
    """Which file each tensor is in, by an index. Raises ModelError for one that names others than files of the same
    folder with this suffix."""
    places = read_json(path, _MOST_INDEX_BYTES).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ModelError(f"{path} has no weight_map.")
    for file_name in places.values():
        plain = isinstance(file_name, str) and file_name == Path(file_name).name and "\\" not in file_name
        if not plain or not file_name.endswith(suffix):
            raise ModelError(f"{path} names the file {file_name!r}; only {suffix} files of the same folder are read.")
    return places


def _weight_files(folder: Path, index: Mapping[str, str]) -> list[Path]:
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder.")
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    files = sorted({folder / name for name in index.values()}) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(_no_weights(folder))
    return files


def _no_weights(folder: Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if not pickles:
        return f"{folder} has no .safetensors file."
    return (
        f"{folder} has its weights only as {pickles[0]}, a pickle. A folder with pytorch_model.bin is converted once "
        "where it is given as --model; convert others with transformers' from_pretrained and save_pretrained."
    )


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of one safetensors file. Raises ModelError as `read_headers` does."""
    try:
        with files.open_file(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            text = stream.read(length) if length <= min(size, _MAX_HEADER_BYTES) else b""
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error
    if size < 8 or len(text) < length:
        raise ModelError(
            f"{path} is truncated or no safetensors file: its header should take {length:,} bytes, and the "
            f"file has {size:,}."
        )
    infos, num_bytes = _parse_header(path, text)
    expected = 8 + length + num_bytes
    if size != expected:
        kind = "truncated" if size < expected else "too long"
        raise ModelError(f"{path} is {kind}: it should have {expected:,} bytes and has {size:,}. Get it again.")
    return infos


def _parse_header(path: Path, text: bytes) -> tuple[dict[str, TensorInfo], int]:
    """The tensors, and the bytes of all of them, which follow one another without gaps."""
    try:
        entries = _HEADER.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no safetensors file: its header cannot be read ({error}).") from error
    entries.pop("__metadata__", None)
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets or ()):
        if entry.data_offsets is None or entry.data_offsets[0] != end or not _is_of_its_size(entry):
            raise ModelError(
                f"{path} is no safetensors file: its header places tensor {name!r}, {entry.dtype} "
                f"{list(entry.shape[:8])}, at {entry.data_offsets}, and the tensor before it ends at {end}."
            )
        end = entry.data_offsets[1]
    infos = {
        name: TensorInfo(path, entry.dtype, entry.shape, entry.data_offsets[1] - entry.data_offsets[0])
        for name, entry in entries.items()
        if entry.data_offsets is not None
    }
    return infos, end


def _is_of_its_size(entry: _Entry) -> bool:
    """Whether its place is as large as its shape. The size of other dtypes is the reader's to know."""
    assert entry.data_offsets is not None, "checked before"
    begin, end = entry.data_offsets
    if len(entry.shape) > _MOST_DIMENSIONS or any(n < 0 for n in entry.shape):
        return False
    item = _ITEM_BYTES.get(entry.dtype)
    return begin <= end if item is None else math.prod(entry.shape) * item == end - begin
