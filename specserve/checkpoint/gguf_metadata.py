"""What the metadata of a GGUF file says of a model: numbers, head sizes, rotary scaling; and what is not computed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from specserve.checkpoint.gguf_file import Bytes, GGUFFile, GGUFTensor
from specserve.errors import ModelError

ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's scaling as a tensor; becomes a config entry
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"  # Phi 3's, likewise
KEPT = {"F16": "float16", "BF16": "bfloat16"}  # types that keep their bytes; everything else becomes float32
# Settings that change the numbers, and the values that do not. An architecture that reads one lists it; others are
# refused, since a model that is computed without them answers wrongly and says nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),  # softmax
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.dimension_sections": (),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "use_parallel_residual": (False,),
}


def number(file: GGUFFile, name: str, default: Any = None) -> Any:
    """A positive number of this architecture's metadata, whole where the file has it whole; `default` where it has
    none. Raises ModelError for anything else, and where it has none and there is no default."""
    key = f"{file.metadata['general.architecture']}.{name}"
    if default is not None and key not in file.metadata:
        return default
    value = file.require(key)
    if isinstance(value, float):
        value = as_written(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ModelError(f"{file.path}: {key} is {value!r}; it must be one positive number.")
    return value


def as_written(value: float) -> float:
    """A number that is stored in single precision: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def whole(file: GGUFFile, name: str, default: int | None = None) -> int:
    value = number(file, name, default)
    if not isinstance(value, int):
        raise ModelError(
            f"{file.path}: {file.metadata['general.architecture']}.{name} is {value}; it must be a whole number."
        )
    return value


def optional(file: GGUFFile, name: str, default: Any = None) -> Any:
    """The value as it is in the file, whatever it is."""
    return file.metadata.get(f"{file.metadata['general.architecture']}.{name}", default)


def positive(file: GGUFFile, name: str) -> Any:
    """A number, or None where the file has none or 0, which means that there is no such thing."""
    return number(file, name) if optional(file, name, 0) != 0 else None


def refuse_changes(file: GGUFFile, read: Collection[str]) -> None:
    """Raise ModelError for a setting that changes the numbers and is not one of `read`."""
    for name, neutral in _NEUTRAL.items():
        value = optional(file, name)
        if value is None or name in read or np.isin(value, neutral).all():
            continue
        raise ModelError(
            f"{file.path}: {file.metadata['general.architecture']}.{name} is {value}, which is not supported for GGUF "
            "files of this architecture. Use the model's Hugging Face folder if it has one."
        )


def num_layers(file: GGUFFile) -> int:
    """No more than there are tensors: before anything is made for each."""
    layers = whole(file, "block_count")
    if layers > len(file.tensors):
        raise ModelError(f"{file.path} says {layers:,} layers, and it has {len(file.tensors):,} tensors.")
    return layers


def num_kv_heads(file: GGUFFile) -> int:
    return whole(file, "attention.head_count_kv", whole(file, "attention.head_count"))


def head_dim(file: GGUFFile) -> int:
    size = whole(file, "attention.key_length", whole(file, "embedding_length") // whole(file, "attention.head_count"))
    if whole(file, "attention.value_length", size) != size:
        raise ModelError(f"{file.path}: heads with values of another size than keys are not supported.")
    return size


def rotated(file: GGUFFile) -> int:
    """How many features of a head are rotated."""
    return whole(file, "rope.dimension_count", head_dim(file))


def check_whole_heads(file: GGUFFile) -> None:
    if rotated(file) != head_dim(file):
        raise ModelError(
            f"{file.path}: rotary embedding on {rotated(file)} of {head_dim(file)} dimensions of a head is not "
            "supported for this architecture."
        )


def embedding(file: GGUFFile) -> GGUFTensor:
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} has no tensor 'token_embd.weight'. It may be one part of a split model.")
    return file.tensors["token_embd.weight"]


