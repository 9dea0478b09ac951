"""llm, the command line tool, with the server in its extra-openai-models.yaml."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Of an answer that no rounding of the model ends within the tokens that are asked for.
QUESTION = "Write a long story about a lighthouse and its keeper."
OPTIONS = ("-o", "temperature", "0", "-o", "max_tokens", "30")
MODELS = """\
- model_id: specserve
  model_name: {model}
  api_base: "{url}/v1"
  api_key_name: specserve
- model_id: specserve-completion
  model_name: {model}
  api_base: "{url}/v1"
  api_key_name: specserve
  completion: true
"""

Llm = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def llm(home: Path, url: str, key: str, model: str) -> Llm:
    """Runs llm in a folder of its own that knows the server and its key."""
    folder = home / "llm"
    folder.mkdir(exist_ok=True)
    (folder / "extra-openai-models.yaml").write_text(MODELS.format(model=model, url=url), "utf-8")
    (folder / "keys.json").write_text(json.dumps({"specserve": key}), "utf-8")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "llm", *arguments]
        variables = {**os.environ, "LLM_USER_PATH": str(folder)}
        return subprocess.run(command, env=variables, capture_output=True, text=True, stdin=subprocess.DEVNULL)

    return run


@pytest.fixture(scope="module")
def expected(ask: Any, model: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 30}
    status, answer = ask("/v1/chat/completions", body)
    assert status == 200
    return str(answer["choices"][0]["message"]["content"])


def test_the_models_are_known(llm: Llm) -> None:
    listed = llm("models").stdout
    assert "OpenAI Chat: specserve" in listed
    assert "OpenAI Completion: specserve-completion" in listed


@pytest.mark.parametrize("how", [(), ("--no-stream",)])
def test_a_prompt(llm: Llm, expected: str, how: tuple[str, ...]) -> None:
    done = llm("prompt", "-m", "specserve", *OPTIONS, "--usage", *how, QUESTION)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected.strip()
    assert "30 output" in done.stderr


def test_a_completion(llm: Llm) -> None:
    done = llm("prompt", "-m", "specserve-completion", *OPTIONS, "The capital of France is")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_an_error_is_shown(llm: Llm) -> None:
    done = llm("prompt", "-m", "specserve", "-o", "top_p", "0", QUESTION)
    assert done.returncode == 1
    assert "top_p" in done.stderr
