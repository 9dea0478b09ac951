"""Renders chat messages with a model's own template.

Templates are Jinja as transformers' apply_chat_template runs them, in a sandbox that cannot change its inputs.
"""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specserve import files
from specserve.checkpoint.folder import read_json
from specserve.errors import InputError, ModelError, TextError
from specserve.text.conversation import Rendered, whole
from specserve.text.marked import BEGIN_OF_REASONING, END_OF_REASONING, ROLES, told_apart
from specserve.text.tool_tags import CallStyle

MOST_TEMPLATE_BYTES = 2**20
_ENDS = ("add_generation_prompt", "continue_final_message")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names clients use; the first is what templates read


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What an operator says of the template: a `text` in place of the model's own, and `values` that it has where a
    request gives no others."""

    text: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)


OWN_TEMPLATE = TemplateOptions()  # the model's, with no values


class ChatTemplate:
    """The template of a model folder: chat_template.jinja, else `chat_template` of tokenizer_config.json (one, or named
    ones, of which "tool_use" serves requests with tools) or chat_template.json; or that of `options`. Files in
    additional_chat_templates are named ones. `special` are the texts of bos_token and the like."""

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        special: Mapping[str, str],
        options: TemplateOptions = OWN_TEMPLATE,
    ) -> None:
        self._where = folder.name if options.text is None else "--chat-template"
        self._sources = _sources(folder, config) if options.text is None else {"default": options.text}
        self._special = {**special, **options.values}
        self._compiled: dict[str, jinja2.Template] = {}
        self._read: dict[str, frozenset[str]] = {}  # by template
        self._roles: dict[tuple[str, bool], frozenset[str]] = {}  # by template, with tools or without

    @property
    def source(self) -> str | None:
        """The template's own text, the one without tools; None where the model has none."""
        return self._sources.get("default")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        **values: Any,
    ) -> str:
        """The text of `messages`. With `continue_final_message` it ends with the last one's text, not its end mark."""
        if add_generation_prompt and continue_final_message:
            raise InputError(
                "continue_final_message goes on with the last message, add_generation_prompt begins a new one: set one "
                "of them to false.",
                "continue_final_message",
            )
        chat = [_alias_reasoning(message) for message in _checked(messages)]
        mark = secrets.token_hex(16)  # where a continued message ends; cut out again
        final = _mark_end(chat, mark) if continue_final_message else ""
        variables = {"documents": None, **self._special, **values}
        variables |= {"messages": chat, "tools": tools, "add_generation_prompt": add_generation_prompt}
        text = self._run(self._choose(tools), variables)
        return _cut_at_end(text, final, mark) if continue_final_message else text

    def render_whole(
        self,
        messages: Sequence[Mapping[str, Any]],
        style: CallStyle | None,
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        **options: Any,
    ) -> Rendered:
        """As `render`, with nothing missing in silence (conversation.py); `style` is how the model writes calls."""
        checked, name = _checked(messages), self._choose(tools)
        found = whole(functools.partial(self.render, tools=tools, **options), checked, style)
        roles = {message["role"] for message in checked}.intersection(ROLES) - self._told_apart(name, tools)
        unread = [f"messages.{name}" for name in [*found.unread, *(["role"] if roles else [])]]
        values = [value for value in options if value not in (*_ENDS, *self._variables(name))]
        return found._replace(unread=(*unread, *values))

    def _told_apart(self, name: str, tools: Sequence[Mapping[str, Any]] | None) -> frozenset[str]:
        """Roles that the template tells apart."""
        key = name, bool(tools)
        if key not in self._roles:
            render = functools.partial(
                self.render, tools=tools, add_generation_prompt=False, continue_final_message=False
            )
            self._roles[key] = told_apart(render)
        return self._roles[key]

    def _variables(self, name: str) -> frozenset[str]:
        """What the template reads. It is only parsed: to compile it would run what it does with constants."""
        if name not in self._read:
            try:
                names = _environment().parse(self._sources[name]).find_all(nodes.Name)
                self._read[name] = frozenset(found.name for found in names if found.ctx == "load")
            except (jinja2.TemplateSyntaxError, RecursionError) as error:
                raise self._broken(error) from error
        return self._read[name]

    @property
    def tool_source(self) -> str:
        """The text of the template that serves requests with tools, empty where the model has none."""
        return self._sources.get("tool_use", self._sources.get("default", ""))

    @property
    def takes_tools(self) -> bool:
        """Whether the template reads the variable `tools`. Raises ModelError for a broken one."""
        name = "tool_use" if "tool_use" in self._sources else "default"
        return name in self._sources and "tools" in self._variables(name)

    def _broken(self, error: Exception) -> ModelError:
        return ModelError(f"The chat template in {self._where} is broken: {' '.join(str(error)[:500].split())}.")

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        name = "tool_use" if tools is not None and "tool_use" in self._sources else "default"
        if name not in self._sources and self._sources:
            raise InputError(
                f"This model has chat templates named {', '.join(sorted(self._sources))}, and none named default. Send "
                "a plain prompt, or serve it with --chat-template FILE.",
                "messages",
            )
        if name not in self._sources:
            raise InputError(
                "This model has no chat template. Send a plain prompt, or put the template of its family into the "
                f"model's folder ({self._where}) as chat_template.jinja, or serve it with --chat-template FILE.",
                "messages",
            )
        return name

    def _run(self, name: str, variables: Mapping[str, Any]) -> str:
        try:
            return self._template(name).render(variables)
        except (RecursionError, MemoryError) as error:
            what = "calls itself without end" if isinstance(error, RecursionError) else "takes too much memory"
            raise TextError(f"The model's chat template {what} for these messages.") from error
        except ModelError:
            raise
        except Exception as error:  # a template is a program: whatever it raises is what it thinks of its input
            raise InputError(f"The model's chat template cannot take these messages: {error}", "messages") from error

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            try:
                self._compiled[name] = _environment().from_string(self._sources[name])
            except jinja2.TemplateSyntaxError as error:
                raise self._broken(error) from error
        return self._compiled[name]


