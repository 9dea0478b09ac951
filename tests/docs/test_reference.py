"""The documentation is complete and leads somewhere: links, commands and options, endpoints, fields, metrics."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from specserve import EngineConfig, SamplingParams, errors
from specserve.cli.main import build_app
from specserve.server.http.routes import ROUTES
from specserve.server.metrics import Metrics
from specserve.server.metrics_totals import ApiProcessStatus, ReplicaStatus
from specserve.server.wire.openai.requests import ChatCompletionRequest, CompletionRequest
from specserve.server.wire.openai.unsupported import REFUSED
from specserve.speculation.base import Drafter
from specserve.structured import library
from specserve.types import Event, SequenceStats

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks/LOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
README_LINES = 130
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def sections(text: str, level: int) -> dict[str, str]:
    """What stands below each heading of this level, by heading."""
    parts = re.split(rf"^#{{{level}}} (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def anchors(text: str) -> set[str]:
    """Those that GitHub gives headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code(text: str) -> set[str]:
    """Everything in `single quotes of code`."""
    return set(re.findall(r"`([^`\n]+)`", text))


def rows(text: str) -> set[str]:
    """The code in the first cells of tables."""
    return {word for line in text.splitlines() if line.startswith("| `") for word in code(line.split(" | ")[0])}


# --- links ------------------------------------------------------------------------------------------------------------


def broken_links(path: Path, text: str) -> Iterator[str]:
    for link in _LINK.findall(text):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists():
            yield f"{path.name}: {link} does not exist"
        elif anchor and anchor not in anchors(target.read_text("utf-8")):
            yield f"{path.name}: {link} has no such heading"


def test_links_lead_somewhere() -> None:
    assert [fault for path in DOCUMENTS for fault in broken_links(path, path.read_text("utf-8"))] == []


def test_a_broken_link_is_noticed() -> None:
    text = "[a](docs/none.md) [b](docs/cli.md#none) [c](docs/cli.md#bench-serve) [d](https://example.org)"
    assert len(list(broken_links(ROOT / "README.md", text))) == 2


def test_every_page_is_found_from_the_readme() -> None:
    readme = read("README.md")
    assert len(readme.splitlines()) <= README_LINES
    assert [p.name for p in (ROOT / "docs").glob("*.md") if f"(docs/{p.name})" not in readme] == []


# --- the command line -------------------------------------------------------------------------------------------------


def commands(app: Any, prefix: str = "") -> Iterator[tuple[str, set[str]]]:
    """Each command with the options that its help shows."""
    for name in app:
        if name.startswith("-"):
            continue
        command = app[name]
        if command.default_command is not None:
            shown = [a.names[0] for a in command.assemble_argument_collection() if a.show and a.names[0] != "*"]
            yield prefix + name, {name for name in shown if name.startswith("--")}
        else:
            yield prefix + name, set()
        yield from commands(command, f"{prefix}{name} ")


def documented_options() -> dict[str, set[str]]:
    """By command, those of its own table and those of the shared groups that it links to."""
    page = sections(read("docs/cli.md"), 3)
    options = {
        name: set(re.findall(r"--[\w-]+", " ".join(rows(text))))
        - {"--no-prefix-caching", "--no-adaptive", "--no-adaptive-cache", "--no-bit-identity"}
        for name, text in page.items()
    }
    shared = {name: options.pop(name) for name in list(options) if name.endswith(" options")}
    for name in options:
        for group in re.findall(r"\(#(\w+)-options\)", page[name]):
            options[name] |= shared[f"{group.capitalize()} options"]
    return options


def test_an_option_has_one_name_in_all_commands() -> None:
    """What is explained in the same words is the same thing."""
    names: dict[str, set[str]] = {}
    for path, _ in commands(build_app()):
        command = build_app()
        for part in path.split():
            command = command[part]
        for argument in command.assemble_argument_collection() if command.default_command is not None else ():
            if argument.show and argument.names[0].startswith("--"):
                names.setdefault(argument.parameter.help or argument.names[0], set()).add(argument.names[0])
    assert {text: found for text, found in names.items() if len(found) > 1} == {}
    assert [found for text, found in names.items() if text.startswith("JSON in place of text")] == [{"--json"}]


def test_every_command_and_option_is_documented() -> None:
    assert documented_options() == dict(commands(build_app()))


