"""Reads the bodies of requests within limits of size, time and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from specserve.server.admission import SMALL_BYTES, BodyReservation
from specserve.server.http.context import ARRIVED, context
from specserve.server.http.origin import may_be_a_browsers
from specserve.server.wire.errors import body_too_large, timed_out, unsupported_media_type
from specserve.server.wire.fields import Limits

T = TypeVar("T")

_UNTOLD = ("application/x-www-form-urlencoded", "text/plain")
_AT_ONCE = 2**18  # bytes that are looked at before another thread may run


async def parsed(request: web.Request, read: Callable[[bytes, Limits], T], says_json: bool = False) -> T:
    """The request in the body, by one of the functions that read one. A large one is parsed on a thread. The time that
    a request may take begins when its body has arrived. `says_json`: its type must be JSON, whoever sends it.

    Raises WireError for a body that is too large, too slow or no JSON, and when the bodies of others fill the memory
    that there is for them; InputError for what is wrong in it.
    """
    if not _is_taken(request, says_json):
        raise unsupported_media_type(request.headers.get("Content-Type", ""))
    server = context(request)
    with server.body_budget.reserve() as reservation:
        body = await _read(request, reservation)
        request[ARRIVED] = asyncio.get_running_loop().time()
        if len(body) > SMALL_BYTES:
            is_quick = len(body) <= _AT_ONCE
            size = _parsed_size(body) if is_quick else await server.service.threads.on_thread(_parsed_size, body)
            reservation.grow_to(min(len(body) + size, server.body_budget.capacity))
            return await server.service.threads.in_turn(read, body, server.limits)
        return await server.service.threads.run(len(body), read, body, server.limits)


def _is_taken(request: web.Request, says_json: bool) -> bool:
    """Whether the type of the body is JSON, or one that programs send which were not told: none at all, or curl's for
    -d. A browser sends those for a page of any site without asking first, so they are not taken from one."""
    sent = request.headers.get("Content-Type", "")
    if sent and (request.content_type == "application/json" or request.content_type.endswith("+json")):
        return True
    return not says_json and (not sent or request.content_type in _UNTOLD) and not may_be_a_browsers(request)


async def _read(request: web.Request, reservation: BodyReservation) -> bytes:
    """All of the body. Compressed ones are not taken: a small one could fill the memory."""
    options = context(request).options
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise unsupported_media_type(f"compressed ({encoding})")
    if (request.content_length or 0) > options.max_body_bytes:
        raise body_too_large(options.max_body_bytes)
    if request.content.is_eof():  # all of it came with the head, as small ones do
        body = request.content.read_nowait()
        _count(len(body), reservation, options.max_body_bytes)
        return body
    try:
        async with asyncio.timeout(options.body_timeout_s):
            return await _gather(request, reservation, options.max_body_bytes)
    except TimeoutError:
        raise timed_out(408, f"The body did not arrive within {options.body_timeout_s:g} s.") from None


async def _gather(request: web.Request, reservation: BodyReservation, limit: int) -> bytes:
    """The body's pieces, of `limit` bytes at most, each counted when it comes: what a client only announces costs
    nothing."""
    body = bytearray()
    async for piece in request.content.iter_any():
        body += piece
        _count(len(body), reservation, limit)
    return bytes(body)


def _count(num_bytes: int, reservation: BodyReservation, limit: int) -> None:
    if num_bytes > limit:
        raise body_too_large(limit)
    reservation.grow_to(num_bytes)


def _parsed_size(body: bytes) -> int:
    """Most bytes of memory that lists of ids in a body take, which take more than texts: 40 for an id, that are 9 times
    what the shortest are written with. What else there may be is bounded by the reader."""
    num_commas = sum(body.count(b",", at, at + _AT_ONCE) for at in range(0, len(body), _AT_ONCE))
    return min(40 * num_commas, 9 * len(body))
