"""`specserve bench serve`: options, progress and where figures go."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter, Token, validators
from rich.console import Console

from specserve.bench.prompts import BUNDLED, load_prompts
from specserve.cli.bench import progress_bar
from specserve.cli.bench_options import AT_LEAST_1, Prompts, names
from specserve.cli.json_output import JsonFile, end_if_interrupted, tables, writable, write_json
from specserve.cli.options import GENERATION, MODEL_NAMES, OUTPUT, SPECULATION, Whole
from specserve.errors import ConfigError

if TYPE_CHECKING:
    from specserve.bench.serve.load import Load
    from specserve.bench.serve.run import Change, Measurement, Plan, Target

SERVER = Group("Server", sort_key=0)
LOAD = Group("Load", sort_key=1)


def _rates(kind: Any, tokens: Sequence[Token]) -> tuple[float, ...]:
    return tuple(_number(text, float, "number; write them as 0.5,1,2") for text in names(kind, tokens))


def _counts(kind: Any, tokens: Sequence[Token]) -> tuple[int, ...]:
    return tuple(_number(text, int, "whole number; write them as 1,4,16") for text in names(kind, tokens))


def _number(text: str, kind: Callable[[str], Any], what: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f'"{text}" is no {what}.') from None


def _listed(group: Group, text: str, converter: Any = names) -> Parameter:
    return Parameter(
        group=group, negative=(), consume_multiple=True, converter=converter, show_default=False, help=text
    )


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    url: Annotated[str, Parameter(group=SERVER, help="The server's address, with or without /v1.")] = (
        "http://127.0.0.1:8000"
    )
    model: Annotated[
        str | None,
        Parameter(name=MODEL_NAMES, group=SERVER, help="The model to ask for [default: the first of /v1/models]."),
    ] = None
    api_key: Annotated[
        str | None,
        Parameter(group=SERVER, help="Sent as a bearer token; SPECSERVE_API_KEY hides it from lists of processes."),
    ] = None
    endpoint: Annotated[
        Literal["chat", "completions"], Parameter(group=SERVER, help="Which of /v1/... gets the prompts.")
    ] = "chat"
    timeout: Annotated[float, Parameter(group=SERVER, help="Seconds after which a request has failed.")] = 600.0


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    rate: Annotated[
        tuple[float, ...],
        _listed(
            LOAD,
            "Requests per second, whatever becomes of those before; inf: all at once. Several: 1,2,inf.",
            _rates,
        ),
    ] = ()
    arrival: Annotated[
        Literal["poisson", "constant"], Parameter(group=LOAD, help="How requests of a rate follow each other.")
    ] = "poisson"
    concurrency: Annotated[
        tuple[int, ...],
        _listed(LOAD, "Or requests at once, the next when one has ended; several too [default: 1].", _counts),
    ] = ()
    num_requests: Annotated[
        Whole | None,
        Parameter(
            group=LOAD,
            validator=AT_LEAST_1,
            help="Requests of each load [default: as many as prompts, or no limit with a duration].",
        ),
    ] = None
    duration: Annotated[
        float | None,
        Parameter(group=LOAD, help="Seconds in which requests of a load are sent; then their ends are awaited."),
    ] = None
    warmup: Annotated[
        Whole,
        Parameter(
            group=LOAD, validator=validators.Number(gte=0), help="Requests before everything that are not counted."
        ),
    ] = 1


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    prompts: Prompts = BUNDLED
    max_tokens: Annotated[
        Whole, Parameter(group=GENERATION, validator=AT_LEAST_1, help="Most output tokens of a request.")
    ] = 128
    temperature: Annotated[float, Parameter(group=GENERATION, help="0 is greedy.")] = 0.0
    seed: Annotated[
        Whole, Parameter(group=GENERATION, help="Of arrivals; with a temperature request i is sampled with seed + i.")
    ] = 0
    ignore_eos: Annotated[bool, Parameter(group=GENERATION, negative=(), help="Go on to the most output tokens.")] = (
        False
    )
    token_ids: Annotated[
        bool,
        Parameter(
            group=GENERATION, negative=(), help="Ask for each chunk's token ids, so that gaps per token can be told."
        ),
    ] = False
    adapter: Annotated[
        tuple[str, ...],
        Parameter(
            group=GENERATION,
            negative=(),
            show_default=False,
            help="A LoRA adapter of the server, by its name there, that requests ask in turn with others; none is the "
            "model. May be repeated.",
        ),
    ] = ()
    extra: Annotated[
        str | None, Parameter(group=GENERATION, help="Other fields of each request, as a JSON object.")
    ] = None
    drafter: Annotated[
        str | None,
        Parameter(group=SPECULATION, help="One of the drafters that the server has loaded, for each request."),
    ] = None

    def fields(self) -> dict[str, Any]:
        """The fields that are sent as they are, `extra` over the others. Raises ConfigError."""
        return {
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **({"return_token_ids": True} if self.token_ids else {}),
            **({} if self.drafter is None else {"speculative": {"drafter": self.drafter}}),
            **({} if self.extra is None else _object(self.extra)),
        }


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra is no JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ConfigError("--extra must be a JSON object, such as '{\"top_p\": 0.9}'.")
    return value


_SERVER, _LOAD, _REQUEST = ServerOptions(), LoadOptions(), RequestOptions()


def serve(
    *,
    server: Annotated[ServerOptions, Parameter(name="*")] = _SERVER,
    load: Annotated[LoadOptions, Parameter(name="*")] = _LOAD,
    request: Annotated[RequestOptions, Parameter(name="*")] = _REQUEST,
    goodput: Annotated[
        tuple[str, ...],
        _listed(OUTPUT, "Count requests that keep these limits, in ms: any of ttft:500 tpot:50 e2e:5000."),
    ] = (),
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None,
        Parameter(
            group=OUTPUT, converter=writable, help="Draw the figures: FILE.svg, .png or .pdf (needs matplotlib)."
        ),
    ] = None,
) -> None:
    """Measure a running server over HTTP; raises ConfigError before anything is sent, ServerError without a server."""
    from specserve.bench.plot import check_plot
    from specserve.bench.serve.plot import plot as draw
    from specserve.bench.serve.report import Goodput, summary
    from specserve.bench.serve.run import Target

    limits = Goodput.parse(goodput)
    if plot is not None:
        check_plot(plot)
    target = Target(url=server.url, api_key=server.api_key, timeout=server.timeout)
    plan = _plan(server, load, request)
    _allow_sockets()
    measured, interrupted = _run(target, plan, server.model)
    figures = {
        **_described(target, plan, measured.model),
        "interrupted": interrupted,
        "loads": [summary(point, limits) for point in measured.points],
    }
    write_json(json_file, figures)
    if plot is not None:
        draw(plot, _title(figures), figures["loads"])
    _print(figures, tables(json_file))
    ended = sum(len(point.records) for point in measured.points)
    end_if_interrupted(figures, f"{ended} requests that have ended", json_file)


def _plan(server: ServerOptions, load: LoadOptions, request: RequestOptions) -> Plan:
    from specserve.bench.serve.load import Extent
    from specserve.bench.serve.run import Asks, Plan

    prompts = load_prompts(request.prompts)
    asks = Asks(
        prompts=prompts,
        endpoint=server.endpoint,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        seed=request.seed,
        adapters=request.adapter,
        fields=request.fields(),
    )
    limit = len(prompts) if load.num_requests is None and load.duration is None else load.num_requests
    return Plan(loads=_loads(load), extent=Extent(limit, load.duration), asks=asks, warmup=load.warmup)


def _loads(options: LoadOptions) -> list[Load]:
    from specserve.bench.serve.load import ClosedLoop, OpenLoop

    if options.rate and options.concurrency:
        raise ConfigError("--rate and --concurrency are two kinds of load. Give one of them.")
    if options.rate:
        return [OpenLoop(rate, options.arrival) for rate in options.rate]
    return [ClosedLoop(concurrency) for concurrency in options.concurrency or (1,)]


def _allow_sockets() -> None:
    """As many open files as this process may have: each request that waits is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _run(target: Target, plan: Plan, model: str | None) -> tuple[Measurement, bool]:
    """What was measured, and whether Ctrl-C ended it. Raises KeyboardInterrupt where that is nothing."""
    from specserve.bench.serve.run import Measurement, run

    measured = Measurement()
    try:
        with _progress(plan) as watch:
            asyncio.run(run(target, plan, model, watch, measured))
    except KeyboardInterrupt:
        if not any(point.records for point in measured.points):
            raise
        return measured, True
    return measured, False


