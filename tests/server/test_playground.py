"""The playground's script, run by node in a stand-in for a browser (browser.js): what it asks of the server, and what
it shows of the answers. Requests are checked with the server's types, and answers are made with them."""

from __future__ import annotations

import base64
import functools
import itertools
import json
import shutil
import subprocess
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from specserve.engine.outputs import Chunk, CompletionOutput, RequestOutput
from specserve.explained import Explained
from specserve.server.pages import page
from specserve.server.wire.errors import overloaded, timed_out, unauthorized
from specserve.server.wire.fields import Limits
from specserve.server.wire.json.pieces import json_text
from specserve.server.wire.openai.replies import Reply, model_list
from specserve.server.wire.openai.requests import ChatCompletionRequest, read
from specserve.server.wire.openai.stream import ChatStream
from specserve.types import SequenceStats

Json = dict[str, Any]

BROWSER = Path(__file__).with_name("browser.js")
NODE = shutil.which("node")
MIN_NODE = 18  # the first with fetch and TextDecoderStream
CHAT = "/v1/chat/completions"
LIMITS = Limits(vocab_size=1000, max_model_len=256, drafters=frozenset({"ngram", "prediction"}))


def _node_version() -> int:
    if NODE is None:
        return 0
    said = subprocess.run([NODE, "--version"], capture_output=True, text=True, check=True, timeout=60)
    return int(said.stdout.removeprefix("v").split(".")[0])


pytestmark = pytest.mark.skipif(_node_version() < MIN_NODE, reason=f"there is no node, or none from {MIN_NODE} on")


# --- the page and what is done with it --------------------------------------------------------------------------------


class Tree(HTMLParser):
    """The page's body as objects of tag, attributes and children."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[Json] = [{"tag": "root", "attributes": {}, "children": []}]
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element: Json = {"tag": tag, "attributes": dict(attrs), "children": []}
        self.open[-1]["children"].append(element)
        if tag not in ("meta", "link", "input", "br"):
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data: str) -> None:
        self.open[-1]["children"].append(data)


TEXT = page("playground").body.decode()
START, END = TEXT.index("<body>"), TEXT.index("<script>")
SCRIPT = TEXT[END + len("<script>") : TEXT.index("</script>")]
BODY = Tree(TEXT[START:END] + "</body>").open[0]


class Played:
    """What node printed. `requests` are those sent; a shot is the whole page at a moment, the last one at the end."""

    def __init__(self, said: Json) -> None:
        self.requests: list[Json] = said["requests"]
        self.shots: list[Json] = said["shots"]

    @property
    def chats(self) -> list[Json]:
        """The bodies of what was asked of the model."""
        return [json.loads(r["body"]) for r in self.requests if r["path"] == CHAT]

    def at(self, name: str, shot: int = -1) -> Json:
        (found,) = [element for element in elements(self.shots[shot]) if element.get("id") == name]
        return found

    def articles(self, shot: int = -1) -> list[Json]:
        return [element for element in elements(self.at("log", shot)) if element["tag"] == "article"]

    def answer(self, shot: int = -1) -> Json:
        """Where the last answer's text stands."""
        return of_class(self.articles(shot)[-1], "text")[0]

    def figures(self, shot: int = -1) -> dict[str, str]:
        (shown,) = [e for e in elements(self.articles(shot)[-1]) if e["tag"] == "dl"]
        return {name["text"]: value["text"] for name, value in (pair["children"] for pair in shown["children"])}

    def said(self, shot: int = -1) -> list[tuple[str, str]]:
        """What the last answer says besides text and figures, each with its classes."""
        return [(e["text"], e["class"]) for e in of_class(self.articles(shot)[-1], "said") if e["text"]]


def elements(tree: Json) -> list[Json]:
    inside = [element for child in tree["children"] if isinstance(child, dict) for element in elements(child)]
    return [tree, *inside]


def of_class(tree: Json, name: str) -> list[Json]:
    return [element for element in elements(tree) if name in element.get("class", "").split()]


