"""The functions of torch that a model of transformers calls itself, apart from those that our ops call for it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class ForeignCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it `called` is called in place of each function of torch, but for what runs in `ours`. What `called` calls
    runs in it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_ours = False

    @abstractmethod
    def called(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What the function gives, after a look at it."""

    @contextmanager
    def ours(self) -> Iterator[None]:
        before, self._is_ours = self._is_ours, True
        try:
            yield
        finally:
            self._is_ours = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_ours:
            return func(*args, **kwargs)
        with self.ours():
            return self.called(func, args, kwargs)
