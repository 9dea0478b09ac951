"""Requests over HTTP: where the server is, what becomes of failures, and when a request is sent again."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import aiohttp

from specserve.errors import ConfigError, InputError, ServerError
from specserve.sse import EventParser

BASE_URL = "http://127.0.0.1:8000"
MAX_WAIT_S = 60.0  # a server that asks for more patience gets none: its error goes to the caller

_RETRIED = (408, 409, 429)  # and every status from 500 on, unless x-should-retry says otherwise
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 8.0  # where the server names no time; twice as long each time
_LAST_BYTES_S = 1.0  # from the end mark to the end of the body, after which the connection can be used again

T = TypeVar("T")


class Transport:
    """One server, through any number of connections that stay open between requests; options as AsyncClient has them.
    Raises ConfigError for options that cannot work."""

    def __init__(
        self,
        base_url: str | None,
        api_key: str | None,
        timeout: float | None,
        uds: str | os.PathLike[str] | None,
        max_retries: int,
    ) -> None:
        self._url = _address(base_url or os.environ.get("SPECSERVE_BASE_URL") or BASE_URL)
        self._key = api_key or os.environ.get("SPECSERVE_API_KEY")
        if timeout is not None and not 0 < timeout < math.inf:
            raise ConfigError(f"timeout is {timeout}; it must be a number of seconds above 0, or None for no limit.")
        if max_retries < 0:
            raise ConfigError(f"max_retries is {max_retries}; it must be at least 0.")
        self._timeout, self._uds, self._max_retries = timeout, uds, max_retries
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, max_retries: int | None = None
    ) -> Any:
        """The JSON that the server answers."""
        sent = None if body is None else _encoded(body)
        limit = aiohttp.ClientTimeout(total=self._timeout)

        async def attempt() -> Any:
            response = await self._send(method, path, sent, limit)
            with self._failures():
                return load(await response.text(errors="replace"))

        return await self._tried(attempt, self._max_retries if max_retries is None else max_retries)

    async def stream(self, path: str, body: Mapping[str, Any]) -> aiohttp.ClientResponse:
        """An answer whose body has not been read. Whoever gets it closes it."""
        sent = _encoded(body)
        limit = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout, sock_read=self._timeout)
        return await self._tried(lambda: self._send("POST", path, sent, limit), self._max_retries)

    async def events(self, response: aiohttp.ClientResponse) -> AsyncIterator[str]:
        """The data of each event. Raises ServerError when the connection breaks."""
        parser = EventParser()
        with self._failures():
            async for piece in response.content.iter_any():
                for event in parser.feed(piece):
                    yield event.data

    async def close(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def _tried(self, attempt: Callable[[], Awaitable[T]], max_retries: int) -> T:
        for number in range(max_retries):
            try:
                return await attempt()
            except ServerError as error:
                wait = _wait(number) if error.retry_after is None else error.retry_after
                if not error.should_retry or wait > MAX_WAIT_S:
                    raise
            await asyncio.sleep(wait)
        return await attempt()

    async def _send(
        self, method: str, path: str, body: bytes | None, limit: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        """An answer with status 200; everything else is a ServerError."""
        headers = {} if body is None else {"Content-Type": "application/json"}
        with self._failures():
            response = await self._opened().request(
                method, self._url + path, data=body, headers=headers, timeout=limit, allow_redirects=False
            )
            if response.status == 200:
                return response
            async with response:
                raise _refusal(response, await response.text(errors="replace"))

    def _opened(self) -> aiohttp.ClientSession:
        if self._closed:
            raise InputError("This client is closed. Make a new one.")
        loop = asyncio.get_running_loop()
        if self._session is None:
            self._session, self._loop = self._new_session(), loop
        elif self._loop is not loop:
            raise InputError("This client belongs to another event loop. Make one for each loop, or use Client.")
        return self._session

    def _new_session(self) -> aiohttp.ClientSession:
        """As many connections as there are requests."""
        headers = {"User-Agent": "specserve"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        connector: aiohttp.BaseConnector
        if self._uds is None:
            connector = aiohttp.TCPConnector(limit=0)
        else:
            connector = aiohttp.UnixConnector(os.fspath(self._uds), limit=0)
        return aiohttp.ClientSession(connector=connector, headers=headers, cookie_jar=aiohttp.DummyCookieJar())

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """What goes wrong on the way becomes a ServerError; the server may have done the work or not."""
        try:
            yield
        except TimeoutError as error:
            message = f"No answer from {self._url} within {self._timeout} seconds, the timeout of this client."
            raise ServerError(message, type="timeout_error") from error
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not self._closed:  # what aiohttp says of a body when it was closed
                raise
            raise broken(f"No answer from {self._url}: {error or type(error).__name__}.") from error


def broken(message: str) -> ServerError:
    """A connection that failed; another attempt may find a better one."""
    return ServerError(message, type="connection_error", should_retry=True)


def load(text: str) -> Any:
    """The JSON of a body or an event. Raises ServerError for what is none, and for an error in a stream."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ServerError(f"The server sent no valid JSON: {text[:200]!r}.", status=200) from error
    if isinstance(value, dict) and value.get("error") is not None:
        raise ServerError.of_answer(200, text)
    return value


async def read_to_end(response: aiohttp.ClientResponse) -> None:
    """Read the end of a body that has said all, so that its connection can be used again; no failure is one here."""
    try:
        async with asyncio.timeout(_LAST_BYTES_S):
            await response.read()
    except (aiohttp.ClientError, OSError):  # TimeoutError is one
        response.close()


def _address(url: str) -> str:
    if not url.startswith(("http://", "https://")) or len(url.split("/", 3)[2]) == 0:
        raise ConfigError(f"The server's address is {url!r}; it must be a URL such as {BASE_URL}.")
    return url.rstrip("/").removesuffix("/v1")


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InputError(f"The request cannot be written as JSON: {error}.") from error


def _refusal(response: aiohttp.ClientResponse, text: str) -> ServerError:
    advice = response.headers.get("x-should-retry")
    again = response.status in _RETRIED or response.status >= 500 if advice is None else advice.lower() == "true"
    return ServerError.of_answer(response.status, text, _seconds(response.headers.get("Retry-After")), again)


def _seconds(retry_after: str | None) -> float | None:
    """The header's value, which may be seconds or a date."""
    try:
        seconds = float(retry_after or "nan")
    except ValueError:
        seconds = _until(str(retry_after))
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _until(date: str) -> float:
    try:
        return parsedate_to_datetime(date).timestamp() - time.time()
    except ValueError:
        return math.nan


def _wait(number: int) -> float:
    """Seconds before another attempt, spread so that clients that failed together do not come back together."""
    return min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0**number) * random.uniform(0.75, 1.25)
