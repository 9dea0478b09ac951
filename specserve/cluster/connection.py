"""A connection between a server and an engine elsewhere: its handshake, messages in frames, heartbeats."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from contextlib import suppress
from typing import Any, Protocol, cast

from specserve.parallel.address import Address
from specserve.parallel.handshake import (
    LENGTH,
    MOST_HANDSHAKE_BYTES,
    MOST_MESSAGE_BYTES,
    PREAMBLE,
    PREAMBLE_BYTES,
    Agreed,
    Handshake,
    LinkError,
    Session,
    check_preamble,
    refusal,
)

CONNECT_S = 5.0
HANDSHAKE_S = 5.0  # from the connection to its last word; as long for TLS before that
TLS_SHUTDOWN_S = 1.0
_MOST_UNSENT_BYTES = 2 * MOST_MESSAGE_BYTES
_LINGER_S = 1.0  # in which what is unsent may go out at the end
_TICKS = 12  # a heartbeat; a sign of life every third tick
_NO_GREETING = "It closed the connection before a greeting. It may speak TLS, or be no engine of specserve."
_NO_GREETING_IN_TLS = (
    "It closed the connection before a greeting. It may want a certificate of this server (--engine-cert) that its "
    "--tls-ca signed, or be no engine of specserve."
)


class Receiver(Protocol):
    """Who uses a connection. `closed` is the last call, and comes without `opened` where there was no agreement."""

    def opened(self, agreed: Agreed) -> None: ...
    def received(self, message: bytes) -> None:
        """One whole message; what this raises ends the connection."""

    def closed(self, error: LinkError) -> None: ...


class Connection(asyncio.Protocol):
    """One end. Nothing waits: what the other side does not take yet is kept, up to a limit, and sent later, in order.
    One that breaks the protocol, falls silent or takes nothing any more is cut off."""

    def __init__(self, handshake: Handshake, receiver: Receiver) -> None:
        self._handshake, self._receiver = handshake, receiver
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unread = bytearray()
        self._greeted = False
        self._session: Session | None = None
        self._error: LinkError | None = None  # why it is over
        self._heartbeat_s = 0.0
        self._heard = self._sent = 0.0  # loop.time()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def peer(self) -> str:
        """Where the other side is, as host:port."""
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        return str(Address(*name[:2])) if name else "nowhere"

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._session is not None and self._error is None

    @property
    def _speaks_tls(self) -> bool:
        return self._transport is not None and self._transport.get_extra_info("ssl_object") is not None

    def send(self, message: bytes) -> None:
        """To nobody nothing is sent."""
        if self._session is None or self._error is not None or self._transport is None:
            return
        self._transport.write(self._session.seal(message))
        self._sent = self._loop.time()
        if self._transport.get_write_buffer_size() > _MOST_UNSENT_BYTES:
            self.cut(LinkError("It takes nothing of what it is sent."))

    def close(self, reason: str = "This side closed the connection.") -> None:
        """What is unsent may still go out for a moment."""
        self._end(LinkError(reason), at_once=False)

    def cut(self, error: LinkError) -> None:
        """End it at once."""
        self._end(error, at_once=True)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._timer = self._loop.call_later(HANDSHAKE_S, self.cut, LinkError(f"No handshake in {HANDSHAKE_S:g} s."))
        self._transport.write(PREAMBLE)
        self._say(next(self._handshake))

    def data_received(self, data: bytes) -> None:
        if self._error is not None:
            return
        self._heard = self._loop.time()
        self._unread += data
        try:
            self._take()
        except LinkError as error:
            self._end(error, at_once=not error.is_told)
        except Exception as error:  # what cannot be read or done ends this connection, and nothing else
            self.cut(LinkError(f"What it says cannot be read: {type(error).__name__}: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._handshake.close()
        self._unread.clear()
        self._receiver.closed(self._error or self._lost(error))
        self._error = self._error or LinkError("It is over.")

    def _lost(self, error: Exception | None) -> LinkError:
        if isinstance(error, ssl.SSLError) and self._session is None:
            return LinkError(f"TLS failed: {error.reason or error}.", is_final=True)
        if not self._greeted:
            with suppress(LinkError):
                check_preamble(bytes(self._unread))
                return LinkError(_NO_GREETING_IN_TLS if self._speaks_tls else _NO_GREETING)
        return LinkError("It closed the connection." if error is None else f"The connection broke: {error}.")

    def _take(self) -> None:
        """All that is whole of what has come. Raises LinkError."""
        if not self._greeted:
            check_preamble(bytes(self._unread[:PREAMBLE_BYTES]))
            if len(self._unread) < PREAMBLE_BYTES:
                return
            del self._unread[:PREAMBLE_BYTES]
            self._greeted = True
        while self._session is None and self._error is None:
            message = self._next_of_handshake()
            if message is None:
                return
            self._shake(message)
        while self._error is None and (message := self._next()) is not None:
            if message:  # else a sign of life
                self._receiver.received(message)

    def _next_of_handshake(self) -> bytes | None:
        if len(self._unread) < LENGTH.size:
            return None
        size = LENGTH.unpack_from(self._unread)[0]
        if size > MOST_HANDSHAKE_BYTES:
            raise LinkError(f"It announced a greeting of {size} bytes; {MOST_HANDSHAKE_BYTES} are allowed.")
        end = LENGTH.size + size
        if len(self._unread) < end:
            return None
        message = bytes(self._unread[LENGTH.size : end])
        del self._unread[:end]
        return message

    def _next(self) -> bytes | None:
        session = self._session
        assert session is not None, "the handshake is over"
        if len(self._unread) < session.HEADER_BYTES:
            return None
        size = session.frame_bytes(self._unread[: session.HEADER_BYTES])
        if len(self._unread) < size:
            return None
        message = session.open(self._unread[:size])
        del self._unread[:size]
        return message

    def _shake(self, message: bytes) -> None:
        try:
            self._say(self._handshake.send(message))
        except StopIteration as end:
            agreed: Agreed = end.value
            self._say(agreed.last_words)
            self._session, self._heartbeat_s = agreed.session, agreed.heartbeat_s
            if self._timer is not None:
                self._timer.cancel()
            self._sent = self._loop.time()
            self._tick(self._sent)
            self._receiver.opened(agreed)

    def _say(self, message: bytes) -> None:
        if message and self._transport is not None:
            self._transport.write(LENGTH.pack(len(message)) + message)

    def _tick(self, due: float) -> None:
        """Send a sign of life, look for one. Time in which this process did not run is not the other side's silence:
        what it said then has not been read."""
        now, tick_s = self._loop.time(), self._heartbeat_s / _TICKS
        if now - due > 2 * tick_s:
            self._heard = now
        if now - self._heard > self._heartbeat_s - tick_s:
            self.cut(LinkError(f"Nothing was heard of it for {self._heartbeat_s:g} s."))
            return
        if now - self._sent > 2.5 * tick_s:
            self.send(b"")
        if self._error is None:
            self._timer = self._loop.call_at(now + tick_s, self._tick, now + tick_s)

    def _end(self, error: LinkError, at_once: bool) -> None:
        if self._error is not None:
            return
        self._error = error
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is None:
            return
        if at_once:
            self._transport.abort()
            return
        if error.is_told and self._session is None:
            self._say(refusal(error))
        self._transport.close()
        self._timer = self._loop.call_later(_LINGER_S, self._transport.abort)


async def connect(connection: Connection, address: Address, tls: ssl.SSLContext | None, option: str) -> None:
    """Have a connection to what listens there; its handshake comes after. `option` says whom `tls` trusts. Raises
    LinkError."""
    options: dict[str, Any] = {}
    if tls is not None:
        options = {"ssl": tls, "server_hostname": address.host}
        options |= {"ssl_handshake_timeout": HANDSHAKE_S, "ssl_shutdown_timeout": TLS_SHUTDOWN_S}
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_S + (HANDSHAKE_S if tls is not None else 0)):
            await loop.create_connection(lambda: connection, address.host, address.port, **options)
    except (OSError, ssl.SSLError) as error:  # TimeoutError is one
        raise _cannot_connect(error, option) from error


def _cannot_connect(error: Exception, option: str) -> LinkError:
    if isinstance(error, socket.gaierror):
        return LinkError(f"Its name cannot be resolved: {error.strerror}.")
    if isinstance(error, ssl.SSLCertVerificationError):
        return LinkError(f"Its certificate is not accepted: {error.verify_message}. See {option}.", is_final=True)
    if isinstance(error, ssl.SSLError):
        text = f"It cannot speak TLS with this side: {error.reason or error}. Was it started with --tls-cert?"
        return LinkError(text, is_final=True)
    if isinstance(error, TimeoutError):
        return LinkError("It does not answer.")
    number = getattr(error, "errno", None)
    return LinkError(f"It cannot be connected to: {os.strerror(number) if number else error}.")
