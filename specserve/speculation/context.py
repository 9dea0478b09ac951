"""What drafters are made with: the target, and a runner for a model of their own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import Tensor

from specserve.cache.storage import KVShape
from specserve.checkpoint import catalog
from specserve.errors import ConfigError
from specserve.models.heads.loading import HeadLoader
from specserve.models.loader import AnyModel, load_model
from specserve.models.spec import ModelSpec
from specserve.ops import Ops
from specserve.runtime.runner import Model
from specserve.speculation.constants import LATE_MEMORY_BYTES
from specserve.speculation.model_runner import ModelRunner
from specserve.text.tokenizer import Tokenizer
from specserve.text.vocabularies import SharedVocabulary, shared_vocabulary


class TargetContext:
    """A ModelContext over a loaded model. Runners that it makes wait for their KV until `bind`, after which it makes no
    more: how large the cache is has then been decided. No step of theirs has more than `max_rows` rows, or logits for
    more than `max_logit_rows`."""

    def __init__(
        self,
        model: AnyModel,
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
        self._head: Any = None  # that every drafter is given
        self.sources: list[tuple[str, Path]] = []  # of what is bound: its kind and the folder it was read from

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._model.embed(token_ids)

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self._model.final_norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.head(hidden)

    def load(self, model: str) -> tuple[Model, SharedVocabulary]:
        folder = catalog.resolve(model)
        loaded = load_model(folder, self.ops)
        if self._layers is None:
            self.sources.append(("model", folder))
        sizes = self.vocab_size, loaded.spec.vocab_size
        return loaded, shared_vocabulary(self._tokenizer, Tokenizer(folder), sizes, model)

    def load_head(self, name: str | None, kind: str) -> Any:
        if self._head is not None:
            return self._head
        if self._layers is None:
            self.sources.append((kind, self._heads.folder(name, kind)))
        return self._heads.load(name, kind)

    def head_kind(self, name: str) -> str:
        """Of the head in a folder. Raises ModelError for what is none, and one that cannot be read."""
        return self._heads.kind(name)

    def has_head(self, name: str | None, kind: str) -> bool:
        return self._heads.has(name, kind)

    def runner(self, model: Model, reads: Tensor | None = None) -> ModelRunner:
        num_ids = min(self.vocab_size, model.spec.vocab_size) if isinstance(model, AnyModel) else self.vocab_size
        ops = getattr(model, "ops", self.ops)  # one that runs op by op has its own
        runner = ModelRunner(model, ops, *self._sizes, num_ids if reads is None else len(reads), reads)
        if self._layers is None:
            if self._runners:
                raise ConfigError(
                    "Two models with KV of their own cannot draft in one engine: of a sequence it is known how much "
                    "has such KV, and not whose. Name one drafter that runs a model."
                )
            self._runners.append(runner)
            return runner
        layers = self._unused[: len(runner.kv_shapes)]
        if [KVShape(*layer.shape[-2:]) for layer in layers] != runner.kv_shapes:
            raise ConfigError("This drafter runs a model, whose KV must be planned at the start: name it in --drafter.")
        self._unused = []  # what is left is for no second one
        runner.bind(layers, self._block_size)
        return runner

    def reopened(self, head: Any = None) -> TargetContext:
        """One for drafters that take the place of all that there are: their models' KV may lie where it lay so far.
        With `head` that is the one that they draft with, wherever theirs would lie."""
        other = copy.copy(self)
        other._unused, other._head = list(self._layers or ()), head
        return other

    @property
    def spec(self) -> ModelSpec:
        """The target's."""
        return self._model.spec

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
