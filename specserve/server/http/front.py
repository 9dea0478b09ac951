"""What one process needs to answer HTTP: texts to tokens and back, the routes, the sockets."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from pathlib import Path

from specserve.errors import SpecserveError
from specserve.server.admission import Admission, Counts
from specserve.server.chats import Chats
from specserve.server.grammar_validator import Validator
from specserve.server.http.app import make_app
from specserve.server.http.context import Context
from specserve.server.http.listen import Listener
from specserve.server.metrics import RequestCounter
from specserve.server.reports import Reports
from specserve.server.service import Engines, Service
from specserve.server.settings import Settings
from specserve.text.tokenizer import Tokenizer

SWITCH_S = 0.0005  # for Python's 0.005, so long would every stream wait each time that a thread reads a long prompt
_log = logging.getLogger("specserve")


class Front:
    """It answers from `start` to `close`, on `sockets` if there are any, else on those that the options say. `ids`
    begins the ids of its requests; `timeline` are the seconds of the server's start, which grow until it is ready.

    `finished` is never done: it ends with the process."""

    def __init__(
        self,
        settings: Settings,
        engines: Engines,
        metrics: RequestCounter,
        validator: Validator,
        reports: Reports,
        *,
        timeline: dict[str, float],
        counts: Counts | None = None,
        ids: str = "",
        sockets: Sequence[socket.socket] = (),
    ) -> None:
        options, folder = settings.options, Path(settings.folder)
        chats, tokenizer = Chats(folder, template=settings.template), Tokenizer(folder, settings.template)
        most, apart = options.max_tokenize_characters, options.reasoning_format == "auto"
        self._service = Service(engines, tokenizer, metrics, validator, chats, most, apart, ids)
        self.context = Context(
            options=options,
            names=settings.names,
            service=self._service,
            reports=reports,
            admission=Admission(settings.capacity, counts, lambda: engines.num_places),
            folder=folder,
            sampling=settings.sampling,
            timeline=timeline,
            created=settings.created,
        )
        self._listener = Listener(make_app(self.context), options, sockets, settings.tls)
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._preparing: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return self._listener.address

    async def start(self) -> None:
        """Raises ConfigError for an address or a certificate that cannot be used."""
        await self._listener.start()
        self._preparing = asyncio.create_task(self._prepare())

    async def close(self) -> None:
        if self._preparing is not None:
            self._preparing.cancel()
        await self._listener.close()
        self._service.close()

    async def _prepare(self) -> None:
        try:
            await self._service.warm()
        except SpecserveError as error:  # requests that need it will say so too
            _log.warning("What conversations need could not be made ready: %s", error)
