"""Runs a drafter's model over the target's slots, in layers of KV of its own."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specserve.cache.storage import KVShape
from specserve.models.heads.chain_writer import ChainWriter
from specserve.ops import Ops
from specserve.ops.rows import padded_tables
from specserve.runtime.pack import SequenceRows, StepInput, pack
from specserve.runtime.runner import Runner
from specserve.speculation.base import SequenceView
from specserve.speculation.constants import ON_THE_WAY
from specserve.speculation.draft_sampler import ChainDraft, DraftSampler
from specserve.speculation.models import MOST_MISSING, DraftInput, DraftOutput, HiddenInput


class ModelRunner:
    """A DraftRunner over the target's slots, for tokens below `num_ids`. What it is asked may be anybody's: ValueError
    for what native code would follow out of bounds."""

    def __init__(
        self, model: Any, ops: Ops, max_rows: int, max_logit_rows: int, num_ids: int, reads: Tensor | None = None
    ) -> None:
        self.kv_shapes: list[KVShape] = model.spec.kv_shapes
        self._model = model
        self._num_ids = num_ids
        self._ops = ops
        self._reads = None if reads is None else reads.numpy()
        self.most_rows, self._max_logit_rows = max_rows, max_logit_rows
        self._runner: Runner | None = None
        self._writer: ChainWriter | None = None

    def bind(self, layers: list[Tensor], block_size: int) -> None:
        self._block_size = block_size
        self._runner = Runner(self._model, self._ops, layers, block_size, self.most_rows, self._max_logit_rows)

    def write_chains(self, chains: Many[ChainDraft], out: DraftOutput, sampler: DraftSampler) -> bool:
        if not self._ops.records:
            return False
        if self._writer is None:
            assert self._runner is not None, "a drafter's model runs once the engine has its cache"
            hashed = sampler.hashed(self._model.spec.vocab_size, self._model.ids)
            self._writer = ChainWriter(self._model, self._runner.kv, self._block_size, hashed)
        seqs, most = [chain.seq for chain in chains], [chain.most for chain in chains]
        starts = np.array([len(seq.tokens) - 1 for seq in seqs], np.int32)
        for seq, start, count in zip(seqs, starts.tolist(), most, strict=True):
            self._placed(DraftInput(seq, start, [0] * count, is_scratch=True))
        tables = padded_tables([seq._seq.blocks.ids for seq in seqs])
        how = sampler.arrays(seqs, range(max(most)))
        said = out.logits, out.hidden
        self._writer.write(said, out.is_replayed, starts, tables, *how, lambda i, *drawn: chains[i].take(*drawn))
        return True

    @torch.no_grad()
    def run(self, inputs: Many[DraftInput]) -> DraftOutput:
        assert self._runner is not None, "a drafter's model runs once the engine has its cache"
        features = [each.features for each in inputs if each.features is not None]
        self._runner.start(self._packed(inputs), torch.cat(features) if features else None)
        out = self._runner.finish()
        for each in inputs:
            if not each.is_scratch:
                seq, stop = each.seq._seq, each.start + len(each.tokens)
                seq.draft_cached = max(seq.draft_cached, stop)
        count = sum(each.num_logits for each in inputs)
        return DraftOutput(out.logits[:count], out.hidden[:count], out.best[:count], out.is_replayed)

    def catch_up(self, seqs: Many[SequenceView]) -> None:
        left = [seq for seq in seqs if seq.num_draft_cached < seq.num_cached]
        while left:
            inputs: list[DraftInput] = []
            room = self.most_rows
            for seq in left:
                start = seq.num_draft_cached
                count = min(room, seq.num_cached - start)
                if count:
                    inputs.append(DraftInput(seq, start, seq.tokens[start : start + count], num_logits=0))
                    room -= count
            self.run(inputs)
            left = [seq for seq in left if seq.num_draft_cached < seq.num_cached]

    def read(self, seqs: Many[SequenceView]) -> DraftOutput:
        lacking = [len(seq.tokens) - 1 - seq.num_draft_cached for seq in seqs]
        if max(lacking) > ON_THE_WAY or sum(lacking) + len(seqs) > self.most_rows:
            self.catch_up(seqs)
        starts = [min(seq.num_draft_cached, len(seq.tokens) - 1) for seq in seqs]
        return self.run([DraftInput(seq, at, seq.tokens[at:]) for seq, at in zip(seqs, starts, strict=True)])

    def skip_missing_kv(self, seq: SequenceView, start: int) -> bool:
        state = seq._seq
        if state.draft_cached < start <= state.draft_cached + MOST_MISSING:
            state.draft_cached = start
        return start <= state.draft_cached

    def write(self, inputs: Many[HiddenInput]) -> Tensor:
        assert self._runner is not None, "a drafter's model runs once the engine has its cache"
        rows = [DraftInput(each.seq, each.start, [0] * len(each.hidden[0]), num_logits=0) for each in inputs]
        packed = self._packed(rows)
        parts = zip(*(each.hidden for each in inputs), strict=True)
        hidden = [some[0] if len(some) == 1 else torch.cat(some) for some in parts]
        plan = self._ops.plan(packed.rows, self._block_size)
        states: Tensor = self._model.write(hidden, packed.positions, self._runner.kv, plan, self.most_rows)
        for each in rows:
            seq = each.seq._seq
            seq.draft_cached = max(seq.draft_cached, each.start + len(each.tokens))
        return states

    def _placed(self, each: DraftInput) -> list[int] | None:
        """Its parents, None for a chain. Raises ValueError where it has no place behind what is there."""
        count, seq = len(each.tokens), each.seq._seq
        room = min(len(seq.blocks.ids) * self._block_size, self._model.spec.max_len)
        if not (each.start >= 0 and each.start + count <= room and 0 <= each.num_logits <= count):
            raise ValueError(f"{count} tokens from {each.start} on are not among the {room} that there is room for.")
        if each.start > seq.draft_cached and not each.is_scratch:
            raise ValueError(f"The tokens from {seq.draft_cached} to {each.start} must be computed first.")
        if each.parents is None:
            return None
        parents = list(each.parents)
        if len(parents) != count or any(not -1 <= parent < node for node, parent in enumerate(parents)):
            raise ValueError("Each token of a tree follows an earlier one, or -1.")
        return parents

    def _packed(self, inputs: Many[DraftInput]) -> StepInput:
        rows = [
            SequenceRows(
                each.tokens,
                each.start,
                each.seq._seq.blocks.ids,
                self._placed(each),
                each.num_logits,
                is_block=each.is_block,
            )
            for each in inputs
        ]
        if any(each.tokens and not 0 <= min(each.tokens) <= max(each.tokens) < self._num_ids for each in rows):
            raise ValueError(f"A drafter's model reads tokens from 0 to {self._num_ids - 1}, no others.")
        if sum(len(each.tokens) for each in rows) > self.most_rows:
            raise ValueError(f"A drafter's model reads at most {self.most_rows} tokens at once.")
        if sum(each.num_logits for each in rows) > self._max_logit_rows:
            raise ValueError(f"A drafter's model gives logits of at most {self._max_logit_rows} tokens at once.")
        packed = pack(rows, self._ops.row_multiple)
        if self._reads is not None:
            packed.token_ids = self._reads[packed.token_ids]
        return packed
