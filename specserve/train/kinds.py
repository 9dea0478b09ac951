"""Makes the head of each kind that a run asks for, with the target's tables in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from specserve.errors import ConfigError
from specserve.models.heads.spec import BlockSpec, EagleSpec, MedusaSpec
from specserve.train import block, eagle
from specserve.train.block import BlockHead
from specserve.train.config import TrainingOptions
from specserve.train.eagle import EagleHead
from specserve.train.heads import TrainedHead, layers_spec
from specserve.train.medusa import MedusaHeads
from specserve.train.target import Target

Maker = Callable[[Target, NDArray[np.int64], int, tuple[int, ...], TrainingOptions], TrainedHead]


def hidden_layers(kind: str, num_layers: int, options: TrainingOptions) -> tuple[int, ...]:
    """Those of a target with `num_layers` that such a head reads. Raises ConfigError for what the target has not."""
    if wrong := [layer for layer in options.hidden_layers if not 0 <= layer < num_layers]:
        raise ConfigError(f"--hidden-layers has {wrong}; the target has 0 to {num_layers - 1}.")
    if kind == "medusa":
        if options.hidden_layers:
            raise ConfigError("--hidden-layers: medusa reads what stands behind the target's last layer. Leave it out.")
        return (num_layers - 1,)
    default = eagle.default_layers if kind == "eagle" else block.default_layers
    return options.hidden_layers or default(num_layers)


def make_head(
    kind: str, target: Target, ids: NDArray[np.int64], mask_token_id: int, options: TrainingOptions
) -> TrainedHead:
    """A head that proposes from `ids`, ascending; the same bits for the same options.seed. `mask_token_id` stands for
    tokens that a block has yet to guess. Raises ConfigError as `hidden_layers` does."""
    layers = hidden_layers(kind, target.spec.num_layers, options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        return _MAKERS[kind](target, ids, mask_token_id, layers, options)


def _eagle(
    target: Target, ids: NDArray[np.int64], mask_token_id: int, layers_read: tuple[int, ...], options: TrainingOptions
) -> TrainedHead:
    layers = layers_spec(target.spec, options.layers, len(ids), options.qk_norm)
    spec = EagleSpec(
        version=3,
        target=target.shape,
        layers=layers,
        hidden_layers=layers_read,
        has_head=True,
    )
    return EagleHead(spec, ids, *target.tables(), options.depth)


def _block(
    target: Target, ids: NDArray[np.int64], mask_token_id: int, layers_read: tuple[int, ...], options: TrainingOptions
) -> TrainedHead:
    spec = BlockSpec(
        target=target.shape,
        layers=layers_spec(target.spec, options.layers, len(ids), options.qk_norm),
        hidden_layers=layers_read,
        block_size=options.depth,
        mask_token_id=mask_token_id,
        has_head=True,
        is_causal=options.causal,
        bigram_rank=options.bigram_rank,
    )
    return BlockHead(spec, ids, *target.tables())


def _medusa(
    target: Target, ids: NDArray[np.int64], mask_token_id: int, layers_read: tuple[int, ...], options: TrainingOptions
) -> TrainedHead:
    spec = MedusaSpec(
        target=target.shape, num_heads=options.depth, num_layers=options.layers, draft_vocab_size=len(ids)
    )
    return MedusaHeads(spec, ids, *target.tables(), target.spec.final_norm.eps)


_MAKERS: Mapping[str, Maker] = {"eagle": _eagle, "block": _block, "medusa": _medusa}


def in_words(head: TrainedHead) -> str:
    """The head's spec but for the target, and how many numbers it has of its own."""
    fields = {field.name: getattr(head.spec, field.name) for field in dataclasses.fields(head.spec)}
    shown = ", ".join(f"{name} {value}" for name, value in fields.items() if name not in ("target", "layers"))
    learning = sum(each.numel() for each in head.parameters() if each.requires_grad)
    frozen = sum(each.numel() for each in head.parameters() if not each.requires_grad)
    return f"{head.spec.kind}: {shown}; {learning:,} numbers learn, {frozen:,} are the target's"
