"""How checkpoints lay out the rows of layers that are stored as one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specserve.models.spec import DecoderSpec

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def split_rows(
    name: str, whole: str, parts: Sequence[str], shapes: Mapping[str, tuple[int, ...]], spec: DecoderSpec | None = None
) -> list[tuple[str, slice | Tensor]]:
    """The tensors that the rows of `name`, one of layer `whole`, are those of, and which are whose: one part after the
    other, or with a spec queries, keys and values as `rows_by_head` has them."""
    by_head = None if spec is None else rows_by_head(spec, name)
    found: list[tuple[str, slice | Tensor]] = []
    start = 0
    for i, part in enumerate(name.replace(whole, each) for each in parts):
        rows = shapes.get(part, (0,))[0]  # 0: a tensor too many, which is refused by its name
        found.append((part, slice(start, start + rows) if by_head is None else by_head[i]))
        start += rows
    return found


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
