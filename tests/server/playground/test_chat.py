"""A conversation: what is sent, shown, stopped, repeated, changed, kept and exported."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specserve.server.wire.errors import overloaded, timed_out
from specserve.server.wire.fields import Limits
from specserve.server.wire.json.pieces import json_text
from specserve.server.wire.openai.requests import ChatCompletionRequest, read
from tests.server.playground.replies import (
    ANSWER,
    BEGUN,
    PLAIN,
    STEPS,
    WHOLE,
    Scripted,
    answered,
    as_json,
    explained_bytes,
    script,
    stream_bytes,
)

LIMITS = Limits(vocab_size=1000, max_model_len=256, drafters=frozenset({"ngram", "prediction"}))
ALL = Scripted([WHOLE])


def asked(open_page: Any, **fields: str) -> Any:
    """The one request that is sent, which the server's own types take whole."""
    playground = open_page(script(ALL))
    playground.open_settings()
    for name, value in fields.items():
        field = playground.page.locator("#" + name.replace("_", "-"))
        if field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    playground.send()
    (body,) = playground.script.chats
    assert read(ChatCompletionRequest, json.dumps(body).encode(), LIMITS).ignored(LIMITS) == []
    return body


def test_the_request_is_what_the_controls_say(open_page: Any) -> None:
    assert asked(open_page, system="Be kind.", seed="7", max_tokens="256", temperature="0.5", model="alias") == {
        "model": "alias",
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
        "max_tokens": 256,
        "temperature": 0.5,
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


def test_empty_fields_are_left_to_the_server_but_a_seed_is_drawn(open_page: Any) -> None:
    body = asked(open_page)
    assert not {"max_tokens", "temperature", "speculative", "prediction"} & set(body)
    assert 0 <= body["seed"] < 2**31


@pytest.mark.parametrize(
    ("fields", "speculative"),
    [
        ({"drafter": "none"}, {"drafter": "none"}),
        ({"drafter": "ngram"}, {"drafter": "ngram"}),
        ({"view": "drafts"}, {"explain": True}),
        ({"drafter": "ngram", "view": "drafts"}, {"drafter": "ngram", "explain": True}),
    ],
)
def test_drafters_and_marks_are_asked_for(open_page: Any, fields: dict[str, str], speculative: Any) -> None:
    assert asked(open_page, **fields)["speculative"] == speculative


def test_the_prediction_is_the_message(open_page: Any) -> None:
    assert asked(open_page, drafter="prediction")["prediction"] == {"type": "content", "content": "Hi"}


def test_the_selectors_have_what_the_server_has(open_page: Any) -> None:
    page = open_page(script()).page
    options = page.locator("#drafter option")
    assert [option.get_attribute("value") for option in options.all()] == ["", "ngram", "none", "prediction"]
    assert options.first.text_content() == "default (ngram)"
    assert page.locator("#model option").all_text_contents() == ["tiny", "alias"]


def test_what_sends_nothing(open_page: Any) -> None:
    playground = open_page(script(ALL))
    page = playground.page
    page.fill("#entry", " \n")
    page.press("#entry", "Enter")
    page.fill("#entry", "a")
    page.press("#entry", "Shift+Enter")
    assert page.input_value("#entry") == "a\n"
    page.dispatch_event("#entry", "keydown", {"key": "Enter", "isComposing": True})
    page.locator("#fold").evaluate("fold => { fold.open = false; }")
    page.locator("#seed").evaluate("field => { field.value = '-1'; }")
    page.press("#entry", "Enter")
    assert page.locator("#fold").get_attribute("open") is not None, "what is wrong is in sight"
    assert playground.script.chats == []


def test_an_empty_conversation_offers_messages_to_begin_with(open_page: Any) -> None:
    playground = open_page(script(ALL))
    page = playground.page
    offered = page.locator("#starters button")
    assert offered.count() == 4
    offered.first.click()
    assert page.input_value("#entry").startswith("Correct the spelling: ")
    assert playground.script.chats == [], "it can be changed before it is sent"
    page.press("#entry", "Enter")
    playground.answer.locator(".actions").wait_for()
    assert playground.script.chats[0]["messages"][-1]["content"].startswith("Correct the spelling: ")
    assert playground.script.chats[0]["temperature"] == 0
    assert page.locator("#starters").is_hidden()


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_tokens_are_shown_by_step(open_page: Any) -> None:
    playground = open_page(script(ALL))
    playground.send()
    tokens = playground.answer.locator(".tokens")
    assert not tokens.is_visible()
    playground.open_settings()
    playground.page.select_option("#view", "steps")
    assert tokens.is_visible()
    assert not playground.answer.locator(".markdown").is_visible()
    assert tokens.text_content() == ANSWER
    steps = [(step.text_content(), step.get_attribute("data-tokens")) for step in tokens.locator(".step").all()]
    assert steps == [(text, str(min(count, 4))) for text, count in STEPS if count > 1]
    assert tokens.locator(".step").first.get_attribute("title") == "2 tokens in one step"
    assert playground.page.locator("#steps-legend").is_visible()


def test_draft_tokens_are_marked_by_who_proposed_them_and_rejected_ones_shown(open_page: Any) -> None:
    playground = open_page(script(Scripted([explained_bytes()])))
    playground.open_settings()
    playground.page.select_option("#view", "drafts")
    playground.send()
    tokens = playground.answer.locator(".tokens")
    assert tokens.text_content() == "<b> sky was is blue⏎red!\ufffd"
    marks = [
        (m.text_content(), m.get_attribute("data-source"), m.get_attribute("title")) for m in tokens.locator("*").all()
    ]
    assert marks == [
        (" sky", "0", "proposed by suffix, ngram"),
        (" was", None, "rejected, proposed by ngram"),
        (" is", "jump_forward", "proposed by jump_forward"),
        (" blue", None, "rejected, proposed by suffix"),
        ("⏎red", None, "rejected, proposed by suffix"),
    ]
    legend = playground.page.locator("#sources-legend")
    assert legend.text_content() == "Draft tokens: suffix, jump_forward, rejected"
    playground.page.select_option("#view", "text")
    assert playground.answer.locator(".markdown").inner_text() == "<b> sky is!\ufffd"


def test_acceptance_by_source_is_shown_while_the_answer_comes(open_page: Any) -> None:
    begun = explained_bytes().split(b"data: ")
    playground = open_page(script(Scripted([b"data: ".join(begun[:4])], ends="hangs")))
    playground.open_settings()
    playground.page.select_option("#view", "drafts")
    playground.begin()
    playground.answer.locator(".by-source summary").click()
    rows = [row.locator("th, td").all_text_contents() for row in playground.answer.locator("tbody tr").all()]
    assert rows == [["suffix", "4", "1", "25 %"], ["ngram", "2", "1", "50 %"], ["jump_forward", "0", "1", "-"]]
    playground.page.press("#entry", "Escape")
    playground.until_idle()


def test_the_figures_are_those_of_the_last_event(open_page: Any) -> None:
    by_source = {"ngram": [8, 2], "jump_forward": [6, 5]}
    playground = open_page(script(Scripted([stream_bytes(by_source=by_source)])))
    playground.page.fill("#seed", "7")
    playground.send()
    assert playground.figures == {
        "tokens": "13",
        "first after": "42 ms",
        "tokens/s": "40.0",
        "drafter": "ngram",
        "drafted": "8",
        "accepted": "2 (25 %)",
        "jump-forward": "5",
        "mean acceptance length": "2.17",
        "seed": "7",
        "ended by": "length",
    }
    rows = [row.locator("th, td").all_text_contents() for row in playground.answer.locator("tbody tr").all()]
    assert rows == [["ngram", "8", "2", "25 %"], ["jump_forward", "6", "5", "83 %"]]


def test_without_a_drafter_there_is_nothing_to_compare(open_page: Any) -> None:
    playground = open_page(script(Scripted([PLAIN])))
    playground.page.select_option("#drafter", "none")
    playground.send()
    assert set(playground.figures) == {"tokens", "first after", "tokens/s", "drafter", "seed", "ended by"}
    assert playground.answer.locator(".compare").count() == 0


def test_reasoning_stands_in_a_fold_before_the_answer_and_is_sent_back(open_page: Any) -> None:
    playground = open_page(script(Scripted([stream_bytes(thought="Hm, <b>")]), ALL))
    playground.send()
    assert playground.answer.locator(".thought").inner_text() == "Hm, <b>"
    playground.send("More")
    assert not playground.answer.locator(".thought").is_visible()
    said = {"role": "assistant", "content": ANSWER, "reasoning_content": "Hm, <b>"}
    assert playground.script.chats[1]["messages"][1] == said


# --- what goes wrong, and Stop ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (as_json(overloaded("The queue is full.").body, status=429), "The queue is full."),
        (Scripted([b"<h1>oh</h1>"], status=502, reason="Bad Gateway"), "502 Bad Gateway"),
        (
            Scripted([WHOLE.removesuffix(b"data: [DONE]\n\n")]),
            "The connection was closed before the answer ended.",
        ),
        (
            Scripted([BEGUN, b"data: " + json_text(timed_out(504, "It took too long.").body).encode() + b"\n\n"]),
            "It took too long.",
        ),
        (Scripted([WHOLE[:400]], ends="broken"), "network error"),
    ],
    ids=["error", "not ours", "no end", "in the stream", "broken"],
)
def test_what_failed_is_told_and_can_be_sent_again(open_page: Any, failure: Scripted, told: str) -> None:
    playground = open_page(script(failure, ALL))
    playground.send()
    assert playground.said == f"{told} Not part of the conversation; the message can be sent again."
    assert playground.answer.locator(".said.wrong").count() == 1
    assert playground.page.input_value("#entry") == "Hi"
    playground.answer.get_by_text("Retry").click()
    playground.page.locator("dl >> text=tokens/s").nth(1).wait_for()
    assert playground.contents() == ["Hi"]
    assert playground.page.locator("article").count() == 2, "what failed is gone"
    assert playground.answer.locator(".markdown").text_content().startswith("Héllo <b>🐢")


