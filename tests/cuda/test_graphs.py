"""Graphs of the faked device do what was captured, again, on what their inputs hold; what a real one could not do is
said when it is captured or replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from specserve.testing import fake_cuda
from specserve.testing.cuda_graph import CaptureError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    with fake_cuda() as device, torch.inference_mode():
        yield device


def captured(function: Callable[[], Tensor | None]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
        found = function()
    return graph, found


def test_a_replay_does_what_was_captured(device: torch.device) -> None:
    x, total = torch.arange(6.0, device=device), torch.zeros(3, device=device)

    def function() -> Tensor:
        rows = (2 * x).view(2, 3)
        total.add_(rows[1])
        best = rows.sum(1).argmax(0, keepdim=True)
        return rows[best][0] + torch.arange(3, device=device)

    graph, found = captured(function)
    assert total.tolist() == [0, 0, 0], "capturing runs nothing"
    assert found.isnan().all()
    for turn in range(1, 3):
        graph.replay()
        assert found.tolist() == [6, 9, 12]
        assert total.tolist() == [6 * turn, 8 * turn, 10 * turn]
    x[:3] = 9
    graph.replay()
    assert found.tolist() == [18, 19, 20]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[0].item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x[0].cpu(),
        lambda x: bool(x[0] > 1),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: x.masked_select(x > 1),
        lambda x: torch.equal(x, x),
        lambda x: torch.zeros(4).copy_(x),
    ],
)
def test_the_host_may_not_wait_for_what_is_captured(function: Callable[[Tensor], Tensor], device: torch.device) -> None:
    x = torch.arange(4.0, device=device)
    with pytest.raises(CaptureError):
        captured(lambda: function(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.tensor([1.0], device=x.device),
        lambda x: torch.arange(4).to(x.device),
        lambda x: x.copy_(torch.ones(4)),
        lambda x: x[[0, 1]],
        lambda x: x[torch.tensor([0, 1])],
    ],
)
def test_what_is_captured_may_not_make_tensors_of_the_host_s_numbers(
    function: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    x = torch.arange(4.0, device=device)
    with pytest.raises(CaptureError):
        captured(lambda: function(x))


def test_memory_that_is_page_locked_is_copied(device: torch.device) -> None:
    host = torch.zeros(4, pin_memory=True)
    there, back = torch.zeros(2, device=device), torch.zeros(2, pin_memory=True)

    def function() -> None:
        there.copy_(host[:2], non_blocking=True)
        there.add_(1)
        back.copy_(there, non_blocking=True)

    graph, _ = captured(function)
    host.numpy()[:] = 5
    graph.replay()
    assert back.tolist() == [6, 6]


def test_an_input_may_not_become_another_tensor(device: torch.device) -> None:
    inputs = [torch.ones(3, device=device)]
    graph, found = captured(lambda: inputs[0] + 1)
    graph.replay()
    assert found.tolist() == [2, 2, 2]
    inputs[0] = torch.zeros(3, device=device)
    with pytest.raises(CaptureError, match="no longer there"):
        graph.replay()


def test_one_graph_is_captured_at_a_time() -> None:
    with pytest.raises(CaptureError, match="at a time"):
        captured(lambda: captured(lambda: None)[1])
