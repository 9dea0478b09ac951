"""`specserve train`: what a draft head learns from, and how."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from specserve.cli.json_output import JsonFile, write_json
from specserve.cli.options import ENGINE_HELP, MODEL, find_adapter, help_of, options_type
from specserve.config import EngineConfig
from specserve.train.config import KINDS, TrainingOptions

if TYPE_CHECKING:
    TargetOptions = EngineConfig
    HeadOptions = TrainingOptions
else:
    _MODEL_HELP = {name: text for name, text in ENGINE_HELP.items() if text.section == "Model"}
    _MODEL_HELP["lora"] = replace(ENGINE_HELP["lora"], section="Model")
    TargetOptions = options_type(EngineConfig, "TargetOptions", _MODEL_HELP, drafter="none")
    HeadOptions = options_type(TrainingOptions, "HeadOptions", help_of(TrainingOptions, "Training"))

_TARGET = TargetOptions()


def train(
    kind: Annotated[Literal[KINDS], Parameter(help="Kind of the head.")],  # type: ignore[valid-type]
    /,
    *,
    head: Annotated[HeadOptions, Parameter(name="*")],
    target: Annotated[TargetOptions, Parameter(name="*")] = _TARGET,
    adapter: Annotated[
        str | None, Parameter(group=MODEL, help="Train for the model with this LoRA adapter, one that --lora names.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Train a draft head on what the target writes itself. The same options continue an interrupted run."""
    from specserve.train.run import train as run

    names = ("dtype", "quantization", "device", "isa", "threads")
    engine = {name: getattr(target, name) for name in names}
    source = None if adapter is None else find_adapter(adapter, target)
    found = run(kind, target.model, engine, head, lambda line: print(line, file=sys.stderr, flush=True), source)
    write_json(json_file, found)