@pytest.mark.parametrize("way", ["Escape", "button"])
def test_stop_keeps_what_came(open_page: Any, way: str) -> None:
    playground = open_page(script(Scripted([BEGUN], ends="hangs"), ALL))
    page = playground.page
    playground.begin()
    playground.answer.locator(".markdown p").wait_for()
    assert playground.answer.get_attribute("aria-busy") == "true"
    assert page.locator("#send").is_disabled()
    assert page.locator("#new").is_disabled()
    if way == "Escape":
        page.keyboard.press("Escape")
    else:
        page.click("#stop")
    playground.until_idle()
    assert playground.said == "Stopped."
    playground.send("More")
    assert playground.contents() == ["Hi", "Héllo <b>", "More"]


@pytest.mark.parametrize(("meanwhile", "left"), [("", "Hi"), ("Next", "Next")])
def test_a_message_stopped_before_its_answer_comes_back(open_page: Any, meanwhile: str, left: str) -> None:
    playground = open_page(script(Scripted([], ends="hangs")))
    playground.begin()
    playground.page.fill("#entry", meanwhile)
    playground.page.keyboard.press("Escape")
    playground.until_idle()
    assert playground.page.input_value("#entry") == left
    assert playground.said == "Stopped. Not part of the conversation; the message can be sent again."


