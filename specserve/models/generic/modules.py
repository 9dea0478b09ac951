"""What takes the place of modules of transformers: linear layers, embeddings and activations whose rows have the same
bits whatever their number."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specserve.ops import Ops
from specserve.ops.pieces import Memory

VECTOR = 64  # numbers: rows of a multiple of these have no rest that torch would round in another way


class Linear(nn.Module):
    """A packed linear layer over the op contract. `weight` stays on the device "meta": who multiplies with it by other
    means fails."""

    def __init__(self, like: Any, packed: Any, sizes: tuple[int, int], shared: LastInput) -> None:
        super().__init__()
        self.in_features, self.out_features = sizes
        self.weight = like.weight
        self.packed, self._shared = packed, shared
        self.last: Tensor | None = None  # what the op returned

    def forward(self, x: Tensor) -> Tensor:
        """float32 [..., in] -> [..., out]."""
        out = self.last = self._shared.linear(self, x)
        return out.float().view(*x.shape[:-1], self.out_features)


class LastInput:
    """The last input of a linear layer, quantised: queries, keys and values are made of one tensor, gate and up too.
    Layers of transformers hand each the same object, and write to none. While a step is noted, what is made for ops to
    read lies in `memory`."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.memory: Memory | None = None
        self._with: dict[Linear, list[Linear]] = {}  # by the first that reads a tensor, all that do
        self.forget()

    def forget(self) -> None:
        self._x: Tensor | None = None
        self._quantized: Any = None
        self._readers: list[Linear] = []  # that read it so far
        self._ahead: dict[Linear, Tensor] = {}  # what is computed already of those that will

    def linear(self, layer: Linear, x: Tensor) -> Tensor:
        """Of x [..., in], float [rows, out]. While a step is noted all layers that read x are asked at once, as a step
        before told which: nothing that others compute comes between them."""
        quantized = self.quantized(x, layer.in_features)
        if layer in self._ahead:
            return self._ahead.pop(layer)
        if self.memory is None:
            self._readers.append(layer)
            self._with[self._readers[0]] = self._readers
        elif not self._readers:
            self._readers = self._with.get(layer, [])
            self._ahead = {each: self.ops.linear(quantized, each.packed) for each in self._readers if each is not layer}
        return self.ops.linear(quantized, layer.packed)

    def quantized(self, x: Tensor, width: int) -> Any:
        if x is not self._x:
            self.forget()
            self._quantized = self.ops.quantize_activation(self.given(x, width))
            self._x = x
        return self._quantized

    def given(self, x: Tensor, width: int) -> Tensor:
        """x [..., width] for an op to read, float32 [rows, width]."""
        rows = x.reshape(-1, width)
        if self.memory is not None:
            own = self.rows(*rows.shape)
            return rows if rows.stride() == own.stride() and rows.dtype == torch.float32 else own.copy_(rows)
        return rows if rows.dtype == torch.float32 else rows.float()

    def filled(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of `values` for an op to read, where it stays."""
        make = partial(torch.empty, values.shape, dtype=dtype)
        own = make() if self.memory is None else self.memory.take(("filled", dtype, tuple(values.shape)), make)
        return own.copy_(values)

    def rows(self, rows: int, columns: int) -> Tensor:
        """float32 [rows, columns] as ops read them, to be filled."""
        make = partial(self.ops.input_rows, rows, columns)
        return make() if self.memory is None else self.memory.take(("rows", rows, columns), make)


class Embedding(nn.Module):
    """A packed table over the op contract."""

    def __init__(self, like: nn.Embedding, packed: Tensor, shared: LastInput) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = like.num_embeddings, like.embedding_dim
        self.weight, self.padding_idx = like.weight, like.padding_idx
        self._packed, self._shared = packed, shared

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [...] -> float32 [..., hidden]."""
        found = self._shared.ops.embed(ids.reshape(-1).contiguous(), self._packed, 1.0)
        return found.reshape(*ids.shape, self.embedding_dim)


class Activation(nn.Module):
    """A function of each number that rounds alike wherever it stands. torch's sigmoid, and what it makes of that, does
    not in the last numbers of a tensor or of a thread's part of it, and gelu where numbers do not lie together: its own
    is taken where neither is so."""

    def __init__(self, own: nn.Module, exact: Callable[[Tensor], Tensor], is_one_thread: bool) -> None:
        super().__init__()
        self._own, self._exact, self._is_one_thread = own, exact, is_one_thread

    def forward(self, x: Tensor) -> Tensor:
        if self._is_one_thread and x.shape[-1] % VECTOR == 0:
            found: Tensor = self._own(x.contiguous())
            return found
        return self._exact(x)


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))))


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


EXACT: dict[str, Callable[[Tensor], Tensor]] = {  # by the class that transformers' ACT2FN makes
    "SiLU": _silu,
    "SiLUActivation": _silu,
    "Sigmoid": _sigmoid,
    "GELUTanh": _gelu_tanh,
    "NewGELUActivation": _gelu_tanh,
    "FastGELUActivation": _gelu_tanh,
    "GELUActivation": _gelu,
    "QuickGELUActivation": lambda x: x * _sigmoid(1.702 * x),
    "MishActivation": lambda x: x * torch.tanh(torch.log(1 + torch.exp(x))),
}


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of that name."""
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)
