"""A hub on loopback: the part of its API that fetching a model uses, and faults that can be switched on."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

TOKEN = "hf_test"


@dataclass
class Hub:
    """`repos` has the files of each repository by name. `requests` are those of files, as (name, bytes asked from).
    `cut` ends so many answers of large files after half of what is left; `wrong` are files that arrive with other
    bytes; `status` and `code` refuse everything; `gated` repositories want a token; `ignores_ranges` answers with whole
    files."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    url: str = ""
    requests: list[tuple[str, int]] = field(default_factory=list)
    cut: int = 0
    wrong: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    status: int = 0
    code: str = ""
    ignores_ranges: bool = False

    def commit(self, repo: str) -> str:
        return hashlib.sha1(repr(sorted(self.repos[repo].items())).encode()).hexdigest()


def digest(data: bytes, is_lfs: bool) -> str:
    return hashlib.sha256(data).hexdigest() if is_lfs else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_lfs(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".gguf"))


def _refusal(hub: Hub, repo: str, request: web.Request) -> web.Response | None:
    if hub.status:
        return web.Response(status=hub.status, headers={"X-Error-Code": hub.code} if hub.code else {})
    if repo not in hub.repos:
        return web.Response(status=404, headers={"X-Error-Code": "RepoNotFound"})
    return None


def application(hub: Hub) -> web.Application:
    async def info(request: web.Request) -> web.Response:
        repo = f"{request.match_info['org']}/{request.match_info['name']}"
        if (refused := _refusal(hub, repo, request)) is not None:
            return refused
        if request.match_info.get("revision", "main") not in ("main", hub.commit(repo)):
            return web.Response(status=404, headers={"X-Error-Code": "RevisionNotFound"})
        siblings = [
            {"rfilename": name, "size": len(data), "blobId": digest(data, False)}
            | ({"lfs": {"size": len(data), "sha256": digest(data, True), "pointerSize": 1}} if is_lfs(name) else {})
            for name, data in hub.repos[repo].items()
        ]
        return web.json_response({"id": repo, "modelId": repo, "sha": hub.commit(repo), "siblings": siblings})

    async def resolve(request: web.Request) -> web.StreamResponse:
        repo, name = f"{request.match_info['org']}/{request.match_info['name']}", request.match_info["file"]
        if (refused := _refusal(hub, repo, request)) is not None:
            return refused
        if repo in hub.gated and request.headers.get("Authorization") != f"Bearer {TOKEN}":  # of files alone
            status = 403 if "Authorization" in request.headers else 401
            return web.Response(status=status, headers={"X-Error-Code": "GatedRepo"})
        data = hub.repos[repo][name]
        begin = 0 if hub.ignores_ranges else request.http_range.start or 0
        hub.requests.append((name, request.http_range.start or 0))
        if name in hub.wrong:
            data = bytes(len(data))
        response = web.StreamResponse(status=206 if begin else 200)
        response.content_length = len(data) - begin
        await response.prepare(request)
        if hub.cut and is_lfs(name):
            hub.cut -= 1
            await response.write(data[begin : begin + (len(data) - begin) // 2])
            await asyncio.sleep(0.1)  # so that it has arrived before the connection breaks
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(data[begin:])
        return response

    app = web.Application()
    app.router.add_get("/api/models/{org}/{name}", info)
    app.router.add_get("/api/models/{org}/{name}/revision/{revision}", info)
    app.router.add_get("/{org}/{name}/resolve/{revision}/{file}", resolve)
    return app


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """It listens in a thread of its own while the block runs."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(application(hub))

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        hub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield hub
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
