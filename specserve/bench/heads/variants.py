"""What a head may wrongly be shown, or was wrongly shown when it was trained: its inputs moved by one place, and other
layers of the target."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from specserve.bench.heads.replay import Shown

IDS, STATES, TAPS = "ids", "states", "taps"  # groups, which are faults as well
_BEFORE, _AFTER = "one place earlier", "one place later"


@dataclass(frozen=True, slots=True)
class Variant:
    """A replay with other inputs. `group` is the fault that a head has which does better with them."""

    group: str
    name: str
    shown: Shown = field(default_factory=Shown)


def moved(reads_tokens: bool) -> list[Variant]:
    """Token ids, for a head that reads any, and hidden states of a place too early or too late."""
    found = []
    for offset, where in ((-1, _BEFORE), (1, _AFTER)):
        if reads_tokens:
            found.append(Variant(IDS, f"token ids {where}", Shown(tokens=offset)))
        found.append(Variant(STATES, f"hidden states {where}", Shown(rows=offset)))
    return found


def other_taps(layers: Many[int], num_layers: int) -> list[Variant]:
    """Other layers than the head's own, as the conventions differ: ids that count inputs of layers and are read as
    outputs, or the other way round, all or one of them; another order; what published heads read."""
    own = tuple(layers)
    chosen: dict[tuple[int, ...], None] = {}
    for offset in (-1, 1):
        chosen[tuple(layer + offset for layer in own)] = None
    if len(own) > 1:
        chosen[own[::-1]] = None
        for published in (_eagle(num_layers), _spread(num_layers, len(own))):
            chosen[published] = None
        for place in range(len(own)):
            for offset in (-1, 1):
                chosen[(*own[:place], own[place] + offset, *own[place + 1 :])] = None
            chosen[(*own[place:], *own[:place])] = None
    possible = [
        other
        for other in chosen
        if other != own and len(other) == len(own) and all(0 <= layer < num_layers for layer in other)
    ]
    return [
        Variant(TAPS, f"layers {shown(other)}", Shown(layers=dict(zip(own, other, strict=True)))) for other in possible
    ]


def shown(layers: Many[int]) -> str:
    return ", ".join(map(str, layers))


def _eagle(num_layers: int) -> tuple[int, ...]:
    """What enters layers 2, n / 2 and n - 3, as EAGLE-3 has it (arXiv 2503.01840)."""
    return (1, num_layers // 2 - 1, num_layers - 4)


def _spread(num_layers: int, count: int) -> tuple[int, ...]:
    """Evenly from the second to the third but last, as DFlash has it (arXiv 2602.06036)."""
    first, last = 1, num_layers - 3
    return tuple(round(first + (last - first) * place / (count - 1)) for place in range(count))


def layers_of(variants: Many[Variant], own: Many[int]) -> set[int]:
    """All that are read in any of them."""
    return {*own, *(layer for each in variants for layer in each.shown.layers.values())}
