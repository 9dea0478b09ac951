"""Imports xgrammar without the packages that it names and that nothing here needs of it: torch and transformers.

With them it takes seconds and a quarter of a GiB, in a process that has neither (a third of a second and 30 MiB
without). Its masks are written to numpy arrays, so what it says about tensors is never called.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_UNNEEDED = ("torch", "transformers")


def xgrammar_module() -> ModuleType:
    """xgrammar. Where torch is loaded already, that is what it gets. Raises ModuleNotFoundError."""
    os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")  # else some versions compile C++ when imported
    with _crashes_as_before():
        return _imported()


def _imported() -> ModuleType:
    if "torch" in sys.modules or "xgrammar" in sys.modules or importlib.util.find_spec("xgrammar") is None:
        return importlib.import_module("xgrammar")
    try:
        with _in_place_of_torch(dict.fromkeys(_UNNEEDED)):
            importlib.import_module("tvm_ffi")  # which looks for torch and does without
        with _in_place_of_torch({name: _Absent(name) for name in _UNNEEDED}):
            return importlib.import_module("xgrammar")
    except (ImportError, AttributeError, TypeError):  # a release that needs more of them than their names
        for name in [name for name in sys.modules if name.split(".")[0] == "xgrammar"]:
            del sys.modules[name]
        return importlib.import_module("xgrammar")


@contextmanager
def _crashes_as_before() -> Iterator[None]:
    """tvm_ffi has SIGSEGV print where it was, which allocates: a process that crashes within malloc would wait for its
    own lock for ever rather than end."""
    libc, before = ctypes.CDLL(None), ctypes.create_string_buffer(256)  # more than a struct sigaction takes
    is_known = libc.sigaction(signal.SIGSEGV, None, before) == 0
    try:
        yield
    finally:
        if is_known:
            libc.sigaction(signal.SIGSEGV, before, None)


class _Absent(ModuleType):
    """Has every name, and nothing behind it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


class _Nothing:
    def __init__(self, *_: object, **__: object) -> None:
        pass


@contextmanager
def _in_place_of_torch(others: dict[str, ModuleType | None]) -> Iterator[None]:
    modules: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment]  # None: what cannot be imported
    modules.update(others)
    try:
        yield
    finally:
        for name in others:
            del modules[name]
