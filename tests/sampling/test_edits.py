"""What is prepared once for a request does what is looked up anew in each step would do: bad words against every word,
counts that are kept up against counts made anew. And a step costs little however much a request asks for."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from specserve.engine.request import Limits, Request, sequences
from specserve.sampling import bad_words
from specserve.sampling.bad_words import of_ids, of_texts
from specserve.sampling.sampler import edited
from specserve.server.engine.messages import Command
from specserve.testing import path_to, sampled
from specserve.types import BadWords, Draft, SamplingParams, Sequence

VOCAB = 49152
Make = Callable[..., Sequence]

few_ids = st.integers(0, 2)
short_words = st.lists(few_ids, max_size=5)
# So long that a first look at the text's end cannot tell, and alike for long.
long_words = st.builds(
    lambda period, times, end: [*period * times, *end],
    st.lists(few_ids, min_size=1, max_size=2),
    st.integers(20, 60),
    st.lists(few_ids, max_size=2),
)
some_words = st.lists(short_words | long_words, max_size=12)


@st.composite
def trees(draw: Any) -> Draft:
    nodes = [draw(st.tuples(few_ids, st.integers(-1, node - 1))) for node in range(draw(st.integers(0, 5)))]
    return Draft(*(np.array([node[i] for node in nodes], np.int32) for i in range(2)))


def naive(words: list[list[int]], text: list[int]) -> set[int]:
    return {word[-1] for word in words if word and text[len(text) - len(word) + 1 :] == word[:-1]}


@settings(max_examples=400)
@given(some_words, st.lists(few_ids, min_size=1, max_size=12) | long_words, trees())
def test_bad_words_are_found_as_by_trying_each(words: list[list[int]], text: list[int], draft: Draft) -> None:
    made = of_ids(words)
    found = dict(bad_words.forbidden(made, text, draft))
    for row in range(len(draft) + 1):
        path = [int(draft.tokens[node]) for node in path_to(draft, row - 1)]
        assert {*made.always, *found.get(row, ())} == naive(words, text + path)


def test_bad_words_longer_than_the_first_look_are_found_to_the_last_token() -> None:
    """Among others that are as long and differ in the token that is looked at last."""
    text = np.random.default_rng(0).integers(0, 50, 3000).tolist()
    words = [[*text[-n:], n % 50] for n in (1, 31, 32, 33, 255, 256, 257, 2999, 3000)]
    others = [[(word[0] + 1) % 50, *word[1:-1], 49] for word in words[1:]]
    ((row, ids),) = bad_words.forbidden(of_ids([*words, *others, [7, *text, 48]]), text, Draft.empty())
    assert (row, set(ids)) == (0, {word[-1] for word in words})


def test_a_text_without_tokens_is_no_bad_word() -> None:
    """A blank text comes to none where a tokenizer strips it."""
    made = of_texts([" ", "x"], lambda text: [ord(c) for c in text.strip()])
    assert made == BadWords([120], [], [], [])
    assert of_texts([], lambda text: []) is None


def test_what_a_shorter_word_forbids_no_longer_one_repeats() -> None:
    """Else a thousand words, each the next one's beginning, would be walked in every row."""
    made = of_ids([[1] * length for length in range(1, 1000)])
    assert made == BadWords([1], [], [], [])
    assert len(of_ids([[1] * length + [2] for length in range(1, 1000)]).stems) == 1


PENALTIES = [
    {"repetition_penalty": 1.7},
    {"presence_penalty": 0.6, "frequency_penalty": -0.4},
    {"repetition_penalty": 0.6, "presence_penalty": -0.6, "frequency_penalty": 0.4},
]


@settings(max_examples=60)
@given(
    own=st.sampled_from(PENALTIES),
    grown=st.lists(st.lists(few_ids | st.integers(3, 200), max_size=70), max_size=5),
    draft=trees(),
)
def test_counts_that_are_kept_up_are_those_made_anew(
    own: dict[str, float], grown: list[list[int]], draft: Draft, sequence: Make
) -> None:
    """Bit for bit, however many tokens come between two steps, and more of them than there was room for."""
    logits = torch.randn(len(draft) + 1, 211, generator=torch.Generator().manual_seed(1))
    seq = sequence([1, 5, 1, 9], 3, **own)
    for tokens in [[], *grown]:
        seq.tokens += tokens
        fresh = sequence(seq.tokens, 3, **own)
        rows = [sampled([each], [draft], [0]) for each in (seq, fresh)]
        assert torch.equal(edited(logits, rows[0]), edited(logits, rows[1]))


