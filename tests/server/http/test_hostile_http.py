"""Rows A1 to A10 of hostile input: HTTP itself, and JSON that is none."""

from __future__ import annotations

import gzip
import json
import random
import re
import zlib
from typing import Any

import pytest

GOOD = {"prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
MIB = 2**20


def status(answer: bytes) -> int:
    """Of an HTTP response as it came."""
    found = re.match(rb"HTTP/[01]\.[019] (\d{3}) ", answer)
    assert found is not None, answer[:300]
    return int(found[1])


def head(case: Any, *lines: str, path: str = "/v1/completions") -> bytes:
    key = [f"Authorization: Bearer {case.served.key}"] if case.served.key else []
    first = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *key]
    return "\r\n".join([*first, *lines, "", ""]).encode()


class Peak:
    """The most memory that the API process had in a block, over what it had at its beginning, in MiB."""

    def __init__(self, case: Any, memory: Any) -> None:
        self._pid, self._memory = case.served.process.pid, memory

    def __enter__(self) -> Peak:
        self._memory.forget_peak(self._pid)
        self._before = self._memory.memory_mib(self._pid)
        return self

    def __exit__(self, *exception: object) -> None:
        self.grown = self._memory.memory_mib(self._pid, "VmHWM") - self._before


# --- A1 to A5: sizes and times ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [False, True], ids=["A1-length-over-the-limit", "A1-chunks-over-the-limit"])
def test_a_body_over_the_limit(strict: Any, memory: Any, chunked: bool) -> None:
    with Peak(strict, memory) as peak:
        if chunked:
            talk = strict.raw(head(strict, "Transfer-Encoding: chunked"))
            piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
            for _ in range(32):  # twice the limit; what is left is never sent
                talk.send(piece)
        else:
            talk = strict.raw(head(strict, f"Content-Length: {MIB + 1}") + b" " * 65536)
        answer = talk.rest()
    assert status(answer) == 413
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_too_large"
    assert peak.grown < 8, "the body was not kept"


def test_a_body_at_the_limit(strict: Any) -> None:
    body = json.dumps(GOOD).encode()
    reply = strict.post("/v1/completions", body.ljust(MIB), headers={"Content-Type": "application/json"})
    assert reply.status == 200
    assert len(reply.json["choices"][0]["token_ids"]) == 8


def test_a_bomb(strict: Any, memory: Any) -> None:
    """A2-gzip-bomb: 32 KiB that would be 32 MiB, each time it is sent."""
    plain = b" " * (32 * MIB)
    deflated, packed = zlib.compress(plain, 1), gzip.compress(plain, 1)
    with Peak(strict, memory) as peak:
        for encoding in ("gzip", "deflate", "br", "zstd", "gzip, gzip", "GZIP", "gzip"):
            bomb = deflated if encoding == "deflate" else packed
            reply = strict.post(
                "/v1/completions", bomb, headers={"Content-Type": "application/json", "Content-Encoding": encoding}
            )
            assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type"), encoding
    assert peak.grown < 8, "nothing was unpacked"


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(["X-Long: " + "a" * MIB], id="A3-header-of-1-MB"),
        pytest.param([f"X-{i}: a" for i in range(10_000)], id="A3-10000-headers"),
        pytest.param(["X-Long: " + "a" * 60_000] * 20, id="A3-long-headers"),
    ],
)
def test_headers_without_end(strict: Any, lines: list[str]) -> None:
    talk = strict.raw()
    talk.send(head(strict, *lines, "Content-Length: 2") + b"{}")
    assert status(talk.rest()) in (400, 431)


