"""Mixtures of experts of transformers' models: what routes rows, with the same bits whatever their number, and experts
over the op contract. transformers keeps all experts of a layer in one module, and hands it where rows go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from specserve.errors import ModelError
from specserve.models.generic.modules import EXACT, VECTOR, LastInput
from specserve.models.mlps import MOST_EXPERTS

PARTS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}  # of parameters [experts, rows, columns]
_ACTIVATIONS = {  # by the class that ACT2FN makes, as ops.experts names them
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
}
_SIGMOIDS = (torch.sigmoid, Tensor.sigmoid, F.sigmoid)
_SILUS = (F.silu,)


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """The gated MLPs of one layer: how many, the numbers that each reads and returns, those between, and to how many of
    them a row goes."""

    number: int
    hidden: int
    size: int
    activation: str
    per_token: int = 0  # 0: no step has shown it yet

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """The tensors of each expert, by the names that native families have for them."""
        into, out = (self.size, self.hidden), (self.hidden, self.size)
        each = {"gate_proj": into, "up_proj": into, "down_proj": out}
        return {f"{name}.{i}.{part}.weight": shape for i in range(self.number) for part, shape in each.items()}

    @property
    def step_width(self) -> int:
        """As ExpertsMlp.step_width."""
        return self.per_token * (2 * self.hidden + 3 * self.size) + 2 * self.number


def experts_in(module: Any) -> ExpertsShape | None:
    """None for what are no experts behind transformers' interface. Raises ModelError for those of another form."""
    if not hasattr(module, "_is_expert_parallel") or not hasattr(module, "is_concatenated"):
        return None
    from transformers.integrations.moe import _default_apply_gate

    forms = {
        "no gate": not module.has_gate,
        "biases": module.has_bias,
        "matrices that are transposed": module.is_transposed,
        "gates and values that alternate": not module.is_concatenated,
        "norms of their own": module.has_post_expert_norm,
        "a gate of their own": type(module)._apply_gate is not _default_apply_gate,
    }
    if strange := [form for form, is_so in forms.items() if is_so]:
        raise ModelError(f"Its experts have {' and '.join(strange)}.")
    activation = type(module.act_fn).__name__
    if activation not in _ACTIVATIONS:
        raise ModelError(f"Its experts' activation is {activation}, and experts have silu or gelu_tanh.")
    gate_up, down = tuple(module.gate_up_proj.shape), tuple(module.down_proj.shape)
    number, hidden, size = down
    others = {name for name, _ in module.named_parameters()} - PARTS.keys()
    if gate_up != (number, 2 * size, hidden) or others:
        raise ModelError(f"Its experts have parameters {gate_up}, {down} {', '.join(others)}.")
    if number > MOST_EXPERTS:
        raise ModelError(f"It has {number} experts in a layer; at most {MOST_EXPERTS} are supported.")
    return ExpertsShape(number, hidden, size, _ACTIVATIONS[activation])


class Experts(nn.Module):
    """Packed experts over the op contract."""

    def __init__(self, packed: Any, shape: ExpertsShape, shared: LastInput) -> None:
        super().__init__()
        self._packed, self._shape, self._shared = packed, shape, shared

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """float32 [..., hidden], and of each row the experts' numbers and weights [rows, per_token] -> as x. A row's
        sum goes over its experts in the order that they are given, which its own scores alone decide. A row that is
        sent to none of the experts is answered with NaN, which whoever samples refuses."""
        shape, shared = self._shape, self._shared
        is_known = top_k_index < shape.number
        chosen = shared.filled(top_k_index.clamp(max=shape.number - 1), torch.int32)
        weights = shared.filled(torch.where(is_known, top_k_weights, torch.nan), torch.float32)
        ops = shared.ops
        routing = ops.routed(chosen, weights)
        out = ops.experts(shared.quantized(x, shape.hidden), self._packed, routing, shape.activation, None)
        return out.float().reshape(x.shape)


class ExpertsStub(nn.Module):
    """In the place of experts while a model is probed: each multiplies a row by a number of its own."""

    def __init__(self, shape: ExpertsShape, ours: Callable[[], Any]) -> None:
        super().__init__()
        self.shape, self.per_token = shape, 0
        self._ours = ours

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        with self._ours():
            rows = x.reshape(-1, self.shape.hidden)
            self.per_token = top_k_index.shape[-1]
            is_plain = top_k_index.dtype == torch.int64 and top_k_weights.dtype == torch.float32
            if top_k_index.shape != top_k_weights.shape or len(top_k_index) != len(rows) or not is_plain:
                raise ModelError("Its experts are told in another way where rows go.")
            if int(top_k_index.max()) >= self.shape.number:
                raise ModelError("It sends rows to experts that it has not.")
            out = torch.zeros_like(rows)
            for i in range(self.per_token):
                out = out + rows * (top_k_weights[:, i] * (0.7 + 0.13 * top_k_index[:, i]))[:, None]
            return out.view(x.shape)


class RowsApart(TorchFunctionMode):
    """Within it what a model's code asks of torch for a few numbers of each row has the same bits in any company: its
    products with `matrices`, parameters by their ids, are what these make of rows; and sigmoids of rows that are no
    whole vectors, whose last numbers torch rounds in another way, are made of functions that round alike."""

    def __init__(self, matrices: Mapping[int, Callable[[Tensor], Tensor]], is_one_thread: bool) -> None:
        super().__init__()
        self._matrices, self._is_one_thread = matrices, is_one_thread
        self.was_asked = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.linear and len(args) == 2 and not kwargs:
            if (product := self._matrices.get(id(args[1]))) is not None:
                self.was_asked = True
                return product(args[0])
        elif function in _SIGMOIDS and self._rounds(args[0]):
            return EXACT["Sigmoid"](args[0])
        elif function in _SILUS and self._rounds(args[0]):
            return EXACT["SiLU"](args[0])
        return function(*args, **kwargs)

    def _rounds(self, x: Tensor) -> bool:
        is_so = x.dim() > 0 and not (self._is_one_thread and x.shape[-1] % VECTOR == 0)
        self.was_asked |= is_so
        return is_so


def matrices_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that a module's code may multiply rows with by itself, as a router's."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.Linear):
            for own, parameter in module.named_parameters(recurse=False):
                if parameter.dim() == 2:
                    yield f"{name}.{own}", parameter


class Product:
    """Rows times a router's packed matrix, in float32 however other weights are kept."""

    def __init__(self, packed: Any, sizes: tuple[int, int], shared: LastInput) -> None:
        self._packed, self._sizes, self._shared = packed, sizes, shared

    def __call__(self, x: Tensor) -> Tensor:
        inputs, outputs = self._sizes
        found = self._shared.ops.router_scores(self._shared.given(x, inputs), self._packed)
        return found.contiguous().view(*x.shape[:-1], outputs)


class RouterLinear(nn.Module):
    """A linear layer whose outputs are scores of experts."""

    def __init__(self, like: Any, product: Product) -> None:
        super().__init__()
        self.weight = like.weight
        self._product = product

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x)


@contextmanager
def apart(mode: RowsApart | None) -> Iterator[None]:
    """Run within `mode`, if there is one."""
    if mode is None:
        yield
    else:
        with mode:
            yield


def is_router(name: str, outputs: int, has_bias: bool, experts: dict[str, ExpertsShape]) -> bool:
    """Whether a linear layer scores the experts beside it: it stands in one block with as many."""
    return not has_bias and any(
        outputs == shape.number and name.startswith(f"{block.rpartition('.')[0]}.") for block, shape in experts.items()
    )
