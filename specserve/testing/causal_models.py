"""Tiny random models of all causal LMs that transformers has, and the table of docs/models.md, which says how each is
served. `python -m specserve.testing.causal_models docs/models.md` writes that anew; it takes minutes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch

from specserve.errors import ModelError
from specserve.models.generic.skeleton import causal_model_types, quiet
from specserve.models.loader import find_architecture, native_model_types
from specserve.testing.models import tiny_config, write_tokenizer

BEGIN, END = "<!-- begin: causal models -->", "<!-- end: causal models -->"
_NAMES: dict[str, Any] = {  # sizes, under each of the names that configurations have for them
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "intermediate_size": 128,
    "ffn_dim": 128,
    "n_inner": 128,
    "num_hidden_layers": 3,
    "num_layers": 3,
    "n_layer": 3,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "n_positions": 2048,
    "rotary_dim": 8,
    "head_dim": 16,
    "sliding_window": 24,
}
_FEWER = ("head_dim", "sliding_window", "num_key_value_heads")  # which not all configurations take
_EXPERTS: dict[str, Any] = {"num_hidden_layers": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
_OWN: dict[str, dict[str, Any]] = {  # what else a tiny model of that type needs
    "afmoe": {**_EXPERTS, "num_experts": 12, "num_dense_layers": 1},
    "cohere2_moe": {**_EXPERTS, "num_experts": 12},
    "dots1": {**_EXPERTS, "n_routed_experts": 12, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "ernie4_5_moe": {**_EXPERTS, "moe_num_experts": 12, "moe_k": 3},
    "exaone_moe": {**_EXPERTS, "num_experts": 12},
    "flex_olmo": {**_EXPERTS, "num_experts": 12},
    "glm4_moe": {**_EXPERTS, "n_routed_experts": 12, "n_group": 2, "topk_group": 1},
    "granitemoe": {**_EXPERTS, "num_local_experts": 12},
    "granitemoeshared": {**_EXPERTS, "num_local_experts": 12, "shared_intermediate_size": 96},
    "hunyuan_v1_moe": {**_EXPERTS, "num_experts": 12, "moe_topk": 3},
    "hy_v3": {**_EXPERTS, "num_experts": 12},
    "kolibri1": {**_EXPERTS, "num_local_experts": 12, "shared_expert_intermediate_size": 48},
    "mellum": {**_EXPERTS, "num_local_experts": 12},
    "minimax_m2": {**_EXPERTS, "num_local_experts": 12},
    "solar_open": {**_EXPERTS, "n_routed_experts": 12},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 24},
}


def tiny_causal_config(kind: str, **overrides: Any) -> Any:
    """A small configuration of transformers of that model_type. Raises ModelError where its class takes no such."""
    from transformers import CONFIG_MAPPING

    common = tiny_config("llama")
    ids = {name: common[name] for name in ("vocab_size", "pad_token_id")}
    ids |= {"eos_token_id": common["eos_token_id"][0], "bos_token_id": common["eos_token_id"][0]}
    own = {**ids, **_OWN.get(kind, {}), **overrides}
    why: Exception | None = None
    with quiet():
        for left_out in ((), _FEWER[:2], _FEWER):
            try:
                names = {name: value for name, value in _NAMES.items() if name not in left_out}
                return CONFIG_MAPPING[kind](**{**names, **own})
            except Exception as error:  # whatever a configuration's own checks raise
                why = error
    raise ModelError(f"no tiny configuration of it was found: {str(why).splitlines()[-1].strip()}")


def write_tiny_causal_model(folder: Path, kind: str, seed: int = 0, **overrides: Any) -> Path:
    """Write a random model of transformers as it saves one, with a tokenizer. Returns `folder`. The same arguments
    write the same numbers."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = tiny_causal_config(kind, **overrides)
    folder.mkdir(parents=True, exist_ok=True)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model = made._from_config(config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter.dim() < 2:
                    parameter.copy_(0.2 * noise + (1.0 if name.endswith("weight") else 0.0))
                elif parameter is embedding.weight:
                    parameter.copy_(0.3 * noise)
                else:
                    gain = 3.0 if head is not None and parameter is head.weight else 1.5
                    parameter.copy_(gain / parameter.shape[-1] ** 0.5 * noise)
        model.save_pretrained(folder)
    write_tokenizer(folder, tiny_config("llama"))  # last: transformers writes its own generation_config.json
    return folder


def verdict(kind: str) -> str:
    """How a model of that model_type is served, or why it is not."""
    if kind in native_model_types():
        return "native"
    try:
        config = tiny_causal_config(kind).to_dict()
    except ModelError as error:
        return f"not looked at: {error}"
    try:
        find_architecture({**config, "architectures": None}).spec(config)
    except ModelError as error:
        why = str(error).rpartition("cannot run through transformers: ")[2].split("; ")[0]
        why = re.sub(r", and \d+ more reasons\.?$", "", why)
        why = re.sub(r"(, of \d+ linear layers)?\.?$", "", why)
        return f"refused: {why}"
    return "through transformers"


def rows(kinds: list[str]) -> list[str]:
    return [f"| `{kind}` | {verdict(kind)} |" for kind in kinds]


def all_kinds() -> list[str]:
    return sorted(causal_model_types() | set(native_model_types()))


def main(path: Path) -> None:
    """Replace the table between the marks of a file."""
    text = path.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    table = ["| `model_type` | |", "|---|---|", *rows(all_kinds())]
    path.write_text("\n".join([f"{before}{BEGIN}", "", *table, "", END]) + rest.partition(END)[2], "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