@contextmanager
def _progress(plan: Plan) -> Iterator[Callable[[Change], None]]:
    """A bar for each load, with the requests that have ended, on standard error."""
    with progress_bar() as bar:
        tasks: dict[str, Any] = {}
        running = 0

        def watch(change: Change) -> None:
            nonlocal running
            total = plan.warmup if change.load == "warm-up" else plan.extent.num_requests
            task = tasks.setdefault(change.load, None)
            if task is None:
                task = tasks[change.load] = bar.add_task(change.load, total=total)
            running += 1 if change.record is None else -1
            text = f"{change.load}, {running} running"
            bar.update(task, description=text, advance=0 if change.record is None else 1)

        yield watch


def _described(target: Target, plan: Plan, model: str) -> dict[str, Any]:
    """What was measured, for whoever reads the file later. The key is not in it."""
    asks = plan.asks
    return {
        "url": target.url,
        "model": model,
        "endpoint": asks.endpoint,
        "prompts": len(asks.prompts),
        "max_tokens": asks.max_tokens,
        "temperature": asks.temperature,
        "seed": asks.seed,
        "adapters": list(asks.adapters),
        "fields": dict(asks.fields),
        "warmup": plan.warmup,
        "num_requests": plan.extent.num_requests,
        "duration": plan.extent.duration,
    }


def _print(figures: dict[str, Any], console: Console) -> None:
    from specserve.bench.serve.report import by_adapter, details, overview, remarks

    console.print(overview(_title(figures), figures["loads"]), "")
    for point in figures["loads"]:
        console.print(details(point), "")
        if point["adapters"]:
            console.print(by_adapter(point), "")
    for line in (line for point in figures["loads"] for line in remarks(point)):
        console.print(line, highlight=False)


def _title(figures: dict[str, Any]) -> str:
    drafter = figures["fields"].get("speculative", {}).get("drafter")
    return f"{figures['model']} at {figures['url']}" + (f", drafter {drafter}" if drafter else "")
