"""One server and one engine of the real default model for everything that the documentation runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import specserve.drafters
from specserve import LLM, EngineConfig
from specserve.cli.main import run as cli

ADDRESS = "http://127.0.0.1:8000"  # what the documentation says
START_S = 120.0


@pytest.fixture(scope="session")
def url(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with n-grams, as the documentation starts one."""
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "specserve", "serve", "smollm2-135m", "--drafter=ngram", "--port=0"]
    with log.open("wb") as stream:
        process = subprocess.Popen([*command, "--kv-cache-gib=0.4"], stdout=stream, stderr=stream)
    try:
        end = time.monotonic() + START_S
        while (found := re.search(r"Ready on (http://127\.0\.0\.1:\d+)", log.read_text("utf-8"))) is None:
            assert process.poll() is None, log.read_text("utf-8")
            assert time.monotonic() < end, log.read_text("utf-8")
            time.sleep(0.05)
        yield found[1]
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="session")
def engine(smollm2: Path) -> Iterator[LLM]:
    with LLM("smollm2-135m", kv_cache_gib=0.4) as llm:
        yield llm


@pytest.fixture
def runs_python(engine: LLM, url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Runs a program's text under a file's name. Each `with LLM(...)` in it gets the one engine, with the drafter that
    it asks for, or with other options one of its own; the documented address is the server's."""

    @contextmanager
    def lent(model: str, **options: Any) -> Iterator[LLM]:
        assert model == "smollm2-135m"
        if not options.keys() <= {"drafter", "num_speculative_tokens"}:
            with LLM(model, kv_cache_gib=0.4, **options) as own:
                yield own
            return
        config = EngineConfig(model=model, **options)
        engine.use_drafter(config.drafter, config.num_speculative_tokens)
        yield engine

    def run(text: str, name: str) -> None:
        # one of them adds its folder, which other tests of this process must not find drafters in
        monkeypatch.setattr(specserve.drafters, "__path__", [*specserve.drafters.__path__])
        module = ModuleType("__main__")
        module.__file__ = name
        monkeypatch.setitem(sys.modules, "__main__", module)  # where pydantic looks for the names of a class's fields
        try:
            exec(compile(text.replace(ADDRESS, url), name, "exec"), vars(module))
        except SystemExit as ended:
            if ended.code:
                raise

    monkeypatch.setattr(specserve, "LLM", lent)
    monkeypatch.setenv("SPECSERVE_BASE_URL", url)
    return run


@pytest.fixture
def runs_shell(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """Runs a command in an empty folder and returns what it says. It must succeed; curl fails for an HTTP error."""
    (tmp_path / ".curlrc").write_text("fail-with-body\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    for name, value in {"CURL_HOME": str(tmp_path), "SPECSERVE_URL": url, "SPECSERVE_KV_CACHE_GIB": "0.4"}.items():
        monkeypatch.setenv(name, value)

    def run(command: str) -> str:
        words = shlex.split(command.replace(ADDRESS, url))
        status = cli(words[1:]) if words[0] == "specserve" else subprocess.run(words, timeout=60).returncode
        out, error = capfd.readouterr()
        assert status == 0, f"{command}\n{out}{error}"
        return out

    return run