def play(
    actions: Sequence[Sequence[Any]],
    replies: dict[str, list[Json]] | None,
    script: str = SCRIPT,
    address: str = "http://127.0.0.1:8000/",
) -> Played:
    """Runs the page. `replies` are a path's answers, in order, the last of them for ever; None asks a real server."""
    assert NODE is not None
    told = {"body": BODY, "script": script, "address": address, "replies": replies, "actions": actions}
    ran = subprocess.run(
        [NODE, str(BROWSER)], input=json.dumps(told), capture_output=True, text=True, check=False, timeout=240
    )
    assert ran.returncode == 0, ran.stderr
    return Played(json.loads(ran.stdout))


# --- the server -------------------------------------------------------------------------------------------------------


def reply(*pieces: bytes, status: int = 200, ends: str = "closed", reason: str = "OK") -> Json:
    encoded = [base64.b64encode(piece).decode() for piece in pieces]
    return {"status": status, "reason": reason, "pieces": encoded, "ends": ends}


def as_json(body: Any, **options: Any) -> Json:
    return reply(json.dumps(body).encode(), **options)


FORCED: Json = {"jump_forward": {"num_draft_tokens": 9, "num_accepted_tokens": 9}}
STATS: Json = {
    "model": "tiny",
    "state": "ready",
    "num_running": 2,
    "num_waiting": 1,
    "tokens": {"generated_per_s": 41.26},
    "speculation": {
        "recent_tokens_per_step": 1.7517,
        "num_draft_tokens": 9,
        "num_accepted_tokens": 9,
        "sources": FORCED,
    },
    "kv_cache": {"usage": 0.126},
}
INFO: Json = {"engine": {"drafter": "ngram", "drafters": ["ngram", "none", "prediction"]}}


def server(*chats: Json, **others: list[Json]) -> dict[str, list[Json]]:
    own = {
        "/stats": [as_json(STATS)],
        "/server_info": [as_json(INFO)],
        "/v1/models": [as_json(model_list(["tiny", "alias"], 1, 256, "natively"))],
    }
    return {**own, CHAT: list(chats), **{f"/{name}": replies for name, replies in others.items()}}


# 'H', two tokens of one step, one whose character is not whole yet, its rest, three tokens, five.
STEPS = [("Hé", 1), ("llo <b>", 2), ("", 1), ("🐢", 1), (" ż\n", 3), (" data: [DONE]\n\n", 5)]
ANSWER = "".join(text for text, _ in STEPS)


def stream_bytes(
    steps: Sequence[tuple[str, int]] = STEPS,
    rate: float = 40.0,
    drafts: int = 7,
    by_source: dict[str, list[int]] | None = None,
    thought: str = "",
) -> bytes:
    """What the server sends for an answer of these steps, each a text and its number of tokens."""
    num_tokens = sum(count for _, count in steps)
    stats = SequenceStats(
        arrived=1.0,
        first_scheduled=1.0,
        first_token=1.0417,
        finished=1.0417 + (num_tokens - 1) / rate,
        num_steps=len(steps),
        num_drafts=3,
        num_draft_tokens=2 * drafts,
        num_accepted_tokens=drafts,
        accepted_by_position=[3, 2, 1, 1] if drafts else [],
        longest_draft=4 if drafts else 0,
        by_source=by_source or {},
    )
    output = RequestOutput("r", None, [1, 2], [CompletionOutput(0, token_ids=[5] * num_tokens, stats=stats)])
    asked = Reply(
        id="x",
        created=1,
        model="tiny",
        vocabulary=None,  # type: ignore[arg-type]  # nobody asks for log-probabilities
        return_token_ids=True,
        include_usage=True,
    )
    stream = ChatStream(asked, output)
    chunks = [Chunk("r", 0, "", [5, 5], reasoning=thought)] if thought else []
    chunks += [Chunk("r", 0, text, [5] * count) for text, count in steps]
    last = Chunk("r", 0, "", [], finish_reason="length", stats=stats)
    events = [event for chunk in [*chunks, last] for event in stream.push(chunk)] + stream.end(9.0)
    return b"".join(map(stream.frame, events))


