"""Adapters in the native kernels, for every instruction set and format of weights: b a x of what they read, added to
each row's own product, and bits that depend on nothing else."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from specserve.ops import Input, RowAdapters
from specserve.ops.isa import choose_isa

if importlib.util.find_spec("specserve.kernels._native") is None and os.environ.get("SPECSERVE_REQUIRE_NATIVE") != "1":
    pytest.skip("Built without native kernels.", allow_module_level=True)
cpu: Any = importlib.import_module("specserve.kernels.cpu")

SETS = cpu.instruction_sets()
SETS = SETS[SETS.index(choose_isa("auto", SETS, "native")) :]  # SPECSERVE_ISA hides faster ones
FORMATS = ("float32", "bfloat16", "int8", "int4")
RANKS = (1, 3, 16, 7, 64, 33)
INPUTS, OUTPUTS = 100, 77
every_way = pytest.mark.parametrize(("isa", "weights"), [(isa, weights) for isa in SETS for weights in FORMATS])


def make(isa: str, weights: str, threads: int = 1) -> Any:
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    return cpu.Kernels(dtype, weights if weights.startswith("int") else "none", threads, isa)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Case:
    """A linear layer and a gated one with an adapter of each rank in a slot; the last slot is empty. Of each `b` the
    middle third has zeros where another layer's outputs would be."""

    def __init__(self, ops: Any) -> None:
        self.ops, num_slots = ops, len(RANKS) + 1
        self.linear = ops.pack(random(OUTPUTS, INPUTS, seed=1), random(OUTPUTS, seed=2))
        self.gated = ops.pack_gated(random(OUTPUTS, INPUTS, seed=3), random(OUTPUTS, INPUTS, seed=4), None, None)
        self.banks = [ops.adapter_bank(num_slots, INPUTS, max(RANKS)) for _ in range(2)]
        self.parts = []
        for slot, rank in enumerate(RANKS):
            a, b, up = (
                random(*shape, seed=10 * slot + i) for i, shape in enumerate(((rank, INPUTS), *[(OUTPUTS, rank)] * 2))
            )
            b[OUTPUTS // 3 : 2 * OUTPUTS // 3, : rank // 2] = 0
            self.parts.append((a, b))
            ops.place_adapter(self.banks[0], slot, ops.pack_adapter(self.linear, a, b))
            ops.place_adapter(self.banks[1], slot, ops.pack_gated_adapter(self.gated, a, b, up))

    def run(self, x: Tensor, slots: list[int]) -> tuple[Tensor, Tensor]:
        """Both layers' outputs, [rows, OUTPUTS]."""
        ops, read = self.ops, self.ops.quantize_activation(x)
        given = torch.tensor(slots, dtype=torch.int64)
        out = ops.linear(read, self.linear, RowAdapters(self.banks[0], given)).clone()
        gated = ops.gated(read, self.gated, "silu", RowAdapters(self.banks[1], given))
        return out, torch.cat([part.clone().float() for part in gated.parts], 1)


def numbers(x: Any) -> Tensor:
    """What an activation stands for, float32 [rows, width]."""
    if len(x.parts) == 1:
        return x.parts[0].float()[:, : x.width]
    ints, scales, _ = x.parts
    return (ints.float().view(len(ints), -1, 32) * scales[:, :, None]).flatten(1)[:, : x.width]


@every_way
def test_each_row_has_what_its_adapter_adds(isa: str, weights: str) -> None:
    case = Case(make(isa, weights))
    x = random(9, INPUTS, seed=5)
    slots = [0, 1, 2, 3, 4, 5, 6, -1, 2]
    found, _ = case.run(x, slots)
    plain = case.ops.linear(case.ops.quantize_activation(x), case.linear)
    read = numbers(case.ops.quantize_activation(x))
    tolerance = 1e-4 if weights == "float32" else 0.02  # a is rounded as weights are that read the same, b to bfloat16
    for row, slot in enumerate(slots):
        if not 0 <= slot < len(RANKS):
            assert torch.equal(found[row], plain[row])
            continue
        a, b = case.parts[slot]
        wanted = b @ (a @ read[row])
        torch.testing.assert_close(
            found[row] - plain[row], wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max())
        )


