"""Draft heads on the op contract: their logits are those of an independent reference."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from specserve.models.decoder import Decoder
from specserve.models.heads.block import BlockHead
from specserve.models.heads.eagle import EagleHead
from specserve.models.heads.medusa import MedusaHead
from specserve.models.heads.origin import TargetOrigin
from specserve.models.heads.spec import BlockSpec, EagleSpec, MedusaSpec, TargetShape
from specserve.models.loader import load_model
from specserve.models.spec import DecoderSpec
from specserve.ops import AttentionRows, Ops, Rotation
from specserve.ops.backend import KernelOptions
from specserve.registry import KERNELS
from specserve.runtime.pack import SequenceRows, pack
from specserve.runtime.runner import Output, Runner
from specserve.sampling.noise import hash_tokens
from specserve.testing import llama_spec, write_tiny_model
from specserve.testing.heads import (
    block,
    eagle,
    eagle_states,
    matrices,
    medusa,
    random_weights,
    small_layers,
    target_shape,
)

BLOCK = 16
LENGTH = 21  # rows of the context


def own_layers(num_layers: int = 1, vocab_size: int = 40, **more: Any) -> DecoderSpec:
    return llama_spec(
        vocab_size=vocab_size, hidden_size=64, num_layers=num_layers, num_heads=4, num_kv_heads=2, head_dim=16,
        intermediate_size=96, max_len=128, **more,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["cpu", "reference"])
def ops(request: pytest.FixtureRequest) -> Ops:
    made: Ops = KERNELS.find(request.param).create(KernelOptions(torch.device("cpu"), "float32", "none"))
    return made


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, ops: Ops) -> Decoder:
    return load_model(write_tiny_model(tmp_path_factory.mktemp("target"), "llama", seed=3), ops)


class Chain:
    """One sequence over a head's own KV."""

    def __init__(self, head: Any, ops: Ops, rows: int = 64) -> None:
        spec = head.spec
        kv = [torch.zeros((2, 8 * BLOCK, *shape)) for shape in spec.kv_shapes]
        self._runner, self._multiple = Runner(head, ops, kv, BLOCK, rows, rows), ops.row_multiple

    def write(self, start: int, hidden: list[Tensor]) -> Tensor:
        runner, model = self._runner, cast(BlockHead, self._runner.model)
        packed = pack([SequenceRows([0] * len(hidden[0]), start, range(1, 8))], self._multiple)
        plan = runner.ops.plan(packed.rows, BLOCK)
        return model.write(hidden, packed.positions, runner.kv, plan, runner.max_rows)

    def run(self, start: int, tokens: Tensor, features: Tensor | None, is_block: bool = False) -> Output:
        rows = SequenceRows(tokens.tolist(), start, range(1, 8), num_logits=len(tokens), is_block=is_block)
        self._runner.start(pack([rows], self._multiple), features)
        return self._runner.finish()


VARIANTS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3-all": {
        "has_embedding": True, "norm_before_residual": True, "norm_before_fc": True, "norm_output": True,
        "fc_bias": True,
    },
    "eagle3-fc-norms": {"fc_norms": True, "layers": own_layers(2, qk_norm=True)},
    "eagle3-target-vocabulary": {"has_head": False},
    "eagle1": {"version": 1, "fc_bias": True},
    "eagle1-norms": {"version": 1, "first_input_norm": True, "final_norm": True, "has_embedding": True},
    "eagle1-two-layers": {"version": 1, "layers": own_layers(2)},
    "next-token-layer": {
        "version": 1, "first_input_norm": True, "final_norm": True, "fc_input_norms": True, "norm_output": True,
    },
}  # fmt: skip


def spec_of(target: Decoder, **changes: Any) -> EagleSpec:
    shape = target.spec
    own = TargetShape(hidden_size=shape.hidden_size, num_layers=shape.num_layers, vocab_size=shape.vocab_size)
    three: dict[str, Any] = {"version": 3, "hidden_layers": (0, 1, 2), "has_head": True, "layers": own_layers()}
    if changes.get("version") == 1:
        three = {"hidden_layers": (), "layers": own_layers()}
    given = {**three, **changes}
    if not given.get("has_head"):
        given["layers"] = dataclasses.replace(given["layers"], vocab_size=shape.vocab_size)
    return EagleSpec(target=own, **given)


