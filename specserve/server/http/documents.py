"""GET /openapi.json and /docs: what this server takes and gives, for programs and for people. Knows no endpoint."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from specserve.server.docs import docs_page
from specserve.server.http.context import context
from specserve.server.http.respond import json_response
from specserve.server.openapi import document
from specserve.server.wire.fields import Limits

_LONG = 2**20  # characters' worth of work: it takes as long as a large text, so it is done on a thread


async def openapi(request: web.Request) -> web.Response:
    """GET /openapi.json."""
    server = context(request)
    limits = server.limits
    return json_response(await server.service.run(_LONG, _document, server.names[0], limits, server.needs_key))


async def docs(request: web.Request) -> web.Response:
    """GET /docs; it needs no key, as a browser sends none, and asks for one to send requests with."""
    page = docs_page()
    return web.Response(body=page.body, headers=page.headers)


@functools.lru_cache(maxsize=4)
def _document(model: str, limits: Limits, needs_key: bool) -> Mapping[str, Any]:
    return document(model, limits, sorted(limits.drafters), needs_key)
