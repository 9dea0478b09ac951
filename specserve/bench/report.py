"""Turns runs into figures: the JSON of a comparison and the tables people read. Measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from specserve.adapters import NO_ADAPTER
from specserve.bench.compare import PLAIN, Mismatch, Question, Reply, Run, mismatches
from specserve.terminal import FittedTable

if TYPE_CHECKING:
    from specserve.llm import LLM

PHASES = ("draft", "mask", "forward", "sample", "host", "total")


def report(
    llm: LLM, questions: Sequence[Question], concurrency: int, runs: Sequence[Run], interrupted: bool = False
) -> dict[str, Any]:
    """The whole comparison as JSON has it, or what there was of it when it was interrupted; speed-ups are relative to
    the run named "none".

    Sums (tokens, drafts, steps) go over all repeats. tokens_per_second is output tokens over wall time, prefill
    included; it and the speed-up are medians over repeats. Times are milliseconds, medians over requests. A category's
    tokens_per_second is one stream's: output tokens over the seconds from arrival to end, summed over its requests; so
    is an adapter's. Where the model alone answered there are no `adapters`.
    """
    plain = next(run for run in runs if run.drafter == PLAIN)
    different = [run.drafter for run, _ in mismatches(runs)]
    return {
        **described(llm),
        "concurrency": concurrency,
        "prompts": len({reply.question for reply in plain.replies}),
        "adapters": list(_adapters(plain, plain, questions)),
        "interrupted": interrupted,
        "runs": [_run(run, plain, questions, different.count(run.drafter)) for run in runs],
    }


def described(llm: LLM) -> dict[str, Any]:
    """The engine that was measured, for the JSON."""
    return {
        "model": llm.config.model,
        "device": llm.device,
        "dtype": llm.dtype,
        "quantization": llm.quantization,
        "threads": llm.threads,
    }


def _run(run: Run, plain: Run, questions: Sequence[Question], num_mismatched: int) -> dict[str, Any]:
    after_first, base = _time_per_output_token(run.replies), _time_per_output_token(plain.replies)
    return {
        "drafter": run.drafter,
        "output_tokens": _tokens(run.replies),
        "tokens_per_second": median(_rates(run)),
        "time_per_output_token_ms": None if after_first is None else after_first * 1e3,
        "time_to_first_token_ms": median(map(_time_to_first_token, run.replies)) * 1e3,
        "speedup": median(rate / other for rate, other in zip(_rates(run), _rates(plain), strict=True)),
        "decode_speedup": None if after_first is None or base is None else base / after_first,
        "mean_acceptance_length": acceptance_length(run.replies),
        "acceptance_by_position": acceptance_by_position(run.replies),
        "draft_tokens": sum(reply.stats.num_draft_tokens for reply in run.replies),
        "accepted_tokens": sum(reply.stats.num_accepted_tokens for reply in run.replies),
        "mismatched_requests": num_mismatched,
        "kv_waste": 1 - run.live_tokens / run.allocated_tokens if run.allocated_tokens else 0.0,
        "sources": _sources(run),
        "step_ms": {phase: run.seconds[phase] / run.num_steps * 1e3 for phase in PHASES},
        "categories": _parts(run, plain, lambda reply: questions[reply.question].category),
        "adapters": _adapters(run, plain, questions),
    }


def _sources(run: Run) -> dict[str, dict[str, float]]:
    """Draft tokens by who proposed them, and what asking each drafter took of a step. Who did neither is left out."""
    found: dict[str, dict[str, float]] = {}
    spent = {source: seconds for source, seconds in run.draft_seconds.items() if seconds}
    for source in dict.fromkeys([*(source for reply in run.replies for source in reply.stats.by_source), *spent]):
        counts = [reply.stats.by_source.get(source, (0, 0)) for reply in run.replies]
        found[source] = {
            "draft_tokens": sum(drafted for drafted, _ in counts),
            "accepted_tokens": sum(accepted for _, accepted in counts),
            "step_ms": spent.get(source, 0.0) / run.num_steps * 1e3,
        }
    return found


def _tokens(replies: Iterable[Reply]) -> int:
    return sum(len(reply.token_ids) for reply in replies)


def _rates(run: Run) -> list[float]:
    """Output tokens per second of wall time, one figure a repeat."""
    return [_tokens(r for r in run.replies if r.repeat == repeat) / wall for repeat, wall in enumerate(run.wall)]


def _times(reply: Reply) -> tuple[float, float, float]:
    """Seconds of arrival, first token and end."""
    stats = reply.stats
    assert stats.first_token is not None and stats.finished is not None, "a finished request has both times"
    return stats.arrived, stats.first_token, stats.finished


def _time_per_output_token(replies: Sequence[Reply]) -> float | None:
    """Seconds, over all tokens but the first of each reply, whose time is the prompt's; None if there are no others."""
    tokens = sum(len(reply.token_ids) - 1 for reply in replies)
    return sum(end - first for _, first, end in map(_times, replies)) / tokens if tokens else None


def _time_to_first_token(reply: Reply) -> float:
    arrived, first, _ = _times(reply)
    return first - arrived


def acceptance_length(replies: Sequence[Reply]) -> float:
    """Tokens a verify step emits, the bonus counted: 1 + accepted / steps."""
    steps = sum(reply.stats.num_steps for reply in replies)
    return 1 + sum(reply.stats.num_accepted_tokens for reply in replies) / steps if steps else 1.0


