"""A CUDA device on a machine without one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import specserve.kernels
from specserve.testing import triton
from specserve.testing.cuda_graph import CaptureError, Graph, mapped, tensors_in, weak_ref
from specserve.testing.cuda_peers import faked_nccl
from specserve.testing.interpreted import mend_interpreter

_aten = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.copy_.default)
# Which inference mode leaves whole.
_MOVES = _aten.to.device, _aten.to.dtype, _aten.to.dtype_layout, _aten.to.other
# Places in the arguments of what must lie on one device; indices may be on the CPU.
_ALIKE = {
    _aten.index.Tensor: (0,),
    _aten.index_put.default: (0, 2),
    _aten.index_put_.default: (0, 2),
    _aten._index_put_impl_.default: (0, 2),
}


@contextmanager
def fake_cuda(free_bytes: int = 2**31, *, interprets: bool = False, index: int = 0) -> Iterator[torch.device]:
    """While this is open, in this thread and those that it starts, there is the device "cuda:INDEX", whose memory has
    `free_bytes` left. Those before it exist, too, but nothing may be made or launched there: each thread begins with
    the first as its current device.

    Its tensors say that they are there, are computed on the CPU and refuse to meet tensors of the CPU, as those of a
    real device do. So it shows whether a program puts everything where it belongs. What is captured as a graph
    (torch.cuda.graph) is noted and done again when that is replayed; CaptureError says what a real one could not: that
    the host waits for the device, that numbers of the host are copied from memory that is not page-locked, that an
    input is another tensor than before. Free memory is what tensors and graphs that are there leave of it. In place of
    the Triton kernels there are those of testing.triton, or if it `interprets`, for which Triton must be imported with
    TRITON_INTERPRET=1, they themselves: a hundred times slower. It shows nothing of a GPU's own rounding, streams or
    speed.
    """
    captures, current = _Captures(), _Current()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(_CudaTensor, "at", torch.device("cuda", index)))
        stack.enter_context(mock.patch.object(_CudaTensor, "memory", memory := _Memory()))

        def replace(owner: Any, name: str, value: Callable[..., Any]) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        replace(torch.cuda, "_lazy_init", lambda: None)
        replace(torch.cuda, "is_available", lambda: True)
        replace(torch.cuda, "device_count", lambda: index + 1)
        replace(torch.cuda, "current_device", lambda: current.index)
        replace(torch.cuda, "set_device", current.set)
        replace(torch.cuda, "synchronize", lambda device=None: None)
        replace(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
        replace(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        replace(torch.cuda, "mem_get_info", lambda device=None: (free_bytes - memory.taken, 2 * free_bytes))
        replace(torch.cuda, "memory_stats", lambda device=None: {"allocation.all.allocated": memory.num_made})
        replace(torch.cuda, "get_device_name", lambda device=None: _Properties.name)
        replace(torch.cuda, "get_device_properties", lambda device=None: _Properties)
        plain = threading.Thread.run

        def run(thread: threading.Thread) -> None:  # torch keeps modes by thread
            with _Dispatch(captures), _Calls(captures):
                plain(thread)

        replace(threading.Thread, "run", run)
        replace(torch.cuda, "CUDAGraph", Graph)
        replace(torch.cuda, "graph", captures.capture)
        replace(torch.cuda, "graph_pool_handle", lambda: (0, 0))
        stack.enter_context(faked_nccl(lambda: captures.graph, _numbers_of))
        replace(torch.cuda, "Event", _Event)
        replace(torch.cuda, "Stream", lambda device=None: current.check())
        replace(torch.cuda, "current_stream", lambda device=None: None)
        replace(torch.cuda, "set_stream", lambda stream: None)
        stack.enter_context(_interpreted(captures) if interprets else _stand_ins(current))
        stack.enter_context(_Dispatch(captures))
        stack.enter_context(_Calls(captures))
        yield _CudaTensor.at


class _Memory:
    """What tensors lie in that are there."""

    def __init__(self) -> None:
        self.num_made = 0  # of them, ever
        self._storages: dict[StorageWeakRef, int] = {}  # with their bytes
        self._most = 10_000  # before those that are gone are looked for
        self._lock = threading.Lock()

    def note(self, numbers: Tensor) -> None:
        with self._lock:
            self.num_made += (memory := weak_ref(numbers)) not in self._storages
            self._storages[memory] = numbers.untyped_storage().nbytes()
            if len(self._storages) > self._most:
                self._forget()
                self._most = max(self._most, 2 * len(self._storages))

    @property
    def taken(self) -> int:
        with self._lock:
            self._forget()
            return sum(self._storages.values())

    def _forget(self) -> None:
        there = [pair for pair in self._storages.items() if not pair[0].expired()]  # type: ignore[no-untyped-call]
        self._storages = dict(there)


class _Current(threading.local):
    """The current device of each thread."""

    index = 0

    def set(self, device: Any) -> None:
        self.index = device if isinstance(device, int) else _index_of(device) or 0

    def check(self) -> None:
        """Raises RuntimeError where that is another than the one that has memory."""
        if self.index != _CudaTensor.at.index:
            raise RuntimeError(f"The current device is cuda:{self.index}, and {_CudaTensor.at} is to compute.")

    def launching(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Triton launches on the current device, whatever memory it is given."""

        @wraps(function)
        def launched(*args: Any, **named: Any) -> Any:
            self.check()
            return function(*args, **named)

        return launched


