"""Where the servers are, and how a check asks for a route that may not be there yet. Knows no client; runs in the
clients' environments, which have pytest and their own packages alone."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

Ask = Callable[..., tuple[int, Any]]


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        pytest.fail(f"{name} is not set. tests/contract/run.py starts the servers and runs this.")
    return value


@pytest.fixture(scope="session")
def url() -> str:
    """The server that drafts."""
    return _variable("CONTRACT_DRAFTING_URL")


@pytest.fixture(scope="session")
def plain_url() -> str:
    """The same server without speculation."""
    return _variable("CONTRACT_PLAIN_URL")


@pytest.fixture(scope="session")
def narrow_url() -> str:
    """A server that does one request at a time, lets none wait, and ends each after some seconds."""
    return _variable("CONTRACT_NARROW_URL")


@pytest.fixture(scope="session")
def key() -> str:
    return _variable("CONTRACT_KEY")


@pytest.fixture(scope="session")
def model() -> str:
    return _variable("CONTRACT_MODEL")


@pytest.fixture(scope="session")
def home() -> Path:
    """A folder for what a client writes."""
    return Path(_variable("CONTRACT_HOME"))


@pytest.fixture(scope="session")
def ask(url: str, key: str) -> Ask:
    """Status and JSON of a request without any client: GET, or POST where there is a body."""

    def send(path: str, body: Any = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(Request(url + path, data, headers), timeout=120) as reply:
                return reply.status, json.load(reply)
        except HTTPError as error:
            return error.code, json.load(error)

    return send


@pytest.fixture(scope="session")
def need_route(ask: Ask) -> Callable[[str], None]:
    """Skips while POST to a path answers 404, and only then."""

    def need(path: str) -> None:
        if ask(path, {})[0] == 404:
            pytest.skip(f"there is no {path} yet")

    return need


@pytest.fixture
def until_idle(ask: Ask) -> Callable[[], None]:
    """Waits until the server computes nothing; fails when it goes on with what nobody waits for."""

    def wait() -> None:
        end = time.monotonic() + 60
        while (stats := ask("/stats")[1])["num_running"] + stats["num_waiting"]:
            assert time.monotonic() < end, f"still at work: {stats['num_running']} running"
            time.sleep(0.05)

    return wait
