"""What an answer must be, by every name that clients have for it: OpenAI's response_format, vLLM's structured_outputs
and guided_*, SGLang's and llama.cpp's fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from specserve.errors import InputError
from specserve.server.wire.fields import ClosedWire, Wire, well_formed
from specserve.server.wire.sentences import shown
from specserve.structured.spec import Structured

Json: TypeAlias = dict[str, Any]

_MAX_CHOICES = 4096


def _made(make: Callable[[Any], Structured], value: Any) -> Structured:
    """What a constructor of Structured makes of a field's value. The field's name will stand before the message."""
    try:
        return make(value)
    except InputError as error:
        raise ValueError(f"is refused: {str(error).removeprefix('structured: ')}") from error


def _schema(value: Any) -> Structured:
    """A JSON Schema, as an object, true, false, or JSON text."""
    if not isinstance(value, Mapping | bool | str):
        raise ValueError(f"is {shown(value)}; it must be a JSON Schema.")
    return _made(Structured.json, value)


def _text(make: Callable[[str], Structured], what: str) -> Callable[[Any], Structured]:
    def check(value: Any) -> Structured:
        if not isinstance(value, str) or not value:
            raise ValueError(f"is {shown(value)}; it must be {what} as text.")
        return _made(make, well_formed(value))

    return check


def _choice(value: Any) -> Structured:
    if not isinstance(value, list) or not 0 < len(value) <= _MAX_CHOICES:
        raise ValueError(f"is {shown(value)}; it must be a list of 1 to {_MAX_CHOICES} texts.")
    if not all(isinstance(option, str) and option for option in value):
        raise ValueError("holds what is no text, or is empty; an answer is one of these texts.")
    return _made(Structured.choice, [well_formed(option) for option in value])


def _of_syntax(text: str) -> Structured:
    """EBNF says `root ::= ...`, Lark `start: ...`."""
    return Structured.grammar(text, "ebnf" if "::=" in text else "lark")


def _tag(value: Any) -> Structured:
    """A structural tag, as an object or as its JSON text; with or without its `type`."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is no JSON: {error}.") from error
    if not isinstance(value, Mapping):
        raise ValueError(f"is {shown(value)}; it must be a structural tag.")
    return _made(Structured.structural_tag, {"type": "structural_tag", **value})


_FORMATS = '"text", "json_object", "json_schema" or "structural_tag"'


def _format(value: Any) -> Structured | None:
    """OpenAI's response_format; text is no constraint."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(kind, str) or kind not in _FORMAT_READERS:
        raise ValueError(f"is {shown(value)}; it must be an object whose type is {_FORMATS}.")
    return _FORMAT_READERS[kind](value)


def _json_object(value: Mapping[str, Any]) -> Structured:
    """llama.cpp takes a `schema` here."""
    _check_names(value, {"schema"})
    return Structured.json_object() if value.get("schema") is None else _inner("schema", value["schema"])


def _json_schema(value: Mapping[str, Any]) -> Structured:
    _check_names(value, {"json_schema"})
    named = value.get("json_schema")
    if not isinstance(named, Mapping) or "schema" not in named:
        raise ValueError('has no schema; send {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}.')
    _check_names(named, {"name", "description", "schema", "strict"}, "json_schema.")
    return _inner("json_schema.schema", named["schema"])


def _inner(name: str, schema: Any) -> Structured:
    try:
        return _schema(schema)
    except ValueError as error:
        raise InputError(f"response_format.{name} {error}", "response_format") from error


def _no_constraint(value: Mapping[str, Any]) -> None:
    _check_names(value, set())


_FORMAT_READERS: Mapping[str, Callable[[Mapping[str, Any]], Structured | None]] = {
    "text": _no_constraint,
    "json_object": _json_object,
    "json_schema": _json_schema,
    "structural_tag": _tag,
}


def _check_names(value: Mapping[str, Any], known: set[str], path: str = "") -> None:
    unknown = sorted(set(value) - known - {"type"})
    if unknown:
        raise ValueError(f"has {path}{unknown[0]}, which is not known. Leave it out, or look for a slip in its name.")


# --- as JSON Schema, for the document ---------------------------------------------------------------------------------

_ANY_SCHEMA: Json = {"type": ["object", "boolean"], "description": "A JSON Schema."}
_SCHEMA_OR_TEXT: Json = {"anyOf": [_ANY_SCHEMA, {"type": "string", "minLength": 1}]}
_SOME_TEXT: Json = {"type": "string", "minLength": 1}
_CHOICES: Json = {"type": "array", "items": _SOME_TEXT, "minItems": 1, "maxItems": _MAX_CHOICES}
_TAG: Json = {"anyOf": [{"type": "object"}, _SOME_TEXT]}


def _closed(kind: str, required: bool = False, **properties: Json) -> Json:
    names = ["type", *(properties if required else ())]
    known = {"type": {"const": kind}, **properties}
    return {"type": "object", "properties": known, "required": names, "additionalProperties": False}


_NAMED: Json = {
    "type": "object",
    "properties": {
        "name": {},
        "description": {},
        "strict": {},
        "schema": _SCHEMA_OR_TEXT,
    },
    "required": ["schema"],
    "additionalProperties": False,
}
_FORMAT: Json = {
    "anyOf": [
        _closed("text"),
        _closed("json_object", schema={"anyOf": [*_SCHEMA_OR_TEXT["anyOf"], {"type": "null"}]}),
        _closed("json_schema", required=True, json_schema=_NAMED),
        {"type": "object", "properties": {"type": {"const": "structural_tag"}}, "required": ["type"]},
    ]
}

_FLAT: Json = {
    "anyOf": [
        _closed("text"),
        _closed("json_object"),
        {
            "type": "object",
            "properties": {"type": {"const": "json_schema"}, **_NAMED["properties"]},
            "required": ["type", "schema"],
            "additionalProperties": False,
        },
    ]
}

FlatFormat: TypeAlias = Annotated[Any, WithJsonSchema(_FLAT)]  # of other APIs, which become chat's
Format: TypeAlias = Annotated[Any, BeforeValidator(_format), WithJsonSchema(_FORMAT)]
Schema: TypeAlias = Annotated[Any, BeforeValidator(_schema), WithJsonSchema(_SCHEMA_OR_TEXT)]
Regex: TypeAlias = Annotated[
    Any, BeforeValidator(_text(Structured.regex, "a regular expression")), WithJsonSchema(_SOME_TEXT)
]
Choice: TypeAlias = Annotated[Any, BeforeValidator(_choice), WithJsonSchema(_CHOICES)]
Grammar: TypeAlias = Annotated[Any, BeforeValidator(_text(_of_syntax, "a grammar")), WithJsonSchema(_SOME_TEXT)]
Tag: TypeAlias = Annotated[Any, BeforeValidator(_tag), WithJsonSchema(_TAG)]


def as_chat_format(flat: Any) -> Any:
    """Another API's format as chat has it, to be judged there."""
    if not isinstance(flat, Mapping) or flat.get("type") != "json_schema":
        return flat
    return {"type": "json_schema", "json_schema": {name: value for name, value in flat.items() if name != "type"}}


