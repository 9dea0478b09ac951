"""The playground in a real browser: Debian's Chromium, driven by Playwright. Tests skip where there is none of either;
with SPECSERVE_REQUIRE_BROWSER=1, as in `make browser`, they fail."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.playground.replies import Script

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def _missing(what: str) -> None:
    if os.environ.get("SPECSERVE_REQUIRE_BROWSER") == "1":
        pytest.fail(f"SPECSERVE_REQUIRE_BROWSER=1, but {what}")
    pytest.skip(f"{what}; `make browser` says how to get it")


@pytest.fixture(scope="module")  # Playwright has an event loop of its own in this thread as long as it runs
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        _missing("there is no Playwright")
    path = os.environ.get("SPECSERVE_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        _missing("there is no Chromium")
    with sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses root its sandbox
        started = playwright.chromium.launch(executable_path=path, args=options)
        yield started
        started.close()


@pytest.fixture
def axe() -> Callable[[Any], list[str]]:
    """What axe finds on a page against WCAG 2.2 AA and its best practices."""
    try:
        import axe_playwright_python
    except ModuleNotFoundError:
        _missing("there is no axe-playwright-python")
    source = Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text("utf-8")

    def faults(page: Any) -> list[str]:
        page.evaluate(source)
        found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
        return [f"{each['id']}: {node['target']} {node['failureSummary']}" for each in found for node in each["nodes"]]

    return faults


@dataclass
class Playground:
    """An open page with what it may not do without anybody noticing."""

    page: Any
    script: Script

    def send(self, text: str = "Hi") -> None:
        """Sends a message and waits for the end of its answer."""
        self.page.locator("article.answer").evaluate_all("all => all.forEach((one) => { one.dataset.old = 'yes'; })")
        self.begin(text)
        self.page.locator("article.answer:not([data-old])").wait_for()
        self.until_idle()

    def begin(self, text: str = "Hi") -> None:
        self.page.locator("#send:enabled").wait_for()
        self.page.fill("#entry", text)
        self.page.press("#entry", "Enter")

    def until_idle(self) -> None:
        self.page.locator("#stop:disabled").wait_for()
        self.page.evaluate("new Promise(requestAnimationFrame)")

    @property
    def answer(self) -> Any:
        return self.page.locator("article.answer").last

    @property
    def figures(self) -> dict[str, str]:
        names, values = (self.answer.locator(f"dl {tag}").all_text_contents() for tag in ("dt", "dd"))
        return dict(zip(names, values, strict=True))

    @property
    def said(self) -> str:
        return "".join(text for text in self.answer.locator(".said").all_text_contents() if text)

    def open_settings(self) -> None:
        self.page.evaluate("for (const fold of document.querySelectorAll('#settings details, #fold')) fold.open = true")

    def contents(self) -> list[list[str]]:
        """The messages of the last request, as texts."""
        return [message["content"] for message in self.script.chats[-1]["messages"]]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """Opens the playground of a script or address. Afterwards: nothing was fetched from elsewhere, no script failed,
    and the policy stopped nothing."""
    contexts, faults = [], []

    def open_(script: Script | str, wait: bool = True, **options: Any) -> Playground:
        if isinstance(script, Script):
            if not script.address:
                script.start()
            address = script.address
        else:
            address, script = script, Script({})
        options.setdefault("viewport", {"width": 1000, "height": 800})
        context = browser.new_context(**options)
        context.set_default_timeout(15_000)
        contexts.append(context)
        page = context.new_page()

        def check(request: Any) -> None:
            if urlsplit(request.url).netloc != urlsplit(address).netloc and not request.url.startswith(
                ("data:", "blob:")
            ):
                faults.append(f"fetched {request.url}")

        page.on("request", check)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: "Content Security Policy" in said.text and faults.append(said.text))
        page.goto(address)
        if wait:
            page.locator("#send:enabled").wait_for()
        return Playground(page, script)

    yield open_
    for context in contexts:
        context.close()
    assert faults == []