def documented_texts(text: str) -> dict[str, str]:
    """By option, what the tables of a section say of it."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {name: cells[2].replace("`", "") for cells in lines for name in re.findall(r"--[\w-]+", cells[0])}


def test_the_page_says_of_an_option_what_its_help_says() -> None:
    """But for defaults, which have a column, and choices, which the help lists by itself."""
    page = sections(read("docs/cli.md"), 3)
    num_texts = 0
    for path, _ in commands(build_app()):
        command = build_app()
        for part in path.split():
            command = command[part]
        told = documented_texts(page[path])
        for group in re.findall(r"\(#(\w+)-options\)", page[path]):
            told = documented_texts(page[f"{group.capitalize()} options"]) | told
        for argument in command.assemble_argument_collection() if command.default_command is not None else ():
            if argument.parameter.help and argument.names[0] in told:
                text = re.sub(r" \[default: .*\]", "", argument.parameter.help).replace("`", "")
                found = told[argument.names[0]]
                assert text in (found, re.sub(r": [\w, ]+\.$", ".", found)), f"{path} {argument.names[0]}"
                num_texts += 1
    assert num_texts > 300


# --- the server -------------------------------------------------------------------------------------------------------


def test_every_endpoint_is_documented() -> None:
    endpoints = sections(read("docs/server.md"), 2)["Endpoints"]
    assert rows(endpoints) == {f"{route.method} {route.path}" for route in ROUTES}


def test_every_field_of_a_request_is_documented() -> None:
    fields = sections(read("docs/server.md"), 2)["Request fields"]
    known = {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}
    assert rows(fields) == known
    assert code(fields) >= REFUSED.keys()


def test_every_metric_is_documented() -> None:
    metrics = Metrics("m")
    metrics.begin("1", 1, 1)
    stats = SequenceStats(
        arrived=1.0, first_scheduled=1.0, first_token=2.0, finished=3.0, drafter="ngram", num_drafts=1
    )
    stats.drafted_by_position, stats.accepted_by_position = [1], [1]
    metrics.notify(Event(request_id="1", index=0, tokens=[5, 6], finish_reason="stop", stats=stats))
    replica = ReplicaStatus("ready", 0, 1, metrics.engines.look(None))
    text = metrics.exposition(None, 0, True, [replica], [ApiProcessStatus("ready", 0, 0)]).decode()
    exposed = {
        family.name.removeprefix("specserve:").removeprefix("vllm:") for family in text_string_to_metric_families(text)
    }
    documented = {
        name.removeprefix("specserve:") for part in sections(read("docs/metrics.md"), 2).values() for name in rows(part)
    }
    assert documented == exposed


# --- the SDK ----------------------------------------------------------------------------------------------------------


def test_every_parameter_and_option_of_the_sdk_is_documented() -> None:
    page = sections(read("docs/sdk.md"), 2)
    assert rows(page["Sampling parameters"]) == {field.name for field in dataclasses.fields(SamplingParams)}
    assert rows(page["Engine options"]) == {field.name for field in dataclasses.fields(EngineConfig)}


def test_every_error_is_documented() -> None:
    public = {
        name
        for name in errors.__dict__
        if name.endswith("Error") and inspect.getmodule(errors.__dict__[name]) is errors
    }
    assert code(sections(read("docs/sdk.md"), 2)["Errors"]) >= public


# --- drafters and grammars --------------------------------------------------------------------------------------------


def test_the_drafter_contract_is_documented() -> None:
    told = sections(read("docs/drafters.md"), 2)["How to write one"]
    contract = {name for name in (*vars(Drafter), *Drafter.__annotations__) if not name.startswith("_")}
    assert [name for name in contract if not re.search(rf"`{name}\b", told)] == []


def test_every_drafter_is_documented() -> None:
    told = rows(sections(read("docs/drafters.md"), 2)["Which drafter when"])
    assert told == {"auto", "none", *(path.stem for path in (ROOT / "drafters").glob("*.py"))}


def test_the_number_of_grammars_is_right() -> None:
    for name in ("docs/structured-output.md", "docs/cli.md"):
        assert f"{len(library.names())} grammars" in read(name)


# --- the log of measurements ------------------------------------------------------------------------------------------


def test_entries_of_the_log_are_short() -> None:
    """One table, and at most ten lines of prose behind it."""
    entries = re.split(r"^## ", read("benchmarks/LOG.md"), flags=re.MULTILINE)[1:]
    assert entries
    for entry in entries:
        title, *lines = entry.splitlines()
        assert re.match(r"\d{4}-\d\d-\d\d: ", title), title
        assert len(re.findall(r"^\|[-| ]+\|$", entry, re.MULTILINE)) == 1, f"{title}: one table"
        last = max(number for number, line in enumerate(lines) if line.startswith("|"))
        prose = [line for line in lines[last + 1 :] if line]
        assert len(prose) <= 10, f"{title}: {len(prose)} lines of prose"
        assert all(len(line) <= 130 for line in prose), f"{title}: a line of prose is longer than 130"
