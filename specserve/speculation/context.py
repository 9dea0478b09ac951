"""What drafters are made with: the target, and a runner for a model of their own."""

from __future__ import annotations

import copy
from collections.abc import Sequence as Many
from typing import Any

import torch
from torch import Tensor

from specserve.cache.storage import KVShape
from specserve.checkpoint import catalog
from specserve.errors import ConfigError
from specserve.models.decoder import Decoder
from specserve.models.heads.loading import HeadLoader
from specserve.models.loader import load_model
from specserve.ops import AttentionRows, Ops
from specserve.runtime.pack import StepInput, padded
from specserve.runtime.runner import Runner
from specserve.speculation.asking import ON_THE_WAY
from specserve.speculation.base import MOST_MISSING, DraftInput, DraftModel, DraftOutput, HiddenInput, SequenceView
from specserve.text.tokenizer import Tokenizer
from specserve.text.vocabularies import shared_ids

LATE_MEMORY_BYTES = 4 * 2**20  # of a drafter that comes when the cache has its size: small beside what that leaves


class TargetContext:
    """A DraftContext over a loaded model. Runners that it makes wait for their KV until `bind`, after which it makes no
    more: how large the cache is has then been decided. No step of theirs has more than `max_rows` rows, or logits for
    more than `max_logit_rows`."""

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        heads: HeadLoader,
        ops: Ops,
        verification: str,
        max_rows: int,
        max_logit_rows: int,
    ) -> None:
        spec = model.spec
        self._tokenizer, self._heads = tokenizer, heads
        self.vocab_size, self.hidden_size = spec.vocab_size, spec.hidden_size
        self.num_layers, self.max_model_len = spec.num_layers, spec.max_len
        self.verification = verification
        self.memory_bytes: int | None = None
        self.ops = ops
        self._model = model
        self._sizes = max_rows, max_logit_rows
        self._runners: list[ModelRunner] = []
        self._layers: list[Tensor] | None = None  # of all runners, once they are bound
        self._unused: list[Tensor] = []  # of these, what `reopened` may give to others

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._model.embed(token_ids)

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self._model.final_norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.head(hidden)

    def load(self, model: str) -> tuple[DraftModel, Tensor | int]:
        folder = catalog.resolve(model)
        loaded = load_model(folder, self.ops)
        return loaded, shared_ids(self._tokenizer, Tokenizer(folder), loaded.spec.vocab_size, model)

    def load_head(self, name: str | None, kind: str) -> Any:
        return self._heads.load(name, kind)

    def runner(self, model: DraftModel) -> ModelRunner:
        runner = ModelRunner(model, self.ops, *self._sizes)
        if self._layers is None:
            self._runners.append(runner)
            return runner
        layers = self._unused[: len(runner.kv_shapes)]
        if [KVShape(*layer.shape[-2:]) for layer in layers] != runner.kv_shapes:
            raise ConfigError("This drafter runs a model, whose KV must be planned at the start: name it in --drafter.")
        del self._unused[: len(layers)]
        runner.bind(layers, self._block_size)
        return runner

    def reopened(self) -> TargetContext:
        """One for drafters that take the place of all that there are: their models' KV may lie where it lay so far."""
        other = copy.copy(self)
        other._unused = list(self._layers or ())
        return other

    @property
    def kv_shapes(self) -> list[KVShape]:
        """The layers that the cache must have beside the target's."""
        return [shape for runner in self._runners for shape in runner.kv_shapes]

    def bind(self, layers: list[Tensor], block_size: int) -> None:
        """Give the runners their KV: one tensor for each of `kv_shapes`."""
        left = iter(layers)
        for runner in self._runners:
            runner.bind([next(left) for _ in runner.kv_shapes], block_size)
        self._layers, self._block_size = layers, block_size
        self.memory_bytes = LATE_MEMORY_BYTES


class ModelRunner:
    """A DraftRunner over the target's slots."""

    def __init__(self, model: Any, ops: Ops, max_rows: int, max_logit_rows: int) -> None:
        spec = model.spec
        self.kv_shapes = [KVShape(spec.num_kv_heads, spec.head_dim)] * spec.num_layers
        self._model = model
        self._ops = ops
        self.most_rows, self._max_logit_rows = max_rows, max_logit_rows
        self._runner: Runner | None = None

    def bind(self, layers: list[Tensor], block_size: int) -> None:
        self._block_size = block_size
        self._runner = Runner(self._model, self._ops, layers, block_size, self.most_rows, self._max_logit_rows)

    @torch.no_grad()
    def run(self, inputs: Many[DraftInput]) -> DraftOutput:
        assert self._runner is not None, "a drafter's model runs once the engine has its cache"
        features = [each.features for each in inputs if each.features is not None]
        self._runner.start(self._packed(inputs), torch.cat(features) if features else None)
        out = self._runner.finish()
        for each in inputs:
            seq, stop = each.seq._seq, each.start + len(each.tokens)
            seq.draft_cached = max(seq.draft_cached, stop)
        count = sum(each.num_logits for each in inputs)
        return DraftOutput(out.logits[:count], out.hidden[:count], out.best[:count])

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

    def pass_over(self, seq: SequenceView, start: int) -> bool:
        state = seq._seq
        if state.draft_cached < start <= state.draft_cached + MOST_MISSING:
            state.draft_cached = start
        return start <= state.draft_cached

    def write(self, inputs: Many[HiddenInput]) -> None:
        assert self._runner is not None, "a drafter's model runs once the engine has its cache"
        rows = [DraftInput(each.seq, each.start, [0] * len(each.hidden[0]), num_logits=0) for each in inputs]
        packed = self._packed(rows)
        hidden = [torch.cat(some) for some in zip(*(each.hidden for each in inputs), strict=True)]
        self._model.write(
            hidden, packed.positions, self._runner.kv, self._ops.plan(packed.rows, self._block_size), self.most_rows
        )
        for each in rows:
            seq = each.seq._seq
            seq.draft_cached = max(seq.draft_cached, each.start + len(each.tokens))

    def _packed(self, inputs: Many[DraftInput]) -> StepInput:
        multiple = self._ops.row_multiple
        token_ids: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        starts = [0]
        parents: list[int] = []
        for each in inputs:
            count, seq = len(each.tokens), each.seq._seq
            assert each.start <= seq.draft_cached, "what stands before has KV"
            assert each.start + count <= len(seq.blocks.ids) * self._block_size, "slots are reserved"
            token_ids += each.tokens
            if each.parents is None:
                positions += range(each.start, each.start + count)
                parents += [count - 1 if each.is_block and count > 1 else -1, *range(count - 1)]
            else:
                at: list[int] = []
                for parent in each.parents:
                    at.append(at[parent] + 1 if parent >= 0 else each.start)
                positions += at
                parents += each.parents
            starts.append(len(token_ids))
            logit_rows += range(starts[-1] - each.num_logits, starts[-1])
        return StepInput(
            token_ids=padded(token_ids, multiple),
            positions=padded(positions, multiple),
            logit_rows=padded(logit_rows, multiple),
            rows=AttentionRows.pack(
                starts,
                [each.start for each in inputs],
                [each.seq._seq.blocks.ids for each in inputs],
                parents,
                multiple,
            ),
        )
