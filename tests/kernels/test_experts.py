"""Ops of experts: where rows go, that each expert computes what a layer by itself would, and that neither company nor
threads nor recording change a bit; the native kernels on every instruction set, and those in torch."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specserve.kernels.reference import Kernels as Reference
from specserve.ops import Input
from specserve.ops.isa import choose_isa
from specserve.ops.packing import Quantized

SETS: list[str] = []
if importlib.util.find_spec("specserve.kernels._native") or os.environ.get("SPECSERVE_REQUIRE_NATIVE") == "1":
    cpu: Any = importlib.import_module("specserve.kernels.cpu")
    SETS = cpu.instruction_sets()
    SETS = SETS[SETS.index(choose_isa("auto", SETS, "native")) :]
FORMATS = ("float32", "bfloat16", "int8", "int4")
NATIVE = [f"{isa}-{weights}" for isa, weights in itertools.product(SETS, FORMATS)]
ALL = ["reference-float32", "reference-bfloat16", *NATIVE]
HIDDEN, SIZE, OUT, NUMBER, PER_TOKEN = 70, 45, 52, 11, 3
ROWS = (1, 2, 3, 8, 9, 33, 64)


def make(name: str, threads: int = 1) -> Any:
    isa, weights = name.split("-")
    if isa == "reference":
        return Reference(torch.device("cpu"), getattr(torch, weights))
    if weights.startswith("int"):
        return cpu.Kernels(torch.float32, weights, threads, isa)
    return cpu.Kernels(getattr(torch, weights), "none", threads, isa)


class Layer:
    """Random experts, and ops that run them."""

    def __init__(self, ops: Any, *, shared: bool = True, normalized: bool = True, number: int = NUMBER) -> None:
        random = torch.Generator().manual_seed(3)

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=random) / columns**0.5

        self.ops, self.normalized, self.number = ops, normalized, number
        self.router = 2 * matrix(number + shared, HIDDEN)
        self.gates = [matrix(SIZE, HIDDEN) for _ in range(number)]
        self.ups = [matrix(SIZE, HIDDEN) for _ in range(number)]
        self.downs = [matrix(OUT, SIZE) for _ in range(number)]
        self.shared = ops.pack(matrix(OUT, HIDDEN)) if shared else None
        self.packed = ops.pack_router(self.router), ops.pack_experts(self.gates, self.ups, self.downs)

    def route(self, x: Tensor) -> Any:
        return self.ops.route(x, self.packed[0], self.number, min(PER_TOKEN, self.number), self.normalized)

    def __call__(self, x: Tensor) -> Tensor:
        """Of float32 [rows, HIDDEN]."""
        rows, padded = len(x), torch.nn.functional.pad(x, (0, 0, 0, -len(x) % self.ops.row_multiple))
        found: Tensor = self.run(None, padded)
        return found[:rows].clone()

    def run(self, plan: Any, x: Tensor) -> Tensor:
        read = self.ops.quantize_activation(x)
        shared = None if self.shared is None else self.ops.linear(read, self.shared)
        found: Tensor = self.ops.experts(read, self.packed[1], self.route(x), "silu", shared)
        return found


def inputs(rows: int = 64, seed: int = 1) -> Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed))


def routing_of(found: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Experts, weights and share, whatever the kernels."""
    chosen = found.chosen if hasattr(found, "chosen") else found.experts
    return chosen.long(), found.weights, found.share


# Where rows go


@pytest.mark.parametrize("name", ["reference-float32", *(f"{isa}-int8" for isa in SETS)])
@pytest.mark.parametrize("normalized", [True, False])
def test_rows_go_to_the_best_experts(name: str, normalized: bool) -> None:
    layer, x = Layer(make(name), normalized=normalized), inputs()
    chosen, weights, share = routing_of(layer.route(x))
    scores = x.double() @ layer.router.double().T
    best = scores[:, :NUMBER].topk(PER_TOKEN)
    assert torch.equal(chosen, best.indices)
    parts = best.values.softmax(1) if normalized else scores[:, :NUMBER].softmax(1).gather(1, best.indices)
    torch.testing.assert_close(weights.double(), parts, rtol=2e-6, atol=1e-7)
    assert share is not None
    torch.testing.assert_close(share.double(), scores[:, NUMBER:].sigmoid(), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["reference-float32", *(f"{isa}-int8" for isa in SETS)])
