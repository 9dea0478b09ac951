"""A model divided among processes (here threads) that add up what they compute: every family's logits are those of the
whole, and the same in each process, bit for bit, whatever else is in a step."""

from __future__ import annotations

import importlib.util
import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve.errors import ConfigError, ModelError
from specserve.models.loader import load_model, native_spec
from specserve.models.sharding import Shard, sharded
from specserve.models.spec import DecoderSpec
from specserve.ops import Peers
from specserve.ops.peers import Gather
from specserve.testing import Feed, PagedDecoder, write_tiny_model
from tests.models.test_architectures import ALL_WEIGHTS, CASES, PROMPT, make_ops, write
from tests.models.test_remote_families import CASES as REMOTE, write as write_remote

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("specserve.kernels._native") is None, reason="Built without native kernels."
)
PROMPTS = [PROMPT, PROMPT[3:20], PROMPT[::-1][:33]]
JOINTLY_NORMED = ("olmo2", "olmo3", "olmoe")


class Gathering:
    """Parts that go from thread to thread, as they would over a network."""

    def __init__(self, size: int) -> None:
        self._parts: list[torch.Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=30)

    def __call__(self, parts: list[torch.Tensor], rank: int) -> None:
        self._parts[rank] = parts[rank].clone()
        self._barrier.wait()
        for part, sent in zip(parts, self._parts, strict=True):
            part.copy_(sent)
        self._barrier.wait()


def in_ranks(
    size: int, run: Callable[[int, Peers, Any], Any], kernels: str = "native-float32", gather: Gather | None = None
) -> list[Any]:
    """What `run` returns in each of so many threads, which share memory as processes would, or else `gather`."""
    memory, found, errors = mmap.mmap(-1, 2**18), dict[int, Any](), list[BaseException]()

    def work(rank: int) -> None:
        ops = make_ops(kernels)
        peers = ops.peers(memory if gather is None else mmap.mmap(-1, 2**14), rank, size, gather)
        try:
            found[rank] = run(rank, peers, ops)
        except BaseException as error:
            peers.leave()
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[rank] for rank in range(size)]


def logits(
    folder: Path, size: int, kernels: str = "native-float32", alone: bool = False, gather: Gather | None = None
) -> list[torch.Tensor]:
    """Of each rank, for PROMPTS in one step or, `alone`, in steps of their own and by chunks of 10."""

    def run(rank: int, peers: Peers | None, ops: Any) -> torch.Tensor:
        paged = PagedDecoder(load_model(folder, ops, peers=peers), num_seqs=5, capacity=48)
        if alone:
            return torch.cat([paged.chunks(seq, prompt, 10) for seq, prompt in enumerate(PROMPTS)]).clone()
        return torch.cat(paged.step(*(Feed(seq, prompt) for seq, prompt in enumerate(PROMPTS)))).clone()

    if size == 1:
        return [run(0, None, make_ops(kernels))]
    return in_ranks(size, run, kernels, gather)


def sizes(folder: Path) -> list[int]:
    """In how many processes it can run, up to 4."""
    return [size for size in (2, 3, 4) if is_divided(native_spec(folder), size)]


def is_divided(spec: DecoderSpec, size: int) -> bool:
    try:
        for rank in range(size):
            sharded(spec, Shard(rank, size))
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("case", [*CASES, *(f"remote {case}" for case in REMOTE)])
def test_the_parts_of_every_family_add_up_to_the_whole(case: str, tmp_path: Path) -> None:
    is_remote = case.startswith("remote ")
    folder = write_remote(tmp_path / "m", case[7:]) if is_remote else write(tmp_path / "m", case)
    possible = sizes(folder)
    if case.split("-")[0] in JOINTLY_NORMED:
        assert possible == []
        return
    assert possible, "it can be divided"
    (whole,) = logits(folder, 1)
    for size in {possible[0], possible[-1]}:
        parts = logits(folder, size)
        assert all(torch.equal(part, parts[0]) for part in parts)
        error = (parts[0] - whole).abs().max() / whole.abs().max()
        assert error < 1e-4, f"relative error {error:.1e} in {size} processes"
        same = (parts[0].argmax(-1) == whole.argmax(-1)).float().mean()
        assert same > 0.97