WHOLE = stream_bytes()
PLAIN = stream_bytes([(text, 1) for text, _ in STEPS], rate=20.0, drafts=0)
SEND = [["type", "entry", "Hi"], ["press", "entry", "Enter"]]


def shaded(text: str, tokens: int) -> Json:
    return {
        "tag": "span",
        "class": "step",
        "data-tokens": str(min(tokens, 4)),
        "title": f"{tokens} tokens in one step",
        "children": [text],
        "text": text,
    }


STRIDE = 23  # bytes between two cuts
SHOWN = ["Hé", shaded("llo <b>", 2), "🐢", shaded(" ż\n", 3), shaded(" data: [DONE]\n\n", 5)]


# --- what is asked ----------------------------------------------------------------------------------------------------


def asked(actions: Sequence[Sequence[Any]]) -> Json:
    """The one request that is sent, which the server's own types take whole."""
    (body,) = play([*actions, *SEND], server(reply(WHOLE))).chats
    request = read(ChatCompletionRequest, json.dumps(body).encode(), LIMITS)
    assert request.ignored(LIMITS) == []
    return body


def test_the_request_is_what_the_controls_say() -> None:
    body = asked([["type", "system", "Be kind."], ["type", "seed", "7"], ["type", "temperature", "0.5"]])
    assert body == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
        "max_tokens": 256,
        "temperature": 0.5,
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


def test_empty_fields_are_left_to_the_server_but_a_seed_is_drawn() -> None:
    body = asked([["type", "max-tokens", ""], ["type", "temperature", ""]])
    assert not {"max_tokens", "temperature", "speculative", "prediction"} & set(body)
    assert 0 <= body["seed"] < 2**31


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_a_drafter_may_be_chosen(drafter: str) -> None:
    assert asked([["type", "drafter", drafter]])["speculative"] == {"drafter": drafter}


@pytest.mark.parametrize(("drafter", "named"), [("", {}), ("ngram", {"drafter": "ngram"})])
def test_marked_drafts_are_asked_for(drafter: str, named: Json) -> None:
    body = asked([["type", "drafter", drafter], ["type", "mark", "drafts"]])
    assert body["speculative"] == {**named, "explain": True}


def test_the_prediction_is_the_message() -> None:
    body = asked([["type", "drafter", "prediction"]])
    assert body["prediction"] == {"type": "content", "content": "Hi"}


def test_the_selectors_have_what_the_server_has() -> None:
    played = play([], server())
    drafters = {e["value"]: e["text"] for e in played.at("drafter")["children"]}
    assert list(drafters) == ["", "ngram", "none", "prediction"]
    assert drafters[""] == "default (ngram)"
    assert [e["value"] for e in played.at("model")["children"]] == ["tiny", "alias"]


def test_a_conversation_goes_on_and_can_be_cleared() -> None:
    more = [["type", "entry", "More"], ["submit", "compose"]]
    played = play([*SEND, *more, ["shoot"], ["click", "clear"], *SEND], server(reply(WHOLE)))
    first = [{"role": "user", "content": "Hi"}]
    assert [chat["messages"] for chat in played.chats] == [
        first,
        [*first, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "More"}],
        first,
    ]
    assert [len(played.articles(shot)) for shot in (0, -1)] == [4, 2]


@pytest.mark.parametrize(
    "actions",
    [
        [["type", "entry", " \n"], ["press", "entry", "Enter"]],
        [["type", "entry", "a"], ["press", "entry", "Enter", {"shiftKey": True}]],
        [["type", "entry", "a"], ["press", "entry", "Enter", {"isComposing": True}]],
        [["type", "entry", "a"], ["press", "entry", "a"]],
        [["spoil", "seed"], *SEND],
    ],
    ids=["nothing", "shift", "composing", "letter", "wrong number"],
)
def test_what_sends_nothing(actions: list[list[Any]]) -> None:
    assert play(actions, server(reply(WHOLE))).chats == []


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_text_is_shown_in_its_steps_and_as_text() -> None:
    played = play(SEND, server(reply(WHOLE)))
    assert played.answer()["text"] == ANSWER
    assert played.answer()["children"] == SHOWN
    mine, theirs = played.articles()
    assert of_class(mine, "text")[0]["children"] == ["Hi"]
    assert theirs["aria-busy"] == "false"
    assert played.at("entry").get("value", "") == ""


