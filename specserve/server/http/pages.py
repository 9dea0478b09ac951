"""The pages for people: / and /docs."""

from __future__ import annotations

from aiohttp import web

from specserve.server.pages import page


async def docs(request: web.Request) -> web.Response:
    """GET /docs; it needs no key, as a browser sends none, and asks for one to send requests with."""
    return _page_response("docs")


async def playground(request: web.Request) -> web.Response:
    """GET /; needs no key either."""
    return _page_response("playground")


def _page_response(name: str) -> web.Response:
    shown = page(name)
    return web.Response(body=shown.body, headers=shown.headers)
