"""Adapters in every backend, for every instruction set and format of weights: b a x of what they read, added to each
row's own product, and bits that depend on nothing else."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specserve.ops import Input, RowAdapters
from specserve.ops.isa import choose_isa
from specserve.registry import KERNELS
from specserve.testing import fake_cuda

FORMATS = ("float32", "bfloat16", "int8", "int4")
RANKS = (1, 3, 16, 7, 64, 33, 4, 40)
INPUTS, OUTPUTS = 100, 77
IS_FAKED = not torch.cuda.is_available()  # where Triton interprets, a hundred times slower


class Way(NamedTuple):
    """A backend, its format of weights, and its instruction set."""

    backend: str
    weights: str
    isa: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, self))


def native_sets() -> list[str]:
    is_built = importlib.util.find_spec("specserve.kernels._native") is not None
    if not is_built and os.environ.get("SPECSERVE_REQUIRE_NATIVE") != "1":
        return []
    sets: list[str] = importlib.import_module("specserve.kernels.cpu").instruction_sets()
    return sets[sets.index(choose_isa("auto", sets, "native")) :]  # SPECSERVE_ISA hides faster ones


SETS = native_sets()
OTHERS = [Way("reference", weights) for weights in FORMATS] + [Way("triton", weights) for weights in FORMATS[:3]]
WAYS = [Way("cpu", weights, isa) for isa in SETS for weights in FORMATS] + OTHERS
RECORDING = [way for way in WAYS if way.backend == "triton" or way.isa == SETS[0]]


def make_native(way: Way, threads: int = 1) -> Any:
    dtype = torch.float32 if way.weights == "float32" else torch.bfloat16
    quantization = way.weights if way.weights.startswith("int") else "none"
    return importlib.import_module("specserve.kernels.cpu").Kernels(dtype, quantization, threads, way.isa)


@pytest.fixture
def ops(request: pytest.FixtureRequest) -> Iterator[Any]:
    way = request.param
    if way.backend == "cpu":
        yield make_native(way)
        return
    is_quantized = way.weights.startswith("int")
    backend, dtype = KERNELS.find(way.backend), torch.bfloat16 if is_quantized else getattr(torch, way.weights)
    more = {"quantization": way.weights} if is_quantized else {}
    if way.backend == "reference":
        yield backend(torch.device("cpu"), dtype, **more)
    elif not IS_FAKED:
        yield backend(torch.device("cuda"), dtype, **more)
    else:
        with fake_cuda(interprets=True) as device:
            yield backend(device, dtype, **more)


def ways(chosen: list[Way]) -> Any:
    """Runs a test with `ops` of each."""
    marked = [pytest.param(way, id=str(way), marks=needs_triton() if way.backend == "triton" else ()) for way in chosen]
    return pytest.mark.parametrize("ops", marked, indirect=True)


def needs_triton() -> pytest.MarkDecorator:
    if (missing := KERNELS.missing("triton")) is not None:
        return pytest.mark.skip(reason=f"{missing} is not installed")
    is_interpreted = importlib.import_module("triton").knobs.runtime.interpret
    reason = "Triton was imported without TRITON_INTERPRET=1, and there is no GPU"
    return pytest.mark.skipif(not is_interpreted and IS_FAKED, reason=reason)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Layers:
    """A linear layer, one before an activation, and a gated one, each with an adapter of every rank in a slot; the last
    slot is empty. Of each `b` the middle third has zeros where another layer's outputs would be."""

    def __init__(self, ops: Any, inputs: int = INPUTS, outputs: int = OUTPUTS, ranks: tuple[int, ...] = RANKS) -> None:
        self.ops, self.inputs, self.ranks = ops, inputs, ranks
        matrices = [random(outputs, inputs, seed=seed) * inputs**-0.5 for seed in (1, 2, 3)]
        self.one, gate, up = (ops.pack(each, random(outputs, seed=4)) for each in matrices)
        self.plain = [self.one, gate, up]
        self.gated = ops.pack_gated(*matrices[1:], random(outputs, seed=4), random(outputs, seed=4))
        sizes = outputs, 2 * outputs
        self.banks = [ops.adapter_bank(len(ranks) + 1, inputs, size, max(ranks)) for size in sizes]
        self.parts = [self.adapter(rank, slot, outputs) for slot, rank in enumerate(ranks)]
        for slot, parts in enumerate(self.parts):
            self.place(slot, parts)

    def adapter(self, rank: int, seed: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
        a = random(rank, self.inputs, seed=10 * seed + 5) * self.inputs**-0.5
        b, up = (random(outputs, rank, seed=10 * seed + i) * rank**-0.5 for i in (6, 7))
        b[outputs // 3 : 2 * outputs // 3, : rank // 2] = 0
        return a, b, up

    def place(self, slot: int, parts: tuple[Tensor, Tensor, Tensor] | None) -> None:
        linear = gated = None
        if parts is not None:
            linear = self.ops.pack_adapter(self.one, *parts[:2])
            gated = self.ops.pack_gated_adapter(self.gated, *parts)
        self.ops.place_adapter(self.banks[0], slot, linear)
        self.ops.place_adapter(self.banks[1], slot, gated)

    def read(self, x: Tensor) -> Any:
        return self.ops.quantize_activation(x.to(self.ops.device))

    def linear(self, x: Tensor, slots: list[int]) -> Tensor:
        """The bits of the linear layer alone."""
        given = torch.tensor(slots, dtype=torch.int64, device=self.ops.device)
        return bits(self.ops.linear(self.read(x), self.one, RowAdapters(self.banks[0], given)))

    def run(self, x: Tensor, slots: list[int], seen: Callable[[Any], Tensor] | None = None) -> list[Tensor]:
        """What the three layers return for x float32 [rows, inputs], on the host: its bits, or as `seen`."""
        ops, read, given = self.ops, self.read(x), torch.tensor(slots, dtype=torch.int64, device=self.ops.device)
        one, gated = (RowAdapters(bank, given) for bank in self.banks)
        found = (
            (seen or bits)(layer(read, *more))
            for layer, *more in (
                (ops.linear, self.one, one),
                (ops.activated, self.one, "silu", one),
                (ops.gated, self.gated, "silu", gated),
            )
        )
        return list(found)

    def expected(self, x: Tensor, slots: list[int]) -> list[Tensor]:
        """The numbers that these are, of each layer's plain product and b a x in float64."""
        read = self.read(x)
        one, gate, up = (numbers(self.ops.linear(read, each)).double() for each in self.plain)
        for row, slot in enumerate(slots):
            if 0 <= slot < len(self.parts):
                a, b, up_b = (part.double() for part in self.parts[slot])
                shrunk = a @ numbers(read)[row].double()
                one[row] += b @ shrunk
                gate[row] += b @ shrunk
                up[row] += up_b @ shrunk
        return [one, F.silu(one), F.silu(gate) * up]


def bits(x: Any) -> Tensor:
    """An output as it is, on the host, not overwritten by the next."""
    parts = [x] if isinstance(x, Tensor) else x.parts if hasattr(x, "parts") else [x.ints, *x.scales.mT]
    return torch.cat([part.cpu().clone().float() for part in parts], 1)


def numbers(x: Any) -> Tensor:
    """What an output or an activation stands for, float32 [rows, width]."""
    if isinstance(x, Tensor):
        return x.cpu().float().clone()
    if not hasattr(x, "parts"):
        ints, scales = x.ints.cpu(), x.scales[0].mT.cpu()
    elif len(x.parts) == 1:
        return x.parts[0].float()[:, : x.width].clone()
    else:
        ints, scales, _ = x.parts
    return (ints.float().view(len(ints), -1, 32) * scales[:, :, None]).flatten(1)[:, : x.width]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(own, right) for own, right in zip(found, wanted, strict=True))


@ways(WAYS)
def test_each_row_has_what_its_adapter_adds(ops: Any, request: pytest.FixtureRequest) -> None:
    layers = Layers(ops)
    x, slots = random(11, INPUTS, seed=5), [*range(len(RANKS) + 1), -1, 2]
    found, wanted = layers.run(x, slots, numbers), layers.expected(x, slots)
    way = request.node.callspec.params["ops"]
    # A weight's dtype rounds a, b and outputs; a is rounded as weights are that read the same.
    tolerance = 1e-5 if way.weights == "float32" else 0.03 if way.weights.startswith("int") else 0.01
    for own, right in zip(found, wanted, strict=True):
        scale = float(right.abs().max())
        torch.testing.assert_close(own.double(), right, rtol=tolerance, atol=tolerance * scale)
    read = layers.read(x)
    plain = [numbers(ops.linear(read, layers.one)), numbers(ops.gated(read, layers.gated, "silu"))]
    for own, right in zip((found[0], found[2]), plain, strict=True):
        assert (own != right).any(1).tolist() == [0 <= slot < len(RANKS) for slot in slots]


@ways(OTHERS)
def test_long_rows_are_added_up_in_parts(ops: Any) -> None:
    layers = Layers(ops, inputs=4200, outputs=20, ranks=(5, 16))
    x, slots = random(3, 4200, seed=5), [1, 0, -1]
    tolerance = 1e-5 if ops.dtype == torch.float32 else 0.01
    for own, right in zip(layers.run(x, slots, numbers), layers.expected(x, slots), strict=True):
        torch.testing.assert_close(own.double(), right, rtol=tolerance, atol=tolerance * float(right.abs().max()))


@ways([way for way in WAYS if way.backend != "reference"])  # which wants its rows padded
def test_a_row_has_the_same_bits_among_any_rows(ops: Any, request: pytest.FixtureRequest) -> None:
    way = request.node.callspec.params["ops"]
    is_slow = way.backend == "triton" and IS_FAKED
    layers = Layers(ops, 20, 12, RANKS[:3]) if is_slow else Layers(ops)
    threaded = Layers(make_native(way, threads=3)) if way.backend == "cpu" else layers
    x, num_slots = random(64, layers.inputs, seed=6), len(layers.ranks) + 1
    slots = [(3 * i + i // 7) % (num_slots + 1) - 1 for i in range(64)]
    wanted = layers.run(x, slots)
    for count in (1, 2, 16, 17, 33) if is_slow else range(1, 65):
        assert torch.equal(layers.linear(x[:count], slots[:count]), wanted[0][:count]), count
    for count in (17,) if is_slow else (2, 5, 16, 17, 40):
        assert same(threaded.run(x[:count], slots[:count]), [each[:count] for each in wanted]), count
    for i in range(0, 64, 31 if is_slow else 1):
        assert same(layers.run(x[i : i + 1], slots[i : i + 1]), [each[i : i + 1] for each in wanted]), i
    shared = layers.linear(x, [2] * 64)  # rows of one adapter share what is read of it
    for i in (0, 63):
        assert torch.equal(shared[i : i + 1], layers.linear(x[i : i + 1], [2]))


@pytest.mark.parametrize("weights", [each for each in FORMATS if each != "bfloat16"])  # which AVX-512 adds in pairs
def test_vectors_of_any_width_have_the_same_bits(weights: str) -> None:
    x, slots = random(12, INPUTS, seed=7), [i % 7 - 1 for i in range(12)]
    sets = [isa for isa in SETS if isa in ("avx512", "avx2", "avx_vnni")]
    found = [Layers(make_native(Way("cpu", weights, isa))).run(x, slots) for isa in sets]
    assert all(same(each, found[0]) for each in found[1:])


@ways(RECORDING)
def test_a_recording_sees_what_is_in_a_slot_when_it_runs(ops: Any) -> None:
    layers = Layers(ops, 36, 20)

    def layer(plan: None, x: Tensor, slots: Tensor) -> Tensor:
        out: Tensor = ops.linear(ops.quantize_activation(x), layers.one, RowAdapters(layers.banks[0], slots))
        return out

    inputs = [Input(torch.float32, layers.inputs), Input(torch.int64, padding=-1)]
    recording = ops.record(layer, inputs, 16, 16, None)
    x = random(16, layers.inputs, seed=8)

    def run(slots: list[int]) -> Tensor:
        recording.fill([x[: len(slots)].to(ops.device), torch.tensor(slots).numpy()])
        recording.start(len(slots), len(slots), None)
        recording.finish()
        return bits(recording.found)[: len(slots)]

    for slots in ([0] * 16, [-1] * 16, [1, -1, 2], [3], [-1], [4, 4, 4, 5]):
        assert torch.equal(run(slots), layers.linear(x[: len(slots)], slots))
    plain, high, low = run([-1]), run([4]), run([0])
    layers.place(4, None)
    assert torch.equal(run([4]), plain)
    layers.place(4, layers.parts[0])  # whose rank is lower than that of the one before
    assert torch.equal(run([4]), low)
    layers.place(4, layers.parts[4])
    assert torch.equal(run([4]), high)
    assert not torch.equal(high, plain)


@ways(WAYS)
def test_embeddings_have_theirs(ops: Any) -> None:
    vocab, hidden = 50, 140
    table = ops.pack_table(random(vocab, hidden))
    bank, parts = ops.adapter_bank(4, vocab, hidden, 40), {}
    for slot, rank in ((0, 40), (1, 5)):
        parts[slot] = random(rank, vocab, seed=slot), random(hidden, rank, seed=7 + slot)
        ops.place_adapter(bank, slot, ops.pack_table_adapter(table, *parts[slot]))
    ids, slots = (torch.tensor(each, device=ops.device) for each in ([3, 49, 0, 3, 7], [1, 1, -1, 2, 0]))
    plain = ops.embed(ids, table, 2.0).clone()
    own = ops.embed(ids, table, 2.0)
    ops.embed_adapters(own, ids, RowAdapters(bank, slots), 2.0)
    plain, changed = plain.cpu(), own.cpu().clone()
    tolerance = 1e-5 if ops.dtype == torch.float32 else 0.02
    for row, (token, slot) in enumerate(zip(ids.tolist(), slots.tolist(), strict=True)):
        if slot not in parts:
            assert torch.equal(changed[row], plain[row])
            continue
        a, b = parts[slot]
        found, wanted = changed[row] - plain[row], 2 * (b @ a[:, token])
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))
    for row in range(5):
        alone = ops.embed(ids[row : row + 1], table, 2.0)
        ops.embed_adapters(alone, ids[row : row + 1], RowAdapters(bank, slots[row : row + 1]), 2.0)
        assert torch.equal(alone[0].cpu(), changed[row])


@ways(WAYS)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numbers that are not finite, in NumPy
def test_a_row_that_is_not_finite_leaves_the_others_alone(ops: Any) -> None:
    layers = Layers(ops, 36, 20)
    x, slots = random(6, layers.inputs, seed=9), [0, 1, 2, 1, 0, -1]
    wanted = layers.run(x, slots)
    x[3] = float("nan")
    found = layers.run(x, slots)
    others = [0, 1, 2, 4, 5]
    assert same([each[others] for each in found], [each[others] for each in wanted])
    assert not bool(found[0][3].isfinite().all())


@ways(WAYS)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_an_adapter_that_is_not_finite_leaves_the_others_rows_alone(ops: Any) -> None:
    layers = Layers(ops, 36, 20)
    x, slots = random(6, layers.inputs, seed=9), [0, 1, 2, 1, 0, -1]
    wanted = layers.run(x, slots)
    a, b, up = layers.parts[1]
    for broken in ((a * float("inf"), b, up), (a, b + float("nan"), up * float("nan"))):
        layers.place(1, broken)
        found = layers.run(x, slots)
        others = [0, 2, 4, 5]
        assert same([each[others] for each in found], [each[others] for each in wanted])
        assert not bool(found[0][[1, 3]].isfinite().all(1).any())
