"""Builds a model from its folder, a native Decoder or one that runs through transformers: finds the architecture,
checks every tensor, and that memory suffices; what was packed for it before is taken from the cache."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
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
from specserve.models.generic.skeleton import causal_model_types
from specserve.models.rounding import how_kept
from specserve.models.sharding import Shard, ShardedWeights, sharded
from specserve.models.spec import DecoderSpec, ExpertsMlp, shorten
from specserve.models.stages import LaterStage, number_of
from specserve.models.tensors import AnySpec, CheckedTensors
from specserve.models.transformers import GenericSpec, TransformersModel
from specserve.ops import Ops, Peers
from specserve.ops.packing import PackedCache, Weight, uncached
from specserve.ops.peers import ExpertPeers
from specserve.registry import MODELS

PACKING_VERSION = 1  # raise it when Decoder packs something else under the same name: earlier files are then not used

_GIB = 2**30
_WORTH_BYTES = 2**24  # packing less is as fast as looking for a file

AnyModel = Decoder | TransformersModel


class Outline(NamedTuple):
    """What is known of a native model before a weight is read."""

    layer_bytes: list[int]  # of each layer, packed
    other_bytes: int  # of all the rest
    table_bytes: int  # of these, the embedding, of which a step reads little
    adapted: frozenset[str]  # as AdaptedModel has them


class PartBytes(NamedTuple):
    """What a part of a model takes in memory: of a file, which all processes that have the same part map, and `own`."""

    mapped: int
    own: int


def load_model(
    folder: Path,
    ops: Ops,
    max_len: int | None = None,
    *,
    progress: bool = False,
    peers: Peers | None = None,
    layers: range | None = None,
    expert_peers: ExpertPeers | None = None,
) -> AnyModel:
    """The model in `folder` on the device and in the dtype of `ops`, for sequences of up to `max_len` tokens (None: as
    many as the model was made for). Weights that `ops` packs are kept in the cache and, but for the first time, mapped
    from there; `progress` draws a bar on stderr while they are packed. With `peers` it is the part of this process, and
    with `layers` it has these, the first ones, alone; with `expert_peers` it has this replica's part of the experts.

    Raises ModelError (unknown architecture, unsupported setting; missing, misshapen or unknown tensor; whatever else is
    wrong with the files) and CapacityError.
    """
    with reading(folder):
        model = _load(folder, ops, max_len, progress, peers, layers, expert_peers)
    assert not isinstance(model, LaterStage), "layers begin with the first"
    return model


def load_stage(folder: Path, ops: Ops, max_len: int | None, peers: Peers | None, layers: range) -> LaterStage:
    """Layers of the model in `folder` but for the first, as load_model loads them."""
    with reading(folder):
        stage = _load(folder, ops, max_len, False, peers, layers)
    assert isinstance(stage, LaterStage), "layers do not begin with the first"
    return stage


def _load(
    folder: Path,
    ops: Ops,
    max_len: int | None,
    progress: bool,
    peers: Peers | None,
    layers: range | None,
    expert_peers: ExpertPeers | None = None,
) -> AnyModel | LaterStage:
    tensors = check_tensors(folder)
    spec = tensors.spec if max_len is None else shorten(tensors.spec, max_len)
    weights: Mapping[str, Weight] = tensors
    shard = None if peers is None else Shard(peers.rank, peers.count)
    if shard is not None:
        weights, spec = ShardedWeights(_native(spec), tensors, shard), sharded(_native(spec), shard)
    check_memory(spec, ops, free_memory(ops.device), layers)
    if not _is_kept(tensors, ops):
        return _checked(_built(spec, weights, ops, uncached, peers, layers, expert_peers), tensors)
    layout, any_length = ops.layout, repr(dataclasses.replace(spec, max_len=1))

    def key() -> Any:
        stats = [(path.name, path.stat()) for path in tensors.files]
        files = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
        quantized = {"quantized": tensors.quantized.key} if tensors.quantized.key else {}
        part = {} if shard is None else {"rank": shard.rank, "of": shard.size}
        return {"version": PACKING_VERSION, "layout": layout, "model": any_length, "files": files, **quantized, **part}

    path = packed_path(folder.resolve(), ops, "" if shard is None else f"-{shard.rank + 1}-of-{shard.size}")
    unpacked = _unpacked(tensors)
    size = sum(size for name, size in _unread(spec, ops, layers)[1].items() if name not in unpacked)
    with PackedWeights(path, folder.resolve(), key, lambda: _bar(progress, size)) as packed:
        model = _built(spec, weights, ops, _without(unpacked, packed.get), peers, layers, expert_peers)
    model.num_mapped_bytes = packed.num_mapped_bytes
    return _checked(model, tensors)


def _is_kept(tensors: CheckedTensors, ops: Ops) -> bool:
    """Whether what is packed is kept in a file."""
    return ops.layout is not None and tensors.num_bytes >= _WORTH_BYTES


def _unpacked(tensors: CheckedTensors) -> frozenset[str]:
    """What is never kept, by its name in a cache."""
    return frozenset(name.removesuffix("weight") + "table" for name in tensors.blocks)


def _without(unpacked: frozenset[str], cached: PackedCache) -> PackedCache:
    """Embeddings that lie in a GGUF file as blocks are smaller there than packed, and read quickly: not kept twice."""

    def get(name: str, shape: tuple[int, ...], dtype: torch.dtype, pack: Callable[[], Tensor]) -> Tensor:
        return pack() if name in unpacked else cached(name, shape, dtype, pack)

    return get


def _checked(model: AnyModel | LaterStage, tensors: CheckedTensors) -> AnyModel | LaterStage:
    model.origin = how_kept(tensors.quantized, model.ops)
    if isinstance(model, TransformersModel):
        model.check_rows()
    return model


def _built(
    spec: AnySpec,
    weights: Mapping[str, Any],
    ops: Ops,
    cached: PackedCache = uncached,
    peers: Peers | None = None,
    layers: range | None = None,
    expert_peers: ExpertPeers | None = None,
) -> AnyModel | LaterStage:
    if isinstance(spec, GenericSpec):
        return TransformersModel(spec, weights, ops, cached)
    if layers is not None and layers.start:
        return LaterStage(spec, weights, ops, cached, peers, layers=layers)
    return Decoder(spec, weights, ops, cached, peers, layers, expert_peers)


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
    return _native(check_tensors(folder).spec)


def _native(spec: AnySpec) -> DecoderSpec:
    if isinstance(spec, GenericSpec):
        raise ModelError(f"{spec.architecture} runs through transformers: this needs a model that is native.")
    return spec


@contextmanager
def _bar(visible: bool, total: int) -> Iterator[Callable[[int], object]]:
    """What to call with the bytes that were packed, of `total`."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from specserve.terminal import console

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=console(stderr=True), disable=not visible) as bars:
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
    return sum(_unread(spec, ops)[1].values()) + _num_table_bytes(spec)


