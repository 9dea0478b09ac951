"""Everything that the documentation says can be run is run, against the real default model; docs/contributing.md tells
the conventions."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from specserve import LLM, SamplingParams
from specserve.cli.main import build_app
from specserve.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TARGETS = set(re.findall(r"^([a-z0-9-]+):.*##", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>not run|make recipes): (?P<why>[^\n]+) -->\n)?"
    r"```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.DOTALL | re.M,
)
_HERE_DOCUMENT = re.compile(r"<<'(\w+)'$")


@dataclass(frozen=True)
class Block:
    """A fenced block. `mark` says who does not run it here, and `why`; both are empty where it is run."""

    path: Path
    line: int
    language: str
    text: str
    mark: str
    why: str

    @property
    def name(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Of a console block those after `$ `, of a shell block all; lines that end in a backslash are joined, and so
        are those of a here-document."""
        found: list[str] = []
        end = ""  # of the here-document that the last command is still in
        for line in self.text.replace("\\\n", " ").splitlines():
            if end:
                found[-1] += f"\n{line}"
                end = "" if line == end else end
            elif line.startswith("$ ") if self.language == "console" else line and not line.startswith("#"):
                found.append(line.removeprefix("$ "))
                end = document[1] if (document := _HERE_DOCUMENT.search(line)) else ""
        return found


def blocks(path: Path, *languages: str) -> Iterator[Block]:
    text = path.read_text("utf-8")
    assert text.count("```") == 2 * len(_BLOCK.findall(text)), f"{path}: a block without a language, or without an end"
    for found in _BLOCK.finditer(text):
        if found["language"] in languages:
            line = text.count("\n", 0, found.start("text"))
            yield Block(path, line, found["language"], found["text"], found["mark"] or "", found["why"] or "")


def all_blocks(*languages: str) -> list[Block]:
    return [block for path in DOCUMENTS for block in blocks(path, *languages)]


def names(blocks: list[Block]) -> list[str]:
    return [block.name for block in blocks]


def test_only_known_languages_are_used() -> None:
    known = {"python", "console", "sh", "toml", "yaml", "json", "text"}
    found = {match["language"] for path in DOCUMENTS for match in _BLOCK.finditer(path.read_text("utf-8"))}
    assert found <= known


def test_few_blocks_are_not_run() -> None:
    python = all_blocks("python")
    for block in python:
        compile(block.text, block.name, "exec")
    assert 8 * sum(block.mark == "not run" for block in python) <= len(python)
    assert not [block.name for block in all_blocks("toml", "yaml", "json") if block.mark == "not run"]


PYTHON = all_blocks("python")
SHELL = all_blocks("console", "sh")


def skip_if_marked(block: Block) -> None:
    """What is not run here is listed with its reason, as the summary of a run shows what was skipped."""
    if block.mark:
        pytest.skip(f"{block.mark}: {block.why}")


@pytest.mark.parametrize("block", PYTHON, ids=names(PYTHON))
def test_python_runs(
    block: Block, runs_python: Callable[[str, str], None], capsys: pytest.CaptureFixture[str], smollm2: Path
) -> None:
    skip_if_marked(block)
    runs_python("\n" * block.line + block.text, str(block.path))  # so that a traceback names the document's line
    said = capsys.readouterr().out
    if "BaseModel" in block.text:
        assert said.startswith("name=")
        assert float(said.split()[-1]) > 1, "jump-forward tokens are drafted"
    if "triggered_tags" in block.text:
        check_constrained(said, Tokenizer(smollm2))


def check_constrained(said: str, tokenizer: Tokenizer) -> None:
    """What the model puts into the call is its own affair, and its rounding's: an object without bounds may go on until
    the most output tokens cut it off."""
    date, sky, call = said.rstrip("\n").split("\n", 2)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
    assert re.fullmatch("(sun|rain)( and (wind|fog))?", sky)
    begin = '<tool_call>\n{"name": "weather", "arguments": {"city": '
    assert re.match(re.escape(begin) + '"(Rome|Oslo)"[,}]', call), call
    if call.endswith("\n</tool_call>"):
        made = json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert made["name"] == "weather"
        assert isinstance(made["arguments"].get("days", 1), int)
    else:
        assert len(tokenizer.encode(call, add_special_tokens=False)) >= 60, "it ended of itself, unfinished"


@pytest.mark.parametrize("block", SHELL, ids=names(SHELL))
def test_commands_run(block: Block, runs_shell: Callable[[str], str]) -> None:
    skip_if_marked(block)
    assert block.commands, f"{block.name} has no line that begins with $"
    for command in block.commands:
        if command.startswith("curl ") and shutil.which("curl") is None:
            pytest.skip("There is no curl.")
        said = runs_shell(command)
        assert said.strip() or block.language == "sh", f"{command} says nothing"


def test_commands_that_are_not_run_exist() -> None:
    app = build_app()
    for block in SHELL:
        for command in block.commands if block.mark == "not run" else ():
            words = shlex.split(command, comments=True)
            if words[0] == "make":
                assert set(words[1:]) & TARGETS == {words[1]}, f"{block.name}: {command}"
            elif words[0] == "specserve":
                app.parse_args(words[1:], exit_on_error=False, print_error=False)


def test_data_can_be_read() -> None:
    readers = {"toml": tomllib.loads, "yaml": yaml.safe_load, "json": json.loads}
    for block in all_blocks(*readers):
        assert readers[block.language](block.text), block.name


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_examples_run(
    path: Path,
    runs_python: Callable[[str, str], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPECSERVE_KV_CACHE_GIB", "0.4")
    monkeypatch.setattr(sys, "argv", [str(path)])
    text = path.read_text("utf-8")
    assert len(text.splitlines()) <= 40
    runs_python(text, str(path))
    assert capsys.readouterr().out.strip()


def starters() -> list[tuple[str, str]]:
    """What the playground offers to begin with: names and messages."""
    text = (ROOT / "specserve/server/static/playground/examples.js").read_text("utf-8")
    (listed,) = re.findall(r"^export const STARTERS = (\[.*?\n\]);", text, re.DOTALL | re.MULTILINE)
    return [(name, message) for name, message in json.loads(re.sub(r",\s*\]$", "]", listed))]


def test_what_the_playground_offers_gains_by_drafts(engine: LLM) -> None:
    """But for the last, which is there to show text without repetition."""
    engine.use_drafter("auto", 5)
    params = SamplingParams(max_tokens=64, temperature=0)
    gained = {}
    for name, message in starters():
        engine.reset_prefix_cache()
        output = engine.chat([{"role": "user", "content": message}], params)[0].outputs[0]
        gained[name] = output.mean_acceptance_length
    *copies, story = gained.values()
    assert len(copies) == 3
    assert min(copies) > 1.5, gained
    assert story < min(copies), gained
