"""The self-test's checks of ops that work on rows one by one: from the embedding to a sampled token."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specserve.ops import DraftArrays, DrawArrays, HeadNorms, Placed, RowAdapters
from specserve.ops.selftest.inputs import NUM_ROWS as _ROWS, Check, Inputs, Rows

_VOCAB = 300
_OUTPUTS = 272  # of a weight: more than a program of a kernel has, and few enough to be quick
_EPS = 1e-5
_MANY = 200  # rows, which kernels cut otherwise than few


def _embed(inputs: Inputs) -> Rows:
    ops, table = inputs.ops, inputs.ops.pack_table(inputs.normal(_VOCAB, inputs.uses.hidden))
    ids = inputs.integers(_VOCAB, _ROWS)
    return lambda a, b: [ops.embed(inputs.ids(ids, a, b), table, 2.5)[: b - a]]


def _embed_placed(inputs: Inputs) -> Rows:
    ops, hidden = inputs.ops, inputs.uses.hidden
    table, places = (ops.pack_table(inputs.normal(_VOCAB, hidden)) for _ in range(2))
    ids, at = inputs.integers(_VOCAB, _ROWS), inputs.integers(_VOCAB, _ROWS)

    def compute(a: int, b: int) -> list[Tensor]:
        placed = Placed(inputs.ids(at, a, b), places)
        return [ops.embed(inputs.ids(ids, a, b), table, 1.0, placed)[: b - a]]

    return compute


def _add_norm(inputs: Inputs, is_layer_norm: bool = False, has_post: bool = False) -> Rows:
    """What is read, the residual, the same of all rows and of some, and what is norm alone."""
    ops, hidden = inputs.ops, inputs.uses.hidden
    residual, delta = 3 * inputs.normal(_ROWS, hidden), inputs.normal(_ROWS, hidden)
    scale, bias = inputs.normal(hidden), inputs.normal(hidden)
    weight = ops.pack_layer_norm(scale, bias) if is_layer_norm else ops.pack_vector(scale)
    post = ops.pack_vector(inputs.normal(hidden)) if has_post else None

    def compute(a: int, b: int) -> list[Tensor]:
        count = b - a
        stream, added = inputs.rows(residual, a, b), inputs.products(delta, a, b)
        rows = inputs.there(torch.arange(count))
        some = ops.gather_rows(rows, stream, added, post, _EPS).clone()
        tapped = ops.tap(0, stream, added, post, _EPS)[:count].clone()
        read = inputs.numbers(ops.fused_add_norm(stream, added, post, weight, _EPS), count, hidden)
        return [read, stream[:count].clone(), some, tapped, ops.norm(stream, weight, _EPS)[:count].clone()]

    return compute


def _joined_norms(inputs: Inputs) -> Rows:
    ops, hidden = inputs.ops, inputs.uses.hidden
    parts, weight = [inputs.normal(_ROWS, hidden) for _ in range(2)], ops.pack_vector(inputs.normal(hidden))

    def compute(a: int, b: int) -> list[Tensor]:
        first, second = (inputs.rows(part, a, b) for part in parts)
        return [inputs.numbers(ops.joined_norms([(first, weight), (second, None)], _EPS), b - a, 2 * hidden)]

    return compute


def _joint_norm(inputs: Inputs) -> Rows:
    ops, uses = inputs.ops, inputs.uses
    sizes = uses.num_heads * uses.head_dim, uses.num_kv_heads * uses.head_dim
    qkv = inputs.normal(_ROWS, sizes[0] + 2 * sizes[1])
    weights = [ops.pack_vector(inputs.normal(size)) for size in sizes]
    norms = HeadNorms(weights[0], weights[1], _EPS)
    return lambda a, b: [ops.norm_projections(inputs.products(qkv, a, b), norms, sizes)[: b - a]]


def _linear(inputs: Inputs, columns: int, outputs: int = _OUTPUTS, has_bias: bool = False, apart: int = 1) -> Rows:
    """Rows of the input lie `apart` times as far from each other in memory as they are long."""
    ops, x = inputs.ops, inputs.normal(_ROWS, columns)
    weight = ops.pack(inputs.weight(outputs, columns), inputs.normal(outputs) if has_bias else None)

    def compute(a: int, b: int) -> list[Tensor]:
        rows = inputs.rows(x, a, b)
        wide = rows.new_zeros(len(rows), apart * columns)
        wide[:, :columns] = rows
        return [ops.linear(ops.quantize_activation(wide[:, :columns]), weight)[: b - a]]

    return compute


def _linear_of_many(inputs: Inputs) -> Rows:
    """Rows, and all others of a prompt after them where several are asked for."""
    ops, columns = inputs.ops, inputs.uses.hidden
    x, weight = inputs.normal(_MANY, columns), inputs.ops.pack(inputs.weight(_OUTPUTS, columns))

    def compute(a: int, b: int) -> list[Tensor]:
        rows = inputs.rows(x, a, _MANY if b - a > 1 else b)
        return [ops.linear(ops.quantize_activation(rows), weight)[: b - a]]

    return compute


def _head(inputs: Inputs, cap: float | None = None) -> Rows:
    ops, columns = inputs.ops, inputs.uses.hidden
    x, bias = inputs.normal(_ROWS, columns), inputs.normal(_VOCAB) if inputs.uses.has("bias") else None
    weight = ops.pack_head(inputs.weight(_VOCAB, columns), bias)

    def compute(a: int, b: int) -> list[Tensor]:
        logits = ops.linear(ops.quantize_activation(inputs.rows(x, a, b)), weight)
        return [logits[: b - a] if cap is None else ops.softcap(logits, cap)[: b - a]]

    return compute


def _gated(inputs: Inputs, activation: str) -> Rows:
    ops, columns = inputs.ops, inputs.uses.hidden
    x, gate, up = inputs.normal(_ROWS, columns), *(inputs.weight(_OUTPUTS, columns) for _ in range(2))
    weight = ops.pack_gated(gate, up, None, None)

    def compute(a: int, b: int) -> list[Tensor]:
        read = ops.gated(ops.quantize_activation(inputs.rows(x, a, b)), weight, activation)
        return [inputs.numbers(read, b - a, _OUTPUTS)]

    return compute


def _activated(inputs: Inputs, activation: str) -> Rows:
    ops, columns = inputs.ops, inputs.uses.hidden
    x, weight = inputs.normal(_ROWS, columns), ops.pack(inputs.weight(_OUTPUTS, columns), inputs.normal(_OUTPUTS))

    def compute(a: int, b: int) -> list[Tensor]:
        read = ops.activated(ops.quantize_activation(inputs.rows(x, a, b)), weight, activation)
        return [inputs.numbers(read, b - a, _OUTPUTS)]

    return compute


def _adapted(inputs: Inputs) -> Rows:
    """Rows with one adapter, with another, and with none."""
    ops, columns, ranks = inputs.ops, inputs.uses.hidden, (8, 20)
    x, weight = inputs.normal(_ROWS, columns), ops.pack(inputs.weight(_OUTPUTS, columns))
    bank = ops.adapter_bank(2, columns, _OUTPUTS, max(ranks))
    for slot, rank in enumerate(ranks):
        a, b = inputs.normal(rank, columns) / columns**0.5, inputs.normal(_OUTPUTS, rank) / rank**0.5
        ops.place_adapter(bank, slot, ops.pack_adapter(weight, a, b))
    slots = inputs.integers(3, _ROWS) - 1

    def compute(a: int, b: int) -> list[Tensor]:
        own = RowAdapters(bank, inputs.ids(slots, a, b))
        return [ops.linear(ops.quantize_activation(inputs.rows(x, a, b)), weight, own)[: b - a]]

    return compute


def _experts(inputs: Inputs) -> Rows:
    ops, columns, width, count = inputs.ops, inputs.uses.hidden, 128, 4
    x, router = inputs.normal(_ROWS, columns), ops.pack_router(inputs.normal(count, columns) / columns**0.5)
    gates, ups = ([inputs.weight(width, columns) for _ in range(count)] for _ in range(2))
    weights = ops.pack_experts(gates, ups, [inputs.weight(columns, width) for _ in range(count)])

    def compute(a: int, b: int) -> list[Tensor]:
        rows = inputs.rows(x, a, b)
        routing = ops.route(rows, router, count, 2, True)
        return [ops.experts(ops.quantize_activation(rows), weights, routing, "silu", None)[: b - a]]

    return compute


def _logits(inputs: Inputs) -> Tensor:
    """Some whose best are several, and some without a best."""
    logits = (4 * inputs.normal(_ROWS, _VOCAB)).round() / 2
    logits[0, [7, 99, 260]] = 40.0
    logits[1, 11], logits[2, 250], logits[3, 0] = torch.nan, torch.inf, -torch.inf
    return logits


def _best(inputs: Inputs) -> Rows:
    ops, logits = inputs.ops, _logits(inputs)

    def compute(a: int, b: int) -> list[Tensor]:
        rows = inputs.rows(logits, a, b)
        best = ops.argmax(rows)
        return [best[: b - a].clone(), ops.top_k(rows, best, 8)[: b - a]]

    return compute


def _sampled(inputs: Inputs) -> Rows:
    """Greedy, and with temperatures, filters, masks and noise; each row is a sequence without a draft."""
    ops, logits = inputs.ops, _logits(inputs)
    kinds = torch.arange(_ROWS) % 5
    laws = torch.stack((torch.where(kinds == 0, 0.0, 0.8), 0.02 * (kinds == 2), torch.where(kinds == 3, 0.7, 1.0)))
    seqs = torch.stack((inputs.integers(2**40, _ROWS), 20 * (kinds == 4), torch.zeros(_ROWS, dtype=torch.int64)))
    hashed = inputs.there(inputs.integers(2**62, _VOCAB))
    masks = (inputs.integers(2**32, _ROWS, -(-_VOCAB // 32)) - 2**31).int().numpy()

    def compute(a: int, b: int) -> list[Tensor]:
        count, rows = b - a, inputs.rows(logits, a, b)
        drafts = DraftArrays(
            np.arange(count + 1), np.stack((np.zeros(count), np.full(count, -1), np.arange(a, b))).astype(np.int64),
            seqs[:, a:b].contiguous().numpy(), laws[:, a:b].double().contiguous().numpy(), {},
        )  # fmt: skip
        best = ops.argmax(rows)
        found = [ops.verify(rows, best, drafts, hashed, some, "coupled") for some in (None, masks[a:b])]
        return [torch.from_numpy(np.array(each.tokens)) for each in found]

    return compute


def _drawn(inputs: Inputs) -> Rows:
    ops, logits = inputs.ops, inputs.normal(_ROWS, _VOCAB)
    temperature, keys = (torch.arange(_ROWS) % 3).double(), inputs.integers(2**62, _ROWS)
    hashed = inputs.there(inputs.integers(2**62, _VOCAB))

    def compute(a: int, b: int) -> list[Tensor]:
        how = DrawArrays(*map(inputs.there, (torch.arange(b - a), temperature[a:b], keys[a:b])))
        return list(ops.draw(0, inputs.there(logits[a:b].contiguous()), None, how, None, hashed))

    return compute


def _scored(inputs: Inputs) -> Rows:
    ops, logits, tokens = inputs.ops, inputs.normal(_ROWS, _VOCAB), inputs.integers(_VOCAB, _ROWS).numpy()

    def compute(a: int, b: int) -> list[Tensor]:
        found = ops.score(inputs.there(logits[a:b].contiguous()), np.arange(b - a), tokens[a:b], 4)
        return [torch.from_numpy(np.array(part)) for part in (found.totals, found.ranks, found.best)]

    return compute


def _moved(inputs: Inputs) -> Rows:
    """Keys and values that are written, copied and read."""
    ops, (slots, kept) = inputs.ops, (4 * inputs.block_size, inputs.integers(10**6, 2, 8))
    shape = inputs.uses.num_kv_heads, inputs.uses.head_dim
    values = inputs.there(inputs.normal(2, 8, *shape).to(ops.kv_dtype))
    at = torch.argsort(kept[0]), 8 + torch.argsort(kept[1])

    def compute(a: int, b: int) -> list[Tensor]:
        kv = torch.zeros((2, slots, *shape), dtype=ops.kv_dtype, device=ops.device)
        sources, targets = map(inputs.there, at)
        ops.write_kv(kv, sources, values)
        ops.copy_kv([kv], sources, targets)
        return [ops.read_kv(kv, targets).float().flatten(1)]

    return compute


def _of_width(inputs: Inputs, outputs: int = _OUTPUTS) -> Rows:
    return _linear(inputs, inputs.uses.width, outputs)


def _of_hidden(inputs: Inputs) -> Rows:
    return _linear(inputs, inputs.uses.hidden, has_bias=inputs.uses.has("bias"))


def _named(name: str, prepare: Any, activations: tuple[str, ...], prefix: str = "") -> list[Check]:
    return [Check(f"{name} with {each}", prefix + each, partial(prepare, activation=each)) for each in activations]


CHECKS = (
    Check("embedding", "", _embed),
    Check("embedding with learned positions", "placed", _embed_placed),
    Check("adding and RMS norm", "rms_norm", _add_norm),
    Check("adding what is normed, and RMS norm", "post_norm", partial(_add_norm, has_post=True)),
    Check("adding and LayerNorm", "layer_norm", partial(_add_norm, is_layer_norm=True)),
    Check("norms side by side", "", _joined_norms),
    Check("norm of all heads together", "joint_norm", _joint_norm),
    Check("linear layer", "", _of_hidden),
    Check("linear layer of the MLP's width", "", _of_width),
    Check("linear layer of a power of two of inputs, rows apart", "", partial(_linear, columns=1024, apart=2)),
    Check("linear layer of odd sizes", "", partial(_linear, columns=100, outputs=36)),
    Check("linear layer for a prompt", "", _linear_of_many),
    *_named("gated layer", _gated, ("silu", "gelu_tanh"), "gated "),
    *_named("layer", _activated, ("silu", "gelu_tanh", "relu", "gelu")),
    Check("adapters", "adapters", _adapted),
    Check("experts", "experts", _experts),
    Check("LM head", "", _head),
    Check("LM head with a soft cap", "softcap", partial(_head, cap=2.0)),
    Check("best tokens", "", _best),
    Check("sampling", "", _sampled),
    Check("drawing drafts", "", _drawn),
    Check("log-probabilities", "", _scored),
    Check("moving keys and values", "", _moved, by_row=False),
)
