"""Token Recycling against a plain dictionary, what tenants see of each other, and its bound."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from specserve.bench.drive import Driver, NoTarget, fault
from specserve.drafters import recycle
from specserve.drafters.recycle import RecycleDrafter
from specserve.errors import ConfigError
from specserve.testing import path_to
from specserve.types import Draft, Ids, SamplingParams, Sequence, Verdict

NO_TARGET: Any = NoTarget()


def make_seq(tokens: list[int], salt: bytes = b"") -> Sequence:
    return Sequence(
        request_id="r", index=0, tokens=list(tokens), num_prompt=len(tokens),
        params=SamplingParams(), seed=0, max_tokens=99, salt=salt,
    )  # fmt: skip


def begun(driver: Driver, tokens: list[int], salt: bytes = b"") -> Sequence:
    seq = make_seq(tokens, salt)
    driver.begin(seq)
    return seq


def rows(*ids: list[int]) -> Ids:
    return np.array(ids, np.int32)


def say(driver: Driver, seq: Sequence, tokens: list[int], top: Ids, draft: Draft | None = None, path: Any = ()) -> None:
    seq.tokens += tokens
    driver.observe([seq], [Verdict(tokens, list(path))], None if draft is None else [draft], top)


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """The tokens from the root to each node."""
    return [tuple(int(draft.tokens[i]) for i in path_to(draft, node)) for node in range(len(draft))]


def known(driver: Driver, token: int, salt: bytes = b"") -> set[int]:
    """All that is known to follow a token."""
    seq = begun(driver, [token], salt)
    (draft,) = driver.propose([seq], [200])
    driver.end(seq)
    return {path[0] for path in paths(draft) if len(path) == 1}


def test_what_followed_a_token_is_what_the_target_last_said_of_it() -> None:
    driver = Driver(RecycleDrafter(NO_TARGET, top_k=3))
    seq = begun(driver, [9, 1])
    assert not len(driver.propose([seq], [8])[0]), "nothing is known yet"
    say(driver, seq, [5], rows([5, 6, 7]))
    assert known(driver, 1) == {5, 6, 7}
    say(driver, seq, [1], rows([1, 6, 8]))
    say(driver, seq, [6], rows([4, 6, 2]))
    assert known(driver, 1) == {4, 6, 2}
    assert known(driver, 5) == {1, 6, 8}
    assert known(driver, 9) == set()


def test_rejected_nodes_say_what_follows_them_and_the_sequences_own_tokens_say_it_last() -> None:
    driver = Driver(RecycleDrafter(NO_TARGET, top_k=2))
    seq = begun(driver, [1])
    draft = Draft(rows([2, 3, 1, 2])[0], rows([-1, -1, 1, 1])[0])
    top = rows([3, 10], [20, 21], [2, 30], [40, 41], [50, 51])  # of token 1, then of the nodes 2, 3, 1, 2
    say(driver, seq, [3, 2, 7], top, draft, path=[1, 3])
    assert known(driver, 1) == {3, 10}, "and not of the node that was rejected"
    assert known(driver, 2) == {50, 51}
    assert known(driver, 3) == {2, 30}


def test_rows_that_are_not_finite_say_nothing() -> None:
    driver = Driver(RecycleDrafter(NO_TARGET, top_k=2))
    seq = begun(driver, [1])
    say(driver, seq, [2], rows([2, 3]))
    say(driver, seq, [4], rows([-1, -1], [6, 7], [-1, -1]), Draft.chain([8, 1]))
    assert [known(driver, token) for token in (1, 2, 8)] == [{2, 3}, set(), {6, 7}]
    say(driver, seq, [9], rows([-1, -1]))
    assert known(driver, 4) == set()


@given(st.data())
def test_a_table_is_a_dictionary(data: st.DataObject) -> None:
    """Any steps of several sequences with trees: of every token the last row, rejected nodes before the others."""
    driver, seqs, expected = Driver(RecycleDrafter(NO_TARGET, top_k=3)), [], {}
    ids = st.integers(0, 5) | st.sampled_from([255, 256, 300, 5000])
    seqs = [begun(driver, [data.draw(ids)]) for _ in range(data.draw(st.integers(1, 3)))]
    for _ in range(data.draw(st.integers(1, 4))):
        drafts, verdicts, top, kept = [], [], [], {}
        for seq in seqs:
            tokens = data.draw(st.lists(ids, max_size=4, unique=True))
            parents = [data.draw(st.integers(-1, node - 1)) for node in range(len(tokens))]
            draft = Draft(np.array(tokens, np.int32), np.array(parents, np.int32))
            path = path_to(draft, data.draw(st.integers(-1, len(draft) - 1)))
            said = [*(tokens[node] for node in path), data.draw(ids)]
            for node in (-1, *range(len(draft))):
                row = data.draw(st.lists(st.integers(0, 5000), min_size=3, max_size=3, unique=True))
                top.append(row if data.draw(st.booleans()) else [-1] * 3)
                token = seq.tokens[-1] if node < 0 else tokens[node]
                if top[-1][0] >= 0:
                    kept.setdefault(token, []).append(({-1, *path} >= {node}, len(drafts), top[-1]))
            seq.tokens += said
            drafts.append(draft)
            verdicts.append(Verdict(said, path))
        driver.observe(seqs, verdicts, drafts, np.array(top, np.int32))
        last = {token: max(i for _, i, _ in found) for token, found in kept.items()}  # a step's last sequence with it
        for token, found in kept.items():
            own = [each for each in found if each[1] == last[token]]
            expected[token] = [row for is_kept, _, row in own if is_kept == max(k for k, _, _ in own)]
    for token, candidates in expected.items():
        assert known(driver, token) in [set(row) for row in candidates]
    assert all(not known(driver, token) for token in range(6) if token not in expected)


def likeliest(table: Any, token: int, most: int) -> dict[tuple[int, ...], float]:
    """By their definition: each path's probability, down to a depth that `most` nodes cannot exceed."""
    found: dict[tuple[int, ...], float] = {}
    level = [((), token, 1.0)]
    for _ in range(min(most, 6)):
        level = [
            ((*path, child), child, probability * chance)
            for path, last, probability in level
            for chance, child in table.children(last)
        ]
        found |= {path: probability for path, _, probability in level}
    return found


