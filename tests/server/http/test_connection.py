"""What aiohttp answers before any route sees it: in the shape of all errors, and with nothing of it in the log."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from aiohttp import web

from specserve.server.http.connection import Connection
from specserve.server.http.context import CONTEXT
from specserve.server.http.listen import Listener
from specserve.server.http.middleware import add_headers, keys_required, translate_errors
from specserve.server.options import ServeOptions
from specserve.version import __version__

KEY = b"sk-0123456789abcdefghijklmnopqrstuvwxyz"
GOOD = b"".join(
    [
        b"POST / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + KEY + b"\r\n",
        b"X-Api-Key: " + KEY + b"\r\nCookie: " + KEY + b"\r\n",
        b"Content-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
    ]
)
PIECES = {KEY[i : i + 6].decode() for i in range(len(KEY) - 5)}  # of a key: as much of it as a log may not show


async def body(request: web.Request) -> web.Response:
    async with asyncio.timeout(0.3):
        return web.json_response({"size": len(await request.read())})


def application() -> web.Application:
    app = web.Application(middlewares=[translate_errors, keys_required(["other", KEY.decode()], set())])
    options = ServeOptions(port=0, header_timeout_s=0.3)
    app[CONTEXT] = SimpleNamespace(  # type: ignore[misc]
        options=options, service=SimpleNamespace(metrics=SimpleNamespace(refused=lambda status: None))
    )
    app.on_response_prepare.append(add_headers)
    app.add_routes([web.post("/", body)])
    return app


def answers(app: web.Application, requests: Sequence[bytes]) -> list[bytes]:
    """What a server of this application says to each, on a connection of its own; one response at most."""

    async def ask(port: int, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request)
            async with asyncio.timeout(60):
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head.lower())
                return head + await reader.readexactly(int(length[1]) if length else 0)
        except asyncio.IncompleteReadError as error:  # left without a word, for half a request
            return error.partial
        finally:
            writer.close()

    async def play() -> list[bytes]:
        listener = Listener(app, app[CONTEXT].options)
        await listener.start()
        try:
            port = int(listener.address.rpartition(":")[2])
            return await asyncio.gather(*(ask(port, request) for request in requests))
        finally:
            await listener.close()

    return asyncio.run(play())


def check(answer: bytes) -> int:
    """The status of one response; of an error the body and the headers are those of all errors."""
    head, _, text = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ")[1])
    if status >= 400:
        error = json.loads(text)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert b"content-type: application/json" in head.lower()
        assert f"server: specserve/{__version__}".encode() in head.lower()
        assert re.search(rb"x-request-id: \w{16}", head.lower())
    assert b"aiohttp" not in answer and b"Python" not in answer
    return status


def shown(caplog: pytest.LogCaptureFixture) -> set[str]:
    """The pieces of the key that the log has."""
    return {piece for piece in PIECES if piece in caplog.text}


MALFORMED = {
    "carriage-return": GOOD.replace(KEY, KEY + b"\rx", 1),
    "null": GOOD.replace(KEY, KEY + b"\0", 1),
    "no-name": GOOD.replace(b"Authorization", b"", 1),
    "space-in-the-name": GOOD.replace(b"Authorization", b"Authori zation", 1),
    "no-colon": GOOD.replace(b"Authorization: ", b"", 1),
    "long-key": GOOD.replace(KEY, KEY * 1000, 1),
    "many-keys": GOOD.replace(b"Cookie", (b"X: " + KEY + b"\r\n") * 200 + b"Cookie"),
    "key-as-a-length": GOOD.replace(b"Length: 2", b"Length: " + KEY),
    "key-as-a-method": GOOD.replace(b"POST", KEY + b"\x01"),
    "key-behind-the-version": GOOD.replace(b"HTTP/1.1", b"HTTP/1.1 " + KEY),
    "key-as-a-chunk": GOOD.replace(b"Content-Length: 2", b"Transfer-Encoding: chunked").replace(b"{}", KEY + b"\r\n"),
    "key-as-an-expectation": GOOD.replace(b"Cookie", b"Expect"),
    "key-as-an-encoding": GOOD.replace(b"Cookie", b"Transfer-Encoding"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_request_is_told_so_and_not_logged(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        (answer,) = answers(application(), [MALFORMED[name]])
    assert check(answer) in (400, 417)
    assert shown(caplog) == set()
    assert "Traceback" not in caplog.text
    assert caplog.text.count("is no HTTP request: ") + caplog.text.count(" 417 in ") == 1


def test_what_is_a_request_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        good, unknown, again = answers(application(), [GOOD, GOOD.replace(b"POST / ", b"POST /x "), GOOD])
    assert [check(good), check(unknown), check(again)] == [200, 404, 200]
    found = [vars(record) for record in caplog.records if record.name == "specserve.access"]
    assert {(each["client"], each["key"]) for each in found} == {("127.0.0.1", 2)}
    assert [each.get("error") for each in found if each["status"] == 404] == ["not_found"]
    assert shown(caplog) == set()


def mangled(rng: random.Random) -> bytes:
    """A good request of which some bytes are left out or replaced."""
    request = GOOD
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(request) + 1)
        put_in = rng.choice([rng.randbytes(rng.randrange(4)), b"\r", b"\n", b"\r\n", b"\0", b":", b" ", b"\xff"])
        request = request[:at] + put_in + request[at + rng.randrange(4) :]
    return request


@pytest.mark.parametrize("seed", range(4))
def test_any_bytes_anywhere(seed: int) -> None:
    """Whatever comes of them, no error has another shape and no key is in the log."""
    rng = random.Random(seed)
    requests = [mangled(rng) for _ in range(200)]
    records: list[str] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: records.append(handler.format(record))  # type: ignore[method-assign]
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        said = answers(application(), requests)
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    for request, answer in zip(requests, said, strict=True):
        assert answer == b"" or check(answer), request
    text = "\n".join(records)
    assert [piece for piece in PIECES if piece in text] == []


def test_what_nobody_caught_has_the_same_shape(caplog: pytest.LogCaptureFixture) -> None:
    """A fault behind all middlewares; the log has its traceback, the client does not."""

    async def fail(request: web.Request, response: web.StreamResponse) -> None:
        raise ZeroDivisionError("in /home/somebody/secret.py")

    app = application()
    app.on_response_prepare.insert(0, fail)
    with caplog.at_level(logging.DEBUG):
        (answer,) = answers(app, [GOOD])
    assert b"secret" not in answer
    assert "secret" in caplog.text
    assert shown(caplog) == set()


def test_nothing_is_taken_from_aiohttp_unseen() -> None:
    """What Connection overrides is there to be overridden."""
    assert {"handle_error", "finish_response"} <= vars(web.RequestHandler).keys() & vars(Connection).keys()
