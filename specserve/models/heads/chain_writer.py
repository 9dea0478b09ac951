"""Writes drafts of a head that takes a pass for each token: a pass and the draw of the token after it, captured."""

from __future__ import annotations

from collections.abc import Sequence
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
        most: Sequence[int],
        starts: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        temperature: NDArray[np.float64],
        keys: NDArray[np.int64],
        min_probability: float,
    ) -> list[tuple[list[int], list[float]]]:
        """Tokens of n drafts and their confidence, as Ops.draw has them: at most `most` of each, up to the first that
        is given less than `min_probability`. `said` are the logits float32 [n, draft vocabulary] and the head's own
        hidden states float32 [n, hidden] of a pass before, `is_replayed` as in HeadDraws.draw, `starts` int32 [n] where
        the first token of each is read, `keys` int64 [longest, n] of the noise."""
        each = np.arange(len(most))
        drawn = self._draws.draw(said[0], each, each[None], temperature, keys[:1], is_replayed)
        tokens, confidence, hidden = drawn[0][0], drawn[1][0], said[1]
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
            n, positions = len(rows), starts[each] + np.int32(depth - 1)
            plan = self._ops.plan(AttentionRows.one_each(positions, block_tables[each]), self._block_size)
            features = hidden[:n] if rows[-1] == n - 1 else hidden[torch.tensor(rows, device=hidden.device)]
            inputs = tokens[rows], positions, temperature[each], keys[depth, each], features
            next_tokens, next_confidence, hidden = self._pass(inputs, n, plan)
            tokens, confidence = next_tokens.cpu().numpy(), next_confidence.cpu().numpy()
        return found


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
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens after these, their confidence and the features of the next pass."""
    rows = torch.arange(len(tokens), device=tokens.device)
    hidden, logits, _, _ = head.forward(tokens, positions, rows, kv, plan, (), features)
    drawn, confidence = head.ops.draw(0, logits, None, DrawArrays(rows, temperature, keys), head.ids, hashed)
    return drawn, confidence, hidden
