"""Steps of a model of transformers, noted once and run again without its modules: our ops in pieces, torch's functions
between them, all into memory that stays where it is. Each function computes as it did, so the bits are the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from specserve.models.generic.foreign import ForeignCalls
from specserve.models.generic.modules import LastInput
from specserve.ops import Ops
from specserve.ops.pieces import Memory, Piece, Pieces

_MOST_ROWS = 32  # of a step that is noted: of more, Python's share is small
_MOST_BYTES = 2**28  # of all that are noted
_log = logging.getLogger(__name__)
_aten = torch.ops.aten
_LOOKS = ("_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "masked_select", "unique")
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_COPIES = ("_to_copy", "clone")
# Quicker to call than torch.ops; each takes `out`.
_QUICK: dict[Any, Callable[..., Any]] = {
    _aten.add.Tensor: torch.add,
    _aten.sub.Tensor: torch.sub,
    _aten.mul.Tensor: torch.mul,
    _aten.div.Tensor: torch.div,
    _aten.neg.default: torch.neg,
    _aten.cat.default: torch.cat,
    _aten.cos.default: torch.cos,
    _aten.sin.default: torch.sin,
    _aten.exp.default: torch.exp,
    _aten.tanh.default: torch.tanh,
    _aten.erf.default: torch.erf,
    _aten.sqrt.default: torch.sqrt,
    _aten.rsqrt.default: torch.rsqrt,
    _aten.reciprocal.default: torch.reciprocal,
    _aten.pow.Tensor_Scalar: torch.pow,
    _aten.mean.dim: torch.mean,
}


class CannotNoteError(Exception):
    """What a step computes decides what it does next."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in Memory. Steps name places while they are noted, so that memory is free when the model lets
    go of it."""

    base: Tensor
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        base = self.base if self.base.dtype == self.dtype else self.base.view(self.dtype)
        return base.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class _Call:
    """A function of torch that writes to `out`, or to one of its arguments."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any

    def bound(self) -> Callable[[], Any]:
        args, kwargs = tree_map(_tensor_at, (self.args, self.kwargs))
        return partial(self.function, *args, **kwargs)


def _tensor_at(value: Any) -> Any:
    return value.tensor() if isinstance(value, _Place) else value


class Notes(ForeignCalls):  # type: ignore[no-untyped-call]
    """Within it all that a model computes is noted, torch's functions as they run. Raises CannotNoteError."""

    def __init__(self, ops: Ops, pieces: Pieces, memory: Memory) -> None:
        super().__init__()
        self.steps: list[Piece | _Call] = []
        self._ops, self._pieces, self._memory = ops, pieces, memory

    def place(self, value: Any) -> Any:
        """Of a tensor in memory; anything else as it is."""
        if not isinstance(value, Tensor) or (base := self._memory.base(value)) is None:
            return value
        return _Place(base, value.dtype, tuple(value.shape), value.stride(), int(value.storage_offset()))

    def end(self) -> None:
        """No more is to come."""
        self.steps += self._pieces.take()

    def called(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in _LOOKS and any(self._memory.base(each) is not None for each in given):
            raise CannotNoteError(name)
        if func is _aten.add.Tensor and not kwargs and all(map(self._is_rows, args)) and args[0].shape == args[1].shape:
            one, other = (each.view(-1, each.shape[-1]) for each in args)
            return self._ops.tap(0, one, other, None, 0.0).view(args[0].shape)
        found = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._append(func, args, kwargs)
            return found
        made = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        inside = {each.untyped_storage().data_ptr() for each in given}
        is_new = {each.untyped_storage().data_ptr() not in inside for each in made}
        if is_new != {True}:  # parts of what it was given, or no tensors
            if len(is_new) > 1:
                raise CannotNoteError(name)
            return found
        own = tree_map(lambda each: self._kept(each) if isinstance(each, Tensor) else each, found)
        if name in _EMPTY:
            return own
        outs = [leaf for leaf in tree_leaves(own) if isinstance(leaf, Tensor)]
        self._append(*_into(func, name, args, kwargs, outs))
        return own

    def _is_rows(self, x: Any) -> bool:
        """Whether x, float32 [1, rows, n], lies as ops read rows: its sum with another is an op, too, the same number
        for number, which needs no piece of its own."""
        return (
            isinstance(x, Tensor)
            and x.dtype == torch.float32
            and x.dim() == 3
            and x.shape[0] == 1
            and x.stride()[1:] == self._ops.input_rows(*x.shape[1:]).stride()
            and x.is_contiguous()
            and x.data_ptr() % 64 == 0
            and self._memory.base(x) is not None
        )

    def _kept(self, found: Tensor) -> Tensor:
        """A copy in memory."""
        size = sum((n - 1) * step for n, step in zip(found.shape, found.stride(), strict=True)) + 1
        size = size if found.numel() else 0
        flat = self._memory.take((found.dtype, size), partial(torch.empty, size, dtype=found.dtype))
        own = flat.as_strided(found.shape, found.stride())
        return own.copy_(found)

    def _append(self, function: Any, args: Any, kwargs: Any) -> None:
        self.steps += self._pieces.take()
        self.steps.append(_Call(function, *tree_map(self.place, (tuple(args), kwargs))))


def _into(
    func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], outs: list[Tensor]
) -> tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]:
    """A function that writes what `func` returns to `outs`, and what it is called with."""
    if name in _COPIES:
        return torch.Tensor.copy_, (outs[0], args[0]), {}
    if (quick := _QUICK.get(func)) is not None:
        return quick, args, {**kwargs, "out": outs[0]}
    if (variant := _out_variant(func)) is not None:
        return variant[0], args, {**kwargs, **dict(zip(variant[1], outs, strict=True))}
    return partial(_copied, func), (outs, *args), kwargs


