"""`specserve inspect`: says what a checkpoint is, a draft head, a LoRA adapter or a model, without running it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from specserve.cli.json_output import JsonFile, is_json_alone, write_json
from specserve.cli.options import MODEL, model_parameter
from specserve.config import EngineConfig
from specserve.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from specserve.checkpoint.quantized import QuantizedWeights
    from specserve.models.heads.formats import Head
    from specserve.models.heads.spec import TargetShape
    from specserve.models.tensors import AnySpec

Rows = list[tuple[str, str]]
_MOST_MEASURED = 4  # matrices of each kind


def inspect(
    model: Annotated[
        str,
        model_parameter("Folder of a draft head, an adapter or a model, or a file in it; or catalog name or hub id."),
    ],
    *,
    target: Annotated[
        str | None,
        Parameter(
            group=MODEL, help="The model that a head or adapter shall fit: catalog name, folder, .gguf file or hub id."
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Say what a checkpoint is: a draft head, its format, sizes and target, a LoRA adapter, or a model, and whether it
    can be used. All of a head's tensors are read and checked, an adapter's with --target; of a model names, shapes and
    sizes are, and its tokenizer."""
    from specserve.checkpoint.folder import is_adapter
    from specserve.doctor import Section, as_dict, show
    from specserve.models.heads.formats import is_head

    folder = _folder(model)
    if is_adapter(folder):
        found = Section("LoRA adapter", _about_adapter(folder, target))
    elif is_head(folder):
        found = Section("Draft head", _about_head(folder, target))
    else:
        found = Section("Model", _about_model(folder, target))
    write_json(json_file, as_dict([found]))
    if not is_json_alone(json_file):
        show([found])


def _folder(path: str) -> Path:
    from specserve.checkpoint import catalog
    from specserve.checkpoint.folder import is_adapter, old_files
    from specserve.models.heads.formats import is_head

    found = Path(path).expanduser()
    if is_adapter(found):
        return found
    if os.path.isdir(found):  # unlike Path.is_dir it takes a name that is too long for one
        is_old = len(files := old_files(found)) > 1 or (files and not is_head(found))
        return catalog.resolve(path) if is_old else found
    if os.path.isfile(found) and found.suffix.lower() != ".gguf":
        return found.parent
    return catalog.resolve(path, offline=True, progress=False)


def _target(model: str) -> TargetShape:
    """The shape of a target, without its weights. Raises ModelError."""
    from specserve.checkpoint import catalog
    from specserve.models.heads.spec import TargetShape
    from specserve.models.loader import check_tensors

    spec = check_tensors(catalog.resolve(model, progress=False)).spec
    return TargetShape(hidden_size=spec.hidden_size, num_layers=spec.num_layers, vocab_size=spec.vocab_size)


def _about_model(folder: Path, target: str | None) -> Rows:
    """Raises ModelError for what is neither a model that can be run nor a draft head."""
    from specserve.checkpoint.folder import read_config
    from specserve.models.heads.formats import has_next_token_layers
    from specserve.models.loader import check_tensors

    try:
        kind, tensors = read_config(folder)["model_type"], check_tensors(folder)
    except ModelError as error:
        raise ModelError(
            f"{folder} is no draft head of a known format and no model that can be run: {error}"
        ) from error
    spec = tensors.spec
    rows = [
        ("folder", str(folder)),
        ("type", kind),
        ("runs", spec.runs),
        ("layers", _layers(spec)),
        ("vocabulary", f"{spec.vocab_size:,} ids"),
        ("context", f"{spec.max_len:,} tokens"),
        ("size", _size(tensors.num_parameters, tensors.num_bytes)),
        *_quantized(tensors.quantized),
    ]
    if has_next_token_layers(folder):
        rows.append(("next-token layers", "for --drafter mtp; auto takes part in them"))
    rows.append(("tokenizer", _tokenizer(folder)))
    if target is not None:
        rows.append(("fits", "not looked at: only draft heads are made for one target"))
    return rows


def _tokenizer(folder: Path) -> str:
    """What it is; that of older files is made, as at the first start."""
    from specserve.checkpoint import catalog
    from specserve.text.tokenizer import Tokenizer

    if not (folder / "tokenizer.json").exists():
        try:
            folder = catalog.resolve(str(folder), progress=False)
        except ModelError as error:
            return f"none, without which it cannot be run: {error}"
    return Tokenizer(folder).describe()


def _quantized(weights: QuantizedWeights) -> Rows:
    """How the weights are quantised, and how exactly kernels would keep them."""
    if not weights.matrices:
        return []
    from specserve.config import QUANTIZATIONS
    from specserve.machine.cores import default_threads
    from specserve.models.rounding import how_kept
    from specserve.ops.choice import choose_ops
    from specserve.ops.device import choose_device

    rows, device, threads = [("weights", weights.describe())], choose_device("auto"), default_threads()
    for quantization in QUANTIZATIONS:
        if quantization == "auto":
            continue
        try:
            kept = how_kept(weights, choose_ops(device, "auto", quantization, threads), _MOST_MEASURED)
        except ConfigError as error:  # kernels without it
            kept = str(error)
        rows.append((f"as {quantization}", kept))
    return rows


