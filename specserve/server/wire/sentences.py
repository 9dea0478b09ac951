"""Turns pydantic's findings into one sentence that names the field, what it was and what is allowed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from specserve.errors import InputError

_MAX_SHOWN = 60  # characters of a value
_MAX_NAME = 100  # characters of a field's path

_JUST_IS = {"missing": "missing", "extra_forbidden": "not known. Leave it out, or look for a slip in its name"}
_MUST_BE = {
    "float_type": "a finite number",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_unicode": "valid Unicode text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "too_long": "of at most {max_length} entries",
    "too_short": "of at least {min_length} entries",
    "string_too_long": "of at most {max_length} characters",
    "string_too_short": "of at least {min_length} characters",
}


def as_input_error(error: ValidationError) -> InputError:
    """The first finding, as an InputError whose param is the field, such as `messages[3].content`."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InputError) and cause.param is not None:
        return cause
    path = _path(first["loc"])
    return InputError(_sentence(path or "The body", first, cause), re.sub(r"(\[[^\]]*\])+$", "", path) or None)


def _sentence(path: str, found: Mapping[str, Any], cause: object) -> str:
    if cause is not None:
        return f"{path} {cause}"
    if found["type"] in _JUST_IS:
        return f"{path} is {_JUST_IS[found['type']]}."
    template = _MUST_BE.get(found["type"])
    if template is None:
        return f"{path}: {found['msg']}."
    return f"{path} is {shown(found['input'])}; it must be {template.format_map(found.get('ctx', {}))}."


def shown(value: Any) -> str:
    """A value as JSON writes it, cut; of lists and objects only their size."""
    if isinstance(value, Mapping):
        return f"an object of {len(value)} entries"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)} entries"
    cut = value[:_MAX_SHOWN] if isinstance(value, str) else value
    return json.dumps(cut) + ("..." if cut is not value and len(value) > _MAX_SHOWN else "")


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path if len(path) <= _MAX_NAME else f"{path[:_MAX_NAME]}..."
