"""Draft heads in plain torch, written from their papers: no paged cache, no ops, differentiable."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from specserve.models.decoder import Decoder
from specserve.models.heads.spec import BlockSpec, EagleSpec, MedusaSpec, TargetShape
from specserve.models.positions import Alibi, Position, Rope
from specserve.models.spec import AttentionSpec, DecoderSpec, LayerSpec
from specserve.runtime.pack import SequenceRows, pack
from specserve.runtime.runner import Runner
from specserve.testing.models import llama_spec

Weights = Mapping[str, Tensor]


def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, positions: Tensor, rope: Position) -> Tensor:
    """x [rows, heads, d], without scaling."""
    if not isinstance(rope, Rope):
        return x
    d = rope.rotated(x.shape[-1])
    angles = positions[:, None] * (1.0 / rope.theta ** (torch.arange(0, d, 2) / d))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = (x[..., 0:d:2], x[..., 1:d:2]) if rope.interleaved else (x[..., : d // 2], x[..., d // 2 : d])
    pairs = a * cos - b * sin, b * cos + a * sin
    found = torch.stack(pairs, -1).flatten(-2) if rope.interleaved else torch.cat(pairs, -1)
    return torch.cat((found, x[..., d:]), -1)


def attend(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, sees: Tensor, position: Position = None) -> Tensor:
    """q [rows, heads, d], k, v [context, kv_heads, d], sees bool [rows, context] -> [rows, heads * d]. `position`
    counts where it is ALiBi; rows are then the context's last."""
    share = spec.num_heads // spec.num_kv_heads
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("rhd,chd->hrc", q, k) * spec.scale
    if isinstance(position, Alibi):
        context = torch.arange(len(k))
        scores += torch.tensor(position.slopes)[:, None, None] * (context - context[-len(q) :, None])
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    return torch.einsum("hrc,chd->rhd", weights, v).flatten(1)


