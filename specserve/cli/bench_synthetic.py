"""`specserve bench synthetic`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter, Token

from specserve.cli.bench import progress_bar
from specserve.cli.bench_options import AT_LEAST_1, Context, Repeats, names, numbers
from specserve.cli.json_output import JsonFile, end_if_interrupted, tables, write_json
from specserve.cli.options import ENGINE_HELP, MEASUREMENT, MODEL, Whole, options_type

if TYPE_CHECKING:
    from specserve.bench.synthetic import Question


@dataclass(frozen=True, kw_only=True)
class KernelFields:
    """What of EngineConfig has a part in steps of a model that is in no checkpoint."""

    dtype: str = "auto"
    device: str = "auto"
    isa: str = "auto"
    threads: int | None = None


if TYPE_CHECKING:
    SyntheticEngineOptions = KernelFields
else:
    SyntheticEngineOptions = options_type(KernelFields, "SyntheticEngineOptions", ENGINE_HELP)

_ENGINE = SyntheticEngineOptions()
_MB = 10**6
_COSTS = ("0", "0.05", "0.05/token", "0.25/token")


def _rates(kind: Any, tokens: Sequence[Token]) -> tuple[float, ...]:
    try:
        return tuple(map(float, names(kind, tokens)))
    except ValueError:
        raise ValueError(f'"{tokens[0].value}" is no list of numbers; write them as 0.7,0.6.') from None


def _costs(kind: Any, tokens: Sequence[Token]) -> tuple[str, ...]:
    from specserve.bench.synthetic import DrafterCost

    return tuple(str(DrafterCost.parse(each)) for each in names(kind, tokens))


def _list(text: str, converter: Any) -> Parameter:
    return Parameter(
        group=MEASUREMENT,
        negative=(),
        consume_multiple=True,
        converter=converter,
        show_default=lambda values: ",".join(map(str, values)),
        help=text,
    )


def synthetic(
    *,
    shape: Annotated[
        Literal["0.5b", "1.5b", "8b"],
        Parameter(group=MODEL, help="Sizes of Qwen2.5-0.5B, Qwen2.5-1.5B or Llama-3.1-8B."),
    ] = "1.5b",
    quantization: Annotated[
        Literal["int8", "int4", "none"], Parameter(group=MODEL, help=ENGINE_HELP["quantization"].text)
    ] = "int8",
    acceptance: Annotated[
        tuple[float, ...],
        _list("Share of draft tokens accepted if those before are, by depth; the last is that of deeper ones.", _rates),
    ] = (0.7,),
    drafter_cost: Annotated[
        tuple[str, ...],
        _list("What a draft takes, in steps of one row; N/token: what each of its tokens does.", _costs),
    ] = _COSTS,
    rows: Annotated[tuple[int, ...], _list("Rows of a step: the last token and a draft. The first is 1.", numbers)] = (
        1,
        2,
        4,
        6,
        8,
        12,
        16,
    ),
    context: Context = 200,
    repeats: Repeats = 10,
    max_tokens: Annotated[
        Whole,
        Parameter(group=MEASUREMENT, validator=AT_LEAST_1, help="Output tokens of each run, of which there are two."),
    ] = 64,
    json_file: JsonFile = None,
    engine: Annotated[SyntheticEngineOptions, Parameter(name="*")] = _ENGINE,
) -> None:
    """Measure what speculation gives at a model's size: random weights of its shape, whose drafts are accepted by a
    coin, for drafters of several costs. Steps and verification are the engine's own; nothing is fetched or kept."""
    from specserve.bench.synthetic import (
        DrafterCost,
        Question,
        best_lines,
        llama_bench_lines,
        speculation_table,
    )
    from specserve.bench.verify_cost import headline, limit_line, verify_cost_table

    costs = tuple(map(DrafterCost.parse, drafter_cost))
    sizes = {"context": context, "repeats": repeats, "max_tokens": max_tokens}
    question = Question(shape=shape, acceptance=acceptance, costs=costs, rows=rows, **sizes)
    found = _measured(question, asdict(engine) | {"quantization": quantization})
    write_json(json_file, found)
    shown = [headline(found), "", verify_cost_table(found), "", limit_line(found), "", *llama_bench_lines(found)]
    if found["runs"]:
        shown += ["", speculation_table(found), "", *best_lines(found)]
    for part in shown:
        tables(json_file).print(part, highlight=False, soft_wrap=True, markup=False)
    end_if_interrupted(found, f"{len(found['runs'])} of {len(rows)} lengths of drafts", json_file)


def _measured(question: Question, options: dict[str, Any]) -> dict[str, Any]:
    """The figures, with a bar for what takes long."""
    from specserve.bench.random_target import num_drawn_bytes, random_llm
    from specserve.bench.synthetic import ROUNDS, figures, synthetic as measure
    from specserve.bench.verify_cost import WARM_UP_ROUNDS

    options |= {"max_model_len": question.max_model_len, "max_num_batched_tokens": max(512, *question.rows)}
    options |= {"drafter": "none", "adaptive": False, "max_num_seqs": 1}
    with progress_bar() as bar:
        task = bar.add_task("drawing weights, MB", total=num_drawn_bytes(question.shape) // _MB)
        with random_llm(question.shape, lambda num_bytes: bar.advance(task, num_bytes / _MB), **options) as llm:
            print(llm.summary.replace(llm.config.model, f"{question.shape} of random weights"), file=sys.stderr)
            bar.reset(task, total=question.repeats + WARM_UP_ROUNDS, description="rounds of steps")
            runs = bar.add_task("runs", total=ROUNDS * len(question.rows), completed=-1)

            def on_run(num_tokens: int) -> None:
                bar.update(runs, advance=1, description=f"runs with drafts of {num_tokens}")

            return figures(llm, measure(llm, question, lambda: bar.advance(task), on_run))
