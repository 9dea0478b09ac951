"""Flash attention of other packages over the paged cache (arXiv 2307.08691), for steps of prompts and chains: FA3, FA2
or torch's varlen_attn, by what their signatures take and not by their versions.

None of them has the promise of specserve.ops: they choose their tiles by the longest sequence of a step, so a row's
bits depend on the others. None has masks, so trees, blocks and ALiBi stay with _triton_attention.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

_SPLIT = 256  # logical positions, of which a plan says how many splits its longest context has


class Plan(Protocol):
    """Of chains: as _triton_plan.PlanTensors."""

    row_seq: Tensor
    visible: Tensor
    numbers: Tensor
    block_size: int
    max_splits: int


class Sequences(NamedTuple):
    """The sequences of a step as flash attention wants them: int32 on the device. There are as many as rows, all but
    the first ones empty, so that shapes do not depend on how rows are shared out."""

    starts: Tensor  # [rows + 1] the first row of each
    lengths: Tensor  # [rows] keys that its last row sees
    tables: Tensor  # [rows, blocks] block ids; of those beyond its length any
    most_keys: int

    @classmethod
    def of(cls, plan: Plan) -> Sequences:
        """Rows of a sequence are neighbours, and padding comes after all of them. Nothing is read on the host."""
        rows, is_row = len(plan.visible), plan.visible > 0
        is_first = is_row & F.pad(plan.row_seq[1:] != plan.row_seq[:-1], (1, 0), value=True)
        seq = (is_first.cumsum(0) - 1).clamp(min=0)
        nothing = torch.zeros(rows, dtype=torch.int32, device=plan.visible.device)
        counts = nothing.scatter_add(0, seq, is_row.int())
        lengths = nothing.scatter_reduce(0, seq, plan.visible, "amax")
        first_block = nothing.scatter_reduce(0, seq, plan.row_seq * is_row, "amax")
        num_blocks = -(-plan.max_splits * _SPLIT // plan.block_size)
        at = first_block[:, None] + torch.arange(num_blocks, device=nothing.device)
        tables = plan.numbers[at.clamp(max=len(plan.numbers) - 1)]
        return cls(F.pad(counts.cumsum(0), (1, 0)).int(), lengths, tables, num_blocks * plan.block_size)


Run = Callable[[Tensor, Tensor, Tensor, Sequences, float, int | None], Tensor]


class Flash(NamedTuple):
    """One of them. `run` takes queries [rows, heads, d], pages of keys and of values [blocks, block_size, kv_heads, d],
    the sequences, the scale and the window -> [rows, heads, d]. `pages` are the sizes of blocks that it takes: the
    multiples of this."""

    name: str
    pages: int
    run: Run

    def attention(
        self, q: Tensor, kv: Tensor, sequences: Sequences, block_size: int, scale: float, window: int | None
    ) -> Tensor:
        """As _triton_attention.attention, of chains: [rows, heads * d]."""
        keys, values = kv.view(2, -1, block_size, *kv.shape[2:])
        return self.run(q.to(kv.dtype), keys, values, sequences, scale, window).flatten(1)


def _of_torch() -> Flash:
    varlen: Any = _found("torch.nn.attention.varlen", "varlen_attn")
    fixed = _taking(varlen, ("scale", "window_size", "enable_gqa", "seqused_k", "block_table"))

    def run(q: Tensor, k: Tensor, v: Tensor, own: Sequences, scale: float, window: int | None) -> Tensor:
        """Keys have no borders of their own where there is a block table."""
        found: Tensor = varlen(
            q, k, v, own.starts, None, len(q), own.most_keys, scale=scale, window_size=_window(window),
            enable_gqa=True, seqused_k=own.lengths, block_table=own.tables, **fixed,
        )  # fmt: skip
        return found

    return Flash("torch", 256, run)


def _of_fa2() -> Flash:
    varlen: Any = _found("flash_attn", "flash_attn_varlen_func")
    _taking(varlen, ("softmax_scale", "causal", "window_size", "block_table"))

    def run(q: Tensor, k: Tensor, v: Tensor, own: Sequences, scale: float, window: int | None) -> Tensor:
        ends = F.pad(own.lengths.cumsum(0), (1, 0)).int()
        found: Tensor = varlen(
            q, k, v, own.starts, ends, len(q), own.most_keys, softmax_scale=scale, causal=True,
            window_size=_window(window), block_table=own.tables,
        )  # fmt: skip
        return found

    return Flash("fa2", 256, run)


def _of_fa3() -> Flash:
    cached: Any = _found("flash_attn_interface", "flash_attn_with_kvcache")
    names = ("cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q", "softmax_scale", "causal", "window_size")
    fixed = _taking(cached, names)

    def run(q: Tensor, k: Tensor, v: Tensor, own: Sequences, scale: float, window: int | None) -> Tensor:
        found: Tensor = cached(
            q, k, v, cache_seqlens=own.lengths, page_table=own.tables, cu_seqlens_q=own.starts, max_seqlen_q=len(q),
            softmax_scale=scale, causal=True, window_size=_window(window), **fixed,
        )  # fmt: skip
        return found

    return Flash("fa3", 1, run)


_MAKERS = {"fa3": _of_fa3, "fa2": _of_fa2, "torch": _of_torch}  # the fastest first


def candidates(dtype: torch.dtype, block_size: int) -> dict[str, Flash | str]:
    """By name, the fastest first: one that can be tried, or what it lacks, as what follows its name in a sentence."""
    found: dict[str, Flash | str] = {}
    for name, make in _MAKERS.items():
        try:
            found[name] = flash = make()
        except _LackingError as error:
            found[name] = str(error)
            continue
        if dtype not in (torch.bfloat16, torch.float16):
            found[name] = "multiplies bfloat16 alone: use --dtype bfloat16"
        elif block_size % flash.pages:
            found[name] = f"reads blocks of {flash.pages} tokens or multiples: use --block-size {flash.pages}"
    return found


class _LackingError(Exception):
    """A package that is not there, or has other parameters than this file knows."""


def _found(module: str, function: str) -> Any:
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, OSError) as error:  # OSError: built against libraries that are not there
        raise _LackingError(f"cannot be imported ({error})") from None


def _taking(function: Any, names: Sequence[str]) -> dict[str, int]:
    """What to fix beside: one split of the context, where one can say so, as splits would follow from the batch."""
    taken = inspect.signature(function).parameters
    if missing := [name for name in names if name not in taken]:
        raise _LackingError(f"takes no {', '.join(missing)} in the release that is installed")
    return {"num_splits": 1} if "num_splits" in taken else {}


def _window(window: int | None) -> tuple[int, int]:
    """Positions before and after its own that a row sees."""
    return (-1, 0) if window is None else (window - 1, 0)
