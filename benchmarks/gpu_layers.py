"""The layers part of gpu.py: whole layers as a step runs them, with kernels one after the other and overlapping."""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
from gpu_kernels import BLOCK_SIZE, DEVICE, chain_plan, normal
from gpu_timing import copy_gb_per_s, replay_us
from torch import Tensor

import specserve.kernels._triton_attention as attention
import specserve.kernels._triton_linear as linear
import specserve.kernels._triton_rows as rows_of

if TYPE_CHECKING:
    from gpu import Report

ROWS = (1, 8, 16, 32, 64)
CONTEXT = 512
REPLAYS = 20


class Sizes(NamedTuple):
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    d: int
    inner: int


MODELS = (
    Sizes("135M", 30, 576, 9, 3, 64, 1536),
    Sizes("1.5B", 28, 1536, 12, 2, 128, 8960),
    Sizes("8B", 8, 4096, 32, 8, 128, 14336),
)


class Layer:
    """Random weights, and a KV cache of its own."""

    def __init__(self, sizes: Sizes, num_blocks: int) -> None:
        hidden, inner, d = sizes.hidden, sizes.inner, sizes.d

        def weight(n: int, k: int) -> Tensor:
            return normal(n, k) / math.sqrt(k)

        self.norms = [torch.ones(hidden, device=DEVICE) for _ in range(2)]
        self.qkv = weight((sizes.heads + 2 * sizes.kv_heads) * d, hidden)
        self.o = weight(hidden, sizes.heads * d)
        self.gate_up = weight(2 * inner, hidden)
        self.down = weight(hidden, inner)
        self.kv = normal(2, num_blocks * BLOCK_SIZE, sizes.kv_heads, d)

    @property
    def num_bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in (self.qkv, self.o, self.gate_up, self.down))


class Model:
    """Rows of one sequence through all layers."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, num_blocks = sizes, (CONTEXT + 64) // BLOCK_SIZE
        self.layers = [Layer(sizes, num_blocks) for _ in range(sizes.layers)]
        self.plan = chain_plan(CONTEXT, max(ROWS), num_blocks)
        self.cos, self.sin = (normal(CONTEXT + 64, sizes.d, dtype=torch.float32) for _ in range(2))
        self.positions = self.plan.visible.long() - 1
        self.slots = self.plan.paths[self.positions].long()
        self.start = normal(max(ROWS), sizes.hidden, dtype=torch.float32)

    def run(self, rows: int) -> Tensor:
        """The residual stream behind the last layer, [rows, hidden]."""
        plan, positions, slots = self.plan.part(0, rows), self.positions[:rows], self.slots[:rows]
        broken = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
        residual = self.start[:rows].clone()
        delta: Tensor | None = None
        for layer in self.layers:
            x = rows_of.add_rms_norm(residual, delta, None, layer.norms[0], 1e-5, layer.qkv.dtype)
            qkv = linear.linear(x, layer.qkv)
            q = rows_of.rope_and_cache(qkv, None, positions, self.cos, self.sin, layer.kv, slots, broken)
            seen = attention.attention(q, layer.kv, plan, self.sizes.d**-0.5, None)
            x = rows_of.add_rms_norm(residual, linear.linear(seen, layer.o), None, layer.norms[1], 1e-5)
            delta = linear.linear(linear.gated(x, layer.gate_up, None, "silu"), layer.down)
        assert delta is not None
        return residual.add_(delta)


def measure_layers(report: Report) -> None:
    torch.manual_seed(0)
    bandwidth = report.section("copy bandwidth, GB/s", copy_gb_per_s)
    for sizes in MODELS:
        report.section(f"layers of {sizes.name}", partial(measure_model, sizes, float(bandwidth)))


def measure_model(sizes: Sizes, bandwidth: float) -> dict[str, Any]:
    """Microseconds a layer, by number of rows; whether overlapping changes bits, and whether each row has those of one
    row alone."""
    model = Model(sizes)
    floor = model.layers[0].num_bytes / bandwidth / 1e3
    found: dict[str, Any] = {"floor_us": floor}
    alone = torch.cat([model.run(1)])
    for rows in ROWS:
        plain_us, plain = replayed(model, rows, overlaps=False)
        overlapping_us, overlapping = replayed(model, rows, overlaps=True)
        same = all(torch.equal(each, plain[0]) for each in [*plain, *overlapping])
        is_alone = torch.equal(plain[0][:1], alone)
        found[str(rows)] = {"us": plain_us, "overlapping_us": overlapping_us, "same": same, "first_as_alone": is_alone}
        print(
            f"{sizes.name} {rows:3} rows: {plain_us:.2f} us a layer, overlapping {overlapping_us:.2f} (floor "
            f"{floor:.2f}); same bits in {REPLAYS} replays of both: {same}; first row as alone: {is_alone}",
            flush=True,
        )
    return found


def replayed(model: Model, rows: int, overlaps: bool) -> tuple[float, list[Tensor]]:
    """Time of a layer, and what each replay returned."""
    chosen = {"OVERLAP": True, "launch_pdl": True} if overlaps else {"OVERLAP": False}
    with ExitStack() as stack:
        for module in (attention, linear, rows_of):
            stack.enter_context(mock.patch.object(module, "overlap", return_value=chosen))
        model.run(rows)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model.run(rows)
    times, outs = [], []
    for _ in range(REPLAYS):
        times.append(replay_us(graph) / model.sizes.layers)
        outs.append(out.clone())
    return median(times), outs
