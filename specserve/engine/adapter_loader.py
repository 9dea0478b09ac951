"""Reads LoRA adapters for an engine, beside its steps."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from specserve.adapters import ADAPTERS_OFF, AdapterInfo, AdapterSource
from specserve.checkpoint.peft import read_peft
from specserve.errors import ConfigError
from specserve.files import reading
from specserve.models.lora import read_adapter
from specserve.runtime.executor import Executor


def check_folders(sources: Iterable[AdapterSource]) -> None:
    """Raises ModelError for a folder that is no adapter's, or one of a kind that is not supported."""
    for source in sources:
        folder = Path(source.path).expanduser()
        with reading(folder):
            read_peft(folder)


class AdapterLoader:
    """Reads adapters for the model in a folder and gives them to the executor. Any thread may call it."""

    def __init__(self, executor: Executor, model: Path, num_slots: int, max_rank: int) -> None:
        self._executor, self._model, self._num_slots, self._max_rank = executor, model, num_slots, max_rank

    def load(self, source: AdapterSource) -> AdapterInfo:
        """Reads and packs an adapter, which takes no part in steps until `engine.adapters` knows it; whoever does not
        add it there has to drop it. Raises ModelError, CapacityError, and ConfigError where there are no slots."""
        if not self._num_slots:
            raise ConfigError(ADAPTERS_OFF)
        folder = Path(source.path).expanduser()
        found = read_adapter(folder, self._model, self._max_rank)
        num_bytes = self._executor.load_adapter(found.digest, found.weights)
        return AdapterInfo(
            name=source.name,
            path=str(folder),
            rank=found.rank,
            base=found.base,
            num_bytes=num_bytes,
            digest=found.digest,
            is_pinned=source.is_pinned,
        )

    def drop(self, info: AdapterInfo) -> None:
        """Take back a load."""
        self._executor.drop_adapter(info.digest)
