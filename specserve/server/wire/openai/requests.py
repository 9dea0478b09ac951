"""The bodies of chat completions and completions, and how they are read: every field with its type, its limits and its
default.

    request = read(ChatCompletionRequest, body, limits)
    request.conversation(), request.template_options(), request.sampling_params
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from specserve.checkpoint.generation_config import MAX_TOKENS
from specserve.errors import InputError, unknown
from specserve.server.wire.fields import (
    ID,
    MAX_COUNT,
    ClosedWire,
    Count,
    Limits,
    Logprobs,
    Name,
    Wire,
    check_ids,
    limits_of,
    well_formed,
)
from specserve.server.wire.json.text import json_object
from specserve.server.wire.openai.messages import MAX_TOOLS, TEXT, Messages, Tools, conversation, text_of
from specserve.server.wire.openai.sampling_fields import SamplingFields, with_defaults
from specserve.server.wire.openai.unsupported import refuse_unsupported
from specserve.server.wire.sentences import as_input_error, shown
from specserve.types import SamplingParams

_MAX_TEMPLATE_VALUES = 64
# What a template is given by the server itself; a client may not put something else in its place.
_RESERVED = {
    "self",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
}

AnyRequest = TypeVar("AnyRequest", bound=Wire)


def read(kind: type[AnyRequest], body: bytes, limits: Limits) -> AnyRequest:
    """The request that `body` holds. Raises InputError naming the field that is wrong or not supported."""
    return checked(kind, json_object(body), limits)


def checked(kind: type[AnyRequest], fields: dict[str, Any], limits: Limits) -> AnyRequest:
    """As `read`, of JSON that was parsed already."""
    refuse_unsupported(fields)
    try:
        return kind.model_validate(with_defaults(kind, fields, limits), context=limits)
    except ValidationError as error:
        raise as_input_error(error) from error


# --- chat -------------------------------------------------------------------------------------------------------------


def template_values(value: Any) -> dict[str, Any]:
    """Raises ValueError for what is no object of values for a template."""
    if not isinstance(value, dict) or len(value) > _MAX_TEMPLATE_VALUES:
        raise ValueError(f"is {shown(value)}; it must be an object of at most {_MAX_TEMPLATE_VALUES} entries.")
    for name in value:
        if not name.isidentifier() or name in _RESERVED or name.endswith("_token"):
            raise ValueError(f"may not set {shown(name)}: it is no name, or the server sets it itself.")
    return value


_VALUES = {
    "type": "object",
    "propertyNames": {"pattern": rf"^(?!({'|'.join(sorted(_RESERVED))})$)(?!.*_token$)[A-Za-z_][A-Za-z0-9_]*$"},
    "maxProperties": _MAX_TEMPLATE_VALUES,
}
TemplateValues: TypeAlias = Annotated[dict[str, Any], BeforeValidator(template_values), WithJsonSchema(_VALUES)]


class TemplateFields(Wire):
    """What becomes of messages, for chat and for /tokenize."""

    messages: Messages
    """The conversation, oldest message first."""
    add_generation_prompt: bool = True
    """Begin an assistant's message after the last one."""
    continue_final_message: bool = False
    """Go on with the last message; needs add_generation_prompt false."""
    chat_template_kwargs: TemplateValues = Field(default_factory=dict)
    """Values for the model's chat template."""
    tools: Tools = ()
    """Functions that the chat template tells the model of."""

    @property
    def callable_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools that an answer may call."""
        return self.tools

    @property
    def must_call(self) -> str | bool:
        """The name of the tool that must be called; True: any, False: none."""
        return False

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as Tokenizer.render_chat takes them."""
        return conversation(self.messages)

    def template_options(self) -> dict[str, Any]:
        """The keyword arguments of Tokenizer.render_chat."""
        return {
            **self.chat_template_kwargs,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "tools": list(self.tools) or None,
        }

    def as_sent(self, unread: Iterable[str]) -> list[str]:
        """The names of fields of the request that the chat template does not read."""
        given = self.chat_template_kwargs
        return [f"chat_template_kwargs.{name}" if name in given else name for name in unread]

    @model_validator(mode="after")
    def _one_end(self) -> TemplateFields:
        if self.add_generation_prompt and self.continue_final_message:
            raise InputError(
                "continue_final_message goes on with the last message and add_generation_prompt begins a new one. Send "
                "one of them as false.",
                "continue_final_message",
            )
        return self


class Prediction(ClosedWire):
    """OpenAI's predicted output: text that the answer will probably repeat, which is a draft and changes nothing."""

    type: Literal["content"]
    content: Annotated[str, BeforeValidator(text_of), TEXT]
    """Text, or a list of text parts."""


