"""The Triton kernels of int8 and int4 against torch: interpreted where there is no GPU. Integers are compared exactly,
and every row among others with that row alone, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from specserve.kernels import (
    _torch_groups as in_torch,
    _triton_groups as groups,
    _triton_integers as integers,
    _triton_rows as rows_of,
)
from specserve.kernels._torch_rows import ACTIVATIONS
from specserve.kernels._triton_groups import Integers, Rows
from specserve.kernels._triton_numbers import INTERPRETED
from specserve.ops.packing import Quantized
from specserve.testing.interpreted import mend_interpreter

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
FORMS = ("int8", "int4")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}

if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("Triton was imported without TRITON_INTERPRET=1, and there is no GPU", allow_module_level=True)
if INTERPRETED:
    mend_interpreter()
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NaN, in NumPy


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    torch.manual_seed(0)
    random.seed(0)
    return request.param


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape).to(DEVICE)


def packed(form: str, weight: Tensor | Quantized, bias: Tensor | None = None) -> Integers:
    found: Integers = groups.pack(form, weight, bias, DEVICE)
    return found


def matrix(weight: Integers) -> Tensor:
    """What it stands for, float64 [out, in, padded]."""
    numbers = weight.numbers
    if weight.minima is not None:
        numbers = torch.stack((numbers & 15, numbers >> 4), 1).flatten(0, 1)
    group = torch.arange(weight.num_groups, device=DEVICE) // weight.times
    found = numbers.double() * weight.steps[group].double()[..., None]
    found += 0 if weight.minima is None else weight.minima[group].double()[..., None]
    return found.transpose(0, 1).flatten(1)


def numbers(x: Rows) -> Tensor:
    """What they stand for, float64 [rows, width, padded]."""
    return x.ints.double() * x.scales[0].T.double().repeat_interleave(in_torch.GROUP, 1)


def same(found: Rows, wanted: Rows) -> bool:
    """All bits."""
    scales = found.scales.nan_to_num(-1), wanted.scales.nan_to_num(-1)
    return found.width == wanted.width and torch.equal(found.ints, wanted.ints) and torch.equal(*scales)


def part(x: Rows, rows: slice) -> Rows:
    return Rows(x.ints[rows].contiguous(), x.scales[:, :, rows].contiguous(), x.width)


@pytest.mark.parametrize(("rows", "n"), [(1, 1), (3, 32), (5, 70), (2, 1100)])
def test_rows_are_rounded_as_in_torch(form: str, rows: int, n: int) -> None:
    x = normal(rows, n)
    x[0, n // 2] = 1e-31
    if rows > 2:
        x[1, n // 3], x[2, n - 1] = float("nan"), float("-inf")
        x[0, :32] = torch.arange(32) + 0.5  # halves, which go to the even one
    for given in (x, x.bfloat16()):
        assert same(integers.quantize(given), groups.rows_in_torch(given))


def test_norms_are_rounded_as_in_torch(form: str) -> None:
    residual, delta, weight, post = normal(5, 100), normal(5, 100).bfloat16(), normal(100), normal(100)
    residual[3, 7] = float("nan")
    for some in (None, post):
        mine, theirs = residual.clone(), residual.clone()
        found = rows_of.add_rms_norm_quantized(mine, delta, some, weight, 1e-5)
        floats = rows_of.add_rms_norm(theirs, delta, some, weight, 1e-5, torch.float32)
        assert torch.equal(mine.nan_to_num(-1), theirs.nan_to_num(-1))
        wanted = groups.rows_in_torch(floats)
        others = [0, 1, 2, 4]
        assert same(part(found, others), part(wanted, others))
        assert found.scales[:, :, 3].isnan().all()


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 16, 64), (3, 33, 192), (17, 20, 96), (66, 16, 32)])
def test_sums_of_integers_are_exact(form: str, rows: int, n: int, k: int) -> None:
    """Steps are powers of two, so that no sum here needs more bits than a float32 has."""
    ints = torch.randint(-127, 128, (rows, k), device=DEVICE, dtype=torch.int8)
    low, high = (0, 16) if form == "int4" else (-120, 121)
    weight = torch.randint(low, high, (n, k), device=DEVICE)
    kept = Quantized(weight, torch.full((n, k // 32), 0.5, device=DEVICE), torch.full((n, k // 32), 3), 32)
    own = packed(form, kept, torch.randint(-9, 9, (n,)).float())
    assert own.bias is not None
    wanted = (ints.double() / 4) @ ((weight.double() - 3) / 2).T + own.bias.double()
    assert torch.equal(integers.linear(rows_from(ints, 0.25), own, torch.float32).double(), wanted)


def rows_from(ints: Tensor, scale: float) -> Rows:
    whole = torch.nn.functional.pad(ints, (0, -ints.shape[1] % groups.PADDED))
    sums = whole.view(len(ints), -1, in_torch.GROUP).sum(-1).T
    return Rows(whole, torch.stack((torch.ones_like(sums), sums)) * scale, ints.shape[1])


@pytest.mark.parametrize(("rows", "n", "k", "has_bias"), [(2, 20, 100, True), (18, 33, 72, False), (65, 16, 160, True)])
def test_products_are_torch_s(form: str, rows: int, n: int, k: int, has_bias: bool) -> None:
    weight, bias = normal(n, k) * k**-0.5, normal(n) if has_bias else None
    x, own = integers.quantize(normal(rows, k)), packed(form, weight, bias)
    wanted = numbers(x) @ matrix(own).T + (0 if bias is None else bias.double())
    found = integers.linear(x, own, torch.float32)
    torch.testing.assert_close(found.double(), wanted, **CLOSE)
    if rows == 2:
        assert torch.equal(integers.linear(x, own, torch.bfloat16), found.bfloat16())
    assert integers.linear(part(x, slice(0)), own, torch.float32).shape == (0, n)


@pytest.mark.parametrize(("group", "zeros"), [(32, 7), (64, None), (128, 7)])
def test_groups_of_checkpoints_are_kept(form: str, group: int, zeros: int | None) -> None:
    """GPTQ and AWQ have a scale and a zero for 32, 64 or 128 inputs."""
    n, k = 16, 256
    scales = (torch.rand(n, k // group) * 0.1 + 0.01).half()
    each = None if zeros is None else torch.full(scales.shape, zeros)
    kept = Quantized(torch.randint(0, 16, (n, k)), scales, each, group)
    own = packed(form, kept)
    assert (own.times, len(own.steps)) == (group // 32, k // group)
    torch.testing.assert_close(matrix(own).float().cpu(), kept[:], rtol=1e-3, atol=1e-3)
    x = integers.quantize(normal(3, k))
    torch.testing.assert_close(integers.linear(x, own, torch.float32).double(), numbers(x) @ matrix(own).T, **CLOSE)


@pytest.mark.parametrize(
    ("activation", "rows", "n", "k"),
    [("silu", 2, 48, 64), ("gelu_tanh", 1, 32, 32), ("relu", 18, 20, 72), ("gelu", 2, 33, 64)],
)
def test_activations(form: str, activation: str, rows: int, n: int, k: int) -> None:
    x, bias = integers.quantize(normal(rows, k)), normal(2 * n)
    own = packed(form, normal(2 * n, k) * k**-0.5, bias)
    both = numbers(x) @ matrix(own).T + bias.double()
    gate, up = both.chunk(2, -1)
    for found, wanted in (
        (integers.gated(x, own, activation), ACTIVATIONS[activation](gate) * up),
        (integers.activated(x, own, activation), ACTIVATIONS[activation](both)),
    ):
        size = wanted.shape[1]
        assert found.width == size and not found.ints[:, size:].any()
        whole = groups.rows_in_torch(wanted.float())
        torch.testing.assert_close(found.scales[0], whole.scales[0], **CLOSE)
        assert (found.ints.int() - whole.ints.int()).abs().max() <= 1
        assert torch.equal(found.scales[1], found.scales[0] * sums_of(found))


def sums_of(x: Rows) -> Tensor:
    return x.ints.view(len(x), -1, in_torch.GROUP).sum(-1).T.float()


def each_op(form: str) -> list[Callable[[Rows], Tensor | Rows]]:
    weight, two = packed(form, normal(16, 60), normal(16)), packed(form, normal(40, 60))
    return [
        lambda x: integers.linear(x, weight, torch.float32),
        lambda x: integers.gated(x, two, "silu"),
        lambda x: integers.activated(x, weight, "gelu"),
    ]


def rows_among(found: Tensor | Rows, rows: list[int]) -> list[Tensor]:
    return [found[rows]] if isinstance(found, Tensor) else [found.ints[rows], found.scales[:, :, rows]]


def test_a_row_has_the_same_bits_among_any_rows(form: str) -> None:
    """1 to 17 rows, and of larger tiles."""
    x = integers.quantize(normal(66, 60))
    linear, *others = each_op(form)
    counts = [(0, count) for count in range(1, 18)]
    for run, spans in ((linear, [*counts, (20, 53)]), *((each, [(5, 6), (0, 17)]) for each in others)):
        whole = run(x)
        for start, stop in spans:
            found = rows_among(run(part(x, slice(start, stop))), list(range(stop - start)))
            assert all(map(torch.equal, found, rows_among(whole, list(range(start, stop))))), (start, stop)


def test_a_row_that_is_not_finite_stays_alone(form: str) -> None:
    x, runs, others = normal(4, 60), each_op(form), [0, 3]
    plain = [rows_among(run(integers.quantize(x)), others) for run in runs]
    x[1, 5], x[2, 59] = float("nan"), float("inf")
    for run, wanted in zip(runs, plain, strict=True):
        found = run(integers.quantize(x))
        assert all(map(torch.equal, rows_among(found, others), wanted))
        broken = found[1:3] if isinstance(found, Tensor) else found.scales[:, 0, 1:3]
        assert broken.isnan().all()
