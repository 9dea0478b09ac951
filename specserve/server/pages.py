"""The pages for people: GET /, where one talks with the model, and GET /docs, which shows /openapi.json. They are
static/NAME.html."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Page:
    """A response's body, and the headers it must be sent with."""

    body: bytes
    headers: Mapping[str, str]


def page(name: str) -> Page:
    """static/NAME.html. It may run its own script and style, told by their hashes, and speak with this server alone."""
    text = files("specserve.server").joinpath(f"static/{name}.html").read_text("utf-8")
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": content_security_policy(text),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Page(text.encode(), headers)


def content_security_policy(text: str) -> str:
    """Allows what stands in the page's script and style elements, requests to the server that it came from, and nothing
    else: no other host, no frame around it."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, source in _INLINE.findall(text):
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(hashes["script"]),
        "style-src": " ".join(hashes["style"]),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())
