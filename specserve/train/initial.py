"""The head that a training begins with, where that is not a random one."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specserve.errors import ConfigError
from specserve.models.heads.formats import fits, read_head
from specserve.models.heads.spec import BlockSpec, HeadSpec, MedusaSpec, TargetShape
from specserve.models.heads.tensors import draft_vocab_size
from specserve.train.heads import TrainedHead

_SHOWN = 4  # differences, at most
_LM_HEAD = "lm_head.weight"  # of heads in which it does not learn
_ROUNDING = 2.0**-8  # of a number that went through bfloat16


class InitialHead:
    """The draft head in `folder`, of any format that servers load, for a target of this shape. Raises ModelError for
    one that cannot be read or was made for another target, ConfigError for one of another kind."""

    def __init__(self, folder: Path, kind: str, target: TargetShape) -> None:
        self.folder = folder
        self._head = read_head(folder, target.num_layers)
        spec = self._head.spec
        if spec.kind != kind:
            raise ConfigError(f"--init-from: {folder} is a head of kind {spec.kind!r}, for train {spec.kind}.")
        fits(spec, target)
        self._target = target

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """Those of the target that it proposes from, ascending."""
        places, d2t = torch.arange(draft_vocab_size(self._head.spec)), self._head.d2t
        found: NDArray[np.int64] = (places if d2t is None else places + d2t).numpy()
        return found

    @property
    def mask_token_id(self) -> int:
        """0 of heads without one."""
        spec = self._head.spec
        return spec.mask_token_id if isinstance(spec, BlockSpec) else 0

    def digest(self) -> str:
        """Of its tensors and its draft vocabulary."""
        whole = hashlib.blake2b(self.ids.tobytes(), digest_size=16)
        for name in sorted(self._head.weights):
            whole.update(name.encode())
            whole.update(self._head.weights[name].float().numpy().tobytes())
        return whole.hexdigest()

    def check(self, wanted: HeadSpec) -> None:
        """Raise ConfigError naming what differs between this head and the one that the options ask for."""
        found, asked = _flat(self._trained()), _flat(wanted)
        if differing := [name for name in found if name in asked and found[name] != asked[name]]:
            shown = "; ".join(f"{name} is {found[name]!r}, not {asked[name]!r}" for name in differing[:_SHOWN])
            more = f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
            raise ConfigError(
                f"--init-from: {self.folder} is not the head that the options ask for: {shown}{more}. Give the options "
                "of its training (RECIPE.md has them where specserve train made it): --layers, --depth, "
                "--hidden-layers, --draft-vocab-size, --qk-norm, --causal, --bigram-rank, --anchor-inputs. What no "
                "option changes cannot be trained."
            )

    def load(self, head: TrainedHead) -> None:
        """Let `head`, of a spec that was checked, begin with its weights. An LM head that is the target's but for
        rounding stays the target's; another is kept as it is."""
        for name, own in head.state_dict().items():  # which share memory with the head
            if name not in self._head.weights:
                assert name == _LM_HEAD, "a head of that spec lacks only what it shares"
                continue
            given = self._head.weights[name].to(own)
            if name == _LM_HEAD:
                if torch.allclose(given, own, _ROUNDING, _ROUNDING * float(own.abs().max())):
                    continue
                head.has_own_lm_head = True
            own.copy_(given)

    def _trained(self) -> HeadSpec:
        """Its spec as a training's: beside the target's LM head, without what drafts do not ask for."""
        spec = replace(self._head.spec, target=self._target)
        if isinstance(spec, MedusaSpec):
            return spec
        spec = replace(spec, has_head=True, shares_head=False)
        if isinstance(spec, BlockSpec):
            spec = replace(spec, has_confidence=False, confidence_reads_bigram=False)
        return spec


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Fields of fields of dataclasses by their path, as `layers.0.attention.num_heads`; in place of a dataclass itself
    its type, so that one differs from None, and of several their `count`; without the length of the rotation's
    tables."""
    found: dict[str, Any] = {}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found[name] = type(value).__name__
        parts: Mapping[str, Any] = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, tuple) and any(dataclasses.is_dataclass(each) for each in value):
        parts = {"count": len(value), **{str(number): each for number, each in enumerate(value)}}
    else:
        return {} if name == "layers.max_len" else {name: value}
    for part, inner in parts.items():
        found |= _flat(inner, f"{name}.{part}" if name else part)
    return found
