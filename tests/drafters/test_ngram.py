"""Prompt lookup against a rescan of the whole text, and its cost by counting."""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, strategies as st

from specserve.bench.drive import Driver, NoTarget, fault
from specserve.drafters.ngram import NgramDrafter
from specserve.errors import ConfigError
from specserve.speculation.retrieval import NGRAMS_PER_STEP
from specserve.types import SamplingParams, Sequence, Verdict

NO_TARGET: Any = NoTarget()


def make_seq(tokens: list[int], parent: Sequence | None = None) -> Sequence:
    return Sequence(
        request_id="r", index=0, tokens=list(tokens), num_prompt=len(tokens),
        params=SamplingParams(), seed=0, max_tokens=99, parent=parent,
    )  # fmt: skip


def rescan(tokens: list[int], longest: int, shortest: int, limit: int) -> tuple[list[int], int]:
    """What prompt lookup means: the longest n first, then the most recent earlier occurrence; then copy what followed,
    reading one's own copy where the text ends. Also n."""
    for size in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[len(tokens) - size :]:
                text = list(tokens)
                for i in range(limit):
                    text.append(text[start + size + i])
                return text[len(tokens) :], size
    return [], 0


TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@given(
    prompt=TEXT,
    steps=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=12),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    limit=st.integers(1, 8),
)
def test_equals_a_rescan_of_everything(
    prompt: list[int], steps: list[list[int]], sizes: tuple[int, int], limit: int
) -> None:
    drafter = Driver(NgramDrafter(NO_TARGET, prompt_lookup_max=max(sizes), prompt_lookup_min=min(sizes)))
    seq = make_seq(prompt)
    drafter.begin(seq)
    for tokens in [*steps, [0]]:
        draft = drafter.propose([seq], [limit])[0]
        expected, size = rescan(seq.tokens, max(sizes), min(sizes), limit)
        assert draft.tokens.tolist() == expected
        if expected:
            assert draft.confidence is not None
            agreeing = range(size, size + limit)  # tokens before each node that are as they were
            assert draft.confidence.tolist() == pytest.approx([n**1.5 / (n**1.5 + 2.6) for n in agreeing])
            assert fault(draft, limit, 4) is None
        assert draft.is_chain
        assert draft.q is None
        seq.tokens += tokens
        drafter.observe([seq], [Verdict(tokens, list(range(len(tokens) - 1)))])


@given(st.lists(TEXT, min_size=2, max_size=4), st.lists(st.integers(0, 3), max_size=20), st.integers(0, 3))
def test_sequences_do_not_see_each_other(prompts: list[list[int]], grow: list[int], ended: int) -> None:
    """In a batch each draft is what the sequence alone would get; skipped commits and ended others do not matter."""
    drafter = Driver(NgramDrafter(NO_TARGET))
    seqs = [make_seq(prompt) for prompt in prompts]
    for seq in seqs:
        drafter.begin(seq)
    if ended < len(seqs) - 1:
        drafter.end(seqs.pop(ended))
    for token in grow:
        for seq in seqs:
            seq.tokens.append(token)
    drafts = drafter.propose(seqs, list(range(1, len(seqs) + 1)))
    assert [draft.tokens.tolist() for draft in drafts] == [rescan(s.tokens, 4, 1, i)[0] for i, s in enumerate(seqs, 1)]


def test_an_equal_text_is_another_sequence() -> None:
    drafter = Driver(NgramDrafter(NO_TARGET))
    first, second = make_seq([1, 2, 1]), make_seq([1, 2, 1])
    drafter.begin(first)
    drafter.begin(second)
    drafter.end(first)
    assert drafter.propose([second], [2])[0].tokens.tolist() == [2, 1]


def test_end_frees_everything() -> None:
    drafter = Driver(NgramDrafter(NO_TARGET))
    seqs = [make_seq([1, 2, 1]) for _ in range(3)]
    for seq in seqs:
        drafter.begin(seq)
    for seq in seqs:
        drafter.end(seq)
    assert drafter.drafter._indexes == {}
    gc.collect()
    assert len(drafter.drafter._prompts) == 0


class CountingTokens(list):  # type: ignore[type-arg]
    """A list that counts the tokens read from it."""

    num_read = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        value = super().__getitem__(key)
        self.num_read += len(value) if isinstance(key, slice) else 1
        return value


def reads(context: int) -> tuple[int, int]:
    """Tokens read by a commit of three tokens, and by a proposal, after `context` tokens."""
    drafter = Driver(NgramDrafter(NO_TARGET, prompt_lookup_max=4, prompt_lookup_min=2))
    seq = make_seq([])
    tokens = seq.tokens = CountingTokens(range(context))
    drafter.begin(seq)
    tokens.num_read = 0
    tokens += [1, 2, 3]
    drafter.observe([seq], [Verdict([1, 2, 3], [0, 1])])
    commit, tokens.num_read = tokens.num_read, 0
    assert len(drafter.propose([seq], [5])[0]) == 5
    return commit, tokens.num_read


def test_cost_does_not_grow_with_the_context() -> None:
    assert reads(50) == reads(5000)


def many(length: int, n: int) -> list[Sequence]:
    """The completions of one request."""
    noise = random.Random(length)
    prompt = [noise.randrange(5000) for _ in range(length)]
    first = make_seq(prompt)
    return [first, *(make_seq(prompt, first) for _ in range(n - 1))]


def test_many_completions_of_a_long_prompt_begin_in_no_time_and_share_what_is_known_of_it() -> None:
    """32k tokens and n = 128: an index for each took 10 s and 1.8 GB."""
    drafter, seqs = Driver(NgramDrafter(NO_TARGET)), many(32_768, 128)
    tracemalloc.start()
    start = time.thread_time()
    for seq in seqs:
        drafter.begin(seq)
    assert time.thread_time() - start < 0.5
    (prompt,) = drafter.drafter._prompts.values()
    while prompt.last < 32_767:
        before = prompt.last
        drafter.propose(seqs, [4] * len(seqs))
        assert prompt.last - before <= NGRAMS_PER_STEP // 4
    assert tracemalloc.get_traced_memory()[1] < 150e6
    tracemalloc.stop()
    for i, seq in enumerate(seqs):
        seq.tokens += seq.tokens[200 * i : 200 * i + 4]
    drafter.observe(seqs, [Verdict([1], [])] * len(seqs))
    drafter.end(seqs[0])  # the first may end before the others
    drafts = drafter.propose(seqs[1:], [5] * 127)
    assert [draft.tokens.tolist() for draft in drafts[::25]] == [rescan(s.tokens, 4, 1, 5)[0] for s in seqs[1::25]]


def test_a_prompt_is_drafted_from_as_far_as_it_is_known() -> None:
    drafter, (seq,) = Driver(NgramDrafter(NO_TARGET, prompt_lookup_min=3)), many(20_000, 1)
    drafter.begin(seq)
    seq.tokens += seq.tokens[15_000:15_004]
    found = [len(drafter.propose([seq], [3])[0]) for _ in range(2 * 20_000 // NGRAMS_PER_STEP + 2)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (0, 3)
    assert drafter.propose([seq], [3])[0].tokens.tolist() == seq.tokens[15_004:15_007]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_lookup_min": 0}, "prompt_lookup_min is 0"),
        ({"prompt_lookup_max": True}, "prompt_lookup_max is True"),
        ({"prompt_lookup_max": 2.5}, "prompt_lookup_max is 2.5"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 4}, "prompt_lookup_min is 5 and prompt_lookup_max is 4"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Driver(NgramDrafter(NO_TARGET, **options))
