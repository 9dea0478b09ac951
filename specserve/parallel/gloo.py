"""What processes of a model on several hosts give each other in a step: torch.distributed's Gloo carries it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed
from torch import Tensor

TCPStore: Any = torch.distributed.TCPStore  # type: ignore[attr-defined]  # which torch's types leave out
_Gloo: Any = torch.distributed.ProcessGroupGloo

LONGEST_WAIT = timedelta(seconds=60)  # of a process for the others, in a step or while they meet


class GlooGather:
    """A `Gather` (see ops/peers.py). Its processes trust each other and their network: nothing is encrypted, and nobody
    who connects is asked for a secret."""

    def __init__(self, store: Any, host: str, rank: int, size: int) -> None:
        """Waits until all have met, each under the address `host` of its own. Raises RuntimeError where they do not."""
        options = _Gloo._Options()
        options._devices = [_Gloo.create_device(hostname=host)]
        options._timeout = LONGEST_WAIT
        self._group = _Gloo(store, rank, size, options)

    def __call__(self, parts: list[Tensor], rank: int) -> None:
        self._group.allgather([parts], [parts[rank]]).wait()


def meeting_place(host: str, size: int) -> Any:
    """Where so many processes find each other, of which this is the first. It has a port of its own."""
    return TCPStore(host, 0, size, is_master=True, wait_for_workers=False, timeout=LONGEST_WAIT)


def meeting_place_at(host: str, port: int, size: int) -> Any:
    """That of another process."""
    return TCPStore(host, port, size, is_master=False, timeout=LONGEST_WAIT)
