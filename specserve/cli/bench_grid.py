"""`specserve bench grid`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, Token, validators

from specserve.bench.prompts import BUNDLED, load_prompts
from specserve.cli.bench import progress_bar
from specserve.cli.bench_engine import drafting, load
from specserve.cli.bench_options import Drafters, Prompts, names, numbers
from specserve.cli.json_output import JsonFile, notes, tables, writable, write_json
from specserve.cli.options import ENGINE_HELP, MEASUREMENT, OUTPUT, Model, Whole, engine_options, options_type
from specserve.config import DEFAULT_MODEL, EngineConfig
from specserve.types import SamplingParams
from specserve.version import __version__

if TYPE_CHECKING:
    from specserve.bench.compare import Question
    from specserve.bench.grid import Group
    from specserve.llm import LLM

    GridEngineOptions = EngineConfig
else:  # outputs are compared, so drafts are judged such that texts stay the same
    GridEngineOptions = options_type(
        EngineConfig,
        "GridEngineOptions",
        ENGINE_HELP,
        hidden=("model", "drafter", "verification"),
        max_num_seqs=32,
    )

_ENGINE = GridEngineOptions()


def _temperatures(kind: Any, tokens: Sequence[Token]) -> tuple[float, ...]:
    try:
        return tuple(map(float, names(kind, tokens)))
    except ValueError:
        raise ValueError(f'"{tokens[0].value}" is no list of numbers; write them as 0,0.7,1.') from None


def _list(text: str, converter: Any = names, has_default: bool = True) -> Parameter:
    return Parameter(
        group=MEASUREMENT,
        negative=(),
        consume_multiple=True,
        converter=converter,
        show_default=has_default and (lambda values: ",".join(str(value).removesuffix(".0") for value in values)),
        help=text,
    )


def _at_least_1(text: str) -> Parameter:
    return Parameter(group=MEASUREMENT, validator=validators.Number(gte=1), help=text)


@dataclass(frozen=True, kw_only=True)
class GridOptions:
    prompts: Prompts = BUNDLED
    categories: Annotated[tuple[str, ...], _list("Categories of the prompts to measure.")] = ("all",)
    concurrency: Annotated[
        tuple[int, ...],
        _list(
            "Prompts that run at once; the next begins when one has ended "
            "[default: 1,4,16,32, as far as each category has as many].",
            numbers,
            has_default=False,
        ),
    ] = ()
    temperature: Annotated[tuple[float, ...], _list("0 is greedy.", _temperatures)] = (0.0, 1.0)
    drafter: Drafters = ("auto",)
    limit: Annotated[
        Whole, _at_least_1("Prompts of each category in a cell; where more run at once, as many as do.")
    ] = 8
    max_tokens: Annotated[Whole, _at_least_1("Output tokens of each prompt, past the model's end token.")] = 64
    repeats: Annotated[Whole, _at_least_1("Runs of everything; ratios are medians over them.")] = 3
    seed: Annotated[Whole, Parameter(group=MEASUREMENT, help="Prompt i is sampled with seed + i.")] = 0


_ASKED = GridOptions()


def grid(
    model: Model = DEFAULT_MODEL,
    *,
    asked: Annotated[GridOptions, Parameter(name="*")] = _ASKED,
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None,
        Parameter(
            group=OUTPUT,
            converter=writable,
            help="Draw a heat map of the cells: FILE.svg, .png or .pdf (needs matplotlib).",
        ),
    ] = None,
    engine: Annotated[GridEngineOptions, Parameter(name="*")] = _ENGINE,
) -> None:
    """Measure drafters in every combination of category, concurrency and temperature. On Ctrl-C, and when an output
    differs, what was measured before is written and printed all the same."""
    from specserve.bench.compare import Plan, check_concurrency
    from specserve.bench.grid import default_concurrency, groups
    from specserve.bench.plot import check_plot
    from specserve.speculation.lookup import makers

    options = engine_options(engine, model=model)
    plan = Plan(
        **drafting(asked.drafter, options),
        params=SamplingParams(max_tokens=asked.max_tokens, seed=asked.seed, ignore_eos=True),
        num_speculative_tokens=engine.num_speculative_tokens,
        repeats=asked.repeats,
    )
    for name in plan.contenders[1:]:
        makers(name, plan.options_of(name))  # a wrong name must not cost a model load, nor a wrong path all figures
    if plot is not None:
        check_plot(plot)
    prompts = load_prompts(asked.prompts)
    categories = [prompt.category for prompt in prompts]
    concurrency = asked.concurrency or default_concurrency(categories, asked.categories, engine.max_num_seqs)
    check_concurrency(max(concurrency), engine.max_num_seqs)
    made = groups(categories, asked.categories, plan, concurrency, asked.temperature, asked.limit)
    options |= {"drafter": plan.own, "drafter_options": plan.options_of(plan.own)}
    llm, questions = load(options, [(prompt.text, prompt.category) for prompt in prompts], raw=False)
    settings = {
        **{name: value for name, value in asdict(asked).items() if name != "drafter"},
        "drafters": asked.drafter,
        "concurrency": concurrency,
        "num_speculative_tokens": plan.num_speculative_tokens,
        "drafter_options": dict(plan.drafter_options),
    }
    with llm:
        try:
            _measure(llm, questions, made)
        finally:
            _report(llm, made, settings, json_file, plot)


def _measure(llm: LLM, questions: list[Question], made: list[Group]) -> None:
    """With a progress bar, and a line for each repeat of each group, on standard error."""
    from specserve.bench.grid import measure

    print(llm.summary, file=sys.stderr)
    with progress_bar() as bar:
        turns = sum(len(group.plan.contenders) for group in made) * made[0].plan.repeats
        task = bar.add_task("warm-up", total=turns, completed=-1)

        def on_turn(group: Group, contender: str) -> None:
            bar.update(task, advance=1, description=f"{group}: {contender}")

        def on_repeat(group: Group) -> None:
            ratios = ", ".join(f"{name} {group.ratios(name)[-1]:.2f}x" for name in group.plan.contenders[1:])
            bar.console.print(f"{len(group.repeats)}/{group.plan.repeats} {group}: {ratios}", highlight=False)

        measure(llm, questions, made, on_turn, on_repeat)


def _report(llm: LLM, made: list[Group], settings: dict[str, Any], json_file: Path | None, plot: Path | None) -> None:
    """Of all groups that have a repeat; nothing where none has."""
    from specserve.bench.grid import figures
    from specserve.bench.heatmap import grid_tables, heat_map, worst_line
    from specserve.bench.report import described
    from specserve.machine.cores import processor

    if not any(group.repeats for group in made):
        return
    found = figures(made, {**described(llm), "machine": processor()[0], "version": __version__, **settings})
    write_json(json_file, found)
    if plot is not None:
        heat_map(plot, found)
    console, file = tables(json_file), notes(json_file)
    for table in grid_tables(found):
        console.print(table, "")
    meaning = "Plain decoding's seconds over the drafter's, by prompts at once and temperature (T)."
    console.print(meaning, worst_line(found), sep="\n", highlight=False, soft_wrap=True)
    if not found["settings"]["complete"]:
        counts = [len(group.repeats) for group in made], [group.plan.repeats for group in made]
        print(f"Not complete: the figures are of {sum(counts[0])} of {sum(counts[1])} repeats.", file=file)
