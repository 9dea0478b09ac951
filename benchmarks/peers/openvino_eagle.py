"""An EAGLE-3 head of specserve's format and its target's GGUF file as a pair that OpenVINO GenAI speculates with.

GenAI takes the target's taps by the names that optimum-intel gives to a model's layers, which its own reader of GGUF
does not give; and the Llama layer that optimum-intel exports heads with has no norms of queries and keys. Both are
added here. The head's weights are rounded to int8 a row, as specserve's own are. Runs in OpenVINO's environment.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nncf
import openvino
import openvino_genai as genai
import optimum.exporters.openvino.model_patcher as exported
import torch
from optimum.exporters.openvino import export_from_model
from optimum.intel import OVConfig
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from wire import Unsupported

MODEL = "openvino_model.xml"
NOT_IN_LLAMA = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def make_target(gguf: Path, folder: Path) -> Path:
    """The GGUF file as an OpenVINO model whose layers' outputs have the names that taps are found by."""
    if (folder / MODEL).exists():
        return folder
    partial = folder.with_suffix(".partial")
    read = partial / "read"
    shutil.rmtree(partial, ignore_errors=True)
    read.mkdir(parents=True)
    (read / gguf.name).symlink_to(gguf)
    genai.LLMPipeline(read / gguf.name, "CPU", enable_save_ov_model=True)
    model = openvino.Core().read_model(read / MODEL)
    outputs = 0
    for node in model.get_ordered_ops():
        if layer := re.fullmatch(r"model\.layers\.self_attn\.add1\.layer(\d+)", node.get_friendly_name()):
            node.set_friendly_name(f"model.layers.{layer[1]}/add")
            outputs += 1
    if not outputs:
        raise Unsupported("OpenVINO's reader of GGUF names layers otherwise than 2026.4 does; see make_target")
    openvino.save_model(model, partial / MODEL, compress_to_fp16=False)
    for path in read.glob("openvino_*tokenizer.*"):
        path.rename(partial / path.name)
    shutil.rmtree(read)
    partial.rename(folder)
    return folder


def make_draft(head: Path, target: Path, folder: Path) -> Path:
    """The head as an OpenVINO model. `target`: the target's Hugging Face folder, for embeddings and the tokenizer."""
    if (folder / MODEL).exists():
        return folder
    config = json.loads((head / "config.json").read_text("utf-8"))
    if config.get("speculators_model_type") != "eagle3":
        raise Unsupported(f"{head} is not an EAGLE-3 head")
    if strange := [name for name in NOT_IN_LLAMA if config.get(name)]:
        raise Unsupported(f"optimum-intel's EAGLE-3 layer has no {', '.join(strange)}, which {head} has")
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    export_from_model(
        _module(config, _weights(head, target)),
        output=partial / "exported",
        task="text-generation-with-past",
        stateful=True,
        ov_config=OVConfig(dtype="fp32"),
    )
    model = openvino.Core().read_model(partial / "exported" / MODEL)
    model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
    taps = [layer - 1 for layer in config["eagle_aux_hidden_state_layer_ids"]]  # its list counts what a layer reads
    model.set_rt_info("True", "eagle3_mode")
    model.set_rt_info(" ".join(map(str, taps)), "hidden_layers_list")
    openvino.save_model(model, partial / MODEL, compress_to_fp16=False)
    for name in ("config.json", "generation_config.json"):
        (partial / "exported" / name).rename(partial / name)
    shutil.rmtree(partial / "exported")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(target / name, partial / name)
    partial.rename(folder)
    return folder


def _weights(head: Path, target: Path) -> dict[str, Tensor]:
    """The head's weights in float32, with the target's embeddings and, as LM head, its rows of the draft's tokens."""
    stored = load_file(head / "model.safetensors")
    embeddings = load_file(target / "model.safetensors")["model.embed_tokens.weight"].float()
    found = {"embed_tokens.weight": embeddings}
    for name, tensor in stored.items():
        if not name.endswith("_scale"):
            scale = stored.get(f"{name}_scale")
            found[name.replace("layers.0.", "midlayer.")] = tensor if scale is None else tensor.float() * scale
    tokens = torch.arange(len(stored["d2t"])) + stored["d2t"]
    found.setdefault("lm_head.weight", embeddings[tokens])
    return {f"model.{name}": tensor for name, tensor in found.items()}


def _module(config: dict[str, Any], weights: dict[str, Tensor]) -> torch.nn.Module:
    layer = {name: value for name, value in config["transformer_layer_config"].items() if name != "model_type"}
    sizes = {name: config[name] for name in ("draft_vocab_size", "target_hidden_size")}
    for kind in (exported.LlamaEagle3Model, exported.LlamaEagle3ForCausalLM):
        kind.__module__ = "transformers"  # or the export asks which library the model is of
    llama = LlamaConfig(**layer, **sizes, architectures=["LlamaForCausalLMEagle3"])
    module: torch.nn.Module = exported.LlamaEagle3ForCausalLM(llama)
    attention = module.get_submodule("model.midlayer.self_attn")
    for part in "qk":
        if f"model.midlayer.self_attn.{part}_norm.weight" in weights:
            norm = LlamaRMSNorm(layer["head_dim"], eps=layer["rms_norm_eps"])
            attention.add_module(f"{part}_norm", norm)
            attention.get_submodule(f"{part}_proj").register_forward_hook(_each_head(norm, layer["head_dim"]))
    module.load_state_dict(weights)
    return module.eval()


def _each_head(norm: torch.nn.Module, head_dim: int) -> Callable[[torch.nn.Module, Any, Tensor], Tensor]:
    """A hook that norms each head of a projection's output, as Qwen3 does."""

    def normed(_projection: torch.nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        heads: Tensor = norm(output.view(*output.shape[:-1], -1, head_dim))
        return heads.view(output.shape)

    return normed
