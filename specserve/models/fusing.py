"""How checkpoints lay out the rows of layers that are stored as one."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from specserve.models.spec import DecoderSpec

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def rows_by_head(spec: DecoderSpec, name: str) -> list[Tensor]:
    """The rows of queries, of keys and of values, int64 each, where those of each KV head lie together: its query heads
    one after the other, its key head, its value head. `name` is a tensor's, which says the layer."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    if found is None or int(found[1]) >= spec.num_layers:
        return [torch.empty(0, dtype=torch.int64)] * 3  # a tensor too many, which is refused by its name
    own = spec.layers[int(found[1])].attention
    share = own.num_heads // own.num_kv_heads
    rows = torch.arange(own.q_size + 2 * own.kv_size).view(own.num_kv_heads, share + 2, own.head_dim)
    return [rows[:, :share].flatten(), rows[:, share].flatten(), rows[:, share + 1].flatten()]
