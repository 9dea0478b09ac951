"""What happens to rows one by one, in torch: norms and activations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class LayerNorm(NamedTuple):
    """Weights of a LayerNorm, float32 [n], in the place of the weight of an RMS norm."""

    weight: Tensor
    bias: Tensor | None


Norm = Tensor | LayerNorm


def norm(x: Tensor, weight: Norm, eps: float) -> Tensor:
    """Of rows [..., n], float32."""
    if isinstance(weight, LayerNorm):
        return F.layer_norm(x.float(), weight.weight.shape, weight.weight, weight.bias, eps)
    return F.rms_norm(x.float(), weight.shape, weight, eps)


def _silu(x: Tensor) -> Tensor:
    scale = x.neg().exp_().add_(1)
    return torch.div(x, scale, out=scale)


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x * 0.5**0.5))


ACTIVATIONS = {"silu": _silu, "gelu_tanh": _gelu_tanh, "relu": torch.relu, "gelu": _gelu}  # by name, of float32