@given(seed=st.integers(0, 99), most=st.integers(1, 6))
def test_a_tree_has_the_likeliest_nodes(seed: int, most: int) -> None:
    rng = random.Random(seed)
    driver = Driver(RecycleDrafter(NO_TARGET, top_k=3))
    seq = begun(driver, [0])
    for _ in range(60):
        row = rng.sample(range(6), 3)
        say(driver, seq, [rng.choice([*row, row[0], rng.randrange(6)])], rows(row))
    (draft,) = driver.propose([seq], [most])
    assert fault(draft, most, 6) is None, "siblings differ, confidence is from 0 to 1"
    probabilities = likeliest(driver.drafter._tables[b""], seq.tokens[-1], most)  # type: ignore[attr-defined]
    found = paths(draft)
    assert len(set(found)) == len(found) == most
    assert draft.confidence is not None
    lowest = sorted(probabilities.values(), reverse=True)[most - 1]
    for node, path in enumerate(found):
        product = np.prod(draft.confidence[path_to(draft, node)].astype(float))
        assert product == pytest.approx(probabilities[path], rel=1e-5)
        assert product >= lowest * (1 - 1e-5)


@pytest.mark.parametrize(("came", "kind"), [(11, 1), (12, 2), (13, 2), (14, 3), (99, 3)])
def test_what_came_the_last_time_says_how_likely_ranks_are(came: int, kind: int) -> None:
    driver = Driver(RecycleDrafter(NO_TARGET, top_k=4))
    seq = begun(driver, [5])
    row = [11, 12, 13, 14]
    for said in (12, came):
        say(driver, seq, [5], rows(row))  # the sequence is 5 5 ... and each 5 is read again
        say(driver, seq, [said], rows(row))
        say(driver, seq, [5], rows(row))
    (draft,) = driver.propose([seq], [1])
    assert draft.tokens.tolist() == [11]
    assert draft.confidence is not None
    assert draft.confidence[0] == pytest.approx(recycle._CHANCES[kind][0])


def test_a_repeated_text_is_drafted() -> None:
    driver = Driver(RecycleDrafter(NO_TARGET, top_k=2))
    text = [3, 8, 5, 1, 9, 2]
    seq = begun(driver, [text[0]])
    for token in [*text[1:], text[0]]:
        say(driver, seq, [token], rows([token, 77]))
    (draft,) = driver.propose([seq], [9])
    assert (8, 5, 1, 9) in paths(draft)


def test_a_private_request_keeps_its_table_until_its_last_completion_ends() -> None:
    driver = Driver(RecycleDrafter(NO_TARGET, top_k=2))
    first = make_seq([1])
    group = [first, *(dataclasses.replace(first, tokens=[1], parent=first, index=i) for i in (1, 2))]
    for seq in group:
        seq.private = True
        driver.begin(seq)
    for i, seq in enumerate(group):
        say(driver, seq, [2 + i], rows([5 + i, 9]))
    driver.end(group[1])
    driver.end(first)
    group[2].tokens.append(1)
    (draft,) = driver.propose([group[2]], [8])
    assert {path[0] for path in paths(draft)} == {7, 9}, "what was last said of token 1"
    driver.end(group[2])
    drafter: Any = driver.drafter
    assert (len(drafter._tables), drafter._num_bytes, len(drafter._num_open)) == (0, 0, 0)


