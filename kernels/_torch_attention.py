"""Attention in torch: runs of rows that see equally long contexts, together."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

_QUERY_MULTIPLE = 4


@dataclass(slots=True)
class Group:
    """Row runs of one length, each with a linear view of the KV it may see."""

    rows: Tensor  # int64 [runs * length], the step's row behind each entry
    slots: Tensor  # int64 [runs * context], KV slot of each logical index, padded to whole blocks of keys
    last: Tensor  # int64 [runs, length], the last logical index each row sees
    biases: dict[tuple[int | None, int, int], Tensor] = field(default_factory=dict)  # shared by layers that look alike

    @property
    def shape(self) -> tuple[int, int, int]:
        runs, length = self.last.shape
        return runs, length, len(self.slots) // runs

    def bias(self, window: int | None, share: int, slopes: Tensor | None, dtype: torch.dtype) -> Tensor:
        """0, or with slopes [heads] those of ALiBi, where a row sees a logical index and -inf elsewhere, [runs, 1 or
        kv_heads, queries, context]; the queries are `share` heads of each row, that read one kv head, padded to a
        multiple of 4."""
        key = window, share, 0 if slopes is None else slopes.data_ptr()
        if key not in self.biases:
            index = torch.arange(self.shape[2], device=self.last.device)
            hidden = index > self.last[..., None]  # [runs, length, context]
            if window is not None:
                hidden |= index <= self.last[..., None] - window
            bias = torch.zeros(hidden.shape, dtype=dtype, device=self.last.device).masked_fill_(hidden, float("-inf"))
            bias = bias.repeat_interleave(share, 1)[:, None]
            if slopes is not None:
                distance = (index - self.last[..., None]).repeat_interleave(share, 1)[:, None]
                each = slopes.view(1, -1, 1, share).expand(-1, -1, self.shape[1], -1).flatten(2)
                bias = bias + (distance * each[..., None]).to(dtype)
            self.biases[key] = F.pad(bias, (0, 0, 0, -bias.shape[2] % _QUERY_MULTIPLE))
        return self.biases[key]


def attend(
    q: Tensor, kv: Tensor, group: Group, scale: float, window: int | None, slopes: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Attention of one group, multiplied in `dtype` -> [runs * length, heads * d]."""
    runs, length, context = group.shape
    heads, d = q.shape[1:]
    kv_heads = kv.shape[2]
    share = heads // kv_heads
    k, v = kv.index_select(1, group.slots).to(dtype).view(2, runs, context, kv_heads, d).transpose(2, 3)
    q = q.index_select(0, group.rows).to(kv.dtype).to(dtype).view(runs, length, kv_heads, share, d).transpose(1, 2)
    q = q.reshape(runs, kv_heads, length * share, d)
    if padding := -length * share % _QUERY_MULTIPLE:
        q = F.pad(q, (0, 0, 0, padding))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.bias(window, share, slopes, dtype), scale=scale)
    out = out[:, :, : length * share].view(runs, kv_heads, length, share, d)
    return out.transpose(1, 2).reshape(runs * length, heads * d)
