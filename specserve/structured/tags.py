"""Structural tags: free text with constrained stretches in it. The JSON is that of xgrammar's StructuralTag and of
vLLM's older `structures`.

What is not listed here (formats made of token ids, XML styles, budgets of characters) is refused with its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from specserve.structured.base import RefusedError
from specserve.structured.schema.formats import annotated_formats
from specserve.structured.spec import Structured

_MOST_TAGS = 500  # in all; OpenAI takes 128 tools
_MOST_FORMATS = 1024  # in all
_MOST_DEPTH = 24  # formats inside each other

Words: TypeAlias = Annotated[str, Field(min_length=1, max_length=4096)]
_PerhapsNone: TypeAlias = Annotated[str, Field(max_length=4096)]
_Excludes: TypeAlias = Annotated[tuple[Words, ...], Field(max_length=64)]


class _Format(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @property
    def inside(self) -> tuple[Format, ...]:
        return ()


class ConstString(_Format):
    """A text."""

    type: Literal["const_string"]
    value: Annotated[str, Field(max_length=65_536)]


class JsonSchema(_Format):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: bool | dict[str, Any]
    style: Literal["json"] = "json"
    any_order: Literal[False] = False
    max_whitespace_cnt: None = None
    excludes: tuple[()] = ()


class Regex(_Format):
    """Text that the whole of an expression matches."""

    type: Literal["regex"]
    pattern: Words


class EbnfGrammar(_Format):
    """Text that a grammar derives from its rule `root`."""

    type: Literal["grammar"]
    grammar: Annotated[str, Field(min_length=1)]


class AnyText(_Format):
    """Any text that holds none of `excludes`. What follows it ends it where that comes for the first time."""

    type: Literal["any_text"]
    excludes: _Excludes = ()
    max_tokens: None = None
    max_chars: None = None


class Series(_Format):
    """One after the other."""

    type: Literal["sequence"]
    elements: Annotated[tuple[Format, ...], Field(min_length=1)]

    @property
    def inside(self) -> tuple[Format, ...]:
        return self.elements


class Either(_Format):
    """One of several."""

    type: Literal["or"]
    elements: Annotated[tuple[Format, ...], Field(min_length=1)]

    @property
    def inside(self) -> tuple[Format, ...]:
        return self.elements


class Tag(_Format):
    """Something between two texts; `end` may be one of several."""

    type: Literal["tag"] = "tag"
    begin: _PerhapsNone
    content: Format
    end: Annotated[tuple[_PerhapsNone, ...], Field(min_length=1)]

    @field_validator("begin", "end", mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, dict):
                raise ValueError(f"the format {each.get('type')!r} is not supported here; a text is")
        return value

    @field_validator("end", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @property
    def inside(self) -> tuple[Format, ...]:
        return (self.content,)


class TriggeredTags(_Format):
    """Free text in which each trigger begins one of the tags. With `at_least_one` a tag comes first, without text
    before it; with `stop_after_first` nothing follows a tag."""

    type: Literal["triggered_tags"]
    triggers: Annotated[tuple[Words, ...], Field(min_length=1)]
    tags: Annotated[tuple[Tag, ...], Field(min_length=1)]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: _Excludes = ()

    @model_validator(mode="after")
    def _each_tag_has_a_trigger(self) -> TriggeredTags:
        for tag in self.tags:
            found = [trigger for trigger in self.triggers if tag.begin.startswith(trigger)]
            if len(found) != 1:
                raise ValueError(f"{tag.begin!r} begins with {len(found)} of the triggers; it must be one of them")
        for trigger in self.triggers:
            if not any(tag.begin.startswith(trigger) for tag in self.tags):
                raise ValueError(f"the trigger {trigger!r} begins none of the tags")
        return self

    @property
    def inside(self) -> tuple[Format, ...]:
        return self.tags


class SeparatedTags(_Format):
    """Tags with a text between them and nothing else; none at all, unless `at_least_one`, and not more than one with
    `stop_after_first`."""

    type: Literal["tags_with_separator"]
    tags: Annotated[tuple[Tag, ...], Field(min_length=1)]
    separator: _PerhapsNone
    at_least_one: bool = False
    stop_after_first: bool = False

    @property
    def inside(self) -> tuple[Format, ...]:
        return self.tags


Format: TypeAlias = Annotated[
    ConstString | JsonSchema | Regex | EbnfGrammar | AnyText | Series | Either | Tag | TriggeredTags | SeparatedTags,
    Field(discriminator="type"),
]


class _StructuralTag(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["structural_tag"]
    format: Format


class _Structure(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    begin: Words
    json_schema: bool | dict[str, Any] | str = Field(alias="schema")
    end: str


class _Older(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["structural_tag"]
    structures: Annotated[list[_Structure], Field(min_length=1)]
    triggers: list[str]

    def newer(self) -> dict[str, Any]:
        tags = [
            {"type": "tag", "begin": each.begin, "content": _content(each.json_schema), "end": each.end}
            for each in self.structures
        ]
        return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": self.triggers, "tags": tags}}


def parse(text: str) -> Format:
    """What a structural tag asks for. Raises RefusedError that names the part that is wrong or not supported."""
    try:
        value = json.loads(text)
        if isinstance(value, dict) and "structures" in value:
            value = _Older.model_validate_json(text).newer()
        found = _StructuralTag.model_validate_json(json.dumps(value)).format
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        what = first["msg"].removeprefix("Value error, ")
        raise RefusedError(f"structural tag: {where or 'all of it'}: {what}.") from error
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"structural tag: this is no JSON: {error}.") from error
    _check_size(found)
    return found


def ignored_formats(asked: Structured) -> list[str]:
    """The formats in a constraint's schemas, one or those inside a tag, that JSON Schema does not define."""
    if asked.kind == "json_schema":
        return annotated_formats(json.loads(asked.text))
    if asked.kind != "structural_tag":
        return []
    try:
        schemas = [each.json_schema for _, each in _walk(parse(asked.text)) if isinstance(each, JsonSchema)]
    except RefusedError:  # by a backend that reads tags in its own way it may be taken
        return []
    return [name for schema in schemas for name in annotated_formats(schema)]


