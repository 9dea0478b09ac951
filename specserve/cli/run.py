"""`specserve run`: a model by name, fetched if need be, and a conversation with it."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from specserve.cli.answer import write, write_text
from specserve.cli.chat import talk
from specserve.cli.options import (
    ENGINE_HELP,
    GENERATION,
    MODEL,
    SamplingOptions,
    engine_options,
    options_type,
    sampling_params,
)
from specserve.config import DEFAULT_MODEL, EngineConfig

if TYPE_CHECKING:
    RunEngineOptions = EngineConfig
else:
    RunEngineOptions = options_type(EngineConfig, "RunEngineOptions", ENGINE_HELP, hidden=("model",))

_ENGINE = RunEngineOptions()
_SAMPLING = SamplingOptions()


def run(
    model: Annotated[str, Parameter(group=MODEL, help=ENGINE_HELP["model"].text)] = DEFAULT_MODEL,
    prompt: Annotated[str | None, Parameter(group=GENERATION, help="Answer this and end; else a conversation.")] = None,
    *,
    system: Annotated[str | None, Parameter(group=GENERATION, help="System message of the conversation.")] = None,
    engine: Annotated[RunEngineOptions, Parameter(name="*")] = _ENGINE,
    sampling: Annotated[SamplingOptions, Parameter(name="*")] = _SAMPLING,
) -> None:
    """Fetch a model if it is not here, and talk to it; with a prompt, answer that one alone."""
    from specserve.llm import LLM

    options = {**engine_options(replace(engine)), "model": model}
    with LLM(**options, progress=sys.stderr.isatty()) as llm:
        if prompt is None:
            talk(llm, sampling_params(sampling), system)
            return
        messages = [] if system is None else [{"role": "system", "content": system}]
        chunks = llm.stream_chat([*messages, {"role": "user", "content": prompt}], sampling_params(sampling))
        write(chunks, write_text)
