"""One server and one engine of the real default model for everything that the documentation runs."""

from __future__ import annotations

import dataclasses
import io
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
import specserve.llm
from specserve import LLM, EngineConfig
from specserve.cli.main import run as cli

ADDRESS = "http://127.0.0.1:8000"  # what the documentation says
SERVED = "smollm2-135m --drafter ngram"
KV_CACHE_GIB = 0.4
START_S = 120.0
ROOT = Path(__file__).resolve().parents[2]
# Of commands that measure, in the file that gives options where a command names none.
LIMITS = """
[generate]
max_tokens = 64
[bench]
limit = 1
max_tokens = 4
repeats = 1
[bench.grid]
categories = ["chat"]
limit = 1
max_tokens = 4
repeats = 1
concurrency = [1]
"""


@contextmanager
def serving(options: list[str], log: Path) -> Iterator[str]:
    """The address of a server with these options, on a port that is free. It ends well when it is asked to."""
    for name in {"--port", "--kv-cache-gib"} & set(options):
        at = options.index(name)
        options = [*options[:at], *options[at + 2 :]]
    command = [sys.executable, "-m", "specserve", "serve", *options, "--port=0", f"--kv-cache-gib={KV_CACHE_GIB}"]
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream)
    try:
        end = time.monotonic() + START_S
        while (found := re.search(r"Ready on (http://127\.0\.0\.1:\d+)", log.read_text("utf-8"))) is None:
            assert process.poll() is None, log.read_text("utf-8")
            assert time.monotonic() < end, log.read_text("utf-8")
            time.sleep(0.05)
        yield found[1]
    finally:
        process.terminate()
        status = process.wait(30)
    assert status == 0, log.read_text("utf-8")


@pytest.fixture(scope="session")
def url(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with n-grams, as the documentation starts one."""
    with serving(SERVED.split(), tmp_path_factory.mktemp("server") / "log") as address:
        yield address


@pytest.fixture(scope="session")
def engine(smollm2: Path) -> Iterator[LLM]:
    with LLM("smollm2-135m", kv_cache_gib=KV_CACHE_GIB) as llm:
        yield llm


class Lent:
    """The one engine, which stays open when its borrower is done."""

    def __init__(self, engine: LLM) -> None:
        self._engine = engine

    def __enter__(self) -> Lent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def lender(engine: LLM) -> Callable[..., Any]:
    """What stands in for LLM: the one engine with the drafter that is asked for, or with other options one of its
    own."""
    like = EngineConfig(model="smollm2-135m", kv_cache_gib=KV_CACHE_GIB)

    def lend(*, progress: bool = False, generation_config: str = "auto", **options: Any) -> Any:
        own = EngineConfig(**options)
        shared = {"drafter": own.drafter, "num_speculative_tokens": own.num_speculative_tokens}
        if generation_config != "auto" or own != dataclasses.replace(like, **shared):
            return LLM(generation_config=generation_config, progress=progress, **options)
        engine.use_drafter(*shared.values())
        engine.reset_prefix_cache()
        return Lent(engine)

    return lend


@pytest.fixture
def runs_python(engine: LLM, url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Runs a program's text under a file's name. Each `with LLM(...)` in it gets the one engine, unless it asks for
    another; the documented address is the server's."""
    lend = lender(engine)

    def lent(model: str, **options: Any) -> Any:
        assert model == "smollm2-135m"
        return lend(model=model, **{"kv_cache_gib": KV_CACHE_GIB, **options})

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
    url: str, engine: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """Runs a command and returns what it says. It must succeed; curl fails for an HTTP error. A folder holds LIMITS for
    commands that measure, and a head. A server is ended once it is ready; one like that of `url` is that one. Commands
    that run the model get the one engine, unless an option asks for another."""
    (tmp_path / ".curlrc").write_text("fail-with-body\n", "utf-8")
    (tmp_path / "specserve.toml").write_text(LIMITS, "utf-8")
    (tmp_path / "my-head").symlink_to(next((ROOT / "drafters/zoo").glob("*block*")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(specserve.llm, "LLM", lender(engine))
    for name, value in {
        "CURL_HOME": str(tmp_path),
        "SPECSERVE_URL": url,
        "SPECSERVE_KV_CACHE_GIB": str(KV_CACHE_GIB),
    }.items():
        monkeypatch.setenv(name, value)

    def run(command: str) -> str:
        command = command.replace(ADDRESS, url)
        words = shlex.split(command, comments=True) if "<<" not in command else command.split()
        if words[:2] == ["specserve", "serve"]:
            if " ".join(words[2:]) == SERVED:
                return url
            with serving(words[2:], tmp_path / "log"):
                return "Ready"
        if words[0] == "specserve":
            status = cli(words[1:])
        else:
            status = subprocess.run(["bash", "-c", command], timeout=60, stdin=subprocess.DEVNULL).returncode
        out, error = capfd.readouterr()
        assert status == 0, f"{command}\n{out}{error}"
        return out

    return run
