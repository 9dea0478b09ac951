"""The kernels part of gpu.py: bits of one row among others, times, and what other tiles would take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from gpu_timing import copies_of, copy_gb_per_s, graph_us
from torch import Tensor
from torch.nn import functional as F

import specserve.kernels._triton_attention as attention
import specserve.kernels._triton_linear as linear
import specserve.kernels._triton_rows as rows_of

if TYPE_CHECKING:
    from gpu import Report

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
ROWS = (1, 8, 16, 32, 64, 128, 2048)
BITS_ROWS = (*range(1, 65), 65, 100, 128, 129, 300)
ATTENTION_ROWS = (1, 2, 7, 16, 33, 64)
CONTEXTS = (1, 255, 256, 257, 511, 512, 513, 1000, 1985)
BLOCK_SIZE = 16


class Shape(NamedTuple):
    """A weight [n, k] of a model, or two of them whose product is gated."""

    name: str
    n: int
    k: int
    is_gated: bool = False

    def weight(self) -> Tensor:
        return normal(self.n * (2 if self.is_gated else 1), self.k) / math.sqrt(self.k)

    def run(self, x: Tensor, weight: Tensor, cut: linear.Tiles | None = None) -> Tensor:
        if cut is None:
            cut = linear.tiles_for(len(x), self.n, self.k, 2, 2 if self.is_gated else 1)
        if self.is_gated:
            joined: Tensor = linear.gated_in(cut, x, weight, None, "silu")
            return joined
        out: Tensor = linear.linear_in(cut, x, weight)
        return out

    @property
    def num_bytes(self) -> int:
        """Of the weight."""
        return self.n * self.k * 2 * (2 if self.is_gated else 1)


SHAPES = (
    Shape("135M qkv", 960, 576),
    Shape("135M o", 576, 576),
    Shape("135M gate/up", 1536, 576, True),
    Shape("135M down", 576, 1536),
    Shape("135M head", 49152, 576),
    Shape("1.5B qkv", 2048, 1536),
    Shape("1.5B o", 1536, 1536),
    Shape("1.5B gate/up", 8960, 1536, True),
    Shape("1.5B down", 1536, 8960),
    Shape("1.5B head", 151936, 1536),
    Shape("8B qkv", 6144, 4096),
    Shape("8B o", 4096, 4096),
    Shape("8B gate/up", 14336, 4096, True),
    Shape("8B down", 4096, 14336),
)
HEADS = ((9, 3, 64), (12, 2, 128), (32, 8, 128))  # heads, kv heads, size: of the same models
# Beside the tiles that `tiles_for` chooses, by rows: (block_n, block_k or 0 for the shape's, num_warps, num_stages).
CANDIDATES = {
    1: ((16, 0, 2, 8), (64, 0, 4, 4), (32, 256, 4, 4), (16, 256, 4, 8), (8, 256, 4, 8), (8, 0, 2, 12)),
    32: ((16, 0, 2, 6), (32, 0, 2, 6), (32, 0, 4, 4), (32, 0, 8, 4), (64, 0, 4, 4), (64, 0, 8, 4)),
    64: ((8, 256, 4, 6), (16, 256, 4, 5), (32, 0, 4, 5), (64, 0, 4, 4), (64, 0, 8, 4)),
}
ATTENTION_CUTS = tuple(
    attention.Cut(*cut)
    for cut in ((64, 2, 3), (64, 4, 2), (128, 4, 2), (128, 8, 2), (256, 4, 1), (256, 8, 1), (32, 2, 4))
)


def normal(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    made: Tensor = torch.randn(*shape, device=DEVICE, dtype=dtype)
    return made


def own(x: Tensor, a: int, b: int) -> Tensor:
    """Rows [a, b) at an address of their own, as far aligned as an engine's: Triton compiles for that."""
    return x if b - a == len(x) else x[a:b].clone()


def measure_kernels(report: Report) -> None:
    torch.manual_seed(0)
    bandwidth = report.section("copy bandwidth, GB/s", copy_gb_per_s)
    report.section("one empty launch, us", empty_launch)
    report.section("rows that differ from one row alone, linear: ours and cuBLAS", linear_bits)
    report.section("rows that differ from one row alone, other kernels", other_bits)
    report.section("linear, us", lambda: linear_times(float(bandwidth)))
    report.section("attention, us", attention_times)
    report.section("rows, us", rows_times)
    report.section("attention with other tiles, us", other_attention)
    report.section("linear with other tiles, us", lambda: other_tiles(float(bandwidth)))


@triton.jit
def _nothing(x):  # type: ignore[no-untyped-def]
    return


