"""What a step must read from memory, op by op, how long each op takes, and how fast memory can be read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specserve.engine.engine import Engine
from specserve.ops import AttentionRows, Ops
from specserve.runtime.executor import local
from specserve.runtime.pack import StepInput
from specserve.runtime.runner import Runner

OPS = frozenset(
    {"embed", "fused_add_norm", "linear", "rope_and_cache", "attention", "gated", "gather_rows", "norm", "argmax"}
    | {"activated", "add", "quantize_activation", "softcap", "tap", "top_k", "route", "experts"}
    | {"norm_projections", "attention_floats"}
)
WHOLE = ("route", "experts")  # calls that may become several ops in a recording, which are told as one
WEIGHTS = ("weight", "post", "norms", "router")  # the contract's names for what was packed at load
BANDWIDTH_BYTES = 2**28  # no cache holds so much
BANDWIDTH_PASSES = 7


def num_bytes(packed: Any) -> int:
    """Bytes of all tensors in what a backend packed: a tensor, a dataclass or a tuple of such; 0 for anything else."""
    if isinstance(packed, Tensor):
        return packed.numel() * packed.element_size()
    if is_dataclass(packed):
        return sum(num_bytes(getattr(packed, entry.name)) for entry in fields(packed))
    return sum(map(num_bytes, packed)) if isinstance(packed, tuple | list) else 0


@dataclass(frozen=True, slots=True)
class Call:
    """One op as a model calls it, and what it must read: bytes of weights, of the table for each row, and of KV for
    each token that a row sees. What ops hand to each other stays in caches and is not counted. Of experts that is, with
    one row, what its own take; with more rows they may share some, and the most is counted."""

    op: str
    weights: int = 0
    row: int = 0
    token: int = 0
    window: int | None = None
    expert: int = 0  # bytes of one
    num_experts: int = 0
    per_token: int = 0

    def reads(self, rows: AttentionRows) -> int:
        """Bytes it must read in this step."""
        counts: list[int] = np.diff(rows.query_starts).tolist()
        tokens = sum(
            _visible(cached, count, self.window) for cached, count in zip(rows.cached.tolist(), counts, strict=True)
        )
        experts = min(self.num_experts, self.per_token * sum(counts))
        return self.weights + self.row * sum(counts) + self.token * tokens + self.expert * experts


def _visible(cached: int, rows: int, window: int | None) -> int:
    """How many tokens of a sequence any of its rows sees; the first row, at index `cached`, sees back the furthest."""
    return cached + rows - (0 if window is None else max(0, cached + 1 - window))


def _describe(op: str, arguments: dict[str, Any], last: Sequence[Call] = ()) -> Call:
    """`last` are the calls before it."""
    if op == "route":
        counts = arguments["num_experts"], arguments["per_token"]
        return Call(op, num_bytes(arguments["router"]), num_experts=counts[0], per_token=counts[1])
    if op == "experts":
        route = next(call for call in reversed(last) if call.op == "route")
        expert = num_bytes(arguments["weights"]) // route.num_experts
        return Call(op, expert=expert, num_experts=route.num_experts, per_token=route.per_token)
    weights = sum(num_bytes(arguments.get(name)) for name in WEIGHTS)
    assert weights or op not in ("linear", "gated", "activated"), "a packed weight shows its tensors"
    if op == "embed":
        table, num_tables = arguments["table"], 1 if arguments.get("placed") is None else 2
        return Call(op, row=num_tables * table.shape[1] * table.element_size())
    if op.startswith("attention"):
        kv = arguments["kv"]  # [2, slots, kv_heads, d]
        return Call(op, token=2 * kv.shape[2] * kv.shape[3] * kv.element_size(), window=arguments["window"])
    return Call(op, weights)


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a step's forward pass: its op, named by what it follows where several do like work, and what it took
    and had to read."""

    name: str
    seconds: float
    num_bytes: int


