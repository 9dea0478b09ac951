"""Reads the bodies of requests within limits of size and time. Knows HTTP; knows no fields."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from specserve.server.http.context import context
from specserve.server.wire.errors import body_too_large, timed_out, unsupported_media_type
from specserve.server.wire.fields import Limits

T = TypeVar("T")


async def parsed(request: web.Request, read: Callable[[bytes, Limits], T]) -> T:
    """The request in the body, by one of the functions that read one. A large one is parsed on a thread.

    Raises WireError for a body that is too large, too slow or no JSON, and InputError for what is wrong in it.
    """
    body = await read_body(request)
    server = context(request)
    return await server.service.run(len(body), read, body, server.limits)


async def read_body(request: web.Request) -> bytes:
    """All of the body. Compressed ones are not taken: a small one could fill the memory."""
    options = context(request).options
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise unsupported_media_type(f"compressed ({encoding})")
    if not _is_json(request.content_type) or "Content-Type" not in request.headers:
        raise unsupported_media_type(request.headers.get("Content-Type", ""))
    if (request.content_length or 0) > options.max_body_bytes:
        raise body_too_large(options.max_body_bytes)
    try:
        async with asyncio.timeout(options.body_timeout_s):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise body_too_large(options.max_body_bytes) from None
    except TimeoutError:
        raise timed_out(408, f"The body did not arrive within {options.body_timeout_s:g} s.") from None


def _is_json(content_type: str) -> bool:
    return content_type == "application/json" or content_type.endswith("+json")