@every_way
def test_a_row_has_the_same_bits_among_any_rows(isa: str, weights: str) -> None:
    case, threaded = Case(make(isa, weights)), Case(make(isa, weights, threads=3))
    x = random(40, INPUTS, seed=6)
    slots = [(3 * i + i // 7) % (len(RANKS) + 2) - 1 for i in range(40)]
    alone = [case.run(x[i : i + 1], slots[i : i + 1]) for i in range(40)]
    wanted = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    for runs in (case, threaded):
        for count in (2, 5, 8, 17, 40):
            assert all(
                torch.equal(own, all_rows[:count])
                for own, all_rows in zip(runs.run(x[:count], slots[:count]), wanted, strict=True)
            )
    alike = [2] * 40  # rows of one adapter share what is read of it
    shared = case.run(x, alike)
    for i in (0, 7, 39):
        assert all(
            torch.equal(each[i : i + 1], own) for each, own in zip(shared, case.run(x[i : i + 1], [2]), strict=True)
        )


@pytest.mark.parametrize("weights", [each for each in FORMATS if each != "bfloat16"])  # which AVX-512 adds in pairs
def test_vectors_of_any_width_have_the_same_bits(weights: str) -> None:
    x, slots = random(12, INPUTS, seed=7), [i % 7 - 1 for i in range(12)]
    found = [Case(make(isa, weights)).run(x, slots)[0] for isa in SETS if isa in ("avx512", "avx2", "avx_vnni")]
    assert all(torch.equal(each, found[0]) for each in found[1:])


@pytest.mark.parametrize("weights", FORMATS)
def test_a_recording_sees_what_is_in_a_slot_when_it_runs(weights: str) -> None:
    ops = make(SETS[0], weights, threads=2)
    case = Case(ops)

    def layer(plan: None, x: Tensor, slots: Tensor) -> Tensor:
        out: Tensor = ops.linear(ops.quantize_activation(x), case.linear, RowAdapters(case.banks[0], slots))
        return out

    recording = ops.record(layer, [Input(torch.float32, INPUTS), Input(torch.int64)], 16, 16, None)
    x = random(16, INPUTS, seed=8)

    def run(slots: list[int]) -> Tensor:
        recording.fill([x[: len(slots)], torch.tensor(slots).numpy()])
        recording.start(len(slots), len(slots), None)
        recording.finish()
        return recording.found[: len(slots)].clone()

    for slots in ([0] * 16, [-1] * 16, [1, -1, 2], [3], [-1], [4, 4, 4, 5]):
        assert torch.equal(run(slots), case.run(x[: len(slots)], slots)[0])
    before = run([0])
    ops.place_adapter(case.banks[0], 0, None)
    assert torch.equal(run([0]), run([-1])) and not torch.equal(run([0]), before)
    ops.place_adapter(case.banks[0], 0, ops.pack_adapter(case.linear, *case.parts[0]))
    assert torch.equal(run([0]), before)


@pytest.mark.parametrize("weights", FORMATS)
def test_embeddings_have_theirs(weights: str) -> None:
    ops, vocab, hidden = make(SETS[0], weights, threads=2), 50, 60
    table = ops.pack_table(random(vocab, hidden))
    bank = ops.adapter_bank(3, vocab, 8)
    a, b = random(5, vocab, seed=1), random(hidden, 5, seed=2)
    ops.place_adapter(bank, 1, ops.pack_table_adapter(table, a, b))
    ids, slots = torch.tensor([3, 49, 0, 3]), torch.tensor([1, 1, -1, 0])
    plain = ops.embed(ids, table, 2.0).clone()
    changed = ops.embed(ids, table, 2.0)
    ops.embed_adapters(changed, ids, RowAdapters(bank, slots), 2.0)
    tolerance = 1e-5 if weights == "float32" else 0.02
    torch.testing.assert_close(changed[:2] - plain[:2], 2 * (a[:, ids[:2]].T @ b.T), rtol=tolerance, atol=4 * tolerance)
    assert torch.equal(changed[2:], plain[2:])


@pytest.mark.parametrize("weights", FORMATS)
def test_a_row_that_is_not_finite_leaves_the_others_alone(weights: str) -> None:
    case = Case(make(SETS[0], weights))
    x, slots = random(6, INPUTS, seed=9), [0, 1, 2, 1, 0, -1]
    wanted = case.run(x, slots)
    x[3] = float("nan")
    found = case.run(x, slots)
    others = [0, 1, 2, 4, 5]
    assert all(torch.equal(own[others], right[others]) for own, right in zip(found, wanted, strict=True))
    assert not bool(found[0][3].isfinite().all())
