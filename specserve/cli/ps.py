"""`specserve ps`: the servers that run on this machine."""

from __future__ import annotations

import asyncio
import dataclasses

import aiohttp

from specserve.cli.json_output import JsonFile, is_json_alone, write_json
from specserve.cli.list import date, print_table
from specserve.server.running import RunningServer, running

_TIMEOUT_S = 2.0


def ps(*, json_file: JsonFile = None) -> None:
    """Show the servers that run on this machine: process, model, address, since when, and whether they are ready."""
    servers = running()
    states = asyncio.run(_states(servers))
    found = [dataclasses.asdict(server) | {"state": state} for server, state in zip(servers, states, strict=True)]
    write_json(json_file, found)
    if is_json_alone(json_file):
        return
    print_table(
        {"pid": "right", "model": "left", "address": "left", "since": "left", "state": "left"},
        [
            {
                "pid": str(server.pid),
                "model": ", ".join(server.models),
                "address": server.address,
                "since": date(server.since),
                "state": state,
            }
            for server, state in zip(servers, states, strict=True)
        ],
    )


async def _states(servers: list[RunningServer]) -> list[str]:
    return await asyncio.gather(*(_state(server.address) for server in servers))


async def _state(address: str) -> str:
    """What its /ready says, which wants no key: "ready", or why it is not, or "silent"."""
    is_socket = address.startswith("unix:")
    connector = aiohttp.UnixConnector(address.removeprefix("unix:")) if is_socket else aiohttp.TCPConnector(ssl=False)
    url = "http://localhost/ready" if is_socket else f"{_reachable(address)}/ready"
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            session.get(url) as response,
        ):
            if response.status == 200:
                return "ready"
            body = await response.json(content_type=None)
            return str(body.get("status", "not ready")) if isinstance(body, dict) else "not ready"
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return "silent"


def _reachable(address: str) -> str:
    """One that listens on every address is asked on loopback."""
    return address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
