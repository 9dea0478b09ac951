"""`specserve bench replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from specserve.cli.bench_options import Drafters
from specserve.cli.json_output import JsonFile, notes, tables, write_json
from specserve.cli.options import ENGINE_HELP, MEASUREMENT, SPECULATION, Whole, drafter_arguments
from specserve.config import DEFAULT_NUM_SPECULATIVE_TOKENS
from specserve.errors import ConfigError


def replay(
    recording: Annotated[
        Path, Parameter(group=MEASUREMENT, help="JSON lines with prompt_ids, output_ids, category, perhaps top.")
    ],
    *,
    drafter: Drafters = ("ngram",),
    num_speculative_tokens: Annotated[
        Whole, Parameter(group=SPECULATION, help=ENGINE_HELP["num_speculative_tokens"].text)
    ] = DEFAULT_NUM_SPECULATIVE_TOKENS,
    drafter_options: Annotated[
        dict[str, str] | None, Parameter(group=SPECULATION, help=ENGINE_HELP["drafter_options"].text)
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure drafters' acceptance on recorded answers. Several share the draft length and options; then the JSON holds
    the figures of each under its name, null for one that Ctrl-C left out."""
    from specserve.bench.replay import replay_file
    from specserve.bench.report import table_of
    from specserve.speculation.lookup import prepare

    options = drafter_arguments(drafter_options or {})
    if not drafter or len(set(drafter)) < len(drafter):
        raise ConfigError(f"--drafter is {','.join(drafter)!r}; name one drafter or several, each once.")
    for name in drafter:
        prepare(name, options)  # a wrong name must not cost the replays before it
    found: dict[str, dict[str, Any]] = {}
    interrupted = False
    try:
        for name in drafter:
            found[name] = replay_file(recording, name, num_speculative_tokens, options).summary()
    except KeyboardInterrupt:
        if not found:
            raise
        interrupted = True
    write_json(json_file, {name: found.get(name) for name in drafter} if len(drafter) > 1 else found[drafter[0]])
    console = tables(json_file)
    limits = f"at most {num_speculative_tokens} draft tokens a step, replayed from {recording.name}"
    for name, summary in found.items():
        table = table_of(f"{name}, {limits}", "category", "steps", "tok/step", "accepted", "by position", "us/step")
        for category, part in _parts(summary).items():
            table.add_row(category, *_cells(part))
        console.print(table)
    if len(found) > 1:
        table = table_of(f"Tokens a step, {limits}", "category", *found)
        for category in _parts(found[drafter[0]]):
            steps = (_parts(summary)[category]["tokens_per_step"] for summary in found.values())
            table.add_row(category, *(f"{count:.2f}" for count in steps))
        console.print("", table)
    if interrupted:
        missing = ", ".join(name for name in drafter if name not in found)
        print(f"Interrupted: not replayed to the end: {missing}.", file=notes(json_file))
        raise KeyboardInterrupt


def _parts(summary: dict[str, Any]) -> dict[str, Any]:
    """The figures of each category, and of all together."""
    return {**summary["categories"], "all": summary}


def _cells(part: dict[str, Any]) -> list[str]:
    accepted = part["accepted_tokens"] / part["draft_tokens"] if part["draft_tokens"] else 0.0
    return [
        str(part["steps"]),
        f"{part['tokens_per_step']:.2f}",
        f"{accepted:.0%}",
        " ".join(f"{share:.2f}" for share in part["acceptance_by_position"]),
        f"{part['drafting_microseconds_per_step']:.1f}",
    ]
