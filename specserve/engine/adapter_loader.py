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
from specserve.speculation.adapter_heads import AdapterHeads


def check_folders(sources: Iterable[AdapterSource]) -> None:
    """Raises ModelError for a folder that is no adapter's, or one of a kind that is not supported."""
    for source in sources:
        folder = Path(source.path).expanduser()
        with reading(folder):
            read_peft(folder)


class AdapterLoader:
    """Reads adapters for the model in a folder, gives them to the executor, and the heads that they bring to `heads`.
    Any thread may call it."""

    def __init__(self, executor: Executor, heads: AdapterHeads, model: Path, num_slots: int, max_rank: int) -> None:
        self._executor, self.heads, self._model = executor, heads, model
        self._num_slots, self._max_rank = num_slots, max_rank

    def load(self, source: AdapterSource) -> AdapterInfo:
        """Reads and packs an adapter, which takes no part in steps until `engine.adapters` knows it; whoever does not
        add it there has to drop it. Raises ModelError, CapacityError, and ConfigError where there are no slots."""
        if not self._num_slots:
            raise ConfigError(ADAPTERS_OFF)
        folder = Path(source.path).expanduser()
        found = read_adapter(folder, self._model, self._max_rank)
        head = self.heads.read(source)
        digest = found.digest if head is None else head.combined(found.digest)
        num_bytes = self._executor.load_adapter(digest, found.weights)
        if head is not None:
            self.heads.hold(digest, head)
        return AdapterInfo(
            name=source.name,
            path=str(folder),
            rank=found.rank,
            base=found.base,
            num_bytes=num_bytes,
            digest=digest,
            is_pinned=source.is_pinned,
            head="" if head is None else str(head.folder),
        )

    def drop(self, info: AdapterInfo) -> None:
        """Take back a load."""
        self._executor.drop_adapter(info.digest)
        self.heads.drop(info.digest)
