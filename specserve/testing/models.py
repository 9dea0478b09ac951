"""Tiny random models with a real paged cache, and what their rows must have in common."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from specserve.errors import ConfigError, unknown
from specserve.models.decoder import Decoder
from specserve.models.loader import find_architecture
from specserve.models.product import RowSlots
from specserve.models.spec import AttentionSpec, DecoderSpec, GatedMlp, LayerSpec, RmsNorm, Rope
from specserve.runtime.pack import SequenceRows, pack
from specserve.testing.classic import CLASSIC, as_stored

SPECIAL_TOKENS = ("<|endoftext|>", "<|start|>", "<|end|>", "<|pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# Pairs that are one token each: enough English and JSON that texts, grammars and stop strings meet token boundaries.
_MERGES = (
    "t h|h e|i n|e r|a n|r e|o n|a t|e n|n d|t i|e s|o r|t e|o f|e d|Ġ t|Ġ a|Ġ s|Ġ w|Ġ i|Ġ o|th e|in g|an d|"
    '{ "|" :|" ,|" }|] }|Ġ {|": Ġ|", Ġ'
)
_EMBEDDING_SIZE = 0.2  # standard deviation of what enters the first layer
_LOGIT_SIZE = 3.0  # standard deviation of the logits, roughly
_COMMON: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_OWN: Mapping[str, Mapping[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 24},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "mimo": {"architectures": ["MiMoForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 24},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 72,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "decoder_sparse_step": 1,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 24,
        "moe_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    },
    "olmoe": {"architectures": ["OlmoeForCausalLM"], "num_experts": 7, "num_experts_per_tok": 3},
    "ernie4_5": {"architectures": ["Ernie4_5ForCausalLM"]},
    "helium": {"architectures": ["HeliumForCausalLM"], "rms_norm_eps": 1e-8},
    "glm": {"architectures": ["GlmForCausalLM"], "attention_bias": True},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.75},
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
    },
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 2},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},
    "olmo3": {"architectures": ["Olmo3ForCausalLM"], "sliding_window": 24, "rope_theta": 500_000.0},
    "aquila": {"architectures": ["AquilaForCausalLM"]},
    "baichuan": {"architectures": ["BaichuanForCausalLM"], "num_key_value_heads": None, "model_max_length": 2048},
    "internlm": {"architectures": ["InternLMForCausalLM"], "num_key_value_heads": None, "bias": True},
    "internlm2": {"architectures": ["InternLM2ForCausalLM"], "bias": False},
    "gemma3": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "tie_word_embeddings": True,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 16,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
}

TINY_ARCHITECTURES = (*_OWN, *CLASSIC)


def tiny_config(architecture: str, **overrides: Any) -> dict[str, Any]:
    """A small config.json of one architecture file's kind, with `overrides` on top.

    Raises ConfigError for an unknown architecture.
    """
    if architecture not in TINY_ARCHITECTURES:
        raise ConfigError(unknown("tiny architecture", architecture, TINY_ARCHITECTURES))
    eos, _, end, pad = range(len(_merged_vocabulary()), len(_merged_vocabulary()) + len(SPECIAL_TOKENS))
    ids = {"vocab_size": pad + 1, "bos_token_id": None, "eos_token_id": [eos, end], "pad_token_id": pad}
    common = {} if architecture in CLASSIC else _COMMON
    return {"model_type": architecture, **common, **ids, **{**_OWN, **CLASSIC}[architecture], **overrides}


def write_tiny_model(folder: Path, architecture: str, seed: int = 0, **overrides: Any) -> Path:
    """Write a random model folder that any Hugging Face reader accepts: config.json, generation_config.json,
    model.safetensors (float32), a byte-level tokenizer and a chat template. Returns `folder`.

    The same arguments write the same bytes. Greedy continuations wander rather than repeat one token.
    """
    config = tiny_config(architecture, **overrides)
    write_tokenizer(folder, config)
    tensors = as_stored(config, _fused(config, dict(random_weights(config, seed))))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    return folder


def write_tokenizer(folder: Path, config: Mapping[str, Any]) -> None:
    """Write what a model's folder has beside its configuration and weights. Makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    generation = {name: config[name] for name in ("eos_token_id", "pad_token_id")}
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[3],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    for name, content in (("generation_config", generation), ("tokenizer_config", tokenizer)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2), "utf-8")
    tiny_tokenizer().save(str(folder / "tokenizer.json"))


