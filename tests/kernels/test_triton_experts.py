"""The Triton kernels of experts against torch, with floats and integers: interpreted where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from specserve.kernels import (
    _triton_experts as floats,
    _triton_groups as groups,
    _triton_integer_experts as integers,
    _triton_integers as rounding,
)
from specserve.kernels._torch_experts import _Routing
from specserve.kernels._triton_numbers import INTERPRETED
from specserve.kernels.reference import Kernels
from specserve.testing.interpreted import mend_interpreter

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
NUMBER, PER_TOKEN, HIDDEN, SIZE, OUT = 3, 2, 40, 20, 16
FORMS = ("none", "int8", "int4")

if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("Triton was imported without TRITON_INTERPRET=1, and there is no GPU", allow_module_level=True)
if INTERPRETED:
    mend_interpreter()
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NaN, in NumPy

Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def layer(form: str) -> tuple[Run, Run]:
    """Of x [rows, in], experts and their shares [rows, per_token]: the kernels, and torch."""
    random = torch.Generator().manual_seed(3)

    def matrices(rows: int, columns: int) -> list[Tensor]:
        each = [torch.randn(rows, columns, generator=random) * columns**-0.5 for _ in range(NUMBER)]
        return [one.to(DEVICE) for one in each]

    gates, ups, downs = matrices(SIZE, HIDDEN), matrices(SIZE, HIDDEN), matrices(OUT, SIZE)
    twin = Kernels(DEVICE, torch.float32, quantization=form)
    theirs, packed = twin.pack_experts(gates, ups, downs), pack(form, gates, ups, downs)

    def shared(x: Tensor) -> Tensor:
        return x[:, :OUT].contiguous()

    def mine(x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        if form == "none":
            return floats.experts(x, packed, chosen, shares, "silu", shared(x))
        return integers.experts(rounding.quantize(x), packed, chosen, shares, "silu", shared(x))

    def reference(x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        return twin.experts(x, theirs, _Routing(chosen, shares, None), "silu", shared(x))

    return mine, reference


def pack(form: str, gates: list[Tensor], ups: list[Tensor], downs: list[Tensor]) -> Any:
    both = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
    if form == "none":
        return groups.Experts(torch.stack(both), torch.stack(downs))
    pair = ([groups.pack(form, each, None, DEVICE) for each in some] for some in (both, downs))
    return groups.IntegerExperts(*map(groups.stacked, pair))


def step(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, HIDDEN, generator=random)
    shares, chosen = torch.randn(rows, NUMBER, generator=random).softmax(-1).topk(PER_TOKEN)
    chosen[0] = torch.tensor([2, 1])  # in an order that is not theirs
    return x.to(DEVICE), chosen.to(DEVICE), shares.to(DEVICE)


@pytest.mark.parametrize("form", FORMS)
def test_rows_go_through_their_experts(form: str) -> None:
    mine, reference = layer(form)
    torch.testing.assert_close(mine(*step(3)), reference(*step(3)), rtol=1e-5, atol=1e-5)
    alike = step(20)
    alike[1][:] = torch.tensor([2, 0])  # all of them go to two experts: more than one program has
    torch.testing.assert_close(mine(*alike), reference(*alike), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_its_bits_wherever_the_others_go_and_stays_alone(form: str) -> None:
    mine, _ = layer(form)
    x, chosen, shares = step(6)
    whole = mine(x, chosen, shares)
    assert torch.equal(mine(x[4:5], chosen[4:5], shares[4:5]), whole[4:5])
    others = [0, 1, 2, 3, 5]
    x[4], shares[4] = float("nan"), float("nan")
    found = mine(x, chosen, shares)
    assert found[4].isnan().all() and torch.equal(found[others], whole[others])
