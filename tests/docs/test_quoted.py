"""What pages quote of the code is in the code: messages of troubleshooting.md, options of coming-from.md."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from specserve import EngineConfig, SamplingParams
from specserve.cli.main import build_app
from specserve.server.wire.openai.requests import ChatCompletionRequest, CompletionRequest
from tests.docs.test_reference import commands, read, rows, sections

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("specserve", "drafters", "grammars", "kernels")
_VALUE = "\0"  # what stands for a value in the text of an f-string
_SHORTEST = 12  # characters of a message that differ from nothing else


def texts(node: ast.AST) -> Iterator[str]:
    """Each string of a program, with _VALUE for what an f-string puts in."""
    for found in ast.walk(node):
        if isinstance(found, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else _VALUE for part in found.values]
            yield "".join(str(part) for part in parts)
        elif isinstance(found, ast.Constant) and isinstance(found.value, str):
            yield found.value
        elif isinstance(found, ast.BinOp) and isinstance(found.op, ast.Add):
            sides = [next(texts(side), _VALUE) for side in (found.left, found.right)]
            yield "".join(sides)


@cache
def messages() -> str:
    """All strings of the code, one a line."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return "\n".join(text.replace("\n", " ") for path in files for text in texts(ast.parse(path.read_text("utf-8"))))


def is_quoted(line: str) -> bool:
    """Whether one string of the code has all of a message's parts, in order, with values between them."""
    parts = [re.escape(part.strip()) for part in line.split("...") if part.strip()]
    return re.search(rf"[^\n]*{_VALUE}[^\n]*".join(parts), messages()) is not None


def quotations() -> list[str]:
    blocks = re.findall(r"^```text\n(.*?)^```$", read("docs/troubleshooting.md"), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("line", quotations())
def test_a_message_is_one_of_the_code(line: str) -> None:
    assert len(line.replace("...", "").strip()) >= _SHORTEST
    assert is_quoted(line)


def test_a_message_that_changed_is_noticed() -> None:
    assert is_quoted("kv_cache_gib is ... and ... GiB are free.")
    assert not is_quoted("kv_cache_gib is ... and ... GiB are left.")
    assert not is_quoted("kv_cache_gib is 3 and ... GiB are free.")


# --- coming from another engine ---------------------------------------------------------------------------------------


@cache
def ours() -> set[str]:
    """Every name that the second column of a table may have."""
    found = dict(commands(build_app()))
    options = set().union(*found.values())
    names = {field.name for kind in (EngineConfig, SamplingParams) for field in dataclasses.fields(kind)}
    names |= {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}
    return options | {"--no-prefix-caching", "--no-adaptive"} | {f"specserve {name}" for name in found} | names


def table_rows(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ") and "---" not in line]


def unknown_names(text: str, known: set[str]) -> list[str]:
    """The options, commands and names in the second column that do not exist."""
    wrong = []
    for cells in table_rows(text):
        for word in re.findall(r"`([^`]+)`", cells[1]):
            command = re.match(r"specserve(?: [a-z]+)+", word)
            options = re.findall(r"--[a-z][\w-]*", word)
            if command:
                options.append(command[0] if command[0] in known else " ".join(command[0].split()[:2]))
            elif not options:
                options = [re.split(r"[ =(:]", word)[0]]
            wrong += [name for name in options if name not in known and not name.startswith("--drafter-options")]
    return wrong


@pytest.mark.parametrize("engine", ["vLLM", "Ollama", "llama.cpp"])
def test_what_takes_the_place_of_an_option_exists(engine: str) -> None:
    text = sections(read("docs/coming-from.md"), 2)[f"From {engine}"]
    assert len(table_rows(text)) > 15
    assert unknown_names(text, ours()) == []


def test_an_option_that_is_gone_is_noticed() -> None:
    table = "| theirs | `--port 1`, `--prot`, `specserve serve x`, `specserve server`, `drafter=x`, `drafted=x` |"
    assert unknown_names(table, ours()) == ["--prot", "specserve server", "drafted"]


def test_rows_of_the_tables_have_two_sides() -> None:
    assert rows(read("docs/coming-from.md"))
    for cells in table_rows(read("docs/coming-from.md")):
        assert len(cells) in (2, 3), cells
