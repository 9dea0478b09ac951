"""Where the schemas in a JSON Schema document are, and what its references lead to.

Sources: JSON Schema 2020-12, core sections 8 and 9; the older array form of `items` is understood as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeGuard
from urllib.parse import unquote, urljoin

from specserve.structured.spec import RefusedError

MAX_DEPTH = 128  # of JSON in JSON: llguidance's own reader takes no more
_ONE = (
    "not", "if", "then", "else", "contains", "propertyNames", "additionalProperties", "additionalItems",
    "unevaluatedItems", "unevaluatedProperties", "items",
)  # fmt: skip
_MANY = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


def subschemas(schema: Any) -> Iterator[Any]:
    """The schemas directly inside one. Constants, defaults and names of properties are none."""
    if not isinstance(schema, dict):
        return
    for name, value in schema.items():
        if name in _ONE and not isinstance(value, list):
            yield value
        elif name in _MANY or name == "items":
            yield from _listed(value)
        elif name in _NAMED:
            yield from value.values() if isinstance(value, dict) else ()
        elif name == "dependencies" and isinstance(value, dict):
            yield from (inner for inner in value.values() if not isinstance(inner, list))


def walk(root: Any) -> Iterator[dict[str, Any]]:
    """Every schema in a document that is an object, each once."""
    left = [root]
    while left:
        schema = left.pop()
        if isinstance(schema, dict):
            yield schema
            left += subschemas(schema)


def reachable(root: Any) -> Iterator[dict[str, Any]]:
    """Every schema in a document that is an object, and those that are only referred to; each once. Raises RefusedError
    for a reference that leads nowhere."""
    document: Document | None = None
    left, seen = [root], set[int]()
    while left:
        schema = left.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        yield schema
        left += subschemas(schema)
        if isinstance(schema.get("$ref"), str):
            document = document or Document(root)
            left.append(document.target(schema))


def check_depth(value: Any) -> None:
    """Raise RefusedError for JSON that is nested too deeply to be walked by recursion."""
    left = [(value, 1)]
    while left:
        found, depth = left.pop()
        if depth > MAX_DEPTH:
            raise RefusedError(f"the schema is nested more than {MAX_DEPTH} deep.")
        inner = found.values() if isinstance(found, dict) else _listed(found)
        left += [(each, depth + 1) for each in inner if isinstance(each, dict | list)]


def check_shape(schema: dict[str, Any]) -> None:
    """Raise RefusedError where a keyword has a value that JSON Schema does not allow."""
    for name, value in schema.items():
        right = _SHAPES.get(name)
        if right is not None and not right(value):
            raise RefusedError(f"the value of {name} is not what JSON Schema allows there.")


def is_count(value: Any) -> bool:
    """A whole number that is not negative; 2.0 is one."""
    return is_number(value) and value >= 0 and value == int(value)


def is_number(value: Any) -> TypeGuard[float]:
    """One that is counted and compared with; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


class Document:
    """Schemas by identity: each has the base its references are relative to. Raises RefusedError for a reference that
    leads nowhere, and for one whose target depends on how it was come to."""

    def __init__(self, root: Any) -> None:
        self.root = root
        draft = root.get("$schema") if isinstance(root, dict) else None
        self._id = "id" if isinstance(draft, str) and "draft-04" in draft else "$id"
        self._bases: dict[int, str] = {}
        self._resources: dict[str, Any] = {"": root}
        self._anchors: dict[str, Any] = {}
        self._dynamic: dict[str, list[str]] = {}  # name: where
        self._index(root, "")
        self._root_base = self._bases.get(id(root), "")

    def target(self, schema: dict[str, Any], keyword: str = "$ref") -> Any:
        """What `$ref` or `$dynamicRef` in a schema leads to."""
        reference = schema[keyword]
        found, where = self._resolved(self._bases.get(id(schema), ""), reference)
        _, _, fragment = where.partition("#")
        if keyword == "$ref" or where not in self._dynamic.get(fragment, ()):
            return found
        outermost = f"{self._root_base}#{fragment}"
        if len(self._dynamic[fragment]) > 1 and outermost not in self._dynamic[fragment]:
            raise RefusedError(f"$dynamicRef: {reference} may lead to several places.")
        return self._anchors.get(outermost, found)

    def _index(self, root: Any, base: str) -> None:
        left = [(root, base)]
        while left:
            schema, base = left.pop()
            if not isinstance(schema, dict) or id(schema) in self._bases:
                continue
            name = schema.get(self._id)
            if isinstance(name, str) and name.startswith("#"):  # an anchor, until draft 7
                self._anchors.setdefault(base + name, schema)
            elif isinstance(name, str):
                base = _joined(base, name).rstrip("#")
                self._resources.setdefault(base, schema)
            self._bases[id(schema)] = base
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(schema.get(keyword), str):
                    where = f"{base}#{schema[keyword]}"
                    self._anchors.setdefault(where, schema)
                    if keyword == "$dynamicAnchor":
                        self._dynamic.setdefault(schema[keyword], []).append(where)
            left += [(inner, base) for inner in subschemas(schema)]

    def _resolved(self, base: str, reference: str) -> tuple[Any, str]:
        where = _joined(base, reference)
        resource, _, fragment = where.partition("#")
        if fragment and not fragment.startswith("/"):
            if where not in self._anchors:
                raise RefusedError(f"$ref: {reference} is not in this schema.")
            return self._anchors[where], where
        if resource not in self._resources:
            raise RefusedError(f"$ref: {reference} is not in this schema, and nothing is fetched.")
        return self._at(self._resources[resource], resource, fragment, reference), where

    def _at(self, found: Any, base: str, pointer: str, reference: str) -> Any:
        for step in pointer.split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                raise RefusedError(f"$ref: {reference} leads to nothing.")
            base = self._bases.get(id(found), base)
        if not isinstance(found, dict | bool):
            raise RefusedError(f"$ref: {reference} leads to something that is no schema.")
        self._index(found, base)  # where no keyword holds schemas, as in OpenAPI's components
        return found


def _joined(base: str, reference: str) -> str:
    return base + reference if reference.startswith("#") else urljoin(base, reference)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_schema, value))


def _are_named(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_types(value: Any) -> bool:
    if isinstance(value, str):
        return value in _TYPES
    return _are_names(value) and _TYPES.issuperset(value)


_SHAPES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_ONE, _is_schema),
    **dict.fromkeys(_MANY, _are_schemas),
    **dict.fromkeys(_NAMED, _are_named),
    "items": lambda value: _is_schema(value) or _are_schemas(value),
    "type": _are_types,
    "enum": lambda value: isinstance(value, list),
    "required": _are_names,
    "dependentRequired": lambda value: isinstance(value, dict) and all(map(_are_names, value.values())),
    "dependencies": lambda value: isinstance(value, dict)
    and all(_is_schema(inner) or _are_names(inner) for inner in value.values()),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), is_number),
    "multipleOf": lambda value: is_number(value) and value > 0,
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains",
         "maxContains"),
        is_count,
    ),
    **dict.fromkeys(("pattern", "format", "$ref", "$dynamicRef", "$anchor", "$dynamicAnchor", "$id"), _is_text),
    "uniqueItems": lambda value: isinstance(value, bool),
}  # fmt: skip
