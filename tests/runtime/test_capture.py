"""What is captured of ops gives what the ops give, for any number of rows, whatever the run before left."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specserve.ops import Input, Ops
from specserve.ops.backend import KernelOptions
from specserve.ops.capture import Captured
from specserve.registry import KERNELS

WIDTH = 40
INPUTS = [Input(torch.int64), Input(torch.float32, WIDTH)]


@pytest.fixture(params=["cpu", "reference"])
def ops(request: pytest.FixtureRequest) -> Ops:
    made: Ops = KERNELS.find(request.param).create(KernelOptions(torch.device("cpu"), "float32", "none"))
    return made


class Sums:
    """The embeddings of tokens plus what comes with their rows, which it overwrites, normed."""

    def __init__(self, ops: Ops) -> None:
        self.ops, self.num_calls = ops, 0
        self.table = ops.pack_table(torch.randn(30, WIDTH, generator=torch.Generator().manual_seed(1)))
        self.weight = ops.pack_vector(torch.ones(WIDTH))

    def __call__(self, plan: Any, tokens: Tensor, features: Tensor) -> Tensor:
        self.num_calls += 1
        self.ops.fused_add_norm(features, self.ops.embed(tokens, self.table, 1.0), None, self.weight, 1e-5)
        return self.ops.norm(features, self.weight, 1e-5)

    def wanted(self, tokens: np.ndarray[Any, Any], features: Tensor) -> Tensor:
        x = self.table[torch.from_numpy(tokens)].float() + features
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


def inputs(rows: int, seed: int) -> tuple[np.ndarray[Any, Any], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens: np.ndarray[Any, Any] = torch.randint(30, (rows,), generator=generator).numpy()
    return tokens, torch.randn(rows, WIDTH, generator=generator)


def test_it_is_replayed_on_other_rows_and_made_again_for_more(ops: Ops) -> None:
    sums = Sums(ops)
    captured = Captured(ops, sums, INPUTS)
    for turn, rows in enumerate([3, 8, 1, 9, 12, 100, 2]):
        tokens, features = inputs(rows, turn)
        before = features.clone()
        found = captured((tokens, features), rows)[:rows].clone()
        torch.testing.assert_close(found, sums.wanted(tokens, before), rtol=0, atol=1e-5)
        assert torch.equal(features, before)
    assert sums.num_calls == (3 if ops.records else 7)  # for 8, 16 and 100 rows


def test_it_is_made_at_once_where_the_most_rows_are_known(ops: Ops) -> None:
    sums = Sums(ops)
    captured = Captured(ops, sums, INPUTS, 16)
    assert sums.num_calls == ops.records
    for rows in (16, 1):
        captured((inputs(rows, rows)), rows)
    assert sums.num_calls == (1 if ops.records else 2)


def test_a_run_that_nobody_finished_leaves_nothing_to_the_next(ops: Ops) -> None:
    sums = Sums(ops)
    captured = Captured(ops, sums, INPUTS)
    captured.start(inputs(8, 1), 8)
    tokens, features = inputs(5, 2)
    captured.start((tokens, features), 5)
    torch.testing.assert_close(captured.finish()[:5], sums.wanted(tokens, features), rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", [WIDTH - 1, WIDTH + 1])
def test_rows_of_another_width_are_refused(ops: Ops, width: int) -> None:
    sums = Sums(ops)
    captured = Captured(ops, sums, INPUTS)
    with pytest.raises((ValueError, RuntimeError, AssertionError)):
        captured((np.zeros(4, np.int64), torch.zeros(4, width)), 4)


def test_rows_that_run_op_by_op_are_padded_as_their_input_says() -> None:
    ops: Ops = KERNELS.find("reference").create(KernelOptions(torch.device("cpu"), "float32", "none"))
    captured = Captured(ops, lambda plan, *given: given, [Input(torch.int64, padding=-1), Input(torch.int64)])
    found = captured((np.array([3, 9]), np.array([4, 5])), 2)
    assert [each.tolist() for each in found] == [[3, 9, -1, -1], [4, 5, 0, 0]]
