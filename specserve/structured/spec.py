"""What an output must be, as requests say it: a JSON Schema, a regular expression, one of some texts, or a grammar that
a backend reads.

    SamplingParams(structured=Person)                        # a pydantic model, a dataclass, Literal["a", "b"]
    SamplingParams(structured={"type": "object", ...})       # a JSON Schema
    SamplingParams(structured=Structured.regex(r"\\d{4}-\\d{2}"))
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

from specserve.errors import InputError, unknown
from specserve.structured import library

Kind: TypeAlias = Literal["json_schema", "regex", "choice", "lark", "ebnf", "structural_tag"]
KINDS: tuple[str, ...] = get_args(Kind)

_MAX_CHARACTERS = 2**20  # of a constraint; compilers take seconds for what is longer, and nobody writes it


@dataclass(frozen=True, slots=True)
class Structured:
    """A constraint on an output: equal ones are compiled once. `text` is JSON for a schema, a choice (a list of texts)
    and a structural tag, else the expression or grammar itself. Raises InputError for a kind or text that is none."""

    kind: Kind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(unknown("kind of structured output", str(self.kind), KINDS), "structured")
        if not isinstance(self.text, str) or not self.text:
            raise InputError(f"structured: a {self.kind} is text that is not empty.", "structured")
        if not _is_unicode(self.text):
            raise InputError(
                f"structured: this {self.kind} has half of a surrogate pair, which is no text.", "structured"
            )
        if len(self.text) > _MAX_CHARACTERS:
            raise InputError(
                f"structured: this {self.kind} has {len(self.text)} characters; at most {_MAX_CHARACTERS} are taken.",
                "structured",
            )

    @classmethod
    def of(cls, value: Any) -> Structured:
        """What `value` asks for: itself, a JSON Schema as an object, or any type that pydantic has a schema for."""
        if isinstance(value, cls):
            return value
        return cls.json(value)

    @classmethod
    def json(cls, schema: Any) -> Structured:
        """JSON that fits a schema: an object, true or JSON text; or a pydantic model, a dataclass, Literal[...] and the
        like, whose schema is taken."""
        if isinstance(schema, str):
            _parsed(schema)
            return cls("json_schema", schema)
        found = schema if isinstance(schema, Mapping | bool) else _schema_of(schema)
        return cls("json_schema", _as_json(found))

    @classmethod
    def json_object(cls) -> Structured:
        """Any JSON object."""
        return cls("json_schema", '{"type":"object"}')

    @classmethod
    def regex(cls, pattern: str) -> Structured:
        """Text that the whole of a regular expression matches."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, options: Sequence[str]) -> Structured:
        """One of these texts."""
        if isinstance(options, str) or not options or not all(isinstance(o, str) and o for o in options):
            raise InputError("structured: a choice is a list of texts, none of them empty.", "structured")
        return cls("choice", _as_json(list(options)))

    @classmethod
    def grammar(cls, text: str, syntax: Literal["lark", "ebnf"] = "lark") -> Structured:
        """Text that a context-free grammar derives from its rule `start` (Lark) or `root` (EBNF as of GBNF)."""
        return cls(syntax, text)

    @classmethod
    def named(cls, name: str) -> Structured:
        """A grammar of the library, such as "date" or "sql"; `specserve grammar list` shows all."""
        entry = library.find(name)
        return cls(cast(Kind, entry.kind), entry.text)

    @classmethod
    def file(cls, path: str | Path) -> Structured:
        """A grammar in a file, whose name ends in .regex, .ebnf, .gbnf or .lark."""
        kind, text = library.read(Path(path))
        return cls(cast(Kind, kind), text)

    @classmethod
    def structural_tag(cls, tag: Mapping[str, Any]) -> Structured:
        """Free text with constrained stretches, as xgrammar's structural tags describe it: {"type": "structural_tag",
        "format": ...}, or vLLM's older "structures" and "triggers"."""
        return cls("structural_tag", _as_json(tag))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class RefusedError(InputError):
    """A constraint that cannot be enforced exactly; the message says which part of it, and why."""

    def __init__(self, message: str) -> None:
        super().__init__(f"structured: {message}", "structured")
        self.reason = message


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"structured: this is no JSON: {error}.", "structured") from error


def _parsed(text: str) -> None:
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"structured: the schema is no JSON: {error}.", "structured") from error


def _schema_of(kind: Any) -> Any:
    from pydantic import PydanticUserError, TypeAdapter
    from pydantic.errors import PydanticSchemaGenerationError

    try:
        return TypeAdapter(kind).json_schema()
    except (PydanticUserError, PydanticSchemaGenerationError, TypeError) as error:
        raise InputError(
            f"structured is {kind!r}; it must be a JSON Schema, a type that pydantic has a schema for, or one of "
            f"Structured's constructors ({error}).",
            "structured",
        ) from error
