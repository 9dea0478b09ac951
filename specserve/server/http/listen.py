"""The sockets: TCP or Unix, TLS."""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from aiohttp import web

from specserve.errors import ConfigError
from specserve.files import check_regular
from specserve.server.http.connection import Connection
from specserve.server.http.watch import Watch
from specserve.server.options import ServeOptions

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Connect: TypeAlias = Callable[[], asyncio.BaseProtocol]
_BACKLOG = 100  # connections that wait to be taken, as asyncio has it
_KEEPALIVE_S = 75.0
_LINGER_S = 10.0  # for the rest of a body that was not read
_SHUTDOWN_S = 1.0  # for handlers that still run when the drain is over


class Sockets:
    """What the options say to listen on, without listening: for processes that inherit it. `address` is what a client
    connects to."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        assert self._server is not None, "an address belongs to sockets that are open"
        return _address(self._options, self._server)

    @property
    def descriptors(self) -> list[int]:
        assert self._server is not None, "they are open"
        return [each.fileno() for each in self._server.sockets]

    async def open(self) -> None:
        """Raises ConfigError for an address that cannot be used."""
        self._server = await _server(self._options, _nobody, start_serving=False)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            if self._options.uds is not None:  # else the file is not ours
                self._options.uds.unlink(missing_ok=True)


class Listener:
    """An application on the sockets that the options say, or on `sockets`, which another process has opened. `tls` is
    what there is in place of the files of the options. `address` is what a client connects to."""

    def __init__(
        self,
        app: web.Application,
        options: ServeOptions,
        sockets: Sequence[socket.socket] = (),
        tls: tuple[bytes, bytes] | None = None,
    ) -> None:
        self._options, self._inherited, self._files = options, sockets, tls
        self._watch = Watch(options.header_timeout_s, options.write_timeout_s)
        app.middlewares.insert(0, self._note)
        # Without handler_cancellation the work for a client that has left would go on to its end.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
        self._servers: list[asyncio.Server] = []
        self._watching: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        assert self._servers, "an address belongs to a server that listens"
        return _address(self._options, self._servers[0])

    async def start(self) -> None:
        """Listen. Raises ConfigError for an address or a certificate that cannot be used."""
        options = self._options
        context = _tls(options) if self._files is None else _tls_of(options, self._files)
        await self._runner.setup()
        server = self._runner.server
        assert server is not None, "there is one after setup"
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
        secure = {"ssl": context, "ssl_handshake_timeout": None if context is None else options.header_timeout_s}
        try:
            if self._inherited:
                self._servers = [await _inherited(connect, each, **secure) for each in self._inherited]
            else:
                self._servers = [await _server(options, connect, **secure)]
        except ConfigError:
            await self._runner.cleanup()
            raise
        self._watching = asyncio.create_task(self._watch.run(lambda: server.connections))

    async def close(self) -> None:
        """Let go of the sockets and of whoever is still connected."""
        if self._watching is not None:
            self._watching.cancel()
        for server in self._servers:
            server.close()
        await self._runner.cleanup()
        if self._servers and not self._inherited and self._options.uds is not None:  # else the file is not ours
            self._options.uds.unlink(missing_ok=True)

    @web.middleware
    async def _note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._watch.note_head(request.protocol)
        return await handler(request)


def _nobody() -> asyncio.Protocol:
    raise AssertionError("these sockets are not listened on")


def _address(options: ServeOptions, server: asyncio.Server) -> str:
    if options.uds is not None:
        return f"unix:{options.uds}"
    host, port = server.sockets[0].getsockname()[:2]
    scheme = "http" if options.tls_cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


async def _server(options: ServeOptions, connect: Connect, **more: Any) -> asyncio.Server:
    """Raises ConfigError for an address that cannot be used."""
    loop = asyncio.get_running_loop()
    try:
        if options.uds is not None:
            return await loop.create_unix_server(connect, sock=_unix_socket(options.uds), **more)
        return await loop.create_server(connect, options.host, options.port, **more)
    except OSError as error:
        raise ConfigError(_cannot_listen(options, error)) from error


async def _inherited(connect: Connect, inherited: socket.socket, **more: Any) -> asyncio.Server:
    """A process takes one connection at a time and leaves the next to whoever is free. asyncio would take as many as
    may wait, so it is told that this is one; the queue, which belongs to the socket, is made long again."""
    server = await asyncio.get_running_loop().create_server(connect, sock=inherited, backlog=1, **more)
    inherited.listen(_BACKLOG)
    return server


def _tls(options: ServeOptions, password: Callable[[], str] | None = None) -> ssl.SSLContext | None:
    """`password` is asked for if the key is encrypted; without it the terminal is."""
    if options.tls_cert is None or options.tls_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        for path in (options.tls_cert, options.tls_key):
            check_regular(path)
        context.load_cert_chain(options.tls_cert, options.tls_key, password)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--tls-cert {options.tls_cert} and --tls-key {options.tls_key} cannot be used: {error}."
        ) from error
    return context


def tls_files(options: ServeOptions) -> tuple[bytes, bytes] | None:
    """What is in the files of the certificate and its key, for processes that are not to read them again. Raises
    ConfigError for what cannot be used, and a key that somebody would have to decrypt for each process."""

    def refuse() -> str:
        raise ConfigError(
            f"--tls-key {options.tls_key} is encrypted, and with --api-processes each process would ask for its "
            "password. Give a key that is not, or leave --api-processes out."
        )

    if _tls(options, refuse) is None or options.tls_cert is None or options.tls_key is None:
        return None
    try:
        return options.tls_cert.read_bytes(), options.tls_key.read_bytes()
    except OSError as error:
        raise ConfigError(f"--tls-cert and --tls-key cannot be read: {error}.") from error


def _tls_of(options: ServeOptions, files: tuple[bytes, bytes]) -> ssl.SSLContext | None:
    """OpenSSL reads files only: these are in memory."""
    descriptors = [os.memfd_create("specserve-tls") for _ in files]
    try:
        for descriptor, content in zip(descriptors, files, strict=True):
            with open(descriptor, "wb", closefd=False) as file:
                file.write(content)
        cert, key = (Path(f"/proc/self/fd/{descriptor}") for descriptor in descriptors)
        return _tls(replace(options, tls_cert=cert, tls_key=key))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


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