# --- retry and edit ---------------------------------------------------------------------------------------------------


def test_an_answer_is_asked_for_again(open_page: Any) -> None:
    playground = open_page(script(answered("one"), answered("two"), answered("three"), as_json({}, status=500)))
    playground.send("a")
    playground.send("b")
    playground.page.locator("article.answer").first.get_by_text("Retry").click()
    playground.page.locator("article.answer .markdown >> text=three").wait_for()
    playground.until_idle()
    assert playground.contents() == ["a"]
    assert playground.page.locator("article").count() == 2
    playground.answer.get_by_text("Retry").click()
    playground.page.locator("text=Not part of the conversation").wait_for()
    playground.until_idle()
    playground.script.then(answered("four"))
    playground.page.fill("#entry", "")
    playground.send("c")
    assert playground.contents() == ["a", "three", "c"], "a retry that failed has changed nothing"


def test_a_message_can_be_changed(open_page: Any) -> None:
    playground = open_page(script(answered("one"), answered("two"), answered("three")))
    page = playground.page
    playground.send("first")
    playground.send("second")
    edit = page.locator("article.mine").first.get_by_text("Edit")
    edit.click()
    assert page.evaluate("document.activeElement.id") == "edited"
    page.keyboard.press("Escape")
    assert page.locator("#edited").count() == 0
    assert page.evaluate("document.activeElement.id") == "entry"
    edit.click()
    page.fill("#edited", "other")
    page.keyboard.press("Enter")
    page.locator("article.answer .markdown >> text=three").wait_for()
    playground.until_idle()
    assert playground.contents() == ["other"]
    assert page.locator("article.mine .text").all_text_contents() == ["other"]