def test_nothing_of_one_tenant_is_in_another_ones_drafts() -> None:
    """Tenant i reads and says tokens 10 i to 10 i + 9 alone, beside the others; the tables outlive the sequences."""
    rng = random.Random(0)
    driver = Driver(RecycleDrafter(NO_TARGET, top_k=4))
    num_drafted = 0
    for _ in range(20):
        seqs = [begun(driver, [10 * i + rng.randrange(10)], bytes([i])) for i in range(5)]
        for _ in range(6):
            drafts = driver.propose(seqs, [6] * 5)
            verdicts, top = [], []
            for i, (seq, draft) in enumerate(zip(seqs, drafts, strict=True)):
                assert all(token // 10 == i for token in draft.tokens.tolist())
                num_drafted += len(draft)
                top += [rng.sample(range(10 * i, 10 * i + 10), 4) for _ in range(1 + len(draft))]
                verdicts.append(Verdict([10 * i + rng.randrange(10)], []))
                seq.tokens += verdicts[-1].tokens
            driver.observe(seqs, verdicts, drafts, np.array(top, np.int32))
        for seq in seqs:
            driver.end(seq)
    assert num_drafted > 2000
    # Not a byte of it depends on the others: tenant 0 alone, told the same, drafts the same.
    again = Driver(RecycleDrafter(NO_TARGET, top_k=4))
    for company in (b"b", b"c"):
        for kept in (driver, again):
            seq = begun(kept, [1], b"new")
            say(kept, seq, [2], rows([2, 3, 4, 5]))
            kept.end(seq)
        say(driver, begun(driver, [2], company), [90], rows([90, 91, 92, 93]))
    drafts = [kept.propose([begun(kept, [1], b"new")], [20])[0] for kept in (driver, again)]
    assert drafts[0].tokens.tolist() == drafts[1].tokens.tolist()
    assert drafts[0].confidence is not None
    assert drafts[1].confidence is not None
    assert drafts[0].confidence.tolist() == drafts[1].confidence.tolist()


def test_tables_have_a_bound_and_the_least_recently_used_goes_first() -> None:
    drafter = RecycleDrafter(NO_TARGET, top_k=8, table_mib=0.17)
    driver = Driver(drafter)
    rng = np.random.default_rng(0)
    peak = 0

    def tell(salt: bytes, count: int) -> None:
        nonlocal peak
        for token in rng.integers(0, 3000, count).tolist():
            seq = begun(driver, [token], salt)
            say(driver, seq, [1], rng.integers(0, 3000, (1, 8)).astype(np.int32))
            driver.end(seq)
        held = sum(table.num_bytes for table in drafter._tables.values())
        assert held == drafter._num_bytes <= drafter.needs.memory_bytes
        peak = max(peak, held)

    for turn in range(40):
        tell(bytes([turn % 8]), 60)
    assert peak > drafter.needs.memory_bytes / 2, "it is used"
    assert bytes([0]) not in drafter._tables
    assert bytes([7]) in drafter._tables
    oldest, second, *_ = drafter._tables
    tell(oldest, 1)
    while second in drafter._tables:
        tell(b"newcomer", 20)
    assert oldest in drafter._tables
    tell(b"large", 9000)
    tell(b"small", 1)
    assert b"small" in drafter._tables


def test_a_table_takes_about_forty_bytes_a_token() -> None:
    drafter = RecycleDrafter(NO_TARGET, top_k=8)
    driver = Driver(drafter)
    for token in range(4000):
        say(driver, begun(driver, [token]), [1], rows(list(range(8))))
    assert 4000 * 36 < drafter._num_bytes < 4000 * 2 * 40 + 8192


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": 17}, "from 1 to 16"),
        ({"top_k": True}, "top_k is True"),
        ({"top_k": 2.0}, "top_k is 2.0"),
        ({"table_mib": 0}, "table_mib is 0"),
        ({"table_mib": "9"}, "table_mib is '9'"),
        ({"table_mib": float("nan")}, "table_mib is nan"),
    ],
)
def test_options_out_of_range_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RecycleDrafter(NO_TARGET, **options)


def test_a_small_vocabulary_has_fewer_best_tokens() -> None:
    target = NoTarget()
    target.vocab_size = 5
    assert RecycleDrafter(target, top_k=8).needs.top_k == 5  # type: ignore[arg-type]
