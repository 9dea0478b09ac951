"""What a server was told, once it is read and checked."""

from __future__ import annotations

import msgspec

from specserve.server.options import ServeOptions
from specserve.text.chat import TemplateOptions


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All processes that answer HTTP go by the same, also those that are started later.

    `names` are the model's in requests, `folder` its files, `sampling` the values of requests that say none, `capacity`
    the completions that are let in. `created`: the time of the start, in seconds since the epoch. `tls`: contents of
    the certificate's file and of its key's, where they are not to be read again."""

    options: ServeOptions
    names: tuple[str, ...]
    folder: str
    sampling: dict[str, float]
    template: TemplateOptions
    capacity: int
    created: int
    tls: tuple[bytes, bytes] | None = None
