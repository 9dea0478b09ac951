"""Requests in another API's words that ask for a chat completion."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic.json_schema import SkipJsonSchema

from specserve.errors import InputError
from specserve.server.wire.fields import Limits, Name, Wire, well_formed
from specserve.server.wire.json.text import json_object
from specserve.server.wire.openai.messages import TOOL_NAME
from specserve.server.wire.openai.requests import AnyRequest, ChatCompletionRequest, checked
from specserve.server.wire.openai.sampling_fields import Speculative, with_defaults
from specserve.server.wire.sentences import as_input_error, shown

AnyTranslated = TypeVar("AnyTranslated", bound="TranslatedRequest")


def read_translated(kind: type[AnyTranslated], body: bytes, limits: Limits) -> AnyTranslated:
    """The request that `body` holds. Raises InputError naming the field that is wrong or not supported."""
    try:
        return kind.model_validate(with_defaults(kind, json_object(body), limits), context=limits)
    except ValidationError as error:
        raise as_input_error(error) from error


Unsupported: TypeAlias = SkipJsonSchema[Any]  # with `refused`; no field that clients are told of


def refused(why: str, *harmless: Any) -> BeforeValidator:
    """For a field that asks for something this server does not do, whatever it holds besides null and the `harmless`
    values. `why` follows the field's name in the message and says what to do instead."""

    def check(value: Any) -> Any:
        if any(type(value) is type(other) and value == other for other in harmless):
            return value
        raise ValueError(why)

    return BeforeValidator(check)


_BEAMS = "is for beam search, which /v1/completions and /v1/chat/completions offer. Send it there, or leave it out."


class WithoutBeams(Wire):
    """What has no beam search, and says so: any other answer than that of a search is not what was asked for."""

    use_beam_search: Annotated[Unsupported, refused(_BEAMS, False)] = None
    beam_width: Annotated[Unsupported, refused(_BEAMS)] = None
    length_penalty: Annotated[Unsupported, refused(_BEAMS, 1, 1.0)] = None
    early_stopping: Annotated[Unsupported, refused(_BEAMS, False)] = None


class TranslatedRequest(WithoutBeams):
    """A request in its own API's words. All it says about sampling, limits and tools is judged as chat's: one that was
    read may still be refused by `as_chat`."""

    own_names: ClassVar[Mapping[str, str]] = {}  # chat's name of a field: this API's

    model: Name | None = None
    """The model's name in /v1/models; null is the one served."""
    stream: bool = False
    """Send the answer as server-sent events while it is generated."""
    speculative: Speculative | None = None
    """How this request is drafted; null leaves it to the server."""

    @abstractmethod
    def _chat_fields(self) -> dict[str, Any]:
        """The same request as JSON of a chat completion; None is not sent."""

    @property
    def name(self) -> str | None:
        """The model's name as it is served."""
        return self.model

    def as_chat(self, limits: Limits) -> ChatCompletionRequest:
        """The same request to this server. Raises InputError naming this API's own field."""
        return self._as(ChatCompletionRequest, self._chat_fields(), limits)

    def _as(self, kind: type[AnyRequest], fields: Mapping[str, Any], limits: Limits) -> AnyRequest:
        """As `as_chat`, of these fields and those that all APIs share."""
        if self.speculative is not None and self.speculative.explain:
            where = "/v1/chat/completions and /v1/completions"
            raise InputError(f"speculative.explain is for streams of {where}. Leave it out.", "speculative.explain")
        shared = {"model": self.name, "stream": self.stream}
        drafts = {} if self.speculative is None else {"speculative": self.speculative.model_dump(exclude_unset=True)}
        try:
            return checked(kind, {**shared, **drafts, **fields}, limits)
        except InputError as error:
            raise in_own_words(error, self.own_names) from error

    def ignored(self, limits: Limits) -> list[str]:
        """Names in the request that mean nothing here, as sent."""
        nested = (
            f"{field}.{name}"
            for field in type(self).model_fields
            for value in _objects(getattr(self, field))
            for name in value.model_extra or {}
        )
        return [*(self.model_extra or {}), *dict.fromkeys(nested)]


