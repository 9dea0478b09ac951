"""The part of the op contract that is about flash attention of other packages, in the place of a backend's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class FlashOps(Protocol):
    """Ops that may hand attention over where a step has prompts and chains alone, and no ALiBi. It has not the promise
    of the other ops: a row's bits depend on the rest of the step."""

    @property
    def flash(self) -> str:
        """Whose flash attention it is; "" where all attention is the backend's own."""

    def flash_attentions(self, block_size: int) -> Mapping[str, str | None]:
        """What there is for a KV cache with such blocks, by name, the fastest first: None, or why it cannot be used, as
        what follows its name in a sentence."""

    def use_flash(self, name: str, block_size: int) -> None:
        """Let it be that one's from now on, "" its own again; before anything is recorded."""


class NoFlash:
    """For backends without it."""

    flash = ""

    def flash_attentions(self, block_size: int) -> Mapping[str, str | None]:
        return {}

    def use_flash(self, name: str, block_size: int) -> None:
        assert not name, "there is none"