def empty_launch() -> dict[str, float]:
    """Programs that do nothing: what a launch costs in a graph."""
    x = torch.zeros(1, device=DEVICE)

    def launch(programs: int) -> None:
        _nothing[(programs,)](x, num_warps=4)

    found = {str(n): round(graph_us([partial(launch, n)], 256), 3) for n in (1, 132, 1056)}
    print(found, flush=True)
    return found


def differing(run: Callable[[int, int], Tensor], most_rows: int = max(BITS_ROWS)) -> list[int]:
    """Numbers of rows that give any row other bits than alone; run(a, b) computes rows [a, b)."""
    alone = torch.cat([run(r, r + 1) for r in range(min(64, most_rows))])
    return [rows for rows in BITS_ROWS if rows <= most_rows and not torch.equal(run(0, rows)[:64], alone[:rows])]


def brief(numbers: Sequence[int]) -> str:
    """Runs of numbers as first-last."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts) or "none"


def linear_bits() -> dict[str, dict[str, str]]:
    found = {}
    for shape in SHAPES:
        x, weight = normal(max(BITS_ROWS), shape.k), shape.weight()
        mine = differing(lambda a, b: shape.run(x[a:b], weight))  # noqa: B023
        theirs = differing(lambda a, b: F.linear(x[a:b], weight))  # noqa: B023
        expected = F.linear(x.float(), weight.float())
        if shape.is_gated:
            gate, up = expected.chunk(2, -1)
            expected = F.silu(gate) * up
        error = (shape.run(x, weight).float() - expected).abs().max().item()
        found[shape.name] = {"ours": brief(mine), "cublas": brief(theirs), "largest error": f"{error:.4f}"}
        print(f"{shape.name:14} {found[shape.name]}", flush=True)
    return found


@dataclass
class Plan:
    """Rows of sequences, chains as tables or as paths."""

    row_seq: Tensor
    visible: Tensor
    prefix: Tensor
    path_start: Tensor
    paths: Tensor
    tables: Tensor
    max_splits: int
    block_size: int = BLOCK_SIZE

    def part(self, a: int, b: int) -> Plan:
        row_seq, visible, prefix = (own(each, a, b) for each in (self.row_seq, self.visible, self.prefix))
        path_start = own(self.path_start, a, b)
        return Plan(row_seq, visible, prefix, path_start, self.paths, self.tables, self.max_splits)


def chain_plan(context: int, rows: int, num_blocks: int, as_paths: bool = False, seqs: int = 1) -> Plan:
    """The last of `rows` rows, dealt to sequences in turn, sees `context` positions and those of the rows before."""
    blocks = -(-(context + rows) // BLOCK_SIZE)
    tables = torch.stack([torch.randperm(num_blocks, device=DEVICE)[:blocks] for _ in range(seqs)]).int()
    row_seq = torch.arange(rows, device=DEVICE, dtype=torch.int32) % seqs
    visible = context + torch.arange(rows, device=DEVICE, dtype=torch.int32) // seqs
    slots = (tables[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=DEVICE, dtype=torch.int32)).flatten(1)
    prefix = torch.clamp(visible, max=context // 2) if as_paths else visible
    path_start = row_seq * slots.shape[1] + prefix
    splits = -(-(context + rows) // attention.SPLIT)
    return Plan(row_seq, visible, prefix, path_start, slots.flatten().contiguous(), tables, splits)


def attention_bits() -> Iterator[tuple[str, str]]:
    """By number of rows, with splits in programs of their own or not, with paths or without, in a window or not."""
    most = max(ATTENTION_ROWS)
    for heads, kv_heads, d in HEADS:
        kv, q = normal(2, 256 * BLOCK_SIZE, kv_heads, d), normal(most, heads, d, dtype=torch.float32)
        for window in (None, 300):
            bad = []
            for context in CONTEXTS:
                torch.manual_seed(context)
                plan = chain_plan(context, most, 256)
                torch.manual_seed(context)
                paths = chain_plan(context, most, 256, as_paths=True)

                def run(is_looped: bool, plan: Plan, a: int, b: int) -> Tensor:
                    part = plan.part(a, b)
                    out: Tensor = attention.attention_in(is_looped, q[a:b], kv, part, d**-0.5, window)  # noqa: B023
                    return out

                alone = torch.cat([run(False, plan, r, r + 1) for r in range(most)])
                for rows in ATTENTION_ROWS:
                    for how in (False, True):
                        for name, some in (("chain", plan), ("path", paths)):
                            if not torch.equal(run(how, some, 0, rows), alone[:rows]):
                                bad.append(f"{name} {context}x{rows}{' looped' if how else ''}")
            yield f"attention {heads}/{kv_heads}x{d} window {window}", "; ".join(bad) or "none"


def other_bits() -> dict[str, str]:
    found = dict(attention_bits())
    for hidden in (576, 1536, 4096):
        residual, delta, weight = normal(64, hidden, dtype=torch.float32), normal(64, hidden), normal(hidden).float()

        def norm(a: int, b: int) -> Tensor:
            out: Tensor = rows_of.add_rms_norm(residual[a:b].clone(), delta[a:b], None, weight, 1e-5)  # noqa: B023
            return out

        found[f"add and norm {hidden}"] = brief(differing(norm, 64))
    scores = normal(64, 49152).float()  # with equals
    found["argmax"] = brief(differing(lambda a, b: rows_of.argmax(scores[a:b]), 64))
    found["argmax, other than torch's"] = brief((rows_of.argmax(scores) != scores.argmax(-1)).nonzero()[:, 0].tolist())
    rope = Rope(64, 9, 3, 64)
    found["rope, q"] = brief(differing(lambda a, b: rope.run(a, b), 64))
    rope.run(0, 64)
    whole = rope.kv.clone()
    rope.kv.zero_()
    for r in range(64):
        rope.run(r, r + 1)
    found["rope, kv"] = "none" if torch.equal(whole, rope.kv) else "differs"
    for name, bad in found.items():
        print(f"{name:36} {bad[:300]}", flush=True)
    return found


class Rope:
    """Rows for `rope_and_cache`."""

    def __init__(self, rows: int, heads: int, kv_heads: int, d: int) -> None:
        self.qkv = normal(rows, (heads + 2 * kv_heads) * d)
        self.norms = rows_of.Norms(normal(d).float(), normal(d).float(), 1e-6)
        self.numbers = torch.arange(rows, device=DEVICE)
        self.cos, self.sin = normal(1024, d, dtype=torch.float32), normal(1024, d, dtype=torch.float32)
        self.kv = torch.zeros(2, 1024, kv_heads, d, device=DEVICE, dtype=DTYPE)
        self.broken = torch.zeros(rows, dtype=torch.bool, device=DEVICE)

    def run(self, a: int, b: int) -> Tensor:
        positions = own(self.numbers, a, b)
        tables = (positions, self.cos, self.sin, self.kv, positions, own(self.broken, a, b))
        q: Tensor = rows_of.rope_and_cache(self.qkv[a:b], self.norms, *tables)
        return q


def each_weight(shape: Shape) -> list[Tensor]:
    return [shape.weight() for _ in range(copies_of(shape.num_bytes))]


def linear_us(shape: Shape, x: Tensor, weights: list[Tensor], run: Callable[[Tensor, Tensor], object]) -> float:
    return graph_us([partial(run, x, weight) for weight in weights])


def linear_times(bandwidth: float) -> dict[str, Any]:
    """Ours, and in brackets torch's (two products' worth of a gated pair, without what joins them); then the share of
    copy bandwidth at which ours reads the weights."""
    found: dict[str, Any] = {}
    print(f"{'':14} " + "".join(f"{f'{m} rows':>24}" for m in ROWS))
    for shape in SHAPES:
        weights, found[shape.name] = each_weight(shape), {}
        for rows in ROWS:
            x = normal(rows, shape.k)
            mine, theirs = linear_us(shape, x, weights, shape.run), linear_us(shape, x, weights, F.linear)
            share = shape.num_bytes / mine / 1e3 / bandwidth
            found[shape.name][rows] = {"us": mine, "cublas_us": theirs, "share": share}
        cells = (f"{c['us']:.2f} ({c['cublas_us']:.2f}) {c['share']:.2f}" for c in found[shape.name].values())
        print(f"{shape.name:14} " + "".join(f"{cell:>24}" for cell in cells), flush=True)
    return found


def other_tiles(bandwidth: float) -> dict[str, Any]:
    """By number of rows: what every candidate takes; "bits" says whether it has those of the tiles in use."""
    found: dict[str, Any] = {}
    for shape in SHAPES:
        weights, found[shape.name] = each_weight(shape), {}
        for rows, candidates in CANDIDATES.items():
            x = normal(rows, shape.k)
            used = linear.tiles_for(rows, shape.n, shape.k, 2, 2 if shape.is_gated else 1)
            expected = shape.run(x, weights[0], used)
            tried: list[dict[str, Any]] = []
            for cut in [used, *_cuts(used, candidates, shape)]:
                us = linear_us(shape, x, weights, partial(shape.run, cut=cut))
                same = torch.equal(shape.run(x, weights[0], cut), expected)
                tried.append({"us": us, "tiles": list(cut), "bits": same})
            best = min(tried, key=lambda each: each["us"])
            found[shape.name][rows] = tried
            share = shape.num_bytes / best["us"] / 1e3 / bandwidth
            other = [each["tiles"] for each in tried if not each["bits"]]
            print(
                f"{shape.name:14} {rows:3} rows: used {tuple(used)} {tried[0]['us']:.2f}; best {tuple(best['tiles'])} "
                f"{best['us']:.2f} ({share:.2f} of bandwidth); other bits: {other or 'none'}",
                flush=True,
            )
    return found


def _cuts(used: linear.Tiles, candidates: Sequence[tuple[int, int, int, int]], shape: Shape) -> Iterator[linear.Tiles]:
    for block_n, block_k, num_warps, num_stages in candidates:
        cut = linear.Tiles(used.block_m, block_n, block_k or used.block_k, num_warps, num_stages)
        fits = cut.shared_memory(2, 2 if shape.is_gated else 1) <= 220 * 1024
        if cut != used and fits and shape.k >= cut.block_k:
            yield cut


def attention_times() -> dict[str, Any]:
    """Rows of one sequence, or as many sequences as rows; in brackets torch's attention of the same size, whose keys
    and values lie in a row and of which each row sees all."""
    found: dict[str, Any] = {}
    for heads, kv_heads, d in HEADS:
        for context in (512, 2048, 8192):
            num_blocks = context // BLOCK_SIZE + 8
            kvs = [normal(2, num_blocks * BLOCK_SIZE, kv_heads, d) for _ in range(16)]
            cells = found[f"{heads}/{kv_heads}x{d}, {context}"] = {}
            for rows, seqs in ((1, 1), (8, 1), (64, 1), (8, 8)):
                plan, q = chain_plan(context, rows, num_blocks, seqs=seqs), normal(rows, heads, d, dtype=torch.float32)
                mine = graph_us([partial(attention.attention, q, kv, plan, d**-0.5, None) for kv in kvs])
                cells[f"{rows} rows of {seqs}"] = {"us": mine, "torch_us": _torch_attention(q, kvs, context, seqs)}
            shown_cells = (f"{name}: {c['us']:.1f} ({c['torch_us']:.1f})" for name, c in cells.items())
            print(f"{heads}/{kv_heads}x{d}, {context:5}: " + "; ".join(shown_cells), flush=True)
    return found


def other_attention() -> dict[str, Any]:
    """Splits in programs of their own; they decide about bits, so one is chosen for all numbers of rows."""
    found: dict[str, Any] = {}
    for heads, kv_heads, d in HEADS:
        for context in (512, 2048):
            num_blocks = context // BLOCK_SIZE + 8
            kvs = [normal(2, num_blocks * BLOCK_SIZE, kv_heads, d) for _ in range(16)]
            cells = found[f"{heads}/{kv_heads}x{d}, {context}"] = {}
            for cut in dict.fromkeys((attention.cut_for(d, 2), *ATTENTION_CUTS)):
                for rows in (1, 8, 64):
                    plan, q = chain_plan(context, rows, num_blocks), normal(rows, heads, d, dtype=torch.float32)
                    run = [partial(attention.attention_in, False, q, kv, plan, d**-0.5, None, cut=cut) for kv in kvs]
                    cells.setdefault(str(tuple(cut)), []).append(round(graph_us(run), 2))
            print(f"{heads}/{kv_heads}x{d}, {context:5}, 1, 8, 64 rows: {cells}", flush=True)
    return found


def _torch_attention(q: Tensor, kvs: list[Tensor], context: int, seqs: int) -> float:
    rows, heads, d = q.shape
    queries = q.to(DTYPE).view(seqs, rows // seqs, heads, d).transpose(1, 2)
    inputs = [kv[:, :context].transpose(1, 2)[:, None].expand(2, seqs, -1, -1, -1) for kv in kvs]
    attend = partial(F.scaled_dot_product_attention, enable_gqa=True)
    return graph_us([partial(attend, queries, k, v) for k, v in inputs])


def rows_times() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rows in (1, 16, 64):
        cells = {}
        for hidden in (576, 1536, 4096):
            residual, delta, weight = normal(rows, hidden).float(), normal(rows, hidden), normal(hidden).float()
            norm = partial(rows_of.add_rms_norm, residual, delta, None, weight, 1e-5)
            cells[f"add and norm {hidden}"] = graph_us([norm], 64)
        for heads in HEADS:
            rope = Rope(rows, *heads)
            cells[f"rope {heads[0]}/{heads[1]}x{heads[2]}"] = graph_us([partial(rope.run, 0, rows)], 64)
        for vocab in (49152, 151936):
            scores = normal(rows, vocab, dtype=torch.float32)
            cells[f"argmax {vocab}"] = graph_us([partial(rows_of.argmax, scores)], 64)
        table, ids = normal(49152, 576), torch.arange(rows, device=DEVICE)
        cells["embed 576"] = graph_us([partial(rows_of.embed, ids, table, 1.0)], 64)
        found[str(rows)] = cells
        print(f"{rows} rows: " + "; ".join(f"{name} {us:.2f}" for name, us in cells.items()), flush=True)
    return found