def projected(spec: LayerSpec, weights: Weights, name: str, x: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [rows, heads, d] of a chain from position `start` on."""
    at, own = f"{name}.self_attn", spec.attention
    positions = torch.arange(start, start + len(x)).float()
    flat = [F.linear(x, weights[f"{at}.{p}_proj.weight"], weights.get(f"{at}.{p}_proj.bias")) for p in "qkv"]
    q, k, v = (each.view(len(x), -1, own.head_dim) for each in flat)
    if own.head_norm is not None:
        q = norm(q, weights[f"{at}.q_norm.weight"], own.head_norm.eps)
        k = norm(k, weights[f"{at}.k_norm.weight"], own.head_norm.eps)
    return rotated(q, positions, spec.position), rotated(k, positions, spec.position), v


def mlp(spec: LayerSpec, weights: Weights, name: str, residual: Tensor) -> Tensor:
    x = norm(residual, weights[f"{name}.post_attention_layernorm.weight"], spec.norm.eps)
    gate, up = (x @ weights[f"{name}.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
    return residual + (F.silu(gate) * up) @ weights[f"{name}.mlp.down_proj.weight"].T


def layer(spec: LayerSpec, weights: Weights, name: str, x: Tensor, residual: Tensor) -> Tensor:
    """A decoder layer whose attention reads x [rows, any], of a chain that begins at position 0."""
    sees = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    attended = attend(spec.attention, *projected(spec, weights, name, x, 0), sees, spec.position)
    return mlp(spec, weights, name, residual + attended @ weights[f"{name}.self_attn.o_proj.weight"].T)


def eagle_states(head: EagleSpec, weights: Weights, hidden: list[Tensor]) -> Tensor:
    """What version 3 makes of the target's hidden states [rows, target's hidden] each."""
    if head.version == 1:
        return hidden[0]
    if head.fc_norms:
        hidden = [norm(x, weights[f"fc_norm.{i}.weight"], head.layers.final_norm.eps) for i, x in enumerate(hidden)]
    x = norm(torch.cat(hidden, -1), weights.get("input_norm.weight"), head.layers.final_norm.eps)
    return F.linear(x, weights["fc.weight"], weights.get("fc.bias"))


def eagle(
    head: EagleSpec,
    weights: Weights,
    embedding: Tensor,
    lm_head: Tensor,
    tokens: Tensor,
    states: Tensor,
    start: int = 0,
) -> tuple[Tensor, Tensor]:
    """Over a chain of rows from position `start` on, of which row i reads token i + 1 and hidden state i: logits [rows,
    draft vocabulary] and what the next pass reads in place of hidden states."""
    spec, eps = head.layers, head.layers.final_norm.eps
    embedded = weights.get("embed_tokens.weight", embedding)[tokens]
    first = weights.get("layers.0.input_layernorm.weight")
    if head.version == 3:
        normed = norm(states, weights["layers.0.hidden_norm.weight"], eps)
        x = torch.cat((norm(embedded, first, eps), normed), -1)
        residual = normed if head.norm_before_residual else states
    else:
        parts = [norm(embedded, weights.get("embed_norm.weight"), eps)]
        parts.append(norm(states, weights.get("hidden_norm.weight"), eps))
        joined = torch.cat(parts[::-1] if head.fc_input_norms else parts, -1)
        residual = F.linear(joined, weights["fc.weight"], weights.get("fc.bias"))
        x = norm(residual, first, eps)
    residual = layer(spec.layers[0], weights, "layers.0", x, residual)
    for i, own in enumerate(spec.layers[1:], start=1):
        x = norm(residual, weights[f"layers.{i}.input_layernorm.weight"], eps)
        residual = layer(own, weights, f"layers.{i}", x, residual)
    out = norm(residual, weights.get("norm.weight"), eps)
    return out @ weights.get("lm_head.weight", lm_head).T, out if head.norm_output else residual


def block(
    head: BlockSpec, weights: Weights, embedding: Tensor, lm_head: Tensor, hidden: list[Tensor], last: int, count: int
) -> tuple[Tensor, Tensor]:
    """The last token and masks, `count` rows after a context whose hidden states [context, target's hidden] are given
    for each layer that the head reads: logits [count, draft vocabulary] without what the token before adds, and the
    hidden states after the final norm."""
    spec, eps = head.layers, head.layers.final_norm.eps
    states = norm(torch.cat(hidden, -1) @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    tokens = torch.tensor([last] + [head.mask_token_id] * (count - 1))
    residual = weights.get("embed_tokens.weight", embedding)[tokens]
    if head.has_anchor_inputs:
        x = torch.cat((states[-1], norm(residual[0], weights["anchor_norm.weight"], eps)))
        residual = residual + (weights["anchor_inputs.weight"] @ x).view(head.block_size, -1)[:count]
    start = len(states)
    sees = torch.ones(count, start + count, dtype=torch.bool)
    if head.is_causal:
        sees = sees.tril(start)
    for i, own in enumerate(spec.layers):
        name = f"layers.{i}"
        x = norm(residual, weights[f"{name}.input_layernorm.weight"], eps)
        q, own_k, own_v = projected(own, weights, name, x, start)
        _, past_k, past_v = projected(own, weights, name, states, 0)
        attended = attend(own.attention, q, torch.cat((past_k, own_k)), torch.cat((past_v, own_v)), sees)
        residual = mlp(own, weights, name, residual + attended @ weights[f"{name}.self_attn.o_proj.weight"].T)
    out = norm(residual, weights["norm.weight"], eps)
    return out @ weights.get("lm_head.weight", lm_head).T, out


Trained: TypeAlias = tuple[Any, dict[str, Tensor], Tensor | None]  # a spec, its tensors, d2t int64 [draft vocabulary]


def trained_eagle(target: Decoder, texts: list[list[int]], version: int, steps: int, **options: Any) -> Trained:
    """A small EAGLE head that learns texts (token ids) of a target; version 3 proposes only from the texts' tokens."""
    ids = torch.tensor(sorted({token for text in texts for token in text})) if version == 3 else None
    own: dict[str, Any] = {
        "version": version,
        "target": target_shape(target),
        "layers": small_layers(target, target.spec.vocab_size if ids is None else len(ids)),
        "hidden_layers": tuple(range(target.spec.num_layers)) if version == 3 else (),
        "has_head": version == 3,
    }
    spec = EagleSpec(**(own | options))
    matrices_ = matrices(target)
    shown = spec.hidden_layers or (target.spec.num_layers - 1,)
    all_hidden = [hidden_states(target, text, shown) for text in texts]
    if version == 1:
        all_hidden = [[target.final_norm(x) for x in hidden] for hidden in all_hidden]

    def loss(weights: Weights, step: int) -> Tensor:
        tokens = torch.tensor(texts[step % len(texts)])
        states = eagle_states(spec, weights, [x[:-2].clone() for x in all_hidden[step % len(texts)]])
        logits, _ = eagle(spec, weights, *matrices_, tokens[1:-1], states)
        return F.cross_entropy(logits, tokens[2:] if ids is None else torch.searchsorted(ids, tokens[2:]))

    return spec, _learned(spec.shapes(), loss, steps, 4e-3), None if ids is None else ids - torch.arange(len(ids))


def add_next_token_layer(folder: Path, spec: EagleSpec, weights: Weights) -> Path:
    """Put a head, of an EagleSpec with fc_input_norms, into the checkpoint in `folder` as MiMo has it. Returns it."""
    names = {"fc": "input_proj", "hidden_norm": "hidden_layernorm", "embed_norm": "token_layernorm"}
    names |= {"norm": "final_layernorm", "layers": ""}
    stored = load_file(folder / "model.safetensors")
    for i in range(json.loads((folder / "config.json").read_text("utf-8"))["num_hidden_layers"]):
        for part in "qkv":  # MiMo has biases there
            size = len(stored[f"model.layers.{i}.self_attn.{part}_proj.weight"])
            stored[f"model.layers.{i}.self_attn.{part}_proj.bias"] = torch.zeros(size)
    for name, weight in weights.items():
        module, _, rest = name.partition(".")
        own = f"{names[module]}.{rest}".removeprefix(".0.")
        stored[f"model.mtp_layers.0.{own}"] = weight.clone()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config |= {"num_nextn_predict_layers": 1, "model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def trained_block(target: Decoder, texts: list[list[int]], steps: int, **options: Any) -> Trained:
    """A small block head that learns texts (token ids) of a target."""
    spec = BlockSpec(
        target=target_shape(target),
        layers=small_layers(target, target.spec.vocab_size),
        hidden_layers=tuple(range(target.spec.num_layers)),
        block_size=5,
        mask_token_id=target.spec.vocab_size - 1,
        **options,
    )
    matrices_, first = matrices(target), 0 if spec.samples_anchor else 1
    all_hidden = [hidden_states(target, text, spec.hidden_layers) for text in texts]
    generator = torch.Generator().manual_seed(1)

    def loss(weights: Weights, step: int) -> Tensor:
        text = texts[step % len(texts)]
        some = []
        for last in torch.randint(1, len(text) - spec.block_size - 1, (6,), generator=generator).tolist():
            hidden = [x[:last].clone() for x in all_hidden[step % len(texts)]]
            logits, out = block(spec, weights, *matrices_, hidden, text[last], spec.block_size)
            goal = text[last + 1 : last + 1 + spec.num_proposed]
            before = torch.tensor(text[last : last + len(goal)])
            logits, out = logits[first:], out[first:]
            if spec.bigram_rank:
                logits = logits + weights["bigram_in.weight"][before] @ weights["bigram_out.weight"].T
            some.append(F.cross_entropy(logits, torch.tensor(goal)))
            if spec.has_confidence:
                right = (logits.argmax(-1) == torch.tensor(goal)).float()
                guess = F.linear(out.detach(), weights["confidence.weight"], weights["confidence.bias"])[:, 0]
                some.append(F.binary_cross_entropy_with_logits(guess, right))
        return torch.stack(some).sum()

    return spec, _learned(spec.shapes(), loss, steps, 2e-3), None


def medusa(head: MedusaSpec, weights: Weights, hidden: Tensor) -> Tensor:
    """Logits [heads, rows, draft vocabulary] from hidden states after the target's final norm [rows, hidden]."""
    found = []
    for j in range(head.num_heads):
        x = hidden
        for i in range(head.num_layers):
            x = x + F.silu(F.linear(x, weights[f"{j}.{i}.linear.weight"], weights[f"{j}.{i}.linear.bias"]))
        found.append(x @ weights[f"{j}.{head.num_layers}.weight"].T)
    return torch.stack(found)


def trained_medusa(target: Decoder, texts: list[list[int]], steps: int) -> Trained:
    """Three small Medusa heads that learn texts (token ids) of a target."""
    spec = MedusaSpec(target=target_shape(target), num_heads=3, draft_vocab_size=target.spec.vocab_size)
    last = (target.spec.num_layers - 1,)
    all_hidden = [target.final_norm(hidden_states(target, text, last)[0]).clone() for text in texts]

    def loss(weights: Weights, step: int) -> Tensor:
        tokens, hidden = torch.tensor(texts[step % len(texts)]), all_hidden[step % len(texts)]
        rows = len(tokens) - spec.num_heads - 1
        logits = medusa(spec, weights, hidden[:rows])
        goals = [tokens[2 + j : 2 + j + rows] for j in range(spec.num_heads)]
        return torch.stack([F.cross_entropy(each, goal) for each, goal in zip(logits, goals, strict=True)]).sum()

    return spec, _learned(spec.shapes(), loss, steps, 4e-3), None


def _learned(
    shapes: Mapping[str, tuple[int, ...]], loss: Callable[[Weights, int], Tensor], steps: int, rate: float
) -> dict[str, Tensor]:
    weights = random_weights(shapes)
    optimizer = torch.optim.Adam([weight.requires_grad_() for weight in weights.values()], lr=rate)
    for step in range(steps):
        optimizer.zero_grad()
        loss(weights, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


def target_shape(target: Decoder) -> TargetShape:
    spec = target.spec
    return TargetShape(hidden_size=spec.hidden_size, num_layers=spec.num_layers, vocab_size=spec.vocab_size)


def small_layers(target: Decoder, vocab_size: int, num_layers: int = 1, **more: Any) -> DecoderSpec:
    """Layers of a head for a target."""
    return llama_spec(
        vocab_size=vocab_size,
        hidden_size=target.spec.hidden_size,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        max_len=target.spec.max_len,
        **more,
    )


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Norms around 1, matrices that keep the size of what they read."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.2 * values if "norm" in name else values / shape[-1] ** 0.5
    return weights


def matrices(target: Decoder) -> tuple[Tensor, Tensor]:
    """The target's embedding and LM head [vocab, hidden], asked for by what they do."""
    vocab, multiple = target.spec.vocab_size, target.ops.row_multiple
    ids = torch.arange(vocab + -vocab % multiple) % vocab
    identity = torch.eye(target.spec.hidden_size)
    return target.embed(ids)[:vocab].clone(), target.lm_head(identity).clone().T


def hidden_states(target: Decoder, tokens: list[int], layers: tuple[int, ...]) -> list[Tensor]:
    """The residual stream after these layers, float32 [tokens, hidden] each."""
    ops, spec, block = target.ops, target.spec, 16
    count = -(-len(tokens) // block)
    kv = [torch.zeros((2, (count + 1) * block, *shape), dtype=ops.kv_dtype) for shape in spec.kv_shapes]
    multiple = ops.row_multiple
    inputs = pack([SequenceRows(tokens, 0, range(1, count + 1), num_logits=1)], multiple)
    runner = Runner(target, ops, kv, block, len(inputs.token_ids), multiple, taps=layers)
    runner.start(inputs)
    return [x[: len(tokens)].clone() for x in runner.finish().taps.values()]
