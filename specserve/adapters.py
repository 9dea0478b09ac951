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
_PINNED = ",pinned"


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter to be loaded: under which name, from which folder, and whether it always has a slot."""

    name: str
    path: str
    is_pinned: bool = False

    @classmethod
    def parse(cls, text: str, option: str = "--lora") -> AdapterSource:
        """From "name=path" or "name=path,pinned", as an option has it. Raises ConfigError."""
        name, _, path = text.partition("=")
        is_pinned = path.endswith(_PINNED)
        path = path.removesuffix(_PINNED)
        if not name.strip() or not path.strip():
            raise ConfigError(f"{option} is {shown(text)}; it must be name=path, or name=path,pinned.")
        return cls(name.strip(), path.strip(), is_pinned)

    def __str__(self) -> str:
        return f"{self.name}={self.path}{_PINNED if self.is_pinned else ''}"


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that requests may name."""

    name: str
    path: str  # the folder that it was read from
    rank: int  # its largest
    base: str  # the model that it says it was made for; "" where it says none
    num_bytes: int  # in memory
    digest: str  # of what its numbers are, hex: adapters that are alike have the same, whatever their names
    is_pinned: bool = False  # it always has a slot


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