def _tool_choice(value: Any) -> Any:
    """A word, the name of the one tool that must be called as {"name": ...}, or the names of those that may be called
    as {"names": [...], "mode": ...}."""
    if value in ("none", "auto", "required"):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "function" and (name := _name_of(value)) is not None:
        return {"name": name}
    allowed = value.get("allowed_tools") if kind == "allowed_tools" else None
    tools = allowed.get("tools") if isinstance(allowed, dict) else None
    names = [_name_of(tool) for tool in tools[: MAX_TOOLS + 1]] if isinstance(tools, list) else []
    if isinstance(allowed, dict) and names and None not in names and allowed.get("mode") in (None, "auto", "required"):
        return {"names": names, "mode": allowed.get("mode")}
    raise ValueError(
        f'is {shown(value)}; it must be "none", "auto", "required", {{"type": "function", "function": {{"name"}}}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode", "tools"}} with such functions.'
    )


def _name_of(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


_NAMED = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
_ALLOWED = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "properties": {
                "mode": {"enum": ["auto", "required", None]},
                "tools": {"type": "array", "items": _NAMED, "minItems": 1, "maxItems": MAX_TOOLS},
            },
            "required": ["tools"],
        },
    },
    "required": ["type", "allowed_tools"],
}
_CHOICES = {"anyOf": [{"type": "string", "enum": ["none", "auto", "required"]}, _NAMED, _ALLOWED]}
ToolChoice: TypeAlias = Annotated[Any, BeforeValidator(_tool_choice), WithJsonSchema(_CHOICES)]


class ChatCompletionRequest(TemplateFields, SamplingFields):
    """POST /v1/chat/completions."""

    misplaced: ClassVar[dict[str, str]] = {"prompt": "Send messages, or the prompt to /v1/completions."}

    max_completion_tokens: Count | None = None
    """OpenAI's newer name for max_tokens; send one of them."""
    logprobs: bool = False
    """Send the log-probability of each token."""
    top_logprobs: Logprobs | None = None
    """The k most likely tokens at each place as well; needs logprobs true."""
    tool_choice: ToolChoice = None
    """Whether the model may call tools, must call one or more, must call one of this name, or may call some of them."""
    parallel_tool_calls: bool = True
    """Whether the model may call several tools in one answer."""
    prediction: Prediction | None = None
    """Text that the answer will probably repeat. It is a draft and changes nothing."""
    reasoning_effort: Name | None = None
    """For chat templates that read it."""

    @property
    def num_choices(self) -> int:
        return self.n

    @property
    def callable_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools whose calls are looked for in the answer; with tool_choice "none" the model is told of the tools
        and its answer is text."""
        return () if self.tool_choice == "none" else self._chosen

    @property
    def must_call(self) -> str | bool:
        """The name of the tool that must be called; True: any, False: none."""
        choice = self.tool_choice
        if isinstance(choice, dict):
            return str(choice["name"]) if "name" in choice else choice["mode"] == "required"
        return bool(choice == "required")

    @property
    def _chosen(self) -> tuple[dict[str, Any], ...]:
        """The tools that the model is told of: one that it may not call would be called in vain."""
        names = self.tool_choice.get("names") if isinstance(self.tool_choice, dict) else None
        return self.tools if names is None else tuple(t for t in self.tools if t["function"]["name"] in names)

    def ignored(self, limits: Limits) -> list[str]:
        """As SamplingFields; a prediction too, where no drafter reads it."""
        unread = self.prediction is not None and "prediction" not in limits.drafters
        return [*super().ignored(limits), *(["prediction"] if unread else [])]

    def template_options(self) -> dict[str, Any]:
        """As TemplateFields; a template that knows no reasoning_effort does not read it."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **super().template_options(), "tools": list(self._chosen) or None}

    @model_validator(mode="after")
    def _some_tool(self) -> ChatCompletionRequest:
        """A function that must be called must exist."""
        names = [tool["function"]["name"] for tool in self.tools]
        if self.must_call and not names:
            raise InputError("tool_choice asks for a call and there are no tools. Send tools.", "tool_choice")
        choice = self.tool_choice if isinstance(self.tool_choice, dict) else {}
        for name in choice.get("names", [choice["name"]] if "name" in choice else []):
            if name not in names:
                raise InputError("tool_choice: " + unknown("tool", name, names), "tool_choice")
        return self

    def _checked_params(self) -> SamplingParams:
        limit = self.max_completion_tokens
        if limit is not None and self.max_tokens not in (None, limit):
            raise InputError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is {limit}, and they mean the same. Send "
                "one of them.",
                "max_tokens",
            )
        if self.top_logprobs and not self.logprobs:
            raise InputError("top_logprobs needs logprobs true.", "top_logprobs")
        logprobs = self.top_logprobs or 0 if self.logprobs else None
        return self._params(max_tokens=limit or self.max_tokens or MAX_TOKENS[True], logprobs=logprobs)


