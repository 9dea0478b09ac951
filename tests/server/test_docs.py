"""The page of /docs: complete in itself, true to its Content-Security-Policy, and made of nothing that needs a laxer
one."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from specserve.server.docs import content_security_policy, docs_page

VOID = {"meta", "link", "input", "br", "hr", "img"}


class Parsed(HTMLParser):
    """Elements with their attributes, the text of scripts and styles, and whether what was opened was closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inline: dict[str, list[str]] = {"script": [], "style": []}
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.inline:
            self.inline[self.open[-1]].append(data)


PAGE = docs_page()
TEXT = PAGE.body.decode()
PARSED = Parsed(TEXT)
POLICY = dict(rule.split(" ", 1) for rule in PAGE.headers["Content-Security-Policy"].split("; "))


def test_the_page_is_whole_and_small() -> None:
    assert TEXT.startswith("<!doctype html>")
    assert PARSED.open == []
    assert len(PAGE.body) < 30_000
    assert PAGE.headers["Content-Type"] == "text/html; charset=utf-8"


def test_nothing_comes_from_elsewhere() -> None:
    assert re.findall(r"https?:|//\w|@import|\burl\(", TEXT.replace("// ", "")) == []
    for tag, attributes in PARSED.elements:
        assert "src" not in attributes, tag
        assert attributes.get("href", "data:,") in ("data:,", "#main")


@pytest.mark.parametrize("kind", ["script", "style"])
def test_the_policy_allows_what_is_in_the_page_and_nothing_else(kind: str) -> None:
    (source,) = PARSED.inline[kind]
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    assert POLICY[f"{kind}-src"] == f"'sha256-{digest}'"
    changed = content_security_policy(TEXT.replace(source, source + " "))
    assert digest not in changed


def test_the_policy_is_strict() -> None:
    assert "unsafe" not in PAGE.headers["Content-Security-Policy"]
    assert "http" not in PAGE.headers["Content-Security-Policy"]
    assert POLICY["default-src"] == "'none'"
    assert POLICY["connect-src"] == "'self'"
    assert {POLICY[name] for name in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}


def test_the_page_has_nothing_that_the_policy_forbids() -> None:
    for tag, attributes in PARSED.elements:
        assert not [name for name in attributes if name == "style" or name.startswith("on")], tag
    (script,) = PARSED.inline["script"]
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|\.style\b|localStorage"
    assert re.findall(forbidden, script) == []
    assert ".cookie" not in script


def test_the_page_asks_this_server_for_the_document() -> None:
    (script,) = PARSED.inline["script"]
    assert 'fetch(address("/openapi.json")' in script


def test_people_without_a_mouse_or_eyes_find_their_way() -> None:
    (language,) = [attributes.get("lang") for tag, attributes in PARSED.elements if tag == "html"]
    assert language == "en"
    labelled = {attributes.get("for") for tag, attributes in PARSED.elements if tag == "label"}
    inputs = {attributes.get("id") for tag, attributes in PARSED.elements if tag == "input"}
    assert inputs <= labelled
    assert ("a", {"class": "skip", "href": "#main"}) in PARSED.elements
    assert ":focus-visible" in TEXT
    assert "prefers-color-scheme: dark" in TEXT