def random_weights(config: Mapping[str, Any], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model, by name, float32. Scales are chosen for lively greedy outputs: sharp attention, and
    layers that outweigh the embedding, lest a tied head repeat the token it just read."""
    generator = torch.Generator().manual_seed(seed)
    spec = find_architecture(config).spec(config)
    for name, shape in spec.shapes().items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            yield name, _norm_size(spec, name) * (1.0 + 0.2 * noise) - getattr(spec.final_norm, "offset", 0.0)
        elif name.endswith("bias"):
            yield name, 0.2 * noise
        elif "embed_tokens" in name or "embed_positions" in name:
            yield name, _EMBEDDING_SIZE / spec.embedding_scale * noise
        else:
            gain = _LOGIT_SIZE if "q_proj" in name or "lm_head" in name else 1.5
            yield name, gain / math.sqrt(shape[1]) * noise


def _fused(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the architecture's checkpoints have them."""
    for whole, parts in getattr(find_architecture(config), "FUSED", {}).items():
        for name in [name for name in tensors if f".{parts[0]}." in name]:
            names = [name.replace(parts[0], part) for part in parts]
            tensors[name.replace(parts[0], whole)] = torch.cat([tensors.pop(each) for each in names])
    for stored, own in getattr(find_architecture(config), "RENAMED", {}).items():
        tensors = {name.replace(own, stored): tensor for name, tensor in tensors.items()}
    return tensors


def _norm_size(spec: DecoderSpec, name: str) -> float:
    """Sharp queries; and before a tied head, whose rows are the small embeddings, what brings logits to their size."""
    if name == f"{spec.final_norm_name}.weight" and spec.tied_embeddings:
        return _LOGIT_SIZE * spec.embedding_scale / (_EMBEDDING_SIZE * math.sqrt(spec.hidden_size))
    return 2.0 if "q_norm" in name else 1.0


def llama_spec(
    *,
    vocab_size: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    intermediate_size: int,
    max_len: int,
    num_layers: int = 1,
    norm: RmsNorm = RmsNorm(1e-5),  # noqa: B008 (a value)
    rope: Rope = Rope(),  # noqa: B008
    qk_norm: bool = False,
    mlp_bias: bool = False,
    activation: str = "silu",
    **attention: Any,
) -> DecoderSpec:
    """A decoder of so many equal layers of Llama's; `attention` are more fields of AttentionSpec."""
    layer = LayerSpec(
        norm=norm,
        position=rope,
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            head_norm=norm if qk_norm else None,
            **attention,
        ),
        mlp=GatedMlp(size=intermediate_size, activation=activation, bias=mlp_bias),
    )
    layers = (layer,) * num_layers
    return DecoderSpec(vocab_size=vocab_size, hidden_size=hidden_size, max_len=max_len, layers=layers, final_norm=norm)


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer that encodes any text: 256 bytes, the pairs above, and SPECIAL_TOKENS."""
    vocabulary = _merged_vocabulary()
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, _merges()))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def _merges() -> list[tuple[str, str]]:
    pairs = [merge.split(" ") for merge in _MERGES.split("|")]
    return [(left, right) for left, right in pairs]


def _merged_vocabulary() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet()) + [left + right for left, right in _merges()]


@dataclass(frozen=True, slots=True)
class Feed:
    """What one sequence gives to one step: tokens after its cached ones, a chain or, with parents, a tree, through the
    adapter in a slot, or none."""

    seq: int
    tokens: Many[int]
    parents: Many[int] | None = None
    adapter: int = -1


class PagedDecoder:
    """A Decoder driven by hand: `num_seqs` sequences of up to `capacity` tokens, on blocks in shuffled order over a KV
    cache full of old numbers. Chains stay cached; a tree leaves nothing."""

    def __init__(self, model: Decoder, num_seqs: int, capacity: int, block_size: int = 16, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        blocks = -(-capacity // block_size)
        order = 1 + torch.randperm(num_seqs * blocks, generator=generator)  # block 0 is where padding is written
        spec, ops = model.spec, model.ops
        slots = (1 + num_seqs * blocks) * block_size
        kv = [torch.randn((2, slots, *shape), generator=generator) for shape in spec.kv_shapes]
        self.model = model
        self.kv = [layer.to(ops.device, ops.kv_dtype) for layer in kv]
        self.block_size = block_size
        self.block_tables: list[list[int]] = order.view(num_seqs, blocks).tolist()
        self.cached = [0] * num_seqs

    def step(self, *feeds: Feed) -> list[Tensor]:
        """Run the feeds together -> for each its logits, float32 [tokens, vocab]."""
        ops = self.model.ops
        inputs = pack(
            [
                SequenceRows(
                    feed.tokens, self.cached[feed.seq], self.block_tables[feed.seq], feed.parents, adapter=feed.adapter
                )
                for feed in feeds
            ],
            ops.row_multiple,
        )
        ids, positions = (torch.from_numpy(each).to(ops.device) for each in (inputs.token_ids, inputs.positions))
        every, plan = torch.arange(len(ids), device=ops.device), ops.plan(inputs.rows, self.block_size)
        slots = None
        if self.model.num_adapter_slots:
            given = np.full(len(ids), -1) if inputs.adapters is None else inputs.adapters
            slots = RowSlots(*[torch.from_numpy(given).to(ops.device)] * 2)
        with torch.inference_mode():
            _, logits, *_ = self.model.forward(ids, positions, every, self.kv, plan, slots=slots)
        for feed in feeds:
            self.cached[feed.seq] += len(feed.tokens) if feed.parents is None else 0
        lengths = [len(feed.tokens) for feed in feeds]
        return list(torch.split(logits[: sum(lengths)].clone(), lengths))  # the next step may overwrite them

    def chunks(self, seq: int, tokens: Many[int], size: int, adapter: int = -1) -> Tensor:
        """Feed one sequence a chain, `size` tokens a step -> its logits, float32 [tokens, vocab]."""
        feeds = [Feed(seq, tokens[start : start + size], adapter=adapter) for start in range(0, len(tokens), size)]
        return torch.cat([self.step(feed)[0] for feed in feeds])


def unequal_rows(model: Decoder) -> list[str]:
    """Where a row's logits differ by any bit from those of the same row computed alone in its step: in chunks, batches
    and trees of a prompt of 45 tokens. Empty for kernels that keep the promise of specserve.ops."""
    generator = torch.Generator().manual_seed(5)
    prompt = torch.randint(0, model.spec.vocab_size, (45,), generator=generator).tolist()
    paged = PagedDecoder(model, num_seqs=12, capacity=64)
    alone = paged.chunks(0, prompt, 1)
    pairs = _chains(paged, prompt, alone) | _trees(paged, prompt, alone)
    return [name for name, (found, wanted) in pairs.items() if not torch.equal(found, wanted)]


def _chains(paged: PagedDecoder, prompt: list[int], alone: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Logits as found and as wanted, on sequences 1 to 9."""
    pairs = {
        f"chunks of {size}": (paged.chunks(seq, prompt, size), alone)
        for seq, size in enumerate((3, 7, 8, 9, 40, 45), start=1)
    }
    first, other, third = (Feed(7, prompt[:9]), Feed(8, prompt[::-1]), Feed(9, prompt[20:23]))
    pairs["first of a batch"] = paged.step(first, other)[0], alone[:9]
    pairs["last of a batch"] = paged.step(third, Feed(8, [7]), Feed(7, prompt[9:]))[2], alone[9:]
    return pairs


def _trees(paged: PagedDecoder, prompt: list[int], alone: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """As _chains, on sequences 10 and 11, and 9 beside them."""
    paged.chunks(10, prompt[:30], 30)
    paged.chunks(11, prompt[:30], 11)
    path = [0, 2, 4, 7]  # the nodes that spell prompt[30:34], among siblings and cousins
    tokens = [prompt[30], 1, prompt[31], 2, prompt[32], 3, 4, prompt[33], 5]
    parents = [-1, 0, 0, 0, 2, 1, 2, 4, 5]
    wanted = alone[30:34]
    return {
        "tree": (paged.step(Feed(10, tokens, parents))[0][path], wanted),
        "tree in a batch": (paged.step(Feed(9, prompt[:8]), Feed(11, tokens, parents))[1][path], wanted),
        "chain after trees": (paged.chunks(10, prompt[30:], 4), alone[30:]),
    }
