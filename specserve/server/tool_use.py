"""What becomes of a request that brings tools: what its answer must be, and who reads the calls in it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specserve.errors import InputError
from specserve.server.wire.answer import AnswerParser
from specserve.server.wire.tools.calls import ToolCalling, ids_of_calls
from specserve.server.wire.tools.enforced import EnforcedCalls
from specserve.structured.spec import Structured
from specserve.text.reasoning import Beginning
from specserve.text.tool_tags import HERMES, CallStyle, is_strict
from specserve.text.tools import PLAIN, CallFormat


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says of tools: those that may be called, which must be (by name; True: any, False: none), and
    whether an answer may have several calls."""

    tools: Sequence[Mapping[str, Any]]
    must_call: str | bool = False
    parallel: bool = True

    @property
    def chosen(self) -> Sequence[Mapping[str, Any]]:
        """The tools that an answer may call."""
        if isinstance(self.must_call, str):
            return [tool for tool in self.tools if tool["function"]["name"] == self.must_call]
        return self.tools


def format_for(use: ToolUse, known: CallFormat | None, takes_tools: bool) -> CallFormat:
    """How calls are written by a model whose format is `known`. One whose chat template takes no tools is told. Raises
    InputError where nobody knows and none has to be made."""
    if known is None and takes_tools and not use.must_call:
        raise InputError(
            "tools: how this model writes calls is not known here: its files have no response_template, and its "
            'chat template is of no known family. Leave them out, or send tool_choice "none", "required" or the name '
            "of one.",
            "tools",
        )
    return known or PLAIN


def constraint(use: ToolUse, written: CallFormat, structured: Structured | None) -> Structured | None:
    """What the answer must be: calls where some must be made, else what is `structured` or calls, or text in which
    calls of strict tools are exact. Raises InputError for what has no exact form."""
    if not use.must_call and structured is None and not any(map(is_strict, use.tools)):
        return None
    style = written.style
    if style is None:
        raise InputError(
            "tools: this model brings its own way to write calls, which cannot be enforced. Send tool_choice "
            '"auto", tools that are not strict, and no format of the answer.',
            "tools",
        )
    try:
        return Structured.structural_tag({"type": "structural_tag", "format": _format(use, style, structured)})
    except ValueError as error:
        raise error if isinstance(error, InputError) else InputError(f"tools: {error}.", "tools") from error


def _format(use: ToolUse, style: CallStyle, structured: Structured | None) -> dict[str, Any]:
    parallel = use.parallel and not isinstance(use.must_call, str)
    if use.must_call:
        return style.calls(use.chosen, parallel)
    if structured is None:
        return style.text_with_calls(use.tools, parallel)
    return {"type": "or", "elements": [style.calls(use.tools, parallel, must=False), _element(structured)]}


def _element(structured: Structured) -> dict[str, Any]:
    """A constraint inside a structural tag."""
    match structured.kind:
        case "json_schema":
            return {"type": "json_schema", "json_schema": json.loads(structured.text)}
        case "regex":
            return {"type": "regex", "pattern": structured.text}
        case "choice":
            texts = [{"type": "const_string", "value": option} for option in json.loads(structured.text)]
            return {"type": "or", "elements": texts}
        case "ebnf":
            return {"type": "grammar", "grammar": structured.text}
        case "structural_tag" if "format" in (tag := json.loads(structured.text)):
            found: dict[str, Any] = tag["format"]
            return found
    raise InputError(f'tools: beside a {structured.kind} they cannot be called. Send tool_choice "none".', "tools")


def reader(
    use: ToolUse, written: CallFormat, prompt: str, beginning: Beginning = "after", apart: bool = True
) -> Callable[[], AnswerParser]:
    """What makes the parser of each completion. `prompt` is the rendered one, after which the answer begins so; the
    parser meets reasoning only where that is not told `apart`. The first call takes a second."""
    style = written.style
    if use.must_call and style is not None and not style.has_tags and (apart or beginning == "after"):
        return functools.partial(EnforcedCalls, style, ids_of_calls(written))
    prompt = "" if apart and beginning == "inside" else prompt  # which holds nothing of what the parser meets
    return ToolCalling(written, use.tools, prompt, parallel=use.parallel).parser


def describe_tools(
    messages: Sequence[Mapping[str, Any]], use: ToolUse, known: CallFormat | None
) -> list[dict[str, Any]]:
    """The conversation of a model whose chat template takes no tools, with a system message that tells of them."""
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in use.chosen)
    style = (known or PLAIN).style or HERMES
    begin = "Answer by calling one of these functions" if use.must_call else "You may call these functions"
    text = f"{begin}:\n{functions}\nA call is written as\n{style.written('NAME', '{...}')}"
    first, *others = [dict(message) for message in messages]
    if first["role"] == "system" and isinstance(first["content"], str):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *others]
    return [{"role": "system", "content": text}, first, *others]
