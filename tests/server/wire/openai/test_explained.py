"""`explained` of a stream's chunks: whose each token is, what was rejected and where, what the step took."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from specserve.explained import HIDDEN, Explained
from specserve.outputs import Chunk, CompletionOutput, RequestOutput
from specserve.server.wire.openai.explained import explained_step
from specserve.server.wire.openai.replies import Reply
from specserve.server.wire.openai.stream import ChatStream, CompletionStream, Stream

SPELLED = (b"The", b" sky", b" is", b" blue", b" red", b" was", b"!", b"\xf0\x9f")
TREE = Explained(
    room=5,
    proposed={"suffix": 4, "ngram": 3},
    num_rows=9,
    plain_s=0.002,
    expected_s=0.003,
    allowance_s=-0.001,
    tokens=[1, 2, 3, 4, 5, 6],
    parents=[-1, 0, 1, 1, 0, 4],
    sources=[["suffix", "ngram"], ["suffix"], ["suffix"], ["ngram"], ["ngram"], ["jump_forward"]],
    path=[0, 1],
    seconds=0.0035,
)
STEP = {
    "tokens": [
        {"text": " sky", "sources": ["suffix", "ngram"]},
        {"text": " is", "sources": ["suffix"]},
        {"text": "!", "sources": []},
    ],
    "rejected": [
        {
            "position": 1,
            "tokens": [{"text": " was", "sources": ["ngram"]}, {"text": "!", "sources": ["jump_forward"]}],
        },
        {"position": 2, "tokens": [{"text": " blue", "sources": ["suffix"]}]},
        {"position": 2, "tokens": [{"text": " red", "sources": ["ngram"]}]},
    ],
    "room": 5,
    "proposed": {"suffix": 4, "ngram": 3},
    "num_verified": 6,
    "num_accepted": 2,
    "step_rows": 9,
    "step_ms": 3.5,
    "expected_ms": 3.0,
    "plain_ms": 2.0,
    "allowance_ms": -1.0,
}


class Words:
    special_ids = frozenset[int]()

    def token_bytes(self, token_id: int) -> bytes:
        return SPELLED[token_id]


def chunk(pieces: list[str], ids: list[int], explained: Explained | None = TREE, **more: Any) -> Chunk:
    return Chunk("r", 0, "".join(pieces), ids, explained=explained, pieces=pieces, **more)


def pushed(kind: type[Stream], said: Chunk, **chosen: Any) -> list[dict[str, Any]]:
    """The choices of a chunk's events, but for those that the stream begins with."""
    reply = Reply(id="x-1", created=1, model="tiny", vocabulary=Words(), **chosen)
    output = RequestOutput("r", "p", [0], [CompletionOutput(0)])
    stream = kind(reply, output if kind is ChatStream else [output])  # type: ignore[arg-type]
    events = stream.push(said)
    return [choice for event in map(json.loads, events) for choice in event["choices"]][kind is ChatStream :]


def test_every_token_and_every_rejected_branch() -> None:
    assert explained_step(chunk([" sky", " is", "!"], [1, 2, 6]), Words().token_bytes) == STEP


def test_what_ended_inside_a_step_has_no_drafts_behind_its_end() -> None:
    """A stop string ends the text with the first draft token; one that ended by a hidden token shows what it kept."""
    cut = explained_step(chunk([" sky"], [1]), Words().token_bytes)
    assert [token["text"] for token in cut["tokens"]] == [" sky"]
    assert (cut["rejected"], cut["num_accepted"], cut["num_verified"]) == ([], 1, 6)
    hidden = explained_step(chunk([" sky", " is"], [1, 2, 9]), Words().token_bytes)
    assert [token["sources"] for token in hidden["tokens"]] == [["suffix", "ngram"], ["suffix"]]


def test_without_drafts_all_is_the_models_own() -> None:
    plain = explained_step(chunk(["!"], [6], Explained(num_rows=1, seconds=0.001)), Words().token_bytes)
    assert plain["tokens"] == [{"text": "!", "sources": []}]
    assert (plain["rejected"], plain["proposed"], plain["room"]) == ([], {}, 0)
    assert (plain["expected_ms"], plain["plain_ms"], plain["allowance_ms"]) == (None, None, None)


def test_half_a_character_that_was_rejected_is_a_sign_of_it() -> None:
    half = Explained(tokens=[7], parents=[-1], sources=[["ngram"]])
    assert explained_step(chunk(["!"], [6], half), Words().token_bytes)["rejected"] == [
        {"position": 0, "tokens": [{"text": "\ufffd", "sources": ["ngram"]}]}
    ]


def test_branches_end_before_what_others_answers_proposed() -> None:
    """And one that begins so is not told of; the same beginning is told once."""
    tree = Explained(
        tokens=[1, HIDDEN, 4, HIDDEN, HIDDEN, 5, HIDDEN],
        parents=[-1, 0, 0, 2, 2, 2, -1],
        sources=[["suffix"]] * 7,
        path=[0],
    )
    told = explained_step(chunk([" sky", "!"], [1, 6], tree), Words().token_bytes)
    assert [(branch["position"], [token["text"] for token in branch["tokens"]]) for branch in told["rejected"]] == [
        (1, [" red", " was"])
    ]
    cut = explained_step(
        chunk([" sky", "!"], [1, 6], msgspec.structs.replace(tree, tokens=[1, *[HIDDEN] * 6])), Words().token_bytes
    )
    assert (cut["rejected"], cut["num_verified"], cut["num_accepted"]) == ([], 7, 1)


def test_chunks_of_both_streams_carry_it() -> None:
    said = chunk([" sky", " is", "!"], [1, 2, 6])
    (chat,) = pushed(ChatStream, said)
    assert (chat["delta"], chat["explained"]) == ({"content": " sky is!"}, STEP)
    (text,) = pushed(CompletionStream, said)
    assert (text["text"], text["explained"]) == (" sky is!", STEP)


def test_who_did_not_ask_is_told_nothing() -> None:
    for kind in (ChatStream, CompletionStream):
        (choice,) = pushed(kind, chunk(["!"], [6], None))
        assert "explained" not in choice


def test_a_chunk_without_text_is_told_of_too() -> None:
    """What is held back, as the beginning of a stop string is."""
    (held,) = pushed(ChatStream, chunk(["", "", ""], [1, 2, 6]))
    assert held["delta"] == {}
    assert [token["sources"] for token in held["explained"]["tokens"]] == [["suffix", "ngram"], ["suffix"], []]
    *told, last = pushed(ChatStream, chunk(["!"], [6], finish_reason="stop"))
    assert [("explained" in each) for each in (*told, last)] == [True, False]
