"""The request fields that other servers know and this one refuses, each with what to do instead. They are looked for
before anything else is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specserve.errors import InputError


def _stated(value: Any) -> bool:
    return value is not None and value != "" and value != []


@dataclass(frozen=True, slots=True)
class _Refusal:
    """`why` follows the field's name; `applies` tells the values that ask for something from those that do not."""

    why: str
    applies: Callable[[Any], bool] = _stated


_TEMPLATE = _Refusal("is not taken from requests: the server has one, its model's or that of --chat-template.")


REFUSED: dict[str, _Refusal] = {
    # tools
    "functions": _Refusal("is OpenAI's old name for tools. Send tools."),
    "function_call": _Refusal(
        "is OpenAI's old name for tool_choice. Send tools and tool_choice.",
        lambda value: value not in (None, "none", "auto"),
    ),
    # other ways to choose and to fill in
    "best_of": _Refusal(
        "is not supported. Send n and choose among the answers, or use_beam_search and beam_width.",
        lambda value: value not in (None, 1),
    ),
    "suffix": _Refusal("is not supported: the model continues a prompt and does not fill a gap. Leave it out."),
    # what a client may not hand in
    "chat_template": _TEMPLATE,
    "prompt_embeds": _Refusal("is not taken: a prompt is text or token ids."),
    "modalities": _Refusal(
        'asks for more than text. Leave it out, or send ["text"].', lambda value: value not in (None, ["text"])
    ),
    "audio": _Refusal("is not supported: answers are text. Leave it out."),
}


def refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Raise InputError for the first field that asks for something this server does not do."""
    for name, refusal in REFUSED.items():
        if name in fields and refusal.applies(fields[name]):
            raise InputError(f"{name} {refusal.why}", name)
