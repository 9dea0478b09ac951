"""Builds a model from its folder, a native Decoder or one that runs through transformers: finds the architecture,
checks every tensor, and that memory suffices; what was packed for it before is taken from the cache."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rich.progress
import torch
from rich.progress import BarColumn, DownloadColumn, TextColumn
from torch import Tensor

from specserve.cache.sizing import free_memory
from specserve.checkpoint.packed import PackedWeights, packed_path
from specserve.checkpoint.quantized import KEY, QuantizedWeights
from specserve.checkpoint.weights import read_config
from specserve.errors import CapacityError, ModelError, unknown
from specserve.files import reading
from specserve.models import transformers as generic
from specserve.models.config import Config
from specserve.models.decoder import Decoder
from specserve.models.fusing import QKV, split_rows
from specserve.models.generic.skeleton import causal_model_types
from specserve.models.rounding import how_kept
from specserve.models.spec import DecoderSpec, ExpertsMlp, shorten
from specserve.models.transformers import GenericSpec, TransformersModel
from specserve.ops import Ops
from specserve.ops.packing import PackedCache, Quantized, Weight, rows_of, uncached
from specserve.registry import MODELS
from specserve.terminal import console

PACKING_VERSION = 1  # raise it when Decoder packs something else under the same name: earlier files are then not used

_GIB = 2**30
_WORTH_BYTES = 2**24  # packing less is as fast as looking for a file
# Tensors that old checkpoints carry and no decoder reads: they follow from the configuration.
_HARMLESS = re.compile(r".*\.rotary_emb\.inv_freq")
# Experts as transformers 5 keeps them, [experts, rows, columns] a tensor: each one's rows are those of several layers.
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_FLOATS = ("F32", "BF16", "F16")  # safetensors' spelling

AnySpec = DecoderSpec | GenericSpec
AnyModel = Decoder | TransformersModel


def load_model(folder: Path, ops: Ops, max_len: int | None = None, *, progress: bool = False) -> AnyModel:
    """The model in `folder` on the device and in the dtype of `ops`, for sequences of up to `max_len` tokens (None: as
    many as the model was made for). Weights that `ops` packs are kept in the cache and, but for the first time, mapped
    from there; `progress` draws a bar on stderr while they are packed.

    Raises ModelError (unknown architecture, unsupported setting; missing, misshapen or unknown tensor; whatever else is
    wrong with the files) and CapacityError.
    """
    with reading(folder):
        return _load(folder, ops, max_len, progress)


def _load(folder: Path, ops: Ops, max_len: int | None, progress: bool) -> AnyModel:
    tensors = check_tensors(folder)
    spec = tensors.spec if max_len is None else shorten(tensors.spec, max_len)
    check_memory(spec, ops, free_memory(ops.device))
    if ops.layout is None or tensors.num_bytes < _WORTH_BYTES:
        return _checked(_built(spec, tensors, ops), tensors)
    layout, any_length = ops.layout, repr(dataclasses.replace(spec, max_len=1))

    def key() -> Any:
        stats = [(path.name, path.stat()) for path in tensors.files]
        files = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
        quantized = {"quantized": tensors.quantized.key} if tensors.quantized.key else {}
        return {"version": PACKING_VERSION, "layout": layout, "model": any_length, "files": files, **quantized}

    path = packed_path(folder.resolve(), ops)
    unpacked = frozenset(name.removesuffix("weight") + "table" for name in tensors.blocks)
    size = _num_packed_bytes(spec, ops, unpacked)
    with PackedWeights(path, folder.resolve(), key, lambda: _bar(progress, size)) as packed:
        model = _built(spec, tensors, ops, _without(unpacked, packed.get))
    model.num_mapped_bytes = packed.num_mapped_bytes
    return _checked(model, tensors)


def _without(unpacked: frozenset[str], cached: PackedCache) -> PackedCache:
    """Embeddings that lie in a GGUF file as blocks are smaller there than packed, and read quickly: not kept twice."""

    def get(name: str, shape: tuple[int, ...], dtype: torch.dtype, pack: Callable[[], Tensor]) -> Tensor:
        return pack() if name in unpacked else cached(name, shape, dtype, pack)

    return get


def _checked(model: AnyModel, tensors: CheckedTensors) -> AnyModel:
    model.origin = how_kept(tensors.quantized, model.ops)
    if isinstance(model, TransformersModel):
        model.check_rows()
    return model


def _built(spec: AnySpec, weights: Mapping[str, Any], ops: Ops, cached: PackedCache = uncached) -> AnyModel:
    if isinstance(spec, GenericSpec):
        return TransformersModel(spec, weights, ops, cached)
    return Decoder(spec, weights, ops, cached)


def check_tensors(folder: Path) -> CheckedTensors:
    """The tensors of the model in `folder`, names, shapes and dtypes checked from the files' headers, and its
    description. Raises ModelError as `load_model` does."""
    with reading(folder):
        config = read_config(folder)
        weights = QuantizedWeights(folder, config)
        architecture = find_architecture(config)
        layers = next((config[key] for key in ("n_layer", "n_layers", "num_hidden_layers") if key in config), None)
        if isinstance(layers, int) and layers > len(weights):  # before anything is made for each
            raise ModelError(
                f"{folder / 'config.json'} says {layers:,} layers, and the files have {len(weights):,} tensors."
            )
        plain = {key: value for key, value in config.items() if key != KEY}
        by_head, is_transposed = (getattr(architecture, name, ()) for name in ("FUSED_BY_HEAD", "IS_TRANSPOSED"))
        spec, fused = architecture.spec(plain), getattr(architecture, "FUSED", {})
        rename = spec.names.rename if isinstance(spec, GenericSpec) else getattr(architecture, "rename", str)
        return CheckedTensors(spec, weights, rename, fused, folder, by_head, bool(is_transposed))


def native_spec(folder: Path) -> DecoderSpec:
    """Of the model in `folder`. Raises ModelError for one that is not native, too."""
    spec = check_tensors(folder).spec
    if isinstance(spec, GenericSpec):
        raise ModelError(f"{spec.architecture} runs through transformers: this needs a model that is native.")
    return spec


@contextmanager
def _bar(visible: bool, total: int) -> Iterator[Callable[[int], object]]:
    """What to call with the bytes that were packed, of `total`."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with rich.progress.Progress(*columns, console=console(stderr=True), disable=not visible) as bars:
        task = bars.add_task("Packing weights", total=total)
        yield lambda num_bytes: bars.advance(task, num_bytes)