def test_reasoning_stands_in_a_fold_before_the_answer_and_is_sent_back() -> None:
    again = [["type", "entry", "More"], ["press", "entry", "Enter"]]
    played = play([*SEND, *again], server(reply(stream_bytes(thought="Hm, <b>")), reply(WHOLE)))
    thought, without = (of_class(article, "thought")[0] for article in played.articles()[1::2])
    assert (thought["text"], without["text"]) == ("Hm, <b>", "")
    folds = [e for article in played.articles()[1::2] for e in elements(article) if e["tag"] == "details"]
    assert [fold.get("hidden", False) for fold in folds] == [False, True]
    assert of_class(played.articles()[1], "text")[0]["text"] == ANSWER
    said = {"role": "assistant", "content": ANSWER, "reasoning_content": "Hm, <b>"}
    assert played.chats[1]["messages"][1] == said


def draft(text: str, place: str, *who: str) -> Json:
    title = f"proposed by {', '.join(who)}" if who else ""
    return {"tag": "span", "class": "draft", "title": title, "data-source": place, "children": [text], "text": text}


def rejected(text: str, *who: str) -> Json:
    title = {"title": f"rejected, proposed by {', '.join(who)}"} if who else {}
    return {"tag": "s", "class": "rejected", **title, "children": [text], "text": text}


def explained_bytes() -> bytes:
    """Three steps: without a draft; two tokens accepted and three branches rejected; the end, which shows half a
    character that was held back. Token i is spelled by the i-th word."""
    words = [b"The", b" sky", b" is", b" blue", b"\nred", b" was", b"!"]

    class Words:
        special_ids = frozenset[int]()

        def token_bytes(self, token_id: int) -> bytes:
            return words[token_id]

    output = RequestOutput(
        "r", None, [1, 2], [CompletionOutput(0, token_ids=[0] * 5, stats=SequenceStats(num_steps=3))]
    )
    output.outputs[0].stats.first_token, output.outputs[0].stats.finished = 1.0, 2.0
    stream = ChatStream(Reply(id="x", created=1, model="tiny", vocabulary=Words(), include_usage=True), output)
    told = Explained(
        tokens=[1, 2, 3, 4, 5],
        parents=[-1, 0, 1, 1, 0],
        sources=[["suffix", "ngram"], ["jump_forward"], ["suffix"], ["suffix"], ["ngram"]],
        path=[0, 1],
    )
    chunks = [
        Chunk("r", 0, "<b>", [0], explained=Explained(), pieces=["<b>"]),
        Chunk("r", 0, " sky is!", [1, 2, 6], explained=told, pieces=[" sky", " is", "!"]),
        Chunk("r", 0, "", [6], explained=Explained(), pieces=[""]),
        Chunk("r", 0, "\ufffd", [], finish_reason="stop", stats=output.outputs[0].stats),
    ]
    events = [event for chunk in chunks for event in stream.push(chunk)] + stream.end(9.0)
    return b"".join(map(stream.frame, events))


def test_draft_tokens_are_marked_by_who_proposed_them_and_rejected_ones_shown() -> None:
    marked = [["type", "mark", "drafts"], *SEND]
    more = [["shoot"], ["type", "entry", "More"], ["submit", "compose"], ["shoot"], ["click", "clear"]]
    played = play([*marked, *more], server(reply(explained_bytes())))
    assert played.answer(0)["children"] == [
        "<b>",
        draft(" sky", "0", "suffix", "ngram"),
        rejected(" was", "ngram"),
        draft(" is", "jump_forward", "jump_forward"),
        rejected(" blue", "suffix"),
        rejected("⏎red", "suffix"),
        "!",
        "\ufffd",
    ]
    legend = [
        "Draft tokens: ",
        draft("suffix", "0"),
        ", ",
        draft("jump_forward", "jump_forward"),
        ", ",
        rejected("rejected"),
    ]
    assert [played.at("legend", shot)["children"] for shot in (0, 1)] == [legend, legend]
    assert (played.at("legend", 1).get("hidden", False), played.at("legend")["hidden"]) == (False, True)
    assert [message["content"] for message in played.chats[1]["messages"]] == ["Hi", "<b> sky is!\ufffd", "More"]


