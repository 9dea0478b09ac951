"""Processes of a model on other hosts. They join the first one over TCP; both sides prove that they know one secret,
and what the first one tells them then is in frames that nobody on the way can change."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from specserve.errors import ConfigError
from specserve.parallel.address import Address
from specserve.parallel.handshake import (
    LENGTH,
    MOST_HANDSHAKE_BYTES,
    PREAMBLE,
    PREAMBLE_BYTES,
    Agreed,
    Handshake,
    LinkError,
    Session,
    Welcome,
    check_preamble,
    engine_handshake,
    refusal,
    server_handshake,
)
from specserve.parallel.messages import Command, Connection

_log = logging.getLogger(__name__)
HANDSHAKE_S = 5.0
_MOST_GREETED = 64  # at once; others wait
_PIECE_BYTES = 2**26
_LAST, _MORE = b"\0", b"\1"
_SILENT_S = 20  # a host that was cut off is noticed after so long, between steps, too
_RETRY_S = 1.0


class SealedConnection(Connection):
    """One end, after a handshake: messages in pieces, each in a frame of the session."""

    def __init__(self, end: socket.socket, kind: Any, session: Session) -> None:
        super().__init__(end, kind)
        self._session = session

    def _write(self, message: bytes) -> None:
        starts = range(0, len(message), _PIECE_BYTES)
        for start in starts:
            mark = _LAST if start == starts[-1] else _MORE
            self._end.sendall(self._session.seal(mark + message[start : start + _PIECE_BYTES]))

    def receive(self) -> Any:
        """Waits. Raises EOFError where nothing will come any more, or what comes is not of this session."""
        pieces = [self._piece()]
        while pieces[-1][:1] == _MORE:
            pieces.append(self._piece())
        return self._decode(b"".join(piece[1:] for piece in pieces))

    def _piece(self) -> bytes:
        try:
            header = self._read(self._session.HEADER_BYTES)
            return self._session.open(header + self._read(self._session.frame_bytes(header) - len(header)))
        except LinkError as error:
            raise EOFError(str(error)) from error


class Gate:
    """Where the first process of a model waits for the others."""

    def __init__(self, address: Address, secret: bytes, model: str, digest: str) -> None:
        """Raises ConfigError where nothing can listen there."""
        self._secret, self._model, self._digest = secret, model, digest
        self._joined: queue.Queue[tuple[socket.socket, Session]] = queue.Queue()
        self._places = threading.Semaphore(_MOST_GREETED)
        try:
            family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((address.host, address.port), family=family)
        except OSError as error:
            raise ConfigError(f"--ranks-listen: nothing can listen at {address}: {error.strerror or error}.") from error
        self.address = Address(*self._listener.getsockname()[:2])
        threading.Thread(target=self._accept, name="specserve-gate", daemon=True).start()

    def admit(self) -> tuple[socket.socket, Session]:
        """Waits until another process has joined."""
        return self._joined.get()

    def close(self) -> None:
        """Whoever comes now, or has come and was not admitted, is turned away."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with suppress(queue.Empty):
            while True:
                self._joined.get_nowait()[0].close()

    def _accept(self) -> None:
        while True:
            self._places.acquire()
            try:
                end, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._greet, args=(end,), daemon=True).start()

    def _greet(self, end: socket.socket) -> None:
        """On a thread of its own: who says nothing holds nobody up."""
        name = str(Address(*end.getpeername()[:2]))
        try:
            agreed = shake(end, engine_handshake(self._secret, self._model, self._digest, lambda: None))
        except LinkError as error:
            _log.warning("%s cannot join the model: %s", name, error)
        else:
            _log.info("%s joins the model.", name)
            self._joined.put((end, agreed.session))
        finally:
            self._places.release()


def join(address: Address, secret: bytes, check: Callable[[Welcome], None]) -> tuple[SealedConnection, str]:
    """The first process of a model, once it listens there, and the address of this host on the way to it. `check`
    raises LinkError for a model that is not here. Raises LinkError where waiting would change nothing."""
    told = False
    while True:
        try:
            end = socket.create_connection((address.host, address.port), timeout=HANDSHAKE_S)
            agreed = shake(end, server_handshake(secret, HANDSHAKE_S, check))
        except socket.gaierror as error:
            raise LinkError(f"{address.host} is unknown: {error.strerror}.", is_final=True) from error
        except (OSError, LinkError) as error:
            if isinstance(error, LinkError) and error.is_final:
                raise
            if not told:
                _log.info("Waiting for a model at %s: %s", address, error)
            told = True
            time.sleep(_RETRY_S)
        else:
            return SealedConnection(end, Command, agreed.session), end.getsockname()[0]


def shake(end: socket.socket, handshake: Handshake) -> Agreed:
    """Have a handshake on a socket, which waits for nothing afterwards but messages, or is closed. Raises LinkError."""
    try:
        return _shake(end, handshake)
    except BaseException:
        end.close()
        raise


def _shake(end: socket.socket, handshake: Handshake) -> Agreed:
    until = time.monotonic() + HANDSHAKE_S

    def read(count: int) -> bytes:
        found = b""
        while len(found) < count:
            end.settimeout(max(0.001, until - time.monotonic()))
            some = end.recv(count - len(found))
            if not some:
                check_preamble(found)
                raise LinkError("It closed the connection.")
            found += some
        return found

    def say(message: bytes) -> None:
        if message:
            end.sendall(LENGTH.pack(len(message)) + message)

    try:
        end.settimeout(HANDSHAKE_S)
        end.sendall(PREAMBLE)
        say(next(handshake))
        check_preamble(read(PREAMBLE_BYTES))
        while True:
            size = LENGTH.unpack(read(LENGTH.size))[0]
            if size > MOST_HANDSHAKE_BYTES:
                raise LinkError(f"It announced a greeting of {size} bytes; {MOST_HANDSHAKE_BYTES} are allowed.")
            say(handshake.send(read(size)))
    except StopIteration as done:
        agreed: Agreed = done.value
        say(agreed.last_words)
        _watch(end)
        return agreed
    except LinkError as error:
        if error.is_told:
            with suppress(OSError):
                say(refusal(error))
        raise
    except TimeoutError:
        raise LinkError(f"No handshake in {HANDSHAKE_S:g} s.") from None
    except OSError as error:
        raise LinkError(f"The connection broke: {error.strerror or error}.") from error


def _watch(end: socket.socket) -> None:
    """Messages may take their time, but a host that is gone is noticed."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_S // 4)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENT_S // 4)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENT_S)