def own_names(names: Iterable[str], own: Mapping[str, str]) -> list[str]:
    """Chat's names of fields as another API has them. The longest of `own` that a name begins with decides; one that
    is "" there is not told of."""
    return list(dict.fromkeys(filter(None, (_own_name(name.split("."), own) for name in names))))


def _own_name(path: Sequence[str], own: Mapping[str, str]) -> str:
    for n in range(len(path), 0, -1):
        if (known := own.get(".".join(path[:n]))) is not None:
            return ".".join([known, *path[n:]])
    return ".".join(path)


def in_own_words(error: InputError, own: Mapping[str, str]) -> InputError:
    """Chat's message begins with the name of the field. A place among the messages is chat's and not the one that the
    client counts, so the message tells that it is."""
    param, message = error.param or "", str(error)
    if param.startswith("messages["):
        name = own.get("messages", "messages")
        return InputError(f"{name}, read as chat messages: {message}", name)
    name = own.get(param, param)
    return InputError(f"{name}{message.removeprefix(param)}" if message.startswith(param) else message, name or None)


def _objects(value: Any) -> Iterable[Wire]:
    """The objects that a field is, or is a list of."""
    entries = value if isinstance(value, list) else [value]
    return (entry for entry in entries if isinstance(entry, Wire))


# --- client texts -----------------------------------------------------------------------------------------------------


def well_formed_json(value: Any) -> Any:
    """A JSON value whose texts can all be sent back, names too."""
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, list | tuple):
        return [well_formed_json(entry) for entry in value]
    if isinstance(value, Mapping):
        return {well_formed(name): well_formed_json(entry) for name, entry in value.items()}
    return value


WellFormed = Annotated[str, AfterValidator(well_formed)]
ToolName = Annotated[str, Field(pattern=f"^{TOOL_NAME.pattern}$")]


def text_field(value: Mapping[str, Any], name: str, what: str) -> str:
    """A text of an object in a list; `what` is the object in messages. Raises ValueError."""
    text = value.get(name)
    if not isinstance(text, str):
        raise ValueError(f"holds {what} whose {name} is {shown(text)}; it must be text.")
    return well_formed(text)


def mapping(value: Any, what: str) -> Mapping[str, Any]:
    """An object in a list; `what` the list should hold. Raises ValueError."""
    if not isinstance(value, Mapping):
        raise ValueError(f"holds {shown(value)}; it must hold {what}.")
    return value


_TYPE_OF_TOOL = re.compile("[a-z]{3,}(_[a-z0-9]+)*")


def other_tools(value: Any, kinds: Collection[Any]) -> tuple[Any, list[str]]:
    """A list of tools without those of other types than `kinds`, which a server would have to run, and their types.
    One that has no others is as it was: it asks for what cannot be done."""
    tools = value if isinstance(value, list) else []
    types = [tool.get("type") if isinstance(tool, Mapping) else None for tool in tools]
    others = [kind for kind in types if kind not in kinds and isinstance(kind, str) and _TYPE_OF_TOOL.fullmatch(kind)]
    mine = [tool for tool, kind in zip(tools, types, strict=True) if kind not in others]
    return (mine, others) if mine else (value, [])


# --- conversations ----------------------------------------------------------------------------------------------------


def tool_call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call as chat has it; `arguments` as an object or as JSON text."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def combined(messages: Iterable[dict[str, Any]], roles: Collection[str]) -> list[dict[str, Any]]:
    """Chat messages in which those of one of these roles that follow each other are one: many templates want the roles
    to alternate, and a call belongs to the text before it."""
    whole: list[dict[str, Any]] = []
    for role, group in groupby(messages, itemgetter("role")):
        turn = list(group)
        whole += [_joined(turn)] if role in roles and len(turn) > 1 else turn
    return whole


def _joined(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Texts are joined by line ends, as the parts of one message are."""
    joined = {name: v for message in messages for name, v in message.items()} | {"content": ""}
    for name in ("content", "reasoning_content"):
        if texts := [message[name] for message in messages if message.get(name)]:
            joined[name] = "\n".join(texts)
    if calls := [call for message in messages for call in message.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    return joined