def test_of_equal_scores_the_lower_expert_is_the_better(name: str) -> None:
    ops = make(name)
    router = ops.pack_router(torch.tensor([1.0, 3, 2, 3, 1, 2, 3, 1])[:, None] * torch.ones(8, HIDDEN) / HIDDEN)
    x = torch.ones(4, HIDDEN)
    for count, wanted in ((2, [1, 3]), (4, [1, 3, 6, 2]), (8, [1, 3, 6, 2, 5, 0, 4, 7])):
        chosen, weights, share = routing_of(ops.route(x, router, 8, count, True))
        assert chosen.tolist() == [wanted] * 4
        assert share is None
        torch.testing.assert_close(weights.sum(1), torch.ones(4))


@pytest.mark.parametrize("name", ALL)
def test_a_row_that_is_no_number_spoils_itself_alone(name: str) -> None:
    layer, x = Layer(make(name)), inputs(12)
    wanted = layer(x)
    x[5], x[7, 3] = torch.nan, torch.inf
    found = layer(x)
    others = [row for row in range(12) if row not in (5, 7)]
    assert torch.equal(found[others], wanted[others])
    assert not found[[5, 7]].isfinite().any()


# What experts compute


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shared", [True, False])
def test_they_are_layers_like_others(name: str, shared: bool) -> None:
    """Each pair of a row and an expert has the bits of that expert by itself; these are weighted and added."""
    layer, x = Layer(make(name), shared=shared), inputs(20)
    ops, read = layer.ops, layer.ops.quantize_activation(x)
    parts = zip(layer.gates, layer.ups, layer.downs, strict=True)
    alone = [
        ops.linear(ops.gated(read, ops.pack_gated(gate, up, None, None), "silu"), ops.pack(down)).float()
        for gate, up, down in parts
    ]
    chosen, weights, share = routing_of(layer.route(x))
    total = torch.zeros(20, OUT)
    for place in range(PER_TOKEN):
        part = torch.stack([alone[expert][row] for row, expert in enumerate(chosen[:, place].tolist())])
        total += weights[:, place, None] * part
    if share is not None:
        total += share * ops.linear(read, layer.shared).float()
    torch.testing.assert_close(layer(x), total, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in ALL if "portable" not in name])
