"""The sockets: TCP or Unix, TLS."""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from specserve.errors import ConfigError
from specserve.files import check_regular
from specserve.server.http.connection import Connection
from specserve.server.http.watch import Watch
from specserve.server.options import ServeOptions

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_KEEPALIVE_S = 75.0
_LINGER_S = 10.0  # for the rest of a body that was not read
_SHUTDOWN_S = 1.0  # for handlers that still run when the drain is over


class Listener:
    """An application on a socket. `address` is what a client connects to."""

    def __init__(self, app: web.Application, options: ServeOptions) -> None:
        self._options = options
        self._watch = Watch(options.header_timeout_s, options.write_timeout_s)
        app.middlewares.insert(0, self._note)
        # Without handler_cancellation the work for a client that has left would go on to its end.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
        self._server: asyncio.Server | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        if self._options.uds is not None:
            return f"unix:{self._options.uds}"
        assert self._server is not None, "an address belongs to a server that listens"
        host, port = self._server.sockets[0].getsockname()[:2]
        scheme = "http" if self._options.tls_cert is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    async def start(self) -> None:
        """Listen. Raises ConfigError for an address or a certificate that cannot be used."""
        options = self._options
        context = _tls(options)
        await self._runner.setup()
        server = self._runner.server
        assert server is not None, "there is one after setup"
        header_s = None if context is None else options.header_timeout_s
        loop = asyncio.get_running_loop()
        connect = functools.partial(
            Connection,
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # which turns it off: `translate_errors` has its own
            keepalive_timeout=_KEEPALIVE_S,
            lingering_time=min(options.body_timeout_s, _LINGER_S),
            auto_decompress=False,  # nobody reads compressed bodies, so nobody has to unpack them to skip them
        )
        try:
            if options.uds is not None:
                self._server = await loop.create_unix_server(
                    connect, sock=_unix_socket(options.uds), ssl=context, ssl_handshake_timeout=header_s
                )
            else:
                self._server = await loop.create_server(
                    connect, options.host, options.port, ssl=context, ssl_handshake_timeout=header_s
                )
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(_cannot_listen(options, error)) from error
        self._watching = asyncio.create_task(self._watch.run(lambda: server.connections))

    async def close(self) -> None:
        """Let go of the socket and of whoever is still connected."""
        if self._watching is not None:
            self._watching.cancel()
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()
        if self._server is not None and self._options.uds is not None:  # else the file is not ours
            self._options.uds.unlink(missing_ok=True)

    @web.middleware
    async def _note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._watch.note_head(request.protocol)
        return await handler(request)


def _tls(options: ServeOptions) -> ssl.SSLContext | None:
    if options.tls_cert is None or options.tls_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        for path in (options.tls_cert, options.tls_key):
            check_regular(path)
        context.load_cert_chain(options.tls_cert, options.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--tls-cert {options.tls_cert} and --tls-key {options.tls_key} cannot be used: {error}."
        ) from error
    return context


def _unix_socket(path: Path) -> socket.socket:
    """A socket at this path, to which only its owner may ever connect. Raises OSError."""
    _remove_stale(path)
    made = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)  # of the whole process, for a moment; a chmod afterwards comes too late
    try:
        made.bind(str(path))
    except OSError:
        made.close()
        raise
    finally:
        os.umask(mask)
    return made


def _remove_stale(path: Path) -> None:
    """A socket that an ended server left; one that is listened on is not ours to take."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as probe, suppress(ConnectionRefusedError):
            probe.connect(str(path))
            raise OSError(errno.EADDRINUSE, "another server listens on it")
        path.unlink()


def _cannot_listen(options: ServeOptions, error: OSError) -> str:
    if options.uds is not None:
        return f"--uds {options.uds} cannot be listened on: {error.strerror or error}. Choose another path."
    what = f"{options.host}:{options.port} cannot be listened on: {error.strerror or error}."
    return f"{what} Choose another --port (0: any that is free) or --host."
