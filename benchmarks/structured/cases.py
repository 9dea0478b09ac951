"""What structured output is tried on: tool calls and schemas, each with a prompt.

A file of tool calls has a line for each, as BFCL does: {"question": [[message]], "function": [{"name", "description",
"parameters"}]}; "dict" there means object.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}


@dataclass(frozen=True, slots=True)
class Case:
    prompt: str
    schema: Any


def corrected(schema: Any) -> Any:
    """BFCL's types as JSON Schema's; objects that say which keys they have are closed."""
    if isinstance(schema, list):
        return [corrected(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: corrected(value) for name, value in schema.items()}
    kind = found.get("type")
    if isinstance(kind, str) and kind in _TYPES:
        found["type"] = _TYPES[kind]
        if found["type"] is None:
            del found["type"]
    if isinstance(found.get("properties"), dict) and found.get("type") == "object":
        found.setdefault("additionalProperties", False)
    return found


def tool_calls(file: Path, limit: int | None = None) -> list[Case]:
    """A case for each line of FILE: the arguments of the first function."""
    found = []
    for line in file.read_text("utf-8").splitlines()[:limit]:
        entry = json.loads(line)
        tool, question = entry["function"][0], entry["question"][0][-1]["content"]
        said = f"Call the function {tool['name']}: {tool['description']} Answer with its arguments as JSON.\n{question}"
        found.append(Case(said, corrected(tool["parameters"])))
    return found


def suite_schemas(file: Path) -> list[Any]:
    """Those of a file as JSON-Schema-Test-Suite has them: a list of objects with "schema"."""
    return [group["schema"] for group in json.loads(file.read_text("utf-8"))]


def schema_cases(schemas: list[Any]) -> list[Case]:
    """Each with a prompt that names what is there to fill in."""
    return [Case(f"{_ask(schema)} Answer with JSON alone.", schema) for schema in schemas]


def _ask(schema: Any) -> str:
    if not isinstance(schema, dict):
        return "Give an example of a JSON value."
    if isinstance(schema.get("title"), str):
        return f"Make up one {schema['title']} of a small company."
    names = list(schema.get("properties") or ())
    return f"Make up a record with {', '.join(names)}." if names else "Give an example of a JSON value."


def distinct(schemas: list[Any], count: int) -> list[Any]:
    """The first `count` that differ."""
    found = {json.dumps(schema, sort_keys=True): schema for schema in schemas}
    return list(found.values())[:count]


# --- schemas as pydantic and OpenAPI make them ------------------------------------------------------------------------

_NOUNS = (
    "Invoice", "Customer", "Address", "Order", "Product", "Event", "Ticket", "Employee", "Shipment", "Review",
    "Booking", "Recipe", "Sensor", "Account", "Report", "Playlist", "Vehicle", "Patient", "Course", "Contract",
)  # fmt: skip
_FIELDS = (
    "id", "name", "title", "status", "kind", "city", "country", "email", "notes", "amount", "price", "quantity",
    "score", "created_at", "due_date", "tags", "items", "owner", "active", "priority", "weight", "code",
    "language", "rating",
)  # fmt: skip
_WORDS = ("draft", "open", "closed", "low", "medium", "high", "red", "green", "blue", "home", "work", "daily", "weekly")
_FORMATS = ("date", "date-time", "email", "uuid", "time", "ipv4")


def made_schemas(seed: int) -> Iterator[dict[str, Any]]:
    """Schemas without end: closed and open objects of optional and required fields, enums, bounded numbers, formats,
    arrays, anyOf with null, a union told apart by a constant, and references to $defs, recursive ones too."""
    rng = random.Random(seed)
    while True:
        yield _Maker(rng).root()


class _Maker:
    """One schema and the definitions it refers to."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._definitions: dict[str, Any] = {}

    def root(self) -> dict[str, Any]:
        schema = self._object(self._rng.choice(_NOUNS), 2)
        return {**schema, "$defs": self._definitions} if self._definitions else schema

    def _object(self, title: str, depth: int) -> dict[str, Any]:
        names = self._rng.sample(_FIELDS, self._rng.randint(1, 5))
        schema: dict[str, Any] = {
            "title": title,
            "type": "object",
            "properties": {name: self._value(depth) for name in names},
            "required": [name for name in names if self._rng.random() < 0.7],
        }
        if self._rng.random() < 0.8:
            schema["additionalProperties"] = False
        return schema

    def _value(self, depth: int) -> dict[str, Any]:
        makers: list[Callable[[int], dict[str, Any]]] = [self._text, self._number, self._choice, self._boolean]
        if depth:
            makers += [self._array, self._nested, self._optional, self._reference, self._union]
        return self._rng.choice(makers)(depth)

    def _boolean(self, depth: int) -> dict[str, Any]:
        return {"type": "boolean"}

    def _text(self, depth: int) -> dict[str, Any]:
        kind = self._rng.random()
        if kind < 0.3:
            return {"type": "string", "format": self._rng.choice(_FORMATS)}
        if kind < 0.5:
            return {
                "type": "string",
                "pattern": self._rng.choice(["^[A-Z]{2}-[0-9]{4}$", "^[a-z_]{1,12}$", "^#[0-9a-f]{6}$"]),
            }
        return {"type": "string", "minLength": self._rng.randint(0, 2), "maxLength": self._rng.randint(4, 24)}

    def _number(self, depth: int) -> dict[str, Any]:
        low = self._rng.randint(-10, 50)
        bounds = {"minimum": low, "maximum": low + self._rng.randint(1, 1000)}
        kind = self._rng.choice(["integer", "number"])
        return {"type": kind, **(bounds if self._rng.random() < 0.8 else {})}

    def _choice(self, depth: int) -> dict[str, Any]:
        words = self._rng.sample(_WORDS, self._rng.randint(1, 5))
        return {"const": words[0]} if len(words) == 1 else {"type": "string", "enum": words}

    def _array(self, depth: int) -> dict[str, Any]:
        low = self._rng.randint(0, 1)
        return {"type": "array", "items": self._value(depth - 1), "minItems": low, "maxItems": self._rng.randint(1, 4)}

    def _nested(self, depth: int) -> dict[str, Any]:
        return self._object(self._rng.choice(_NOUNS), depth - 1)

    def _optional(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._value(depth - 1), {"type": "null"}], "default": None}

    def _reference(self, depth: int) -> dict[str, Any]:
        name = self._rng.choice(_NOUNS)
        if name not in self._definitions:
            self._definitions[name] = {}  # so that it may refer to itself
            self._definitions[name] = self._object(name, depth - 1)
            if self._rng.random() < 0.2:
                parent = {"anyOf": [{"$ref": f"#/$defs/{name}"}, {"type": "null"}]}
                self._definitions[name]["properties"]["parent"] = parent
        return {"$ref": f"#/$defs/{name}"}

    def _union(self, depth: int) -> dict[str, Any]:
        members = []
        for word in self._rng.sample(_WORDS, 2):
            member = self._object(word.title(), 0)
            member["properties"] = {"type": {"const": word}, **member["properties"]}
            member["required"] = ["type", *member["required"]]
            members.append(member)
        return {"anyOf": members}
