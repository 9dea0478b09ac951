"""Figures of a served load: the JSON of a measurement, and the tables people read. Measures nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from specserve.bench.report import table_of
from specserve.bench.serve.measure import Record
from specserve.bench.serve.run import Point
from specserve.errors import ConfigError, unknown

PERCENTILES = (50, 90, 95, 99)
LIMITED = ("ttft", "tpot", "e2e")

_LATE_SHARE = 0.1  # of the median time to first token: a generator that is later than this has measured itself too


@dataclass(frozen=True, slots=True)
class Goodput:
    """Limits in ms for some of LIMITED; a request is good if it is completed and keeps all of them."""

    limits: Mapping[str, float]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Goodput:
        """From `ttft:500 tpot:50`. Raises ConfigError."""
        limits: dict[str, float] = {}
        for text in texts:
            name, _, number = text.partition(":")
            if name not in LIMITED:
                raise ConfigError(f"{unknown('goodput limit', name, LIMITED)} Write them as ttft:500 (in ms).")
            if not number.replace(".", "", 1).isdecimal() or float(number) == 0:
                raise ConfigError(f"The goodput limit {text!r} has no number of ms above 0. Write it as {name}:500.")
            if name in limits:
                raise ConfigError(f"The goodput limit {name} is given twice.")
            limits[name] = float(number)
        return cls(limits)

    def keeps(self, record: Record) -> bool:
        """An answer of one token has no time per token after the first, and keeps a limit on it; one whose tokens are
        not known does not."""
        return record.completed and all(self._within(record, name, limit) for name, limit in self.limits.items())

    def _within(self, record: Record, name: str, limit: float) -> bool:
        seconds: float | None = getattr(record, name)
        if seconds is None:
            return name == "tpot" and record.output_tokens in (0, 1)
        return seconds * 1e3 <= limit


def summary(point: Point, goodput: Goodput) -> dict[str, Any]:
    """The figures of one load; times in ms, rates per second of the time from the beginning to the last end. A
    distribution without values is None, and so is a sum that no response stated."""
    done = [record for record in point.records if record.completed]
    rejected = [record for record in point.records if record.rejected]
    seconds = point.ended - point.began
    tokens = _total(record.output_tokens for record in done)
    return {
        "load": point.load.describe(),
        "interrupted": point.interrupted,
        "seconds": seconds,
        "requests": len(point.records),
        "completed": len(done),
        "rejected": len(rejected),
        "failed": len(point.records) - len(done) - len(rejected),
        "errors": dict(Counter(record.error for record in point.records if record.error is not None)),
        "statuses": dict(Counter(str(record.status) for record in point.records)),
        "finish_reasons": dict(Counter(str(record.finish_reason) for record in done)),
        "requests_per_second": _rate(len(done), seconds),
        "output_tokens_per_second": None if tokens is None else _rate(tokens, seconds),
        "prompt_tokens": _total(record.prompt_tokens for record in done),
        "cached_prompt_tokens": _total(record.cached_tokens for record in done),
        "output_tokens": tokens,
        **_distributions(done),
        "reject_ms": _ms(record.e2e for record in rejected),
        "lag_ms": _ms(record.lag for record in point.records),
        "goodput": _goodput(point.records, goodput, seconds),
        "speculation": _speculation(done),
        "adapters": _adapters(point.records),
        "replicas": None if point.by_replica is None else [{"requests": count} for count in point.by_replica],
        "records": [_raw(record, point.began) for record in point.records],
    }


def _adapters(records: Sequence[Record]) -> dict[str, Any]:
    """Figures of the requests to each adapter, where they were asked in turn."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(record.adapter for record in records if record.adapter is not None):
        asked = [record for record in records if record.adapter == name]
        done = [record for record in asked if record.completed]
        found[name] = {
            "requests": len(asked),
            "completed": len(done),
            "output_tokens": _total(record.output_tokens for record in done),
            **_distributions(done),
            "speculation": _speculation(done),
        }
    return found


