"""The target while a head is trained: its hidden states and distributions, computed as it will serve."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.errors import ConfigError
from specserve.machine.cores import default_threads
from specserve.models.decoder import Decoder
from specserve.models.heads.origin import TargetOrigin
from specserve.models.heads.spec import TargetShape
from specserve.models.loader import load_model, native_spec
from specserve.models.lora import Adapter
from specserve.models.rounding import as_stored
from specserve.ops import Ops
from specserve.ops.choice import choose_ops
from specserve.ops.device import choose_device
from specserve.runtime.pack import SequenceRows, pack
from specserve.runtime.runner import Runner

_BLOCK_SIZE = 16
_LOGITS_BYTES = 2**27  # of one piece


class Target:
    """A model, with an adapter perhaps, whose residual stream can be read behind any layer. `max_length` is that of the
    longest sequence it will be given, in tokens. Raises ModelError, ConfigError and CapacityError as an engine does."""

    def __init__(
        self,
        folder: Path,
        max_length: int,
        *,
        adapter: Adapter | None = None,
        device: str = "auto",
        dtype: str = "auto",
        quantization: str = "auto",
        isa: str = "auto",
        threads: int | None = None,
    ) -> None:
        found, num_threads = choose_device(device), threads or default_threads()

        def choose(asked: str) -> Ops:
            return choose_ops(found, dtype, asked, num_threads, isa)

        ops = choose(quantization)
        ops = as_stored(folder, ops, choose) if quantization == "auto" else ops
        self._model = load_model(folder, ops, max_length)
        self._ops = ops
        self._slot = -1 if adapter is None else 0
        if adapter is not None:
            self._adapt(adapter)
        self.device = ops.device
        self.spec = native_spec(folder)
        self.shape = TargetShape(
            hidden_size=self.spec.hidden_size, num_layers=self.spec.num_layers, vocab_size=self.spec.vocab_size
        )
        self.form = str(ops.dtype).removeprefix("torch.") if ops.quantization == "none" else ops.quantization
        self.origin = TargetOrigin(folder)
        self._max_rows = -(-max_length // ops.row_multiple) * ops.row_multiple
        # Every sequence begins a block, so that rounding up takes less than a block each.
        slots = (2 * self._max_rows // _BLOCK_SIZE + 2) * _BLOCK_SIZE
        shapes = [(2, slots, *shape) for shape in self.spec.kv_shapes]
        layers = [torch.zeros(shape, dtype=ops.kv_dtype, device=ops.device) for shape in shapes]
        self._runner = Runner(self._model, ops, layers, _BLOCK_SIZE, self._max_rows, ops.row_multiple)

    def _adapt(self, adapter: Adapter) -> None:
        """Let all rows have the adapter."""
        if not isinstance(self._model, Decoder):
            raise ConfigError("--adapter: the model runs through transformers, and adapters need one that is native.")
        self._model.hold_adapters(1, adapter.rank)
        self._model.place_adapter(self._slot, self._model.pack_adapter(adapter.weights))

    @property
    def last_layer(self) -> int:
        return self.shape.num_layers - 1

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """What heads share or begin with, float32 as trained, not as served: the scaled embedding [vocab, hidden], the
        LM head [vocab, hidden] and the weight of the final norm [hidden]."""
        origin, device = self.origin, self.device
        return origin.embedding().to(device), origin.head().to(device), origin.norm().to(device)

    @torch.inference_mode()
    def hidden(self, sequences: Sequence[NDArray[Any]], layers: Sequence[int]) -> list[Tensor]:
        """The residual stream behind each of `layers`, for each sequence float32 [tokens, layers, hidden]. A sequence's
        numbers do not depend on the others."""
        found: list[Tensor] = []
        for group in self._groups(sequences):
            taps = self._forward(group, tuple(sorted(set(layers))))
            stacked = torch.stack([taps[layer] for layer in layers], 1)
            lengths = list(map(len, group))
            found += [part.clone() for part in torch.split(stacked[: sum(lengths)], lengths)]
        return found

    @torch.inference_mode()
    def distributions(self, residual: Tensor, ids: Tensor) -> Tensor:
        """What the target gives the tokens `ids` int64 [n] behind the residual stream of its last layer, float32
        [rows, hidden] -> float32 [rows, n]: shares of its whole vocabulary, which add up to at most 1."""
        multiple = self._ops.row_multiple
        size = max(1, _LOGITS_BYTES // (4 * self.spec.vocab_size) // multiple) * multiple
        parts = [torch.empty(0, len(ids), device=self.device)]
        for piece in torch.split(residual, size):
            padded = torch.nn.functional.pad(piece, (0, 0, 0, -len(piece) % multiple))
            logits = self._scores(padded.contiguous())[: len(piece)]
            parts.append((logits[:, ids] - logits.logsumexp(-1, keepdim=True)).exp())
        return torch.cat(parts)

    def _scores(self, residual: Tensor) -> Tensor:
        """Of the LM head, as the model's `head` has them."""
        if self._slot < 0:
            return self._model.head(residual)
        assert isinstance(self._model, Decoder), "`_adapt` looked"
        slots = torch.full((len(residual),), self._slot, dtype=torch.int64, device=self.device)
        return self._model.lm_head(self._model.final_norm(residual), slots)

    def _groups(self, sequences: Sequence[NDArray[Any]]) -> Iterator[list[NDArray[Any]]]:
        """As many sequences together as have at most max_rows tokens."""
        group: list[NDArray[Any]] = []
        for tokens in sequences:
            assert 0 < len(tokens) <= self._max_rows, "sequences are not longer than max_length"
            if sum(map(len, group)) + len(tokens) > self._max_rows:
                yield group
                group = []
            group.append(tokens)
        if group:
            yield group

    def _forward(self, group: list[NDArray[Any]], layers: tuple[int, ...]) -> Mapping[int, Tensor]:
        """The residual stream behind each of `layers`, float32 [rows, hidden], valid until the next call."""
        numbers = itertools.count(1)  # block 0 is where padding is written
        blocks = ([next(numbers) for _ in range(-(-len(tokens) // _BLOCK_SIZE))] for tokens in group)
        each = zip(group, blocks, strict=True)
        rows = [SequenceRows(tokens.tolist(), 0, own, adapter=self._slot) for tokens, own in each]
        self._runner.set_outputs(layers, 0)
        self._runner.start(pack(rows, self._ops.row_multiple))
        return self._runner.finish().taps
