"""Blocks of a model in several processes: divided and joined they are what they were, and nobody waits for a process
that has ended."""

from __future__ import annotations

import itertools
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from specserve.config import EngineConfig
from specserve.engine.build import build
from specserve.engine.request import Request
from specserve.errors import EngineError
from specserve.models.loader import native_spec
from specserve.models.sharding import sharded
from specserve.parallel.blocks import BlockParts
from specserve.parallel.layout import Layout
from specserve.testing import write_tiny_model
from specserve.types import SamplingParams


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([(6, 3), (8, 2), (6, 6), (4, 1)]), st.integers(1, 4), st.integers(1, 3), st.integers(0, 30))
def test_what_is_divided_is_joined_again(
    tiny: Path, heads: tuple[int, int], width: int, num_stages: int, drafted: int
) -> None:
    """Uneven numbers of heads, and more processes than heads, included."""
    num_heads, num_kv_heads = heads
    spec = native_spec(tiny)
    own = replace(spec.layers[0].attention, num_heads=num_heads, num_kv_heads=num_kv_heads)
    layers = tuple(replace(spec.layers[0], attention=own) for _ in range(4))
    spec = replace(spec, layers=layers)
    if num_kv_heads < width and (width % num_kv_heads or num_heads // num_kv_heads % (width // num_kv_heads)):
        return
    bounds = [4 * i // num_stages for i in range(num_stages + 1)]
    layout = Layout(width, tuple(range(a, b) for a, b in itertools.pairwise(bounds)))
    parts = BlockParts(layout, spec, 4, 2)
    assert parts.whole_bytes == sum(2 * 4 * 2 * each.num_kv_heads * each.head_dim for each in spec.kv_shapes)
    blocks = np.random.default_rng(0).integers(0, 256, (3, parts.whole_bytes + drafted), np.uint8)
    divided = [parts.divide(blocks, rank) for rank in range(layout.size)]
    assert (parts.join(divided) == blocks).all()
    for rank, part in enumerate(divided):
        shapes = [sharded(spec, layout.shard(rank)).kv_shapes[layer] for layer in layout.layers(rank)]
        size = sum(2 * 4 * 2 * each.num_kv_heads * each.head_dim for each in shapes)
        assert part.shape == (3, size + (0 if rank else drafted))


def test_a_process_that_ends_keeps_nobody_waiting(tiny: Path) -> None:
    built = build(EngineConfig(model=str(tiny), tensor_parallel_size=2, max_model_len=160, drafter="none", threads=1))
    built.engine.add(Request(id="r", prompt_ids=list(range(40)), params=SamplingParams(temperature=0, max_tokens=2)))
    built.engine.step()
    executor = built.engine.executor
    (block,) = executor.read_blocks([1])
    executor.write_blocks([3], [block])
    assert executor.read_blocks([3, 1]) == [block, block] and any(block)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text("utf-8").split()
    os.kill(int(children[-1]), signal.SIGKILL)
    with pytest.raises(EngineError, match="Process 1 of the model has ended"):
        executor.read_blocks([1])
