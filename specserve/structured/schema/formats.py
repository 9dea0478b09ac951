"""Formats: which of them the standard knows, and what the usual regular expressions of those let through although their
own rules do not, as patterns to stand beside them.

Sources: JSON Schema 2020-12, Validation, section 7 (formats that it does not define may be annotations); RFC 3339
(dates; leap seconds are rare, and are left out), RFC 1123 and 5890 (labels of hosts), RFC 5321 section 4.5.3.1 (lengths
in addresses).
"""

from __future__ import annotations

import copy
from typing import Any

from specserve.structured.schema.document import reachable

STANDARD = frozenset({
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri",
    "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex",
})  # fmt: skip
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29"
_DATE = f"(?:[0-9]{{4}}-(?:0[13-9]|1[0-2])-[0-9]{{2}}|[0-9]{{4}}-02-(?:[01][0-9]|2[0-8])|{_LEAP})"
# No "--" third, as in xn--. Six labels of at most 40 characters are shorter than the 253 that a host may have: that is
# narrower than the rule, but counting labels and characters at once takes automata of many thousand states.
_LABEL = "(?:[^.@]{1,3}|[^.@]{2}[^.@-][^.@]{1,37}|[^.@]{3}[^.@-][^.@]{0,36})"
_HOST = f"(?:{_LABEL}[.]){{0,5}}{_LABEL}"
_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": "^[0-9]{2}:[0-9]{2}:[0-5]",
    "date-time": f"^{_DATE}[Tt][0-9]{{2}}:[0-9]{{2}}:[0-5]",
    "hostname": f"^{_HOST}$",
    "email": f"^[^@]{{1,64}}@(?:\\[.*\\]|{_HOST})$",
}


def annotated_formats(root: Any) -> list[str]:
    """The formats in a document that the standard does not define, sorted: they say nothing of what fits."""
    return sorted({schema["format"] for schema in reachable(root) if _is_annotated(schema)})


def without_annotations(root: Any) -> Any:
    """The same document without these; itself, if there are none."""
    if not any(map(_is_annotated, reachable(root))):
        return root
    made = copy.deepcopy(root)
    for schema in list(reachable(made)):
        if _is_annotated(schema):
            del schema["format"]
    return made


def _is_annotated(schema: dict[str, Any]) -> bool:
    return isinstance(schema.get("format"), str) and schema["format"] not in STANDARD


def exact(root: Any) -> Any:
    """The same document, with the patterns where formats are asked for; itself, if none of these is."""
    if all(_pattern(schema) is None for schema in reachable(root)):
        return root
    made = copy.deepcopy(root)
    for schema in list(reachable(made)):
        pattern = _pattern(schema)
        if pattern is not None:
            of_type = {"type": "string"} if schema.get("type") == "string" else {}
            schema["allOf"] = [*schema.get("allOf", ()), {**of_type, "pattern": pattern}]
    return made


def _pattern(schema: dict[str, Any]) -> str | None:
    asked = schema.get("format")
    return _PATTERNS.get(asked) if isinstance(asked, str) else None
