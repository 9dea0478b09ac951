"""Steps that replay a graph are what they are op by op, bit for bit, whatever their size: on a CUDA device, or one that
is faked."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specserve.models.loader import load_model
from specserve.ops import AttentionRows, Input, Ops
from specserve.ops.backend import KernelOptions
from specserve.ops.capture import Captured
from specserve.registry import KERNELS
from specserve.runtime.pack import SequenceRows, StepInput, pack
from specserve.runtime.runner import Output, Runner
from specserve.testing import fake_cuda, write_tiny_model

BLOCK, BLOCKS = 16, 40
TREE = [-1, 0, 0, 1, 2, 1]


FAMILIES = ("llama", "gemma3", "bloom", "gptj", "opt_350m")
# What is about graphs rather than the ops in them: with and without rotary embeddings.
of_graphs = pytest.mark.parametrize(
    "folder", ["llama", pytest.param("bloom", marks=pytest.mark.thorough)], indirect=True, scope="module"
)


@pytest.fixture(params=FAMILIES, scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("steps") / "tiny", request.param, seed=3)


@pytest.fixture
def ops(cuda: torch.device) -> Ops:
    if (missing := KERNELS.missing("triton")) is not None:
        pytest.skip(f"{missing} is not installed")
    made: Ops = KERNELS.find("triton").create(KernelOptions(cuda, "float32", "none"))
    return made


def make(folder: Path, ops: Ops, max_len: int = 128) -> tuple[Runner, Runner]:
    """One that replays and one that does not, each with a KV of its own."""
    model = load_model(folder, ops, max_len)
    runners = []
    for records in (True, False):
        ops.records = records
        kv = [torch.zeros((2, BLOCKS * BLOCK, *shape), device=ops.device) for shape in model.spec.kv_shapes]
        runners.append(Runner(model, ops, kv, BLOCK, 64, 48))
    ops.records = True
    return runners[0], runners[1]


def both(runners: tuple[Runner, Runner], step: StepInput, ops: Ops) -> tuple[Output, Output]:
    found = []
    for runner, records in zip(runners, (True, False), strict=True):
        ops.records = records
        runner.start(step)
        found.append(runner.finish())
    ops.records = True
    return found[0], found[1]


def same(found: Output, wanted: Output) -> bool:
    pairs = [(found.logits, wanted.logits), (found.hidden, wanted.hidden), (found.best, wanted.best)]
    pairs += zip(found.taps.values(), wanted.taps.values(), strict=True)
    return all(torch.equal(x.cpu().nan_to_num(7), y.cpu().nan_to_num(7)) for x, y in pairs) and (
        found.broken == wanted.broken and np.array_equal(found.top, wanted.top)
    )


def tokens(count: int) -> list[int]:
    return (np.arange(count) * 37 % 90 + 5).tolist()


def steps() -> list[StepInput]:
    """Of two sequences: a chunk larger than any recording, a few rows, one, a tree beside a chain, a ring."""
    a, b = range(1, 9), range(9, 17)
    chunk = SequenceRows(tokens(50), 0, a, num_logits=1)
    return [
        pack([chunk], 1),
        pack([SequenceRows(tokens(13), 0, b, num_logits=2)], 1),
        pack([SequenceRows([8], 50, a, num_logits=1)], 1),
        pack([SequenceRows([8], 51, a, num_logits=1), SequenceRows(tokens(7), 13, b, [-1, *TREE], 7)], 1),
        pack([SequenceRows(tokens(6), 20, b, num_logits=6, is_block=True), SequenceRows([9], 52, a)], 1),
        pack([SequenceRows(tokens(39), 53, a, num_logits=39)], 1),
        pack([SequenceRows([3], 92, a, num_logits=1)], 1),
    ]


def test_steps_are_what_they_are_op_by_op(folder: Path, ops: Ops) -> None:
    runners = make(folder, ops)
    replayed = []
    for step in steps():
        found, wanted = both(runners, step, ops)
        assert same(found, wanted)
        assert not wanted.is_replayed
        replayed.append(found.is_replayed)
    assert replayed == [ops.buckets[-1] >= 64, *[True] * 6]
    for own, other in zip(runners[0].kv, runners[1].kv, strict=True):
        assert torch.equal(own[:, BLOCK:].cpu(), other[:, BLOCK:].cpu()), "but for the null block"


@of_graphs
def test_a_step_that_is_replayed_allocates_nothing(folder: Path, ops: Ops) -> None:
    """On the device: its inputs are copied to where the graph reads them, and what it finds lies where it lay."""
    runner, _ = make(folder, ops)
    for _ in range(2):
        allocated, replayed = [], []
        for step in steps():
            before = torch.cuda.memory_stats(ops.device)["allocation.all.allocated"]
            runner.start(step)
            replayed.append(runner.finish().is_replayed)
            allocated.append(torch.cuda.memory_stats(ops.device)["allocation.all.allocated"] - before)
    assert [each == 0 for each in allocated] == replayed
    assert sum(replayed) >= 6


@of_graphs
def test_a_row_has_its_bits_in_every_bucket(folder: Path, ops: Ops) -> None:
    runner, _ = make(folder, ops)
    context = pack([SequenceRows(tokens(20), 0, range(1, 9))], 1)
    runner.start(context)
    runner.finish()
    alone: Tensor | None = None
    for others in (0, 1, 3, 9, 30, 45):
        parts = [SequenceRows(tokens(others), 0, range(9, 17), num_logits=others)] if others else []
        runner.start(pack([*parts, SequenceRows([8], 20, range(1, 9), num_logits=1)], 1))
        logits = runner.finish().logits[-1].cpu().clone()
        alone = logits if alone is None else alone
        assert torch.equal(logits, alone)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, which runs them in all other tests")
@pytest.mark.parametrize(
    ("folder", "quantization"),
    [*((family, "none") for family in FAMILIES), ("llama", "int8"), ("opt_350m", "int4")],
    indirect=["folder"],
    scope="module",
)
def test_the_kernels_themselves_are_replayed_and_are_the_reference_s(folder: Path, quantization: str) -> None:
    """Interpreted: a tree beside a chain, whose prompts they have computed."""
    interpreter = pytest.importorskip("triton", reason="Triton is not installed")
    if not interpreter.knobs.runtime.interpret:
        pytest.skip("Triton was imported without TRITON_INTERPRET=1")
    parts = [SequenceRows(tokens(7), 13, range(9, 17), [-1, *TREE], 7), SequenceRows([8], 3, range(1, 9), num_logits=1)]
    prompts = [SequenceRows(tokens(3), 0, range(1, 9)), SequenceRows(tokens(13), 0, range(9, 17))]
    steps = [pack(prompts, 1), pack(parts, 1)]
    with fake_cuda(interprets=True) as device:
        kernels: Any = KERNELS.find("triton")
        kernels.buckets = (8,)
        backends = kernels, KERNELS.find("reference")
        found = [run(folder, backend, steps, device, quantization) for backend in backends]
    assert torch.equal(found[0].best, found[1].best)
    torch.testing.assert_close(found[0].logits, found[1].logits, rtol=0, atol=1e-4)


def run(folder: Path, backend: Any, steps: list[StepInput], device: torch.device, quantization: str) -> Output:
    """Of the last step, on the host."""
    ops = backend.create(KernelOptions(device, "float32", quantization))
    model = load_model(folder, ops, 128)
    kv = [torch.zeros((2, BLOCKS * BLOCK, *shape), device=device) for shape in model.spec.kv_shapes]
    runner = Runner(model, ops, kv, BLOCK, 8, 8)
    for step in steps:
        runner.start(step)
        found = runner.finish()
    assert found.is_replayed == ops.records
    return Output(found.logits.cpu(), found.hidden.cpu(), found.best.cpu())


@of_graphs
def test_outputs_are_captured_anew(folder: Path, ops: Ops) -> None:
    runners = make(folder, ops)
    both(runners, steps()[0], ops)
    for taps, top_k in (((0, 1), 4), ((1,), 0), ((), 8)):
        for runner, records in zip(runners, (True, False), strict=True):
            ops.records = records
            runner.set_outputs(taps, top_k)
        ops.records = True
        for step in (steps()[2], steps()[3]):
            found, wanted = both(runners, step, ops)
            assert same(found, wanted)
            assert found.is_replayed
            assert list(found.taps) == list(taps)
            assert (found.top is None) == (top_k == 0)


@of_graphs
def test_rows_whose_keys_are_not_finite_are_told(folder: Path, ops: Ops) -> None:
    runners = make(folder, ops)
    for runner in runners[:1]:
        runner.model._embedding[8] = torch.nan  # type: ignore[attr-defined]
    for step in (steps()[3], steps()[2]):
        found, wanted = both(runners, step, ops)
        assert found.broken == wanted.broken != []
        assert found.best.tolist() == wanted.best.tolist()
    found, wanted = both(runners, pack([SequenceRows([9], 0, range(17, 19), num_logits=1)], 1), ops)
    assert found.broken == wanted.broken == []


@of_graphs
def test_a_plan_that_no_recording_takes_runs_op_by_op(folder: Path, ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    recordings = KERNELS.find("triton").record.__globals__["GraphRecording"]
    monkeypatch.setattr(recordings, "takes", lambda self, plan: len(plan.numbers) < 1)
    runners = make(folder, ops)
    for step in steps():
        found, wanted = both(runners, step, ops)
        assert same(found, wanted)
        assert not found.is_replayed


@of_graphs
def test_longer_contexts_have_graphs_of_their_own(folder: Path, ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = KERNELS.find("triton").record.__globals__["GraphRecording"].__init__.__globals__
    monkeypatch.setitem(graphs, "_SPLITS", (1, 2, 2**31))
    runners = make(folder, ops, max_len=600)
    seen: list[Any] = []
    for start in (0, 255, 254, 256, 511, 512, 3, 560):
        step = pack([SequenceRows(tokens(2), start, range(1, 40), num_logits=2)], 1)
        found, wanted = both(runners, step, ops)
        assert same(found, wanted)
        assert found.is_replayed
        seen.append(found.logits.data_ptr())
    short, two, _, _, three, *_ = seen
    assert len({short, two, three}) == 3
    assert seen == [short, two, short, two, three, three, short, three]


def test_a_plan_may_have_more_blocks_than_there_is_room_for(ops: Ops) -> None:
    recording = ops.record(Doubled(), INPUTS, 4, 4, None)
    for num_blocks, fits in ((10, True), (2**18, False)):
        rows = AttentionRows.pack([0, 1], [num_blocks * BLOCK - 1], [[1] * num_blocks], [-1], 1)
        assert recording.takes(ops.plan(rows, BLOCK)) == fits


@of_graphs
def test_what_cannot_be_captured_runs_op_by_op(
    folder: Path, ops: Ops, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, failed = torch.cuda.graph, []

    @contextmanager
    def failing(graph: Any, **options: Any) -> Iterator[None]:
        with plain(graph, **options):
            yield
        if len(failed) < 4:
            failed.append(graph)
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "graph", failing)
    runners = make(folder, ops)
    replayed = set()
    for step in steps():
        found, wanted = both(runners, step, ops)
        assert same(found, wanted)
        replayed.add(found.is_replayed)
    assert replayed == {False, True}
    assert len(caplog.records) == 1
    assert "Some steps run without a graph" in caplog.text


def test_no_garbage_is_collected_while_a_graph_is_captured(ops: Ops) -> None:
    """A graph that is destroyed meanwhile spoils the capture."""
    collects = []

    def noted(plan: Any, numbers: Tensor) -> Tensor:
        collects.append(gc.isenabled())
        return 2 * numbers  # torch warns of graphs that are empty

    ops.record(noted, INPUTS[:1], 4, 4, None)
    assert collects == [True, False]
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": torch.device("cpu")}, "serves GPUs alone"),
        ({"dtype": "float16"}, "has no float16"),
        ({"quantization": "int8"}, None),
        ({"capability": (7, 5)}, "compute capability 8.0 or more, and this one has 7.5"),
        ({"which": None}, "needs a C compiler"),
        ({}, None),
    ],
)
def test_what_it_does_not_serve_is_said(
    ops: Ops, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], reason: str | None
) -> None:
    change = dict(change)
    capability = change.pop("capability", (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.delenv("CC", raising=False)
    found = change.pop("which", "/usr/bin/gcc")
    monkeypatch.setattr("shutil.which", lambda name: found)
    monkeypatch.setattr(Path, "exists", lambda self: True)
    asked = KernelOptions(**{"device": ops.device, "dtype": "bfloat16", **change})
    said = type(ops).supports(asked)  # type: ignore[attr-defined]
    assert said is None if reason is None else reason in said


class Doubled:
    """What it is called with, times two; `sizes` are the rows that it was called with."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []

    def __call__(self, plan: Any, numbers: Tensor, rows: Tensor, gathered: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.sizes.append((len(numbers), len(gathered)))
        return numbers * 2, rows * 2, gathered * 2


def test_rows_that_fill_up_a_graph_have_what_their_input_says(ops: Ops) -> None:
    recording = ops.record(lambda plan, *inputs: [2 * each for each in inputs], PADDED, 4, 4, None)
    recording.fill([np.array([3, 4]), np.array([5, 6])])
    recording.start(2, 2, None)
    assert [each.tolist() for each in recording.found] == [[6, 8, -2, -2], [10, 12, 0, 0]]


PADDED = [Input(torch.int64, padding=-1), Input(torch.int64)]
INPUTS = [Input(torch.int64), Input(torch.float32, 3), Input(torch.int64, is_gathered=True)]


def test_buckets_are_captured_largest_first_once_for_few_gathered_rows_and_once_for_all(ops: Ops) -> None:
    doubled = Doubled()
    ops.buckets = 2, 16, 40
    Captured(ops, doubled, INPUTS, 30, 20)
    assert doubled.sizes[::2] == doubled.sizes[1::2] == [(40, 20), (40, 8), (16, 16), (16, 8), (2, 2)]


def test_what_is_captured_at_its_first_use_is_captured_once(ops: Ops) -> None:
    doubled = Doubled()
    ops.buckets = 2, 16, 40
    captured = Captured(ops, doubled, INPUTS)
    for rows, gathered in ((1, 1), (2, 0), (9, 2), (16, 16), (12, 9), (41, 3), (5, 8)):
        numbers, given = np.arange(rows) + rows, torch.full((rows, 3), float(rows), device=ops.device)
        captured.start((numbers, given, np.arange(gathered)), rows, gathered)
        first, second, third = captured.finish()
        assert first[:rows].tolist() == (2 * numbers).tolist()
        assert second[:rows].tolist() == (2 * given).tolist()
        assert third[:gathered].tolist() == (2 * np.arange(gathered)).tolist()
        assert captured.is_replayed == (rows <= 40)
    assert doubled.sizes == [(2, 2)] * 2 + [(16, 8)] * 2 + [(16, 16)] * 2 + [(41, 3)]
