"""Holds real clients against a real server: each in an environment with its own packages, over HTTP alone.

    python tests/contract/run.py [--only NAME ...] [--list]

Run it with the Python that has specserve; environments and logs are kept in build/contract. Prints one line per client
and exits with 1 when one of them failed, or a server was not as before when its client had left.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from environments import environment, versions
from servers import KEY, MODEL, Server, serving

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "contract"
_LIMIT_S = 1800.0  # for one client
_SHOWN = 60  # last lines of what a failed client said


@dataclass(frozen=True)
class Client:
    """A file of checks, the environment it runs in, the packages whose versions are told, and the servers it needs."""

    name: str
    environment: str
    packages: tuple[str, ...]
    files: tuple[str, ...]
    servers: tuple[str, ...] = ("drafting",)


LLAMA_INDEX = "check_recipes.py::test_a_recipe[LlamaIndex]"  # which needs an older openai
CLIENTS = (
    Client("openai3", "clients", ("openai",), ("check_openai.py", "check_openai_errors.py"), ("drafting", "narrow")),
    Client("openai2", "openai2", ("openai",), ("check_openai.py", "check_openai_errors.py"), ("drafting", "narrow")),
    Client("responses3", "clients", ("openai",), ("check_openai_responses.py",)),
    Client("responses2", "openai2", ("openai",), ("check_openai_responses.py",)),
    Client("structured3", "clients", ("openai",), ("check_openai_structured.py",)),
    Client("structured2", "openai2", ("openai",), ("check_openai_structured.py",)),
    Client("anthropic", "clients", ("anthropic",), ("check_anthropic.py",)),
    Client("ollama", "ollama", ("ollama",), ("check_ollama.py",)),
    Client("litellm", "ollama", ("litellm",), ("check_litellm.py",)),
    Client("outlines", "clients", ("outlines", "openai"), ("check_outlines.py",)),
    Client("langchain", "clients", ("langchain-openai", "openai"), ("check_langchain.py",)),
    Client("llm", "clients", ("llm", "openai"), ("check_llm.py",)),
    Client("recipes", "recipes", ("litellm", "instructor", "openai"), ("check_recipes.py",), ("bounded",)),
    Client("llama_index", "llama_index", ("llama-index-llms-openai-like", "openai"), (LLAMA_INDEX,), ("bounded",)),
    Client("lm_eval", "lm_eval", ("lm_eval",), ("check_lm_eval.py",), ("drafting", "plain")),
    Client("schemathesis", "schemathesis", ("schemathesis",), ("check_schema.py",), ("tiny",)),
)


@dataclass
class Result:
    """How a client fared. `said` is what it printed; `faults` are what was wrong with its servers afterwards."""

    counts: dict[str, int]
    said: str
    skipped: list[str] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """A run of no checks at all is no success; one whose checks were all skipped says so in its line."""
        return not self.faults and not self.counts["failed"] and sum(self.counts.values()) > 0


def check(client: Client) -> Result:
    """A client's checks against servers of its own; what keeps them from running is a failure of this client alone."""
    try:
        return _check(client, environment(client.environment, BUILD))
    except (subprocess.CalledProcessError, RuntimeError) as error:
        return Result({"passed": 0, "failed": 1, "skipped": 0}, str(error))


def _check(client: Client, python: Path) -> Result:
    with ExitStack() as stack:
        servers = {
            kind: stack.enter_context(serving(kind, BUILD / f"{client.name}-{kind}.log")) for kind in client.servers
        }
        result = run_checks(client, python, servers)
        result.faults += [f"{kind}: {fault}" for kind, server in servers.items() for fault in server.faults()]
    return result


def run_checks(client: Client, python: Path, servers: dict[str, Server]) -> Result:
    """pytest in the client's environment, told of the servers by environment variables."""
    report = BUILD / f"{client.name}.xml"
    report.unlink(missing_ok=True)
    urls = {f"CONTRACT_{kind.upper()}_URL": server.url for kind, server in servers.items()}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(HERE / "pytest.ini")]
    files = [str(HERE / name) for name in client.files]
    try:
        done = subprocess.run(
            [*command, f"--junitxml={report}", *files],
            cwd=HERE,
            env=_variables(client.name) | urls,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode("utf-8", "replace") if isinstance(error.stdout, bytes) else error.stdout
        return Result({"passed": 0, "failed": 1, "skipped": 0}, f"{said}\nnot done in {_LIMIT_S:g} s")
    (BUILD / f"{client.name}.txt").write_text(done.stdout, "utf-8")
    return _read(report, done.stdout, done.returncode)


def _variables(name: str) -> dict[str, str]:
    """The environment of a client: nothing of the project's own packages, no network but the server, files under
    build/."""
    home = BUILD / f"{name}-home"
    home.mkdir(exist_ok=True)
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "OPENAI_API_KEY", "CI")}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LANGCHAIN_TRACING_V2": "false"}
    own = {"CONTRACT_KEY": KEY, "CONTRACT_MODEL": MODEL, "CONTRACT_HOME": str(home), "HF_HOME": str(home / "hf")}
    return {**kept, **offline, **own, "PYTHONDONTWRITEBYTECODE": "1"}


def _read(report: Path, said: str, status: int) -> Result:
    """What pytest wrote; a run that ended without a report has failed."""
    if not report.is_file():
        return Result({"passed": 0, "failed": 1, "skipped": 0}, said)
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None, "pytest writes a test suite"
    total, failed, skipped = (int(suite.get(name, "0")) for name in ("tests", "failures", "skipped"))
    failed += int(suite.get("errors", "0"))
    if status not in (0, 1, 5):  # interrupted, or pytest itself was used wrongly
        failed = max(failed, 1)
    reasons = [element.get("message", "") for element in suite.iter("skipped")]
    printed = [str(entry.get("value")) for entry in suite.iter("property") if entry.get("name") == "told"]
    counts = {"passed": total - failed - skipped, "failed": failed, "skipped": skipped}
    return Result(counts, said, sorted(set(reasons)), printed)


def tell(client: Client, result: Result, seconds: float) -> None:
    """The client's line, and what is to be known beside it."""
    counted = ", ".join(f"{number} {word}" for word, number in result.counts.items())
    installed = versions(BUILD, client.environment, client.packages)
    print(f"{'ok  ' if result.ok else 'FAIL'} {client.name:<12} {counted}  {seconds:.1f} s  ({installed})", flush=True)
    for line in [*result.printed, *(f"skipped: {reason}" for reason in result.skipped), *result.faults]:
        print(f"     {line}", flush=True)
    if not result.ok:
        print("\n".join(result.said.splitlines()[-_SHOWN:]), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [client.name for client in CLIENTS]
    parser.add_argument(
        "--only", action="append", choices=names, metavar="NAME", help="run this client; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="list the clients and end")
    arguments = parser.parse_args()
    if arguments.list:
        print(*names, sep="\n")
        return 0
    BUILD.mkdir(parents=True, exist_ok=True)
    failed = False
    for client in CLIENTS:
        if arguments.only and client.name not in arguments.only:
            continue
        begun = time.monotonic()
        result = check(client)
        tell(client, result, time.monotonic() - begun)
        failed |= not result.ok
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
