"""Norms of transformers' models by our one op, where numbers show that a module is exactly such a norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specserve.models.generic.modules import LastInput

_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps")  # names that modules have for it
_ERROR = 2e-5  # relative, of a norm that was computed in float32


class Norm(nn.Module):
    """In the place of a module `like` that computes the same, over the op contract."""

    def __init__(self, like: nn.Module, packed: Any, eps: float, width: int, shared: LastInput) -> None:
        super().__init__()
        self.weight, self.bias = getattr(like, "weight", None), getattr(like, "bias", None)
        self._packed, self._eps, self._width, self._shared = packed, eps, width, shared

    def forward(self, x: Tensor) -> Tensor:
        """float32 [..., width]"""
        return self._shared.ops.norm(self._shared.given(x, self._width), self._packed, self._eps).view(x.shape)


def norm_like(module: nn.Module, shared: LastInput) -> Norm | None:
    """None where a module is no RMS norm or LayerNorm over the last dimension, with a weight, 1 plus that or none."""
    own = dict(module.named_parameters(recurse=False))
    eps = next((value for name in _EPS if isinstance(value := getattr(module, name, None), float)), None)
    if eps is None or own.keys() - {"weight", "bias"} or any(module.children()) or any(module.buffers()):
        return None
    width = _width(module, own)
    if width is None:
        return None
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(4, width, generator=generator) * torch.tensor([[1.0], [eps**0.5], [30.0], [0.1]]) + 0.01
    try:
        expected = module(x)
    except Exception:  # it wants to be called in another way
        return None
    weight, bias = own.get("weight", torch.ones(width)), own.get("bias")
    for subtracts_mean in (False, True):
        centred = (x - x.mean(1, keepdim=True) if subtracts_mean else x).double()
        normed = centred / (centred.square().mean(1, keepdim=True) + eps).sqrt()
        for factor in (weight, 1 + weight):
            found = normed * factor + (0 if bias is None else bias)
            if (found - expected).abs().max() <= _ERROR * expected.abs().max() and expected.dtype == torch.float32:
                if not subtracts_mean and bias is not None:
                    return None
                factor = factor.detach()
                ops = shared.ops
                packed = ops.pack_layer_norm(factor, bias) if subtracts_mean else ops.pack_vector(factor)
                return Norm(module, packed, eps, width, shared)
    return None


def _width(module: nn.Module, own: dict[str, nn.Parameter]) -> int | None:
    """How many numbers it norms, as its weight or itself says."""
    shape = tuple(own["weight"].shape) if "weight" in own else getattr(module, "normalized_shape", None)
    shape = (shape,) if isinstance(shape, int) else shape
    return shape[0] if shape is not None and len(shape) == 1 else None