def json_parts(asked: Structured) -> list[tuple[bool | dict[str, Any], str | None]]:
    """The schemas in a structural tag, each with the text that stands right before its JSON: "" at the start of the
    output, None where that is no certain text."""
    parts: list[tuple[bool | dict[str, Any], str | None]] = []
    try:
        _place_json(parse(asked.text), "", parts)
    except RefusedError:  # as above
        return []
    return parts


def _place_json(found: Format, before: str | None, parts: list[tuple[bool | dict[str, Any], str | None]]) -> str | None:
    """Adds the parts; `before` is the certain text that stands before a format. Returns that which stands after it."""
    if isinstance(found, JsonSchema):
        parts.append((found.json_schema, before))
    if isinstance(found, ConstString):
        return (before or "") + found.value if before is not None or found.value else None
    if isinstance(found, Series):
        for each in found.elements:
            before = _place_json(each, before, parts)
        return before
    inner = found.begin or before if isinstance(found, Tag) else before
    for each in cast(_Format, found).inside:
        _place_json(each, inner, parts)
    return found.end[0] if isinstance(found, Tag) and len(found.end) == 1 and found.end[0] else None


def _content(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": json.loads(schema) if isinstance(schema, str) else schema}


def _check_size(root: Format) -> None:
    num_formats = num_tags = 0
    for depth, found in _walk(root):
        num_formats += 1
        num_tags += isinstance(found, Tag)
        if depth > _MOST_DEPTH:
            raise RefusedError(f"structural tag: formats are nested more than {_MOST_DEPTH} deep.")
    for count, most, name in ((num_tags, _MOST_TAGS, "tags"), (num_formats, _MOST_FORMATS, "formats")):
        if count > most:
            raise RefusedError(f"structural tag: there are {count} {name}; at most {most} are taken.")


def _walk(root: Format) -> Iterator[tuple[int, Format]]:
    left = [(1, root)]
    while left:
        depth, found = left.pop()
        yield depth, found
        left += [(depth + 1, each) for each in cast(_Format, found).inside]
