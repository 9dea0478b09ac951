"""Adapters that are loaded while an engine runs: read on a thread, and known from a moment between two steps on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from specserve.adapters import ADAPTERS_OFF, AdapterDone, AdapterInfo, AdapterSource
from specserve.errors import ConfigError, InputError, SpecserveError

if TYPE_CHECKING:
    from specserve.engine.adapter_loader import AdapterLoader
    from specserve.engine.adapters import Adapters


class AdapterLoading:
    """Adapters that are read on a thread, and join those that requests may name between two steps. `loader` None: there
    are none."""

    def __init__(self, loader: AdapterLoader | None, adapters: Adapters) -> None:
        self._loader, self._adapters = loader, adapters
        self._thread: ThreadPoolExecutor | None = None
        self._reading: list[tuple[Future[AdapterInfo], bool, AdapterDone]] = []

    def __len__(self) -> int:
        return len(self._reading)

    def start(self, source: AdapterSource, replaces: bool, done: AdapterDone) -> None:
        """`done` is called by `finish` with what has come of it. Without `replaces` a name that is taken is refused."""
        if self._loader is None:
            done(ConfigError(ADAPTERS_OFF))
            return
        self._thread = self._thread or ThreadPoolExecutor(1, "specserve-adapters")
        self._reading.append((self._thread.submit(self._load, self._loader, source, replaces), replaces, done))

    def finish(self) -> None:
        """Let requests name those that have been read. Between steps."""
        for entry in [entry for entry in self._reading if entry[0].done()]:
            self._reading.remove(entry)
            read, replaces, done = entry
            try:
                done(self._add(read.result(), replaces))
            except SpecserveError as error:
                done(error)
            except Exception as error:  # nobody foresaw it; it ends this loading, and neither a step nor the engine
                done(InputError(f"The adapter cannot be loaded: {type(error).__name__}: {error}", "lora_path"))

    def remove(self, name: str, done: AdapterDone) -> None:
        try:
            info = self._adapters.find(name).info
            self._adapters.remove(name)
            done(info)
        except InputError as error:
            done(error)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _load(self, loader: AdapterLoader, source: AdapterSource, replaces: bool) -> AdapterInfo:
        self._check_name(source.name, replaces)
        return loader.load(source)

    def _add(self, info: AdapterInfo, replaces: bool) -> AdapterInfo:
        assert self._loader is not None, "it was read"
        try:
            self._check_name(info.name, replaces)
            self._adapters.add(info)
        except Exception:
            self._loader.drop(info)
            raise
        return info

    def _check_name(self, name: str, replaces: bool) -> None:
        if not replaces and name in self._adapters.listed:
            raise InputError(f"Adapter {name!r} is loaded. Unload it first, or ask for it to be replaced.", "lora_name")
