"""The catalog: models by short names, with what must be known before one is fetched. Sizes follow from the shapes,
which a test compares with the published numbers of parameters. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Bits a number takes in memory, with its share of scales: kernels keep one for 32 numbers, int4 a zero point, too.
WEIGHT_BITS: Mapping[str, float] = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8.5, "int4": 5}
_HEAD_BITS = {**WEIGHT_BITS, "int4": WEIGHT_BITS["int8"]}
_STORED_BYTES = 2  # of a number as published
_TABLE_BYTES = 8  # of a rotary frequency at a position: sine and cosine


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The numbers of a decoder that its size follows from."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    tied: bool = True  # the LM head is the embedding

    @property
    def matrices(self) -> int:
        """Numbers in the layers' matrices."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.mlp)

    @property
    def table(self) -> int:
        """Numbers in the embedding, and in the LM head."""
        return self.vocab * self.hidden

    @property
    def kv_numbers(self) -> int:
        """Of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogModel:
    """A model of the hub. `draft` is a catalog name, `head` a hub id with its drafter; each drafts for it. `config` has
    what tells its architecture beside `shape`."""

    hub_id: str
    model_type: str
    licence: str
    parameters: int  # as published; of a multimodal model those of the text model
    context: int  # tokens
    shape: Shape
    config: Mapping[str, Any] | None = None
    tools: bool = False  # its chat template takes them
    reasons: bool = False  # it thinks before it answers, at least when asked to
    gated: bool = False  # the hub wants its terms accepted
    other_parameters: int = 0  # published with it, and not loaded
    rotations: int = 1  # kinds of layers, by how they tell positions
    draft: str | None = None
    head: tuple[str, str] | None = None  # drafter, hub id

    @property
    def download_bytes(self) -> int:
        return _STORED_BYTES * (self.parameters + self.other_parameters)

    def weight_bytes(self, kind: str, dtype: str = "bfloat16") -> float:
        """In memory, in one of WEIGHT_BITS; the embedding is kept in `dtype`, and a LM head beside it."""
        shape = self.shape
        weights = shape.matrices * WEIGHT_BITS[kind] + shape.table * (WEIGHT_BITS[dtype] + _HEAD_BITS[kind])
        return weights / 8 + _TABLE_BYTES * self.context * shape.head_dim * self.rotations

    def kv_bytes(self, num_tokens: int, dtype: str = "bfloat16") -> float:
        """Of a context of so many tokens."""
        return WEIGHT_BITS[dtype] / 8 * min(num_tokens, self.context) * self.shape.kv_numbers


def short_name(name: str) -> str:
    """A catalog name as others write it: qwen3:0.6b is qwen3-0.6b."""
    return name.lower().replace(":", "-") if name.count(":") == 1 and "/" not in name else name


_APACHE, _MIT = "Apache-2.0", "MIT"
_LLAMA3, _GEMMA = "Llama 3.2 Community", "Gemma"
_LLAMA3_ROPE = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def _smollm2(hub_size: str, parameters: int, **shape: Any) -> CatalogModel:
    return CatalogModel(
        hub_id=f"HuggingFaceTB/SmolLM2-{hub_size}-Instruct",
        model_type="llama",
        licence=_APACHE,
        parameters=parameters,
        context=8192,
        shape=Shape(vocab=49_152, head_dim=64, **shape),
        draft=None if hub_size == "135M" else "smollm2-135m",
    )


def _qwen3(hub_name: str, parameters: int, context: int = 40_960, **more: Any) -> CatalogModel:
    shape = {name: more.pop(name) for name in ("hidden", "layers", "heads", "mlp")}
    return CatalogModel(
        hub_id=f"Qwen/{hub_name}",
        model_type="qwen3",
        licence=_APACHE,
        parameters=parameters,
        context=context,
        shape=Shape(vocab=151_936, kv_heads=8, head_dim=128, tied=more.pop("tied", True), **shape),
        tools=True,
        reasons=more.pop("reasons", True),
        draft=None if parameters < 10**9 else "qwen3-0.6b",
        **more,
    )


def _qwen_coder(size: str, parameters: int, vocab: int = 151_936, **more: Any) -> CatalogModel:
    shape = {name: more.pop(name) for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "mlp")}
    return CatalogModel(
        hub_id=f"Qwen/Qwen2.5-Coder-{size}-Instruct",
        model_type="qwen2",
        licence=more.pop("licence", _APACHE),
        parameters=parameters,
        context=32_768,
        shape=Shape(vocab=vocab, tied=more.pop("tied", True), **shape),
        tools=True,
        **more,
    )


def _llama(hub_name: str, parameters: int, **more: Any) -> CatalogModel:
    shape = {name: more.pop(name) for name in ("hidden", "layers", "heads", "head_dim", "mlp")}
    return CatalogModel(
        hub_id=f"meta-llama/{hub_name}",
        model_type="llama",
        licence=more.pop("licence", _LLAMA3),
        parameters=parameters,
        context=131_072,
        shape=Shape(vocab=128_256, kv_heads=8, tied=more.pop("tied", True), **shape),
        config=_LLAMA3_ROPE,
        tools=True,
        gated=True,
        **more,
    )


def _gemma3(size: str, parameters: int, context: int = 32_768, vocab: int = 262_144, **more: Any) -> CatalogModel:
    shape = {name: more.pop(name) for name in ("hidden", "layers", "heads", "kv_heads", "mlp")}
    return CatalogModel(
        hub_id=f"google/gemma-3-{size}-it",
        model_type="gemma3_text",
        licence=_GEMMA,
        parameters=parameters,
        context=context,
        shape=Shape(vocab=vocab, head_dim=256, **shape),
        rotations=2,  # of local and of global layers
        gated=True,
        **more,
    )


def _granite(size: str, parameters: int, **shape: Any) -> CatalogModel:
    return CatalogModel(
        hub_id=f"ibm-granite/granite-3.3-{size}-instruct",
        model_type="granite",
        licence=_APACHE,
        parameters=parameters,
        context=131_072,
        shape=Shape(vocab=49_159, layers=40, heads=32, kv_heads=8, **shape),
        tools=True,
        reasons=True,
        draft="granite3.3-2b" if size == "8b" else None,
    )


def _olmo2(hub_name: str, parameters: int, draft: str | None = None, **shape: Any) -> CatalogModel:
    return CatalogModel(
        hub_id=f"allenai/{hub_name}-Instruct",
        model_type="olmo2",
        licence=_APACHE,
        parameters=parameters,
        context=4096,
        shape=Shape(vocab=100_352, head_dim=128, tied=False, **shape),
        draft=draft,
    )


# By family, small ones first.
MODELS: Mapping[str, CatalogModel] = {
    "smollm2-135m": _smollm2("135M", 134_515_008, hidden=576, layers=30, heads=9, kv_heads=3, mlp=1536),
    "smollm2-360m": _smollm2("360M", 361_821_120, hidden=960, layers=32, heads=15, kv_heads=5, mlp=2560),
    "smollm2-1.7b": _smollm2("1.7B", 1_711_376_384, hidden=2048, layers=24, heads=32, kv_heads=32, mlp=8192),
    "smollm3-3b": CatalogModel(
        hub_id="HuggingFaceTB/SmolLM3-3B",
        model_type="smollm3",
        licence=_APACHE,
        parameters=3_075_098_624,
        context=65_536,
        shape=Shape(vocab=128_256, hidden=2048, layers=36, heads=16, kv_heads=4, head_dim=128, mlp=11_008),
        rotations=2,  # one, and none
        tools=True,
        reasons=True,
    ),
    "qwen3-0.6b": _qwen3("Qwen3-0.6B", 596_049_920, hidden=1024, layers=28, heads=16, mlp=3072),
    "qwen3-1.7b": _qwen3("Qwen3-1.7B", 1_720_574_976, hidden=2048, layers=28, heads=16, mlp=6144),
    "qwen3-4b": _qwen3("Qwen3-4B", 4_022_468_096, hidden=2560, layers=36, heads=32, mlp=9728),
    "qwen3-4b-instruct-2507": _qwen3(
        "Qwen3-4B-Instruct-2507",
        4_022_468_096,
        262_144,
        hidden=2560,
        layers=36,
        heads=32,
        mlp=9728,
        reasons=False,
    ),
    "qwen3-8b": _qwen3(
        "Qwen3-8B",
        8_190_735_360,
        hidden=4096,
        layers=36,
        heads=32,
        mlp=12_288,
        tied=False,
        head=("eagle", "RedHatAI/Qwen3-8B-speculator.eagle3"),
    ),
    "qwen2.5-coder-0.5b": _qwen_coder(
        "0.5B", 494_032_768, hidden=896, layers=24, heads=14, kv_heads=2, head_dim=64, mlp=4864
    ),
    "qwen2.5-coder-1.5b": _qwen_coder(
        "1.5B",
        1_543_714_304,
        hidden=1536,
        layers=28,
        heads=12,
        kv_heads=2,
        head_dim=128,
        mlp=8960,
        draft="qwen2.5-coder-0.5b",
    ),
    "qwen2.5-coder-3b": _qwen_coder(
        "3B",
        3_085_938_688,
        hidden=2048,
        layers=36,
        heads=16,
        kv_heads=2,
        head_dim=128,
        mlp=11_008,
        draft="qwen2.5-coder-0.5b",
        licence="Qwen Research",
    ),
    "qwen2.5-coder-7b": _qwen_coder(
        "7B",
        7_615_616_512,
        152_064,
        hidden=3584,
        layers=28,
        heads=28,
        kv_heads=4,
        head_dim=128,
        mlp=18_944,
        tied=False,
        draft="qwen2.5-coder-0.5b",
    ),
    "llama3.2-1b": _llama(
        "Llama-3.2-1B-Instruct", 1_235_814_400, hidden=2048, layers=16, heads=32, head_dim=64, mlp=8192
    ),
    "llama3.2-3b": _llama(
        "Llama-3.2-3B-Instruct",
        3_212_749_824,
        hidden=3072,
        layers=28,
        heads=24,
        head_dim=128,
        mlp=8192,
        draft="llama3.2-1b",
    ),
    "llama3.1-8b": _llama(
        "Llama-3.1-8B-Instruct",
        8_030_261_248,
        hidden=4096,
        layers=32,
        heads=32,
        head_dim=128,
        mlp=14_336,
        tied=False,
        licence="Llama 3.1 Community",
        draft="llama3.2-1b",
        head=("eagle", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
    ),
    "gemma3-270m": _gemma3("270m", 268_098_176, hidden=640, layers=18, heads=4, kv_heads=1, mlp=2048),
    "gemma3-1b": _gemma3("1b", 999_885_952, hidden=1152, layers=26, heads=4, kv_heads=1, mlp=6912, draft="gemma3-270m"),
    "gemma3-4b": _gemma3(
        "4b",
        3_880_263_168,
        131_072,
        262_208,
        hidden=2560,
        layers=34,
        heads=8,
        kv_heads=4,
        mlp=10_240,
        other_parameters=419_816_304,
        draft="gemma3-270m",
    ),
    "phi4-mini": CatalogModel(
        hub_id="microsoft/Phi-4-mini-instruct",
        model_type="phi3",
        licence=_MIT,
        parameters=3_836_021_760,
        context=131_072,
        shape=Shape(vocab=200_064, hidden=3072, layers=32, heads=24, kv_heads=8, head_dim=128, mlp=8192),
        tools=True,
    ),
    "mistral-7b": CatalogModel(
        hub_id="mistralai/Mistral-7B-Instruct-v0.3",
        model_type="mistral",
        licence=_APACHE,
        parameters=7_248_023_552,
        context=32_768,
        shape=Shape(vocab=32_768, hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, mlp=14_336, tied=False),
        tools=True,
    ),
    "olmo2-1b": _olmo2("OLMo-2-0425-1B", 1_484_916_736, hidden=2048, layers=16, heads=16, kv_heads=16, mlp=8192),
    "olmo2-7b": _olmo2(
        "OLMo-2-1124-7B", 7_298_617_344, "olmo2-1b", hidden=4096, layers=32, heads=32, kv_heads=32, mlp=11_008
    ),
    "granite3.3-2b": _granite("2b", 2_533_539_840, hidden=2048, head_dim=64, mlp=8192),
    "granite3.3-8b": _granite("8b", 8_170_864_640, hidden=4096, head_dim=128, mlp=12_800),
}
