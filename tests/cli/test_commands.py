"""All commands in one table: what their help shows at any width, and what they say of what is wrong. The commands are
those of the app, so one without a row fails."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cyclopts import App
from rich.console import Console

from specserve.cli.failures import FAILED, USAGE
from specserve.cli.main import build_app, run
from specserve.terminal import FittedTable

Outcome = tuple[int, str, str]
Run = Callable[..., Outcome]
WIDTHS = (45, 80, 200)
ENGINE = "Model Generation Speculation Engine Output"
NOBODY = "http://127.0.0.1:9"


@dataclass(frozen=True)
class Row:
    """The groups of a command's help, in order, before that of --config; and for words behind the command the exit
    status with what the message must have."""

    groups: str
    errors: dict[str, tuple[int, str]]


NO_MODEL = (USAGE, "Unknown model 'smollm2-135n'. Did you mean 'smollm2-135m'")
MODEL = {"smollm2-135n": NO_MODEL, "-m smollm2-135n": NO_MODEL, "--model": (USAGE, "--model needs a value.")}
JSON = {
    "--json=nowhere/o.json": (USAGE, "nowhere/o.json cannot be written: there is no folder nowhere. Name a file"),
    "--json=locked/o.json": (USAGE, "locked/o.json cannot be written: "),
    "--jsn": (USAGE, "Did you mean --json?"),
}
STEPS = {
    "--repeats 0": (USAGE, "Must be >= 1"),
    "--text nosuch": (USAGE, "The text in nosuch cannot be read: No such file or directory. Give a text file"),
}
NO_PROMPTS = {"--prompts nosuch": (USAGE, "The prompts in nosuch cannot be read: No such file or directory. Give a")}
SAMPLING = {
    "--temprature 1": (USAGE, "Did you mean --temperature?"),
    "--top-k x": (USAGE, '"x" is not a whole number'),
    "--top-k": (USAGE, "--top-k needs a value."),
    "--drafter ngrm": (USAGE, "Unknown drafter 'ngrm'. Did you mean 'ngram'?"),
    "--dtype float15": (USAGE, 'Choose from: "auto", "float32", "bfloat16"'),
}
ROWS = {
    "": Row(
        "Commands", {"nosuch": (USAGE, "Known: bench, chat, completion,"), "serv": (USAGE, "Did you mean 'serve'")}
    ),
    "generate": Row(
        "Arguments Model Generation Structured-output Speculation Engine Output",
        {f"x {words}": said for words, said in (SAMPLING | JSON | {"-m smollm2-135n": NO_MODEL}).items()}
        | {"x --schema nosuch": (USAGE, "--schema: nosuch cannot be read: No such file or directory.")}
        | {"x --config nosuch": (USAGE, "Cannot read the configuration file nosuch: No such file or directory.")}
        | {"x --grammar uul": (USAGE, "Unknown grammar 'uul'. Did you mean 'url'")},
    ),
    "chat": Row(ENGINE, SAMPLING | {"-m smollm2-135n": NO_MODEL}),
    "run": Row(ENGINE, SAMPLING | MODEL),
    "serve": Row(
        "Model Speculation Engine Listening Access Engines-elsewhere Limits Operation",
        MODEL
        | {
            "--prot 1": (USAGE, "Did you mean --port?"),
            "--port 99999": (USAGE, "it must be a number from 0 to 65535"),
            "--log-level loud": (USAGE, "--log-level: Unknown value 'loud'. Known: debug, error, info, warning."),
            "--api-key-file nosuch": (USAGE, "--api-key-file nosuch cannot be read: No such file or directory."),
            "--drafter ngrm": (USAGE, "Did you mean 'ngram'?"),
        },
    ),
    "engine": Row(
        "Model Speculation Engine Listening Access Limits Operation",
        {
            "": (USAGE, "--secret-file is missing"),
            "--model": (USAGE, "--model needs a value."),
            "--listen nowhere": (USAGE, "--listen is 'nowhere'; it must be HOST:PORT"),
            "--secret-file nosuch": (USAGE, "--secret-file nosuch cannot be read: No such file or directory."),
        },
    ),
    "rank": Row(
        "Model Engine",
        {
            "": (USAGE, "specserve rank needs --join: HOST:PORT, the --ranks-listen of the model's first process."),
            "--join a:1": (USAGE, "specserve rank needs --secret-file: File with the secret that both know"),
            "--join a:1 --secret-file nosuch": (USAGE, "--secret-file nosuch cannot be read: No such file"),
        },
    ),
    "dynamo": Row("Model Speculation Engine Operation", {"--namespce x": (USAGE, "Did you mean --namespace?")}),
    "train": Row(
        "Arguments Model Text Head Training Output",
        {
            "": (USAGE, "specserve train needs KIND: Kind of the head."),
            "eagl": (USAGE, 'Choose from: "eagle", "block", "medusa"'),
            "eagle --prompts p --outt o": (USAGE, "--out"),
            "eagle --prompts nosuch --out o": (USAGE, "--prompts: nosuch cannot be read: No such file or directory."),
        },
    ),
    "bench": Row(
        "Commands Measurement Model Speculation Engine Output",
        MODEL
        | JSON
        | NO_PROMPTS
        | {
            "gird": (USAGE, "Did you mean 'bench grid'?"),
            "--repeets 2": (USAGE, "Did you mean --repeats?"),
            "--adapter fr": (USAGE, "Unknown adapter 'fr'. Known: none. Give its folder with --adapter fr=PATH."),
            "--record nowhere/r.jsonl": (USAGE, "nowhere/r.jsonl cannot be written: there is no folder nowhere."),
        },
    ),
    "bench serve": Row(
        "Measurement Server Load Generation Speculation Output",
        JSON
        | NO_PROMPTS
        | {
            f"--url {NOBODY}": (FAILED, f"No server at {NOBODY}/v1/models: "),
            "--url ftp://x": (USAGE, "it must begin with http:// or https://"),
            "--plot nowhere/o.svg": (USAGE, "nowhere/o.svg cannot be written: there is no folder nowhere."),
        },
    ),
    "bench grid": Row(
        "Measurement Model Speculation Engine Output",
        MODEL | JSON | NO_PROMPTS | {"--concurrency 1,x": (USAGE, '"x" is not a whole number; write them as 1,2,4.')},
    ),
    "bench replay": Row(
        "Measurement Speculation Output",
        {f"r.jsonl {words}": said for words, said in JSON.items()}
        | {
            "": (USAGE, "specserve bench replay needs --recording: JSON lines with"),
            "nosuch": (USAGE, "nosuch cannot be read: No such file or directory."),
        },
    ),
    "bench verify-cost": Row("Measurement Model Engine Output", MODEL | JSON | STEPS | {"--rows x": (USAGE, '"x" is')}),
    "bench synthetic": Row(
        "Measurement Model Output",
        JSON
        | {
            "--repeats 0": STEPS["--repeats 0"],
            "--shape 9b": (USAGE, 'Choose from: "0.5b", "1.5b", "8b"'),
            "--acceptance x": (USAGE, '"x" is no list of numbers; write them as 0.7,0.6.'),
            "--acceptance 2": (USAGE, "--acceptance has 2; shares of accepted tokens are numbers from 0 to 1."),
            "--drafter-cost 1/step": (USAGE, "write 0.08 for each draft, or 0.05/token."),
            "--rows 2,4": (USAGE, "--rows begin with 1"),
        },
    ),
    "bench profile": Row(
        "Measurement Model Engine Output", MODEL | JSON | STEPS | {"--rows 0": (USAGE, "Must be >= 1")}
    ),
    "bench quality": Row(
        "Measurement Model Engine Output",
        MODEL
        | JSON
        | {"--quantization int9": (USAGE, "Did you mean 'int8' or 'int4'? Known: auto, int4, int8, none.")},
    ),
    "grammar": Row("Commands", {"chek": (USAGE, "Did you mean 'check'? Known: check, list, show. See `specserve gr")}),
    "grammar check": Row(
        "Check Model Output",
        {
            "": (USAGE, "specserve grammar check needs --file: JSON: a list of"),
            "nosuch": (USAGE, "nosuch cannot be read as JSON: No such file or directory."),
            "suite.json -m smollm2-135n": NO_MODEL,
            "suite.json --limit-s 0": (USAGE, "Must be > 0"),
            "suite.json --json=nowhere/o.json": JSON["--json=nowhere/o.json"],
        },
    ),
    "grammar list": Row("Output", JSON | {"x": (USAGE, "specserve grammar list takes no argument 'x'.")}),
    "grammar show": Row(
        "Arguments Output", {"": (USAGE, "needs --name: One of"), "sqll": (USAGE, "Did you mean 'sql'")}
    ),
    "top": Row(
        "Server Output",
        {
            f"--url {NOBODY} --once": (FAILED, f"No server at {NOBODY}: "),
            "ftp://x": (USAGE, "is no address of a server. Write it as http://127.0.0.1:8000."),
            "--interval 0": (USAGE, "Must be >= 0.1"),
        },
    ),
    "pull": Row("Model Output", MODEL | JSON),
    "list": Row("Output", JSON | {"--al": (USAGE, "Did you mean --all?"), "x": (USAGE, "takes no argument 'x'.")}),
    "rm": Row(
        "Model Output", {"": (USAGE, "specserve rm needs --model: "), "x --yes": (USAGE, "Unknown installed mod")}
    ),
    "ps": Row("Output", JSON | {"x": (USAGE, "specserve ps takes no argument 'x'. See `specserve ps --help`.")}),
    "inspect": Row(
        "Model Output",
        {f"r.jsonl {words}": said for words, said in JSON.items()}
        | MODEL
        | {"": (USAGE, "specserve inspect needs --model: ")},
    ),
    "doctor": Row(
        "Model Speculation Engine Engines-elsewhere Operation Output",
        JSON
        | {
            "--isa avx9": (USAGE, "Did you mean 'avx2' or 'avx512'?"),
            "--text p": (USAGE, "--text is what --head is replayed on. Give both."),
            "--num-speculative-tokens 3": (USAGE, "--num-speculative-tokens is for the replay of --head. Give both."),
            "smollm2-135n --head h": NO_MODEL,
            "--port 99999": (USAGE, "it must be a number from 0 to 65535"),
            "--head h --port 1": (USAGE, "leave out --port and the options of a layout."),
        },
    ),
    "completion": Row("Arguments", {"fsh": (USAGE, 'Did you mean "fish"?')}),
}
ERRORS = [(name, words) for name, row in ROWS.items() for words in row.errors]


def commands(app: App, path: tuple[str, ...] = ()) -> Iterator[tuple[str, App]]:
    yield " ".join(path), app
    for name in app:
        if not name.startswith("-"):
            yield from commands(app[name], (*path, name))


APPS = dict(commands(build_app()))


@pytest.fixture
def specserve(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs the command line in a folder with a few files and no model; gives status, standard output and error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SPECSERVE_DEBUG", raising=False)
    for name in ("logs.configure", "http.run.use_own_threads_only", "http.run.return_large_blocks"):
        monkeypatch.setattr(f"specserve.server.{name}", lambda *arguments: None)  # what a server does to its process
    monkeypatch.setattr("specserve.server.http.run.sys", SimpleNamespace(stderr=io.StringIO(), setswitchinterval=float))
    Path("r.jsonl").write_text('{"prompt_ids": [1, 2, 3], "output_ids": [1, 2], "category": "a"}\n')
    Path("suite.json").write_text('[{"schema": {}, "tests": [{"data": 1, "valid": true}]}]')
    Path("p").write_text('{"prompt": "x"}\n')
    Path("locked").symlink_to("/proc")  # where nobody makes a file

    def call(*arguments: str) -> Outcome:
        status = run(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_every_command_has_a_row() -> None:
    assert set(APPS) == set(ROWS)


# --- help -------------------------------------------------------------------------------------------------------------


def options_of(app: App) -> list[Any]:
    if app.default_command is None:
        return []
    return [each for each in app.assemble_argument_collection() if each.show and each.name != "*"]


@pytest.mark.parametrize("command", ROWS)
def test_options_have_a_text_and_help_is_whole_at_any_width(
    specserve: Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    options = options_of(APPS[command])
    for option in options:
        assert (option.parameter.help or "").endswith((".", "].")), option.name
    names = {name for option in options for name in option.names if name.startswith("--")} | {"--config"}
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        status, out, err = specserve(*command.split(), "--help")
        assert (status, err) == (0, "")
        assert "\x1b" not in out and "…" not in out
        lines = out.splitlines()
        assert max(map(len, lines)) <= width
        assert " ".join(out.split()).startswith(f"Usage: specserve {command} ".replace("  ", " "))
        about = " ".join(out.partition("\n\n")[2].partition("\n\n")[0].split())
        assert re.match(r"(A |[A-Z][a-z]+ ).*\.$", about), "what it does, in a sentence"
        found = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", out))
        assert names <= found, names - found
        titles = [line.strip("╭─╮ ").replace(" ", "-") for line in lines if line.startswith("╭")]
        assert titles == [*ROWS[command].groups.split(), "Configuration"]


def test_commands_are_told_alike_in_the_list_and_in_their_help(specserve: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    _, listed, _ = specserve("--help")
    for command in ROWS:
        if command and " " not in command:
            _, out, _ = specserve(command, "--help")
            about = out.splitlines()[2]
            assert re.search(rf"│ {command} +{re.escape(about)} +│", listed), command


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "words"), ERRORS, ids=[" ".join(each).strip() for each in ERRORS])
def test_an_error_is_one_line_that_says_what_to_do(specserve: Run, command: str, words: str) -> None:
    expected, said = ROWS[command].errors[words]
    status, out, err = specserve(*command.split(), *words.split())
    assert (status, out) == (expected, "")
    assert said in err
    assert err.startswith("specserve: ") and err.count("\n") == 1
    assert "Traceback" not in err and "Errno" not in err
    assert not list(Path().glob("**/o.*"))


@pytest.mark.parametrize("command", [name for name in ROWS if APPS[name].default_command is not None])
def test_an_unknown_option_names_the_help(specserve: Run, command: str) -> None:
    status, out, err = specserve(*command.split(), "--zzz")
    assert (status, out) == (USAGE, "")
    assert re.fullmatch(rf"specserve: [^\n]* See `specserve {command} --help`\.\n", err)


# --- streams ----------------------------------------------------------------------------------------------------------


def at_a_terminal(*words: str, **variables: str) -> str:
    """What a process prints, standard output and error, whose three streams are a terminal of 45 columns."""
    screen, end = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "45", **variables}
    command = [sys.executable, "-m", "specserve", *words]
    with subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment) as process:
        os.close(end)
        shown = b""
        with suppress(OSError):  # that the terminal has no other end any more
            while piece := os.read(screen, 2**16):
                shown += piece
    os.close(screen)
    assert process.returncode == 0
    return shown.decode()


@pytest.mark.parametrize("words", ["list --help", "list --all", "grammar list"])
def test_a_terminal_gets_colours_unless_it_wants_none(words: str) -> None:
    colourful, plain = at_a_terminal(*words.split()), at_a_terminal(*words.split(), NO_COLOR="1")
    assert "\x1b[" in colourful and "\x1b" not in plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", colourful) == plain
    assert "…" not in plain and max(map(len, plain.splitlines())) <= 45


@pytest.mark.parametrize("words", ["list --all", "list --all --json"])
def test_whoever_stops_reading_gets_no_traceback(words: str) -> None:
    """As of `specserve list --all | head -1`."""
    command = [sys.executable, "-m", "specserve", *words.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == FAILED


def test_a_full_disk_is_an_error_of_one_line() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "specserve", "list", "--all"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == FAILED
    assert done.stderr == "specserve: No space left on device\n"


def test_a_file_that_is_there_stays_as_it_is_where_the_command_fails(specserve: Run) -> None:
    Path("out.json").write_text("[1]")
    assert specserve("bench", "smollm2-135n", "--json", "out.json")[0] == USAGE
    assert Path("out.json").read_text() == "[1]"


# --- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [20, 45, 60, 200])
def test_no_cell_of_a_table_is_cut(width: int) -> None:
    table = FittedTable(title="Of two")
    for name in ("drafter", "tokens a step", "accepted", "folder"):
        table.add_column(name, no_wrap=True)
    rows = [("none", "1.00", "", "/a/folder/that/is/longer/than/all/terminals"), ("ngram", "1.73", "81%", "/b")]
    for row in rows:
        table.add_row(*row)
    shown = io.StringIO()
    Console(file=shown, width=width).print(table)
    lines = shown.getvalue().splitlines()
    assert "…" not in shown.getvalue() and max(map(len, lines)) <= width
    whole = "".join(shown.getvalue().split())
    assert all(cell in whole for row in rows for cell in row)
    if width == 60:
        at = lines.index("ngram")
        assert lines[at + 1] == "  tokens a step 1.73   accepted 81%   folder /b"