def _sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. Files of their own come before tokenizer_config.json, and this before chat_template.json,
    which processors of images had."""
    alone, settings = folder / "chat_template.jinja", folder / "chat_template.json"
    named = {path.stem: _read_template(path) for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if alone.exists():
        return {**named, "default": _read_template(alone)}
    stated = config.get("chat_template")
    where = folder / "tokenizer_config.json"
    if stated is None and settings.exists():
        stated, where = read_json(settings).get("chat_template"), settings
    if stated is None:
        return named
    if isinstance(stated, str):
        return {**named, "default": stated}
    try:
        return named | {str(entry["name"]): str(entry["template"]) for entry in stated}
    except (TypeError, KeyError) as error:
        raise ModelError(f"{where}: chat_template is neither text nor named texts.") from error


def _read_template(path: Path) -> str:
    try:
        return files.read_text(path, MOST_TEMPLATE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error


# --- messages ---------------------------------------------------------------------------------------------------------


def _checked(messages: Any) -> list[Mapping[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InputError("messages must be a non-empty list of objects with role and content.", "messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"messages[{i}] must be an object with a role, such as 'user'.", "messages")
        if not isinstance(message.get("content"), str | list | tuple | None):
            raise InputError(f"messages[{i}].content must be text or a list of content parts.", "messages")
    return list(messages)


def _alias_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which reasoning, under whatever name it came, has the name that templates read."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def with_reasoning_apart(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Two ways in which templates take reasoning out of an assistant's message that begins with it: with and without
    the blank lines after it. Nothing where no message holds any."""
    if any(map(_holds_reasoning, messages)):
        for blanks in ("\n", ""):
            yield [_reasoning_apart(message, blanks) for message in messages]


def _holds_reasoning(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    apart = any(message.get(name) is not None for name in _REASONING)
    return message.get("role") == "assistant" and isinstance(content, str) and END_OF_REASONING in content and not apart


def _reasoning_apart(message: Mapping[str, Any], blanks: str) -> Mapping[str, Any]:
    if not _holds_reasoning(message):
        return message
    reasoning = message["content"].split(END_OF_REASONING)[0].split(BEGIN_OF_REASONING)[-1].strip("\n")
    rest = message["content"].split(END_OF_REASONING)[-1]
    return {**message, "reasoning_content": reasoning, "content": rest.lstrip(blanks) if blanks else rest}


def _mark_end(chat: list[dict[str, Any]], mark: str) -> str:
    """Put the mark after the last message's text; that text. Only the copy in `chat` changes."""
    end = mark + " "  # the space tells whether the template trims messages
    content = chat[-1].get("content")
    if isinstance(content, str):
        chat[-1]["content"] = content + end
        return content
    parts = [dict(part) if isinstance(part, Mapping) else part for part in content or ()]
    for part in reversed(parts):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + end
            chat[-1]["content"] = parts
            return text
    raise InputError("continue_final_message needs text in the last message, and there is none.", "messages")


def _cut_at_end(text: str, final: str, mark: str) -> str:
    """Cut after the last message's own text, whether the template kept the spaces at its end or trimmed them."""
    before, found, after = text.rpartition(mark)
    if not found or final.strip() not in before:
        raise InputError(
            "continue_final_message does not work with this model: its chat template does not show the last message as "
            "it is.",
            "continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


# --- the template language --------------------------------------------------------------------------------------------


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks what the assistant wrote, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own way to declare it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
