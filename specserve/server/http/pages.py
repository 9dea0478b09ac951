"""The pages for people, / and /docs, and the scripts they load."""

from __future__ import annotations

from aiohttp import web

from specserve.server.pages import Page, modules, page
from specserve.server.wire.errors import route_not_found


async def docs(request: web.Request) -> web.Response:
    """GET /docs; it needs no key, as a browser sends none, and asks for one to send requests with."""
    return _response(page("docs"))


async def playground(request: web.Request) -> web.Response:
    """GET /; needs no key either."""
    return _response(page("playground"))


async def static(request: web.Request) -> web.Response:
    """GET /static/{name}; it needs no key, as the page that asks for keys is made of it."""
    found = modules().get(request.match_info["name"])
    if found is None:
        raise route_not_found(request.path)
    return _response(found)


def _response(shown: Page) -> web.Response:
    return web.Response(body=shown.body, headers=shown.headers)
