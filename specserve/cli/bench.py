"""`specserve bench` and its commands: options, progress and where figures go."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specserve.bench.prompts import BUNDLED, load_prompts, spread
from specserve.checkpoint.entries import MODELS
from specserve.cli.bench_engine import answering, drafting, load
from specserve.cli.bench_options import (
    AT_LEAST_1,
    Adapters,
    Context,
    Drafters,
    Limit,
    Prompts,
    Raw,
    Record,
    RecordTop,
    Repeats,
    Schema,
    Text,
    names,
    numbers,
)
from specserve.cli.json_output import JsonFile, end_if_interrupted, notes, tables, write_json
from specserve.cli.options import (
    ENGINE_HELP,
    MEASUREMENT,
    OUTPUT,
    BenchEngineOptions,
    Model,
    Whole,
    engine_options,
    load_schema,
    options_type,
)
from specserve.config import DEFAULT_MODEL, EngineConfig
from specserve.errors import ConfigError, near_misses
from specserve.terminal import console
from specserve.types import SamplingParams

if TYPE_CHECKING:
    from specserve.bench.compare import Mismatch, Plan, Question, Run
    from specserve.llm import LLM
    from specserve.structured.spec import Structured

    StepEngineOptions = EngineConfig
    QualityEngineOptions = EngineConfig
else:  # what has no part in a measurement is no option of it
    _DRAFTING = [name for name, text in ENGINE_HELP.items() if text.section == "Speculation"]
    _PLAIN = {"drafter": "none", "adaptive": False}
    StepEngineOptions = options_type(
        EngineConfig, "StepEngineOptions", ENGINE_HELP, hidden=["model", *_DRAFTING], **_PLAIN
    )
    QualityEngineOptions = options_type(
        EngineConfig,
        "QualityEngineOptions",
        ENGINE_HELP,
        hidden=[
            "model",
            *_DRAFTING,
            "quantization",
            "max_num_seqs",
            "prefix_caching",
            "lora",
            "max_loras",
            "max_lora_rank",
        ],
        **_PLAIN,
    )

_ENGINE = BenchEngineOptions()
_STEP_ENGINE = StepEngineOptions()
_QUALITY_ENGINE = QualityEngineOptions()


bench = App(name="bench")
bench.command(
    "specserve.cli.bench_serve:serve",
    name="serve",
    help="Measure a running server over HTTP, ours or any other with OpenAI's API: latencies of streamed answers, "
    "throughput and acceptance, at one load or several. Prompts that were asked before may come from its prefix cache.",
)
bench.command(
    "specserve.cli.bench_grid:grid",
    name="grid",
    help="Measure drafters against plain decoding in every combination of category, concurrency and temperature, on "
    "one engine. Ratios are plain seconds over the drafter's: above 1 is faster. All outputs must be plain decoding's.",
)
bench.command(
    "specserve.cli.bench_replay:replay",
    name="replay",
    help="Measure drafters' acceptance on recorded answers (bench --record writes them), without a model.",
)
bench.command(
    "specserve.cli.bench_synthetic:synthetic",
    name="synthetic",
    help="Measure what speculation gives at a model's size: random weights of its shape, whose drafts are accepted by "
    "a coin, for drafters of several costs. Steps and verification are the engine's own; nothing is fetched or kept.",
)


@bench.default
def compare(
    model: Model = DEFAULT_MODEL,
    *,
    drafter: Drafters = ("auto",),
    adapter: Adapters = (),
    prompts: Prompts = BUNDLED,
    limit: Limit = None,
    concurrency: Annotated[
        Whole, Parameter(group=MEASUREMENT, validator=AT_LEAST_1, help="Prompts that run at once.")
    ] = 1,
    repeats: Annotated[
        Whole,
        Parameter(group=MEASUREMENT, validator=AT_LEAST_1, help="Runs of everything; rates are medians over them."),
    ] = 1,
    max_tokens: Annotated[Whole, Parameter(group=MEASUREMENT, help="Most output tokens of a prompt.")] = 128,
    temperature: Annotated[float, Parameter(group=MEASUREMENT, help="0 is greedy.")] = 0.0,
    seed: Annotated[Whole, Parameter(group=MEASUREMENT, help="Prompt i is sampled with seed + i.")] = 0,
    raw: Raw = False,
    schema: Schema = None,
    json_file: JsonFile = None,
    record: Record = None,
    record_top: RecordTop = 0,
    show: Annotated[Whole, Parameter(group=OUTPUT, help="Print that many answers.")] = 0,
    engine: Annotated[BenchEngineOptions, Parameter(name="*")] = _ENGINE,
) -> None:
    """Measure drafters against plain decoding on the same prompts. All take turns, group of prompts by group, after a
    warm-up and with an empty prefix cache. Of a prompt with several turns the first is asked."""
    from specserve.bench.compare import Plan, write_recording
    from specserve.speculation.lookup import makers

    if record_top and record is None:
        raise ConfigError("--record-top adds to what --record PATH writes. Give both.")
    check_model(model)
    options = engine_options(engine, model=model)
    structured = None if schema is None else load_schema(schema)
    plan = Plan(
        **drafting(drafter, options),
        params=SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed, structured=structured),
        num_speculative_tokens=engine.num_speculative_tokens,
        concurrency=concurrency,
        repeats=repeats,
    )
    for name in plan.contenders[1:]:
        makers(name, plan.options_of(name))  # a wrong name or option must not cost a model load
    options |= {"drafter": plan.own, "drafter_options": plan.options_of(plan.own)}
    chosen = spread(load_prompts(prompts), limit)
    adapters = answering(adapter, options, len(chosen))
    llm, questions = load(options, [(prompt.text, prompt.category) for prompt in chosen], raw, adapters)
    with llm:
        runs, figures = _measure(llm, questions, plan, json_file)
        if record is not None:
            write_recording(record, llm, questions, runs[0], record_top)
        _show(llm, questions, runs[-1], show, notes(json_file))
    end_if_interrupted(figures, f"{len(runs[0].replies)} of {len(questions) * repeats} answers", json_file)


def check_model(model: str) -> None:
    """Raise ConfigError for what is more likely a misspelt command than a model."""
    commands = [name for name in bench if not name.startswith("-")]
    if model not in MODELS and not Path(model).exists() and (near := near_misses(model, commands, 1, 0.6)):
        hint = f"Did you mean 'bench {near[0]}'?"
        raise ConfigError(f"There is no command 'bench {model}' and no model of that name. {hint}")


def _measure(
    llm: LLM, questions: list[Question], plan: Plan, json_file: Path | None
) -> tuple[list[Run], dict[str, Any]]:
    """The runs and their figures; where Ctrl-C ended them, as far as they came."""
    from specserve.bench.compare import explain
    from specserve.bench.report import report

    print(llm.summary, file=sys.stderr)
    runs, interrupted = _run(llm, questions, plan)
    figures = report(llm, questions, plan.concurrency, runs, interrupted)
    if plan.params.structured is not None:
        _add_structured(figures, runs, plan.params.structured)
    write_json(json_file, figures)
    _print(figures, explain(llm, questions, runs), tables(json_file))
    if llm.config.verification != "coupled" and plan.params.temperature > 0:
        mode = f"--verification {llm.config.verification}"
        print(f"With {mode} sampled texts may differ; their law is the same.", file=notes(json_file))
    return runs, figures


def _add_structured(figures: dict[str, Any], runs: Sequence[Run], asked: Structured) -> None:
    from specserve.bench.structured import checker, structured_figures

    fits = checker(asked)
    for each, run in zip(figures["runs"], runs, strict=True):
        each["structured"] = structured_figures(run, fits)


def _run(llm: LLM, questions: list[Question], plan: Plan) -> tuple[list[Run], bool]:
    """The comparison, with a progress bar on standard error while it runs, and whether Ctrl-C ended it. Raises
    KeyboardInterrupt where there is nothing to tell."""
    from specserve.bench.compare import compare as run_all, turns

    total = sum(1 for _ in turns(plan, len(questions)))
    runs: list[Run] = []
    try:
        with progress_bar() as bar:
            task = bar.add_task("warm-up", total=total, completed=-1)
            run_all(llm, questions, plan, lambda turn: bar.update(task, advance=1, description=turn.drafter), runs)
    except KeyboardInterrupt:
        if not (runs and runs[0].replies):
            raise
        return runs, True
    return runs, False


def progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    screen = console(stderr=True)
    return Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)


def _print(figures: dict[str, Any], different: list[Mismatch], console: Console) -> None:
    from specserve.bench.report import by_adapter, by_category, by_phase, by_source, describe, overview
    from specserve.bench.structured import structured_table

    parts = [overview(figures)]
    if len(figures["runs"]) > 1:
        parts += [by_category(figures), *([by_adapter(figures)] if figures["adapters"] else [])]
    parts.append(by_phase(figures))
    if any(run["sources"] for run in figures["runs"]):
        parts.append(by_source(figures))
    if "structured" in figures["runs"][0]:
        parts.append(structured_table(figures["runs"]))
    for table in parts:
        console.print(table, "")
    for mismatch in different:
        console.print(describe(mismatch), style="yellow", highlight=False)


def _show(llm: LLM, questions: list[Question], run: Run, count: int, file: TextIO) -> None:
    """Sample answers of one run, with what was asked."""
    for reply in [reply for reply in run.replies if reply.repeat == 0][:count]:
        asked = llm.tokenizer.decode(questions[reply.question].ids)
        prompt, answer = f"--- prompt {reply.question + 1} ---", f"--- answer ({run.drafter}) ---"
        print("", prompt, asked.strip(), answer, reply.text, sep="\n", file=file)


@bench.command
def verify_cost(
    model: Model = DEFAULT_MODEL,
    *,
    rows: Annotated[
        tuple[int, ...],
        Parameter(
            group=MEASUREMENT,
            negative=(),
            consume_multiple=True,
            converter=numbers,
            show_default=lambda rows: ",".join(map(str, rows)),
            help="Rows of a step: the last token and a draft. The first is 1.",
        ),
    ] = (1, 2, 4, 6, 8, 12, 16),
    context: Context = 200,
    repeats: Repeats = 30,
    text: Text = "python",
    json_file: JsonFile = None,
    engine: Annotated[StepEngineOptions, Parameter(name="*")] = _STEP_ENGINE,
) -> None:
    """Measure what a step of the engine costs by its number of rows, against one row, and how much of the memory's
    bandwidth a step of one row uses. One sequence, drafts that are all rejected, all numbers of rows in turn."""
    from specserve.bench.verify_cost import headline, limit_line, verify_cost as measure, verify_cost_table

    with (
        _step_engine(engine_options(engine, model=model), text, context) as (llm, ids),
        _rounds("steps", repeats) as on_round,
    ):
        figures = measure(llm, ids, rows, repeats, on_round)
    write_json(json_file, figures)
    shown = headline(figures), "", verify_cost_table(figures), "", limit_line(figures)
    tables(json_file).print(*shown, highlight=False, soft_wrap=True, sep="\n")
    end_if_interrupted(figures, f"{figures['repeats']} of {repeats} rounds", json_file)


@bench.command
def profile(
    model: Model = DEFAULT_MODEL,
    *,
    rows: Annotated[
        Whole,
        Parameter(group=MEASUREMENT, validator=AT_LEAST_1, help="Rows of a step: the last token and a draft."),
    ] = 1,
    context: Context = 200,
    repeats: Repeats = 30,
    text: Text = "python",
    json_file: JsonFile = None,
    engine: Annotated[StepEngineOptions, Parameter(name="*")] = _STEP_ENGINE,
) -> None:
    """Measure where the time of a step goes: each kind of op, with the bytes it must read against what memory can give,
    and everything outside the kernels."""
    from specserve.bench.profile import profile as measure, profile_table
    from specserve.bench.verify_cost import headline, limit_line

    with (
        _step_engine(engine_options(engine, model=model), text, context) as (llm, ids),
        _rounds("steps", repeats) as on_round,
    ):
        figures = measure(llm, ids, rows, repeats, on_round)
    write_json(json_file, figures)
    outside = f"{figures['host_share']:.1%} of the step are outside the kernels."
    shown = headline(figures), "", profile_table(figures), "", limit_line(figures), outside
    tables(json_file).print(*shown, highlight=False, soft_wrap=True, sep="\n")
    end_if_interrupted(figures, f"{figures['repeats']} of {repeats} steps", json_file)


@contextmanager
def _step_engine(options: dict[str, Any], text: str, context: int) -> Iterator[tuple[LLM, list[int]]]:
    """The engine, and the first `context` tokens of the text as it reads them."""
    from specserve.bench.text import load_text, prompt
    from specserve.llm import LLM

    content = load_text(text)  # a wrong name must not cost a model load
    with LLM(**options, progress=sys.stderr.isatty()) as llm:
        print(llm.summary, file=sys.stderr)
        yield llm, prompt(llm.tokenizer, content, context)


@contextmanager
def _rounds(name: str, repeats: int) -> Iterator[Callable[[], None]]:
    """A progress bar, and what a measurement calls before each of its rounds; those of the warm-up are not counted."""
    from specserve.bench.verify_cost import WARM_UP_ROUNDS

    with progress_bar() as bar:
        task = bar.add_task(name, total=repeats, completed=-WARM_UP_ROUNDS - 1)
        yield lambda: bar.advance(task)


@bench.command
def quality(
    model: Model = DEFAULT_MODEL,
    *,
    quantization: Annotated[
        tuple[str, ...],
        Parameter(
            group=MEASUREMENT,
            negative=(),
            consume_multiple=True,
            converter=names,
            show_default=",".join,
            help="Weights to compare with float32; none is those of --dtype.",
        ),
    ] = ("none", "int8", "int4"),
    text: Text = "python",
    tokens: Annotated[
        Whole, Parameter(group=MEASUREMENT, validator=AT_LEAST_1, help="That many of the text's first tokens.")
    ] = 8192,
    window: Annotated[
        Whole, Parameter(group=MEASUREMENT, validator=AT_LEAST_1, help="Tokens read at once; the next window is new.")
    ] = 512,
    json_file: JsonFile = None,
    engine: Annotated[QualityEngineOptions, Parameter(name="*")] = _QUALITY_ENGINE,
) -> None:
    """Measure what rounding the weights costs: perplexity of a text and the likeliest tokens, against float32."""
    from specserve.bench.quality import quality as measure, quality_table
    from specserve.bench.text import load_text, windows

    content = load_text(text)
    options = engine_options(engine, model=model)
    with progress_bar() as bar:
        task = bar.add_task("float32")
        figures = measure(
            options,
            quantization,
            lambda llm: windows(llm.tokenizer, content, window, tokens),
            lambda name, total: bar.update(task, advance=1, total=total, description=name),
        )
    write_json(json_file, {**figures, "text": text, "window": window})
    tables(json_file).print(quality_table(figures))
    end_if_interrupted(figures, f"{len(figures['runs'])} of {len(quantization)} kinds of weights", json_file)
