"""One name for one thing: the model, drafters, --json and prompts are the same options in all commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cyclopts import ArgumentCollection

from specserve.bench.grid import default_concurrency
from specserve.cli.arguments import RENAMED, current
from specserve.cli.main import build_app, run
from specserve.testing import write_tiny_model

Outcome = tuple[int, str, str]
SMALL = ("--dtype", "float32", "--kv-cache-gib", "0.01", "--max-model-len", "1024", "--max-tokens", "4")
# What takes no model, and whose first argument is something else.
WITHOUT_MODEL = {"completion", "top", "list", "ps", "bench replay", "bench synthetic", "grammar list", "grammar show"}
WITH_ARGUMENTS = {"generate", "train", "grammar check", "bench serve"}
REPORTS_NOTHING = {"serve", "engine", "rank", "dynamo", "chat", "completion"}


@pytest.fixture
def specserve(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Outcome:
        status = run(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "llama"))


def commands(app: Any, prefix: str = "") -> Iterator[tuple[str, ArgumentCollection]]:
    for name in app:
        if not name.startswith("-"):
            command = app[name]
            if command.default_command is not None:
                yield prefix + name, command.assemble_argument_collection()
            yield from commands(command, f"{prefix}{name} ")


ALL = dict(commands(build_app()))


def named(command: str, name: str) -> Any:
    return next((argument for argument in ALL[command] if name in argument.names), None)


def test_the_model_has_one_name_in_every_command_that_takes_one() -> None:
    assert {name for name in ALL if named(name, "--model") is None} == WITHOUT_MODEL
    for name in ALL.keys() - WITHOUT_MODEL:
        assert named(name, "--model").names == ("--model", "-m"), name
        assert (named(name, "--model").index == 0) == (name not in WITH_ARGUMENTS), name


def test_every_command_that_reports_something_has_json() -> None:
    assert {name for name in ALL if named(name, "--json") is None} == REPORTS_NOTHING
    helps = {named(name, "--json").parameter.help for name in ALL.keys() - REPORTS_NOTHING}
    assert len(helps) == 1


def test_drafters_prompts_and_temperatures_have_one_name() -> None:
    names = {name for arguments in ALL.values() for argument in arguments for name in argument.names}
    assert "--drafter" in names
    assert not names & {"--drafters", "--speculative", "--speculator", "--temperatures", "--quantizations"}
    assert {name for name in ALL if named(name, "--backend") is not None} == {"serve"}  # where engines run
    assert not names & {old for renamed in RENAMED.values() for old in renamed} - {"--model", "--backend"}
    for name in ("bench", "bench grid", "bench serve"):
        assert named(name, "--prompts").field_info.default == "demo", name


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("list --json", "list --json=-"),
        ("list --json - --all", "list --json=- --all"),
        ("list --json a.json --all", "list --json=a.json --all"),
        ("list --json=a", "list --json=a"),
        ("generate --json x", "generate --json=- x"),
        ("generate x --json --stats", "generate x --json=- --stats"),
        ("generate --json out.jsonl x", "generate --json=out.jsonl x"),
        ("generate --json -- x.json", "generate --json=- -- x.json"),
        ("generate -- --json a.json", "generate -- --json a.json"),
        ("train eagle --temperatures 0 --temperatures=1", "train eagle --temperature 0 --temperature=1"),
        ("bench quality --quantizations int8", "bench quality --quantization int8"),
        ("bench --quantizations int8", "bench --quantizations int8"),
        ("grammar check f --backend auto", "grammar check f --grammar-backend auto"),
        ("inspect head --model target", "inspect head --target target"),
        ("inspect --path head", "inspect --model head"),
        ("inspect --model head", "inspect --model head"),
        ("", ""),
    ],
)
def test_arguments_are_read_in_todays_names(given: str, meant: str) -> None:
    assert current(given.split()) == meant.split()


@pytest.mark.parametrize(
    "command",
    [
        "doctor {}",
        "inspect {}",
        "inspect -m {}",
        "list",
        "list --all",
        "ps",
        "pull {}",
        "pull --list",
        "grammar list",
        "grammar show date",
        "bench replay r.jsonl --drafter ngram,suffix",
        "run {} hello",
        "bench {} --limit 1",
        "bench grid {} --categories math --temperature 0 --repeats 1 --drafter ngram",
        "bench verify-cost {} --rows 1,2 --context 8 --repeats 1",
    ],
)
def test_standard_output_has_json_alone_or_text_and_a_file(
    specserve: Callable[..., Outcome], tiny: str, command: str
) -> None:
    line = {"prompt_ids": [1, 2, 3, 1, 2], "output_ids": [3, 1, 2, 3, 1, 2], "category": "a"}
    Path("r.jsonl").write_text(json.dumps(line) + "\n")
    words = [word.format(tiny) for word in command.split()]
    if words[0] in ("run", "bench") and words[1] != "replay":
        words += SMALL[:6] if words[1] == "verify-cost" else SMALL
    status, out, err = specserve(*words, "--json")
    assert status == 0, err
    alone = json.loads(out)
    status, out, err = specserve(*words, "--json", "out.json")
    assert status == 0, err
    beside = json.loads(Path("out.json").read_text())
    assert type(beside) is type(alone) and len(beside) == len(alone)
    assert bool(out) == (command not in ("list", "ps", "pull --list") or bool(alone))
    with pytest.raises(ValueError, match=r"Expecting value|Extra data"):
        json.loads(out)


def test_generate_writes_lines_of_json(specserve: Callable[..., Outcome], tiny: str) -> None:
    flags = ("-m", tiny, *SMALL, "--seed", "1")
    text = specserve("generate", "one", "two", *flags)[1]
    _, out, _ = specserve("generate", "--json", "one", "two", *flags)
    assert [json.loads(line)["text"] for line in out.splitlines()] == text.splitlines()
    assert specserve("generate", "--json", "o.jsonl", "one", "two", *flags)[1] == text
    told = [
        [json.loads(line)["token_ids"] for line in each.splitlines()] for each in (Path("o.jsonl").read_text(), out)
    ]
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("list", "--json=nowhere/o"), "there is no folder nowhere"),
        (("list", "--json=."), "it is a folder"),
        (("run", "smollm2-135m", "--json"), "Give a prompt"),
        (("bench", "gird"), "Did you mean 'bench grid'?"),
        (("bench", "smollm-135m"), "Did you mean 'smollm2-135m'"),
    ],
)
def test_what_is_wrong_is_told(specserve: Callable[..., Outcome], arguments: Sequence[str], complaint: str) -> None:
    status, out, err = specserve(*arguments)
    assert (status, out) == (2, "")
    assert complaint in err


def test_rm_removes_nothing_that_is_named_for_other_commands(
    specserve: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "none"))
    Path("specserve.toml").write_text('model = "smollm2-135m"\n')
    told = [specserve("rm", "--yes")]
    monkeypatch.setenv("SPECSERVE_MODEL", "smollm2-135m")
    told.append(specserve("rm", "--yes"))
    assert [status for status, _, _ in told] == [2, 2]
    assert all("only models that its arguments name" in err for _, _, err in told)
    assert "Unknown installed model 'this'" in specserve("rm", "this", "--yes")[2]


def test_json_may_be_set_in_the_file_of_options(specserve: Callable[..., Outcome]) -> None:
    for value, begins in (("true", "["), ("false", "name"), ('"o.json"', "name")):
        Path("specserve.toml").write_text(f"[list]\njson = {value}\nall = true\n")
        status, out, err = specserve("list")
        assert status == 0, err
        assert out.startswith(begins)
    assert json.loads(Path("o.json").read_text())


def test_a_grid_runs_as_many_prompts_at_once_as_its_categories_have() -> None:
    categories = ["a"] * 40 + ["b"] * 2
    assert default_concurrency(categories, ("all",), 32) == [1, 2]
    assert default_concurrency(categories, ("a",), 32) == [1, 4, 16, 32]
    assert default_concurrency(categories, ("a",), 8) == [1, 4, 8]
    assert default_concurrency(categories, ("none",), 8) == [1]
