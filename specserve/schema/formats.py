"""What the usual regular expressions of formats let through although the formats' own rules do not, as patterns to
stand beside them. Knows no backend.

Sources: RFC 3339 (dates; leap seconds are rare, and are left out), RFC 1123 and 5890 (labels of hosts), RFC 5321
section 4.5.3.1 (lengths in addresses).
"""

from __future__ import annotations

import copy
from typing import Any

from specserve.schema.document import reachable

_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29"
_DATE = f"(?:[0-9]{{4}}-(?:0[13-9]|1[0-2])-[0-9]{{2}}|[0-9]{{4}}-02-(?:[01][0-9]|2[0-8])|{_LEAP})"
_LABEL = "(?:[^.@]{1,3}|[^.@]{2}[^.@-][^.@]{1,60}|[^.@]{3}[^.@-][^.@]{0,59})"  # no "--" third, as in xn--
_PATTERNS = {
    "date": (f"^{_DATE}$",),
    "time": ("^[0-9]{2}:[0-9]{2}:[0-5]",),
    "date-time": (f"^{_DATE}[Tt][0-9]{{2}}:[0-9]{{2}}:[0-5]",),
    "hostname": (f"^(?:{_LABEL}[.])*{_LABEL}$", "^[^@]{1,253}$"),
    "email": (f"^[^@]{{1,64}}@(?:\\[.*\\]|(?:{_LABEL}[.])*{_LABEL})$", "^[^@]{1,64}@[^@]{1,253}$"),
}


def exact(root: Any) -> Any:
    """The same document, with the patterns where formats are asked for; itself, if none of these is."""
    if not any(_patterns(schema) for schema in reachable(root)):
        return root
    made = copy.deepcopy(root)
    for schema in list(reachable(made)):
        of_type = {"type": "string"} if schema.get("type") == "string" else {}
        found = [{**of_type, "pattern": pattern} for pattern in _patterns(schema)]
        if found:
            schema["allOf"] = [*schema.get("allOf", ()), *found]
    return made


def _patterns(schema: dict[str, Any]) -> tuple[str, ...]:
    asked = schema.get("format")
    return _PATTERNS.get(asked, ()) if isinstance(asked, str) else ()
