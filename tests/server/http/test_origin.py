"""Hosts that a server knows, and pages that may tell it what to do."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from specserve.server.http.context import CONTEXT
from specserve.server.http.middleware import translate_errors
from specserve.server.http.origin import check_origin, known_hosts_only
from specserve.server.options import ServeOptions

LOCAL = ("localhost", "localhost:8000", "LocalHost.", "a.localhost:1", "127.0.0.1", "127.0.0.1:9", "[::1]", "[::1]:80")
ADDRESSES = ("192.168.1.5:8000", "[fe80::1]:8000", "0.0.0.0")
NAMES = (
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "xlocalhost",
    "",
    "[x",
)


def replies(options: ServeOptions, *requests: dict[str, str]) -> list[tuple[int, Any]]:
    """Status and body of a GET with each of these headers; a route that only an operator's pages may use."""

    async def handler(request: web.Request) -> web.Response:
        check_origin(request)
        return web.json_response({"error": {"code": None}})

    async def play() -> list[tuple[int, Any]]:
        hosts = known_hosts_only(options)
        app = web.Application(middlewares=[translate_errors, *([hosts] if hosts else [])])
        service = SimpleNamespace(metrics=SimpleNamespace(refused=lambda status: None))
        app[CONTEXT] = SimpleNamespace(options=options, service=service)  # type: ignore[misc]
        app.add_routes([web.get("/", handler)])
        found = []
        async with TestClient(TestServer(app)) as client:
            for headers in requests:
                async with client.get("/", headers=headers) as response:
                    found.append((response.status, json.loads(await response.text())["error"]["code"]))
        return found

    return asyncio.run(play())


def hosts(options: ServeOptions, *names: str) -> set[tuple[int, Any]]:
    return set(replies(options, *({"Host": name} for name in names)))


REFUSED, GOOD = {(403, "host_not_allowed")}, {(200, None)}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_a_loopback_server_knows_names_that_no_dns_server_has(host: str) -> None:
    options = ServeOptions(host=host)
    assert hosts(options, *LOCAL, *ADDRESSES) == GOOD
    assert [hosts(options, name) for name in NAMES] == [REFUSED] * len(NAMES)


@pytest.mark.parametrize(
    "options", [{"host": "0.0.0.0"}, {"host": "192.0.2.1"}, {"uds": "/x"}, {"allowed_host": ("*",)}]
)
def test_where_others_come_nothing_is_asked(options: dict[str, Any]) -> None:
    assert hosts(ServeOptions(**options), *LOCAL, *ADDRESSES, *NAMES) == GOOD


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_names_that_were_allowed(host: str) -> None:
    options = ServeOptions(host=host, allowed_host=("llm.example.org", "Box"))
    assert hosts(options, "llm.example.org", "LLM.Example.org:443", "box:8000", *LOCAL) == GOOD
    assert hosts(options, "example.org", "x.llm.example.org", *NAMES) == REFUSED


@pytest.mark.parametrize("name", ["", "http://a", "a:80", "a/b", "a b", "*.a", "[::1]"])
def test_what_is_no_name_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(ValueError, match=r"--allowed-host is .*without port"):
        ServeOptions(allowed_host=(name,))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_pages_that_may(host: str) -> None:
    """Its own, on a name that it knows, and those of origins that were named."""
    options = ServeOptions(host=host, cors_origin=("https://mine.example",), allowed_host=("box",))
    may = [
        {},
        {"Host": "localhost:8000", "Origin": "http://localhost:8000"},
        {"Host": "box", "Origin": "https://box"},
        {"Host": "192.168.1.5:8000", "Origin": "http://192.168.1.5:8000"},
        {"Host": "localhost:8000", "Origin": "https://mine.example"},
    ]
    assert set(replies(options, *may)) == GOOD


def test_pages_that_may_not() -> None:
    """Not those of other ports either, and "*" opens answers, not what changes something."""
    options = ServeOptions(host="0.0.0.0", cors_origin=("*",))
    may_not = [
        {"Host": "localhost:8000", "Origin": "http://evil.example"},
        {"Host": "localhost:8000", "Origin": "http://localhost:3000"},
        {"Host": "localhost:8000", "Origin": "null"},
        {"Host": "localhost:8000", "Origin": ""},
        {"Host": "evil.example", "Origin": "http://evil.example"},
    ]
    assert set(replies(options, *may_not)) == {(403, "origin_not_allowed")}
