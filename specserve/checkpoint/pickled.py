"""Tensors of a file that torch.save wrote, by name. Nothing in it is run: a file that holds more than tensors is
refused."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specserve.checkpoint.folder import TensorInfo
from specserve.errors import ModelError
from specserve.files import check_regular, map_file

# safetensors' spelling of those that models and heads are stored in, and of the tables beside them.
_SPELLINGS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class PickledWeights(Mapping[str, Tensor]):
    """A read-only mapping like `specserve.checkpoint.weights.Weights` over one file of torch.save's, memory-mapped
    where it is a zip archive, as torch writes since 1.6. `may_share`: several names may have one tensor's numbers.
    Raises ModelError for a file that is damaged, or that holds anything but tensors by name."""

    def __init__(self, path: Path, *, may_share: bool = False) -> None:
        self._tensors = _load(path, may_share)
        self.infos: Mapping[str, TensorInfo] = {
            name: TensorInfo(path, _SPELLINGS.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), tensor.nbytes)
            for name, tensor in self._tensors.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _load(path: Path, may_share: bool) -> dict[str, Tensor]:
    try:
        check_regular(path)
        is_zip = zipfile.is_zipfile(path)
        if is_zip:
            _check_archive(path)
        # Of an older file no more is read than there is, whatever lengths it states.
        source: Any = path if is_zip else map_file(path).obj
        held: Any = torch.load(source, map_location="cpu", weights_only=True, mmap=is_zip)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ModelError:
        raise
    except Exception as error:  # UnpicklingError, and whatever a damaged file makes torch raise
        raise ModelError(
            f"{path} cannot be read as tensors alone: it holds objects whose loading would run code, or it is damaged. "
            "specserve runs no code of a checkpoint. Where you trust its author, load it with torch.load(..., "
            "weights_only=False) elsewhere and save its tensors with safetensors.torch.save_file."
        ) from error
    if not isinstance(held, dict):
        raise ModelError(f"{path} holds a {type(held).__name__}; it must hold tensors by name.")
    for name, tensor in held.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ModelError(
                f"{path} holds a {type(tensor).__name__} under {name!r}; it must hold tensors by name. Save the "
                "head's state_dict() alone."
            )
        _check_layout(path, name, tensor)
    # Several may be one place of the file, seen in many ways.
    if may_share:
        num_bytes = sum({place_of(tensor): tensor.nbytes for tensor in held.values()}.values())
    else:
        num_bytes = sum(tensor.nbytes for tensor in held.values())
    if num_bytes > (size := path.stat().st_size):
        raise ModelError(
            f"{path} has {size:,} bytes, and its tensors take {num_bytes:,}: some share their numbers. Save each with "
            "numbers of its own."
        )
    return held


def place_of(tensor: Tensor) -> tuple[object, ...]:
    """The same for two tensors that are one."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _check_archive(path: Path) -> None:
    """torch compresses nothing: what is compressed in such a file may be of any size."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ModelError(f"{path} holds {entry.filename!r} compressed, which torch.save does not do.")


def _check_layout(path: Path, name: str, tensor: Tensor) -> None:
    """A tensor that is more than its bytes in the file would be made when it is used: of one number by strides of 0, of
    few by being sparse, of none by being on the device "meta"."""
    kind = f"{str(tensor.layout).removeprefix('torch.')} on {tensor.device}"
    if type(tensor) not in (Tensor, torch.nn.Parameter) or kind != "strided on cpu" or tensor.is_quantized:
        raise ModelError(
            f"{path}: {name} is a {type(tensor).__name__}, {kind}; only plain tensors are read. Save it as one, "
            "with its numbers."
        )
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise ModelError(
            f"{path}: {name}, {list(tensor.shape)}, takes {tensor.nbytes:,} bytes, and the file has "
            f"{tensor.untyped_storage().nbytes():,} of it. Save it with contiguous()."
        )
