"""Sums of floats as fixed-point integers: integer addition has no order, so a sum does not depend on the device, its
threads or the other rows."""

from __future__ import annotations

import math

from torch import Tensor


def to_fixed(values: Tensor, most: float) -> Tensor:
    """int64 of float64 values, none negative, whose sum is at most `most`; exact to most * 2^-62 each."""
    return (values * scale_of(most)).round_().long()


def row_total(values: Tensor, most: float) -> Tensor:
    """The sum of each row, float64 [rows]; values float64 [rows, n], none negative, no row above `most`."""
    return to_fixed(values, most).sum(-1).double() / scale_of(most)


def scale_of(most: float) -> float:
    """What numbers are multiplied with whose sum is at most `most`."""
    return float(2.0 ** (62 - math.ceil(math.log2(most))))