@pytest.mark.parametrize("name", VARIANTS)
def test_eagle_logits_are_the_reference_s(target: Decoder, ops: Ops, name: str) -> None:
    head = spec_of(target, **VARIANTS[name])
    weights = random_weights(head.shapes())
    generator = torch.Generator().manual_seed(1)
    hidden = [torch.randn(LENGTH, 64, generator=generator) for _ in range(len(head.hidden_layers) or 1)]
    tokens = torch.randint(head.target.vocab_size, (LENGTH + 2,), generator=generator)
    d2t = torch.arange(head.layers.vocab_size) if head.has_draft_vocab else None

    model = EagleHead(head, weights, d2t, ops, target)
    chain, states = Chain(model, ops), model.states(hidden).clone()
    embedding, lm_head = matrices(target)
    wanted_states = eagle_states(head, weights, hidden)
    torch.testing.assert_close(states, wanted_states, rtol=0, atol=1e-4)
    wanted, out = eagle(head, weights, embedding, lm_head, tokens[:LENGTH], wanted_states)

    found = chain.run(0, tokens[:9], states[:9])  # in two chunks
    torch.testing.assert_close(found.logits[:9], wanted[:9], rtol=0, atol=1e-4)
    found = chain.run(9, tokens[9:LENGTH], states[9:])
    rest = LENGTH - 9
    torch.testing.assert_close(found.logits[:rest], wanted[9:], rtol=0, atol=1e-4)
    assert found.best[:rest].tolist() == found.logits[:rest].argmax(-1).tolist()

    for depth in range(2):  # its own output stands in for the hidden state
        state = found.hidden[rest - 1 : rest].clone() if not depth else found.hidden[:1].clone()
        wanted_states = torch.cat((wanted_states, out[-1:]))
        wanted, out = eagle(head, weights, embedding, lm_head, tokens[: LENGTH + depth + 1], wanted_states)
        found = chain.run(LENGTH + depth, tokens[LENGTH + depth : LENGTH + depth + 1], state)
        torch.testing.assert_close(found.logits[:1], wanted[-1:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("num_layers", "has_anchor_inputs"), [(1, False), (2, False), (2, True)])
def test_block_logits_are_the_reference_s(
    target: Decoder, ops: Ops, num_layers: int, is_causal: bool, has_anchor_inputs: bool
) -> None:
    head = BlockSpec(
        target=target_shape(target),
        layers=small_layers(target, 40, num_layers, qk_norm=num_layers == 2),
        hidden_layers=(0, 2),
        block_size=6,
        mask_token_id=17,
        has_embedding=num_layers == 2,
        has_head=True,
        is_causal=is_causal,
        bigram_rank=8,
        has_anchor_inputs=has_anchor_inputs,
    )
    weights, generator = random_weights(head.shapes()), torch.Generator().manual_seed(1)
    hidden = [torch.randn(LENGTH, 64, generator=generator) for _ in head.hidden_layers]
    wanted, out = block(head, weights, *matrices(target), hidden, 5, 6)

    model = BlockHead(head, weights, torch.arange(40), ops, target)
    chain = Chain(model, ops)
    for start, stop in ((0, 9), (9, LENGTH)):
        states = chain.write(start, [x[start:stop] for x in hidden])
    features = None
    if has_anchor_inputs:
        last = torch.stack([states[0], states[-1]])
        features = model.anchor_inputs(np.array([3, 5]), last)[1]
    found = chain.run(LENGTH, torch.tensor([5] + [17] * 5), features, is_block=not is_causal)
    torch.testing.assert_close(found.logits[:6], wanted, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.hidden[:6], out, rtol=0, atol=1e-4)
    bias = model.bias(torch.tensor([3, 5] + [0] * (-2 % ops.row_multiple)))
    assert bias is not None
    pairs = weights["bigram_in.weight"][[3, 5]] @ weights["bigram_out.weight"].T
    torch.testing.assert_close(bias[:2], pairs, rtol=0, atol=1e-4)

    zeros, depth = np.zeros((6, 2), np.int64), np.arange(6)
    rows, before = np.stack((depth, depth % 3), 1), [5, 3]
    draws = model.draws(hash_tokens(2 * torch.arange(40)))
    for _ in range(2):  # once recorded
        drawn = draws.draw(found.logits, np.array([5, 3]), rows, np.zeros(2), zeros, found.is_replayed)
    for some, tokens, shares, second, second_shares in zip(rows, *drawn, strict=True):
        scores = wanted[some] + weights["bigram_in.weight"][before] @ weights["bigram_out.weight"].T
        before, best = tokens.tolist(), scores.softmax(-1).topk(2)
        assert [before, second.tolist()] == (2 * best.indices).T.tolist()
        for found_shares, wanted_shares in zip((shares, second_shares), best.values.T, strict=True):
            assert found_shares.tolist() == pytest.approx(wanted_shares.tolist(), rel=2e-3)


@pytest.mark.parametrize("count", [2, 7, 64])
@pytest.mark.parametrize("cached", [0, 5, 30])
def test_rows_of_a_block_see_each_other(ops: Ops, count: int, cached: int) -> None:
    """A ring of parents: every row sees what was cached and the whole block."""
    heads, d, generator = 2, 16, torch.Generator().manual_seed(count)
    kv = torch.zeros((2, 8 * BLOCK, 1, d))
    rows = -(-count // ops.row_multiple) * ops.row_multiple
    context = torch.randn(max(cached, 1), (heads + 2) * d, generator=generator)
    block = torch.randn(rows, (heads + 2) * d, generator=generator)

    def written(x: Tensor, start: int, parents: list[int]) -> tuple[Tensor, Any]:
        size = len(parents)
        plan = ops.plan(AttentionRows.pack([0, size], [start], [list(range(1, 8))], parents, ops.row_multiple), BLOCK)
        q = ops.rope_and_cache(rows_of(ops, x), None, no_rotation(len(x)), kv, plan)
        return q, plan

    if cached:
        x = torch.nn.functional.pad(context, (0, 0, 0, -cached % ops.row_multiple))
        written(x, 0, list(range(-1, cached - 1)))
    q, plan = written(block, cached, [count - 1, *range(count - 1)])
    out = numbers(ops, ops.attention(q, kv, plan, 0.25, None))[:count]
    q, k, v = block[:count].unflatten(1, (-1, d)).split((heads, 1, 1), 1)
    past_k, past_v = context[:cached].unflatten(1, (-1, d))[:, heads:].split(1, 1)
    k, v = torch.cat((past_k, k)), torch.cat((past_v, v))
    weights = (torch.einsum("rhd,cgd->rhc", q, k) * 0.25).softmax(-1)
    wanted = torch.einsum("rhc,cgd->rhd", weights, v).flatten(1)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-5)


def no_rotation(rows: int) -> Rotation:
    return Rotation(torch.zeros(rows, dtype=torch.int64), torch.ones(1, 16), torch.zeros(1, 16))


def rows_of(ops: Ops, x: Tensor) -> Tensor:
    given = ops.input_rows(*x.shape)
    given[:] = x
    return given


def numbers(ops: Ops, activation: Any) -> Tensor:
    """What a linear layer would read."""
    width = 32
    return ops.linear(activation, ops.pack(torch.eye(width))).float()


def test_joined_norms_are_norms_side_by_side(ops: Ops) -> None:
    generator = torch.Generator().manual_seed(2)
    rows = 3 * ops.row_multiple
    a, b, c = (rows_of(ops, 3 * torch.randn(rows, n, generator=generator)) for n in (20, 64, 33))
    weight = 1 + torch.randn(64, generator=generator)
    joined = ops.joined_norms([(a, None), (b, ops.pack_vector(weight)), (c, None)], 1e-5)
    found = ops.linear(joined, ops.pack(torch.eye(117))).float()
    normed = b * torch.rsqrt(b.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    torch.testing.assert_close(found, torch.cat((a, normed, c), -1), rtol=0, atol=1e-5)
    assert np.isfinite(found.numpy()).all()


@pytest.mark.parametrize("num_layers", [1, 2])
def test_medusa_logits_are_the_reference_s(target: Decoder, ops: Ops, num_layers: int) -> None:
    head = MedusaSpec(target=target_shape(target), num_heads=3, num_layers=num_layers, draft_vocab_size=40)
    weights = random_weights(head.shapes())
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    found = MedusaHead(head, weights, torch.arange(40), ops, target).logits(hidden, 2)
    hidden = target.final_norm(hidden)
    torch.testing.assert_close(found, medusa(head, weights, hidden)[:2], rtol=0, atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "granite", "gemma3"])
def test_tables_of_a_target_are_what_it_computes_with(architecture: str, ops: Ops, tmp_path: Path) -> None:
    """With its scales: a head that shares them must find the target's own numbers."""
    folder = write_tiny_model(tmp_path, architecture)
    origin, (embedding, lm_head) = TargetOrigin(folder), matrices(load_model(folder, ops))
    torch.testing.assert_close(origin.embedding(), embedding, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(origin.head(), lm_head, rtol=1e-5, atol=1e-6)
