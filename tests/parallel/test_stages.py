"""A model whose layers are divided among stages: every family's numbers are those of the whole, bit for bit, and what
is broken in one stage is broken in all."""

from __future__ import annotations

import importlib.util
import itertools
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve.errors import ConfigError
from specserve.models import loader
from specserve.models.decoder import Decoder
from specserve.models.loader import load_model, load_stage, native_spec, outline
from specserve.models.stages import FirstStage, LaterStage, divided
from specserve.parallel.layout import Layout, ModelMemory
from specserve.parallel.link import Link
from specserve.parallel.messages import Connection, HandOn
from specserve.parallel.ranks import _links
from specserve.parallel.stages import FirstRunner, LaterRunner, Pipeline, StageRunner
from specserve.runtime.pack import SequenceRows, pack
from specserve.runtime.runner import Runner
from specserve.testing import Feed, PagedDecoder, write_tiny_model
from tests.models.test_architectures import CASES, PROMPT, make_ops, write
from tests.models.test_remote_families import CASES as REMOTE, write as write_remote

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("specserve.kernels._native") is None, reason="Built without native kernels."
)
PROMPTS = [PROMPT, PROMPT[3:20], PROMPT[::-1][:33]]


class Chained:
    """A model of stages that are all in this process."""

    features_width = num_adapter_slots = 0

    def __init__(self, folder: Path, stages: list[range], ops: Any) -> None:
        first = load_model(folder, ops, layers=stages[0])
        assert isinstance(first, Decoder)
        self.first, self.spec, self.ops = first, first.spec, ops
        self.later = [load_stage(folder, ops, None, None, layers) for layers in stages[1:]]

    def forward(
        self, ids: Any, positions: Any, rows: Any, kv: list[Any], plan: Any, taps: tuple[int, ...] = (), **others: Any
    ) -> tuple[Any, ...]:
        stages: list[FirstStage | LaterStage] = [FirstStage(self.first), *self.later]
        numbers = [self.first.layers, *(each.layers for each in self.later)]
        states, shown = None, {}
        for stage, layers in zip(stages, numbers, strict=True):
            own = kv[layers.start : layers.stop]
            tapped = stage.forward(ids, positions, rows, own, plan, tuple(layers), states)[3]
            shown |= dict(zip(layers, tapped, strict=True))
            states = self.ops.input_rows(len(ids), self.spec.hidden_size)
            states[:] = tapped[-1]
        assert states is not None
        return *self.first.scores(states[rows].contiguous(), None), tuple(shown[each] for each in taps)


def stages_of(num_layers: int) -> list[list[range]]:
    """Every layer by itself, and all but the first one together."""
    apart = [range(i, i + 1) for i in range(num_layers)]
    return [apart, [range(1), range(1, num_layers)]]


@pytest.mark.parametrize("case", [*CASES, *(f"remote {case}" for case in REMOTE)])
def test_the_stages_of_every_family_have_the_bits_of_the_whole(case: str, tmp_path: Path) -> None:
    is_remote = case.startswith("remote ")
    folder = write_remote(tmp_path / "m", case[7:]) if is_remote else write(tmp_path / "m", case)
    ops = make_ops("native-float32")
    feeds = [Feed(seq, prompt) for seq, prompt in enumerate(PROMPTS)]
    whole = torch.cat(PagedDecoder(load_model(folder, ops), num_seqs=5, capacity=48).step(*feeds)).clone()
    for stages in stages_of(native_spec(folder).num_layers):
        model: Any = Chained(folder, stages, ops)
        assert torch.equal(torch.cat(PagedDecoder(model, num_seqs=5, capacity=48).step(*feeds)), whole)


def test_layers_are_divided_so_that_no_stage_costs_more_than_it_must() -> None:
    costs = [3, 1, 4, 1, 5, 9, 2, 6]
    for first, count in itertools.product((0, 4, 100), range(1, 9)):
        stages = divided(costs, first, count)
        assert [i for stage in stages for i in stage] == list(range(8))
        assert len(stages) == count and all(stages)
        cuts = itertools.combinations(range(1, 8), count - 1)
        assert most(costs, first, stages) == min(
            most(costs, first, [range(a, b) for a, b in itertools.pairwise((0, *cut, 8))]) for cut in cuts
        )
    assert divided([1] * 126, 3, 64)[0] == range(1)
    with pytest.raises(ConfigError, match="it may be at most 2"):
        divided([1, 1], 0, 3)


def most(costs: list[int], first: int, stages: list[range]) -> int:
    return max(sum(costs[i] for i in stage) + (first if not stage.start else 0) for stage in stages)


