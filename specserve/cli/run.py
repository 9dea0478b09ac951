"""`specserve run`: a model by name, fetched if need be, and a conversation with it."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from cyclopts import Parameter

from specserve.checkpoint.entries import MODELS, short_name
from specserve.cli.answer import write, write_text
from specserve.cli.chat import talk_here
from specserve.cli.generate import batch
from specserve.cli.json_output import JsonFile
from specserve.cli.options import (
    GENERATION,
    Model,
    NamedEngineOptions,
    SamplingOptions,
    engine_options,
)
from specserve.config import DEFAULT_MODEL, EngineConfig
from specserve.errors import InputError

_ENGINE = NamedEngineOptions()
_SAMPLING = SamplingOptions()


def run(
    model: Model = DEFAULT_MODEL,
    prompt: Annotated[str | None, Parameter(group=GENERATION, help="Answer this and end; else a conversation.")] = None,
    *,
    json_file: JsonFile = None,
    system: Annotated[str | None, Parameter(group=GENERATION, help="System message of the conversation.")] = None,
    engine: Annotated[NamedEngineOptions, Parameter(name="*")] = _ENGINE,
    sampling: Annotated[SamplingOptions, Parameter(name="*")] = _SAMPLING,
) -> None:
    """Fetch a model if it is not here, and talk to it; with a prompt, answer that one alone."""
    if json_file is not None and prompt is None:
        raise InputError("--json is for the answer to one prompt, not for a conversation. Give a prompt.", "json")

    sampling.check_adapter(engine)

    def options(name: str) -> dict[str, Any]:
        return engine_options(
            engine, model=name, generation_config=sampling.generation_config, **_fitting(name, engine)
        )

    if prompt is None:
        talk_here(model, options, sampling, system)
        return
    from specserve.llm import LLM

    with LLM(**options(model), progress=sys.stderr.isatty()) as llm:
        messages = [] if system is None else [{"role": "system", "content": system}]
        if json_file is not None:
            asked = [[*messages, {"role": "user", "content": prompt}]]
            batch(llm, asked, sampling.params(llm), sampling.adapter, json_file)
            return
        messages.append({"role": "user", "content": prompt})
        write(llm.stream_chat(messages, sampling.params(llm), adapter=sampling.adapter), write_text)


def _fitting(model: str, engine: EngineConfig) -> dict[str, Any]:
    """What makes a model of the catalog fit this machine's memory, if nobody has said how to store it or how long its
    context is to be: another quantization, a shorter context."""
    name = short_name(model)
    is_open = engine.dtype == engine.quantization == "auto" and engine.max_model_len is engine.kv_cache_gib is None
    if name not in MODELS or not is_open:
        return {}
    from specserve.doctor import fits_here
    from specserve.ops.device import choose_device

    fit = fits_here([name], choose_device(engine.device), engine.isa)[name]
    changed: dict[str, Any] = {} if fit.is_default else {"quantization": fit.kind}
    if fit.context < MODELS[name].context:
        changed["max_model_len"] = fit.context
    if fit.is_large or not changed:  # a model that is too large is refused with its figures
        return {}
    print(f"{name} {fit.describe(MODELS[name])}", file=sys.stderr)
    return changed
