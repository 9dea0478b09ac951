"""Which names a server answers to, and whose pages may tell it what to do: a browser sends what any page wants."""

from __future__ import annotations

import ipaddress
import socket

from aiohttp import web
from aiohttp.typedefs import Middleware

from specserve.server.http.context import context
from specserve.server.http.middleware import Handler
from specserve.server.options import ServeOptions
from specserve.server.wire.errors import host_not_allowed, origin_not_allowed


def known_hosts_only(options: ServeOptions) -> Middleware | None:
    """Refuses requests whose Host is a name that this server does not know. A page whose name was made to lead to this
    machine (DNS rebinding) sends that name, and would else read every answer.

    None where nothing is checked: on addresses that others reach, and on Unix sockets, unless there are allowed hosts.
    """
    is_local = options.uds is None and _is_loopback(options.host)
    if "*" in options.allowed_host or not (is_local or options.allowed_host):
        return None

    @web.middleware
    async def check_host(request: web.Request, handler: Handler) -> web.StreamResponse:
        for host in request.headers.getall("Host", ()):
            if not _is_known(host, options):
                raise host_not_allowed(host)
        return await handler(request)

    return check_host


def check_origin(request: web.Request) -> None:
    """Raises WireError for a web page that is neither this server's own nor of an origin that was named: others may not
    change anything, though nobody needs a key. Programs send no Origin."""
    options = context(request).options
    for origin in request.headers.getall("Origin", ()):
        host = origin.partition("://")[2]
        is_own = host.lower() == request.headers.get("Host", "").lower() and _is_known(host, options)
        if not is_own and origin not in options.cors_origin:
            raise origin_not_allowed(origin)


def may_be_a_browsers(request: web.Request) -> bool:
    """Whether anything says that a browser sent this. A page cannot keep all of it away: browsers send Origin with
    every POST (since 2020), Sec-Fetch-Site to this machine and over TLS, Referer where no policy forbids it, and a
    User-Agent that begins so; to change one of these a page must ask first, and is told no."""
    headers = request.headers
    is_marked = any(name.lower().startswith("sec-") or name.lower() in ("origin", "referer") for name in headers)
    return is_marked or headers.get("User-Agent", "").startswith("Mozilla/")


def _is_known(host: str, options: ServeOptions) -> bool:
    """Whether no DNS server of a stranger decides where this host, perhaps with a port, leads to."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    name = name.removesuffix(".").lower()
    allowed = {each.lower() for each in (*options.allowed_host, options.host)}
    return name == "localhost" or name.endswith(".localhost") or name in allowed or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:  # it cannot be listened on either, which is told then
        return False
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)
