"""The field types that requests share, strict and bounded before anything is expanded, and the limits they are held
to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from specserve.server.wire.sentences import shown

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 4096
MAX_LISTED = 1024  # entries of logit_bias, stop_token_ids and bad_words
MAX_LOGPROBS = 20  # OpenAI's limit, and vLLM's default
MAX_COUNT = 2**31 - 1

MAX_HEADER = 1024  # characters

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")
_AT_ONCE = 2**18  # characters that are looked at before another thread may run
_SURROGATE = re.compile("[\ud800-\udfff]")
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")  # one spelling for each


@dataclass(frozen=True, slots=True)
class Limits:
    """What this server can do. `vocab_size`: ids that the tokenizer knows are below it; `max_model_len`: tokens of
    prompt and output together; `max_completions`: prompts times n of one call; `drafters`: names that may be asked for;
    `refused_drafters`: others, with why they may not be; `max_priority`: the largest size of a request's own priority,
    0 where there are none; `sampling`: values by the names of SamplingParams, of requests that do not say them.
    """

    vocab_size: int
    max_model_len: int
    max_completions: int = 128
    drafters: frozenset[str] = frozenset()
    refused_drafters: tuple[tuple[str, str], ...] = ()
    max_priority: int = 0
    sampling: tuple[tuple[str, float], ...] = ()

    @property
    def min_priority(self) -> int:
        return -self.max_priority


def limits_of(info: ValidationInfo) -> Limits:
    """The limits a model is validated with: `validate(..., context=limits)`."""
    assert isinstance(info.context, Limits), "requests are validated with Limits as context"
    return info.context


class Wire(BaseModel):
    """An object of a request. A boolean is no number, text is no number, NaN is none either; null is the default.
    Unknown names, MAX_LISTED at most, are kept apart in `model_extra`, without what they stand for, and `unused` ones
    are dropped: nothing that nobody reads is held as long as an answer takes."""

    keeps_unknown: ClassVar[bool] = False  # for a template
    unused: ClassVar[frozenset[str]] = frozenset()
    misplaced: ClassVar[dict[str, str]] = {}  # fields of another endpoint: {name: what to do}

    model_config = ConfigDict(
        strict=True,
        extra="allow",
        allow_inf_nan=False,
        frozen=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    @classmethod
    @cache
    def _names(cls) -> frozenset[str]:
        fields = cls.__pydantic_fields__.items()
        return frozenset(field.alias or name for name, field in fields) - cls.unused | cls.misplaced.keys()

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        names = cls._names()
        known = {name: v for name, v in value.items() if v is not None and name in names}
        if len(known) == len(value):
            return known
        passed = names | cls.unused
        others = ((name, v) for name, v in value.items() if v is not None and name not in passed)
        return {**known, **{name: v if cls.keeps_unknown else True for name, v in islice(others, MAX_LISTED)}}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Says of null what the validator above does with it."""
        schema = handler(core_schema)
        own = handler.resolve_ref_schema(schema)
        fields, required = own.get("properties", {}), own.get("required", ())
        own["properties"] = {name: v if name in required else nullable(v) for name, v in fields.items()}
        return schema


