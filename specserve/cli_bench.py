"""`specserve bench` and `bench replay`. Knows options, progress and where figures go; specserve.bench measures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Group, Parameter, validators
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specserve.cli_options import OUTPUT, SPECULATION, BenchEngineOptions, Whole, drafter_arguments, engine_options
from specserve.types import SamplingParams

if TYPE_CHECKING:
    from specserve.bench.compare import Mismatch, Plan, Question, Run
    from specserve.llm import LLM

MEASUREMENT = Group("Measurement", sort_key=0)
_ENGINE = BenchEngineOptions()
_AT_LEAST_1 = validators.Number(gte=1)

bench = App(name="bench")


@bench.default
def compare(
    *,
    drafter: Annotated[
        tuple[str, ...],
        Parameter(
            group=MEASUREMENT, negative=(), consume_multiple=True, show_default=" ".join, help="Drafters to measure."
        ),
    ] = ("ngram",),
    prompts: Annotated[
        str,
        Parameter(group=MEASUREMENT, help="JSON lines with prompt or turns (the first is asked), perhaps category."),
    ] = "demo",
    limit: Annotated[
        Whole | None,
        Parameter(group=MEASUREMENT, validator=_AT_LEAST_1, help="That many prompts, from all categories alike."),
    ] = None,
    concurrency: Annotated[
        Whole, Parameter(group=MEASUREMENT, validator=_AT_LEAST_1, help="Prompts that run at once.")
    ] = 1,
    repeats: Annotated[
        Whole,
        Parameter(group=MEASUREMENT, validator=_AT_LEAST_1, help="Runs of everything; rates are medians over them."),
    ] = 1,
    max_tokens: Annotated[Whole, Parameter(group=MEASUREMENT, help="Most output tokens of a prompt.")] = 128,
    temperature: Annotated[float, Parameter(group=MEASUREMENT, help="0 is greedy.")] = 0.0,
    seed: Annotated[Whole, Parameter(group=MEASUREMENT, help="Prompt i is sampled with seed + i.")] = 0,
    raw: Annotated[
        bool, Parameter(group=MEASUREMENT, negative=(), help="No chat template: continue the text.")
    ] = False,
    json_file: Annotated[
        Path | None, Parameter(name="--json", group=OUTPUT, help="Write all figures to this file.")
    ] = None,
    record: Annotated[
        Path | None, Parameter(group=OUTPUT, help="Write plain decoding's answers to this file, for bench replay.")
    ] = None,
    show: Annotated[Whole, Parameter(group=OUTPUT, help="Print that many answers.")] = 0,
    engine: Annotated[BenchEngineOptions, Parameter(name="*")] = _ENGINE,
) -> None:
    """Measure drafters against plain decoding on the same prompts. All take turns, group of prompts by group, after a
    warm-up and with an empty prefix cache. Of a prompt with several turns the first is asked."""
    from specserve.bench.compare import Plan
    from specserve.bench.prompts import load_prompts, spread
    from specserve.speculation.base import create

    options = engine_options(engine)
    plan = Plan(
        drafters=drafter,
        params=SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed),
        num_speculative_tokens=engine.num_speculative_tokens,
        drafter_options=options.pop("drafter_options"),
        concurrency=concurrency,
        repeats=repeats,
    )
    for name in plan.contenders[1:]:
        create(name, plan.drafter_options)  # a wrong name or option must not cost a model load
    chosen = spread(load_prompts(prompts), limit)
    llm, questions = _load(options, [(prompt.text, prompt.category) for prompt in chosen], raw)
    with llm:
        _measure(llm, questions, plan, json_file, record, show)


def _load(options: dict[str, Any], prompts: list[tuple[str, str]], raw: bool) -> tuple[LLM, list[Question]]:
    """The engine, and the prompts as it reads them."""
    from specserve.bench.compare import Question
    from specserve.llm import LLM

    llm = LLM(**options, progress=sys.stderr.isatty())
    encode = (
        llm.tokenizer.encode if raw else lambda text: llm.tokenizer.encode_chat([{"role": "user", "content": text}])
    )
    return llm, [Question(encode(text), category) for text, category in prompts]


def _measure(
    llm: LLM, questions: list[Question], plan: Plan, json_file: Path | None, record: Path | None, show: int
) -> None:
    from specserve.bench.compare import explain
    from specserve.bench.report import report

    print(llm.summary, file=sys.stderr)
    runs = _run(llm, questions, plan)
    figures = report(llm, questions, plan.concurrency, runs)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if record is not None:
        _record(record, questions, runs[0])
    _print(figures, explain(llm, questions, runs))
    if llm.config.verification != "coupled" and plan.params.temperature > 0:
        print(f"With --verification {llm.config.verification} sampled texts may differ; their law is the same.")
    _show(llm, questions, runs[-1], show)


def _run(llm: LLM, questions: list[Question], plan: Plan) -> list[Run]:
    """The comparison, with a progress bar on standard error while it runs."""
    from specserve.bench.compare import compare as run_all, turns

    total = sum(1 for _ in turns(plan, len(questions)))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("warm-up", total=total, completed=-1)
        return run_all(llm, questions, plan, lambda turn: bar.update(task, advance=1, description=turn.drafter))


def _print(figures: dict[str, Any], different: list[Mismatch]) -> None:
    from specserve.bench.report import by_category, by_phase, describe, overview

    console = Console()
    tables = [overview(figures), *([by_category(figures)] if len(figures["runs"]) > 1 else []), by_phase(figures)]
    for table in tables:
        console.print(table, "")
    for mismatch in different:
        console.print(describe(mismatch), style="yellow", highlight=False)


def _show(llm: LLM, questions: list[Question], run: Run, count: int) -> None:
    """Sample answers of one run, with what was asked."""
    for reply in [reply for reply in run.replies if reply.repeat == 0][:count]:
        asked = llm.tokenizer.decode(questions[reply.question].ids)
        print(f"\n--- prompt {reply.question + 1} ---\n{asked.strip()}\n--- answer ({run.drafter}) ---\n{reply.text}")


def _record(path: Path, questions: list[Question], plain: Run) -> None:
    lines = [
        {"prompt_ids": q.ids, "output_ids": reply.token_ids, "category": q.category}
        for reply in plain.replies
        if reply.repeat == 0 and (q := questions[reply.question])
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


@bench.command
def replay(
    recording: Annotated[Path, Parameter(group=MEASUREMENT, help="JSON lines with prompt_ids, output_ids, category.")],
    *,
    drafter: Annotated[str, Parameter(group=SPECULATION, help="The drafter to replay.")] = "ngram",
    num_speculative_tokens: Annotated[Whole, Parameter(group=SPECULATION, help="Most draft tokens a step.")] = 5,
    drafter_options: Annotated[
        dict[str, str] | None, Parameter(group=SPECULATION, help="As --drafter-options.NAME VALUE.")
    ] = None,
    json_file: Annotated[
        Path | None, Parameter(name="--json", group=OUTPUT, help="Write all figures to this file.")
    ] = None,
) -> None:
    """Measure a drafter's acceptance on recorded answers (bench --record writes them), without a model."""
    from specserve.bench.replay import replay_file
    from specserve.bench.report import table_of

    summary = replay_file(
        recording, drafter, num_speculative_tokens, drafter_arguments(drafter_options or {})
    ).summary()
    if json_file is not None:
        json_file.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    title = f"{drafter}, at most {num_speculative_tokens} draft tokens a step, replayed from {recording.name}"
    table = table_of(title, "category", "steps", "tok/step", "accepted", "by position", "us/step")
    for name, part in {**summary["categories"], "all": summary}.items():
        table.add_row(name, *_replay_cells(part))
    Console().print(table)


def _replay_cells(part: dict[str, Any]) -> list[str]:
    accepted = part["accepted_tokens"] / part["draft_tokens"] if part["draft_tokens"] else 0.0
    return [
        str(part["steps"]),
        f"{part['tokens_per_step']:.2f}",
        f"{accepted:.0%}",
        " ".join(f"{share:.2f}" for share in part["acceptance_by_position"]),
        f"{part['drafting_microseconds_per_step']:.1f}",
    ]
