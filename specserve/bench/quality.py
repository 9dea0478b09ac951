"""What rounding the weights costs in quality: perplexity of a text, and how often the likeliest token is another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.table import Table

from specserve.bench.report import table_of
from specserve.config import EngineConfig
from specserve.errors import ConfigError, EngineError
from specserve.llm import LLM
from specserve.ops.choice import choose_ops
from specserve.ops.device import choose_device
from specserve.runtime.executor import local
from specserve.types import SamplingParams

REFERENCE: Mapping[str, Any] = {"dtype": "float32", "quantization": "none"}


@dataclass(slots=True)
class Scores:
    """What a model says of every token of a text that something comes before: its log-probability (natural), and the
    token that it finds likeliest there."""

    logprobs: list[float] = field(default_factory=list)
    best: list[int] = field(default_factory=list)

    @property
    def perplexity(self) -> float:
        return math.exp(-math.fsum(self.logprobs) / len(self.logprobs))

    def agreement(self, other: Scores) -> float:
        """The share of places where both find the same token likeliest."""
        return sum(a == b for a, b in zip(self.best, other.best, strict=True)) / len(self.best)


def check(options: Mapping[str, Any], quantizations: Sequence[str]) -> None:
    """Raise ConfigError for weights that do not exist or that no kernels here have, before a model is loaded."""
    if not quantizations or len(set(quantizations)) < len(quantizations):
        raise ConfigError(f"quantizations are {', '.join(quantizations) or 'none'}; name at least one, and each once.")
    for quantization in quantizations:
        config = EngineConfig(**{**options, "quantization": quantization})
        choose_ops(choose_device(config.device), config.dtype, quantization, 1, config.isa)


def quality(
    options: Mapping[str, Any],
    quantizations: Sequence[str],
    cut: Callable[[LLM], list[list[int]]],
    on_window: Callable[[str, int], object] = lambda weights, total: None,
) -> dict[str, Any]:
    """Score the same text with float32 weights and then with each of `quantizations`, teacher-forced: window by window
    through the engine's own prompt log-probabilities. `options` are those of LLM; their dtype goes with each
    quantization. `cut` makes the windows of ids, with the tokenizer of the float32 engine.

    ratio is a perplexity over float32's; top1_agreement is with float32's likeliest tokens. `on_window` is called
    before each window with the weights' name and the number of windows of all runs together. Ctrl-C ends it with the
    runs that were whole, and `interrupted`. Raises ConfigError, ModelError, CapacityError or EngineError, and
    KeyboardInterrupt where no run was whole.
    """
    check(options, quantizations)
    with LLM(**{**options, **REFERENCE}) as llm:
        pieces = cut(llm)
        _check_windows(llm, pieces)
        total = len(pieces) * (1 + len(quantizations))
        reference = _score(llm, pieces, partial(on_window, "float32", total))
        figures = {
            "model": llm.config.model,
            "device": llm.device,
            "kernels": local(llm.engine.executor).runner.ops.name,
        }
    runs: list[dict[str, Any]] = []
    try:
        for quantization in quantizations:
            with LLM(**{**options, "quantization": quantization}) as llm:
                on_own = partial(on_window, weights_name(llm.dtype, llm.quantization), total)
                runs.append(_run(llm, _score(llm, pieces, on_own), reference))
    except KeyboardInterrupt:
        if not runs:
            raise
    return {
        **figures,
        "interrupted": len(runs) < len(quantizations),
        "windows": len(pieces),
        "tokens": len(reference.logprobs),
        "reference": {**REFERENCE, "perplexity": reference.perplexity},
        "runs": runs,
    }


def weights_name(dtype: str, quantization: str) -> str:
    """How weights are stored, in a word."""
    return dtype if quantization == "none" else quantization


def _check_windows(llm: LLM, pieces: list[list[int]]) -> None:
    longest, limit = max(map(len, pieces)), llm.engine.limits.max_model_len - 1
    if longest > limit:
        raise ConfigError(
            f"A window of {longest} tokens is more than the {limit} that fit this model's context. Ask for a shorter "
            "window, or for a larger max_model_len if the model allows it."
        )


def _score(llm: LLM, pieces: list[list[int]], on_window: Callable[[], object]) -> Scores:
    """Every window by itself: what it comes to does not depend on what else runs, and progress shows."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    scores = Scores()
    for ids in pieces:
        on_window()
        output = llm.generate([ids], params)[0]
        if output.outputs[0].finish_reason == "error" or output.prompt_logprobs is None:
            raise EngineError(f"A window could not be scored: {output.outputs[0].error}")
        for entry in output.prompt_logprobs[1:]:
            assert entry is not None, "only the first token has nothing before it"
            scores.logprobs.append(entry.logprob)
            scores.best.append(next(iter(entry.top)))
    if any(map(math.isnan, scores.logprobs)):
        raise EngineError("The model's logits for this text are NaN: the model or its precision cannot handle it.")
    return scores


def _run(llm: LLM, scores: Scores, reference: Scores) -> dict[str, Any]:
    return {
        "dtype": llm.dtype,
        "quantization": llm.quantization,
        "perplexity": scores.perplexity,
        "ratio": scores.perplexity / reference.perplexity,
        "top1_agreement": scores.agreement(reference),
    }


def quality_table(figures: dict[str, Any]) -> Table:
    """One row for each kind of weights, float32 first."""
    text = f"{figures['model']}, {figures['tokens']} tokens in {figures['windows']} windows"
    table = table_of(text, "weights", "computes in", "perplexity", "over float32", "same top token")
    table.add_row("float32", "float32", f"{figures['reference']['perplexity']:.4f}", "", "")
    for run in figures["runs"]:
        name = weights_name(run["dtype"], run["quantization"])
        change = f"{run['ratio'] - 1:+.3%}"
        table.add_row(name, run["dtype"], f"{run['perplexity']:.4f}", change, f"{run['top1_agreement']:.2%}")
    return table