class ClosedWire(Wire):
    """An object in which an unknown name is an error: it is ours alone, so it can only be a slip."""

    model_config = ConfigDict(extra="forbid")


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema`, which allows null too, in its shortest spelling."""
    branches = [branch for branch in schema.get("anyOf", ()) if branch != _NULL]
    rest = {name: value for name, value in schema.items() if name != "anyOf"}
    if len(branches) > 1 or any("$ref" in branch for branch in branches):
        return {"anyOf": [*branches, _NULL], **rest}
    only = {**(branches[0] if branches else {}), **rest}
    if "$ref" in only:
        return {"anyOf": [{"$ref": only.pop("$ref")}, _NULL], **only}
    if "type" in only:
        only["type"] = [only["type"], "null"]
    if "const" in only:
        only["enum"] = [only.pop("const")]
    if "enum" in only:
        only["enum"] = [*only["enum"], None]
    return only


def header_names(names: Iterable[str]) -> str:
    """Names as the value of a header, where client text may say nothing but itself: other characters than those of a
    field name become `?`, and what is too long ends in `...`."""
    joined = ",".join(_NOT_IN_NAMES.sub("?", name[:MAX_HEADER]) for name in islice(names, MAX_HEADER))
    return joined if len(joined) <= MAX_HEADER else f"{joined[:MAX_HEADER]}..."


def well_formed(text: str) -> str:
    """`text` with U+FFFD for lone surrogates, which JSON can spell and UTF-8 cannot."""
    places = range(0, len(text), _AT_ONCE)
    if text.isascii() or not any(_SURROGATE.search(text, at, at + _AT_ONCE) for at in places):
        return text
    return "".join(_SURROGATE.sub("\ufffd", text[at : at + _AT_ONCE]) for at in places)


def _encodable(text: str) -> str:
    if _SURROGATE.search(text):
        raise ValueError("holds half of a surrogate pair; it must be valid Unicode text.")
    return text


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("holds control characters; it must be printable text.")
    return text


def _stops(value: Any) -> Any:
    """One string or a list of them; always a tuple afterwards."""
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, list | tuple):
        raise ValueError(f"is {shown(value)}; it must be text or a list of texts.")
    _check_length(stops, MAX_STOPS)
    for stop in stops:
        _check_text(stop, MAX_STOP_CHARACTERS)
    return tuple(stops)


def _words(value: Any) -> Any:
    """A list of texts; always a tuple afterwards."""
    if not isinstance(value, list):
        raise ValueError(f"is {shown(value)}; it must be a list of texts.")
    _check_length(value, MAX_LISTED)
    for word in value:
        _check_text(word, MAX_STOP_CHARACTERS)
    return tuple(value)


def _check_text(text: Any, most: int) -> None:
    if not isinstance(text, str) or not 0 < len(text) <= most:
        raise ValueError(f"holds {shown(text)}; each entry must be text of 1 to {most} characters.")
    _encodable(text)


def _check_length(entries: Any, most: int) -> None:
    if len(entries) > most:
        raise ValueError(f"has {len(entries)} entries; it may have at most {most}.")


def check_ids(ids: list[Any], vocab_size: int) -> None:
    """Raise ValueError for what is no id of the tokenizer; a million ids take a tenth of a second."""
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(f"holds {shown(token)}; token ids are whole numbers from 0 to {vocab_size - 1}.")


def _id_list(most: int | None) -> Callable[[Any, ValidationInfo], Any]:
    """A list of at most `most` ids, None: as many as there are; always a tuple afterwards."""

    def check(value: Any, info: ValidationInfo) -> Any:
        limits = limits_of(info)
        if not isinstance(value, list):
            raise ValueError(f"is {shown(value)}; it must be a list of token ids.")
        _check_length(value, limits.vocab_size if most is None else most)
        check_ids(value, limits.vocab_size)
        return tuple(value)

    return check


def _biases(value: Any, info: ValidationInfo) -> Any:
    """JSON's keys are texts: {"50256": -100}."""
    if not isinstance(value, dict):
        raise ValueError(f"is {shown(value)}; it must be an object of token ids and numbers.")
    _check_length(value, MAX_LISTED)
    vocab_size = limits_of(info).vocab_size
    for key in value:
        if not _TOKEN_ID.fullmatch(key) or int(key) >= vocab_size:
            raise ValueError(f'has the key {shown(key)}; keys are token ids from "0" to "{vocab_size - 1}".')
    return {int(key): bias for key, bias in value.items()}


# JSON Schemas for what a function checks. "x-limits" are bounds that each server has its own of: {keyword: which of
# Limits}.
_NULL = {"type": "null"}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
_BIAS = {"type": "number", "minimum": -100, "maximum": 100}
ID = {"type": "integer", "minimum": 0, "x-limits": {"exclusiveMaximum": "vocab_size"}}
_STOPS = {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]}
_WORDS = {"type": "array", "items": _STOP, "maxItems": MAX_LISTED}
_FEW_IDS = {"type": "array", "items": ID, "maxItems": MAX_LISTED}
_ANY_IDS = {"type": "array", "items": ID, "minItems": 1, "x-limits": {"maxItems": "vocab_size"}}
_BIASES = {
    "type": "object",
    "propertyNames": {"pattern": f"^({_TOKEN_ID.pattern})$"},
    "additionalProperties": _BIAS,
    "maxProperties": MAX_LISTED,
}

Name: TypeAlias = Annotated[str, Field(max_length=256), AfterValidator(_encodable)]
Label: TypeAlias = Annotated[Name, AfterValidator(_printable)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Stops: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_stops), WithJsonSchema(_STOPS)]
Words: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_words), WithJsonSchema(_WORDS)]
FewIds: TypeAlias = Annotated[tuple[int, ...], BeforeValidator(_id_list(MAX_LISTED)), WithJsonSchema(_FEW_IDS)]
AnyIds: TypeAlias = Annotated[tuple[int, ...], BeforeValidator(_id_list(None)), WithJsonSchema(_ANY_IDS)]
Biases: TypeAlias = Annotated[dict[int, float], BeforeValidator(_biases), WithJsonSchema(_BIASES)]
Logprobs: TypeAlias = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
