"""The contract of whatever starts engines on other machines, and the messages in which it is told."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import msgspec

AUTO = "auto"  # the cluster that this machine belongs to


class Plan(msgspec.Struct, frozen=True):
    """What is the same for all engines of a launcher. `cluster` is HOST:PORT of the head, or AUTO. An engine has a
    machine on which there is room for `num_ranks` processes with `cpus` threads and `gpus` GPUs each. `actor`, as
    "module:Class", is a class of which an object is made there with `settings`, a text: see Actor."""

    cluster: str
    actor: str
    settings: str
    cpus: int
    gpus: int = 0
    num_ranks: int = 1


class Actor(Protocol):
    """An engine where it runs, in a process that has nothing else to do and with which it ends. The second and third
    of what a method returns are the cause, and as Lost says them."""

    async def listening(self) -> tuple[str, str, str]:
        """HOST:PORT where it waits for its server, before it loads anything; "" when it cannot."""

    async def ended(self) -> tuple[str, str]:
        """Once there will be no engine there any more."""


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Have an engine of this number, always: where it is lost another takes its place, as soon as there is room."""

    number: int


class End(msgspec.Struct, frozen=True, tag="end"):
    """End the engine of this number, and give back what was kept for it."""

    number: int


Order: TypeAlias = Start | End


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """The cluster can be used; its address, and how many machines it has now."""

    address: str
    num_nodes: int


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """The engine of this number waits for its server at `address`, HOST:PORT; the one before it, if any, is gone."""

    number: int
    address: str


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """The engine of this number is gone, or could not start; another is being started. `final` is the name of an error
    of specserve.errors where that will fail the same way, else ""."""

    number: int
    cause: str
    final: str = ""


class Waiting(msgspec.Struct, frozen=True, tag="waiting"):
    """There is no room for the engine of this number; it is started when there is."""

    number: int
    cause: str


class Unusable(msgspec.Struct, frozen=True, tag="unusable"):
    """The cluster cannot be used, and why."""

    cause: str


News: TypeAlias = Joined | Listening | Lost | Waiting | Unusable


class EngineLauncher(Protocol):
    """Starts engines by number and keeps them there."""

    def start(self, number: int) -> None:
        """As Start."""

    def end(self, number: int) -> None:
        """As End."""

    async def news(self) -> News:
        """What has happened next. Raises ConfigError for a cluster that has never been usable."""

    async def close(self) -> None:
        """End all engines."""
