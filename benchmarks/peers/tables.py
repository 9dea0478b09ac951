"""Turns what was measured into figures, ratios and tables. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from statistics import median
from typing import Any

from measure import Contender, Figures
from rich.table import Table

from specserve.bench.report import table_of

NOT_RUN = "-"


def scenario(
    streams: int, figures: Sequence[Figures], unsupported: dict[Contender, str], baseline: str
) -> dict[str, Any]:
    """Everything about one number of streams, as JSON has it. `baseline` is the engine the ratios are of.

    tokens_per_second counts the prompts' time; it, gains (speculation over plain decoding of one engine) and ratios are
    medians over repeats. Times are milliseconds, medians over prompts. agreeing_tokens: the median length of what an
    answer shares with the baseline's plain one.
    """
    reference = next(f for f in figures if f.contender.engine == baseline and not f.contender.speculation)
    runs = [_run(f, reference) for f in figures]
    runs += [_identity(contender) | {"unsupported": reason} for contender, reason in unsupported.items()]
    engines = {f.contender.engine: _modes(figures, f.contender.engine) for f in figures}
    return {
        "streams": streams,
        "prompts": len(reference.ids),
        "runs": runs,
        "gains": {engine: _gain(modes) for engine, modes in engines.items()},
        "ratios": {peer: _ratios(engines[baseline], modes) for peer, modes in engines.items() if peer != baseline},
    }


def table(result: dict[str, Any]) -> Table:
    """One row an engine: tokens a second, plain and with its own speculation, and the baseline's ratios to it."""
    streams = result["streams"]
    title = (
        f"{streams} stream{'s' * (streams > 1)}, {result['prompts']} prompts; x: specserve's speed over this engine's"
    )
    columns = ("plain", "spec.", "gain", "first ms", "prefill", "ready s", "x plain", "x best", "x prefill")
    made = table_of(title, "tokens/s", *columns)
    by_engine: dict[str, dict[bool, dict[str, Any]]] = {}
    for run in result["runs"]:
        by_engine.setdefault(run["engine"], {})[run["speculation"]] = run
    for engine, modes in by_engine.items():
        made.add_row(engine, *_cells(modes, result["gains"][engine], result["ratios"].get(engine, {})))
    return made


def _cells(modes: dict[bool, dict[str, Any]], gain: float | None, ratios: dict[str, float | None]) -> list[str]:
    plain, drafting = modes[False], modes.get(True, {})
    rates = [run.get("tokens_per_second") for run in (plain, drafting)]
    return [
        *(_number(rate, ".1f") for rate in rates),
        _number(gain, ".2f", "x"),
        _number(plain["time_to_first_token_ms"], ".0f"),
        _number(plain["prefill_tokens_per_second"], ".0f"),
        _number(plain["ready_s"], ".1f"),
        *(_number(ratios.get(name), ".2f", "x") for name in ("plain", "best", "prefill")),
    ]


def _number(value: float | None, form: str, unit: str = "") -> str:
    return NOT_RUN if value is None else f"{value:{form}}{unit}"


def _identity(contender: Contender) -> dict[str, Any]:
    return {"engine": contender.engine, "weights": contender.weights, "speculation": contender.speculation}


def _run(figures: Figures, reference: Figures) -> dict[str, Any]:
    return {
        **_identity(figures.contender),
        "about": figures.runner.about,
        "ready_s": figures.runner.ready_s,
        "tokens": figures.tokens[0],
        "tokens_per_second": median(_rates(figures)),
        "tokens_per_second_by_repeat": _rates(figures),
        "time_per_output_token_ms": _median_ms(figures.after_first_s),
        "time_to_first_token_ms": _median_ms(figures.first_s),
        "prefill_tokens_per_second": _median(_prefill_rates(figures)),
        "prefill_tokens_per_second_by_repeat": _prefill_rates(figures),
        "agreeing_tokens": median(_agreeing(a, b) for a, b in zip(figures.ids, reference.ids, strict=True)),
    }


def _modes(figures: Sequence[Figures], engine: str) -> dict[bool, Figures]:
    return {f.contender.speculation: f for f in figures if f.contender.engine == engine}


def _gain(modes: dict[bool, Figures]) -> float | None:
    return _ratio(_rates(modes[True]), _rates(modes[False])) if True in modes else None


def _ratios(ours: dict[bool, Figures], theirs: dict[bool, Figures]) -> dict[str, float | None]:
    """The baseline over a peer: mode by mode, and the best mode of each, the one with the higher median."""
    best = [_rates(max(modes.values(), key=lambda f: median(_rates(f)))) for modes in (ours, theirs)]
    drafting = _ratio(_rates(ours[True]), _rates(theirs[True])) if True in ours and True in theirs else None
    return {
        "plain": _ratio(_rates(ours[False]), _rates(theirs[False])),
        "speculation": drafting,
        "best": _ratio(*best),
        "prefill": _ratio(_prefill_rates(ours[False]), _prefill_rates(theirs[False])),
    }


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    return _median(a / b for a, b in zip(ours, theirs, strict=True))


def _rates(figures: Figures) -> list[float]:
    return [tokens / seconds for tokens, seconds in zip(figures.tokens, figures.seconds, strict=True)]


def _prefill_rates(figures: Figures) -> list[float]:
    """Empty where no prefill ran."""
    pairs = zip(figures.prefill_tokens, figures.prefill_seconds, strict=True)
    return [tokens / seconds for tokens, seconds in pairs if tokens]


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return median(known) if known else None


def _median_ms(seconds: Iterable[float]) -> float | None:
    return _median(value * 1e3 for value in seconds)


def _agreeing(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