class WatchedOps:
    """A device's ops for one model, whose steps all make the same calls, with each call noted once and timed always.
    Kernels that record are timed by their recording's own `profile` as they replay, others as they are called: on a GPU
    op by op, each waited for, with its launch, which a graph would save."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._recording: _Profiled | None = None
        self._calls: list[Call] = []
        self._seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ops, name)
        return partial(self._note, name, value) if name in OPS else value

    @property
    def records(self) -> bool:
        return self._ops.records and self._ops.device.type != "cuda"

    def record(self, *args: Any) -> Any:
        """As the ops do, but for what `recording` adds."""
        watched: Any = self
        return type(self._ops).record(watched, *args)

    @contextmanager
    def recording(self) -> Iterator[_Profiled]:
        ops: Any = self._ops  # the kind that can be timed as it replays
        with ops.recording() as recording:
            self._recording = _Profiled(recording)
            yield self._recording

    def begin(self) -> None:
        """A step begins."""
        self._seconds.clear()

    def parts(self, rows: AttentionRows) -> list[Part]:
        """The pieces of the last step, which ran `inputs`, in order."""
        names = [_follow(call.op, before.op) for before, call in _pairs(self._calls)]
        if self._recording is not None:
            return self._recording.parts(names, [call.reads(rows) for call in self._calls])
        timed = zip(names, self._seconds, self._calls, strict=True)
        return [Part(name, seconds, call.reads(rows)) for name, seconds, call in timed]

    @property
    def seconds(self) -> float:
        """What the last step spent on its ops; for a recording with what timing them takes, which is nobody's share."""
        return sum(self._seconds) if self._recording is None else self._recording.seconds

    def _note(self, name: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if len(self._seconds) == len(self._calls) or self._recording is not None:
            bound = inspect.signature(op).bind(*args, **kwargs)
            self._calls.append(_describe(name, bound.arguments, self._calls))
        if self._recording is not None:
            self._recording.mark()
            return op(*args, **kwargs)
        assert self._calls[len(self._seconds)].op == name, "a model's steps are alike"
        begun = perf_counter()
        result = op(*args, **kwargs)
        if self._ops.device.type == "cuda":
            torch.cuda.synchronize(self._ops.device)
        self._seconds.append(perf_counter() - begun)
        return result


def _pairs(calls: list[Call]) -> Iterator[tuple[Call, Call]]:
    """Each call with the one before it; the first has itself."""
    return zip(calls[:1] + calls[:-1], calls, strict=True)


def _follow(op: str, before: str) -> str:
    """What a linear layer is for is told by what it reads: attention's output, or that of the gates, or a norm's."""
    return f"{op} after {before}" if op == "linear" else op


class _Profiled:
    """A recording that times its ops whenever it runs. One call of the contract may have become several."""

    def __init__(self, recording: Any) -> None:
        self._recording = recording
        self.seconds = 0.0  # of the last run as a whole
        self._starts: list[int] = []
        self._timed: list[tuple[str, float]] = []

    def mark(self) -> None:
        """A call begins here."""
        self._starts.append(self._recording.num_ops)

    def start(self, num_rows: int, num_gathered: int, plan: Any) -> None:
        begun = perf_counter()
        self._timed = self._recording.profile(num_rows, num_gathered, plan)
        self.seconds = perf_counter() - begun

    def finish(self) -> None:
        """All is done."""

    def parts(self, names: list[str], reads: list[int]) -> list[Part]:
        """Every recorded op under the name of the call it began; what more came of a call reads nothing."""
        calls = {start: call for call, start in enumerate(self._starts)}
        parts: list[Part] = []
        for i, (own, seconds) in enumerate(self._timed):
            if i in calls:
                parts.append(Part(names[calls[i]], seconds, reads[calls[i]]))
            elif parts and parts[-1].name in WHOLE:
                parts[-1] = replace(parts[-1], seconds=parts[-1].seconds + seconds)
            else:
                parts.append(Part(own, seconds, 0))
        return parts


class WatchedRunner(Runner):
    """The runner of a model whose ops are watched."""

    def __init__(self, model: Any, ops: WatchedOps, plain: Runner, max_rows: int) -> None:
        watched: Any = ops
        sizes = plain.block_size, max_rows, plain.max_logit_rows
        super().__init__(model, watched, plain.kv, *sizes, plain.taps, plain.top_k)
        self.watched = ops
        self._inputs: StepInput | None = None

    def start(self, inputs: StepInput, features: Tensor | None = None) -> None:
        self.watched.begin()
        self._inputs = inputs
        super().start(inputs, features)

    def parts(self) -> list[Part]:
        """The pieces of the last step's forward pass."""
        assert self._inputs is not None, "a step has run"
        return self.watched.parts(self._inputs.rows)


@contextmanager
def watched(engine: Engine, max_rows: int) -> Iterator[WatchedRunner]:
    """Within it every step of the engine is taken apart; `max_rows` as for the runner that it replaces."""
    plain = local(engine.executor).runner
    assert isinstance(plain, Runner), "the whole model is in this process"
    model: Any = plain.model
    model.ops = WatchedOps(plain.ops)
    try:
        runner = WatchedRunner(model, model.ops, plain, max_rows)
        local(engine.executor).runner = runner
        yield runner
    finally:
        local(engine.executor).runner, model.ops = plain, plain.ops


def read_bandwidth(ops: Ops) -> float:
    """Bytes a second at which the device reads memory: by the kernels' own read loop where they have one, else the best
    of several sums (CPU) or copies (CUDA, bytes read and written) of a large tensor by torch."""
    own: Callable[[], float] | None = getattr(ops, "read_bandwidth", None)
    if own is not None:
        return own()
    source = torch.ones(BANDWIDTH_BYTES // 4, dtype=torch.float32, device=ops.device)
    if ops.device.type == "cuda":
        target = torch.empty_like(source)
        return 2 * max(_rate(lambda: target.copy_(source), ops.device) for _ in range(BANDWIDTH_PASSES))
    return max(_rate(source.sum, ops.device) for _ in range(BANDWIDTH_PASSES))


def _rate(read: Callable[[], Any], device: torch.device) -> float:
    begun = perf_counter()
    read()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return BANDWIDTH_BYTES / (perf_counter() - begun)
