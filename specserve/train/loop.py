"""Trains a head: steps, checkpoints and the curve. A run that is killed and started again ends with the same curve:
on a CPU bit for bit."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specserve.cache.sizing import GIB, free_memory
from specserve.errors import CapacityError, EngineError, ModelError
from specserve.files import check_regular, read_text, reading
from specserve.machine.ownership import interrupted_after
from specserve.train.acceptance import Acceptance, measure
from specserve.train.batches import Answer, Batch, make_batch, plan_batches
from specserve.train.cache import HiddenCache
from specserve.train.config import TrainingOptions, check_same
from specserve.train.heads import TrainedHead, batch_loss
from specserve.train.muon import Optimiser, learning_rate
from specserve.train.output import MOST_CURVE_BYTES
from specserve.train.target import Target
from specserve.train.text import write_whole
from specserve.train.writing import Say, duration

MOST_HELD_OUT = 128  # answers that acceptance is measured on
DRAFTS_MEASURED = 128  # of each, at most
_EVERY_S = 10.0  # between two lines of progress


class Training:
    """One head's training on `answers`, in `folder`, with what a run that was killed there left. Raises ConfigError
    where that was of other data."""

    def __init__(
        self,
        folder: Path,
        head: TrainedHead,
        target: Target,
        ids: NDArray[np.int64],
        answers: Sequence[Answer],
        held_out: Sequence[Answer],
        options: TrainingOptions,
        cache: HiddenCache | None = None,
    ) -> None:
        self._folder, self._options, self._cache = folder, options, cache
        self.head = head.to(target.device)
        self._target, self._ids = target, torch.from_numpy(ids).to(target.device)
        self._answers, self._held_out = answers, held_out[:MOST_HELD_OUT]
        lengths = [len(answer.tokens) for answer in answers]
        self._plan = plan_batches(lengths, options.epochs, options.batch_tokens, options.seed)
        self._num_tokens = np.cumsum([sum(lengths[i] for i in batch) for batch in self._plan])
        self._check_memory(
            max(map(len, self._plan)), max(len(batch) * max(lengths[i] for i in batch) for batch in self._plan)
        )
        self._optimiser = Optimiser(head, options.clip)
        self.seconds = 0.0  # of all runs together
        self._is_whole = True  # what `step` says: no step is half made
        self.step = 0
        self.saved = 0  # the step of the newest checkpoint; 0: there is none
        self._data = {"answers": len(answers), "answer_tokens": sum(lengths)}
        self._load()

    @property
    def num_steps(self) -> int:
        return len(self._plan)

    @property
    def num_tokens(self) -> int:
        """That were read up to now, prompts too, each as often as it was."""
        return int(self._num_tokens[self.step - 1]) if self.step else 0

    def run(self, say: Say, stop: Callable[[int], bool] = lambda step: False) -> None:
        """Train to the end, or until `stop` says so of a step that was made; then there is no newer checkpoint. Ctrl-C
        waits for the step's end, and what was trained is saved; a second does not wait, and the checkpoint before
        stays."""
        try:
            self._steps(say, stop)
        except KeyboardInterrupt:
            if self._is_whole and self.step:
                self._save()
            raise

    def _steps(self, say: Say, stop: Callable[[int], bool]) -> None:
        options, saved, said = self._options, time.monotonic(), time.monotonic()
        first, begun, before = self.step, time.monotonic(), self.seconds
        while self.step < self.num_steps:
            with interrupted_after():
                self._is_whole = False
                loss = self._one_step()
                self.step += 1
                line: dict[str, Any] = {"step": self.step, "tokens": self.num_tokens, "loss": loss}
                now = time.monotonic()
                self.seconds = before + now - begun
                if self.step % options.evaluate_every == 0 or self.step == self.num_steps:
                    shown = self.acceptance()["all"]
                    line |= {"accepted": shown.accepted, "acceptance": shown.by_depth}
                    say(f"step {self.step}: {shown.accepted:.2f} tokens of a draft accepted, by depth {shown.by_depth}")
                self._note(line)
                self._is_whole = True
            if stop(self.step):
                return
            if now - saved >= 60 * options.checkpoint_minutes or self.step == self.num_steps:
                self._save()
                saved = now
            if now - said >= _EVERY_S or self.step == self.num_steps:
                left = (self.num_steps - self.step) * (now - begun) / (self.step - first)
                say(f"step {self.step} / {self.num_steps}: loss {loss:.4f}, {duration(left)} left")
                said = now

    def acceptance(self) -> dict[str, Acceptance]:
        """On what is held out, by category."""
        self.head.eval()
        found = measure(self.head, self._held_out_batches())
        self.head.train()
        return found

    def _check_memory(self, num_answers: int, num_tokens: int) -> None:
        """Raise CapacityError where a step will not fit: what takes memory are, of each guess, the target's
        distribution, the logits, theirs, what is accepted of it and a gradient; of a measurement, the distributions of
        all places, and a depth's logits and what is made of them."""
        trained, measured = (min(num_answers * n, num_tokens) for n in (self._options.anchors, DRAFTS_MEASURED))
        guesses = max(5 * trained * len(self.head.depth_weights), num_tokens + 3 * measured)
        own = 4 * sum(each.numel() for each in self.head.parameters())  # with gradients and the optimiser's two
        needed, free = 4 * (len(self._ids) * guesses + own), free_memory(self._target.device)
        if needed > free:
            raise CapacityError(
                f"A training step needs about {needed / GIB:.2f} GiB and {free / GIB:.2f} GiB are free on "
                f"{self._target.device}. Lower --batch-tokens, --draft-vocab-size or --anchors."
            )

    def _held_out_batches(self) -> Iterator[Batch]:
        lengths = [len(answer.tokens) for answer in self._held_out]
        generator = torch.Generator().manual_seed(self._options.seed)
        for batch in plan_batches(lengths, 1, self._options.batch_tokens, self._options.seed):
            yield self._batch([self._held_out[i] for i in batch], DRAFTS_MEASURED, generator)

    def _batch(self, answers: Sequence[Answer], drafts: int, generator: torch.Generator) -> Batch:
        states = None if self._cache is None else self._cache.states(self._target, answers)
        head, depth = self.head, len(self.head.depth_weights)
        return make_batch(self._target, answers, head.hidden_layers, self._ids, depth, drafts, generator, states)

    def _one_step(self) -> float:
        options = self._options
        which = self._plan[self.step]
        generator = torch.Generator().manual_seed((options.seed << 32) + self.step)
        batch = self._batch([self._answers[i] for i in which], options.anchors, generator)
        loss = batch_loss(self.head, batch, options.cross_entropy)
        value = loss.item()
        if not np.isfinite(value):
            raise EngineError(f"The loss of step {self.step + 1} is {value}. Train anew with a lower --learning-rate.")
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
            rate = options.learning_rate, options.warmup, options.decay
            self._optimiser.step(learning_rate(self.step, self.num_steps, *rate))
        return value

    def _note(self, line: Mapping[str, Any]) -> None:
        with (self._folder / "curve.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _save(self) -> None:
        """On the CPU, so that another device may go on with it."""
        state = {
            "head": {name: each.cpu() for name, each in self.head.state_dict().items()},
            "optimiser": self._optimiser.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "data": self._data,
        }
        content = io.BytesIO()
        torch.save(state, content)
        write_whole(self._folder / "checkpoint.pt", content.getvalue())
        self.saved = self.step

    def _load(self) -> None:
        """Go on behind the checkpoint, if there is one; of the curve only what comes before it stays."""
        path, curve = self._folder / "checkpoint.pt", self._folder / "curve.jsonl"
        if path.exists():
            try:
                with reading(path):
                    self._resume(path)
            except ModelError as error:
                raise ModelError(f"{error} Remove it to train from the start.") from error
        if curve.exists():
            with reading(curve):
                lines = read_text(curve, MOST_CURVE_BYTES).splitlines(keepends=True)[: self.step]
            write_whole(curve, "".join(lines).encode())

    def _resume(self, path: Path) -> None:
        check_regular(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
        check_same(self._folder, state["data"], self._data)
        if state["step"] not in range(self.num_steps + 1):
            raise ValueError(f"step {state['step']} of {self.num_steps}")
        self.head.load_state_dict(state["head"])
        self._optimiser.load_state_dict(state["optimiser"])
        self.step, self.seconds = int(state["step"]), float(state["seconds"])
        self.saved = self.step