def native_model_types() -> dict[str, str]:
    """The model_type of every configuration that runs natively, and the file in models/ that describes it."""
    return {kind: family for family, kinds in MODELS.stating("MODEL_TYPES").items() for kind in kinds}


def find_architecture(config: Config) -> Any:
    """The model family, a module, that serves one of config["architectures"]; where none does, config["model_type"];
    where none does that either, the one for all causal LMs of transformers. Raises ModelError listing what there is,
    near misses first."""
    listed = config.get("architectures")
    served = {name: family for family, names in MODELS.stating("ARCHITECTURES").items() for name in names}
    found = [served[name] for name in map(str, listed if isinstance(listed, list) else ()) if name in served]
    kinds, kind = native_model_types(), str(config.get("model_type"))
    if not found and kind not in kinds:
        if kind not in (others := causal_model_types()):
            raise ModelError(
                "This model has no native implementation, and transformers has none, either. "
                + unknown("model_type", kind, sorted({*kinds, *others}))
            )
        return generic
    return MODELS.find(found[0] if found else kinds[kind])


class CheckedTensors(Mapping[str, Weight]):
    """A checkpoint's tensors under the names of spec.shapes(); `rename` turns a stored name into one of these, or None
    for one that is not needed. `fused` has the layers whose rows are those of several layers, one after the other, and
    `by_head` those with queries, keys and values as fusing.rows_by_head has them; with `is_transposed` the matrices of
    layers are stored as [in, out]. Names, shapes and dtypes are checked at once, from the files' headers, and tensors
    and their numbers when they are taken. Raises ModelError naming the tensor."""

    def __init__(
        self,
        spec: AnySpec,
        weights: QuantizedWeights,
        rename: Callable[[str], str | None],
        fused: Mapping[str, tuple[str, ...]],
        folder: Path,
        by_head: Sequence[str] = (),
        is_transposed: bool = False,
    ) -> None:
        self.spec = spec
        self._is_transposed = is_transposed
        self._shapes = spec.shapes()
        self.quantized = weights
        self._folder = folder
        self._rename, self._fused, self._by_head = rename, fused, by_head
        names = {rename(stored): stored for stored in weights if not _HARMLESS.fullmatch(stored)}
        self._stored = {name: stored for name, stored in names.items() if name is not None}
        self._rows: dict[str, slice | Tensor] = {}  # of what is stored with others
        self._experts: dict[str, int] = {}  # of what is stored with others' rows in one tensor, the number of its own
        self._whole: dict[str, tuple[int, ...]] = {}  # the shape of what is stored with others, by its stored name
        self._split()
        self._split_experts()
        # Some tools store a tied head a second time.
        native = {"lm_head.weight": "model.embed_tokens.weight"} if spec.tied_embeddings else {}
        tied = spec.names.tied if isinstance(spec, GenericSpec) else native
        self._seconds = {own: self._stored.pop(name) for name, own in tied.items() if name in self._stored}
        self._check_names()
        for name in self._shapes:
            self._check_tensor(name)

    def parts(self, stored: str) -> list[tuple[str, slice | Tensor]]:
        """Under which names of spec.shapes() the rows of a stored tensor are, and which are whose. A tensor that the
        model does not have keeps its name."""
        name = self._rename(stored) or stored
        spec = self.spec if isinstance(self.spec, DecoderSpec) else None
        for whole, parts in self._fused.items():
            if f".{whole}." in name:
                return split_rows(name, whole, parts, self._shapes)
        for whole in self._by_head:
            if f".{whole}." in name:
                return split_rows(name, whole, QKV, self._shapes, spec)
        return [(name, slice(None))]

    def _split(self) -> None:
        for name, stored in [*self._stored.items()]:
            if not any(f".{whole}." in name for whole in (*self._fused, *self._by_head)):
                continue
            del self._stored[name]
            num_rows, columns = 0, list[int]()
            for part, own in self.parts(stored):
                rows, *columns = self._shapes.get(part, (0,))
                self._take_part(part, stored, own)
                num_rows += rows
            self._whole[stored] = (num_rows, *columns)

    def _split_experts(self) -> None:
        for name in [name for name in self._stored if name.rpartition(".")[2] in _STACKED]:
            experts, _, whole = name.rpartition(".")
            numbers = 0
            while f"{experts}.{numbers}.down_proj.weight" in self._shapes:
                numbers += 1
            if not numbers:
                continue  # a tensor too many
            stored, start, columns = self._stored.pop(name), 0, 0
            for part in _STACKED[whole]:
                rows, columns = self._shapes[f"{experts}.0.{part}.weight"]
                for number in range(numbers):
                    own = f"{experts}.{number}.{part}.weight"
                    self._take_part(own, stored, slice(start, start + rows))
                    self._experts[own] = number
                start += rows
            self._whole[stored] = (numbers, start, columns)

    def _take_part(self, part: str, stored: str, rows: slice | Tensor) -> None:
        if part in self._stored:
            raise ModelError(f"{self._folder} has {stored} and {self._stored[part]}, a part of it.")
        self._stored[part], self._rows[part] = stored, rows

    @property
    def files(self) -> list[Path]:
        """Where the tensors lie."""
        return self.quantized.files

    @property
    def blocks(self) -> list[str]:
        """Tensors that lie in a GGUF file as blocks of whole numbers."""
        return [name for name, stored in self._stored.items() if stored in self.quantized.blocks]

    @property
    def num_bytes(self) -> int:
        return sum(self.quantized.infos[stored].num_bytes for stored in set(self._stored.values()))

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self._shapes.values())

    def _check_names(self) -> None:
        if missing := [name for name in self._shapes if name not in self._stored]:
            raise ModelError(
                f"{self._folder} lacks {_some(missing)}: the checkpoint is incomplete or of another model."
            )
        for name in [name for name in self._stored if name not in self._shapes and self._is_zero_bias(name)]:
            del self._stored[name]
        if strange := [stored for name, stored in self._stored.items() if name not in self._shapes]:
            raise ModelError(f"{self._folder} has {_some(strange)}, which config.json does not account for.")

    def _is_zero_bias(self, name: str) -> bool:
        """Old tools give every quantised matrix a bias, of zeros where the model has none."""
        stored = self._stored[name]
        weight = f"{stored.removesuffix('.bias')}.weight"
        return stored.endswith(".bias") and weight in self.quantized.matrices and not self.quantized[stored][:].any()

    def _check_tensor(self, name: str) -> None:
        stored = self._stored[name]
        wanted = self._whole.get(stored, self._shapes[name])
        info = self.quantized.infos[stored]
        if self._is_stored_transposed(name):
            wanted = wanted[::-1]
        if info.shape != wanted:
            raise ModelError(f"{self._folder}: {stored} has shape {info.shape}; config.json implies {wanted}.")
        if info.dtype not in _FLOATS and stored not in self.quantized.matrices:
            raise ModelError(f"{self._folder}: {stored} holds {info.dtype}; supported are {', '.join(_FLOATS)}.")

    def _is_stored_transposed(self, name: str) -> bool:
        is_matrix = name.startswith("model.layers.") and len(self._shapes[name]) == 2
        return self._is_transposed and is_matrix and self._stored[name] not in self.quantized.matrices

    def _check_numbers(self, name: str, weight: Weight) -> None:
        """Packing would make numbers of them, and answers that are wrong without a word."""
        tensor = weight.scales if isinstance(weight, Quantized) else weight
        if not all(bound.isfinite() for bound in torch.aminmax(tensor)):
            raise ModelError(
                f"{self._folder}: {self._stored[name]} holds NaN or infinite numbers, so its file is damaged or its "
                "training went wrong. Get it again."
            )

    def _check_second(self, stored: str, table: Weight) -> None:
        """One that differs would silently be lost."""
        if not torch.equal(self.quantized[stored][:], table[:]):
            raise ModelError(
                f"{self._folder}: config.json ties {stored} to the embeddings, and the file has another one. "
                "Set tie_word_embeddings to false if the stored head is meant."
            )

    def __getitem__(self, name: str) -> Weight:
        weight = self.quantized[self._stored[name]]
        if name in self._experts:
            assert isinstance(weight, Tensor), "a quantised matrix has a tensor of its own"
            weight = weight[self._experts[name]]
        if self._is_stored_transposed(name):
            assert isinstance(weight, Tensor), "quantised matrices are [out, in]"
            weight = weight.T
        if name in self._rows:
            weight = rows_of(weight, self._rows[name])
        self._check_numbers(name, weight)
        if name in self._seconds:
            self._check_second(self._seconds[name], weight)
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more tensors" if len(names) > 4 else "")


