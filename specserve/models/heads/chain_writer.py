"""Writes drafts of a head that takes a pass for each token: a pass and the draw of the token after it, captured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.models.heads.draws import HeadDraws
from specserve.ops import AttentionRows, DrawArrays, Input, Ops
from specserve.ops.capture import Captured


class ChainWriter:
    """Of `head`, whose ids noise.hash_tokens has as `hashed`. A row of a pass reads a token and, as its features, what
    the pass before says of the hidden state before that. For ops that record: between passes nothing leaves the host.
    """

    def __init__(self, head: Any, kv: list[Tensor], block_size: int, hashed: Tensor) -> None:
        self._ops: Ops = head.ops
        self._block_size = block_size
        self._draws: HeadDraws = head.draws(hashed)
        numbers = [Input(torch.int64), Input(torch.int64), Input(torch.float64), Input(torch.int64)]
        inputs = [*numbers, Input(torch.float32, head.features_width)]
        self._pass = Captured(self._ops, partial(_pass, head, kv, hashed), inputs)

    def write(
        self,
        said: tuple[Tensor, Tensor],
        is_replayed: bool,
        starts: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        temperature: NDArray[np.float64],
        keys: NDArray[np.int64],
        take: Callable[[int, int, float, tuple[int, float]], bool],
    ) -> None:
        """n drafts of at most `longest` tokens in a row. `said` are the logits float32 [n, draft vocabulary] and the
        head's own hidden states float32 [n, hidden] of a pass before, `is_replayed` as in HeadDraws.draw, `starts`
        int32 [n] where the first token of each is read, `keys` int64 [longest, n] of the noise. `take` is told of the
        next token of a draft, and of the second best there, as Ops.draw has them, and says whether it wants another."""
        each = np.arange(len(starts))
        drawn = [part[0] for part in self._draws.draw(said[0], each, each[None], temperature, keys[:1], is_replayed)]
        hidden = said[1]
        for depth in range(1, len(keys) + 1):
            told = zip(each.tolist(), *(part.tolist() for part in drawn), strict=True)
            rows = [row for row, (i, token, share, *second) in enumerate(told) if take(i, token, share, (*second,))]
            if not rows or depth == len(keys):
                break
            each = each[rows]
            n, positions = len(rows), starts[each] + np.int32(depth - 1)
            plan = self._ops.plan(AttentionRows.one_each(positions, block_tables[each]), self._block_size)
            features = hidden[:n] if rows[-1] == n - 1 else hidden[torch.tensor(rows, device=hidden.device)]
            inputs = drawn[0][rows], positions, temperature[each], keys[depth, each], features
            *parts, hidden = self._pass(inputs, n, plan)
            drawn = [part.cpu().numpy()[:n] for part in parts]


def _pass(
    head: Any,
    kv: list[Tensor],
    hashed: Tensor,
    plan: Any,
    tokens: Tensor,
    positions: Tensor,
    temperature: Tensor,
    keys: Tensor,
    features: Tensor,
) -> tuple[Tensor, ...]:
    """What Ops.draw says of the tokens after these, and the features of the next pass."""
    rows = torch.arange(len(tokens), device=tokens.device)
    hidden, logits, _, _ = head.forward(tokens, positions, rows, kv, plan, (), features)
    return *head.ops.draw(0, logits, None, DrawArrays(rows, temperature, keys), head.ids, hashed), hidden