class _Properties:
    """Of a device that is faked."""

    name, total_memory, major, minor = "a GPU that is not there", 2**32, 9, 0


class _Captures:
    """The graphs that threads are capturing, and which memory of the host is page-locked."""

    def __init__(self) -> None:
        self._graphs: dict[int, Graph] = {}
        self._pinned: set[StorageWeakRef] = set()

    @property
    def graph(self) -> Graph | None:
        """This thread's."""
        return self._graphs.get(threading.get_ident())

    @contextmanager
    def capture(self, graph: Graph, pool: Any = None, stream: Any = None, **options: Any) -> Iterator[None]:
        """In place of torch.cuda.graph."""
        thread = threading.get_ident()
        if thread in self._graphs:
            raise CaptureError("One graph is captured at a time.")
        self._graphs[thread] = graph
        try:
            yield
        finally:
            del self._graphs[thread]
            graph.end()

    def lock(self, made: Tensor) -> Tensor:
        """Memory of the host, page-locked."""
        self._pinned.add(weak_ref(made))
        return made

    def is_locked(self, numbers: Tensor) -> bool:
        return weak_ref(numbers) in self._pinned


class _Event:
    """All that came before it has run."""

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


@contextmanager
def _interpreted(captures: _Captures) -> Iterator[None]:
    """Triton's interpreter, on the numbers of the device's tensors; what it launches is captured."""
    from triton.runtime.interpreter import GridExecutor

    mend_interpreter()
    plain = GridExecutor.__call__

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        args, kwargs = mapped(_numbers_of, args), mapped(_numbers_of, kwargs)
        run, graph = partial(plain, executor), captures.graph
        if graph is not None:
            graph.overwrites(tensors_in((args, kwargs)))
            graph.note(run, args, kwargs, None, is_mutable=True)
        with _disable_current_modes():
            run(*args, **kwargs)

    with mock.patch.object(GridExecutor, "__call__", launch):
        yield


@contextmanager
def _stand_ins(current: _Current) -> Iterator[None]:
    """In place of the Triton kernels those of testing.triton."""
    package, stand_ins = specserve.kernels.__name__, dict[str, Any](triton.MODULES)
    for name, module in triton.MODULES.items():
        if isinstance(module, SimpleNamespace):
            parts = vars(module).items()
            stand_ins[name] = SimpleNamespace(
                **{key: part if isinstance(part, type) else current.launching(part) for key, part in parts}
            )
    names = {f"{package}.{name}": module for name, module in stand_ins.items()}
    bound = f"{package}.triton"  # which binds these when it is imported
    before = {name: sys.modules.pop(name) for name in (*names, bound) if name in sys.modules}
    modules: dict[str, Any] = sys.modules  # anything that has the names will do
    modules.update(names)
    with ExitStack() as stack:
        for name, module in stand_ins.items():
            stack.enter_context(mock.patch.object(specserve.kernels, name, module, create=True))
        try:
            yield
        finally:
            for name in (*names, bound):
                sys.modules.pop(name, None)
            sys.modules.update(before)


class _CudaTensor(Tensor):
    """What is computed with is `_numbers`, on the CPU."""

    at = torch.device("cuda:0")  # where all of them are
    memory = _Memory()
    _numbers: Tensor
    device = property(lambda self: _CudaTensor.at)
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
        cls.memory.note(numbers)
        return made

    def data_ptr(self) -> int:
        return self._numbers.data_ptr()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self._numbers!r} on {_CudaTensor.at}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # it is called so
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _computed(func, args, kwargs or {})


