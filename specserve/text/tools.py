"""How a model writes calls of tools in its answers, told by its own files or by the look of its chat template.

A format is a `response_template` as transformers 5 defines it (utils/chat_parsing): fields with the texts that open and
close them. A model that brings one in tokenizer_config.json is taken at its word; for families that do not, it is here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from specserve.text.tool_tags import HERMES, LLAMA, MISTRAL_LIST, MISTRAL_NAMED, QWEN_TAGS, CallStyle, style_of


@dataclass(frozen=True, slots=True)
class CallFormat:
    """`template` is a response_template with a field `tool_calls`. `special`: what opens or closes a call may be a
    special token, so those must not be left out of the text. `short_ids`: the chat template takes no ids of calls but
    those of nine letters and digits. `style` is how calls are written that must be right, None where no exact form of
    them is known."""

    template: Mapping[str, Any]
    style: CallStyle | None = None
    special: bool = False
    short_ids: bool = False


def call_format(stated: Any, source: str, special: Iterable[str]) -> CallFormat | None:
    """The format of a model whose files state the response_template `stated`, or None, and whose chat template has the
    text `source`; None for one that nobody here knows. `special` are the texts of its special tokens."""
    found = (stated, style_of(stated)) if _has_calls(stated) else _of_family(source)
    if found is None:
        return None
    template, style = found
    written = json.dumps(template["fields"]["tool_calls"], ensure_ascii=False).replace("\\", "")
    return CallFormat(
        template,
        style,
        special=any(token in written for token in special),
        short_ids=re.search(r"length\s*!=\s*9\b", source) is not None,
    )


def _has_calls(stated: Any) -> bool:
    fields = stated.get("fields") if isinstance(stated, Mapping) else None
    return isinstance(fields, Mapping) and "tool_calls" in fields


def _of_family(source: str) -> tuple[Mapping[str, Any], CallStyle] | None:
    """The first family all of whose signs are in the template."""
    return next(((read, style) for signs, read, style in _FAMILIES if all(sign in source for sign in signs)), None)


# Patterns are bounded: what may still become a delimiter is looked at again with every token, and what a client makes a
# model write is as long as it likes.
_S = r"\s{0,100}"
_NAME = 128  # characters; those of TOOL_NAME in the server's messages.py
_ANSWER = {"content": "text"}
_THOUGHT = {"open": "<think>", "close": "</think>", "content": "text"}
_CHATML = r"<\|[a-z_]+\|>assistant(?:<\|[a-z_]+\|>)?\n+"  # ChatML's header, Llama's, and their kin's
_MISTRAL = ["[/INST]", "[/TOOL_RESULTS]"]
_MISTRAL_THOUGHT = {"open": "[THINK]", "close": "[/THINK]", "content": "text"}

# <tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes, Qwen 2.5 and 3, SmolLM2 (which writes a list)
_HERMES = {
    "start_anchor_pattern": _CHATML,
    "fields": {
        "reasoning_content": _THOUGHT,
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": _ANSWER,
    },
}

# <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>: Qwen3-Coder, Qwen 3.5
_QWEN_TAGS = {
    "start_anchor_pattern": _CHATML,
    "fields": {
        "reasoning_content": _THOUGHT,
        "tool_calls": {
            "open_pattern": rf"<tool_call>{_S}<function=(?P<name>[^>\n]{{1,{_NAME}}})>",
            "close_pattern": rf"</function>{_S}</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            # A tag that nothing closes is none, nor is any after it: where the text ends the search does, too.
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]{1,256})>\n?(?P<value>.*?)"
                r"(?:\n?</parameter>|\Z(*SKIP)(*FAIL))"
            },
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": _ANSWER,
    },
}

# {"name": ..., "parameters": {...}} and nothing else: Llama 3.1 to 3.3
_LLAMA = {
    "start_anchor_pattern": _CHATML,
    "fields": {
        "tool_calls": {
            "open_pattern": rf'\A{_S}(?:<\|python_tag\|>{_S})?(?=\{{{_S}"name"{_S}:)',
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": _ANSWER,
    },
}

# [TOOL_CALLS]NAME[ARGS]{...}: Mistral's models since 2025
_MISTRAL_NAMED = {
    "start_anchor": _MISTRAL,
    "fields": {
        "reasoning_content": _MISTRAL_THOUGHT,
        "tool_calls": {
            "open_pattern": rf"\[TOOL_CALLS\]{_S}(?P<name>[^\[\]{{}}\s]{{1,{_NAME}}}){_S}"
            rf"(?:\[CALL_ID\][^\[\]{{}}]{{0,{_NAME}}})?\[ARGS\]",
            "close_pattern": r"(?=\[TOOL_CALLS\])",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": _ANSWER,
    },
}

# [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]: Mistral's models before
_MISTRAL_LIST = {
    "start_anchor": _MISTRAL,
    "fields": {
        "tool_calls": {
            "open": "[TOOL_CALLS]",
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": _ANSWER,
    },
}

# What the chat template of a family holds, how calls are read and how they are written; the more special first.
_FAMILIES: tuple[tuple[tuple[str, ...], Mapping[str, Any], CallStyle], ...] = (
    (("<tool_call>", "<function="), _QWEN_TAGS, QWEN_TAGS),
    (("<tool_call>",), _HERMES, HERMES),
    (("[TOOL_CALLS]", "[ARGS]"), _MISTRAL_NAMED, MISTRAL_NAMED),
    (("[TOOL_CALLS]",), _MISTRAL_LIST, MISTRAL_LIST),
    (("<|start_header_id|>", '"parameters":'), _LLAMA, LLAMA),
)

# For a model whose template says nothing of tools, but which can be made to call one.
PLAIN = CallFormat(_HERMES, HERMES)
