"""Reads the arguments of calls, which a model wrote and which may end anywhere, as objects that can be sent on."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from pydantic_core import from_json

# An escape, or half of a surrogate pair, which JSON can spell and UTF-8 cannot.
_ESCAPES = re.compile(r"(\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\[^u])|\\u[dD][89a-fA-F]..")


def whole_object(text: str) -> dict[str, Any] | None:
    """The arguments as an object; None where they were cut off or are none. No text at all is an empty object."""
    return _read(text or "{}", partial=False)


def object_so_far(text: str) -> dict[str, Any]:
    """As `whole_object`; of arguments that were cut off, what Anthropic's clients read of a stream that ends there:
    entries whose values have come, and numbers as far as they have. Empty for what is nested deeper than they read."""
    return whole_object(text) or _read(text or "{}", partial=True) or {}


def _read(text: str, partial: bool) -> dict[str, Any] | None:
    text = _ESCAPES.sub(lambda found: found[1] or r"\ufffd", text)
    try:
        # The reader lets a number be infinite, which cannot be written again.
        found = json.loads(json.dumps(from_json(text, allow_partial=partial)), parse_constant=_finite)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _finite(number: str) -> float:
    return max(-sys.float_info.max, min(float(number), sys.float_info.max))
