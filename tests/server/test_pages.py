"""The pages of / and /docs with the scripts they load: nothing comes from elsewhere, they are true to their
Content-Security-Policy, and made of nothing that needs a laxer one."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest

import specserve.server.pages
from specserve.server.pages import Page, content_security_policy, modules, page

VOID = {"meta", "link", "input", "br", "hr", "img"}
CONTROLS = {"input", "textarea", "select"}
ADDRESSES = {"data:,", "#main", "#entry", "docs", "."}  # inside the page, or beside it
STATIC = Path(specserve.server.pages.__file__).with_name("static")
OUR_LINKS = "/^(?:https?:\\/\\/|mailto:)/i"  # the pattern that links of answers must match
MODULES = {name: module.body.decode() for name, module in modules().items()}


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


@dataclass(frozen=True)
class Shown:
    """A page with what is in it."""

    page: Page
    text: str
    parsed: Parsed
    policy: dict[str, str]

    @property
    def script(self) -> str:
        """What it runs, inline or as modules of ours."""
        ours = [body for name, body in MODULES.items() if not name.startswith("vendor/") and self.loads]
        return "\n".join([*self.parsed.inline["script"], *ours])

    @property
    def loads(self) -> list[str | None]:
        return [
            attributes["src"] for tag, attributes in self.parsed.elements if tag == "script" and "src" in attributes
        ]


def load(name: str) -> Shown:
    made = page(name)
    text = made.body.decode()
    rules = made.headers["Content-Security-Policy"].split("; ")
    return Shown(made, text, Parsed(text), dict(rule.split(" ", 1) for rule in rules))


@pytest.fixture(params=["docs", "playground"])
def shown(request: pytest.FixtureRequest) -> Shown:
    return load(request.param)


def test_the_page_is_whole_and_small(shown: Shown) -> None:
    assert shown.text.startswith("<!doctype html>")
    assert shown.parsed.open == []
    assert len(shown.page.body) < 30_000
    assert shown.page.headers["Content-Type"] == "text/html; charset=utf-8"


def test_nothing_comes_from_elsewhere(shown: Shown) -> None:
    assert re.findall(r"https?:|//\w|@import|\burl\(", (shown.text + shown.script).replace(OUR_LINKS, "")) == []
    for tag, attributes in shown.parsed.elements:
        assert attributes.get("src", "static/playground/app.js") == "static/playground/app.js", tag
        assert attributes.get("href", "data:,") in ADDRESSES


def test_what_modules_import_is_there() -> None:
    """By paths below their own, so that pages work below any path of a proxy."""
    loaded, left = set(), ["playground/app.js"]
    while left:
        name = left.pop()
        loaded.add(name)
        for target in re.findall(r'^(?:import|export) (?:.* from )?"(.*)";$', MODULES[name], re.MULTILINE):
            assert target.startswith("."), f"{name} imports {target}"
            found = (STATIC / name).parent.joinpath(target).resolve().relative_to(STATIC).as_posix()
            left += [found] if found not in loaded else []
    assert loaded == set(MODULES), "each is used"
    assert all(len(text.splitlines()) <= 400 for name, text in MODULES.items() if name.startswith("playground/"))


def test_what_is_not_ours_is_what_was_published() -> None:
    vendor = STATIC / "vendor"
    stated = dict(re.findall(r"\| `(\S+)` \|.*`(\w{64})` \|", (vendor / "VENDORED.md").read_text("utf-8")))
    assert set(stated) == {name.removeprefix("vendor/") for name in MODULES if name.startswith("vendor/")}
    for name, digest in stated.items():
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == digest, name
    assert {path.name for path in vendor.glob("LICENSE.*")} == {"LICENSE.marked", "LICENSE.dompurify"}


@pytest.mark.parametrize(("name", "kind"), [("docs", "script"), ("docs", "style"), ("playground", "style")])
def test_the_policy_allows_what_is_in_the_page_and_nothing_else(name: str, kind: str) -> None:
    shown = load(name)
    (source,) = shown.parsed.inline[kind]
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    assert shown.policy[f"{kind}-src"] == f"'sha256-{digest}'"
    changed = content_security_policy(shown.text.replace(source, source + " "))
    assert digest not in changed


def test_only_the_playground_loads_scripts_and_they_are_this_servers() -> None:
    docs, playground = load("docs"), load("playground")
    assert (docs.loads, playground.loads) == ([], ["static/playground/app.js"])
    assert playground.parsed.inline["script"] == []
    assert playground.policy["script-src"] == "'self'"
    assert (docs.policy["trusted-types"], playground.policy["trusted-types"]) == ("'none'", "dompurify")
    types = {module.headers["Content-Type"] for module in modules().values()}
    assert types == {"text/javascript; charset=utf-8"}


def test_the_policy_is_strict(shown: Shown) -> None:
    assert "unsafe" not in shown.page.headers["Content-Security-Policy"]
    assert "http" not in shown.page.headers["Content-Security-Policy"]
    assert shown.policy["default-src"] == "'none'"
    assert shown.policy["connect-src"] == "'self'"
    assert shown.policy["require-trusted-types-for"] == "'script'"
    assert {shown.policy[name] for name in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}


def test_the_page_has_nothing_that_the_policy_forbids(shown: Shown) -> None:
    for tag, attributes in shown.parsed.elements:
        assert not [name for name in attributes if name == "style" or name.startswith("on")], tag
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|\.style\b|sessionStorage"
        r"|\.cookie"
    )
    assert re.findall(forbidden, shown.script) == []


def test_the_docs_ask_this_server_for_the_document() -> None:
    assert 'fetch(address("/openapi.json")' in load("docs").script


def test_people_without_a_mouse_or_eyes_find_their_way(shown: Shown) -> None:
    (language,) = [attributes.get("lang") for tag, attributes in shown.parsed.elements if tag == "html"]
    assert language == "en"
    labelled = {attributes.get("for") for tag, attributes in shown.parsed.elements if tag == "label"}
    controls = {attributes.get("id") for tag, attributes in shown.parsed.elements if tag in CONTROLS}
    assert controls
    assert controls <= labelled
    skips = [attributes["href"] for tag, attributes in shown.parsed.elements if attributes.get("class") == "skip"]
    ids = {attributes.get("id") for _, attributes in shown.parsed.elements}
    assert {f"#{name}" for name in ids} >= set(skips) != set()
    assert ":focus-visible" in shown.text
    assert "prefers-color-scheme: dark" in shown.text
