"""Uses an installed wheel as a newcomer does who asked for no extras: answers, a grammar, the bench, the doctor, and a
server that is asked for JSON that fits a schema. Run it with the Python of an environment that has the wheel and what
it requires, and nothing else; it goes to a folder of its own, where no checkout is in the way.

    build/bare/venv/bin/python -P tests/bare/run.py [--model smollm2-135m]

Prints a line for each use, and exits with 1 at the first that does not work.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

# What only extras and developers' tools bring: one of them here would hide that something needs it.
ABSENT = ("xgrammar", "tvm_ffi", "matplotlib", "pytest", "scipy", "hypothesis", "jsonschema_rs")
LIMIT_S = 300.0  # for one use, on a slow and busy machine
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def expect(fits: bool, what: str) -> None:
    if not fits:
        sys.exit(f"FAILED: {what}")


def specserve(*arguments: str, status: int = 0) -> str:
    """What the command prints; on standard error where it is to fail."""
    command = [str(Path(sys.executable).with_name("specserve")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    expect(done.returncode == status, f"{' '.join(arguments)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    print(f"   specserve {' '.join(arguments)}", flush=True)
    return done.stderr if status else done.stdout


def check_environment() -> None:
    found = importlib.util.find_spec("specserve")
    expect(found is not None and str(found.origin).startswith(sys.prefix), "this environment has no specserve")
    present = [name for name in ABSENT if importlib.util.find_spec(name) is not None]
    expect(not present, f"this environment is not bare: it has {', '.join(present)}")


def check_commands(model: str) -> None:
    told = " ".join(specserve("doctor", model).split())
    expect("backends llguidance, outlines" in told and "xgrammar (package xgrammar)" in told, f"doctor says {told}")
    expect(bool(specserve("generate", "--model", model, "--max-tokens", "8", "Hello").strip()), "there is no answer")
    expect(bool(specserve("run", model, "Hello", "--max-tokens", "8").strip()), "run has no answer")
    expect(model in specserve("list"), f"list does not name {model}")
    for backend in ("auto", "outlines"):
        said = specserve(
            "generate", "--model", model, "--grammar-backend", backend, "--regex", r"\d{4}", "Year?"
        ).split()
        expect(re.fullmatch(r"\d{4}", said[0]) is not None, f"--regex gave {said}")
    said = specserve("generate", "--model", model, "--grammar", "date", "Which day is it?").split()
    expect(date.fromisoformat(said[0]) is not None, f"--grammar gave {said}")
    refused = " ".join(
        specserve("generate", "--model", model, "--grammar-backend", "xgrammar", "Hello", status=2).split()
    )
    expect("pip install 'specserve[xgrammar]'" in refused, f"a backend that is not installed: {refused}")
    specserve("bench", "--model", model, "--limit", "1", "--max-tokens", "8", "--repeats", "1")


@contextmanager
def serving(model: str) -> Iterator[str]:
    """The base URL of a server that takes requests."""
    command = [sys.executable, "-P", "-m", "specserve", "serve", model, "--port", "0"]
    log = Path("server.log")
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        end = time.monotonic() + LIMIT_S
        while not (found := re.search(r"Listening on (http://\S+:\d+)", log.read_text())) or not is_ready(found[1]):
            alive = process.poll() is None and time.monotonic() < end
            expect(alive, f"the server did not start:\n{log.read_text()}")
            time.sleep(0.1)
        yield found[1]
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def is_ready(base: str) -> bool:
    try:
        with urllib.request.urlopen(f"{base}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def ask(base: str, **fields: Any) -> str:
    """The answer of the model."""
    body = {"messages": [{"role": "user", "content": "Tell me of Ada, 36."}], "max_tokens": 64, **fields}
    request = urllib.request.Request(
        f"{base}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
            return str(json.load(response)["choices"][0]["message"]["content"])
    except urllib.error.HTTPError as error:
        sys.exit(f"FAILED: {json.dumps(fields)} was answered with {error.code}: {error.read().decode()}")


def check_server(model: str) -> None:
    with serving(model) as base:
        expect(bool(ask(base, max_tokens=8)), "there is no answer")
        schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
        person = json.loads(ask(base, response_format=schema, max_tokens=128))  # more than any such text has
        expect(isinstance(person["name"], str) and isinstance(person["age"], int), f"the schema gave {person}")
        expect(ask(base, guided_choice=["yes", "no"]) in ("yes", "no"), "the choice gave neither")
        expect(ask(base, guided_regex="[ab]{3}").strip("ab") == "", "the regular expression gave something else")
        print("   specserve serve, asked over HTTP", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    model = parser.parse_args().model
    check_environment()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        check_commands(model)
        check_server(model)


if __name__ == "__main__":
    main()
