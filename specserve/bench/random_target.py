"""Models of the shape of published ones with random weights: their steps take what those of the published ones take, on
any machine, without a download."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specserve.cache.sizing import free_memory
from specserve.checkpoint.folder import read_config
from specserve.config import EngineConfig
from specserve.engine.build import Built, build
from specserve.llm import LLM
from specserve.models.decoder import Decoder
from specserve.models.loader import check_memory, find_architecture
from specserve.models.spec import DecoderSpec, Shapes, shorten
from specserve.ops import Ops
from specserve.testing.models import write_tokenizer

_QWEN_2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
# By what people call them: the sizes of Qwen2.5-0.5B, Qwen2.5-1.5B and Llama-3.1-8B.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "0.5b": {
        **_QWEN_2,
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4_864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1.5b": {
        **_QWEN_2,
        "vocab_size": 151_936,
        "hidden_size": 1_536,
        "intermediate_size": 8_960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
        "vocab_size": 128_256,
        "hidden_size": 4_096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
_WIDTH = 74.0  # the standard deviation of int8 numbers that are all as likely
_GAIN = 0.7  # of a matrix: what it reads keeps about its size on the way through all layers


class RandomWeights(Mapping[str, Tensor]):
    """A tensor for each name of `shapes`, bfloat16, drawn anew whenever it is taken: norms of 1, biases of 0, all other
    numbers alike between two bounds, so that no two layers are the same. The same name gives the same numbers.
    `on_tensor` is called with the bytes of each as it is drawn."""

    def __init__(self, shapes: Shapes, on_tensor: Callable[[int], object] = lambda num_bytes: None) -> None:
        self._shapes, self._on_tensor = shapes, on_tensor

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        size = math.prod(shape)
        self._on_tensor(2 * size)
        if len(shape) == 1:
            return torch.full(shape, float(name.endswith("norm.weight")), dtype=torch.bfloat16)
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
        drawn = torch.empty(-(-size // 8), dtype=torch.int64)  # eight numbers at once, as drawing is what takes time
        drawn.random_(-(2**63), None, generator=torch.Generator().manual_seed(seed))
        numbers = drawn.view(torch.int8)[:size].view(shape)
        return numbers.to(torch.bfloat16).mul_(_GAIN / (_WIDTH * math.sqrt(shape[1])))

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def spec_of(shape: str) -> DecoderSpec:
    """Of one of SHAPES."""
    return spec_in(SHAPES[shape])


def spec_in(config: Mapping[str, Any]) -> DecoderSpec:
    found: DecoderSpec = find_architecture(config).spec(config)
    return found


def num_parameters(spec: DecoderSpec) -> int:
    return sum(math.prod(each) for each in spec.shapes().values())


def num_drawn_bytes(shape: str) -> int:
    """What RandomWeights draws for a model: of a tied head the table twice."""
    spec = spec_of(shape)
    return 2 * (num_parameters(spec) + spec.vocab_size * spec.hidden_size * spec.tied_embeddings)


class RandomLLM(LLM):
    """An LLM of a model in `folder` whose weights `on_tensor` is told of, as RandomWeights does, when they are drawn.
    Text is nothing to it, so it is given token ids."""

    def __init__(self, folder: Path, on_tensor: Callable[[int], object], **options: Any) -> None:
        self._on_tensor = on_tensor
        super().__init__(str(folder), **options)

    def _build(self, progress: bool) -> Built:
        return build(self.config, progress=progress, load=self._load)

    def _load(self, config: EngineConfig, folder: Path, ops: Ops, *others: Any) -> tuple[Decoder, range, None]:
        spec = spec_in(read_config(folder))
        spec = spec if config.max_model_len is None else shorten(spec, config.max_model_len)
        check_memory(spec, ops, free_memory(ops.device))
        return Decoder(spec, RandomWeights(spec.shapes(), self._on_tensor), ops), range(spec.num_layers), None


@contextmanager
def random_llm(
    shape: str, on_tensor: Callable[[int], object] = lambda num_bytes: None, **options: Any
) -> Iterator[RandomLLM]:
    """An engine of that one of SHAPES; `options` are fields of EngineConfig. No weights are kept on the disk. Raises
    CapacityError where they do not fit, and what an engine raises."""
    with TemporaryDirectory(prefix="specserve-") as name:
        config = {**SHAPES[shape], "eos_token_id": 0, "pad_token_id": 0}
        write_tokenizer(folder := Path(name), config)
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        save_file({"none": torch.zeros(1)}, folder / "model.safetensors")  # a model's folder has some
        llm = RandomLLM(folder, on_tensor, **options)
        with llm:
            yield llm