def test_a_path_without_end(strict: Any) -> None:
    """A3-path-of-1-MB"""
    talk = strict.raw()
    talk.send(b"GET /" + b"a" * MIB + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert status(talk.rest()) in (400, 414, 431)


def test_clients_that_are_slow_to_ask(strict: Any) -> None:
    """A4: forty of each kind, who send nothing any more, or one byte later: all are left, and told if they had begun a
    body."""
    begun = {
        "silent": b"",
        "half a head": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
        "half a body": head(strict, "Content-Length: 100") + b'{"prompt": ',
        "half a chunk": head(strict, "Transfer-Encoding: chunked") + b"ff\r\n{",
    }
    talks = [(kind, strict.raw(sent)) for kind, sent in begun.items() for _ in range(40)]
    for kind, talk in talks:
        talk.send(b" " if begun[kind] else b"")
    assert strict.post("/v1/completions", GOOD).status == 200  # while they are there
    for kind, talk in talks:
        answer = talk.rest()
        if kind in ("half a body", "half a chunk"):
            assert status(answer) == 408, kind
            assert b'"timeout_error"' in answer
        else:
            assert answer == b"", kind


def test_a_client_that_drips(strict: Any) -> None:
    """A4-slow-loris: one byte after the other is no reason to wait longer."""
    talk = strict.raw(head(strict, "Content-Length: 100000"))
    talk.socket.settimeout(0.05)
    answer = b""
    while not answer:
        assert talk.send(b" ") or not answer
        try:
            answer = talk.socket.recv(65536)
        except TimeoutError:
            continue
    assert status(answer) == 408


def test_a_body_in_many_chunks(strict: Any) -> None:
    """A5-one-byte-chunks: slow, but it is a request."""
    body = json.dumps(GOOD).encode().ljust(60_000)
    pieces = b"".join(b"1\r\n" + body[i : i + 1] + b"\r\n" for i in range(len(body)))
    talk = strict.raw(head(strict, "Transfer-Encoding: chunked", "Connection: close") + pieces + b"0\r\n\r\n")
    answer = talk.rest()
    assert status(answer) == 200
    assert b'"finish_reason":"length"' in answer


def test_chunks_that_are_none(strict: Any) -> None:
    """A5: no number, a negative one, more than was said, a number that overflows"""
    for body in (
        *(b"zz\r\n{}\r\n0\r\n\r\n", b"-1\r\n{}\r\n0\r\n\r\n"),
        *(b"2\r\n{}XX0\r\n\r\n", b"ffffffffffffffffff\r\n{}\r\n"),
    ):
        assert status(strict.raw(head(strict, "Transfer-Encoding: chunked") + body).rest()) == 400, body


@pytest.mark.parametrize("bodies", [24], ids=["A1-many-large-bodies"])
def test_many_large_bodies_at_once(strict: Any, bodies: int) -> None:
    """They share the room of eight. Who finds none is told to come again; small requests are served meanwhile."""
    talks = [strict.raw(head(strict, f"Content-Length: {MIB}", "Connection: close")) for _ in range(bodies)]
    for talk in talks:
        talk.send(b" " * (MIB - 1))
    assert strict.post("/v1/completions", GOOD).status == 200
    answers = [talk.rest() for talk in talks]
    refused = [answer for answer in answers if status(answer) == 429]
    assert len(refused) >= bodies - 8
    assert all(b"Retry-After" in answer for answer in refused)
    assert {status(answer) for answer in answers} == {408, 429}


# --- A6 to A8: JSON ---------------------------------------------------------------------------------------------------


NO_OBJECTS: list[tuple[bytes, str]] = [
    (b"", "empty"),
    (b" \n", "empty"),
    (b'{"prompt": "x"', "not valid JSON"),
    (b'{"prompt": "x"} {}', "not valid JSON"),
    (b"null", "must be a JSON object"),
    (b'[{"prompt": "x"}]', "must be a JSON object"),
    (b'"x"', "must be a JSON object"),
    (b'{"prompt": "\xff\xfe"}', "not valid UTF-8"),
    (json.dumps(GOOD).encode("utf-16"), "not valid UTF-8"),
    (b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), "byte order mark"),
    (b"{'prompt': 'x'}", "not valid JSON"),
    (b'{"prompt": ' + b"[" * 100_000, "nested more than 64"),
    (b'{"a":' * 100_000, "nested more than 64"),
    (b'{"metadata":' + b"[" * 64 + b"]" * 64 + b"}", "nested more than 64"),
]


def test_bodies_that_are_no_object(case: Any) -> None:
    """A6, A7"""
    for body, message in NO_OBJECTS:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            reply = case.post(path, body, headers={"Content-Type": "application/json"})
            assert (reply.status, reply.error["type"]) == (400, "invalid_request_error"), body[:50]
            assert message in reply.error["message"], body[:50]


def test_bodies_of_another_type(case: Any) -> None:
    """A6-wrong-content-type"""
    for kind in ("multipart/form-data", "application/octet-stream", "text/html", "x"):
        reply = case.post("/v1/completions", json.dumps(GOOD).encode(), headers={"Content-Type": kind})
        assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type"), kind


def test_bodies_of_no_stated_type_are_taken_from_programs_alone(case: Any) -> None:
    """A6-cross-site"""
    browsers = (
        *({"Origin": origin} for origin in ("null", "http://evil.example", f"http://localhost:{case.served.port}")),
        *({name: value} for name, value in (("Referer", "http://evil.example/"), ("Sec-Fetch-Site", "cross-site"))),
        *({name: value} for name, value in (("sec-ch-ua", "x"), ("User-Agent", "Mozilla/5.0 (X11) Firefox/140.0"))),
    )
    for kind in ({}, *({"Content-Type": kind} for kind in ("", "text/plain;charset=UTF-8", FORM))):
        assert case.post("/v1/completions", json.dumps(GOOD).encode(), headers=kind).status == 200, kind
        broken = case.post("/v1/completions", b"prompt=a", headers=kind)
        assert (broken.status, "JSON" in broken.error["message"]) == (400, True), kind
        for browser in browsers:
            reply = case.post("/v1/completions", json.dumps(GOOD).encode(), headers={**kind, **browser})
            assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type"), (kind, browser)
            said = {**browser, "Content-Type": "application/json"}
            assert case.post("/v1/completions", json.dumps(GOOD).encode(), headers=said).status == 200, browser


FORM = "application/x-www-form-urlencoded"


