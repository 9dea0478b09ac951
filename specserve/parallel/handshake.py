"""The first words between a server and an engine elsewhere, between two engines, or between processes of a model. Each
proves that it knows the secret, which is never sent; what follows is in frames that bear the session's tags.

    both      magic and version of the protocol, 12 bytes
    engine    Challenge: a nonce
    server    Hello: a nonce, and an HMAC of all so far under the secret
    engine    Welcome: what it serves, and an HMAC of all so far; or Refusal
    both      frames: length and its tag | message | tag, under keys of this session and direction

The server proves first: who only connects gets nothing to try secrets on. An engine that fetches KV from another one
takes the server's part, and says so. Without TLS frames can be read on the way, but neither changed, repeated, left out
nor made up.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from specserve.errors import SpecserveError
from specserve.version import __version__

PROTOCOL_VERSION = 1
MOST_HANDSHAKE_BYTES = 4096
MOST_MESSAGE_BYTES = 2**28
SHORTEST_HEARTBEAT_S, LONGEST_HEARTBEAT_S = 0.2, 60.0
_MAGIC = b"specserve\0"
_PREAMBLE = struct.Struct("<10sH")
PREAMBLE_BYTES = _PREAMBLE.size
PREAMBLE = _PREAMBLE.pack(_MAGIC, PROTOCOL_VERSION)
LENGTH = struct.Struct("<I")
_LENGTH_TAG_BYTES, _TAG_BYTES = 8, 16
_TLS_ALERT = b"\x15\x03"  # how an answer in TLS begins
_ALIKE = "Run the same release in both."

Purpose: TypeAlias = Literal["requests", "kv"]  # what a connection is for
_Word = Annotated[str, msgspec.Meta(max_length=256)]
_Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Proof = _Nonce
_Heartbeat = Annotated[float, msgspec.Meta(ge=SHORTEST_HEARTBEAT_S, le=LONGEST_HEARTBEAT_S)]


class LinkError(SpecserveError):
    """A connection that cannot be had, or is over. `is_final`: another try would fail the same way until somebody
    changes how one of the two was started. `is_told`: the other side is to hear of it."""

    def __init__(self, message: str, *, is_final: bool = False, is_told: bool = False) -> None:
        super().__init__(message)
        self.is_final, self.is_told = is_final, is_told


class Challenge(msgspec.Struct, frozen=True, tag="challenge", forbid_unknown_fields=True):
    version: _Word
    nonce: _Nonce


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`heartbeat_s`: who is silent for so long is taken to be gone, on both sides."""

    version: _Word
    nonce: _Nonce
    heartbeat_s: _Heartbeat
    purpose: Purpose = "requests"


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`model` is a name for people, `digest` that of its files, `clock` the engine's time.perf_counter()."""

    version: _Word
    model: _Word
    digest: _Word
    clock: float


class Signed(msgspec.Struct, frozen=True, tag="signed", forbid_unknown_fields=True):
    """A Hello or a Welcome, with the HMAC of everything up to it."""

    content: Annotated[bytes, msgspec.Meta(max_length=MOST_HANDSHAKE_BYTES)]
    proof: _Proof


class Refusal(msgspec.Struct, frozen=True, tag="refusal", forbid_unknown_fields=True):
    message: Annotated[str, msgspec.Meta(max_length=2048)]
    is_final: bool


class Session:
    """The frames of one connection, after its handshake."""

    def __init__(self, send_key: bytes, receive_key: bytes) -> None:
        self._send_key, self._receive_key = send_key, receive_key
        self._num_sent = self._num_received = 0

    HEADER_BYTES = LENGTH.size + _LENGTH_TAG_BYTES

    def seal(self, message: bytes) -> bytes:
        """The frame of a message."""
        number, length = self._num_sent, LENGTH.pack(len(message))
        self._num_sent += 1
        key = self._send_key
        tags = _tag(key, number, length, _LENGTH_TAG_BYTES), _tag(key, number, message, _TAG_BYTES)
        return b"".join((length, tags[0], message, tags[1]))

    def frame_bytes(self, header: bytes | bytearray) -> int:
        """How long the frame is that begins so, header included. Raises LinkError."""
        length = bytes(header[: LENGTH.size])
        tag = _tag(self._receive_key, self._num_received, length, _LENGTH_TAG_BYTES)
        if not hmac.compare_digest(tag, bytes(header[LENGTH.size :])):
            raise LinkError("It sent a frame that is not of this session, or was changed on its way.")
        size: int = LENGTH.unpack(length)[0]
        if size > MOST_MESSAGE_BYTES:
            raise LinkError(f"It announced a frame of {size} bytes; {MOST_MESSAGE_BYTES} are allowed.")
        return self.HEADER_BYTES + size + _TAG_BYTES

    def open(self, frame: bytes | bytearray) -> bytes:
        """The message of a whole frame. Raises LinkError."""
        message = bytes(frame[self.HEADER_BYTES : -_TAG_BYTES])
        tag = _tag(self._receive_key, self._num_received, message, _TAG_BYTES)
        if not hmac.compare_digest(tag, bytes(frame[-_TAG_BYTES:])):
            raise LinkError("It sent a frame that was changed on its way.")
        self._num_received += 1
        return message


