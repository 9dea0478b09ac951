"""Which LoRA adapters requests may name, and which of them have a slot: the few whose sequences may share a step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType

from specserve.adapters import AdapterInfo, LoadedAdapter
from specserve.errors import InputError, shown, unknown
from specserve.runtime.executor import Executor
from specserve.speculation.adapter_heads import AdapterHeads
from specserve.types import Sequence


class UnknownAdapterError(InputError):
    """The request names an adapter that is not loaded."""

    code = "model_not_found"

    def __init__(self, name: str, known: Mapping[str, object]) -> None:
        none = f"There is no adapter {shown(name)}: none is loaded."
        super().__init__(unknown("adapter", name, sorted(known)) if known else none, "adapter")


class Adapters:
    """Adapters by name, over so many slots of the executor. A sequence takes a reference when it is queued (`open`),
    a slot while it runs (`acquire`, `release`), and lets go when it ends (`close`). An adapter keeps its slot when
    nobody runs with it, until another needs that: of such the one that was used least recently loses it, never one that
    is pinned. What nobody refers to any more leaves memory, with the head that it brought."""

    def __init__(self, executor: Executor | None = None, num_slots: int = 0, heads: AdapterHeads | None = None) -> None:
        self._executor, self._heads = executor, heads
        self._listed: dict[str, LoadedAdapter] = {}
        self._free = list(range(num_slots))[::-1]
        self._placed: OrderedDict[LoadedAdapter, None] = OrderedDict()  # the least recently used first
        self.num_slots = num_slots
        self.num_loads = self.num_evictions = 0  # of slots

    @property
    def listed(self) -> Mapping[str, AdapterInfo]:
        """Those that requests may name."""
        return MappingProxyType({name: each.info for name, each in self._listed.items()})

    @property
    def num_pinned(self) -> int:
        return sum(each.info.is_pinned for each in self._listed.values())

    def add(self, info: AdapterInfo) -> None:
        """Let requests name it; the executor has loaded its numbers, for it alone. One of that name is replaced:
        sequences that have it end with it. Raises InputError where it is pinned and no slot would be left for
        others, and ConfigError for a head that cannot draft beside the engine's."""
        replaced = self._listed.get(info.name)
        pinned = self.num_pinned - (replaced is not None and replaced.info.is_pinned)
        if info.is_pinned and pinned + 1 >= self.num_slots:
            raise InputError(
                f"Adapter {info.name!r} cannot be pinned: of {self.num_slots} slots (--max-loras) {pinned} hold pinned "
                "adapters, and one must be left for others.",
                "lora_name",
            )
        if self._heads is not None:
            self._heads.open(info.digest)
        self._listed[info.name] = LoadedAdapter(info)
        if replaced is not None:
            self._forget(replaced)

    def remove(self, name: str) -> None:
        """No request may name it any more; sequences that have it end with it. Raises UnknownAdapterError."""
        found = self.find(name)
        del self._listed[name]
        self._forget(found)

    def find(self, name: str) -> LoadedAdapter:
        """Raises UnknownAdapterError."""
        if name not in self._listed:
            raise UnknownAdapterError(name, self._listed)
        return self._listed[name]

    def open(self, seq: Sequence) -> None:
        """A sequence has been queued."""
        if seq.adapter is not None:
            seq.adapter.num_open += 1

    def close(self, seq: Sequence) -> None:
        """A sequence has ended, and released its slot."""
        if seq.adapter is not None:
            seq.adapter.num_open -= 1
            self._drop_unused(seq.adapter)

    def can_acquire(self, seq: Sequence) -> bool:
        """Whether a sequence's adapter has a slot, or may have one now."""
        own = seq.adapter
        return own is None or own.slot >= 0 or bool(self._free) or self._idle() is not None

    def acquire(self, seq: Sequence) -> None:
        """The sequence begins to run, and its adapter has a slot as long; `can_acquire` says so."""
        own = seq.adapter
        if own is None:
            return
        if own.slot < 0:
            if not self._free:
                idle = self._idle()
                assert idle is not None, "can_acquire was asked"
                self._displace(idle)
                self.num_evictions += 1
            own.slot = self._free.pop()
            self._slots.place_adapter(own.slot, own.info.digest)
            self.num_loads += 1
        self._placed[own] = None
        self._placed.move_to_end(own)
        own.num_running += 1

    def release(self, seq: Sequence) -> None:
        """The sequence runs no longer."""
        if seq.adapter is not None:
            seq.adapter.num_running -= 1

    @property
    def _slots(self) -> Executor:
        assert self._executor is not None, "where there are slots, an executor has them"
        return self._executor

    def _idle(self) -> LoadedAdapter | None:
        """Who would lose a slot next."""
        return next((each for each in self._placed if not each.num_running and not each.info.is_pinned), None)

    def _displace(self, adapter: LoadedAdapter) -> None:
        del self._placed[adapter]
        self._slots.place_adapter(adapter.slot, None)
        self._free.append(adapter.slot)
        adapter.slot = -1

    def _forget(self, adapter: LoadedAdapter) -> None:
        adapter.is_listed = False
        self._drop_unused(adapter)

    def _drop_unused(self, adapter: LoadedAdapter) -> None:
        """Give back what nobody can name and no sequence has."""
        if adapter.is_listed or adapter.num_open:
            return
        if adapter.slot >= 0:
            self._displace(adapter)
        self._slots.drop_adapter(adapter.info.digest)
        if self._heads is not None:
            self._heads.drop(adapter.info.digest)