def test_the_figures_are_those_of_the_last_event() -> None:
    played = play([["type", "seed", "7"], *SEND], server(reply(WHOLE)))
    assert played.figures() == {
        "tokens": "13",
        "first after": "42 ms",
        "tokens/s": "40.0",
        "drafter": "ngram",
        "drafted": "14",
        "accepted": "7 (50 %)",
        "mean acceptance length": "2.17",
        "seed": "7",
        "ended by": "length",
    }


def test_without_a_drafter_there_is_nothing_to_compare() -> None:
    played = play([["type", "drafter", "none"], *SEND], server(reply(PLAIN)))
    assert set(played.figures()) == {"tokens", "first after", "tokens/s", "drafter", "seed", "ended by"}
    assert played.figures()["drafter"] == "none"
    assert of_class(played.articles()[-1], "compare") == []


def test_an_answer_may_come_in_any_pieces() -> None:
    """Cut at every byte by one answer or another: between events, in the middle of them, and inside characters."""
    bounds = [[0, *range(first, len(WHOLE), STRIDE), len(WHOLE)] for first in range(1, STRIDE + 1)]
    cut = [reply(*(WHOLE[i:j] for i, j in itertools.pairwise(bound))) for bound in bounds]
    single = reply(*(WHOLE[i : i + 1] for i in range(len(WHOLE))))
    crlf = reply(WHOLE.replace(b"\n\n", b"\r\n\r\n"))
    pinged = reply(WHOLE.replace(b"\n\ndata:", b"\n\n: ping\n\ndata:"))
    answers = [*cut, single, crlf, pinged]
    played = play([*SEND, ["shoot"], ["click", "clear"]] * len(answers), server(*answers))
    assert {i for bound in bounds for i in bound} == set(range(len(WHOLE) + 1))
    for shot in range(len(answers)):
        assert played.answer(shot)["children"] == SHOWN
        assert played.figures(shot)["tokens"] == "13"


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("rest = lines.pop();", 'rest = ""; lines.pop();'),
        ("(rest + value)", "value"),
        ("Math.min(tokens, 4)", "tokens"),
        ("answer.text += text;", ""),
        (".trim();", ";"),
    ],
)
def test_faults_in_the_script_are_noticed(right: str, wrong: str) -> None:
    assert SCRIPT.count(right) == 1
    assert is_right(SCRIPT)
    assert not is_right(SCRIPT.replace(right, wrong))


@functools.cache
def is_right(script: str) -> bool:
    """Whether two messages whose answers come in single bytes are shown and kept."""
    single = reply(*(WHOLE[i : i + 1] for i in range(len(WHOLE))))
    played = play([*SEND, *SEND], server(single), script)
    kept = [message["content"] for message in played.chats[-1]["messages"]]
    return kept == ["Hi", ANSWER, "Hi"] and played.answer()["children"] == SHOWN


def test_an_error_in_the_stream_is_shown_behind_what_came() -> None:
    """What failed is no part of the conversation, and can be sent again."""
    begun = WHOLE[: WHOLE.index(b"data:", WHOLE.index(b"llo <b>"))]
    failed = reply(begun, b"data: " + json_text(timed_out(504, "It took too long.").body).encode() + b"\n\n")
    played = play([*SEND, ["shoot"], ["submit", "compose"]], server(failed, reply(WHOLE)))
    assert played.answer(0)["text"] == "Héllo <b>"
    ((said, kind),) = played.said(0)
    assert said.startswith("It took too long.")
    assert "wrong" in kind.split()
    assert played.at("entry", 0)["value"] == "Hi"
    assert [chat["messages"] for chat in played.chats] == [[{"role": "user", "content": "Hi"}]] * 2
    assert played.answer()["text"] == ANSWER


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (as_json(overloaded("The queue is full.").body, status=429), "The queue is full."),
        (reply(b"<h1>oh</h1>", status=502, reason="Bad Gateway"), "502 Bad Gateway"),
        (reply(WHOLE.removesuffix(b"data: [DONE]\n\n")), "The connection was closed before the answer ended."),
        (reply(WHOLE[:400], ends="broken"), "terminated"),
        (reply(ends="refused"), "fetch failed"),
    ],
    ids=["error", "not ours", "no end", "broken", "no server"],
)
def test_failures_are_told(failure: Json, told: str) -> None:
    played = play(SEND, server(failure))
    ((said, kind),) = played.said()
    assert said == f"{told} Not part of the conversation; the message can be sent again."
    assert "wrong" in kind.split()
    assert played.at("send").get("disabled", False) is False
    assert played.at("stop")["disabled"] is True