def num_weight_bytes(spec: AnySpec, dtype: torch.dtype) -> int:
    """Bytes the model takes in memory, at most: its tensors in the compute dtype, a tied table a second time as kernels
    pack a head, and float32 rotary tables."""
    numbers = sum(math.prod(shape) for shape in spec.shapes().values())
    width = spec.table_size if isinstance(spec, DecoderSpec) else spec.hidden_size
    packed_head = spec.vocab_size * width if spec.tied_embeddings else 0
    mlps = [layer.mlp for layer in spec.layers] if isinstance(spec, DecoderSpec) else []
    routers = [mlp.num_experts + 1 for mlp in mlps if isinstance(mlp, ExpertsMlp)]  # in float32
    wider = sum(routers) * spec.hidden_size * (torch.float32.itemsize - dtype.itemsize)
    return (numbers + packed_head) * dtype.itemsize + wider + _num_table_bytes(spec)


def num_packed_bytes(spec: AnySpec, ops: Ops) -> int:
    """Bytes the model takes in memory, exactly: what `ops`, which have a layout, pack, and float32 rotary tables."""
    return _num_packed_bytes(spec, ops) + _num_table_bytes(spec)


def _num_packed_bytes(spec: AnySpec, ops: Ops, unpacked: frozenset[str] = frozenset()) -> int:
    """Of a decoder that is built without reading a weight: a cache is told the size of each first."""
    sizes: list[int] = []

    def count(name: str, shape: tuple[int, ...], dtype: torch.dtype, pack: Callable[[], Tensor]) -> Tensor:
        if name not in unpacked:
            sizes.append(math.prod(shape) * dtype.itemsize)
        return torch.empty(1, dtype=dtype).expand(shape)

    _built(shorten(spec, 1), {}, ops, count)
    return sum(sizes)


def _num_table_bytes(spec: AnySpec) -> int:
    if isinstance(spec, GenericSpec):  # transformers computes what a step needs
        return 0
    rotations = {(layer.position, layer.attention.head_dim) for layer in spec.layers}
    return sum(head_dim for _, head_dim in rotations) * spec.max_len * 8


def check_memory(spec: AnySpec, ops: Ops, free: int) -> None:
    """Raise CapacityError if the model does not fit `free` bytes of the device's memory."""
    needed = num_weight_bytes(spec, ops.weight_dtype) if ops.layout is None else num_packed_bytes(spec, ops)
    if needed > free:
        stored = str(ops.dtype).removeprefix("torch.") if ops.quantization == "none" else ops.quantization
        hints = {"float32": "dtype bfloat16, which halves it", "int8": "quantization int4, which takes less"}
        raise CapacityError(
            f"The weights need {needed / _GIB:.2f} GiB in {stored} and {free / _GIB:.2f} GiB are free on {ops.device}. "
            f"Choose a smaller model, or {hints.get(stored, 'free memory')}."
        )
