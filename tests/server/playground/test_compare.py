"""The comparison with drafting off: fair, and equal texts or told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.server.playground.replies import PLAIN, STEPS, WHOLE, Scripted, script, stream_bytes

ORDER = ["drafts", "plain", "plain", "drafts"] * 2 + ["drafts", "plain"]
WARM = Scripted([stream_bytes([("H", 1)], drafts=0)])


def compared(open_page: Any, drafts: Sequence[float], plain: Sequence[float]) -> Any:
    """A comparison in which the runs with drafts and those without have these speeds, each in the order it is asked."""
    left = {"drafts": list(drafts), "plain": list(plain)}
    made = {
        "drafts": lambda rate: stream_bytes(rate=rate),
        "plain": lambda rate: stream_bytes([(text, 1) for text, _ in STEPS], rate, drafts=0),
    }
    runs = [reply for kind in ORDER for reply in (WARM, Scripted([made[kind](left[kind].pop(0))]))]
    playground = open_page(script(Scripted([WHOLE]), *runs))
    playground.page.select_option("#drafter", "prediction")
    playground.send()
    compare(playground)
    return playground


def compare(playground: Any) -> None:
    playground.answer.locator(".compare").click()
    playground.until_idle()


def said(playground: Any) -> tuple[str, str]:
    status = playground.answer.locator(".actions .said")
    return status.text_content(), status.get_attribute("class")


def test_each_run_finds_its_prompt_in_the_cache_and_nothing_else_of_another(open_page: Any) -> None:
    """With drafts and without in turns, each first asked for one token, under a salt of its own."""
    playground = compared(open_page, [40.0] * 5, [20.0] * 5)
    first, *runs = playground.script.chats
    warming, timed = runs[::2], runs[1::2]
    assert [run.pop("max_tokens") for run in warming] == [1] * 10
    assert warming == [{k: v for k, v in run.items() if k != "max_tokens"} for run in timed]
    salts = [run.pop("cache_salt") for run in timed]
    assert len(set(salts)) == 10
    assert ["prediction" in run for run in timed] == [kind == "drafts" for kind in ORDER]
    assert [run for run in timed if "prediction" in run] == [first] * 5
    without = {**{k: v for k, v in first.items() if k != "prediction"}, "speculative": {"drafter": "none"}}
    assert [run for run in timed if "prediction" not in run] == [without] * 5
    assert playground.page.locator("article").count() == 2


@pytest.mark.parametrize(
    ("drafts", "plain", "found", "rows"),
    [
        (
            [39.0, 41.0, 40.0, 52.0, 38.0],
            [20.0, 21.0, 19.0, 20.0, 30.0],
            "2.00 times the speed with drafts.",
            ["40.0 (38.0 to 52.0)", "20.0 (19.0 to 30.0)"],
        ),
        ([10.0] * 5, [20.0] * 5, "0.50 times the speed with drafts.", ["10.0 (10.0 to 10.0)", "20.0 (20.0 to 20.0)"]),
        (
            [60.0, 50.0, 62.0, 61.0, 63.0],  # one pause of the machine in the others, one in these
            [45.0, 44.0, 46.0, 51.0, 43.0],
            "No measurable difference in speed.",
            ["61.0 (50.0 to 63.0)", "45.0 (43.0 to 51.0)"],
        ),
    ],
)
def test_only_what_is_no_noise_is_called_a_difference(
    open_page: Any, drafts: list[float], plain: list[float], found: str, rows: list[str]
) -> None:
    playground = compared(open_page, drafts, plain)
    assert said(playground) == (f"The texts are identical. {found}", "said good")
    speeds = playground.answer.locator(".comparison tbody td:nth-child(2)").all_text_contents()
    assert speeds == rows
    playground.answer.locator(".comparison summary").click()
    texts = playground.answer.locator(".both .text").all_text_contents()
    assert len(texts) == 2
    assert texts[0] == texts[1] == "".join(text for text, _ in STEPS)


def test_one_token_has_no_speed(open_page: Any) -> None:
    short = Scripted([stream_bytes([("Hé", 1)], drafts=0)])
    playground = open_page(script(short))
    playground.send()
    compare(playground)
    assert said(playground)[0] == "The texts are identical. Too short to compare the speed."


def test_drafts_that_are_asked_for_again_are_not_explained(open_page: Any) -> None:
    playground = open_page(script(Scripted([WHOLE])))
    playground.page.select_option("#view", "drafts")
    playground.send()
    compare(playground)
    _, *runs = playground.script.chats
    assert {json.dumps(run.get("speculative")) for run in runs} == {"null", '{"drafter": "none"}'}


def test_texts_that_differ_are_told_and_shown(open_page: Any) -> None:
    other = Scripted([stream_bytes([("Hé", 1), ("llo <b>🐸", 1)], rate=80.0, drafts=0)])
    playground = open_page(script(Scripted([WHOLE]), WARM, Scripted([WHOLE]), WARM, other))
    playground.send()
    compare(playground)
    assert said(playground) == ("The texts differ from character 10 on.", "said wrong")
    assert playground.answer.locator(".both .text").last.text_content() == "Héllo <b>🐸"
    assert len(playground.script.chats) == 5


def test_comparing_can_be_stopped(open_page: Any) -> None:
    playground = open_page(script(Scripted([WHOLE]), WARM, Scripted([PLAIN[:700]], ends="hangs")))
    playground.send()
    button = playground.answer.locator(".compare")
    button.click()
    assert button.is_disabled()
    playground.page.locator("text=run 1 of 10").wait_for()
    playground.page.keyboard.press("Escape")
    playground.until_idle()
    assert said(playground)[0] == "Stopped."
    assert button.is_enabled()