class StructuredOutputs(ClosedWire):
    """vLLM's field: one of these."""

    json_: Schema = Field(None, alias="json")
    """A JSON Schema that the answer fits."""
    json_object: bool = False
    """Whether the answer is any JSON object."""
    regex: Regex = None
    """The whole answer matches it."""
    choice: Choice = None
    """The answer is one of these texts."""
    grammar: Grammar = None
    """The answer is derived from it: EBNF from its rule `root`, Lark from `start`."""
    structural_tag: Tag = None
    """Free text with constrained stretches."""
    disable_any_whitespace: bool = False
    """Accepted and not used: JSON is always written with one space after a comma and a colon, and no other blanks."""
    disable_fallback: bool = False
    """Accepted and not used: what cannot be enforced is refused."""

    @property
    def structured(self) -> Structured:
        return next(iter(self._stated().values()))

    def _stated(self) -> dict[str, Structured]:
        fields = ("json_", "regex", "choice", "grammar", "structural_tag")
        found = {name.rstrip("_"): value for name in fields if (value := getattr(self, name)) is not None}
        return {**found, "json_object": Structured.json_object()} if self.json_object else found

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        stated = list(self._stated())
        if len(stated) != 1:
            names = "nothing" if not stated else " and ".join(stated)
            raise InputError(
                f"structured_outputs says {names}; it must have one of json, json_object, regex, choice, grammar and "
                "structural_tag.",
                "structured_outputs",
            )
        return self


class StructuredFields(Wire):
    """The fields that say what the answer must be. One of them may."""

    response_format: Format = None
    """Text, any JSON object, JSON that fits a schema, or a structural tag."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's way to say it."""
    guided_json: Schema = None
    """vLLM's older name for structured_outputs.json."""
    guided_regex: Regex = None
    """vLLM's older name for structured_outputs.regex."""
    guided_choice: Choice = None
    """vLLM's older name for structured_outputs.choice."""
    guided_grammar: Grammar = None
    """vLLM's older name for structured_outputs.grammar."""
    json_schema: Schema = None
    """SGLang's and llama.cpp's name for a JSON Schema that the answer fits."""
    regex: Regex = None
    """SGLang's name for a regular expression that the whole answer matches."""
    ebnf: Grammar = None
    """SGLang's name for a grammar."""
    grammar: Grammar = None
    """llama.cpp's name for a grammar."""
    structural_tag: Tag = None
    """SGLang's name for a structural tag."""

    _sources: ClassVar[tuple[str, ...]] = (
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "json_schema",
        "regex",
        "ebnf",
        "grammar",
        "structural_tag",
    )

    @property
    def constraint(self) -> tuple[str, Structured] | None:
        """The field that says what the answer must be, and what it says. Raises InputError for more than one."""
        stated = list(self._constraints())
        if len(stated) > 1:
            (first, _), (second, _), *_ = stated
            raise InputError(f"{second} and {first} both say what the answer must be. Send one of them.", second)
        return stated[0] if stated else None

    @property
    def structured(self) -> Structured | None:
        """SamplingParams.structured."""
        return self.constraint[1] if self.constraint else None

    def _constraints(self) -> Iterator[tuple[str, Structured]]:
        for name in self._sources:
            value = getattr(self, name)
            if value is not None:
                yield name, value.structured if isinstance(value, StructuredOutputs) else value