def test_stop_keeps_what_came() -> None:
    begun = WHOLE[: WHOLE.index(b"data:", WHOLE.index(b"llo <b>"))]
    actions = [*SEND, ["shoot"], ["type", "entry", "Not yet"], ["submit", "compose"], ["click", "clear"]]
    more = [["click", "stop"], ["shoot"], ["type", "entry", "More"], ["submit", "compose"]]
    played = play([*actions, *more], server(reply(begun, ends="hangs"), reply(WHOLE)))
    assert (played.at("send", 0)["disabled"], played.at("clear", 0)["disabled"]) == (True, True)
    assert "disabled" not in played.at("stop", 0)
    assert played.articles(0)[-1]["aria-busy"] == "true"
    assert played.answer(1)["text"] == "Héllo <b>"
    assert [text for text, _ in played.said(1)] == ["Stopped."]
    assert [message["content"] for message in played.chats[1]["messages"]] == ["Hi", "Héllo <b>", "More"]
    assert len(played.chats) == 2


@pytest.mark.parametrize(("meanwhile", "left"), [("", "Hi"), ("Next", "Next")])
def test_a_message_stopped_before_its_answer_comes_back(meanwhile: str, left: str) -> None:
    actions = [*SEND, ["type", "entry", meanwhile], ["click", "stop"]]
    played = play(actions, server(reply(ends="hangs")))
    assert played.at("entry")["value"] == left
    assert played.said()[0][0] == "Stopped. Not part of the conversation; the message can be sent again."


# --- drafting off -----------------------------------------------------------------------------------------------------


def compared(drafts: Sequence[float], plain: Sequence[float], plain_steps: Sequence[tuple[str, int]] = STEPS) -> Played:
    """A comparison in which the runs with drafts and those without have these speeds, each in the order it is asked."""
    left = {"drafts": list(drafts), "plain": list(plain)}
    order = ["drafts", "plain", "plain", "drafts"] * 2 + ["drafts", "plain"]
    made = {
        "drafts": lambda rate: stream_bytes(rate=rate),
        "plain": lambda rate: stream_bytes([(text, 1) for text, _ in plain_steps], rate, drafts=0),
    }
    runs = [reply(made[kind](left[kind].pop(0))) for kind in order]
    return play([["type", "drafter", "prediction"], *SEND, ["compare"]], server(reply(WHOLE), *runs))


def test_comparing_asks_the_same_with_and_without_drafts_in_turns() -> None:
    played = compared([40.0] * 5, [20.0] * 5)
    first, *runs = played.chats
    salts = [run.pop("cache_salt") for run in runs]
    assert len(set(salts)) == len(runs) == 10, "no run is helped by what another has left"
    with_drafts = [run for run in runs if "prediction" in run]
    assert with_drafts == [first] * 5
    without = {**{k: v for k, v in first.items() if k != "prediction"}, "speculative": {"drafter": "none"}}
    assert [run for run in runs if "prediction" not in run] == [without] * 5
    assert ["prediction" in run for run in runs] == [True, False, False, True] * 2 + [True, False]
    assert len(played.articles()) == 2