def outline(spec: DecoderSpec, ops: Ops) -> Outline:
    """Of a model as `ops`, which have a layout, would pack it."""
    layers, others, tables = [0] * spec.num_layers, 0, 0
    model, sizes = _unread(spec, ops)
    assert isinstance(model, Decoder), "it is native"
    for name, size in sizes.items():
        if (number := number_of(name)) is None:
            others += size
            tables += size * name.endswith(".table")
        else:
            layers[number] += size
    return Outline(layers, others, tables, model.adapted)


def part_bytes(tensors: CheckedTensors, spec: DecoderSpec, ops: Ops, shard: Shard, layers: range) -> PartBytes:
    """Of the shard's part of these layers of the model with these tensors, and of what the first stage has besides,
    once packed weights lie in their file. Raises ConfigError for what cannot be divided."""
    part = sharded(spec, shard)
    if ops.layout is None:
        return PartBytes(0, num_weight_bytes(part, ops.weight_dtype))
    sizes = _unread(part, ops, layers)[1]
    for name in [name for name in sizes if name.endswith(".head")]:
        sizes[name] = sizes[name] * len(shard.features(spec.vocab_size)) // spec.vocab_size
    unpacked = _unpacked(tensors) if _is_kept(tensors, ops) else sizes.keys()
    mapped = sum(size for name, size in sizes.items() if name not in unpacked)
    return PartBytes(mapped, sum(sizes.values()) - mapped + _num_table_bytes(part))


def _unread(spec: AnySpec, ops: Ops, layers: range | None = None) -> tuple[AnyModel | LaterStage, dict[str, int]]:
    """A model that is built without reading a weight, and the bytes of what it packs by name: a cache is told the size
    of each first."""
    sizes: dict[str, int] = {}

    def count(name: str, shape: tuple[int, ...], dtype: torch.dtype, pack: Callable[[], Tensor]) -> Tensor:
        sizes[name] = math.prod(shape) * dtype.itemsize
        return torch.empty(1, dtype=dtype).expand(shape)

    return _built(shorten(spec, 1), {}, ops, count, layers=layers), sizes


def _num_table_bytes(spec: AnySpec) -> int:
    if isinstance(spec, GenericSpec):  # transformers computes what a step needs
        return 0
    rotations = {(layer.position, layer.attention.head_dim) for layer in spec.layers}
    return sum(head_dim for _, head_dim in rotations) * spec.max_len * 8


def check_memory(spec: AnySpec, ops: Ops, free: int, layers: range | None = None) -> None:
    """Raise CapacityError if the model, or these `layers` of it, do not fit `free` bytes of the device's memory."""
    if ops.layout is None:
        needed = num_weight_bytes(spec, ops.weight_dtype)
    else:
        needed = sum(_unread(spec, ops, layers)[1].values()) + _num_table_bytes(spec)
    if needed > free:
        stored = str(ops.dtype).removeprefix("torch.") if ops.quantization == "none" else ops.quantization
        hints = {"float32": "dtype bfloat16, which halves it", "int8": "quantization int4, which takes less"}
        raise CapacityError(
            f"The weights need {needed / _GIB:.2f} GiB in {stored} and {free / _GIB:.2f} GiB are free on {ops.device}. "
            f"Choose a smaller model, or {hints.get(stored, 'free memory')}."
        )