def test_quantised_experts_are_packed_as_other_layers(name: str) -> None:
    """Their integers are kept where a layer's by itself are: the same bits."""
    ops, random = make(name), torch.Generator().manual_seed(3)

    def quantised(rows: int, columns: int) -> Quantized:
        ints = torch.randint(0, 16, (rows, columns), generator=random, dtype=torch.uint8)
        scales = 0.01 + 0.05 * torch.rand(rows, columns // 32, generator=random)
        return Quantized(ints, scales.half(), torch.full_like(scales, 8.0), 32)

    gates, ups = ([quantised(64, 96) for _ in range(2)] for _ in range(2))
    downs = [quantised(40, 64) for _ in range(2)]
    packed = ops.pack_experts(gates, ups, downs)
    router = ops.pack_router(torch.stack((torch.ones(96), -torch.ones(96))))
    x = torch.randn(8, 96, generator=random)
    read = ops.quantize_activation(x)
    found = ops.experts(read, packed, ops.route(x, router, 2, 1, True), "silu", None)
    parts = zip(gates, ups, downs, strict=True)
    alone = [ops.linear(ops.gated(read, ops.pack_gated(g, u, None, None), "silu"), ops.pack(d)) for g, u, d in parts]
    first = (x.sum(1) > 0)[:, None]
    assert 0 < first.sum() < 8
    assert torch.equal(found, torch.where(first, alone[0].float(), alone[1].float()))


@pytest.mark.parametrize("name", NATIVE)
def test_only_experts_that_rows_go_to_are_read(name: str) -> None:
    layer, x = Layer(make(name)), inputs(3)
    wanted = layer(x)
    chosen = set(routing_of(layer.route(x))[0].flatten().tolist())
    assert 0 < len(chosen) < NUMBER
    for memory in layer.packed[1].memory:
        for expert, part in enumerate(memory.view(NUMBER, -1)):
            if expert not in chosen:
                part.fill_(255)  # no number in any format
    assert torch.equal(layer(x), wanted)
    assert not layer(inputs()).isfinite().all(), "the rest is spoiled"


# Bits


@pytest.mark.parametrize("name", ALL)
def test_a_row_has_the_same_bits_in_any_company(name: str) -> None:
    x = inputs(130)
    for threads, normalized in ((1, True), (3, False)) if name in NATIVE else ((1, True),):
        layer = Layer(make(name, threads), normalized=normalized)
        alone = torch.cat([layer(row[None]) for row in x])
        for rows in (*ROWS, 130):
            assert torch.equal(layer(x[:rows]), alone[:rows])
            order = torch.randperm(130, generator=torch.Generator().manual_seed(rows))[:rows]
            assert torch.equal(layer(x[order]), alone[order])
        same = x[:1].expand(40, -1).contiguous()  # all go to the same
        assert torch.equal(layer(same), alone[:1].expand(40, -1))


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("number", [1, 2, NUMBER])
def test_a_recording_reads_the_routing_when_it_runs(name: str, number: int) -> None:
    layer, x = Layer(make(name, threads=2), number=number), inputs(70)
    alone = layer(x)
    recorded = layer.ops.record(layer.run, [Input(torch.float32, HIDDEN)], 70, 70, None)
    for rows, seed in ((1, 0), (70, 1), (3, 2), (64, 3), (0, 4), (2, 5), (70, 6)):
        order = torch.randperm(70, generator=torch.Generator().manual_seed(seed))[:rows]
        recorded.fill([x[order]])
        recorded.start(rows, rows, None)
        recorded.finish()
        assert torch.equal(recorded.found[:rows], alone[order])


@pytest.mark.skipif(len(SETS) < 2, reason="one instruction set")
@pytest.mark.parametrize("weights", FORMATS)
def test_instruction_sets_agree(weights: str) -> None:
    first, *others = (Layer(make(f"{isa}-{weights}"))(inputs()) for isa in SETS)
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-3, atol=6e-2 if weights != "float32" else 1e-5)


@pytest.mark.parametrize("weights", FORMATS if SETS else ())
def test_packed_experts_come_from_a_cache(weights: str) -> None:
    """Under names and in sizes that are known before a weight is read."""
    kept: dict[str, np.ndarray[Any, Any]] = {}

    def keep(name: str, shape: tuple[int, ...], dtype: torch.dtype, pack: Any) -> Tensor:
        tensor: Tensor = pack()
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        kept[name] = tensor.numpy().copy()
        return tensor

    ops = make(f"{SETS[0]}-{weights}")
    layer = Layer(ops)
    ops.pack_experts(layer.gates, layer.ups, layer.downs, keep)
    ops.pack_router(layer.router, keep)
    assert set(kept) == {"gated", "down", "router"}

    def stored(name: str, shape: tuple[int, ...], dtype: torch.dtype, pack: Any) -> Tensor:
        return torch.from_numpy(kept[name])

    again = ops.pack_experts(layer.gates, layer.ups, layer.downs, stored)
    layer.packed = ops.pack_router(layer.router, stored), again
    assert torch.equal(layer(inputs()), Layer(ops)(inputs()))


@pytest.mark.parametrize("name", ALL)
def test_rows_go_where_somebody_else_sends_them(name: str) -> None:
    """What `route` decides, told to `routed`, comes to the same; so do a router's scores by themselves."""
    layer = Layer(make(name), shared=False)
    x = torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(8))
    chosen, weights, _ = (None if each is None else torch.as_tensor(each) for each in routing_of(layer.route(x)))
    assert chosen is not None and weights is not None
    expected = layer(x)
    ops = layer.ops
    routing = ops.routed(chosen.int().contiguous(), weights.float().contiguous())
    found = ops.experts(ops.quantize_activation(x), layer.packed[1], routing, "silu", None)
    assert torch.equal(found, expected)
    together = ops.router_scores(x, layer.packed[0]).clone()
    assert torch.allclose(together, x @ layer.router.T, atol=1e-5)
    for count in (1, 3, 8):
        part = torch.nn.functional.pad(x[:count], (0, 0, 0, -count % ops.row_multiple))
        assert torch.equal(ops.router_scores(part, layer.packed[0])[:count], together[:count])
