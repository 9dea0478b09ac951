"""`specserve chat`: a conversation in the terminal, with a model here or one of a server; from a pipe, one message."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from specserve.checkpoint.generation_config import AUTO
from specserve.cli.conversation.commands import Conversation, tell
from specserve.cli.conversation.models import ChatModel, LocalModel, ServedModel
from specserve.cli.options import (
    GENERATION,
    MODEL,
    OUTPUT,
    NamedEngineOptions,
    SamplingOptions,
    engine_options,
    model_parameter,
)
from specserve.config import DEFAULT_MODEL, EngineConfig
from specserve.errors import InputError
from specserve.types import SamplingParams

if TYPE_CHECKING:
    from specserve.llm import LLM

MARKDOWN = "On a terminal, draw the answer's Markdown; without, its text as it is."
SERVED_MODEL = (
    "Catalog name, Hugging Face folder, .gguf file or hub id (org/name); with --url a name that the server lists, else "
    f"its first [default: {DEFAULT_MODEL}]."
)
_ENGINE = NamedEngineOptions()
_SAMPLING = SamplingOptions()


def chat(
    model: Annotated[str | None, model_parameter(SERVED_MODEL)] = None,
    *,
    url: Annotated[
        str | None, Parameter(group=MODEL, help="Talk to this server, of any make, that has OpenAI's API.")
    ] = None,
    api_key: Annotated[
        str | None, Parameter(group=MODEL, help="A key of that server; better in SPECSERVE_API_KEY.")
    ] = None,
    system: Annotated[str | None, Parameter(group=GENERATION, help="System message of the conversation.")] = None,
    show_drafts: Annotated[
        bool,
        Parameter(group=OUTPUT, negative=(), help="Mark tokens that were drafted, and show those that were rejected."),
    ] = False,
    markdown: Annotated[bool, Parameter(group=OUTPUT, help=MARKDOWN)] = True,
    engine: Annotated[NamedEngineOptions, Parameter(name="*")] = _ENGINE,
    sampling: Annotated[SamplingOptions, Parameter(name="*")] = _SAMPLING,
) -> None:
    """Talk to a model; /help shows the commands. Where standard input is no terminal, all of it is one message."""
    if url is None:
        sampling.check_adapter(engine)
        talk_here(
            model or DEFAULT_MODEL,
            partial(_options, engine, sampling),
            sampling,
            system,
            show_drafts,
            markdown,
        )
        return
    if show_drafts:
        raise InputError("--show-drafts is for a model here: leave out --url, or --show-drafts.", "show_drafts")
    if sampling.adapter is not None:
        raise InputError(
            f"With --url an adapter is named as a model is: --model {sampling.adapter}, without --adapter.", "adapter"
        )
    plain = EngineConfig()
    unused = [entry.name for entry in fields(plain) if getattr(engine, entry.name) != getattr(plain, entry.name)]
    unused += ["generation_config"] if sampling.generation_config != AUTO else []
    if unused:
        tell(f"With --url the server's own options hold, not these: {', '.join(unused)}.")
    from specserve.client import Client

    address = url if "://" in url else f"http://{url}"
    with Client(address, api_key=api_key) as client:
        talk(ServedModel(client, address, model), sampling.given(), system, markdown=markdown)


def _options(engine: EngineConfig, sampling: SamplingOptions, model: str) -> dict[str, Any]:
    return engine_options(engine, model=model, generation_config=sampling.generation_config)


def talk_here(
    model: str,
    options: Callable[[str], dict[str, Any]],
    sampling: SamplingOptions,
    system: str | None,
    show_drafts: bool = False,
    markdown: bool = True,
) -> None:
    """`talk` with an engine in this process, which `options` says for a model's name."""
    from specserve.llm import LLM

    def start(name: str) -> LLM:
        return LLM(**options(name), progress=sys.stderr.isatty())

    def params(llm: LLM, given: Mapping[str, Any]) -> SamplingParams:
        return llm.sampling_params(chat=True, **given)

    local = LocalModel(model, start, params, sampling.adapter)
    try:
        talk(local, sampling.given(), system, show_drafts, markdown)
    finally:
        local.close()


def _piped_message() -> str | None:
    """All of standard input, or None where that is a terminal."""
    return None if sys.stdin.isatty() else sys.stdin.read().strip()


def talk(
    model: ChatModel,
    given: dict[str, Any],
    system: str | None,
    show_drafts: bool = False,
    markdown: bool = True,
) -> None:
    """Answer the messages of a terminal until their end, or where standard input is none, all of it as one message."""
    message = _piped_message()
    conversation = Conversation(model, given, system, show_drafts=show_drafts, markdown=markdown)
    if message is None:
        conversation.run()
    elif message:
        conversation.answer_quietly([*conversation.messages, {"role": "user", "content": message}])
