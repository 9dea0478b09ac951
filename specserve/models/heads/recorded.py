"""What heads do beside a forward pass, replayed where ops record: draws of drafts' tokens, passes over one token of
each draft with the draw behind it, and what is made of the target's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from specserve.ops import AttentionRows, DrawArrays, Ops, Recording

_FEW = 8  # drafts at once, at first


class HeadDraws:
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


class ChainWriter:
    """Writes drafts of a head that takes a pass for each token: a pass and the draw of the token behind it are one
    program. `hashed` are the head's ids as noise.hash_tokens has them. For ops that record."""

    def __init__(self, head: Any, kv: list[Tensor], block_size: int, hashed: Tensor) -> None:
        self._head, self._kv, self._block_size, self._hashed = head, kv, block_size, hashed
        self._draws: HeadDraws = head.draws(hashed)
        self._pass: _Pass | None = None

    def write(
        self,
        said: tuple[Tensor, Tensor],
        most: Sequence[int],
        starts: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        temperature: NDArray[np.float64],
        keys: NDArray[np.int64],
        min_probability: float,
    ) -> list[tuple[list[int], list[float]]]:
        """Tokens of n drafts and their confidence, as Ops.draw has them: at most `most` of each, up to the first that
        is given less than `min_probability`. `said` are the logits float32 [n, draft vocabulary] and the head's own
        hidden states float32 [n, hidden] of a pass before, `starts` int32 [n] where the first token of each is read,
        `keys` int64 [longest, n] of the noise."""
        n = len(most)
        if self._pass is None or self._pass.most < n:
            larger = _FEW if self._pass is None else 2 * self._pass.most
            self._pass = _Pass(self._head, self._kv, self._hashed, max(n, larger))
        each = np.arange(n)
        drawn = self._draws.draw(said[0], each, each[None], temperature, keys[:1])
        tokens, confidence, hidden = drawn[0][0], drawn[1][0], said[1].numpy()
        found: list[tuple[list[int], list[float]]] = [([], []) for _ in most]
        for depth in range(1, len(keys) + 1):
            rows = []
            for row, i in enumerate(each.tolist()):
                if confidence[row] >= min_probability:
                    found[i][0].append(int(tokens[row]))
                    found[i][1].append(min(1.0, float(confidence[row])))
                    if depth < most[i]:
                        rows.append(row)
            if not rows:
                break
            each = each[rows]
            where = starts[each] + np.int32(depth - 1), block_tables[each], self._block_size
            how = temperature[each], keys[depth, each]
            tokens, confidence, hidden = self._pass.run(tokens[rows], hidden[rows], *where, *how)
        return found


class _Pass:
    """A recorded pass over one row for each of at most `most` drafts, and the draw of the token behind. A row reads a
    token and, as its features, what the pass before says of the hidden state before that."""

    def __init__(self, head: Any, kv: list[Tensor], hashed: Tensor, most: int) -> None:
        ops: Ops = head.ops
        recording = ops.recording()
        assert recording is not None, "these ops record"
        self.most, self._ops = most, ops
        self._inputs = np.zeros((2, most), np.int64)  # ids, positions
        features = ops.input_rows(most, head.features_width)
        self._keys, self._temperature = np.zeros(most, np.int64), np.zeros(most, np.float64)
        self._starts = np.arange(most + 1, dtype=np.int32)
        rows = torch.arange(most)
        self._points_into = head, kv, hashed, rows  # and nothing else keeps these
        with recording as self._recording, torch.inference_mode():
            tokens, positions = torch.from_numpy(self._inputs)
            hidden, logits, _, _ = head.forward(tokens, positions, rows, kv, None, (), features)
            how = DrawArrays(rows, torch.from_numpy(self._temperature), torch.from_numpy(self._keys))
            drawn = ops.draw(0, logits, None, how, head.ids, hashed)
        self._tokens, self._confidence, self._hidden = drawn[0].numpy(), drawn[1].numpy(), hidden.numpy()
        self._features = features.numpy()

    def run(
        self,
        tokens: NDArray[np.int64],
        features: NDArray[np.float32],
        positions: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        block_size: int,
        temperature: NDArray[np.float64],
        keys: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
        """The tokens behind these, their confidence and the features of the next pass, valid until that."""
        n = len(tokens)
        self._recording.finish()  # of a pass that an exception left
        self._inputs[0, :n], self._inputs[1, :n], self._features[:n] = tokens, positions, features
        self._temperature[:n], self._keys[:n] = temperature, keys
        rows = AttentionRows(n, self._starts[: n + 1], positions, block_tables, np.full(n, -1, np.int32))
        self._recording.start(n, n, self._ops.plan(rows, block_size))
        self._recording.finish()
        return self._tokens[:n], self._confidence[:n], self._hidden[:n]


class RecordedRows:
    """What ops make of rows float32 [rows, n], of one tensor or several: replayed where they record, for as many rows
    at once as any call had. A result is valid until the next call."""

    def __init__(self, function: Callable[..., Tensor], ops: Ops) -> None:
        self._function, self._ops = function, ops
        self._inputs: list[Tensor] = []

    @torch.inference_mode()
    def __call__(self, *parts: Tensor) -> Tensor:
        rows, most = len(parts[0]), len(self._inputs[0]) if self._inputs else 0
        if rows > most:
            recording = self._ops.recording()
            if recording is None:
                short = -rows % self._ops.row_multiple
                return self._function(*(pad(part, (0, 0, 0, short)) if short else part for part in parts))[:rows]
            most = max(rows, 2 * most, _FEW)
            self._inputs = [self._ops.input_rows(most, part.shape[1]) for part in parts]
            with recording as self._recording:
                self._found = self._function(*self._inputs)
        self._recording.finish()  # of rows that an exception left
        for own, given in zip(self._inputs, parts, strict=True):
            own[:rows] = given
        self._recording.start(rows, 0, None)
        self._recording.finish()
        return self._found[:rows]


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