def acceptance_by_position(replies: Sequence[Reply]) -> list[float]:
    """Of the drafts that had a token at depth i, the share in which it was accepted."""
    drafted = _sum_by_position(reply.stats.drafted_by_position for reply in replies)
    accepted = _sum_by_position(reply.stats.accepted_by_position for reply in replies)
    accepted += [0] * (len(drafted) - len(accepted))
    return [yes / all_ for yes, all_ in zip(accepted, drafted, strict=True) if all_]


def _sum_by_position(lists: Iterable[list[int]]) -> list[int]:
    totals: list[int] = []
    for counts in lists:
        totals += [0] * (len(counts) - len(totals))
        for position, count in enumerate(counts):
            totals[position] += count
    return totals


def _parts(run: Run, plain: Run, part_of: Callable[[Reply], str]) -> dict[str, dict[str, float]]:
    """Figures of the replies of each category, or of each adapter."""
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(map(part_of, plain.replies)):
        own, base = ([reply for reply in each.replies if part_of(reply) == name] for each in (run, plain))
        found[name] = {
            "tokens_per_second": _stream_rate(own),
            "speedup": _stream_rate(own) / _stream_rate(base),
            "mean_acceptance_length": acceptance_length(own),
        }
    return found


def _stream_rate(replies: Sequence[Reply]) -> float:
    return _tokens(replies) / sum(_times(reply)[2] - _times(reply)[0] for reply in replies)


def _adapters(run: Run, plain: Run, questions: Sequence[Question]) -> dict[str, dict[str, float]]:
    if all(question.adapter is None for question in questions):
        return {}
    return _parts(run, plain, lambda reply: questions[reply.question].adapter or NO_ADAPTER)


def table_of(title: str, first: str, *others: str) -> Table:
    """An empty table: names on the left, figures on the right."""
    table = FittedTable(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(first, no_wrap=True, min_width=len(first))
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def overview(figures: dict[str, Any]) -> Table:
    """One row a run."""
    weights = figures["dtype"] if figures["quantization"] == "none" else figures["quantization"]
    title = f"{figures['model']}, {weights} on {figures['device']}, {figures['threads']} threads, "
    columns = ("tok/s", "speed-up", "decode", "ms/tok", "first ms", "tok/step", "accept", "differ")
    table = table_of(title + f"{figures['prompts']} prompts, {figures['concurrency']} at a time", "drafter", *columns)
    for run in figures["runs"]:
        table.add_row(
            run["drafter"],
            f"{run['tokens_per_second']:.1f}",
            f"{run['speedup']:.2f}x",
            "-" if run["decode_speedup"] is None else f"{run['decode_speedup']:.2f}x",
            _number(run["time_per_output_token_ms"]),
            _number(run["time_to_first_token_ms"]),
            f"{run['mean_acceptance_length']:.2f}",
            _percent(run["accepted_tokens"], run["draft_tokens"]),
            str(run["mismatched_requests"]),
        )
    return table


def by_category(figures: dict[str, Any]) -> Table:
    """Speed-up and tokens a step of each drafter, one row a category."""
    return _by_part(figures, "category", "categories")


def by_adapter(figures: dict[str, Any]) -> Table:
    """The same, one row an adapter."""
    return _by_part(figures, "adapter", "adapters")


def _by_part(figures: dict[str, Any], part: str, key: str) -> Table:
    drafted = [run for run in figures["runs"] if run["drafter"] != PLAIN]
    table = table_of(f"Speed-up (tokens a step) by {part}", part, *(run["drafter"] for run in drafted))
    for name in figures["runs"][0][key]:
        cells = [run[key][name] for run in drafted]
        table.add_row(name, *(f"{cell['speedup']:.2f}x ({cell['mean_acceptance_length']:.2f})" for cell in cells))
    return table


def by_source(figures: dict[str, Any]) -> Table:
    """Who drafted, one row a source of each run. Without a time: grammars, whose time is that of masks."""
    table = table_of("Draft tokens by source", "drafter", "source", "drafted", "accepted", "share", "ms a step")
    for run in figures["runs"]:
        for source, each in run["sources"].items():
            drafted, accepted = each["draft_tokens"], each["accepted_tokens"]
            spent = f"{each['step_ms']:.3f}" if each["step_ms"] else "-"
            table.add_row(run["drafter"], source, f"{drafted}", f"{accepted}", _percent(accepted, drafted), spent)
    return table


def by_phase(figures: dict[str, Any]) -> Table:
    """Milliseconds of a step, one row a run."""
    table = table_of("Milliseconds of a step", "drafter", *PHASES)
    for run in figures["runs"]:
        table.add_row(run["drafter"], *(f"{run['step_ms'][phase]:.2f}" for phase in PHASES))
    return table


def describe(mismatch: Mismatch) -> str:
    """One line a person can act on."""
    return (
        f"{mismatch.drafter}: prompt {mismatch.question + 1} (repeat {mismatch.repeat + 1}) differs from plain "
        f"decoding from output token {mismatch.position + 1} on, where the model's two best log-probabilities are "
        f"{mismatch.gap:.3g} apart."
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"
