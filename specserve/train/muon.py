"""The optimiser: Muon for products, AdamW for all else, both at one learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from specserve.train.heads import TrainedHead

_MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_RMS = 0.2  # of an update's numbers, about what AdamW's are


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are made orthogonal (Jordan 2024, kellerjordan.github.io/posts/muon), scaled so that
    AdamW's learning rates fit (arXiv 2502.16982). torch's own computes in bfloat16, which most CPUs have no products
    for."""

    def __init__(self, products: Iterable[tuple[Tensor, int]], lr: float) -> None:
        """Each parameter with the number of products stacked in it, whose updates are made orthogonal one by one."""
        super().__init__([{"params": [each], "parts": parts} for each, parts in products], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # which nobody gives
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"].lerp_(parameter.grad, 1 - _MOMENTUM)
                of_parts = parameter.grad.lerp(momentum, _MOMENTUM).view(group["parts"], -1, parameter.shape[1])
                update = orthogonal(of_parts).view_as(parameter)
                parameter.add_(update, alpha=-group["lr"] * _RMS * math.sqrt(max(of_parts.shape[1:])))


def orthogonal(matrices: Tensor) -> Tensor:
    """About U V^T of each matrix U S V^T, [.., rows, columns], by Newton and Schulz's iteration; singular values come
    out around 1."""
    a, b, c = _COEFFICIENTS
    x: Tensor = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Optimiser:
    """Both, stepped together with their gradients clipped to norm `clip`."""

    def __init__(self, head: TrainedHead, clip: float) -> None:
        learning = {name: each for name, each in head.named_parameters() if each.requires_grad}
        tables, stacked = head.tables(), head.stacked()
        products = {name: each for name, each in learning.items() if each.dim() == 2 and name not in tables}
        rest = [each for name, each in learning.items() if name not in products]
        self._clip = clip
        self._parameters = [*products.values(), *rest]
        self._parts: list[torch.optim.Optimizer] = []
        if products:
            self._parts.append(Muon([(each, stacked.get(name, 1)) for name, each in products.items()], lr=0.0))
        if rest:
            self._parts.append(torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0))

    def step(self, learning_rate: float) -> None:
        torch.nn.utils.clip_grad_norm_(self._parameters, self._clip)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = learning_rate
            part.step()
            part.zero_grad()

    def state_dict(self) -> list[dict[str, Any]]:
        """On the CPU."""
        return [_on_cpu(part.state_dict()) for part in self._parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for part, state in zip(self._parts, states, strict=True):
            part.load_state_dict(state)


def _on_cpu(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _on_cpu(value) for name, value in state.items()}
    return state.cpu() if isinstance(state, Tensor) else state


def learning_rate(step: int, num_steps: int, peak: float, warmup: float, decay: str) -> float:
    """Of step number `step`: up to `peak` over a share `warmup` of all steps, then down to 0 behind the last."""
    rising = max(1, round(warmup * num_steps))
    if step < rising:
        return peak * (step + 1) / rising
    share = (step - rising + 1) / (num_steps - rising + 1)
    return peak * (1 - share) if decay == "linear" else peak * 0.5 * (1 + math.cos(math.pi * share))