def test_completions_share_what_is_prepared_and_count_for_themselves() -> None:
    params = SamplingParams(
        n=3, prompt_logprobs=1, repetition_penalty=1.5, frequency_penalty=0.5, logit_bias={5: 1.0}, max_tokens=9,
        allowed_token_ids=[*range(40)], stop_token_ids=[4, 6], min_tokens=5,
    )  # fmt: skip
    request = Request(id="r", prompt_ids=[1, 2], params=params, bad_words=of_ids([[3], [2, 7]]))
    group = sequences(request, Limits(50, 100, frozenset({0})))
    logits = torch.randn(3, 50)
    edited(logits, sampled(group, [Draft.empty()] * 3, [0, 1, 2]))
    for i, seq in enumerate(group):
        seq.tokens += [8 + i] * (i + 1)
    together = edited(logits, sampled(group, [Draft.empty()] * 3, [0, 1, 2]))
    shared = {id(seq.edits.shared) for seq in group}  # type: ignore[attr-defined]
    assert len(shared) == 1
    assert len({id(seq.stop_ids) for seq in group}) == 1
    assert len({id(seq.params) for seq in group[1:]}) == 1
    for i, seq in enumerate(group):
        alone = copy.copy(seq)
        alone.edits, alone.parent = None, None
        assert torch.equal(edited(logits[i : i + 1], sampled([alone], [Draft.empty()], [0]))[0], together[i])


def many_words() -> BadWords:
    """As long as a server takes them: 1,024 of 4 KB, each with and without a space before it."""
    return of_ids(np.random.default_rng(0).integers(0, 1000, (2048, 1000)).tolist())


HEAVY: dict[str, tuple[dict[str, Any], Callable[[], BadWords | None], int]] = {
    "bad_words": ({}, many_words, 3000),
    "logit_bias": ({"logit_bias": {7 * i: 1.0 for i in range(1024)}}, lambda: None, 3000),
    "allowed_token_ids": ({"allowed_token_ids": [*range(VOCAB - 5)]}, lambda: None, 3000),
    "stop_token_ids": ({"stop_token_ids": [*range(1024)], "min_tokens": 10**6}, lambda: None, 3000),
    "penalties": ({"repetition_penalty": 1.2, "frequency_penalty": 0.1}, lambda: None, 30_000),
}


@pytest.mark.parametrize("name", HEAVY)
def test_what_a_request_asks_for_costs_no_step_much(name: str) -> None:
    """Sixteen sequences with drafts of five tokens, once each has been prepared. A step may take as long as three
    copies of its logits, and 30 ms; the 0.1 s to 1.6 s that looking everything up anew took are more anywhere."""
    params, make_words, length = HEAVY[name]
    random, words = np.random.default_rng(0), make_words()
    asked = SamplingParams(temperature=0.0, max_tokens=None, **params)
    texts = [(random.zipf(1.3, length) % VOCAB).tolist() for _ in range(16)]
    seqs = [Sequence("r", i, text, length // 2, asked, i, 10**6, bad_words=words) for i, text in enumerate(texts)]
    drafts, logits = [Draft.chain([1, 2, 3, 4, 5])] * 16, torch.randn(96, VOCAB)
    edited(logits, sampled(seqs, drafts, [*range(0, 96, 6)]))
    times, copies = [], []
    for _ in range(5):
        for seq in seqs:
            seq.tokens.append(int(random.integers(VOCAB)))
        copies.append(thread_seconds(logits.clone))
        times.append(thread_seconds(lambda: edited(logits, sampled(seqs, drafts, [*range(0, 96, 6)]))))
    assert min(times) < 3 * min(copies) + 0.03


def thread_seconds(work: Callable[[], object]) -> float:
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


def test_the_largest_request_is_received_and_added_soon() -> None:
    """On the engine's thread, which took 0.1 s for either before."""
    params = SamplingParams(n=128, allowed_token_ids=[*range(VOCAB)], logit_bias=dict.fromkeys(range(1024), 1.0))
    asked = Request(id="r", prompt_ids=[5] * 100, params=params, bad_words=many_words())
    sent = msgspec.msgpack.encode(asked)
    request = msgspec.msgpack.decode(sent, type=Command)
    assert isinstance(request, Request)
    assert request.bad_words == asked.bad_words
    limits = Limits(VOCAB, 8192, frozenset({0}))
    decoding = min(thread_seconds(lambda: msgspec.msgpack.decode(sent, type=Command)) for _ in range(3))
    adding = min(thread_seconds(lambda: sequences(request, limits)) for _ in range(3))
    assert decoding < 0.05
    assert adding < 0.05