def _copied(func: Any, outs: list[Tensor], *args: Any, **kwargs: Any) -> None:
    found = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
    for out, each in zip(outs, found, strict=True):
        out.copy_(each)


def _out_variant(func: Any) -> tuple[Any, list[str]] | None:
    """The overload of a function that takes where to write its results, and the names of these arguments."""
    asked = [(each.name, str(each.type)) for each in func._schema.arguments]
    packet = func.overloadpacket
    for overload in packet.overloads():
        other = getattr(packet, overload)
        outs = [each.name for each in other._schema.arguments if each.is_out]
        rest = [(each.name, str(each.type)) for each in other._schema.arguments if not each.is_out]
        if outs and len(outs) == len(func._schema.returns) and rest == asked:
            return other, outs
    return None


Step = Callable[..., tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]]


class _Noted:
    """A step of one number of rows. `step` is called once, with inputs that live as long as this."""

    def __init__(self, step: Step, shared: LastInput, inputs: Sequence[Tensor], more: Sequence[Any]) -> None:
        self.memory = Memory()
        with torch.inference_mode(False), torch.no_grad():
            self._inputs = [self._own(i, each) for i, each in enumerate(inputs)]
            with shared.ops.pieces(self.memory) as pieces, Notes(shared.ops, pieces, self.memory) as notes:
                shared.memory = self.memory
                try:
                    self.found = step(*self._inputs, *more)
                finally:
                    shared.memory = None
            notes.end()
            self._steps = [(None, each.bound()) if isinstance(each, _Call) else (each, None) for each in notes.steps]

    def _own(self, number: int, given: Tensor) -> Tensor:
        own = self.memory.take(("input", number), partial(torch.empty, given.shape, dtype=given.dtype))
        return own.copy_(given)

    def run(self, inputs: Sequence[Tensor], plan: Any) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        for piece, call in self._steps:
            if call is not None:
                call()
            elif piece is not None:
                piece.run(plan)
        return self.found


class Replays:
    """Runs steps: those of few rows as they were noted when their number of rows came for the second time. What one
    returns is valid until the next."""

    def __init__(self, step: Step, shared: LastInput) -> None:
        self._step, self._shared = step, shared
        self._noted: dict[tuple[Any, ...], _Noted | None] = {}  # the latest last; None: a number that came once
        self._kv: list[Tensor] = []  # what they write to
        self.is_on = False

    def run(
        self, inputs: Sequence[Tensor], kv: list[Tensor], plan: Any, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """As `step` does with token ids, positions and rows of logits, and kv, plan and taps."""
        if not self.is_on or len(inputs[0]) > _MOST_ROWS:
            return self._step(*inputs, kv, plan, taps)
        if kv is not self._kv:
            self._noted.clear()
            self._kv = kv
        key = len(inputs[0]), len(inputs[2]), taps
        if key not in self._noted:
            self._noted[key] = None
            return self._step(*inputs, kv, plan, taps)
        noted = self._noted.pop(key)
        if noted is None:
            try:
                noted = _Noted(self._step, self._shared, inputs, (kv, plan, taps))
            except CannotNoteError as error:
                self.stop(f"the model's code looks at numbers ({error})")
                return self._step(*inputs, kv, plan, taps)
            self._drop(_MOST_BYTES - noted.memory.num_bytes)
        self._noted[key] = noted
        return noted.run(inputs, plan)

    def stop(self, why: str) -> None:
        """Run all further steps as `step` does, and warn of it."""
        _log.warning("Steps run op by op, which is slower: %s.", why)
        self.is_on = False

    def _drop(self, left: int) -> None:
        """Forget those that were not used for the longest time, until the others have so many bytes."""
        for key, noted in reversed(list(self._noted.items())):
            left -= 0 if noted is None else noted.memory.num_bytes
            if left < 0:
                del self._noted[key]