@pytest.mark.parametrize(
    ("drafts", "plain", "found"),
    [
        (
            [39.0, 41.0, 40.0, 52.0, 38.0],
            [20.0, 21.0, 19.0, 20.0, 30.0],
            "2.00 times the speed with drafts: 40.0 (38.0 to 52.0) against 20.0 (19.0 to 30.0) tokens/s",
        ),
        (
            [10.0] * 5,
            [20.0] * 5,
            "0.50 times the speed with drafts: 10.0 (10.0 to 10.0) against 20.0 (20.0 to 20.0) tokens/s",
        ),
        (
            [60.0, 50.0, 62.0, 61.0, 63.0],  # one pause of the machine in the others, one in these
            [45.0, 44.0, 46.0, 51.0, 43.0],
            "No measurable difference in speed: 61.0 (50.0 to 63.0) against 45.0 (43.0 to 51.0) tokens/s",
        ),
    ],
)
def test_only_what_is_no_noise_is_called_a_difference(drafts: list[float], plain: list[float], found: str) -> None:
    ((said, kind),) = compared(drafts, plain).said()
    assert said == f"The texts are identical. {found}, medians of 5 runs each, in turns."
    assert "good" in kind.split()


def test_one_token_has_no_speed() -> None:
    short = stream_bytes([("Hé", 1)], drafts=0)
    played = play([*SEND, ["compare"]], server(reply(short), reply(short)))
    assert played.said()[0][0] == "The texts are identical. Too short to compare the speed."


def test_drafts_that_are_asked_for_again_are_not_explained() -> None:
    mark = [["type", "mark", "drafts"], *SEND, ["compare"]]
    _, *runs = play(mark, server(reply(WHOLE), reply(WHOLE))).chats
    assert {json.dumps(run.get("speculative")) for run in runs} == {"null", '{"drafter": "none"}'}


def test_texts_that_differ_are_told() -> None:
    other = stream_bytes([("Hé", 1), ("llo <b>🐸", 1)], rate=80.0, drafts=0)
    played = play([*SEND, ["compare"]], server(reply(WHOLE), reply(WHOLE), reply(other)))
    ((said, kind),) = played.said()
    assert said == "The texts differ from character 10 on."
    assert "wrong" in kind.split()
    assert len(played.chats) == 3


def test_comparing_can_be_stopped() -> None:
    played = play(
        [*SEND, ["compare"], ["shoot"], ["click", "stop"]], server(reply(WHOLE), reply(PLAIN[:700], ends="hangs"))
    )
    (button,) = of_class(played.articles(0)[-1], "compare")
    assert button["disabled"] is True
    assert [text for text, _ in played.said()] == ["Stopped."]
    assert "disabled" not in of_class(played.articles()[-1], "compare")[0]


# --- the live view and the key ----------------------------------------------------------------------------------------


def test_the_live_view() -> None:
    played = play([], server())
    shown = {name["text"]: value["text"] for name, value in (p["children"] for p in played.at("live")["children"])}
    assert shown == {
        "running": "2",
        "waiting": "1",
        "tokens/s": "41.3",
        "tokens a step": "1.75",
        "drafts accepted": "-",
        "KV cache in use": "13 %",
    }
    assert played.at("about")["text"] == "tiny"


def test_what_a_grammar_forces_is_no_accepted_draft() -> None:
    """Neither in the live view nor under an answer; whose steps it came in are told apart."""
    sources = {"ngram": {"num_draft_tokens": 4, "num_accepted_tokens": 1}, **FORCED}
    speculation = {**STATS["speculation"], "num_draft_tokens": 13, "num_accepted_tokens": 10, "sources": sources}
    forced = stream_bytes(by_source={"ngram": [8, 2], "jump_forward": [6, 5]})
    played = play(SEND, server(reply(forced), stats=[as_json({**STATS, "speculation": speculation})]))
    live = {name["text"]: value["text"] for name, value in (p["children"] for p in played.at("live")["children"])}
    assert live["drafts accepted"] == "25 %"
    shown = played.figures()
    assert (shown["drafted"], shown["accepted"], shown["jump-forward"]) == ("8", "2 (25 %)", "5")


def test_a_page_that_nobody_sees_asks_nothing() -> None:
    played = play([["look", "hidden"], ["wait"], ["wait"], ["look", "visible"], ["wait"]], server())
    paths = [r["path"] for r in played.requests]
    assert (paths.count("/stats"), paths.count("/server_info")) == (3, 1)


