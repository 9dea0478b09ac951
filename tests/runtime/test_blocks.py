"""Blocks as bytes: all bits come back, from one backend's layout into another's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from specserve.cache.storage import KVShape, KVStorage
from specserve.ops import Ops
from specserve.ops.backend import KernelOptions
from specserve.ops.blocks import read_blocks, write_blocks
from specserve.registry import KERNELS

NUM_BLOCKS = 5


def ops_of(name: str, dtype: torch.dtype) -> Ops:
    options = KernelOptions(torch.device("cpu"), str(dtype).removeprefix("torch."), "none")
    return KERNELS.find(name).create(options)


def storage(ops: Ops, shapes: list[KVShape], block_size: int, dtype: torch.dtype) -> KVStorage:
    return KVStorage(shapes, NUM_BLOCKS, block_size, dtype, "cpu", ops.copy_kv)


@given(
    shapes=st.lists(st.builds(KVShape, st.integers(1, 3), st.sampled_from([4, 16, 32, 64])), min_size=1, max_size=3),
    block_size=st.sampled_from([1, 4, 16, 32]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    names=st.permutations(["reference", "cpu"]),
    places=st.tuples(*[st.lists(st.integers(1, NUM_BLOCKS - 1), min_size=3, max_size=3, unique=True)] * 2),
    seed=st.integers(0, 2**31),
)
def test_blocks_go_from_one_backend_to_another(
    shapes: list[KVShape],
    block_size: int,
    dtype: torch.dtype,
    names: list[str],
    places: tuple[list[int], list[int]],
    seed: int,
) -> None:
    """Written by slots in one, moved as bytes, read by slots in the other."""
    (own, other), (sources, targets) = (ops_of(name, dtype) for name in names), places
    here, there = (storage(ops, shapes, block_size, dtype) for ops in (own, other))
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    written = []
    torch.manual_seed(seed)
    for layer, shape in zip(here.layers, shapes, strict=True):
        slots = torch.arange(block_size, NUM_BLOCKS * block_size)
        info = torch.iinfo(bits)
        numbers = torch.randint(info.min, info.max, (2, len(slots), *shape)).to(bits).view(dtype)  # NaN, too
        own.write_kv(layer, slots, numbers)
        written.append(numbers.view(2, NUM_BLOCKS - 1, block_size, *shape))
    data = read_blocks(own, here.layers, block_size, sources)
    for block, content in zip(sources, data, strict=True):
        plain = [numbers[:, block - 1].contiguous().view(torch.uint8).flatten() for numbers in written]
        assert content == torch.cat(plain).numpy().tobytes(), "[layer, 2, block_size, kv_heads, head_dim]"
    write_blocks(other, there.layers, block_size, targets, data)
    assert read_blocks(other, there.layers, block_size, targets) == data
    for layer, numbers in zip(there.layers, written, strict=True):
        found = other.read_kv(layer, torch.arange(NUM_BLOCKS * block_size)).view(2, NUM_BLOCKS, block_size, -1)
        for block in range(NUM_BLOCKS):
            if block in targets:
                wanted = numbers[:, sources[targets.index(block)] - 1].reshape(2, block_size, -1)
                assert torch.equal(found[:, block].view(bits), wanted.view(bits))
            else:
                assert not found[:, block].view(bits).any(), "others are left alone"


def test_leading_layers_may_be_written_alone() -> None:
    ops = ops_of("cpu", torch.float32)
    here = storage(ops, [KVShape(2, 32), KVShape(1, 16)], 16, torch.float32)
    content = np.arange(2 * 16 * 2 * 32, dtype=np.float32).tobytes()
    write_blocks(ops, here.layers, 16, [3], [content])
    assert read_blocks(ops, here.layers, 16, [3]) == [content + bytes(2 * 16 * 16 * 4)]
    write_blocks(ops, here.layers, 16, [], [])
    assert read_blocks(ops, here.layers, 16, []) == []


@pytest.mark.skipif(not __debug__, reason="assert statements are off")
@pytest.mark.parametrize("num_bytes", [2 * 16 * 2 * 32 * 4 - 4, 2 * 16 * 2 * 32 * 4 + 4])
def test_a_part_of_a_layer_is_no_blocks(num_bytes: int) -> None:
    ops = ops_of("cpu", torch.float32)
    here = storage(ops, [KVShape(2, 32)], 16, torch.float32)
    with pytest.raises(AssertionError, match="whole layers"):
        write_blocks(ops, here.layers, 16, [1], [bytes(num_bytes)])
