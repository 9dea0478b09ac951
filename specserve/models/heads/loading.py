"""Loads draft heads to run beside their target."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from specserve.checkpoint import catalog
from specserve.errors import ModelError
from specserve.files import reading
from specserve.models.heads import zoo
from specserve.models.heads.block import BlockHead
from specserve.models.heads.eagle import EagleHead
from specserve.models.heads.formats import Head, fits, has_next_token_layers, read_head, read_next_token_layers
from specserve.models.heads.medusa import MedusaHead
from specserve.models.heads.origin import TargetOrigin
from specserve.models.heads.spec import BlockSpec, MedusaSpec, TargetShape
from specserve.models.loader import AnyModel
from specserve.ops import Ops

MTP = "mtp"  # the kind of heads that stand in a model's checkpoint


class HeadLoader:
    """Loads heads for `target`, whose checkpoint lies in `folder`."""

    def __init__(self, folder: Path, target: AnyModel, ops: Ops) -> None:
        self._folder, self._target, self._ops = folder, target, ops

    def load(self, name: str | None, kind: str) -> EagleHead | BlockHead | MedusaHead:
        """The head `name`, a folder or a hub id, which is of that kind; None: the one of the zoo that was made for this
        target. Of kind MTP it is the next-token layers of a model's checkpoint; None: of the target's own. Raises
        ModelError for one that is not there, is of another kind, cannot be run or was made for another target."""
        folder = self.folder(name, kind)
        if kind == MTP:
            return self._made(read_next_token_layers(folder))
        with reading(folder):
            found = read_head(folder, self._target.spec.num_layers)
            if found.spec.kind != kind:
                raise ModelError(
                    f"{folder} is a draft head of kind {found.spec.kind!r}, for --drafter {found.spec.kind}."
                )
            return self._made(found)

    def folder(self, name: str | None, kind: str) -> Path:
        """Where `load` reads that head. Raises ModelError for one that is not there."""
        if kind == MTP:
            return self._folder if name is None else catalog.resolve(name)
        return self._from_zoo(kind) if name is None else catalog.resolve_head(name)

    def _made(self, found: Head) -> EagleHead | BlockHead | MedusaHead:
        own, spec = self._target.spec, found.spec
        fits(spec, TargetShape(hidden_size=own.hidden_size, num_layers=own.num_layers, vocab_size=own.vocab_size))
        if isinstance(spec, MedusaSpec):
            return MedusaHead(spec, found.weights, found.d2t, self._ops, self._target)
        weights = self._with_head(found) if spec.shares_head else found.weights
        layers = dataclasses.replace(spec.layers, max_len=own.max_len)  # its rotation has no end of its own
        has_head = spec.has_head or spec.shares_head
        given = weights, found.d2t, self._ops, self._target
        if isinstance(spec, BlockSpec):
            return BlockHead(dataclasses.replace(spec, layers=layers, has_head=has_head), *given)
        return EagleHead(dataclasses.replace(spec, layers=layers, has_head=has_head), *given)

    def has(self, name: str | None, kind: str) -> bool:
        """Whether `load` has a head of that kind by that name. Raises ModelError for one that is not there or cannot be
        read."""
        if kind == MTP:
            return has_next_token_layers(self._folder if name is None else catalog.resolve(name))
        if name is None:
            return zoo.find(kind, TargetOrigin(self._folder).fingerprint()) is not None
        return self.kind(name) == kind

    def kind(self, name: str) -> str:
        """Of the head `name`. Raises ModelError as `has` does."""
        return read_head(catalog.resolve_head(name), self._target.spec.num_layers).spec.kind

    def _from_zoo(self, kind: str) -> Path:
        found = zoo.find(kind, TargetOrigin(self._folder).fingerprint())
        if found is None:
            others = ", ".join(f"{each.verifier} ({each.kind})" for each in zoo.heads())
            raise ModelError(
                f"No {kind} head for this target comes with specserve; there are heads for {others or 'none'}. Name "
                f"one with --drafter-options.head, or train one with specserve train {kind}."
            )
        return found

    def _with_head(self, found: Head) -> Mapping[str, Tensor]:
        """The head's tensors with the target's LM head at its draft ids."""
        rows = TargetOrigin(self._folder).head()
        if found.d2t is not None:
            rows = rows[torch.arange(len(found.d2t)) + found.d2t]
        return {**found.weights, "lm_head.weight": rows}