def test_weights_of_stages_are_packed_once_for_all_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the whole model: whoever starts first has packed them for the others."""
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loader, "_WORTH_BYTES", 0)
    folder, ops = write_tiny_model(tmp_path / "m", "llama"), make_ops("native-int8")
    found = outline(native_spec(folder), ops)
    first = load_model(folder, ops, layers=range(2))
    last = load_stage(folder, ops, None, None, range(2, 3))
    assert first.num_mapped_bytes == last.num_mapped_bytes == 0
    whole = load_model(folder, ops)
    assert whole.num_mapped_bytes == sum(found.layer_bytes) + found.other_bytes
    assert load_model(folder, ops, layers=range(2)).num_mapped_bytes == sum(found.layer_bytes[:2]) + found.other_bytes
    assert load_stage(folder, ops, None, None, range(2, 3)).num_mapped_bytes == found.layer_bytes[2]
    assert isinstance(whole, Decoder) and isinstance(first, Decoder)
    assert found.adapted == whole.adapted == first.adapted | last.adapted


def pipelines(layout: Layout, hidden_size: int) -> list[Pipeline]:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, ModelMemory.num_bytes(layout, 16, hidden_size))
    states = ModelMemory(descriptor, layout).states(16, hidden_size)
    os.close(descriptor)
    links = [[Connection(end, HandOn) for end in ends] for ends in _links(layout)]
    return [Pipeline(layout, rank, states, Link(ends[0], ends[1:])) for rank, ends in enumerate(links)]


def test_keys_that_are_broken_in_one_stage_are_so_in_all(tmp_path: Path) -> None:
    """A value of the last layer's, which nothing else of the step shows, and one of a layer before."""
    folder, layout = write_tiny_model(tmp_path / "m", "llama"), Layout(1, (range(1), range(1, 2), range(2, 3)))
    ops = make_ops("native-float32")
    first = load_model(folder, ops, layers=range(1))
    assert isinstance(first, Decoder)
    later = [load_stage(folder, make_ops("native-float32"), None, None, layers) for layers in layout.stages[1:]]
    kv = [[torch.zeros((2, 64, *shape), dtype=ops.kv_dtype)] for shape in first.spec.kv_shapes]
    own, *others = pipelines(layout, first.spec.hidden_size)
    runner = FirstRunner(first, ops, kv[0], 16, 16, 16, (), 2, own)
    runners = [
        LaterRunner(StageRunner(stage, stage.ops, kv[i], 16, 16, (i,), each.states), each)
        for i, (stage, each) in enumerate(zip(later, others, strict=True), 1)
    ]
    step = pack([SequenceRows([1, 2, 3], 0, [1], num_logits=2), SequenceRows([4], 0, [2], num_logits=1)], 1)

    def run() -> Any:
        threads = [threading.Thread(target=lambda each=each: each.run(step)) for each in runners]
        for thread in threads:
            thread.start()
        runner.start(step)
        found = runner.finish()
        for thread in threads:
            thread.join()
        return found

    sound = run()
    assert sound.broken == [] and bool(sound.logits.isfinite().all()) and sound.logits.shape[0] == 3
    last = later[-1]._stack.layers[-1].attention.qkv.packed
    last.memory.view(torch.float32)[-1] = torch.inf
    found = run()
    for each in (own, *others):
        each.link.close()
    assert found.broken == [0, 1, 2, 3]
    assert bool(found.logits.isnan().all()) and found.best.tolist() == [-1] * 3 and (found.top == -1).all()


def test_who_reads_what_and_who_shows_it() -> None:
    layout = Layout(2, (range(3), range(3, 5), range(5, 9)))
    assert layout.size == 6
    assert [layout.stage(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [layout.readers(stage) for stage in range(3)] == [range(2, 4), range(4, 6), range(2)]
    assert [layout.shown(rank, (0, 4, 8)) for rank in range(6)] == [(0, 2), (), (4,), (), (8,), ()]


def test_a_runner_of_one_stage_has_the_rows_of_the_step_alone(tmp_path: Path) -> None:
    ops = make_ops("native-float32")
    model = load_model(write_tiny_model(tmp_path / "m", "llama"), ops, layers=range(2))
    assert isinstance(model, Decoder)
    kv = [torch.zeros((2, 64, *shape), dtype=ops.kv_dtype) for shape in model.spec.kv_shapes[:2]]
    runner = Runner(FirstStage(model), ops, kv, 16, 16, 0, (0, 1))
    step = pack([SequenceRows([1, 2, 3], 0, [1])], 1)
    runner.start(step)
    found = runner.finish()
    assert [*found.taps] == [0, 1] and all(len(tap) == 3 for tap in found.taps.values())
    assert len(found.logits) == 0
