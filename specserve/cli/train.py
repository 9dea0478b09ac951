"""`specserve train`: what a draft head learns from, and how."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from specserve.cli.options import ENGINE_HELP, MODEL, OUTPUT, options_type
from specserve.config import EngineConfig
from specserve.train.config import KINDS, TrainingOptions

TEXT = Group("Text", sort_key=2)
HEAD = Group("Head", sort_key=3)
TRAINING = Group("Training", sort_key=4)
TRAINING_HELP: dict[str, tuple[Group, str]] = {
    "prompts": (TEXT, "JSON lines with prompt or turns (the first is asked), perhaps category; may be gzipped."),
    "text": (TEXT, "Folder of the text that the target writes; several heads may share one [default: OUT/text]."),
    "tokens": (TEXT, "Stop writing at so many output tokens [default: each prompt at each temperature]."),
    "max_tokens": (TEXT, "Most output tokens of an answer."),
    "max_length": (TEXT, "Most tokens of a prompt and its answer; longer prompts are left out."),
    "temperatures": (
        TEXT,
        "0 is greedy; may be repeated: each prompt is answered at each [default: 0, 0.7, 1].",
    ),
    "streams": (TEXT, "Answers that are written at once."),
    "layers": (HEAD, "Decoder layers; medusa: residual blocks of each head."),
    "depth": (HEAD, "Tokens of a draft: steps of the training-time test, rows of a block, or Medusa heads."),
    "hidden_layers": (HEAD, "Layer of the target that the head reads, from 0; may be repeated [default: by kind]."),
    "draft_vocab_size": (HEAD, "Ids that the head proposes from: the most frequent ones."),
    "qk_norm": (HEAD, "Norm queries and keys."),
    "causal": (HEAD, "block: rows see only those before them."),
    "bigram_rank": (HEAD, "block: rank of the bias on the token before; 0 is none."),
    "epochs": (TRAINING, "How often each answer is read."),
    "batch_tokens": (TRAINING, "Most tokens of a step's answers, padding included."),
    "anchors": (TRAINING, "block: blocks that each answer of a step trains."),
    "learning_rate": (TRAINING, "The highest; of Muon and AdamW alike."),
    "decay": (TRAINING, "How the learning rate falls to 0."),
    "warmup": (TRAINING, "Share of the steps in which the learning rate rises."),
    "cache_hidden": (TRAINING, "Keep the target's hidden states on disk: 2 bytes a number, not computed each epoch."),
    "clip": (TRAINING, "Largest norm of the gradients."),
    "cross_entropy": (TRAINING, "Its part of the loss; the rest is total variation."),
    "evaluate_every": (TRAINING, "Steps between two measurements of acceptance."),
    "checkpoint_minutes": (TRAINING, "Minutes between two checkpoints."),
    "seed": (TRAINING, "Of sampled answers, the order of data and the head's first weights."),
    "int8": (
        OUTPUT,
        "Store int8 matrices, and not what is the target's: a quarter of the size, for specserve alone.",
    ),
    "out": (OUTPUT, "Folder for the head, its recipe and curve; what is there of the same run is gone on with."),
}

if TYPE_CHECKING:
    TargetOptions = EngineConfig
    HeadOptions = TrainingOptions
else:
    _NOT_SHOWN = [name for name, (group, _) in ENGINE_HELP.items() if group is not MODEL]
    TargetOptions = options_type(EngineConfig, "TargetOptions", ENGINE_HELP, hidden=_NOT_SHOWN, drafter="none")
    HeadOptions = options_type(TrainingOptions, "HeadOptions", TRAINING_HELP)

_TARGET = TargetOptions()


def train(
    kind: Annotated[Literal[KINDS], Parameter(help="Of the head.")],  # type: ignore[valid-type]
    /,
    *,
    head: Annotated[HeadOptions, Parameter(name="*")],
    target: Annotated[TargetOptions, Parameter(name="*")] = _TARGET,
) -> None:
    """Train a draft head on what the target writes itself. Killed and called again with the same options it goes on."""
    from specserve.train.run import train as run

    names = ("dtype", "quantization", "device", "isa", "threads")
    engine = {name: getattr(target, name) for name in names}
    run(kind, target.model, engine, head, lambda line: print(line, file=sys.stderr, flush=True))
