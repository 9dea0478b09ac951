"""What a family's checkpoints call the tensors that all models share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_KINDS = ("weight", "bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names without ".weight" and ".bias", Llama's and the family's: of what there is once, and of what each layer has.
    Tensors that have Llama's names already need no entry."""

    base: str = ""  # in front of all names but the LM head's, with a dot; some checkpoints leave it out
    layers: str  # in front of a layer's number
    once: Mapping[str, str]
    each: Mapping[str, str]
    unread: tuple[str, ...] = ()  # tensors of layers that old checkpoints carry and that follow from the configuration

    def rename(self, stored: str) -> str | None:
        """A stored name as all models have it; None for a tensor that nobody reads. What is unknown stays as it is."""
        name = stored.removeprefix(self.base)
        if (found := re.fullmatch(rf"{re.escape(self.layers)}\.(\d+)\.(.+)", name)) is not None:
            number, own = found.groups()
            return None if own in self.unread else f"model.layers.{number}.{_renamed(own, _inverse(self.each))}"
        renamed = _renamed(name, _inverse(self.once))
        return stored if renamed == name else renamed

    def stored(self, name: str) -> str:
        """What the family's checkpoints call the tensor that all models call so."""
        if (found := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)) is not None:
            number, own = found.groups()
            return f"{self.base}{self.layers}.{number}.{_renamed(own, self.each)}"
        renamed = _renamed(name, self.once)
        return renamed if name.startswith("lm_head.") else self.base + renamed


def _inverse(names: Mapping[str, str]) -> dict[str, str]:
    return {theirs: ours for ours, theirs in names.items()}


def _renamed(tensor: str, names: Mapping[str, str]) -> str:
    layer, _, kind = tensor.rpartition(".")
    return f"{names[layer]}.{kind}" if layer in names and kind in _KINDS else tensor
