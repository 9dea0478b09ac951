"""Converts a GGUF file into a Hugging Face folder: config.json, model.safetensors, tokenizer.

What llama.cpp's converter does to a checkpoint is undone here: names, the row order of Llama's q and k (its rotary
embedding pairs neighbours, Hugging Face's pairs halves), and Gemma's norm weights (stored as 1 + w there).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from specserve.checkpoint.gguf_file import Bytes, GGUFFile, GGUFTensor, read
from specserve.checkpoint.gguf_tokenizer import as_json, generation_config, tokenizer_files
from specserve.checkpoint.safetensors_file import Entry, write
from specserve.errors import ModelError, unknown
from specserve.files import reading

Progress = Callable[[int, int], None]  # bytes of weights written, bytes in all

_CHUNK_BYTES = 32 << 20
_KEPT = {"F16": "float16", "BF16": "bfloat16"}  # types that keep their bytes; everything else becomes float32
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class _Architecture:
    """One GGUF architecture in Hugging Face's terms. `parts` names what is inside a block, `options` adds the config
    entries that only this architecture has."""

    model_type: str
    class_name: str
    parts: Mapping[str, str]
    options: Callable[[GGUFFile], dict[str, Any]]
    interleaved_rotary: bool = False  # q and k rows are permuted
    norm_offset: float = 0.0  # what the file adds to every norm weight


_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's scaling as a tensor; becomes a config entry


def convert(path: Path, folder: Path, progress: Progress | None = None) -> None:
    """Write the model of GGUF file `path` into `folder`; config.json is written last.

    Quantised tensors become float32, F16 and BF16 keep their type; weights are streamed in pieces of a few MiB.
    Raises ModelError for a truncated or unknown file, type, architecture, tensor or tokenizer, before writing weights.
    """
    with reading(path):
        file = read(path)
        architecture = _architecture(file)
        config = _config(file, architecture)
        outputs = [_output(file, architecture, config, tensor) for tensor in _wanted(file)]
        _check_names(file, outputs)
        texts = tokenizer_files(file) | {"config.json": as_json(config)}
    folder.mkdir(parents=True, exist_ok=True)
    _write_safetensors(folder / "model.safetensors", outputs, progress or (lambda done, total: None))
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _architecture(file: GGUFFile) -> _Architecture:
    name = str(file.require("general.architecture"))
    if name not in ARCHITECTURES:
        raise ModelError(f"{file.path}: " + unknown("GGUF architecture", name, ARCHITECTURES))
    return ARCHITECTURES[name]


# --- config.json -----------------------------------------------------------------------------------------------------


def _config(file: GGUFFile, architecture: _Architecture) -> dict[str, Any]:
    """config.json in the style every transformers version reads (rope_theta, rope_scaling)."""
    end = generation_config(file)
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "dtype": _dtype(file),
        "vocab_size": _embedding(file).shape[0],
        "hidden_size": _whole(file, "embedding_length"),
        "intermediate_size": _whole(file, "feed_forward_length"),
        "num_hidden_layers": _num_layers(file),
        "num_attention_heads": _whole(file, "attention.head_count"),
        "num_key_value_heads": _whole(file, "attention.head_count_kv"),
        "head_dim": _head_dim(file),
        "max_position_embeddings": _whole(file, "context_length"),
        "rms_norm_eps": _number(file, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _number(file, "rope.freq_base"),
        "rope_scaling": _rope_scaling(file),
        "tie_word_embeddings": _tied(file),
        "bos_token_id": end.get("bos_token_id"),
        "eos_token_id": end["eos_token_id"],
    }
    return config | architecture.options(file)


def _number(file: GGUFFile, name: str) -> Any:
    """A positive number of this architecture's metadata, whole where the file has it whole."""
    key = f"{file.metadata['general.architecture']}.{name}"
    value = file.require(key)
    if isinstance(value, float):
        value = float(str(np.float32(value)))  # stored in single precision: 1e-05 and not 9.999999747378752e-06
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ModelError(f"{file.path}: {key} is {value!r}; it must be one positive number.")
    return value


def _whole(file: GGUFFile, name: str) -> int:
    value = _number(file, name)
    if not isinstance(value, int):
        raise ModelError(
            f"{file.path}: {file.metadata['general.architecture']}.{name} is {value}; it must be a whole number."
        )
    return value


def _num_layers(file: GGUFFile) -> int:
    """No more than there are tensors: before anything is made for each."""
    layers = _whole(file, "block_count")
    if layers > len(file.tensors):
        raise ModelError(f"{file.path} says {layers:,} layers, and it has {len(file.tensors):,} tensors.")
    return layers


