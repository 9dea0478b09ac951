"""Suffix lookup against a scan of all texts, what tenants see of each other, and its bounds."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from specserve.bench.drive import Driver, NoTarget, fault
from specserve.checkpoint import textstore
from specserve.drafters import suffix
from specserve.drafters.suffix import Place, SuffixDrafter, tree
from specserve.errors import ConfigError
from specserve.testing import path_to
from specserve.types import Draft, SamplingParams, Sequence

NO_TARGET: Any = NoTarget()


def make_seq(tokens: list[int], num_prompt: int | None = None, salt: bytes = b"") -> Sequence:
    return Sequence(
        request_id="r", index=0, tokens=list(tokens), num_prompt=num_prompt or len(tokens),
        params=SamplingParams(), seed=0, max_tokens=99, salt=salt,
    )  # fmt: skip


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """The tokens from the root to each node."""
    return [tuple(int(draft.tokens[i]) for i in path_to(draft, node)) for node in range(len(draft))]


def answer(driver: Driver, prompt: list[int], output: list[int], salt: bytes = b"") -> None:
    """A request that comes and ends, and a later one in whose step there is time to take its answer in."""
    seq = make_seq(prompt + output, len(prompt), salt)
    driver.begin(seq)
    driver.propose([seq], [5])
    driver.end(seq)
    other = make_seq([0], salt=b"nobody")
    driver.begin(other)
    driver.propose([other], [5])
    driver.end(other)


def likely(places: list[Place]) -> tuple[dict[tuple[int, ...], float], dict[tuple[int, ...], float]]:
    """What `tree` means: the probability of every continuation, and that of its last token given the others."""
    weights: dict[tuple[int, ...], float] = {}
    longest: dict[tuple[int, ...], int] = {}
    for place in places:
        for length in range(1, len(place.following) + 1):
            path = tuple(place.following[:length])
            weights[path] = weights.get(path, 0.0) + place.length**2
            longest[path] = max(longest.get(path, 0), place.length + length - 1)
    probabilities: dict[tuple[int, ...], float] = {(): 1.0}
    given = {}
    for path in sorted(weights, key=len):
        whole = sum(w for other, w in weights.items() if other[:-1] == path[:-1])
        given[path] = weights[path] / whole * longest[path] ** 1.5 / (longest[path] ** 1.5 + 2.6)
        probabilities[path] = probabilities[path[:-1]] * given[path]
    del probabilities[()]
    return probabilities, given


def likeliest(places: list[Place], most: int) -> set[tuple[int, ...]]:
    probabilities, _ = likely(places)
    lowest = sorted(probabilities.values(), reverse=True)[:most][-1:]
    return {path for path, probability in probabilities.items() if lowest and probability >= lowest[0] * (1 - 1e-12)}


PLACES = st.lists(st.builds(Place, st.integers(1, 9), st.lists(st.integers(0, 2), min_size=1, max_size=4)), max_size=6)


@given(places=PLACES, most=st.integers(1, 12))
def test_a_tree_has_the_likeliest_continuations(places: list[Place], most: int) -> None:
    draft = tree(places, most)
    found = paths(draft)
    assert len(set(found)) == len(found), "siblings differ"
    assert all(parent < node for node, parent in enumerate(draft.parents.tolist()))
    possible = likeliest(places, most)
    assert set(found) <= possible
    assert len(found) == min(most, len(likeliest(places, 10**6)))
    _, given = likely(places)
    assert draft.confidence is not None
    assert draft.confidence.tolist() == pytest.approx([given[path] for path in found])
    assert fault(draft, most, 3) is None


def places_in(text: list[int], newest: list[int], most: int) -> list[Place]:
    """Every place of a text with the newest pair, the last first; nothing follows its end."""
    found = []
    for at in range(len(text) - 1, 0, -1):
        if text[at - 1 : at + 1] == newest[-2:]:
            length = 2
            while length < min(at + 1, len(newest)) and text[at - length] == newest[-1 - length]:
                length += 1
            found.append(Place(length, text[at + 1 : at + 1 + most]))
    return found


@given(
    pieces=st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=5),
    newest=st.lists(st.integers(0, 2), min_size=2, max_size=8),
    most=st.integers(1, 5),
)
@example(pieces=[[0] * 14], newest=[0, 0], most=1)  # more places than are looked at, of which one is the end
def test_places_are_those_of_a_scan(pieces: list[list[int]], newest: list[int], most: int) -> None:
    text, source = textstore.Text(), []
    for piece in pieces:
        source += piece
        text.extend(source, len(source))
    looked_at = places_in(source, newest, most)[: textstore._MOST_PLACES]
    assert list(text.places(newest, most)) == [place for place in looked_at if place.following]


def test_a_loop_is_continued_past_its_end() -> None:
    driver = Driver(SuffixDrafter(NO_TARGET))
    seq = make_seq([9, 1, 2, 3, 1, 2, 3, 1, 2])
    driver.begin(seq)
    seq.tokens += [3]
    (draft,) = driver.propose([seq], [7])
    assert paths(draft)[-1] == (1, 2, 3, 1, 2, 3, 1)


def test_an_answer_is_continued_as_an_earlier_one_of_the_tenant() -> None:
    driver = Driver(SuffixDrafter(NO_TARGET))
    answer(driver, [50, 51], [60, 61, 62, 63, 64, 65], salt=b"a")
    for salt, expected in ((b"a", [62, 63, 64, 65]), (b"b", []), (b"", [])):
        seq = make_seq([70, 60, 61], salt=salt)
        driver.begin(seq)
        (draft,) = driver.propose([seq], [8])
        driver.end(seq)
        assert draft.tokens.tolist() == expected, "a tenant's answers are its own"


def test_nothing_of_one_tenant_is_in_another_ones_drafts() -> None:
    """Tenant i writes tokens 10 i to 10 i + 9 alone, in random orders, beside each other."""
    rng = random.Random(0)
    driver = Driver(SuffixDrafter(NO_TARGET))
    num_drafted = 0
    for _ in range(40):
        seqs = [make_seq([10 * i + rng.randrange(10) for _ in range(12)], 4, salt=bytes([i])) for i in range(5)]
        for seq in seqs:
            driver.begin(seq)
        drafts = driver.propose(seqs, [6] * 5)
        for i, (seq, draft) in enumerate(zip(seqs, drafts, strict=True)):
            assert all(token // 10 == i for token in draft.tokens.tolist())
            num_drafted += len(draft)
            driver.end(seq)
    assert num_drafted > 500


def test_a_store_has_a_bound_and_forgets_what_was_not_used_for_longest() -> None:
    store = textstore.TextStore(100 * textstore._BYTES_PER_TOKEN)
    for i in range(30):
        store.add(bytes([i % 3]), list(range(20)))
        store.take(1000)
        assert sum(len(tenant) for tenant in store._tenants.values()) == store._num_tokens <= 100
    assert store.texts(b"\2"), "the newest is there"
    store.add(b"new", list(range(45)))
    store.take(1000)
    assert b"\2" in store._tenants
    assert b"\0" not in store._tenants


def test_a_store_of_no_size_keeps_nothing() -> None:
    driver = Driver(SuffixDrafter(NO_TARGET, store_mib=0))
    answer(driver, [50, 51], [60, 61, 62, 63])
    seq = make_seq([70, 60, 61])
    driver.begin(seq)
    assert not len(driver.propose([seq], [8])[0])


def test_what_waits_to_be_taken_in_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(textstore, "_MOST_WAITING", 100)
    store = textstore.TextStore(10_000 * textstore._BYTES_PER_TOKEN)
    for _ in range(50):
        store.add(b"", list(range(30)))
    assert sum(len(tokens) for _, tokens in store._waiting) == store._num_waiting <= 100


def test_a_step_takes_in_so_much_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of long prompts and ended answers together; the completions of one request share its prompt."""
    monkeypatch.setattr(suffix, "_TAKEN_PER_STEP", 64)
    driver = Driver(SuffixDrafter(NO_TARGET))
    long = make_seq(list(range(1000)))
    twin = make_seq(list(range(1000)))
    twin.parent = long
    for seq in (long, twin):
        driver.begin(seq)
    for step in range(1, 20):
        driver.propose([long, twin], [5, 5])
        prompts = {id(prompt): len(prompt) for prompt, *_ in driver.drafter._texts.values()}  # type: ignore[attr-defined]
        assert list(prompts.values()) == [min(1000, 64 * step)]
        for seq in (long, twin):
            seq.tokens.append(7)


@pytest.mark.parametrize("size", [-1, "64", True, float("nan"), 2**20])
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match="store_mib"):
        SuffixDrafter(NO_TARGET, store_mib=size)