def _about_head(folder: Path, target: str | None) -> Rows:
    """Raises ModelError for a head that is broken or does not fit the target."""
    from specserve.models.heads.formats import hidden_layers, read_head

    shape = None if target is None else _target(target)
    head = read_head(folder, 0 if shape is None else shape.num_layers)
    spec = head.spec
    for name in head.weights:
        head.weights[name]  # reads it, and refuses NaN
    taps = hidden_layers(spec)
    num_layers = spec.target.num_layers
    made_for = f"{spec.target.hidden_size:,} hidden, {spec.target.vocab_size:,} ids, " + (
        f"{num_layers} layers" if num_layers else "layers not said"
    )
    return [
        ("folder", str(folder)),
        ("kind", _kind(head)),
        ("format", head.format),
        ("target", made_for),
        ("verifier", head.verifier or "not named"),
        ("reads", f"outputs of layers {', '.join(map(str, taps))}, from 0" if taps else "the final norm's output"),
        *_parts(head),
        ("size", _size(head.weights.num_parameters, head.weights.num_bytes)),
        *([] if shape is None else [("fits", _fits(head, str(target), shape))]),
    ]


def _about_adapter(folder: Path, target: str | None) -> Rows:
    """Raises ModelError for an adapter that is broken, not supported or does not fit the target."""
    from specserve.checkpoint import catalog
    from specserve.checkpoint.peft import read_peft
    from specserve.models.lora import read_adapter

    found = read_peft(folder)
    ranks = sorted({layer.rank for layer in found.layers})
    kinds = sorted({layer.module.rpartition(".")[2] for layer in found.layers})
    fits: Rows = []
    if target is not None:
        model = catalog.resolve(target, progress=False)
        weights = read_adapter(folder, model).weights  # reads all of it, and refuses NaN
        fits = [("fits", f"{target}: changes {len(weights)} of its layers")]
    above = f"; needs --max-lora-rank {found.rank}" if found.rank > EngineConfig().max_lora_rank else ""
    return [
        ("folder", str(folder)),
        ("made for", found.base or "not said"),
        ("rank", (f"{ranks[0]} to " if len(ranks) > 1 else "") + f"{found.rank}{above}"),
        ("changes", f"{len(found.layers)} layers: {', '.join(kinds)}"),
        ("size", _size(found.num_elements, found.num_bytes)),
        *fits,
    ]


def _kind(head: Head) -> str:
    from specserve.models.heads.spec import BlockSpec, MedusaSpec

    spec = head.spec
    if isinstance(spec, MedusaSpec):
        return f"Medusa, {spec.num_heads} heads with {spec.num_layers} layers each"
    if isinstance(spec, BlockSpec):
        extras = [f"bigram bias of rank {spec.bigram_rank}"] if spec.bigram_rank else []
        extras += ["anchor inputs"] if spec.has_anchor_inputs else []
        extras += ["confidence"] if spec.has_confidence else []
        return f"block, {spec.num_proposed} tokens a pass" + "".join(f", {extra}" for extra in extras)
    return "EAGLE-3" if spec.version == 3 else "EAGLE-1 or 2"


def _parts(head: Head) -> Rows:
    """What the head has of its own, and what it takes from the target."""
    from specserve.models.heads.spec import MedusaSpec
    from specserve.models.heads.tensors import draft_vocab_size

    spec = head.spec
    share = f"{draft_vocab_size(spec):,} of {spec.target.vocab_size:,} ids" if spec.has_draft_vocab else "the target's"
    if isinstance(spec, MedusaSpec):
        return [("draft ids", share)]
    return [
        ("layers", _layers(spec.layers)),
        ("embedding", "its own" if spec.has_embedding else "the target's"),
        ("LM head", "its own" if spec.has_head else "the target's"),
        ("draft ids", share),
    ]


def _layers(spec: AnySpec) -> str:
    heads = dict.fromkeys((layer.attention.num_heads, layer.attention.num_kv_heads) for layer in spec.layers)
    words = " or ".join(f"{own} heads, {shared} for KV" for own, shared in heads)
    return f"{spec.num_layers} of {spec.hidden_size:,}, {words}"


def _fits(head: Head, model: str, target: TargetShape) -> str:
    """Raises ModelError with the figures where it does not."""
    from specserve.models.heads.formats import fits

    fits(head.spec, target)
    return f"{model}: {target.num_layers} layers, {target.hidden_size:,} hidden, {target.vocab_size:,} ids"


def _size(num_parameters: int, num_bytes: int) -> str:
    return f"{num_parameters / 1e6:,.1f} M parameters, {num_bytes / 1e6:,.1f} MB as stored"
