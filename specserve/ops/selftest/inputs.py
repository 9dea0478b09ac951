"""Inputs of the self-test's checks: the same numbers for all kernels, where and as these want them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve.ops import Ops
from specserve.ops.packing import Quantized, Weight
from specserve.ops.selftest.uses import Uses

Rows = Callable[[int, int], list[Tensor]]  # rows [start, stop) of the inputs -> of each result [stop - start, any]
NUM_ROWS = 17  # of inputs: one more than the fewest that a GPU multiplies at once
_GROUP = 32  # inputs that share a scale


class Inputs:
    """Draws the inputs of one check. Numbers are such that `ops.dtype` has them, so kernels of one dtype read the same
    ones; they are on the CPU until `there` or `rows` takes them to the device."""

    def __init__(self, ops: Ops, uses: Uses, block_size: int, seed: int) -> None:
        self.ops, self.uses, self.block_size = ops, uses, block_size
        self._generator = torch.Generator().manual_seed(seed)
        self._ones: dict[int, Any] = {}  # by width

    def normal(self, *shape: int) -> Tensor:
        """float32"""
        return torch.randn(*shape, generator=self._generator).to(self.ops.dtype).float()

    def integers(self, below: int, *shape: int) -> Tensor:
        """int64"""
        return torch.randint(below, shape, generator=self._generator)

    def weight(self, outputs: int, inputs: int) -> Weight:
        """[outputs, inputs], whose products with normal numbers are about 1; where the kernels keep integers it is of
        such, that int4 keeps, too. Of groups that are not whole these are two numbers."""
        if inputs % _GROUP:
            return -self.integers(2, outputs, inputs) * 2.0 ** -round(math.log2(inputs**0.5))
        ints, groups = self.integers(15, outputs, inputs) - 7, inputs // _GROUP
        scales = (1 + self.integers(4, outputs, groups)) / (4 * 4.3 * inputs**0.5)
        scales = scales.to(self.ops.dtype).float()
        quantized = Quantized(ints.to(torch.int8), scales, None, _GROUP)
        # What has no integers rounds the products of both, which others do not.
        return quantized if self.ops.quantization != "none" else quantized[:]

    def there(self, values: Tensor) -> Tensor:
        return values.to(self.ops.device)

    def rows(self, values: Tensor, start: int, stop: int) -> Tensor:
        """Rows of float32 [any, columns], and of padding, as ops take them: float32."""
        count = stop - start
        made = self.ops.input_rows(self.padded(count), values.shape[1])
        made[:count] = self.there(values[start:stop])
        return made

    def products(self, values: Tensor, start: int, stop: int) -> Tensor:
        """The same as if a linear layer had returned them."""
        rows = self.rows(values, start, stop)
        return rows if self._product_dtype == torch.float32 else rows.to(self._product_dtype)

    def ids(self, values: Tensor, start: int, stop: int) -> Tensor:
        """Some of int64 [any], and padding."""
        return self.there(F.pad(values[start:stop], (0, self.padded(stop - start) - (stop - start))))

    def padded(self, count: int) -> int:
        return count + -count % self.ops.row_multiple

    def numbers(self, read: Any, count: int, width: int) -> Tensor:
        """What a linear layer reads, the first rows, float32 [count, width]: where that is no tensor, times one."""
        if isinstance(read, Tensor):
            return read[:count].float()
        return self.ops.linear(read, self._one(width))[:count]

    @cached_property
    def _product_dtype(self) -> torch.dtype:
        with torch.inference_mode(False):  # as weights are packed
            zeros = torch.zeros(_GROUP, _GROUP)
            weight = self.ops.pack(zeros)
        read = self.ops.quantize_activation(self.rows(zeros, 0, self.ops.row_multiple))
        return self.ops.linear(read, weight).dtype

    def _one(self, width: int) -> Any:
        if width not in self._ones:
            with torch.inference_mode(False):
                self._ones[width] = self.ops.pack_head(torch.eye(width))
        return self._ones[width]


class Check(NamedTuple):
    """`prepare` packs weights and returns what computes rows. Models that have not the form `needs` do without."""

    name: str  # for people
    needs: str  # of uses.ALL; "": nothing
    prepare: Callable[[Inputs], Rows]
    by_row: bool = True  # whether a row stands for itself; else no bits are compared