@pytest.mark.parametrize("kernels", [each for each in ALL_WEIGHTS if each.startswith("native")])
@pytest.mark.parametrize("case", ["llama", "qwen2_moe"])
def test_a_row_has_the_same_bits_in_any_step(case: str, kernels: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", case)
    together, alone = (logits(folder, 2, kernels, each) for each in (False, True))
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one, other)
    (whole,) = logits(folder, 1, kernels)
    error = (together[0] - whole).abs().max() / whole.abs().max()
    assert error < {"float32": 1e-4, "bfloat16": 0.05, "int8": 0.2, "int4": 0.5}[kernels.partition("-")[2]]


def test_sums_of_processes_without_common_memory_have_the_same_bits(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", "llama", num_key_value_heads=4)
    for size in (2, 3, 4):
        shared, apart = logits(folder, size), logits(folder, size, gather=Gathering(size))
        for one, other in zip(shared, apart, strict=True):
            assert torch.equal(one, other)


def test_who_cannot_be_reached_keeps_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    def broken(parts: list[torch.Tensor], rank: int) -> None:
        raise RuntimeError("Connection closed by peer")

    def run(rank: int, peers: Peers, ops: Any) -> bool:
        for _ in range(2):
            ops.sum_peers(torch.ones(2, 32), peers)
        return peers.has_left

    assert in_ranks(2, run, gather=broken) == [True, True]
    assert caplog.text.count("Another process of the model cannot be reached: Connection closed by peer") == 2


def test_parts_are_even_and_complete() -> None:
    for size in range(1, 9):
        for count in (8, 30, 77, 576, 1536, 49152):
            parts = [Shard(rank, size).features(count) for rank in range(size)]
            assert [i for part in parts for i in part] == list(range(count))
            assert max(map(len, parts)) - min(map(len, parts)) <= max(128, 1) and min(map(len, parts)) > 0


def test_what_cannot_be_divided_is_said(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", "llama")  # 4 heads, 2 KV heads
    spec = native_spec(folder)
    with pytest.raises(ConfigError, match=r"is 3, and the model has 4 query heads for 2 KV heads; it may be 1, 2, 4\."):
        sharded(spec, Shard(0, 3))
    ops = make_ops("reference-float32")
    with pytest.raises(ConfigError, match="the reference kernels compute no model in several processes"):
        ops.peers(mmap.mmap(-1, 2**16), 0, 2)


def test_keys_that_are_broken_in_one_process_are_so_in_all(tmp_path: Path) -> None:
    """A value of the last layer's, which nothing else of the step shows."""
    folder = write_tiny_model(tmp_path / "m", "llama")
    from specserve.runtime.pack import SequenceRows, pack
    from specserve.runtime.runner import Runner

    def run(rank: int, peers: Peers, ops: Any) -> list[int]:
        model = load_model(folder, ops, peers=peers)
        kv = [torch.zeros((2, 64, *shape), dtype=ops.kv_dtype) for shape in model.spec.kv_shapes]
        if rank == 1:
            bad = model._stack.layers[-1].attention.qkv.packed  # type: ignore[union-attr]
            bad.memory.view(torch.float32)[-1] = torch.inf
        runner = Runner(model, ops, kv, 16, 16, 16)
        runner.start(pack([SequenceRows([1, 2, 3], 0, [1], num_logits=1)], 1))
        return runner.finish().broken

    assert in_ranks(2, run) == [[0, 1, 2], [0, 1, 2]]


def test_who_leaves_keeps_nobody_waiting(tmp_path: Path) -> None:
    def run(rank: int, peers: Peers, ops: Any) -> bool:
        if rank == 0:
            x = torch.ones(2, 32)
            ops.sum_peers(x, peers)
        else:
            peers.leave()
        return peers.has_left

    assert in_ranks(2, run) == [True, True]


def test_refusal_of_models_that_are_not_native(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        native_spec(tmp_path)