def dtype(file: GGUFFile) -> str:
    """The one type the matrices have, float32 when they are quantised or mixed."""
    kinds = {KEPT.get(tensor.kind, "float32") for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return kinds.pop() if len(kinds) == 1 else "float32"


def is_tied(file: GGUFFile) -> bool:
    """No output matrix, or one that repeats the embeddings byte for byte."""
    output = file.tensors.get("output.weight")
    table = embedding(file)
    return output is None or (output.kind == table.kind and np.array_equal(output.data, table.data))


def has(file: GGUFFile, *names: str) -> bool:
    """Whether the first layer has one of these tensors."""
    return any(f"blk.0.{name}" in file.tensors for name in names)


def rope_theta(file: GGUFFile) -> float:
    """llama.cpp's own default where the file does not say."""
    theta: float = number(file, "rope.freq_base", 10_000.0)
    return theta


def rope_scaling(file: GGUFFile) -> dict[str, Any] | None:
    factor = optional(file, "rope.scaling.factor", optional(file, "rope.scale_linear", 0))
    kind = optional(file, "rope.scaling.type", "none" if factor in (0, 1) else "linear")
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file)
    if LONG_FACTORS in file.tensors or SHORT_FACTORS in file.tensors:
        return _longrope_scaling(file)
    if kind == "none":
        return None
    if kind == "linear":
        old = "rope.scale_linear" if optional(file, "rope.scaling.factor") is None else "rope.scaling.factor"
        return {"rope_type": "linear", "factor": number(file, old)}
    if kind == "yarn":
        return _yarn_scaling(file)
    raise ModelError(
        f"{file.path}: rope scaling {kind!r} is not supported. Supported: none, linear, yarn, llama3, longrope."
    )


def _yarn_scaling(file: GGUFFile) -> dict[str, Any]:
    """arXiv 2309.00071."""
    factor = float(number(file, "rope.scaling.factor"))
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": whole(file, "rope.scaling.original_context_length"),
    }
    for name in ("beta_fast", "beta_slow"):
        if optional(file, f"rope.scaling.yarn_{name}") is not None:
            scaling[name] = number(file, f"rope.scaling.yarn_{name}")
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return scaling | _attention_factor(file, "rope.scaling.yarn_attn_factor", usual)


def _attention_factor(file: GGUFFile, name: str, usual: float) -> dict[str, float]:
    """What queries and keys are multiplied by, where it is not the scaling's usual number, which single precision has
    rounded."""
    stated = number(file, name, usual)
    return {} if math.isclose(stated, usual, rel_tol=1e-5) else {"attention_factor": stated}


def _longrope_scaling(file: GGUFFile) -> dict[str, Any]:
    """arXiv 2402.13753."""
    factors = {}
    for entry, name in (("long_factor", LONG_FACTORS), ("short_factor", SHORT_FACTORS)):
        if name not in file.tensors:
            raise ModelError(f"{file.path} has no tensor {name!r}, which its rope scaling needs.")
        factors[entry] = [as_written(value) for value in _finite(file, name)]
    longest, original = whole(file, "context_length"), whole(file, "rope.scaling.original_context_length")
    usual = math.sqrt(1 + math.log(longest / original) / math.log(original)) if longest > original > 1 else 1.0
    return {"rope_type": "longrope", **factors} | _attention_factor(file, "rope.scaling.attn_factor", usual)


def _llama3_scaling(file: GGUFFile) -> dict[str, Any]:
    """The parameters that the factors in the file were computed from: the largest is `factor`, the others are Llama 3's
    constants. They are computed back and compared, since a GGUF keeps only the result."""
    stored = _finite(file, ROPE_FACTORS)
    scaling = {
        "rope_type": "llama3",
        "factor": float(stored.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if not np.allclose(_llama3_factors(scaling, rope_theta(file), len(stored)), stored, rtol=1e-4):
        raise ModelError(f"{file.path}: the factors in {ROPE_FACTORS} are not those of Llama 3's rope scaling.")
    return scaling


def _llama3_factors(scaling: Mapping[str, Any], theta: float, num_pairs: int) -> NDArray[np.float64]:
    """What each frequency is divided by: 1 for short wavelengths, `factor` for long ones, smooth in between."""
    wavelengths = 2 * np.pi * theta ** (np.arange(num_pairs) / num_pairs)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = (scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    smooth = np.clip(share, 0.0, 1.0)
    factors: NDArray[np.float64] = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    return factors


def _finite(file: GGUFFile, name: str) -> NDArray[np.float32]:
    tensor = file.tensors[name]
    values = dequantize(tensor.data, tensor.kind).reshape(-1)
    if not np.isfinite(values).all():
        raise ModelError(f"{file.path}: {name} holds NaN or infinite numbers.")
    return values


def dequantize(rows: Bytes, kind: str) -> NDArray[np.float32]:
    values: NDArray[np.float32] = gguf.dequantize(np.ascontiguousarray(rows), gguf.GGMLQuantizationType[kind])
    return values.astype("<f4", copy=False)
