"""The pages for people: GET /, where one talks with the model, and GET /docs, which shows /openapi.json. They are
static/NAME.html; what a page loads are modules of static/playground/ and static/vendor/."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

MODULE_FOLDERS = ("playground", "vendor")

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
_LOADED = '<script type="module" src='


@dataclass(frozen=True, slots=True)
class Page:
    """A response's body, and the headers it must be sent with."""

    body: bytes
    headers: Mapping[str, str]


def page(name: str) -> Page:
    """static/NAME.html. It may run its own scripts and style, and speak with this server alone."""
    text = files("specserve.server").joinpath(f"static/{name}.html").read_text("utf-8")
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": content_security_policy(text),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Page(text.encode(), headers)


@cache
def modules() -> Mapping[str, Page]:
    """The scripts that pages load, by their path below /static/. Browsers ask each time whether they are still these,
    so that the page of a new version never runs an old script."""
    headers = {
        "Content-Type": "text/javascript; charset=utf-8",
        "Cache-Control": "no-cache",
        "X-Content-Type-Options": "nosniff",
    }
    static = files("specserve.server").joinpath("static")
    found = {f"{folder}/{file.name}": file for folder in MODULE_FOLDERS for file in static.joinpath(folder).iterdir()}
    return {name: Page(file.read_bytes(), headers) for name, file in found.items() if name.endswith(".js")}


def content_security_policy(text: str) -> str:
    """Allows what stands in the page's script and style elements, told by their hashes, modules of this server where
    the page loads one, requests to this server, and nothing else: no other host, no frame around it, and text becomes
    HTML through the sanitizer alone (Trusted Types, in browsers that know them)."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, source in _INLINE.findall(text):
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    loads = _LOADED in text
    rules = {
        "default-src": "'none'",
        "script-src": " ".join([*hashes["script"], *(["'self'"] if loads else [])]),
        "style-src": " ".join(hashes["style"]),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "dompurify" if loads else "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())
