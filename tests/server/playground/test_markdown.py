"""Answers as Markdown: what is shown, what is not let through, and how it grows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.playground.replies import ANSWER, BEGUN, WHOLE, Scripted, answered, script, stream_bytes, text_bytes

RICH = """# Rivers

The **Rhine**, the *Elbe* and `Oder`; see [here](https://example.org/a?b=1&c=2) or <https://example.org>.

1. one
2. two
   - nested

| River | km |
|---|---:|
| Rhine | 1230 |

- [x] done
- [ ] open

> quoted

```python
print("<b>&amp;</b>")  # not **bold**
```

~~gone~~ line

---
"""


def markdown(playground: Any) -> str:
    return playground.answer.locator(".markdown").inner_html()


def test_markdown_is_shown_as_elements(open_page: Any) -> None:
    playground = open_page(script(answered(RICH)))
    playground.send()
    text = playground.answer.locator(".markdown")
    assert text.locator("h3").all_text_contents() == ["Rivers"]  # below the page's own headings
    assert text.locator("strong").all_text_contents() == ["Rhine"]
    assert text.locator("em, p code, del").all_text_contents() == ["Elbe", "Oder", "gone"]
    assert [text.locator(name).count() for name in ("ol > li", "ul ul, ol ul", "blockquote", "hr")] == [2, 1, 1, 1]
    assert text.locator("td").all_text_contents() == ["Rhine", "1230"]
    assert text.locator("td").nth(1).get_attribute("align") == "right"
    assert [each.strip() for each in text.locator("ul").last.locator("li").all_text_contents()] == ["☑ done", "☐ open"]
    assert text.locator("pre").text_content() == 'print("<b>&amp;</b>")  # not **bold**\n'
    assert text.locator(".code .row span").text_content() == "python"


def test_links_lead_away_without_telling_from_where(open_page: Any) -> None:
    playground = open_page(script(answered(RICH + "\n\nwrite to <me@example.org>")))
    playground.send()
    links = playground.answer.locator(".markdown a")
    hrefs = [link.get_attribute("href") for link in links.all()]
    assert hrefs == ["https://example.org/a?b=1&c=2", "https://example.org", "mailto:me@example.org"]
    assert {link.get_attribute("rel") for link in links.all()} == {"noopener noreferrer"}
    assert {link.get_attribute("target") for link in links.all()} == {"_blank"}


@pytest.mark.parametrize(
    "text",
    [
        "<script>window.hit = 1</script>",
        '<img src="x" onerror="window.hit = 1">',
        "<svg onload=window.hit=1>",
        '<iframe src="javascript:parent.hit=1"></iframe>',
        "[a](javascript:window.hit=1)",
        "[a](JaVaScRiPt:window.hit=1)",
        "[a](data:text/html,<script>opener.hit=1</script>)",
        "[a](vbscript:x)",
        "[a][b]\n\n[b]: javascript:window.hit=1",
        "![a](https://elsewhere.example/pixel.png)",
        "![a](data:image/svg+xml,<svg/onload=window.hit=1>)",
        '<a href="javascript:window.hit=1" style="position:fixed">x</a>',
        "<form action='https://elsewhere.example'><input name=a></form>",
        '<style>body{background:url("https://elsewhere.example/a")}</style>',
        "<math><mtext><table><mglyph><style><img src=x onerror=window.hit=1>",
        '```"><img src=x onerror=window.hit=1>\ncode\n```',
        '[a](https://x "\\" onmouseover=window.hit=1 ")',
    ],
)
def test_nothing_dangerous_is_let_through(open_page: Any, text: str) -> None:
    """`open_page` also checks that nothing was fetched and that the policy had nothing to stop."""
    playground = open_page(script(answered(f"before\n\n{text}\n\nafter")))
    playground.send()
    shown = playground.answer.locator(".markdown")
    for link in shown.locator("a[href]").all():
        assert link.get_attribute("href").startswith("https://")
        link.hover()
    names = "script, img, svg, iframe, style, form, input, math, object, [style], [onerror], [onload], [onmouseover]"
    assert shown.locator(names).count() == 0
    assert playground.page.evaluate("window.hit") is None
    assert "before" in shown.inner_text()
    assert "after" in shown.inner_text()


def test_what_looks_like_html_is_text(open_page: Any) -> None:
    text = "Use <b>bold</b> and\n\n<div>a block</div>\n\n&lt; <!-- and --> x < y"
    playground = open_page(script(answered(text)))
    playground.send()
    shown = playground.answer.locator(".markdown").inner_text()
    assert "Use <b>bold</b> and" in shown
    assert "<div>a block</div>" in shown
    assert "< <!-- and --> x < y" in shown


def test_an_image_is_a_link(open_page: Any) -> None:
    playground = open_page(script(answered("![a cat](https://elsewhere.example/cat.png)")))
    playground.send()
    link = playground.answer.locator(".markdown a")
    assert (link.text_content(), link.get_attribute("href")) == ("a cat", "https://elsewhere.example/cat.png")


def test_the_end_is_what_the_whole_text_is(open_page: Any) -> None:
    """In pieces of any size the same elements come about, references that are defined last too."""
    text = RICH + "\n[one] and [two][one]\n\n[one]: https://example.org/one\n"
    shown = []
    for size in (1, 3, 17, len(text)):
        playground = open_page(script(Scripted([text_bytes(text, size)])))
        playground.send()
        shown.append(markdown(playground))
    assert len(set(shown)) == 1
    assert 'href="https://example.org/one"' in shown[0]


def test_an_open_fence_is_code_until_it_ends(open_page: Any) -> None:
    text = "Look:\n\n```js\nlet a = 1;\n# no heading\n"
    whole = stream_bytes([*((text[i : i + 5], 1) for i in range(0, len(text), 5)), ("later", 1)])
    begun = whole[: whole.rindex(b"data: ", 0, whole.index(b"later"))]
    playground = open_page(script(Scripted([begun], ends="hangs")))
    playground.begin()
    code = playground.answer.locator(".markdown pre")
    code.filter(has_text="no heading").wait_for()
    assert code.text_content() == "let a = 1;\n# no heading\n"
    assert playground.answer.locator("h3").count() == 0
    playground.page.press("#entry", "Escape")
    playground.until_idle()
    assert code.text_content() == "let a = 1;\n# no heading\n"


def test_it_is_rendered_at_most_once_a_frame_and_only_where_it_changed(open_page: Any) -> None:
    paragraphs = "".join(f"Paragraph {i} of some words.\n\n" for i in range(200))
    playground = open_page(script(Scripted([text_bytes(paragraphs, 4)])))
    playground.page.evaluate(
        """() => {
          window.frames_ = 0; window.batches = 0;
          const tick = () => { window.frames_++; requestAnimationFrame(tick); };
          requestAnimationFrame(tick);
          new MutationObserver((all) => {
            if (all.some(({ target }) => target.closest?.('.markdown'))) window.batches++;
          }).observe(document.getElementById('log'), { childList: true, subtree: true });
        }"""
    )
    playground.send()
    frames, batches = playground.page.evaluate("[window.frames_, window.batches]")
    assert playground.answer.locator(".markdown p").count() == 200
    assert batches <= frames + 1  # and the end


def test_the_first_paragraph_stays_the_same_element(open_page: Any) -> None:
    pieces = [BEGUN, WHOLE[len(BEGUN) :]]
    playground = open_page(script(Scripted(pieces, pause_s=0.3)))
    playground.begin()
    playground.page.locator(".markdown p").first.wait_for()
    playground.until_idle()
    assert playground.answer.locator(".markdown").text_content().split() == ANSWER.split()


@pytest.mark.parametrize("secure", [True, False])
def test_copy(open_page: Any, secure: bool) -> None:
    """Answers as they were written, code without its fence; also where a page has no navigator.clipboard."""
    playground = open_page(script(answered(RICH)), permissions=["clipboard-read", "clipboard-write"])
    page = playground.page
    playground.send("my message")
    if not secure:
        page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('not here')); }")
    buttons = [playground.answer.locator(".actions button").first, playground.answer.locator(".code button")]
    mine = page.locator("article.mine button").first
    wanted = [RICH, 'print("<b>&amp;</b>")  # not **bold**\n', "my message"]
    for button, text in zip([*buttons, mine], wanted, strict=True):
        button.click()
        button.get_by_text("Copied").or_(button.filter(has_text="Copied")).first.wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == text
