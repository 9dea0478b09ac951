"""An engine on a node of a Ray cluster: listens for its server, with a certificate of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from specserve.cluster.certificates import Issued, issue
from specserve.errors import SpecserveError
from specserve.server.engine.headless import HeadlessEngine
from specserve.server.engine.keeper import Timeouts
from specserve.server.engine.listen_options import EngineListenOptions
from specserve.server.engine.messages import Failed
from specserve.server.logs import configure


class ActorSettings(msgspec.Struct, frozen=True):
    """What all engines of a server are told. `options` are EngineConfig's fields; `secret` and `authority` are those
    of the server's run, which nobody else knows: Ray carries them to the node. Without `host` an engine listens where
    Ray says that its node is reached."""

    options: dict[str, Any]
    secret: str
    authority: Issued
    start_s: float
    stall_s: float
    host: str = ""


class RayEngine:
    """A launcher's Actor."""

    def __init__(self, settings: str) -> None:
        """`settings` are ActorSettings as JSON."""
        self._settings = msgspec.json.decode(settings, type=ActorSettings)
        self._engine: HeadlessEngine | None = None
        self._address = ""
        configure("text", "info")

    async def listening(self) -> tuple[str, str, str]:
        """HOST:PORT of the engine, which is started the first time; else "", and why not."""
        try:
            if self._engine is None:
                self._engine, self._address = await self._start()
            return self._address, "", ""
        except SpecserveError as error:
            return "", *_told(error)

    async def ended(self) -> tuple[str, str]:
        """Why there will be no engine any more, once that is so."""
        assert self._engine is not None, "it listens"
        try:
            await self._engine.finished
            return "The engine has ended.", ""
        except SpecserveError as error:
            return _told(error)

    async def _start(self) -> tuple[HeadlessEngine, str]:
        settings = self._settings
        host = settings.host or _address_of_this_node()
        issued = issue(settings.authority, host)
        texts = settings.secret, issued.certificate, issued.key, settings.authority.certificate
        with in_memory(*texts) as (secret, certificate, key, authority):
            listen = EngineListenOptions(
                listen=f"[{host}]:0" if ":" in host else f"{host}:0",
                secret_file=secret,
                tls_cert=certificate,
                tls_key=key,
                tls_ca=authority,
            )
            engine = HeadlessEngine(settings.options, listen, Timeouts(settings.start_s, settings.stall_s))
        return engine, str(await engine.start())


@contextmanager
def in_memory(*texts: str) -> Iterator[list[Path]]:
    """Files with these texts for this process alone; no disk ever has them, however it ends."""
    with ExitStack() as stack:
        paths = []
        for text in texts:
            file = stack.enter_context(os.fdopen(os.memfd_create("specserve"), "w"))
            file.write(text)
            file.flush()
            paths.append(Path(f"/proc/self/fd/{file.fileno()}"))
        yield paths


def _told(error: SpecserveError) -> tuple[str, str]:
    failed = Failed.of(error)
    return failed.message, failed.final


def _address_of_this_node() -> str:
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())
