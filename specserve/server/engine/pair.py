"""The kind of socket that both processes have an end of. Knows zmq; knows no message."""

from __future__ import annotations

import zmq

# As numbers: asked for as flags, they take longer than the calls that they go to.
NOBLOCK, RCVTIMEO = int(zmq.NOBLOCK), int(zmq.RCVTIMEO)
_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)


def pair(linger_ms: int) -> zmq.Socket[bytes]:
    """One end, not yet bound or connected. It drops nothing; what is unsent when it closes may take `linger_ms`."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, linger_ms)
    socket.setsockopt(zmq.SNDHWM, 0)  # no limit: messages are few, and none may be lost
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket


def has_come(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message waits; cheaper than the exception of receiving in vain, which is what most steps would do."""
    return bool(int(socket.get(_EVENTS)) & _READABLE)
