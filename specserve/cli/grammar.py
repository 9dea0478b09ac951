"""`specserve grammar`: what the grammar backends can enforce, and the grammars that come along."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Group, Parameter, validators
from rich.console import Console
from rich.progress import Progress

from specserve.cli.json_output import JsonFile, end_if_interrupted, is_json_alone, tables, write_json
from specserve.cli.options import ENGINE_HELP, model_parameter
from specserve.config import DEFAULT_MODEL
from specserve.errors import InputError
from specserve.files import read_json
from specserve.structured import library
from specserve.terminal import FittedTable, console

_MOST_BYTES = 2**28  # a suite of 10,000 schemas with their tests has 120 MB
CHECK = Group("Check", sort_key=0)

grammar = App(name="grammar")


@grammar.command
def check(
    file: Annotated[
        Path,
        Parameter(group=CHECK, help='JSON: a list of {"schema", "tests": [{"data", "valid"}]}.'),
    ],
    *,
    grammar_backend: Annotated[str, Parameter(group=CHECK, help=ENGINE_HELP["grammar_backend"].text)] = "auto",
    limit_s: Annotated[
        float,
        Parameter(group=CHECK, validator=validators.Number(gt=0), help="Seconds of CPU time that one schema may take."),
    ] = 10.0,
    model: Annotated[str, model_parameter("Whose tokenizer splits the instances.")] = DEFAULT_MODEL,
    json_file: JsonFile = None,
) -> None:
    """Compile each schema and walk its grammar over each instance's tokens, without a model. JSON-Schema-Test-Suite's
    own files are such lists. A wrong accept is an instance that does not fit and could be generated."""
    from specserve.checkpoint import catalog
    from specserve.structured.compiler import check_backend
    from specserve.structured.suite import by_keyword, check as check_all, entries_of, shares, totals
    from specserve.structured.trial import Trial
    from specserve.text.tokenizer import Tokenizer

    check_backend(grammar_backend)
    entries = entries_of(_read(file))
    folder = catalog.resolve(model)
    trial = Trial(folder, Tokenizer(folder).vocab_size, grammar_backend, limit_s)
    screen, groups = console(stderr=True), list[Any]()
    try:
        with Progress(console=screen, transient=True, disable=not screen.is_terminal) as progress:
            for group in progress.track(check_all(entries, trial), total=len(entries), description="schemas"):
                groups.append(group)
    except KeyboardInterrupt:
        if not groups:
            raise
    finally:
        trial.close()
    counts, keywords = totals(groups), by_keyword(groups)
    by_name = {name: {**found, **shares(found)} for name, found in keywords.items()}
    figures = {**counts, **shares(counts), "keywords": by_name, "interrupted": len(groups) < len(entries)}
    write_json(json_file, {**figures, "groups": [asdict(group) for group in groups]})
    _show(tables(json_file), counts, keywords)
    end_if_interrupted(figures, f"{len(groups)} of {len(entries)} schemas", json_file)


@grammar.command(name="list")
def list_all(*, json_file: JsonFile = None) -> None:
    """Show the grammars that come along: what --grammar of `specserve generate` takes by name."""
    entries = [library.find(name) for name in library.names()]
    write_json(json_file, [_described(entry) for entry in entries])
    table = FittedTable("name", "kind", "description", box=None)
    for entry in entries:
        table.add_row(entry.name, entry.kind, entry.description)
    tables(json_file, markup=False).print(table)  # a description may have [brackets]


@grammar.command
def show(
    name: Annotated[str, Parameter(group="Arguments", help="One of `specserve grammar list`.")],
    *,
    json_file: JsonFile = None,
) -> None:
    """Print a grammar: the beginning of one of your own, in a file of your own."""
    entry = library.find(name)
    write_json(json_file, {**_described(entry), "text": entry.text})
    if not is_json_alone(json_file):
        print(entry.text.removesuffix("\n"))


def _described(entry: library.Entry) -> dict[str, str]:
    return {"name": entry.name, "kind": entry.kind, "description": entry.description}


def _read(file: Path) -> Any:
    try:
        return read_json(file, _MOST_BYTES, pipes=True)
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read as JSON: {error}.") from error


def _show(console: Console, counts: dict[str, int], keywords: dict[str, dict[str, int]]) -> None:
    table = FittedTable("keyword", *(name.replace("_", " ") for name in counts), box=None)
    for name, found in {**keywords, "all groups": counts}.items():
        table.add_row(name, *(str(number) if number else "" for number in found.values()))
    console.print(table)
