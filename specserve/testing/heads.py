"""Draft heads in plain torch, written from their papers: no paged cache, no ops, differentiable."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from specserve.models.decoder import Decoder
from specserve.models.heads.spec import EagleSpec, TargetShape
from specserve.models.spec import DecoderSpec, Rope
from specserve.ops import AttentionRows
from specserve.runtime.pack import StepInput, padded
from specserve.runtime.runner import Runner

Weights = Mapping[str, Tensor]


def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [rows, heads, d] by halves."""
    d = x.shape[-1]
    angles = positions[:, None] * (1.0 / theta ** (torch.arange(0, d, 2) / d))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attend(spec: DecoderSpec, q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """q [rows, heads, d], k, v [context, kv_heads, d], sees bool [rows, context] -> [rows, heads * d]."""
    share = spec.num_heads // spec.num_kv_heads
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("rhd,chd->hrc", q, k) * spec.query_scale
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    return torch.einsum("hrc,chd->rhd", weights, v).flatten(1)


def layer(spec: DecoderSpec, weights: Weights, name: str, x: Tensor, residual: Tensor) -> Tensor:
    """A decoder layer whose attention reads x [rows, any], of a chain that begins at position 0."""
    at = f"{name}.self_attn"
    positions = torch.arange(len(x)).float()
    q, k, v = ((x @ weights[f"{at}.{p}_proj.weight"].T).unflatten(1, (-1, spec.head_dim)) for p in "qkv")
    if spec.qk_norm:
        q = norm(q, weights[f"{at}.q_norm.weight"], spec.norm_eps)
        k = norm(k, weights[f"{at}.k_norm.weight"], spec.norm_eps)
    theta = spec.ropes[0].theta
    q, k = rotated(q, positions, theta), rotated(k, positions, theta)
    sees = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    residual = residual + attend(spec, q, k, v, sees) @ weights[f"{at}.o_proj.weight"].T
    x = norm(residual, weights[f"{name}.post_attention_layernorm.weight"], spec.norm_eps)
    gate, up = (x @ weights[f"{name}.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
    return residual + (F.silu(gate) * up) @ weights[f"{name}.mlp.down_proj.weight"].T


def eagle_states(head: EagleSpec, weights: Weights, hidden: list[Tensor]) -> Tensor:
    """What version 3 makes of the target's hidden states [rows, target's hidden] each."""
    if head.version == 1:
        return hidden[0]
    if head.fc_norms:
        hidden = [norm(x, weights[f"fc_norm.{i}.weight"], head.layers.norm_eps) for i, x in enumerate(hidden)]
    x = norm(torch.cat(hidden, -1), weights.get("input_norm.weight"), head.layers.norm_eps)
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
    spec, eps = head.layers, head.layers.norm_eps
    embedded = weights.get("embed_tokens.weight", embedding)[tokens]
    first = weights.get("layers.0.input_layernorm.weight")
    if head.version == 3:
        normed = norm(states, weights["layers.0.hidden_norm.weight"], eps)
        x = torch.cat((norm(embedded, first, eps), normed), -1)
        residual = normed if head.norm_before_residual else states
    else:
        residual = F.linear(torch.cat((embedded, states), -1), weights["fc.weight"], weights.get("fc.bias"))
        x = norm(residual, first, eps)
    residual = layer(spec, weights, "layers.0", x, residual)
    for i in range(1, spec.num_layers):
        x = norm(residual, weights[f"layers.{i}.input_layernorm.weight"], eps)
        residual = layer(spec, weights, f"layers.{i}", x, residual)
    out = norm(residual, weights.get("norm.weight"), eps)
    return out @ weights.get("lm_head.weight", lm_head).T, out if head.norm_output else residual


def trained_eagle(
    target: Decoder, texts: list[list[int]], version: int, steps: int, seed: int = 0
) -> tuple[EagleSpec, dict[str, Tensor], Tensor | None]:
    """A small EAGLE head that learns texts (token ids) of a target: its spec, tensors and, for version 3, d2t, int64
    [draft vocabulary] of the texts' own tokens."""
    shape = target.spec
    ids = torch.tensor(sorted({token for text in texts for token in text})) if version == 3 else None
    spec = EagleSpec(
        version=version,
        target=TargetShape(hidden_size=shape.hidden_size, num_layers=shape.num_layers, vocab_size=shape.vocab_size),
        layers=DecoderSpec(
            vocab_size=shape.vocab_size if ids is None else len(ids),
            hidden_size=shape.hidden_size,
            num_layers=1,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            intermediate_size=128,
            max_len=shape.max_len,
            norm_eps=1e-5,
            activation="silu",
            ropes=(Rope(),),
            windows=(None,),
            query_scale=0.25,
        ),
        hidden_layers=tuple(range(shape.num_layers)) if version == 3 else (),
        has_head=version == 3,
    )
    weights = random_weights(spec.shapes(), seed)
    embedding, lm_head = matrices(target)
    layers = spec.hidden_layers or (shape.num_layers - 1,)
    examples = []
    for text in texts:
        hidden = [x if version == 3 else target.final_norm(x) for x in hidden_states(target, text, layers)]
        examples.append(([x[:-2].clone() for x in hidden], torch.tensor(text)))
    optimizer = torch.optim.Adam([weight.requires_grad_() for weight in weights.values()], lr=4e-3)
    for step in range(steps):
        hidden, tokens = examples[step % len(examples)]
        states = eagle_states(spec, weights, hidden)
        logits, _ = eagle(spec, weights, embedding, lm_head, tokens[1:-1], states)
        goal = tokens[2:] if ids is None else torch.searchsorted(ids, tokens[2:])
        optimizer.zero_grad()
        F.cross_entropy(logits, goal).backward()
        optimizer.step()
    learned = {name: weight.detach() for name, weight in weights.items()}
    return spec, learned, None if ids is None else ids - torch.arange(len(ids))


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
    """The residual stream behind these layers, float32 [tokens, hidden] each."""
    ops, spec, block = target.ops, target.spec, 16
    count = -(-len(tokens) // block)
    kv = [
        torch.zeros((2, (count + 1) * block, spec.num_kv_heads, spec.head_dim), dtype=ops.kv_dtype)
        for _ in range(spec.num_layers)
    ]
    multiple = ops.row_multiple
    rows = AttentionRows.pack([0, len(tokens)], [0], [list(range(1, count + 1))], range(-1, len(tokens) - 1), multiple)
    ids, places = padded(tokens, multiple), padded(list(range(len(tokens))), multiple)
    runner = Runner(target, ops, kv, block, len(ids), multiple, taps=layers)
    runner.start(StepInput(token_ids=ids, positions=places, logit_rows=padded([0], multiple), rows=rows))
    return [x[: len(tokens)].clone() for x in runner.finish().taps.values()]
