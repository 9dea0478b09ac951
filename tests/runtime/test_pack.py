"""The packer: rows of chains, trees and blocks lie as their sequences say, and a step's as its schedule does."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from hypothesis import given, strategies as st

from specserve.runtime.pack import SequenceRows, Step, pack, pack_step
from specserve.types import BlockTable, Draft, SamplingParams, ScheduledSeq, Sequence


@st.composite
def rows_of_a_sequence(draw: Any) -> SequenceRows:
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9))
    count = len(tokens)
    kind = draw(st.sampled_from(["chain", "tree", "block"]))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)] if kind == "tree" else None
    blocks: Any = draw(st.lists(st.integers(1, 2**31 - 1), max_size=5))
    num_logits = draw(st.integers(0, count))
    scored = range(*sorted(draw(st.tuples(st.integers(0, count), st.integers(0, count)))))
    start = draw(st.integers(0, 2**20))
    blocks = array("i", blocks) if draw(st.booleans()) else blocks
    return SequenceRows(tokens, start, blocks, parents, num_logits, scored, kind == "block")


def depth(parents: list[int], node: int) -> int:
    return 0 if parents[node] < 0 else 1 + depth(parents, parents[node])


@given(st.lists(rows_of_a_sequence(), min_size=1, max_size=5), st.sampled_from([1, 4, 16]))
def test_rows_lie_as_their_sequences_say(seqs: list[SequenceRows], multiple: int) -> None:
    packed = pack(seqs, multiple)
    rows, num_rows = packed.rows, sum(len(each.tokens) for each in seqs)
    assert len(packed.token_ids) == len(packed.positions) == rows.num_rows == -(-num_rows // multiple) * multiple
    assert {each.dtype for each in (packed.token_ids, packed.positions, packed.logit_rows)} == {np.dtype(np.int64)}
    assert not packed.token_ids[num_rows:].any()
    assert not packed.positions[num_rows:].any()
    logit_rows, scored = [], []
    for s, each in enumerate(seqs):
        first, stop = rows.query_starts[s : s + 2].tolist()
        count = len(each.tokens)
        parents = list(range(-1, count - 1)) if each.parents is None else list(each.parents)
        assert packed.token_ids[first:stop].tolist() == list(each.tokens)
        assert packed.positions[first:stop].tolist() == [each.start + depth(parents, i) for i in range(count)]
        assert rows.is_block(s) == (each.is_block and count > 1)
        assert rows.parents[first + 1 : stop].tolist() == parents[1:]
        assert rows.parents[first] == (count - 1 if each.is_block and count > 1 else -1)
        assert rows.cached[s] == each.start
        table = rows.block_tables[s].tolist()
        assert table == [*each.blocks, *[0] * (len(table) - len(each.blocks))]
        logit_rows += range(stop - each.num_logits, stop)
        scored += [first + i for i in each.scored]
    wanted = logit_rows + scored
    assert packed.logit_rows.tolist() == wanted + [0] * (-len(wanted) % multiple)
    arrays = rows.query_starts, rows.cached, rows.block_tables, rows.parents
    assert {each.dtype for each in arrays} == {np.dtype(np.int32)}


def scheduled(tokens: list[int], start: int, draft: Draft, **params: Any) -> ScheduledSeq:
    seq = Sequence("a", 0, tokens, len(tokens), SamplingParams(**params), seed=1, max_tokens=9)
    seq.blocks, seq.cached = BlockTable(array("i", [len(tokens)])), start
    num_new = len(tokens) - start
    return ScheduledSeq(seq, start, num_new, sampled=True, draft=draft)


def test_a_step_has_what_was_scheduled_in_its_order() -> None:
    tree = Draft(np.array([7, 8, 9], np.int32), np.array([-1, -1, 0], np.int32))
    chunk = scheduled([1, 2, 3, 4], 1, Draft.empty(), prompt_logprobs=0)
    chunk.num_new, chunk.sampled = 2, False
    seqs = [scheduled([10, 11, 12], 2, Draft.chain([5, 6])), chunk, scheduled([20, 21, 22], 1, tree)]
    packed, scored = pack_step(Step(seqs, 0, 0), 4)
    assert packed.token_ids.tolist() == [12, 5, 6, 2, 3, 21, 22, 7, 8, 9, 0, 0]
    assert packed.positions.tolist() == [2, 3, 4, 1, 2, 1, 2, 3, 3, 4, 0, 0]
    assert packed.rows.parents.tolist() == [-1, 0, 1, -1, 0, -1, 0, 1, 1, 2]
    assert packed.logit_rows.tolist() == [0, 1, 2, 6, 7, 8, 9, 3, 4, 0, 0, 0]
    assert [each.first_row for each in seqs] == [0, 3, 5]
    assert (seqs[0].logits_start, seqs[2].logits_start) == (0, 3)
    assert scored == [chunk.seq]
    assert packed.sampling.scored == [([3, 4], 0)]
    asked = [(each.draft, each.position, each.logits_start) for each in packed.sampling.seqs]
    assert asked == [(seqs[0].draft, 3, 0), (tree, 3, 3)]