def _distributions(done: Sequence[Record]) -> dict[str, Any]:
    return {
        "ttft_ms": _ms(record.ttft for record in done),
        "tpot_ms": _ms(record.tpot for record in done),
        "chunk_gap_ms": _ms(gap for record in done for gap in record.chunk_gaps),
        "token_gap_ms": _ms(gap for record in done for gap in record.token_gaps or ()),
        "e2e_ms": _ms(record.e2e for record in done),
        "output_tokens_per_request": distribution(record.output_tokens for record in done),
    }


def distribution(values: Iterable[float | None]) -> dict[str, float] | None:
    """Count, mean, percentiles (linear between two values, as numpy has them) and maximum of the values there are."""
    known = np.array([value for value in values if value is not None], dtype=float)
    if not known.size:
        return None
    points = np.percentile(known, PERCENTILES)
    named = {f"p{percent}": float(value) for percent, value in zip(PERCENTILES, points, strict=True)}
    return {"count": known.size, "mean": float(known.mean()), **named, "max": float(known.max())}


def _ms(seconds: Iterable[float | None]) -> dict[str, float] | None:
    return distribution(None if value is None else value * 1e3 for value in seconds)


def _total(counts: Iterable[int | None]) -> int | None:
    """Of what is known; None if nothing is."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _goodput(records: Sequence[Record], goodput: Goodput, seconds: float) -> dict[str, Any] | None:
    """Shares are of all requests that were sent, those rejected and failed too."""
    if not goodput.limits:
        return None
    good = sum(map(goodput.keeps, records))
    share = good / len(records) if records else 0.0
    return {"limits_ms": dict(goodput.limits), "good": good, "share": share, "per_second": _rate(good, seconds)}


def _speculation(done: Sequence[Record]) -> dict[str, Any] | None:
    """Over all verify steps of all answers that tell; None for a server that does not."""
    told = [record.speculation for record in done if record.speculation is not None]
    if not told:
        return None
    steps, accepted, drafted = (
        sum(_count(each, name) for each in told)
        for name in ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens")
    )
    return {
        "answers": len(told),
        "steps": steps,
        "draft_tokens": drafted,
        "accepted_tokens": accepted,
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": _histogram(told),
    }


def _count(told: Mapping[str, Any], name: str) -> int:
    value = told.get(name)
    return value if isinstance(value, int) else 0


def _histogram(told: Sequence[Mapping[str, Any]]) -> list[int]:
    """Entry j counts the steps that accepted j tokens."""
    listed = [counts for each in told if isinstance(counts := each.get("acceptance_histogram"), list)]
    return [sum(counts[j] for counts in listed if j < len(counts)) for j in range(max(map(len, listed), default=0))]


def _raw(record: Record, began: float) -> dict[str, Any]:
    """One request with all that was measured. due_ms counts from the load's beginning, all other times from due."""
    return {
        "number": record.number,
        "category": record.category,
        "adapter": record.adapter,
        "due_ms": (record.due - began) * 1e3,
        "lag_ms": record.lag * 1e3,
        "status": record.status,
        "error": record.error,
        "message": record.message,
        "ttft_ms": _scaled(record.ttft),
        "tpot_ms": _scaled(record.tpot),
        "e2e_ms": record.e2e * 1e3,
        "chunk_ms": [(time - record.due) * 1e3 for time in record.chunk_times],
        "chunk_tokens": record.chunk_tokens,
        "finish_reason": record.finish_reason,
        "usage": record.usage,
        "speculative_decoding": record.speculation,
    }


