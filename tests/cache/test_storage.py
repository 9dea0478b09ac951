"""Slots: shapes, zeros, and copies between overlapping ranges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from specserve.cache.storage import KVShape, KVStorage


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_have_the_promised_shape_and_are_zero(dtype: torch.dtype) -> None:
    storage = KVStorage([KVShape(2, 8)] * 3, 5, 16, dtype, "cpu")
    assert len(storage.layers) == 3
    for layer in storage.layers:
        assert layer.shape == (2, 80, 2, 8)
        assert layer.dtype == dtype
        assert layer.is_contiguous()
        assert layer.data_ptr() % 64 == 0
        assert not layer.any()
    storage.layers[0].fill_(1)
    assert not storage.layers[1].any(), "layers do not overlap"
    assert KVStorage.bytes_per_block([KVShape(2, 8)] * 3, 16, dtype) * 5 == sum(
        layer.nbytes for layer in storage.layers
    )


@given(st.permutations(range(24)), st.lists(st.integers(0, 23), min_size=1, max_size=24))
def test_copy_reads_everything_before_it_writes(dst: list[int], src: list[int]) -> None:
    storage = KVStorage([KVShape(1, 2)] * 2, 6, 4, torch.float32, "cpu")
    for number, layer in enumerate(storage.layers):
        layer.copy_(torch.arange(2 * 24 * 2).view(2, 24, 1, 2) + 1000 * number)
    before = [layer.clone() for layer in storage.layers]
    dst = dst[: len(src)]
    storage.copy_slots(src, dst)
    for old, new in zip(before, storage.layers, strict=True):
        expected = old.clone()
        for s, d in zip(src, dst, strict=True):
            expected[:, d] = old[:, s]
        assert torch.equal(new, expected)


@pytest.mark.parametrize(("heads", "width", "num_layers"), [(3, 64, 30), (3, 64, 31), (8, 128, 36), (1, 256, 18)])
def test_a_step_does_not_begin_a_huge_page_in_many_layers(heads: int, width: int, num_layers: int) -> None:
    """The system clears a huge page when it is first written: those of all layers made a step take 40 to 60 ms."""
    page, num_slots, slot_bytes = 2**21, 8192, 4 * heads * width
    storage = KVStorage([KVShape(heads, width)] * num_layers, num_slots // 16, 16, torch.float32, "cpu")
    begun = torch.zeros(num_slots)  # pages of all layers, by the first slot that lies in them
    for kv in (half for layer in storage.layers for half in layer):
        for place in range(-kv.data_ptr() % page, num_slots * slot_bytes, page):
            begun[place // slot_bytes] += 1
    assert begun.sum() >= 2 * num_layers * (num_slots * slot_bytes // page - 1)
    a_fifth = page // slot_bytes // 5
    within = torch.nn.functional.conv1d(begun[None], torch.ones(1, 1, a_fifth))
    assert within.max() <= 2 * num_layers / 5 + 4, "of keys, and of values, two more than a fifth"


@pytest.mark.skipif(not __debug__, reason="assert statements are off")
def test_a_destination_is_written_once() -> None:
    storage = KVStorage([KVShape(1, 2)] * 1, 2, 4, torch.float32, "cpu")
    with pytest.raises(AssertionError, match="written once"):
        storage.copy_slots([1, 2], [3, 3])
