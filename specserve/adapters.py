"""What is known of a LoRA adapter beside its numbers, which are models/lora.py's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from specserve.errors import ConfigError, SpecserveError, shown

ADAPTERS_OFF = (
    "This engine takes no adapters. Start it with --lora NAME=PATH, or with --max-loras for those that come later."
)
NO_ADAPTER = "none"  # in place of a name: the model as it is
_PINNED, _HEAD = "pinned", "head="


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter to be loaded: under which name, from which folder, whether it always has a slot, and the folder of the
    draft head that its sequences are drafted for with; "": the folder "head" beside it, where there is one."""

    name: str
    path: str
    is_pinned: bool = False
    head: str = ""

    @classmethod
    def parse(cls, text: str, option: str = "--lora") -> AdapterSource:
        """From "name=path", behind which ",pinned" and ",head=path" may follow, as an option has it. Raises
        ConfigError."""
        name, _, path = text.partition("=")
        is_pinned, head = False, ""
        while True:
            rest, _, last = path.rpartition(",")
            if last == _PINNED and not is_pinned:
                path, is_pinned = rest, True
            elif last.startswith(_HEAD) and not head and last.strip() != _HEAD:
                path, head = rest, last.removeprefix(_HEAD).strip()
            else:
                break
        if not name.strip() or not path.strip():
            raise ConfigError(f"{option} is {shown(text)}; it must be name=path; ,pinned and ,head=path may follow.")
        return cls(name.strip(), path.strip(), is_pinned, head)

    def __str__(self) -> str:
        parts = [f"{self.name}={self.path}", *([_PINNED] if self.is_pinned else [])]
        return ",".join([*parts, f"{_HEAD}{self.head}"] if self.head else parts)


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that requests may name."""

    name: str
    path: str  # the folder that it was read from
    rank: int  # its largest
    base: str  # the model that it says it was made for; "" where it says none
    num_bytes: int  # in memory
    digest: str  # of its numbers and its head's, hex: adapters that are alike have the same, whatever their names
    is_pinned: bool = False  # it always has a slot
    head: str = ""  # the folder of the head that drafts for its sequences; "": the engine's own drafter does


AdapterDone = Callable[[AdapterInfo | SpecserveError], object]  # told what came of loading or unloading one


@dataclass(eq=False, slots=True, weakref_slot=True)
class LoadedAdapter:
    """An adapter that is in memory; identity is equality. Sequences hold theirs until they end, so one that is replaced
    or unloaded lives as long as they do."""

    info: AdapterInfo
    slot: int = -1  # that the rows of its sequences name; -1: it has none now
    num_running: int = 0  # sequences
    num_open: int = 0  # sequences that run or wait
    is_listed: bool = True  # whether its name still leads to it

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.info.digest)
