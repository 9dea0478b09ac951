"""The engine of a measurement: its drafters and adapters, checked before a model is loaded, and its prompts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specserve.adapters import NO_ADAPTER, AdapterSource
from specserve.errors import ConfigError, InputError, unknown

if TYPE_CHECKING:
    from specserve.bench.compare import Question
    from specserve.llm import LLM


def drafting(drafters: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    """What a Plan says of drafters, out of the engine's options. A draft model is one of them, and the only one where
    none are named."""
    draft_model, given = options.pop("draft_model"), options.pop("drafter_options")
    if draft_model is not None:
        given = {key: value for key, value in given.items() if key != "model"}
        if "draft_model" not in drafters and drafters != ("auto",):
            raise ConfigError(f"--draft-model is for the drafter draft_model, not for {' '.join(drafters)}.")
        drafters = drafters if "draft_model" in drafters else ("draft_model",)
    return {"drafters": drafters, "drafter_options": given, "draft_model": draft_model}


def answering(adapters: Sequence[str], options: dict[str, Any], num_prompts: int) -> list[str | None]:
    """The adapter of each prompt: those that --adapter gives, in turn. What it names with a folder is added to the
    engine's `options`. Raises ConfigError or InputError."""
    named = [AdapterSource.parse(each, "--adapter") for each in adapters if "=" in each]
    if named:
        options |= {"lora": (*options["lora"], *map(str, named)), "max_loras": options["max_loras"] or None}
    known = [AdapterSource.parse(each).name for each in options["lora"]]
    names = [each.partition("=")[0].strip() for each in adapters]
    if NO_ADAPTER in known and NO_ADAPTER in names:
        raise ConfigError(f"--adapter {NO_ADAPTER} is the model without an adapter. Give the adapter another name.")
    if strange := [name for name in names if name not in (*known, NO_ADAPTER)]:
        todo = f"Give its folder with --adapter {strange[0]}=PATH."
        raise InputError(f"{unknown('adapter', strange[0], known)} {todo}", "adapter")
    if len(names) > num_prompts:
        raise ConfigError(f"{len(names)} adapters answer in turn, and there are {num_prompts} prompts. Give more.")
    turns = [None if name == NO_ADAPTER else name for name in names] or [None]
    return [turns[index % len(turns)] for index in range(num_prompts)]


def load(
    options: dict[str, Any], prompts: list[tuple[str, str]], raw: bool, adapters: Sequence[str | None] | None = None
) -> tuple[LLM, list[Question]]:
    """The engine, and the prompts (text and category) as it reads them, each with its adapter."""
    from specserve.bench.compare import Question
    from specserve.llm import LLM

    llm = LLM(**options, progress=sys.stderr.isatty())
    encode = (
        llm.tokenizer.encode if raw else lambda text: llm.tokenizer.encode_chat([{"role": "user", "content": text}])
    )
    each = zip(prompts, adapters or [None] * len(prompts), strict=True)
    return llm, [Question(encode(text), category, adapter) for (text, category), adapter in each]
