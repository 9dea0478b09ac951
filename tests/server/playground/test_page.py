"""The page for people: light and dark, on a phone, by keyboard, for those who do not see it; its key, live figures."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.playground.replies import (
    FORCED,
    INFO,
    STATS,
    WHOLE,
    Scripted,
    answered,
    as_json,
    calling_bytes,
    explained_bytes,
    script,
)
from tests.server.playground.test_markdown import RICH

PHONE = {"width": 360, "height": 740}
WIDE = RICH + "\n| " + " | ".join(f"column {i}" for i in range(30)) + " |\n|" + "---|" * 30 + "\n\n" + "long" * 200


def is_too_wide(page: Any) -> bool:
    return page.evaluate("document.documentElement.scrollWidth > innerWidth")


@pytest.mark.parametrize("viewport", [PHONE, {"width": 1200, "height": 900}], ids=["phone", "wide"])
@pytest.mark.parametrize("colors", ["light", "dark"])
def test_axe_finds_nothing(open_page: Any, axe: Any, colors: str, viewport: dict[str, int]) -> None:
    by_source = script(
        answered(WIDE), Scripted([explained_bytes()]), Scripted([calling_bytes(("f", "{}"))]), as_json({}, status=500)
    )
    playground = open_page(by_source, color_scheme=colors, viewport=viewport)
    page = playground.page
    assert axe(page) == []
    playground.send()
    playground.open_settings()
    page.locator("#live-fold, #live-sources, #history").evaluate_all(
        "all => all.forEach((fold) => { fold.open = true; })"
    )
    page.select_option("#view", "drafts")
    playground.send()
    page.fill("#tools", "[")
    page.fill("#tools", "")
    playground.send()
    page.locator("#view").select_option("text")
    page.locator("article.mine").first.get_by_text("Edit").click()
    assert axe(page) == []
    page.select_option("#view", "steps")
    page.select_option("#format", "json_schema")
    playground.page.locator("article details").evaluate_all("all => all.forEach((fold) => { fold.open = true; })")
    assert axe(page) == []
    assert not is_too_wide(page)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 26)"}[colors]


def test_on_a_phone_settings_are_folded_and_the_composer_is_in_sight(open_page: Any) -> None:
    playground = open_page(script(answered(WIDE)), viewport=PHONE, has_touch=True, is_mobile=True)
    page = playground.page
    for name in ("settings", "live"):
        assert not page.locator(f"#{name}").is_visible()
    playground.send()
    assert not is_too_wide(page)
    box = page.locator("#entry").bounding_box()
    assert box["y"] + box["height"] <= PHONE["height"]
    assert box["width"] > 300
    page.locator("#fold > summary").tap()
    assert page.locator("#settings").is_visible()
    assert not is_too_wide(page)


def test_on_a_wide_screen_settings_are_open(open_page: Any) -> None:
    page = open_page(script()).page
    assert page.locator("#settings").is_visible()
    assert page.locator("#live").is_visible()


def test_all_can_be_done_by_keyboard(open_page: Any) -> None:
    playground = open_page(script(answered("one\n\n```\ncode\n```"), answered("two")))
    page = playground.page
    assert page.evaluate("document.activeElement.id") == "entry", "one can begin to write at once"
    page.keyboard.type("Hi")
    page.keyboard.press("Enter")
    playground.answer.locator(".actions").wait_for()
    playground.until_idle()
    assert page.evaluate("document.activeElement.id") == "entry"
    order = set()
    for _ in range(60):
        page.keyboard.press("Shift+Tab")
        told = page.evaluate("""() => {
          const { id, textContent, dataset } = document.activeElement;
          const before = dataset.seen;
          dataset.seen = "yes";
          return before ? null : id || textContent.trim().slice(0, 20);
        }""")
        if told is None:
            break
        order.add(told)
    wanted = {"Compare with draftin", "Retry", "Copy", "Edit", "Copy code", "code", "Conversations", "Settings", "seed"}
    assert wanted <= order
    page.get_by_text("Retry").focus()
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
    assert outline == "2px"
    page.keyboard.press("Enter")
    page.locator("article.answer .markdown >> text=two").wait_for()


def test_the_skip_link_leads_to_the_message(open_page: Any) -> None:
    page = open_page(script()).page
    page.locator(".skip").focus()
    assert page.locator(".skip").bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "entry"


# --- the key ----------------------------------------------------------------------------------------------------------


def test_the_key_page_says_what_it_wants(open_page: Any, axe: Any) -> None:
    """Nothing more is asked until there is a key: the server would log every refusal."""
    asked = script(Scripted([WHOLE]))
    asked.key = "sk-1"
    playground = open_page(asked, wait=False)
    page = playground.page
    page.locator("#key-page").wait_for()
    assert page.locator("h2:visible").text_content() == "This server wants an API key"
    assert "--api-key" in page.locator("#key-page").text_content()
    assert page.evaluate("document.activeElement.id") == "key"
    assert not page.locator("#entry").is_visible()
    assert axe(page) == []
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    page.locator("#key-said:not(:empty)").wait_for()
    assert page.locator("#key-said").text_content() == "The server does not know this key."
    page.keyboard.type("sk-1")  # in place of what is selected
    page.keyboard.press("Enter")
    playground.send()
    assert [(r["path"], r["authorization"]) for r in asked.requests][:2] == [
        ("/stats", None),
        ("/stats", "Bearer wrong"),
    ]
    assert {r["authorization"] for r in asked.requests[2:]} == {"Bearer sk-1"}
    stored = page.evaluate("JSON.stringify({ ...localStorage, ...sessionStorage }) + document.cookie")
    assert "sk-1" not in stored


# --- the live view ----------------------------------------------------------------------------------------------------


def test_the_live_view(open_page: Any) -> None:
    sources = {"ngram": {"num_draft_tokens": 4, "num_accepted_tokens": 1}, **FORCED}
    later = {"ngram": {"num_draft_tokens": 14, "num_accepted_tokens": 9}, **FORCED}
    speculation = {**STATS["speculation"], "num_draft_tokens": 13, "num_accepted_tokens": 10}
    readings = [as_json({**STATS, "speculation": {**speculation, "sources": each}}) for each in (sources, later)]
    page = open_page(script(stats=readings)).page
    shown = dict(
        zip(*(page.locator(f"#live {tag}").all_text_contents() for tag in ("dt", "dd")), strict=True),
    )
    assert {name: shown[name] for name in ("running", "waiting", "tokens/s", "tokens a step", "KV cache in use")} == {
        "running": "2",
        "waiting": "1",
        "tokens/s": "41.3",
        "tokens a step": "1.75",
        "KV cache in use": "13 %",
    }
    assert shown["drafts accepted"] in ("25 %", "-20 %"), "what a grammar forces is nobody's guess"
    page.locator("#live-sources summary").click()
    page.locator("#live-table td", has_text="8 of 10").wait_for()
    rows = [row.locator("th, td").all_text_contents() for row in page.locator("#live-table tbody tr").all()]
    assert rows == [["ngram", "14", "9", "64 %", "8 of 10"], ["jump_forward", "9", "9", "100 %", "0 of 0"]]


def test_the_live_view_of_replicas(open_page: Any) -> None:
    each = {"state": "ready", "num_running": 3, "num_waiting": 1}
    replicas = [each, {**each, "state": "restarting"}]
    page = open_page(script(stats=[as_json({**STATS, "replicas": replicas})])).page
    shown = dict(zip(*(page.locator(f"#live {tag}").all_text_contents() for tag in ("dt", "dd")), strict=True))
    assert (shown["replica 0"], shown["replica 1"]) == ("3 running, 1 waiting", "restarting")


def test_it_waits_for_the_engine(open_page: Any) -> None:
    loading = as_json({**STATS, "state": "loading"})
    page = open_page(script(stats=[loading, as_json(STATS)]), wait=False).page
    page.get_by_text("tiny: the engine is loading").wait_for()
    assert page.locator("#send").is_disabled()
    page.locator("#send:enabled").wait_for()
    assert page.locator("#about").text_content() == "tiny"


def test_a_server_that_is_gone_is_told_and_noticed_when_it_is_back(open_page: Any) -> None:
    gone = [as_json(STATS), Scripted([], status=502, reason="Bad Gateway"), as_json(STATS)]
    page = open_page(script(stats=gone)).page
    page.get_by_text("The server's state is not known. 502 Bad Gateway").wait_for()
    page.locator("#about", has_text="tiny").wait_for()
    assert page.locator("#about").get_attribute("class") == "said"


def test_a_choice_lasts_when_the_engine_starts_again(open_page: Any) -> None:
    """Models and drafters are read once, so that what was chosen stays."""
    asked = script(Scripted([WHOLE]), server_info=[as_json(INFO)])
    playground = open_page(asked)
    playground.page.select_option("#drafter", "none")
    playground.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    playground.send()
    assert playground.script.chats[0]["speculative"] == {"drafter": "none"}
    assert [r["path"] for r in asked.requests].count("/server_info") == 1


# --- a real server ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", ["text", "drafts"])
def test_with_a_real_server(open_page: Any, server: Any, view: str) -> None:
    playground = open_page(f"http://127.0.0.1:{server.port}/")
    page = playground.page
    page.fill("#max-tokens", "48")
    page.fill("#temperature", "0")
    page.fill("#seed", "7")
    page.select_option("#drafter", "ngram")
    page.select_option("#view", view)
    playground.send()
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 48, "seed": 7}
    whole = server.post("/v1/chat/completions", body).json
    content = whole["choices"][0]["message"]["content"]
    assert playground.figures["tokens"] == str(whole["usage"]["completion_tokens"])
    tokens = playground.answer.locator(".tokens")
    kept = tokens.evaluate(
        "all => [...all.childNodes].filter((n) => n.nodeName !== 'S').map((n) => n.textContent).join('')"
    )
    assert kept == content
    assert playground.answer.locator("[title='proposed by ngram']").count() <= int(
        playground.figures["accepted"].split()[0]
    )
    if view == "text":
        playground.answer.locator(".compare").click()
        page.get_by_text("The texts are identical.").wait_for(timeout=60_000)