NUMERIC = (
    *("n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("max_tokens", "min_tokens", "seed", "priority", "logprobs"),
)


def test_numbers_that_are_none(case: Any) -> None:
    """A8"""
    for literal in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "-" + "9" * 5000):
        bodies = [(field, f'{{"prompt": "x", "max_tokens": 2, "{field}": {literal}}}') for field in NUMERIC]
        bodies.append(("logit_bias", f'{{"prompt": "x", "logit_bias": {{"5": {literal}}}}}'))
        bodies.append(("prompt", f'{{"prompt": [5, {literal}]}}'))
        for field, body in bodies:
            reply = case.post("/v1/completions", body.encode(), headers={"Content-Type": "application/json"})
            assert (reply.status, reply.error["param"]) == (400, field), literal[:20]


# --- A9 and A10: paths, methods and hosts -----------------------------------------------------------------------------


def test_paths_that_are_not_there(case: Any) -> None:
    """A9-random-paths: the number of metrics and labels does not depend on what was asked for."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~%/"
    rng = random.Random(1)
    before = case.get("/metrics").body.count(b"\n")
    for _ in range(200):
        path = "/" + "".join(rng.choice(letters) for _ in range(rng.randrange(1, 300)))
        reply = case.ask(rng.choice(["GET", "POST", "PUT", "PROPFIND"]), path)
        assert (reply.status, reply.error["code"]) == (404, "not_found")
        assert len(reply.error["message"]) < 200
    assert case.get("/metrics").body.count(b"\n") == before


def test_methods_that_are_not_there(case: Any) -> None:
    """A9-wrong-method"""
    for method in ("PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "PROPFIND", "GET", "LINK"):
        reply = case.ask(method, "/v1/completions")
        assert (reply.status, reply.error["code"]) == (405, "method_not_allowed"), method


def test_methods_that_nobody_knows(case: Any) -> None:
    """A9-random-methods: whether aiohttp's parser takes them is its affair; no metric grows."""
    rng = random.Random(2)
    before = case.get("/metrics").body.count(b"\n")
    for _ in range(100):
        method = "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ-!#$") for _ in range(rng.randrange(3, 40)))
        assert case.ask(method, "/v1/completions").status in (400, 405)
    assert case.get("/metrics").body.count(b"\n") == before


def test_what_is_no_http(case: Any) -> None:
    """A9"""
    for request_line in (
        *(b"GET / HTTP/9.9", b"\x00\x01\x02\x03", b"G\xc3\xa9T / HTTP/1.1", b"GET /\x00 HTTP/1.1", b"GET / FTP/1.1"),
        *(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PRI * HTTP/2.0"),
    ):
        answer = case.raw(request_line + b"\r\nHost: localhost\r\n\r\n").rest()
        assert status(answer) == 400, request_line
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "bad_request"


KEYLESS = {
    "host-with-a-path": b"GET /v1/models HTTP/1.1\r\nHost: localhost/?x=",
    "absolute-target": b"GET http://localhost/v1/models HTTP/1.1\r\nHost: localhost",
    "absolute-with-dots": b"GET http://localhost/health/../v1/models HTTP/1.1\r\nHost: localhost",
    "two-slashes": b"GET //v1/models HTTP/1.1\r\nHost: localhost",
    "encoded-dots": b"GET /health/%2e%2e/v1/models HTTP/1.1\r\nHost: localhost",
    "dots": b"GET /health/../v1/models HTTP/1.1\r\nHost: localhost",
    "encoded-slash": b"GET /health%2f..%2fv1/models HTTP/1.1\r\nHost: localhost",
    "two-hosts": b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: b",
    "query": b"GET /v1/models?/health HTTP/1.1\r\nHost: localhost",
    "fragment": b"GET /v1/models#/health HTTP/1.1\r\nHost: localhost",
    "head": b"HEAD /v1/models HTTP/1.1\r\nHost: localhost",
    "options": b"OPTIONS /v1/models HTTP/1.1\r\nHost: localhost\r\nOrigin: b\r\nAccess-Control-Request-Method: GET",
    "original-url": b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Original-URL: /health",
    "http-1.0": b"GET /v1/models HTTP/1.0",
    "http-0.9": b"GET /v1/models",
    "wrong-method": b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0",
    "smuggled": b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nTransfer-Encoding: chunked",
}


def test_nothing_is_served_without_a_key(strict: Any) -> None:
    """A10"""
    for name, lines in KEYLESS.items():
        answer = strict.raw(lines + b"\r\nConnection: close\r\n\r\n").rest()
        assert status(answer) in ((400, 401, 403) if "host" in name else (400, 401, 405)), name
        assert b'"tiny"' not in answer, name


def test_requests_behind_each_other(strict: Any) -> None:
    """A10-pipelined: a key opens its own request and none that follows it on the connection."""
    good = (
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
        + strict.served.key.encode()
        + b"\r\n\r\n"
    )
    bad = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = strict.raw(good + bad).rest()
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"401"]
    many = strict.raw(good * 100 + bad).rest()
    assert re.findall(rb"HTTP/1.1 (\d+)", many) == [b"200"] * 100 + [b"401"]