# --- what the browser keeps -------------------------------------------------------------------------------------------


def test_conversations_are_kept_opened_and_deleted(open_page: Any) -> None:
    playground = open_page(script(answered("**one**"), answered("two"), answered("three")))
    page = playground.page
    playground.send("first\nquestion")
    page.locator("#history summary").click()
    page.click("#new")
    assert page.locator("article").count() == 0
    assert page.evaluate("document.activeElement.id") == "entry"
    playground.send("second")
    page.reload()
    page.locator("#send:enabled").wait_for()
    page.locator("#history summary").click()
    assert page.locator("#kept .title").all_text_contents() == ["second", "first question"]
    page.click("#kept .title >> text=first question")
    assert page.locator(".markdown strong").text_content() == "one"
    assert playground.figures["ended by"] == "length"
    assert page.locator("#kept [aria-current]").text_content() == "first question"
    playground.send("more")
    assert playground.contents() == ["first\nquestion", "**one**", "more"]
    page.once("dialog", lambda dialog: dialog.dismiss())
    page.locator("#kept li", has_text="second").get_by_text("Delete").click()
    assert page.locator("#kept li").count() == 2
    page.once("dialog", lambda dialog: dialog.accept())
    page.locator("#kept li", has_text="second").get_by_text("Delete").click()
    assert page.locator("#kept .title").all_text_contents() == ["first question"]
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#delete-all")
    assert page.locator("#kept-none").is_visible()
    assert page.evaluate("localStorage.length") == 0
    assert page.locator("article").count() == 0


def test_a_full_store_is_told(open_page: Any) -> None:
    playground = open_page(script(answered("one")))
    playground.page.evaluate("localStorage.setItem('other', 'x'.repeat(5 * 2 ** 20 - 20))")
    playground.send()
    alert = playground.page.locator("[role=alert].wrong")
    assert alert.last.text_content().startswith("The conversation could not be kept:")


def test_what_is_not_a_conversation_is_left_alone(open_page: Any) -> None:
    playground = open_page(script(answered("one")))
    page = playground.page
    page.evaluate("localStorage.setItem('specserve / broken', '{'); localStorage.setItem('other', '1')")
    page.reload()
    playground.send()
    assert page.locator("#kept li").count() == 1


def test_export(open_page: Any) -> None:
    playground = open_page(script(answered("**one**"), Scripted([stream_bytes([("two", 1)], thought="a\nb")])))
    page = playground.page
    playground.send("What's first?")
    playground.send("more")
    page.locator("#history summary").click()
    saved = {}
    for name in ("json", "markdown"):
        with page.expect_download() as download:
            page.click(f"#export-{name}")
        saved[download.value.suggested_filename] = download.value.path().read_text("utf-8")
    assert set(saved) == {"what-s-first.json", "what-s-first.md"}
    told = json.loads(saved["what-s-first.json"])
    assert told["messages"] == [
        {"role": "user", "content": "What's first?"},
        {"role": "assistant", "content": "**one**"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "two", "reasoning_content": "a\nb"},
    ]
    assert ["ended by", "length"] in told["about"][1]["figures"]
    title, when, rest = saved["what-s-first.md"].split("\n\n", 2)
    assert (title, when[:2]) == ("# What's first?", "20")
    assert rest == "## You\n\nWhat's first?\n\n## tiny\n\n**one**\n\n## You\n\nmore\n\n## tiny\n\n> a\n> b\n\ntwo\n"
