"""The plan of a step for the Triton kernels: made on the host as arrays, read on the device as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.ops import AttentionRows

SPLIT = 256  # logical positions that one program of attention reads: whole tiles
# The arrays of a plan that have a number a row, and that of a row of padding, which sees nothing and writes nowhere.
PARTS = {"write_slots": -1, "row_seq": 0, "visible": 0, "prefix": 0, "path_start": 0}


@dataclass(slots=True)
class PlanTensors:
    """A plan where the kernels read it. `tables` and `paths` are the same flat list of numbers, and so a sequence is
    named by where its block ids begin there: what is copied is as long as what a step uses, at addresses that stay."""

    write_slots: Tensor  # int64 [rows], where each row's keys and values go; -1: nowhere, padding
    row_seq: Tensor  # int32 [rows], the row of `tables` where its sequence's block ids begin
    visible: Tensor  # int32 [rows], how many logical positions a row sees, its own included; 0: padding
    prefix: Tensor  # int32 [rows], logical positions below this lie where `tables` says
    path_start: Tensor  # int32 [rows], position j >= prefix has the KV slot paths[path_start + j - prefix]
    numbers: Tensor  # int32 [any], block ids and KV slots
    broken: Tensor  # bool [rows], whose keys or values were NaN or infinite in any layer
    block_size: int
    max_splits: int  # that the context of any row may have
    is_chain: bool = False  # whether there are neither trees nor blocks, and flash attention may be used
    sequences: Any = None  # what that wants to know of them, made by the first layer
    is_used: bool = False

    @property
    def tables(self) -> Tensor:
        """int32 [any, 1]: rows one number apart, so that row `row_seq` goes on with the rest of its block ids."""
        return self.numbers[:, None]

    @property
    def paths(self) -> Tensor:
        return self.numbers

    def reach(self, max_len: int) -> None:
        """A layer is run, and no row is at a position from `max_len` on."""
        self.is_used, self.max_splits = True, min(self.max_splits, -(-max_len // SPLIT))


@dataclass(slots=True)
class Found:
    """Which rows of a step were broken, on its way to the host."""

    flags: NDArray[np.bool_]  # [rows] in memory that the device writes to
    copied: torch.cuda.Event


class Plan:
    """The arrays of one step, of as many rows as it has, as PlanTensors names them."""

    def __init__(self, rows: AttentionRows, block_size: int) -> None:
        starts, cached, tables, parents = rows.query_starts, rows.cached, rows.block_tables, rows.parents
        self.num_rows, self.block_size = rows.num_rows, block_size
        counts = np.diff(starts)
        seq = np.repeat(np.arange(len(counts)), counts)  # of each row
        own = np.arange(len(seq)) - starts[seq]  # the row's number within its sequence
        index = cached[seq] + own
        num_blocks = -(-(cached + counts) // block_size)
        used = tables[np.arange(tables.shape[1]) < num_blocks[:, None]]  # block ids, sequence after sequence
        first_block = np.cumsum(num_blocks) - num_blocks
        write_slots = tables[seq, index // block_size] * np.int64(block_size) + index % block_size
        visible, path_start = index + 1, np.zeros_like(index)
        prefix = visible.copy()
        self._paths: list[int] = []
        self.is_chain = True
        for s in np.flatnonzero(np.bincount(seq[parents != own - 1], minlength=len(counts))).tolist():
            here, self.is_chain = slice(starts[s], starts[s + 1]), False
            if rows.is_block(s):
                visible[here] = prefix[here] = cached[s] + counts[s]
                continue
            depths, at = _paths(parents[here].tolist(), write_slots[here].tolist(), self._paths)
            visible[here], prefix[here], path_start[here] = cached[s] + np.array(depths), cached[s], at
        path_start += len(used)
        padded = (write_slots, first_block[seq], visible, prefix, path_start)
        short = rows.num_rows - len(seq)
        self.arrays: Sequence[NDArray[np.integer]] = padded
        if short:
            filled = zip(PARTS.values(), padded, strict=True)
            self.arrays = [np.pad(x, (0, short), constant_values=padding) for padding, x in filled]
        self.numbers = np.concatenate((used, self._paths)).astype(np.int32) if self._paths else used
        self.num_splits = -(-int(visible.max(initial=1)) // SPLIT)
        self.found: Found | None = None
        self._tensors: PlanTensors | None = None

    def tensors(self, device: torch.device) -> PlanTensors:
        """On the device, at addresses of its own: for ops that run one by one."""
        if self._tensors is None:
            slots = torch.from_numpy(self.arrays[0]).to(device)
            others = (torch.from_numpy(x.astype(np.int32)).to(device) for x in (*self.arrays[1:], self.numbers))
            row_seq, visible, prefix, path_start, numbers = others
            broken = torch.zeros(self.num_rows, dtype=torch.bool, device=device)
            parts = row_seq, visible, prefix, path_start, numbers, broken
            self._tensors = PlanTensors(slots, *parts, self.block_size, self.num_splits, self.is_chain)
        return self._tensors

    def broken_rows(self) -> list[int]:
        """The one thing that the host waits for: of a step that has run, ascending."""
        if self.found is not None:
            self.found.copied.synchronize()
            return np.flatnonzero(self.found.flags).tolist()
        assert self._tensors is not None, "its step has run"
        return np.flatnonzero(self._tensors.broken.cpu().numpy()).tolist()


def _paths(parents: list[int], slots: list[int], into: list[int]) -> tuple[list[int], list[int]]:
    """The depth of each node of a tree, 1 for a root, and where in `into` its ancestors' slots and its own were put."""
    paths: list[list[int]] = []
    places = []
    for parent, slot in zip(parents, slots, strict=True):
        paths.append([*paths[parent], slot] if parent >= 0 else [slot])
        places.append(len(into))
        into += paths[-1]
    return [len(path) for path in paths], places
