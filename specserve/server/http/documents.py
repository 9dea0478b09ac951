"""GET /openapi.json, for programs, and the pages for people: / and /docs. Knows no endpoint."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from specserve.server.http.context import context
from specserve.server.http.respond import json_response
from specserve.server.openapi import document
from specserve.server.pages import page
from specserve.server.wire.fields import Limits

_LONG = 2**20  # characters' worth of work: it takes as long as a large text, so it is done on a thread


async def openapi(request: web.Request) -> web.Response:
    """GET /openapi.json."""
    server = context(request)
    stated = (server.names[0], server.limits, server.needs_key, server.options.root_path)
    return json_response(await server.service.run(_LONG, _document, *stated))


async def docs(request: web.Request) -> web.Response:
    """GET /docs; it needs no key, as a browser sends none, and asks for one to send requests with."""
    return _page_response("docs")


async def playground(request: web.Request) -> web.Response:
    """GET /; needs no key either."""
    return _page_response("playground")


def _page_response(name: str) -> web.Response:
    shown = page(name)
    return web.Response(body=shown.body, headers=shown.headers)


@functools.lru_cache(maxsize=4)
def _document(model: str, limits: Limits, needs_key: bool, root_path: str) -> Mapping[str, Any]:
    return document(model, limits, sorted(limits.drafters), needs_key, root_path)
