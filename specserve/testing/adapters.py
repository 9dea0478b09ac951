"""Random LoRA adapters of tiny models, as PEFT saves them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence as Many
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TABLES = ("embed_tokens", "tok_embeddings", "word_embeddings", "wte", "embed_in")  # embeddings, by family


def write_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    rank: int = 4,
    targets: Many[str] = LINEAR,
    seed: int = 0,
    size: float = 0.3,
    **config: Any,
) -> Path:
    """An adapter of every layer whose name ends with one of `targets`; `shapes` are those of the model's tensors by the
    names that its checkpoint has. `size` is that of what it adds, beside weights of about 1 / sqrt(inputs). `config`
    goes into adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if name == module or len(shape) != 2 or module.rpartition(".")[2] not in targets:
            continue
        (out, inputs), key = shape, f"base_model.model.{module}"
        is_table = module.rpartition(".")[2] in TABLES
        a = torch.randn(rank, out if is_table else inputs, generator=generator)
        b = torch.randn(inputs if is_table else out, rank, generator=generator) * size / rank**0.5
        if is_table:
            tensors |= {f"{key}.lora_embedding_A": a, f"{key}.lora_embedding_B": b}
        else:
            tensors |= {f"{key}.lora_A.weight": a / inputs**0.5, f"{key}.lora_B.weight": b}
    assert tensors, "the model has such layers"
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    return folder
