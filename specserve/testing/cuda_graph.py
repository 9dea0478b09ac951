"""Graphs of a device that is faked: what is captured is noted call by call, and done again at each replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

_ON_THE_HOST = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
_aten = torch.ops.aten
_INDEXED = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)
_WAITS = "{} has the host wait for a number of the device, which a graph cannot."


class CaptureError(AssertionError):
    """Captured code does what a graph cannot, or a graph is replayed on what is no longer there: a mistake of ours."""


class Graph:
    """In place of torch.cuda.CUDAGraph. Tensors that were made while it was captured are its own, and live as long;
    of others it knows where they lie, no more, as a device's graph does."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._own: list[Tensor] = []  # on the CPU
        self._own_storages: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # what was overwritten, and what it was

    def replay(self) -> None:
        """All of it again, on what its inputs hold now. Raises CaptureError where one is gone."""
        with torch.inference_mode(), _disable_current_modes():
            for call in self._calls:
                call.run()

    def check(self, func: Any, args: Any, waits: bool) -> None:
        """Raises CaptureError for a call that has the host wait: as the caller knows, for a copy, or as its result says
        something of numbers. Called before it runs, which it does as if alone: what it overwrites is kept."""
        if func in _INDEXED:  # what comes of a mask is as long as the mask has it
            is_read = any(each.dtype in (torch.bool, torch.uint8) for each in tensors_in(args[1]))
        else:
            is_read = func is _aten._local_scalar_dense.default or bool(set(func.tags).intersection(_ON_THE_HOST))
        if is_read:
            raise CaptureError(_WAITS.format(func))
        if waits:
            raise CaptureError(
                f"{func} copies between the device and memory of the host that is not page-locked: a graph cannot."
            )
        for written in _written(func, args):
            self._keep(written)

    def note(self, run: Callable[..., Any], args: Any, kwargs: Any, found: Any, is_mutable: bool) -> None:
        """What ran: `args` and what it `found` are tensors on the CPU."""
        if isinstance(found, (bool, int, float)):
            raise CaptureError(_WAITS.format(run))
        inside = {_storage(each) for each in tensors_in((args, kwargs))}
        fresh = [None if _storage(each) in inside else each for each in tensors_in(found)]
        if not is_mutable and not any(each is not None for each in fresh):
            return  # a view, of what will be there
        self._own += [each for each in fresh if each is not None]
        self._own_storages.update(_storage(each) for each in self._own)
        self._calls.append(_Call(run, self._places(args), self._places(kwargs), fresh))

    def overwrites(self, tensors: Iterable[Tensor]) -> None:
        """A kernel may write to any of these, tensors on the CPU."""
        for each in tensors:
            self._keep(each)

    def end(self) -> None:
        """What capturing ran has not run: what was there before is there again, and its results are not."""
        with torch.inference_mode(), _disable_current_modes():
            for written, before in self._before.values():
                written.copy_(before)
            for each in self._own:
                if each.is_floating_point():
                    each.fill_(torch.nan)
        self._before.clear()

    def _keep(self, written: Tensor) -> None:
        key = _storage(written)
        if key not in self._own_storages and key not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(written.untyped_storage())
            self._before[key] = whole, whole.clone()

    def _places(self, values: Any) -> Any:
        return mapped(lambda x: self._place(x) if isinstance(x, Tensor) else x, values)

    def _place(self, numbers: Tensor) -> Any:
        return numbers if _storage(numbers) in self._own_storages else _Outside(numbers)


class _Call:
    """One that a replay does again, into the tensors that it made when it was captured."""

    def __init__(self, run: Callable[..., Any], args: Any, kwargs: Any, fresh: list[Tensor | None]) -> None:
        self._run, self._args, self._kwargs, self._fresh = run, args, kwargs, fresh

    def run(self) -> None:
        found = self._run(*mapped(_there, self._args), **mapped(_there, self._kwargs))
        for own, new in zip(self._fresh, tensors_in(found), strict=True):
            if own is not None:
                own.copy_(new)


class _Outside:
    """Where a tensor lay that no graph owns."""

    def __init__(self, numbers: Tensor) -> None:
        self._memory, self._address = weak_ref(numbers), numbers.data_ptr()
        self._dtype, self._shape = numbers.dtype, list(numbers.shape)
        self._view = numbers.storage_offset(), numbers.shape, numbers.stride()

    def there(self) -> Tensor:
        memory = torch.UntypedStorage._new_with_weak_ptr(self._memory.cdata)
        numbers = None if memory is None else torch.empty(0, dtype=self._dtype).set_(memory, *self._view)
        if numbers is None or numbers.data_ptr() != self._address:
            raise CaptureError(
                f"The graph reads a tensor {self._shape} that it was captured with, and its memory is no longer there: "
                "fill that tensor, another one in its place is not looked at."
            )
        return numbers


def weak_ref(numbers: Tensor) -> StorageWeakRef:
    """Equal for tensors in the same memory, which it does not keep."""
    return StorageWeakRef(numbers.untyped_storage())  # type: ignore[no-untyped-call]


def tensors_in(values: Any) -> Iterator[Any]:
    """All tensors in lists, tuples and dicts, in order."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """With all values in lists, tuples and dicts changed."""
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(change, each) for each in value])
    if isinstance(value, dict):
        return {name: mapped(change, each) for name, each in value.items()}
    return change(value)


def _there(value: Any) -> Any:
    return value.there() if isinstance(value, _Outside) else value


def _storage(numbers: Tensor) -> int:
    return int(numbers.untyped_storage()._cdata)


def _written(func: Any, args: Any) -> Iterator[Tensor]:
    """The arguments that a call overwrites."""
    for declared, value in zip(func._schema.arguments, args, strict=False):
        if declared.alias_info is not None and declared.alias_info.is_write:
            yield from tensors_in(value)
