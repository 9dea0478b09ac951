"""Hidden states of the target on disk, so that they are computed once and not once an epoch."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specserve.cache.sizing import GIB
from specserve.errors import CapacityError
from specserve.train.batches import Answer
from specserve.train.target import Target

_LARGEST = 65504.0  # of float16


class HiddenCache:
    """Float16 numbers [tokens of all answers, layers, hidden] in hidden.bin, and in hidden.done a byte for each answer
    whose numbers are there. What is asked for the first time is rounded as what was stored: a run that was killed goes
    on with the same numbers. Raises CapacityError where the disk is too small."""

    def __init__(self, folder: Path, target: Target, answers: Sequence[Answer], layers: Sequence[int]) -> None:
        self._target, self._answers, self._layers = target, answers, [*layers, target.last_layer]
        self._starts = [0, *itertools.accumulate(len(answer.tokens) for answer in answers)]
        shape = self._starts[-1], len(self._layers), target.spec.hidden_size
        self.num_bytes = 2 * int(np.prod(shape))
        path, done = folder / "hidden.bin", folder / "hidden.done"
        is_new = not path.exists() or path.stat().st_size != self.num_bytes or not done.exists()
        free = shutil.disk_usage(folder).free
        if is_new and self.num_bytes > free:
            raise CapacityError(
                f"--cache-hidden needs {self.num_bytes / GIB:.2f} GiB and {free / GIB:.2f} GiB are free in {folder}. "
                "Leave it out: the target then computes hidden states anew in each epoch."
            )
        if is_new:
            done.unlink(missing_ok=True)  # first: what it speaks of is about to go
        self._states = np.memmap(path, np.float16, "w+" if is_new else "r+", shape=shape)
        self._done = np.memmap(done, np.uint8, "w+" if is_new else "r+", shape=(len(answers),))

    def states(self, which: Sequence[int]) -> list[Tensor]:
        """Of these answers, as Target.hidden has them with the last layer behind `layers`."""
        missing = [i for i in which if not self._done[i]]
        computed = self._target.hidden([self._answers[i].tokens for i in missing], self._layers)
        for i, state in zip(missing, computed, strict=True):
            rounded = state.clamp(-_LARGEST, _LARGEST).half()
            self._states[self._starts[i] : self._starts[i + 1]] = rounded.cpu().numpy()
            self._done[i] = 1
        found = (torch.from_numpy(self._states[self._starts[i] : self._starts[i + 1]].copy()) for i in which)
        return [state.to(self._target.device).float() for state in found]