def _scaled(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


# --- tables -----------------------------------------------------------------------------------------------------------

_ROWS = {
    "ttft_ms": "first token ms",
    "tpot_ms": "per token ms",
    "chunk_gap_ms": "chunk gap ms",
    "token_gap_ms": "token gap ms",
    "e2e_ms": "end to end ms",
    "output_tokens_per_request": "output tokens",
    "reject_ms": "rejected ms",
    "lag_ms": "sent late ms",
}


def overview(title: str, points: Sequence[Mapping[str, Any]]) -> Table:
    """One row a load."""
    columns = ("ok", "rej", "fail", "req/s", "tok/s", "first ms", "ms/tok", "tok/step", "good")
    table = table_of(f"{title} (ms: p50/p99)", "load", *columns)
    for point in points:
        table.add_row(
            point["load"]["name"],
            *(str(point[name]) for name in ("completed", "rejected", "failed")),
            _number(point["requests_per_second"]),
            _number(point["output_tokens_per_second"]),
            *(_middle_and_worst(point[name]) for name in ("ttft_ms", "tpot_ms")),
            _number(point["speculation"] and point["speculation"]["mean_acceptance_length"]),
            f"{point['goodput']['share']:.0%}" if point["goodput"] else "-",
        )
    return table


def _middle_and_worst(part: Mapping[str, float] | None) -> str:
    return "-" if part is None else f"{_number(part['p50'])}/{_number(part['p99'])}"


def by_adapter(point: Mapping[str, Any]) -> Table:
    """One row an adapter of one load."""
    columns = ("sent", "ok", "first ms", "ms/tok", "end to end ms", "tok/step")
    table = table_of(f"{point['load']['name']} by adapter (ms: p50/p99)", "adapter", *columns)
    for name, each in point["adapters"].items():
        table.add_row(
            name,
            *(str(each[count]) for count in ("requests", "completed")),
            *(_middle_and_worst(each[key]) for key in ("ttft_ms", "tpot_ms", "e2e_ms")),
            _number(each["speculation"] and each["speculation"]["mean_acceptance_length"]),
        )
    return table


def details(point: Mapping[str, Any]) -> Table:
    """Every distribution of one load."""
    names = ("mean", *(f"p{percent}" for percent in PERCENTILES), "max")
    table = table_of(f"{point['load']['name']}, {point['seconds']:.1f} s", "", *names)
    for key, name in _ROWS.items():
        if point[key] is not None:
            table.add_row(name, *(_number(point[key][column]) for column in names))
    return table


def remarks(point: Mapping[str, Any]) -> list[str]:
    """What a reader must know about one load, a sentence each."""
    name = point["load"]["name"]
    said = [f"{name}: {count} x {kind}." for kind, count in point["errors"].items()]
    if point["interrupted"]:
        said.append(f"{name}: interrupted. Requests that had not ended are left out, which makes times look shorter.")
    if point["completed"] and point["output_tokens"] is None:
        said.append(f"{name}: the server states no usage, so there is nothing per token.")
    if (cached := point["cached_prompt_tokens"]) and point["prompt_tokens"]:
        said.append(f"{name}: {cached / point['prompt_tokens']:.0%} of the prompt tokens were in the prefix cache.")
    if replicas := point["replicas"]:
        counts, total = [each["requests"] for each in replicas], sum(each["requests"] for each in replicas)
        shares = ", ".join(f"{number}: {count} ({count / max(1, total):.0%})" for number, count in enumerate(counts))
        said.append(f"{name}: requests by replica {shares}.")
    if good := point["goodput"]:
        limits = ", ".join(f"{limit} {most:g} ms" for limit, most in good["limits_ms"].items())
        said.append(f"{name}: {good['share']:.1%} of the requests keep {limits}: {good['per_second']:.2f} a second.")
    late = point["lag_ms"] and point["lag_ms"]["p99"]
    if late and point["ttft_ms"] and late > _LATE_SHARE * point["ttft_ms"]["p50"]:
        said.append(
            f"{name}: this load generator was late, by {late:.1f} ms at p99, and all times count from when requests "
            "were due. Use a lower load, or another machine."
        )
    return said


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
