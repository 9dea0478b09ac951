"""Makes the head of each kind that a run asks for, with the target's tables in it."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray

from specserve.errors import ConfigError
from specserve.models.heads.spec import BlockSpec, EagleSpec, HeadSpec, MedusaSpec, TargetShape
from specserve.models.spec import DecoderSpec
from specserve.train import block, eagle
from specserve.train.block import BlockHead
from specserve.train.config import TrainingOptions
from specserve.train.eagle import EagleHead
from specserve.train.heads import TrainedHead, layers_spec
from specserve.train.medusa import MedusaHeads
from specserve.train.target import Target


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


def head_spec(kind: str, target: DecoderSpec, num_ids: int, mask_token_id: int, options: TrainingOptions) -> HeadSpec:
    """The head for `target` that the options ask for, which proposes from `num_ids` ids. `mask_token_id` stands for
    tokens that a block has yet to guess. Raises ConfigError as `hidden_layers` does."""
    shape = TargetShape(hidden_size=target.hidden_size, num_layers=target.num_layers, vocab_size=target.vocab_size)
    read = hidden_layers(kind, target.num_layers, options)
    if kind == "medusa":
        return MedusaSpec(target=shape, num_heads=options.depth, num_layers=options.layers, draft_vocab_size=num_ids)
    layers = layers_spec(target, options.layers, num_ids, options.qk_norm)
    if kind == "eagle":
        return EagleSpec(version=3, target=shape, layers=layers, hidden_layers=read, has_head=True)
    return BlockSpec(
        target=shape,
        layers=layers,
        hidden_layers=read,
        block_size=options.depth,
        mask_token_id=mask_token_id,
        has_head=True,
        is_causal=options.causal,
        bigram_rank=options.bigram_rank,
        has_anchor_inputs=options.anchor_inputs,
    )


def make_head(spec: HeadSpec, target: Target, ids: NDArray[np.int64], options: TrainingOptions) -> TrainedHead:
    """A head that proposes from `ids`, ascending; the same bits for the same options.seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        if isinstance(spec, EagleSpec):
            return EagleHead(spec, ids, *target.tables(), options.depth)
        if isinstance(spec, BlockSpec):
            return BlockHead(spec, ids, *target.tables())
        return MedusaHeads(spec, ids, *target.tables(), target.spec.final_norm.eps)


def in_words(head: TrainedHead) -> str:
    """The head's spec but for the target, and how many numbers it has of its own."""
    fields = {field.name: getattr(head.spec, field.name) for field in dataclasses.fields(head.spec)}
    shown = ", ".join(f"{name} {value}" for name, value in fields.items() if name not in ("target", "layers"))
    learning = sum(each.numel() for each in head.parameters() if each.requires_grad)
    frozen = sum(each.numel() for each in head.parameters() if not each.requires_grad)
    return f"{head.spec.kind}: {shown}; {learning:,} numbers learn, {frozen:,} of the LM head do not"
