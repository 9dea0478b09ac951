"""The blocks of docs/recipes.md as they are written, each in a process of its own: with this server's address, key and
model in place of the documented ones. A block whose program is not in this environment is skipped, and says so."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
_BLOCK = re.compile(r"^<!-- make recipes: [^\n]+ -->\n```(python|sh)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_LIMIT_S = 300.0  # npx fetches its package first
# What Claude Code says of an answer that it read to the most tokens it asked for: sampled, a small model may not end.
ENDLESS = "output token maximum"


def recipes() -> list[tuple[str, str, str]]:
    """Heading, language and text of each block."""
    page = PAGE.read_text("utf-8")
    return [(_HEADING.findall(page[: found.start()])[-1], found[1], found[2]) for found in _BLOCK.finditer(page)]


def missing(language: str, text: str) -> str | None:
    """What the block needs that is not here."""
    if language == "python":
        modules = re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)
        return next((name for name in modules if importlib.util.find_spec(name) is None), None)
    programs = re.findall(r"^(llm|npx) ", text, re.MULTILINE)
    assert programs, "a block of commands without a program"
    return next((name for name in programs if shutil.which(name, path=_path()) is None), None)


def _path() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


RECIPES = recipes()


@pytest.fixture(scope="session")
def url() -> str:
    return os.environ["CONTRACT_BOUNDED_URL"]


def test_the_page_has_recipes() -> None:
    assert len(RECIPES) >= 10


@pytest.mark.parametrize(("name", "language", "text"), RECIPES, ids=[recipe[0] for recipe in RECIPES])
def test_a_recipe(name: str, language: str, text: str, url: str, key: str, model: str, home: Path) -> None:
    if (needed := missing(language, text)) is not None:
        pytest.skip(f"{name}: {needed} is not in this environment")
    folder = home / re.sub(r"\W", "-", name.lower())
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    text = text.replace("http://127.0.0.1:8000", url).replace("sk-local", key).replace("smollm2-135m", model)
    command = [sys.executable, "-c", text] if language == "python" else ["bash", "-ec", text]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("ANTHROPIC_", "OPENAI_"))}
    variables |= {"PATH": _path(), "CLAUDE_CONFIG_DIR": str(folder / "claude"), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_LIMIT_S
    )
    said = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0 or ENDLESS in said, said
    assert done.stdout.strip(), said