@dataclass(frozen=True, slots=True)
class Agreed:
    """What a handshake led to. `last_words` are still to be sent; `clock_offset` is what to add to the engine's times
    to have them on this side's clock, 0 where they are the same as far as the connection can tell."""

    session: Session
    heartbeat_s: float
    last_words: bytes = b""
    clock_offset: float = 0.0
    purpose: Purpose = "requests"


Handshake: TypeAlias = Generator[bytes, bytes, Agreed]  # yields what to send (b"": nothing) and is sent what has come
T = TypeVar("T")


def check_preamble(received: bytes) -> None:
    """What the other side began with, PREAMBLE_BYTES or fewer where no more came. Raises LinkError."""
    if not _MAGIC.startswith(received[: len(_MAGIC)]):
        if received.startswith(_TLS_ALERT):
            text = "It speaks TLS, and this side does not: --engine-ca (of an engine: --peer-ca) is missing."
            raise LinkError(text, is_final=True)
        raise LinkError(f"It is no engine of specserve: it began with {received!r}.", is_final=True)
    if len(received) == PREAMBLE_BYTES:
        version = _PREAMBLE.unpack(received)[1]
        if version != PROTOCOL_VERSION:
            text = f"It speaks version {version} of the protocol, and this side version {PROTOCOL_VERSION}. {_ALIKE}"
            raise LinkError(text, is_final=True)


def server_handshake(
    secret: bytes, heartbeat_s: float, check: Callable[[Welcome], None], purpose: Purpose = "requests"
) -> Handshake:
    """The server's side; `check` raises LinkError for an engine that it cannot use. So does this, for one that does not
    know the secret."""
    first = yield b""
    challenge = _read(first, Challenge)
    _check_version(challenge.version)
    hello = _encoded(Hello(__version__, os.urandom(32), heartbeat_s, purpose))
    proofs = _Proofs(secret, first)
    asked = time.perf_counter()
    answer = yield _encoded(Signed(hello, proofs.of(b"server", hello)))
    answered = time.perf_counter()
    signed = _read(answer, Signed)
    if not hmac.compare_digest(proofs.of(b"engine", hello, signed.content), signed.proof):
        raise LinkError("It did not prove that it knows the secret.", is_final=True)
    welcome = _read(signed.content, Welcome)
    check(welcome)
    offset = (asked + answered) / 2 - welcome.clock
    is_same_clock = asked <= welcome.clock <= answered
    keys = proofs.of(b"to engine", hello, signed.content), proofs.of(b"to server", hello, signed.content)
    return Agreed(Session(*keys), heartbeat_s, clock_offset=0.0 if is_same_clock else offset, purpose=purpose)


def _no_kv() -> None:
    raise LinkError("Nobody fetches KV here.", is_final=True, is_told=True)


def engine_handshake(
    secret: bytes, model: str, digest: str, admit: Callable[[], None], admit_engine: Callable[[], None] = _no_kv
) -> Handshake:
    """The engine's side; `admit` raises LinkError where it takes no server now, `admit_engine` where it takes no engine
    that fetches KV. So does this, for one that does not know the secret."""
    first = _encoded(Challenge(__version__, os.urandom(32)))
    proofs = _Proofs(secret, first)
    signed = _read((yield first), Signed)
    if not hmac.compare_digest(proofs.of(b"server", signed.content), signed.proof):
        raise LinkError("The other side has another secret.", is_final=True, is_told=True)
    hello = _read(signed.content, Hello)
    _check_version(hello.version)
    (admit_engine if hello.purpose == "kv" else admit)()
    welcome = _encoded(Welcome(__version__, model[:256], digest, time.perf_counter()))
    answer = _encoded(Signed(welcome, proofs.of(b"engine", signed.content, welcome)))
    keys = proofs.of(b"to server", signed.content, welcome), proofs.of(b"to engine", signed.content, welcome)
    return Agreed(Session(*keys), hello.heartbeat_s, last_words=answer, purpose=hello.purpose)


def refusal(error: LinkError) -> bytes:
    """What tells the other side of it."""
    return _encoded(Refusal(str(error)[:2048], error.is_final))


class _Proofs:
    """HMACs under the secret, each of what it is for and of all that was said."""

    def __init__(self, secret: bytes, challenge: bytes) -> None:
        self._secret, self._challenge = secret, challenge

    def of(self, purpose: bytes, *said: bytes) -> bytes:
        parts = (PREAMBLE, purpose, self._challenge, *said)
        return hmac.digest(self._secret, b"".join(LENGTH.pack(len(part)) + part for part in parts), "sha256")


def _check_version(version: str) -> None:
    if version != __version__:
        text = f"One of the two is specserve {version}, the other {__version__}. {_ALIKE}"
        raise LinkError(text, is_final=True, is_told=True)


def _read(message: bytes, kind: type[T]) -> T:
    """Raises LinkError, with what the other side says where that is a Refusal."""
    try:
        found = msgspec.msgpack.decode(message, type=kind | Refusal if kind in (Challenge, Signed) else kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LinkError("Its greeting cannot be read.") from error
    if isinstance(found, Refusal):
        raise LinkError(f"It refused: {found.message}", is_final=found.is_final)
    return found


def _encoded(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def _tag(key: bytes, number: int, content: bytes, size: int) -> bytes:
    hasher = hashlib.blake2b(number.to_bytes(8, "little"), key=key, digest_size=size)
    hasher.update(content)
    return hasher.digest()
