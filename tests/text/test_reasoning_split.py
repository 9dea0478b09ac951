"""Reasoning told from the answer, token by token: the same as by looking at the whole, however the tokens come."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer as Backend

from specserve.testing import write_tiny_model
from specserve.text.detokenizer import Detokenizer
from specserve.text.reasoning import Reasoning
from specserve.text.reasoning_split import ReasoningSplit, splitting
from specserve.text.tokenizer import Tokenizer
from specserve.types import SamplingParams

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}<|start|>assistant\n{{ before }}"
)
ASK = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = write_tiny_model(tmp_path_factory.mktemp("reasons"), "llama")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
    backend.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    return Tokenizer(folder)


def ids_of(made: Tokenizer, text: str | bytes) -> list[int]:
    if isinstance(text, str):
        return made.encode(text, add_special_tokens=False)
    by_byte = {made.token_bytes(i): i for i in range(made.vocab_size) if len(made.token_bytes(i)) == 1}
    return [by_byte[bytes([byte])] for byte in text]


def told(made: Tokenizer, params: SamplingParams, split: ReasoningSplit, pieces: list[list[int]]) -> Any:
    """Reasoning, answer, their tokens, the stop string; the last piece is the end."""
    detokenizer = Detokenizer(made, params, [], split=split)
    reasoning = answer = ""
    num_tokens = 0
    for i, piece in enumerate(pieces):
        step = detokenizer.push(piece, final=i == len(pieces) - 1)
        reasoning, answer, num_tokens = reasoning + step.apart[0], answer + step.text, num_tokens + step.apart[1]
        if step.stop is not None:
            return reasoning, answer, num_tokens, step.stop
    return reasoning, answer, num_tokens, None


def expected(made: Tokenizer, params: SamplingParams, reasoning: Reasoning, is_open: bool, ids: list[int]) -> Any:
    """From the whole text, and from where in it the marks stand."""
    plain = Detokenizer(made, params, [])
    step = plain.push(ids, final=True)
    text, ids = step.text, ids[: step.num_kept]
    ends = list(itertools.accumulate((len(piece) for piece in _decoded(made, params, ids)), initial=0))
    first = 0 if is_open else len(reasoning.open)
    if not is_open and tuple(ids[:first]) != reasoning.open:
        return "", text, 0, step.stop
    size = len(reasoning.close)
    close = next((i for i in range(first, len(ids) - size + 1) if tuple(ids[i : i + size]) == reasoning.close), None)
    if close is None:
        return text[ends[first] :].strip(), "", len(ids), step.stop
    hidden = made.special_ids if params.skip_special_tokens else frozenset()
    mark = b"".join(made.token_bytes(token) for token in reasoning.close if token not in hidden).decode()
    behind = ends[close + size]
    before, answer = text[ends[first] : max(behind - len(mark), ends[first])], text[behind:]
    return before.strip(), answer.lstrip() if params.structured is None else answer, close + size, step.stop


def _decoded(made: Tokenizer, params: SamplingParams, ids: list[int]) -> list[str]:
    """What each token makes of the text, nothing held back."""
    detokenizer = Detokenizer(made, SamplingParams(skip_special_tokens=params.skip_special_tokens), [])
    return [detokenizer.push([token]).text for token in ids]


SINGLE, SEVERAL = ("<think>", "</think>"), ("<a><", "</a></")
WORDS: list[str | bytes] = [
    "<think>", "</think>", "<a><", "</a></", "<", "</a>", "</", "a", "x", " ", "\n", "\n\n", "é".encode()[:1],
    "é".encode()[1:], "日本", "<|end|>", "stone", ">",
]  # fmt: skip


@settings(max_examples=500)
@given(
    marks=st.sampled_from([SINGLE, SEVERAL, ("<|start|>", "<|end|>")]),
    is_open=st.booleans(),
    opens=st.booleans(),
    words=st.lists(st.sampled_from(WORDS), max_size=14),
    places=st.lists(st.integers(0, 60), max_size=8),
    params=st.sampled_from(
        [
            SamplingParams(),
            SamplingParams(skip_special_tokens=False),
            SamplingParams(stop=["ax", "x</th", "a><a", "\n\nx"], include_stop_str_in_output=True),
            SamplingParams(stop=["xx", "stone", "</a></x"], min_tokens=6),
            SamplingParams(structured={"type": "object"}),
        ]
    ),
)
def test_it_is_what_the_whole_text_says(
    made: Tokenizer,
    marks: tuple[str, str],
    is_open: bool,
    opens: bool,
    words: list[str | bytes],
    places: list[int],
    params: SamplingParams,
) -> None:
    opening, closing = (tuple(ids_of(made, mark)) for mark in marks)
    reasoning = Reasoning(opening, closing, (), frozenset(), frozenset())
    written: list[str | bytes] = [*([marks[0]] if opens and not is_open else []), *words]
    ids = [token for word in written for token in ids_of(made, word)]
    hidden = made.special_ids if params.skip_special_tokens else frozenset()
    shown = len(b"".join(made.token_bytes(t) for t in closing if t not in hidden).decode())
    edges = sorted({0, len(ids), *(place % (len(ids) + 1) for place in places)})
    pieces = [ids[a:b] for a, b in itertools.pairwise(edges)] or [[]]
    whole = expected(made, params, reasoning, is_open, ids)
    for cut in (pieces, [[token] for token in ids] or [[]], [ids]):
        split = ReasoningSplit(reasoning, is_open, shown, trims=params.structured is None)
        assert told(made, params, split, cut) == whole


@pytest.mark.parametrize(
    ("before", "said", "reasoning", "answer", "counted"),
    [
        ("", "<think>\nhm\n</think>\n\nYes.\n", "hm", "Yes.\n", "<think>\nhm\n</think>"),
        ("<think>\n", "hm</think>Yes.", "hm", "Yes.", "hm</think>"),
        ("<think>\n\n</think>\n\n", "\nYes</think>", "", "\nYes</think>", ""),
        ("", "\n<think>Yes", "", "\n<think>Yes", ""),
        ("", "<think>hm, ", "hm,", "", "<think>hm, "),
        ("", "<think>\n\n</think>\n\nYes", "", "Yes", "<think>\n\n</think>"),
        ("", "<think>a<think>b</think>c</think>", "a<think>b", "c</think>", "<think>a<think>b</think>"),
    ],
)
def test_prompts_say_where_an_answer_begins(
    made: Tokenizer, before: str, said: str, reasoning: str, answer: str, counted: str
) -> None:
    make = splitting(made, SamplingParams(), ids_of(made, made.render_chat(ASK) + before))
    detokenizer = Detokenizer(made, SamplingParams(), [], split=make and make())
    step = detokenizer.push(ids_of(made, said), final=True)
    assert (*step.apart, step.text) == (reasoning, len(ids_of(made, counted)), answer)


def test_reasoning_comes_at_once_but_for_what_may_mark_its_end(made: Tokenizer) -> None:
    opening, closing = (tuple(ids_of(made, mark)) for mark in SEVERAL)
    split = ReasoningSplit(Reasoning(opening, closing, (), frozenset(), frozenset()), True, len("</a></"))
    detokenizer = Detokenizer(made, SamplingParams(), [], split=split)
    steps = [detokenizer.push([token]) for token in (*ids_of(made, "x"), *closing[:-1], *ids_of(made, "x"), *closing)]
    found = [step.apart[0] for step in steps]
    assert found[0] == "x"
    assert set(found[1 : len(closing)]) == {""}
    assert "".join(found) == "x" + SEVERAL[1][:-1].join(["", "x"]) if len(closing) > 1 else "xx"
    assert [step.text for step in steps] == [""] * len(steps)


def test_models_that_do_not_reason_have_none(made: Tokenizer, tmp_path: Path) -> None:
    plain = Tokenizer(write_tiny_model(tmp_path / "plain", "llama"))
    assert splitting(plain, SamplingParams(), plain.encode_chat(ASK)) is None
    closed = ids_of(made, made.render_chat(ASK) + "<think></think>")
    assert splitting(made, SamplingParams(), closed) is None