def _optional(file: GGUFFile, name: str, default: Any = None) -> Any:
    return file.metadata.get(f"{file.metadata['general.architecture']}.{name}", default)


def _optional_number(file: GGUFFile, name: str, default: Any = None) -> Any:
    return default if _optional(file, name) is None else _number(file, name)


def _embedding(file: GGUFFile) -> GGUFTensor:
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} has no tensor 'token_embd.weight'. It may be one part of a split model.")
    return file.tensors["token_embd.weight"]


def _dtype(file: GGUFFile) -> str:
    """The one type the matrices have, float32 when they are quantised or mixed."""
    kinds = {_KEPT.get(tensor.kind, "float32") for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return kinds.pop() if len(kinds) == 1 else "float32"


def _head_dim(file: GGUFFile) -> int:
    if _optional(file, "attention.key_length") is None:
        size = _whole(file, "embedding_length") // _whole(file, "attention.head_count")
    else:
        size = _whole(file, "attention.key_length")
    rotated = _optional(file, "rope.dimension_count", size)
    if rotated != size:
        raise ModelError(f"{file.path}: rotary embedding on {rotated} of {size} dimensions of a head is not supported.")
    return size


def _tied(file: GGUFFile) -> bool:
    """No output matrix, or one that repeats the embeddings byte for byte."""
    output = file.tensors.get("output.weight")
    embedding = _embedding(file)
    return output is None or (output.kind == embedding.kind and np.array_equal(output.data, embedding.data))


def _rope_scaling(file: GGUFFile) -> dict[str, Any] | None:
    kind = _optional(file, "rope.scaling.type", "none")
    if _ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file)
    if kind == "none":
        return None
    if kind != "linear":
        raise ModelError(f"{file.path}: rope scaling {kind!r} is not supported. Supported: none, linear, llama3.")
    return {"rope_type": "linear", "factor": _number(file, "rope.scaling.factor")}


