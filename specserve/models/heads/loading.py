"""Loads a draft head to run beside its target."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specserve.errors import ModelError
from specserve.models.decoder import Decoder
from specserve.models.heads.block import BlockHead
from specserve.models.heads.eagle import EagleHead
from specserve.models.heads.formats import fits, read_head
from specserve.models.heads.medusa import MedusaHead
from specserve.models.heads.spec import BlockSpec, MedusaSpec, TargetShape
from specserve.ops import Ops


def load_head(folder: Path, kind: str, target: Decoder, ops: Ops) -> EagleHead | BlockHead | MedusaHead:
    """The head in `folder`, which is of that kind, for `target`. Raises ModelError for another kind, for one that
    cannot be run, and for one that was made for another target."""
    own = target.spec
    found = read_head(folder, own.num_layers)
    spec = found.spec
    if spec.kind != kind:
        raise ModelError(f"{folder} is a draft head of kind {spec.kind!r}, for --drafter {spec.kind}.")
    fits(spec, TargetShape(hidden_size=own.hidden_size, num_layers=own.num_layers, vocab_size=own.vocab_size))
    if isinstance(spec, MedusaSpec):
        return MedusaHead(spec, found.weights, found.d2t, ops)
    layers = dataclasses.replace(spec.layers, max_len=own.max_len)  # its rotation has no end of its own
    given = found.weights, found.d2t, ops, target
    if isinstance(spec, BlockSpec):
        return BlockHead(dataclasses.replace(spec, layers=layers), *given)
    return EagleHead(dataclasses.replace(spec, layers=layers), *given)
