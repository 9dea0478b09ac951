"""A CUDA device on a machine without one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_DEVICE = torch.device("cuda:0")
_aten = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.copy_.default)
# Places in the arguments of what must lie on one device; indices may be on the CPU.
_ALIKE = {
    _aten.index.Tensor: (0,),
    _aten.index_put.default: (0, 2),
    _aten.index_put_.default: (0, 2),
    _aten._index_put_impl_.default: (0, 2),
}


@contextmanager
def fake_cuda(free_bytes: int = 2**31) -> Iterator[torch.device]:
    """While this is open, in this thread and those that it starts, there is the device "cuda:0", whose memory has
    `free_bytes` left.

    Its tensors say that they are there, are computed on the CPU and refuse to meet tensors of the CPU, as those of a
    real device do. So it shows whether a program puts everything where it belongs. It shows nothing of a GPU's own
    kernels, rounding, streams or speed.
    """
    with ExitStack() as stack:

        def replace(owner: Any, name: str, value: Callable[..., Any]) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        replace(torch.cuda, "_lazy_init", lambda: None)
        replace(torch.cuda, "is_available", lambda: True)
        replace(torch.cuda, "device_count", lambda: 1)
        replace(torch.cuda, "current_device", lambda: 0)
        replace(torch.cuda, "synchronize", lambda device=None: None)
        replace(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
        replace(torch.cuda, "mem_get_info", lambda device=None: (free_bytes, 2 * free_bytes))
        replace(torch.cuda, "get_device_name", lambda device=None: "a GPU that is not there")
        plain = threading.Thread.run

        def run(thread: threading.Thread) -> None:  # torch keeps modes by thread
            with _Dispatch(), _Calls():  # type: ignore[no-untyped-call]
                plain(thread)

        replace(threading.Thread, "run", run)
        stack.enter_context(_Dispatch())  # type: ignore[no-untyped-call]
        stack.enter_context(_Calls())
        yield _DEVICE


class _CudaTensor(Tensor):
    """What is computed with is `_numbers`, on the CPU."""

    _numbers: Tensor
    device = property(lambda self: _DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = is_meta = property(lambda self: False)

    @staticmethod
    def __new__(cls, numbers: Tensor) -> _CudaTensor:
        # Of a CUDA device torch would ask for the current one, which there is not. A view of a tensor that is not of
        # inference mode may not be of it either.
        with torch.inference_mode(False):
            made: _CudaTensor = Tensor._make_wrapper_subclass(
                cls,
                numbers.shape,
                strides=numbers.stride(),
                storage_offset=numbers.storage_offset(),
                dtype=numbers.dtype,
                layout=numbers.layout,
                device=torch.device("meta"),
                requires_grad=numbers.requires_grad,
            )
        made._numbers = numbers
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self._numbers!r} on {_DEVICE}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # it is called so
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _computed(func, args, kwargs or {})


class _Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls without a tensor of the device, which may ask for one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class _Calls(TorchFunctionMode):
    """What torch does before it dispatches."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(map(_with_index, args))
        kwargs = {name: _with_index(value) for name, value in (kwargs or {}).items()}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == _DEVICE:
            return _CudaTensor(func(*args, **{**kwargs, "device": None}))
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            args = args[0], _indices(args[1]), *args[2:]
        if func in (Tensor.numpy, Tensor.tolist) and isinstance(args[0], _CudaTensor):
            if func is Tensor.numpy:
                raise TypeError(f"can't convert {_DEVICE} device type tensor to numpy")
            return args[0]._numbers.tolist()
        return func(*args, **kwargs)


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = [each for each in _leaves((*args, *kwargs.values())) if isinstance(each, Tensor)]
    ours = {id(each._numbers): each for each in tensors if isinstance(each, _CudaTensor)}
    assert not any(each.is_meta for each in tensors), f"{func}: torch made a tensor of the device without numbers"
    if ours and len(ours) < len(tensors) and func not in _COPIES:
        alike = tensors if func not in _ALIKE else [args[place] for place in _ALIKE[func]]
        if strangers := [each for each in alike if not isinstance(each, _CudaTensor) and each.dim()]:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {_DEVICE} and cpu: "
                f"{func} of {[list(each.shape) for each in strangers]}"
            )
    is_ours = bool(ours)
    if func is _aten.copy_.default:
        is_ours = isinstance(args[0], _CudaTensor)
    elif asked := kwargs.get("device"):
        is_ours = asked.type in ("cuda", "meta")  # "meta" where gradients take after our tensors
        kwargs = {**kwargs, "device": torch.device("cpu")}
    found = func(*_mapped(_numbers_of, args), **{name: _mapped(_numbers_of, each) for name, each in kwargs.items()})
    if not is_ours:
        return found

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return ours[id(value)] if id(value) in ours else _CudaTensor(value)  # changed in place, it is what it was

    return _mapped(wrapped, found)


def _leaves(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _leaves(value)
        else:
            yield value


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """With all values in lists and tuples changed."""
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(change, each) for each in value])
    return change(value)


def _numbers_of(value: Any) -> Any:
    return value._numbers if isinstance(value, _CudaTensor) else value


def _with_index(value: Any) -> Any:
    is_ours = value == "cuda" if isinstance(value, str) else isinstance(value, torch.device) and value.type == "cuda"
    return _DEVICE if is_ours else value


def _indices(value: Any) -> Any:
    """Lists as tensors of the CPU: torch would make them where the tensor that they index lies, without numbers."""
    if isinstance(value, tuple):
        return tuple(map(_indices, value))
    return torch.tensor(value, dtype=None if value else torch.int64) if isinstance(value, list) else value