def test_it_waits_for_the_engine() -> None:
    loading = {**STATS, "state": "loading"}
    played = play(
        [*SEND, ["shoot"], ["wait"], ["submit", "compose"]],
        server(reply(WHOLE), stats=[as_json(loading), as_json(STATS)]),
    )
    assert played.at("about", 0)["text"] == "tiny: the engine is loading"
    assert played.at("send", 0)["disabled"] is True
    assert (played.at("about")["text"], played.answer()["text"]) == ("tiny", ANSWER)


def test_a_server_that_is_gone_is_told_and_noticed_when_it_is_back() -> None:
    gone = [as_json(STATS), reply(ends="refused"), as_json(STATS)]
    played = play([["wait"], ["shoot"], ["wait"]], server(stats=gone))
    assert played.at("about", 0)["text"] == "The server's state is not known. fetch failed"
    assert (played.at("about")["text"], played.at("about")["class"].split()) == ("tiny", ["said"])


def test_the_key_is_asked_for_and_sent() -> None:
    """Nothing more is asked until there is one: the server would log every refusal."""
    refused = as_json(unauthorized().body, status=401)
    replies = server(reply(WHOLE), stats=[refused, as_json(STATS)])
    key = [["type", "key", "sk-1"], ["submit", "key-form"]]
    played = play([["wait"], ["wait"], ["shoot"], *key, *SEND], replies)
    assert "hidden" not in played.at("key-form", 0)
    assert unauthorized().message in played.at("about", 0)["text"]
    sent = [(r["path"], r["headers"].get("Authorization")) for r in played.requests]
    assert sent == [
        ("/stats", None),
        *((path, "Bearer sk-1") for path in ("/stats", "/v1/models", "/server_info", CHAT)),
    ]
    assert played.at("key-form")["hidden"] is True
    assert played.answer()["text"] == ANSWER


def test_it_works_below_a_path() -> None:
    assert play(SEND, server(reply(WHOLE)), address="http://a/b/c/").answer()["text"] == ANSWER


# --- a real server ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["", "ngram"])
def test_with_a_real_server(server: Any, drafter: str) -> None:
    actions = [["type", "drafter", drafter], ["type", "max-tokens", "64"], *SEND]
    address = f"http://127.0.0.1:{server.port}/"
    played = play([*actions, *([["compare"]] if drafter else [])], None, address=address)
    (drafted, *_) = played.chats
    whole = server.post(CHAT, {k: v for k, v in drafted.items() if k not in ("stream", "stream_options")}).json
    assert played.answer()["text"] == whole["choices"][0]["message"]["content"]
    assert played.figures()["tokens"] == str(whole["usage"]["completion_tokens"])
    assert played.figures()["drafter"] == (drafter or "auto")
    if drafter:
        assert played.said()[0][0].startswith("The texts are identical.")


def test_a_real_servers_drafts_are_marked(server: Any) -> None:
    """Without what was rejected the text is the same, and as many tokens are marked as the figures say."""
    actions = [["type", "drafter", "ngram"], ["type", "mark", "drafts"], ["type", "max-tokens", "64"], *SEND]
    played = play(actions, None, address=f"http://127.0.0.1:{server.port}/")
    sent = {k: v for k, v in played.chats[0].items() if k not in ("stream", "stream_options", "speculative")}
    whole = server.post(CHAT, sent).json["choices"][0]["message"]["content"]
    parts = played.answer()["children"]
    kept = [part if isinstance(part, str) else part["text"] for part in parts if not is_rejected(part)]
    assert "".join(kept) == whole
    drafted, accepted = int(played.figures()["drafted"]), int(played.figures()["accepted"].split()[0])
    assert 0 < len([part for part in parts if is_rejected(part)]) <= drafted - accepted
    marked = of_class(played.answer(), "draft")
    assert {part["title"] for part in marked} <= {"proposed by ngram"}
    assert len(marked) <= accepted


def is_rejected(part: Any) -> bool:
    return isinstance(part, dict) and part["tag"] == "s"