class _Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls without a tensor of the device, which may ask for one, and all that are captured."""

    def __init__(self, captures: _Captures) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._captures = captures

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {}, self._captures)


class _Calls(TorchFunctionMode):
    """What torch does before it dispatches."""

    def __init__(self, captures: _Captures) -> None:
        super().__init__()
        self._captures = captures

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:  # a name, where nothing is made yet
            return func(*args, **(kwargs or {}))
        args = tuple(map(_with_index, args))
        kwargs = {name: _with_index(value) for name, value in (kwargs or {}).items()}
        is_captured = self._captures.graph is not None
        if kwargs.pop("pin_memory", False):
            return self._captures.lock(func(*args, **kwargs))
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == _CudaTensor.at:
            if is_captured:
                raise CaptureError("A tensor of numbers from the host is made on the device, which a graph cannot.")
            return _CudaTensor(func(*args, **{**kwargs, "device": None}))
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            args = args[0], _indices(args[1]), *args[2:]
        if func in (Tensor.numpy, Tensor.tolist) and isinstance(args[0], _CudaTensor):
            if func is Tensor.numpy:
                raise TypeError(f"can't convert {_CudaTensor.at} device type tensor to numpy")
            if is_captured:
                raise CaptureError("tolist() has the host wait for numbers of the device, which a graph cannot.")
            return args[0]._numbers.tolist()
        return func(*args, **kwargs)


def _computed(func: Any, args: Any, kwargs: Any, captures: _Captures | None = None) -> Any:
    if func in _MOVES:
        return _moved(func, args, kwargs, captures)
    tensors = list(tensors_in((args, kwargs)))
    ours = {id(each._numbers): each for each in tensors if isinstance(each, _CudaTensor)}
    assert not any(each.is_meta for each in tensors), f"{func}: torch made a tensor of the device without numbers"
    if ours and len(ours) < len(tensors) and func not in _COPIES:
        alike = tensors if func not in _ALIKE else [args[place] for place in _ALIKE[func]]
        if strangers := [each for each in alike if not isinstance(each, _CudaTensor) and each.dim()]:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {_CudaTensor.at} and "
                f"cpu: {func} of {[list(each.shape) for each in strangers]}"
            )
    is_ours = bool(ours)
    if func is _aten.copy_.default:
        is_ours = isinstance(args[0], _CudaTensor)
    elif asked := kwargs.get("device"):
        is_ours = asked.type in ("cuda", "meta")  # "meta" where gradients take after our tensors
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = mapped(_numbers_of, args), mapped(_numbers_of, kwargs)
    graph = captures.graph if captures is not None and (ours or is_ours) else None
    if graph is not None and captures is not None:
        host = [each for each in tensors if not isinstance(each, _CudaTensor)]
        is_copied = not is_ours or any(each.dim() or func in _COPIES for each in host)
        is_locked = func is _aten.copy_.default and captures.is_locked(host[0]) if host else False
        graph.check(func, args, is_copied and not is_locked)
    found = func(*args, **kwargs)
    if graph is not None:
        graph.note(func, args, kwargs, found, func._schema.is_mutable)
    if not is_ours:
        return found

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return ours[id(value)] if id(value) in ours else _CudaTensor(value)  # changed in place, it is what it was

    return mapped(wrapped, found)


def _moved(func: Any, args: Any, kwargs: Any, captures: _Captures | None) -> Any:
    """As one of Tensor.to's forms does: a copy where another device or dtype is asked for, or a copy."""
    names = [each.name for each in func._schema.arguments]
    asked: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
    tensor, like = asked["self"], asked.get("other", asked["self"])
    device, dtype = asked.get("device") or like.device, asked.get("dtype") or like.dtype
    if (device, dtype) == (tensor.device, tensor.dtype) and not asked.get("copy"):
        return tensor
    return _computed(_aten._to_copy.default, (tensor,), {"dtype": dtype, "device": device}, captures)


def _numbers_of(value: Any) -> Any:
    return value._numbers if isinstance(value, _CudaTensor) else value


def _with_index(value: Any) -> Any:
    is_named = isinstance(value, str) and value.partition(":")[0] == "cuda"
    if not is_named and not (isinstance(value, torch.device) and value.type == "cuda"):
        return value
    index = _index_of(value)
    index = torch.cuda.current_device() if index is None else index
    if index != _CudaTensor.at.index:
        raise RuntimeError(f"Something is made on cuda:{index}, and {_CudaTensor.at} is to compute.")
    return _CudaTensor.at


def _index_of(device: Any) -> int | None:
    return (torch.device(device) if isinstance(device, str) else device).index


def _indices(value: Any) -> Any:
    """Lists as tensors of the CPU: torch would make them where the tensor that they index lies, without numbers."""
    if isinstance(value, tuple):
        return tuple(map(_indices, value))
    return torch.tensor(value, dtype=None if value else torch.int64) if isinstance(value, list) else value