def _llama3_scaling(file: GGUFFile) -> dict[str, Any]:
    """The parameters that the factors in the file were computed from: the largest is `factor`, the others are Llama 3's
    constants. They are computed back and compared, since a GGUF keeps only the result."""
    stored = _floats(file.tensors[_ROPE_FACTORS]).reshape(-1)
    if not np.isfinite(stored).all():
        raise ModelError(f"{file.path}: {_ROPE_FACTORS} holds NaN or infinite numbers.")
    scaling = {
        "rope_type": "llama3",
        "factor": float(stored.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if not np.allclose(_llama3_factors(scaling, _number(file, "rope.freq_base"), len(stored)), stored, rtol=1e-4):
        raise ModelError(f"{file.path}: the factors in {_ROPE_FACTORS} are not those of Llama 3's rope scaling.")
    return scaling


def _llama3_factors(scaling: Mapping[str, Any], theta: float, num_pairs: int) -> NDArray[np.float64]:
    """What each frequency is divided by: 1 for short wavelengths, `factor` for long ones, smooth in between."""
    wavelengths = 2 * np.pi * theta ** (np.arange(num_pairs) / num_pairs)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = (scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    smooth = np.clip(share, 0.0, 1.0)
    factors: NDArray[np.float64] = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    return factors


def _llama_options(file: GGUFFile) -> dict[str, Any]:
    options: dict[str, Any] = {
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }
    # Mistral is "llama" in a GGUF; only the window tells them apart, and without one they are the same model.
    if _optional(file, "attention.sliding_window", 0) != 0:
        window = _whole(file, "attention.sliding_window")
        options |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    return options


def _qwen2_options(file: GGUFFile) -> dict[str, Any]:
    return {"hidden_act": "silu", "use_sliding_window": False}


def _qwen3_options(file: GGUFFile) -> dict[str, Any]:
    return {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False}


def _gemma3_options(file: GGUFFile) -> dict[str, Any]:
    """Gemma 3 (arXiv 2503.19786): five local layers to a global one; the 27B model (62 layers) scales its queries by
    hidden / heads instead of the head size, which the file does not say."""
    layers, heads = _num_layers(file), _whole(file, "attention.head_count")
    global_every = 6
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _whole(file, "embedding_length") // heads if layers == 62 else _head_dim(file),
        "sliding_window": _whole(file, "attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (layer + 1) % global_every else "full_attention" for layer in range(layers)
        ],
        "rope_local_base_freq": _optional_number(file, "rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": _optional_number(file, "final_logit_softcapping"),
        "attn_logit_softcapping": _optional_number(file, "attn_logit_softcapping"),
    }


ARCHITECTURES = {
    "llama": _Architecture("llama", "LlamaForCausalLM", _PARTS, _llama_options, interleaved_rotary=True),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM", _PARTS, _qwen2_options),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM", _PARTS | _QK_NORM, _qwen3_options),
    "gemma3": _Architecture(
        "gemma3_text", "Gemma3ForCausalLM", _PARTS | _QK_NORM | _GEMMA_NORMS, _gemma3_options, norm_offset=1.0
    ),
}


# --- model.safetensors -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Output:
    """One tensor as it will be written: `data` in Hugging Face's row order, `offset` to subtract."""

    name: str
    tensor: GGUFTensor
    data: Bytes  # [rows, bytes per row]
    offset: float

    @property
    def dtype(self) -> str:
        return self.tensor.kind if self.tensor.kind in _KEPT and not self.offset else "F32"

    @property
    def num_bytes(self) -> int:
        return math.prod(self.tensor.shape) * _ITEM_BYTES[self.dtype]

    def pieces(self) -> Iterator[bytes]:
        """The bytes to write, some rows at a time."""
        step = max(1, _CHUNK_BYTES // max(1, self.num_bytes // len(self.data)))
        for start in range(0, len(self.data), step):
            rows = self.data[start : start + step]
            yield rows.tobytes() if self.dtype in _KEPT else self._float32(rows).tobytes()

    def _float32(self, rows: Bytes) -> NDArray[np.float32]:
        values = _dequantize(rows, self.tensor.kind)
        return values - np.float32(self.offset) if self.offset else values


def _dequantize(rows: Bytes, kind: str) -> NDArray[np.float32]:
    values: NDArray[np.float32] = gguf.dequantize(np.ascontiguousarray(rows), gguf.GGMLQuantizationType[kind])
    return values.astype("<f4", copy=False)


def _floats(tensor: GGUFTensor) -> NDArray[np.float32]:
    return _dequantize(tensor.data, tensor.kind)


def _wanted(file: GGUFFile) -> list[GGUFTensor]:
    """Every tensor but those the config already says: rope factors, and an output equal to the embeddings."""
    skipped = {_ROPE_FACTORS} | ({"output.weight"} if _tied(file) else set())
    return [tensor for name, tensor in file.tensors.items() if name not in skipped]


def _output(file: GGUFFile, architecture: _Architecture, config: Mapping[str, Any], tensor: GGUFTensor) -> _Output:
    name = _hugging_face_name(file, architecture, tensor.name, int(config["num_hidden_layers"]))
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    data = tensor.data
    if heads and architecture.interleaved_rotary:
        data = _halves(file, tensor, int(config[heads]))
    return _Output(name, tensor, data, architecture.norm_offset if name.endswith("norm.weight") else 0.0)


def _check_names(file: GGUFFile, outputs: list[_Output]) -> None:
    """Two of the file's names may be one in Hugging Face's terms: blk.1 and blk.01."""
    given: dict[str, str] = {}
    for output in outputs:
        if output.name in given:
            raise ModelError(f"{file.path}: {given[output.name]!r} and {output.tensor.name!r} are both {output.name}.")
        given[output.name] = output.tensor.name


def _hugging_face_name(file: GGUFFile, architecture: _Architecture, name: str, num_layers: int) -> str:
    top = re.fullmatch(r"(\w+)\.(weight)", name)
    if top and top[1] in _TOP:
        return f"{_TOP[top[1]]}.weight"
    part = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if part and part[2] in architecture.parts and int(part[1]) < num_layers:
        return f"model.layers.{int(part[1])}.{architecture.parts[part[2]]}.{part[3]}"
    raise ModelError(
        f"{file.path}: tensor {name!r} is unknown in a {architecture.model_type} model of {num_layers} layers."
    )


def _halves(file: GGUFFile, tensor: GGUFTensor, heads: int) -> Bytes:
    """Rows back from (pair, half) to (half, pair) order inside each head; rows of blocks move whole."""
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise ModelError(f"{file.path}: {tensor.name!r} has {rows} rows, which {heads} heads cannot share.")
    grouped = tensor.data.reshape(heads, rows // heads // 2, 2, -1)
    return grouped.swapaxes(1, 2).reshape(rows, -1)


def _write_safetensors(path: Path, outputs: list[_Output], progress: Progress) -> None:
    entries = [Entry(each.name, each.dtype, each.tensor.shape, each.num_bytes) for each in outputs]
    total, done = sum(entry.num_bytes for entry in entries), 0

    def tell(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    write(path, entries, (piece for output in outputs for piece in output.pieces()), tell)