# --- completions ------------------------------------------------------------------------------------------------------


def _prompts(value: Any, info: ValidationInfo) -> Any:
    """Text, ids, or a list of either: always a tuple of prompts afterwards."""
    limits = limits_of(info)
    if isinstance(value, str):
        return (_prompt_text(value),)
    if not isinstance(value, list) or not value:
        raise ValueError(f"is {shown(value)}; it must be text, token ids, or a list of texts or of lists of ids.")
    if not isinstance(value[0], str | list):
        return (_prompt_ids(value, limits),)
    if len(value) > limits.max_completions:
        raise ValueError(f"has {len(value)} prompts; at most {limits.max_completions} fit in one request. Split it.")
    if isinstance(value[0], str):
        return tuple(_prompt_text(prompt) for prompt in value)
    return tuple(_prompt_ids(prompt, limits) for prompt in value)


def _prompt_text(prompt: Any) -> str:
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f"holds {shown(prompt)}; each prompt must be text that is not empty, and all of one kind.")
    return well_formed(prompt)


def _prompt_ids(prompt: Any, limits: Limits) -> list[int]:
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"holds {shown(prompt)}; each prompt must be a list of ids, not empty, and all of one kind.")
    check_ids(prompt, limits.vocab_size)
    return prompt


_IDS = {"type": "array", "items": ID, "minItems": 1}
_PROMPT = {"type": "string", "minLength": 1}
_MANY = {"type": "array", "minItems": 1, "x-limits": {"maxItems": "max_completions"}}
_PROMPTS = {"anyOf": [_PROMPT, _IDS, {**_MANY, "items": _PROMPT}, {**_MANY, "items": _IDS}]}
Prompts: TypeAlias = Annotated[tuple[str | list[int], ...], PlainValidator(_prompts), WithJsonSchema(_PROMPTS)]


class CompletionRequest(SamplingFields):
    """POST /v1/completions. `prompt` is a tuple of texts or of lists of ids, one entry where one prompt was sent."""

    misplaced: ClassVar[dict[str, str]] = {"messages": "Send a prompt, or the messages to /v1/chat/completions."}

    prompt: Prompts
    """Text or token ids, or a list of prompts of one kind."""
    logprobs: Logprobs | None = None
    """The log-probability of each token, and of the k most likely ones at its place."""
    echo: bool = False
    """Put the prompt before the completion, and its log-probabilities before the completion's."""
    max_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    """The longest completion, in tokens; null is 16. With echo it may be 0: the prompt alone."""

    @property
    def num_choices(self) -> int:
        return len(self.prompt) * self.n

    @property
    def echoes_only(self) -> bool:
        """Whether the prompt is all that is asked for. The engine makes a token all the same, which nobody sees."""
        return self.max_tokens == 0

    def _checked_params(self) -> SamplingParams:
        if self.echoes_only and not self.echo:
            raise InputError("max_tokens is 0, which asks for nothing. Send at least 1, or echo true.", "max_tokens")
        most = MAX_TOKENS[False] if self.max_tokens is None else max(1, self.max_tokens)
        return self._params(
            max_tokens=most,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )


# --- for operators ----------------------------------------------------------------------------------------------------


class ResetPrefixCacheRequest(Wire):
    """POST /reset_prefix_cache; {} is enough."""

    model: Name | None = None
    """The model's name in /v1/models; null is the one served."""


class LoadAdapterRequest(Wire):
    """POST /v1/load_lora_adapter, as vLLM has it."""

    lora_name: Annotated[Name, Field(min_length=1)]
    """What requests call it in place of the model's name."""
    lora_path: Annotated[Name, Field(min_length=1)]
    """The folder on the server that PEFT's save_pretrained wrote."""
    load_inplace: bool = False
    """Replace one of that name; requests that run end with the one they began with."""
    pinned: bool = False
    """Always keep it among those that may share a step (--max-loras)."""
    head_path: Name = ""
    """The folder of the draft head for its requests; without it head/ in the adapter's folder, where there is one."""


class UnloadAdapterRequest(Wire):
    """POST /v1/unload_lora_adapter, as vLLM has it."""

    lora_name: Annotated[Name, Field(min_length=1)]
    """As it was loaded."""
