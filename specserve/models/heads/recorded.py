"""What a block head does beside its pass, without Python in between where ops record: it draws the tokens of drafts,
one depth after another, and writes its KV of hidden states."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.ops import DrawArrays, Ops, Recording

_FEW = 8  # drafts at once, at first


class BlockDraws:
    """Draws of a head whose draft vocabulary is `ids`, and which says by `bias` what tokens add to the logits behind
    them; `hashed` int64 [draft vocabulary] are the ids as noise.hash_tokens has them."""

    def __init__(self, bias: Callable[[Tensor], Tensor | None], ids: Tensor | None, hashed: Tensor, ops: Ops) -> None:
        self._bias, self._ids, self._hashed, self._ops = bias, ids, hashed, ops
        self._recorded: dict[int, _Recorded] = {}  # by depth
        self._most = 0  # drafts at once, of what was recorded
        self._logits = 0  # where these lie

    @torch.inference_mode()
    def draw(
        self,
        logits: Tensor,
        before: NDArray[np.int64],
        rows: NDArray[np.int64],
        temperature: NDArray[np.float64],
        keys: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens and their confidence, as Ops.draw has them, int64 and float32 [depth, n]: of rows int64 [depth, n] of
        logits float32 [any, draft vocabulary], behind the tokens `before` int64 [n] and those that are drawn, at
        temperatures float64 [n], with the noise of keys int64 [depth, n]."""
        depth, n = rows.shape
        if n > self._most or logits.data_ptr() != self._logits:
            self._recorded.clear()
            self._most, self._logits = max(n, 2 * self._most, _FEW), logits.data_ptr()
        if depth not in self._recorded and (recording := self._ops.recording()) is not None:
            arrays = _Arrays(depth, self._most)
            with recording as made:
                found = self._drawn(logits, *map(torch.from_numpy, arrays.all()))
            self._recorded[depth] = _Recorded(made, arrays, found, logits)
        if depth in self._recorded:
            return self._recorded[depth].run(before, rows, temperature, keys)
        arrays = _Arrays(depth, n + -n % self._ops.row_multiple)
        arrays.fill(before, rows, temperature, keys)
        found = self._drawn(logits, *(torch.from_numpy(each).to(self._ops.device) for each in arrays.all()))
        tokens, confidence = (torch.stack(each).cpu().numpy() for each in zip(*found, strict=True))
        return tokens[:, :n], confidence[:, :n]

    def _drawn(
        self, logits: Tensor, before: Tensor, rows: Tensor, temperature: Tensor, keys: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        found = []
        for depth, (some, own) in enumerate(zip(rows, keys, strict=True)):
            how = DrawArrays(some, temperature, own)
            drawn = self._ops.draw(depth, logits, self._bias(before), how, self._ids, self._hashed)
            found.append(drawn)
            before = drawn[0]
        return found


class _Arrays:
    """What is drawn with, of so many drafts."""

    def __init__(self, depth: int, n: int) -> None:
        self.before = np.zeros(n, np.int64)
        self.rows, self.keys = np.zeros((2, depth, n), np.int64)
        self.temperature = np.zeros(n, np.float64)

    def all(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        return self.before, self.rows, self.temperature, self.keys

    def fill(
        self,
        before: NDArray[np.int64],
        rows: NDArray[np.int64],
        temperature: NDArray[np.float64],
        keys: NDArray[np.int64],
    ) -> None:
        n = len(before)
        self.before[:n], self.temperature[:n] = before, temperature
        self.rows[:, :n], self.keys[:, :n] = rows, keys


class _Recorded:
    """Draws of one depth, recorded on arrays of their own and on `logits`, which live as long."""

    def __init__(
        self, recording: Recording, arrays: _Arrays, found: list[tuple[Tensor, Tensor]], logits: Tensor
    ) -> None:
        self._recording, self._arrays, self._logits = recording, arrays, logits
        self._tokens = [tokens.numpy() for tokens, _ in found]
        self._confidence = [confidence.numpy() for _, confidence in found]

    def run(
        self,
        before: NDArray[np.int64],
        rows: NDArray[np.int64],
        temperature: NDArray[np.float64],
        keys: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        n = len(before)
        self._recording.finish()  # of draws that an exception left
        self._arrays.fill(before, rows, temperature, keys)
        self._recording.start(n, n, None)
        self._recording.finish()
        return np.stack([each[:n] for each in self._tokens]), np.stack([each[:n] for each in self._confidence])


class RecordedWrite:
    """Replays `write`, which makes KV of as many hidden states as `parts` says, each `width` numbers wide, for
    `max_rows` rows at most."""

    def __init__(
        self,
        write: Callable[[list[Tensor], Tensor, list[Tensor], Any], None],
        ops: Ops,
        recording: AbstractContextManager[Recording],
        kv: list[Tensor],
        parts: int,
        width: int,
        max_rows: int,
    ) -> None:
        self._hidden = [ops.input_rows(max_rows, width) for _ in range(parts)]
        self._positions = np.zeros(max_rows, np.int64)
        self._points_into = kv
        with recording as self._recording:
            write(self._hidden, torch.from_numpy(self._positions), kv, None)

    def __call__(self, hidden: list[Tensor], positions: NDArray[np.int64], plan: Any) -> None:
        self._recording.finish()  # of rows that an exception left
        rows = len(positions)
        for own, given in zip(self._hidden, hidden, strict=True):
            own[:rows] = given
        self._positions[:rows] = positions
        self._recording.start(rows, 0, plan)
        self._recording.finish()
