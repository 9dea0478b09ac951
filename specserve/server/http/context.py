"""What all routes of one server share. Knows no route."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from specserve.server.admission import Admission, Bodies
from specserve.server.engine.messages import Ready
from specserve.server.options import PRIORITY, ServeOptions
from specserve.server.service import Ask, Service
from specserve.server.wire.errors import model_not_found
from specserve.server.wire.fields import MAX_COUNT, Limits
from specserve.server.wire.responses import Reply

_MOST_BODIES = 8  # of the largest size that are in memory at once


@dataclass(slots=True, kw_only=True)
class Context:
    """`names` are those that requests may use for the model; the first is the one in answers. `timeline` has the
    seconds that the server's start took, by phase."""

    options: ServeOptions
    names: Sequence[str]
    service: Service
    admission: Admission
    timeline: dict[str, float] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    bodies: Bodies = field(init=False)

    def __post_init__(self) -> None:
        self.bodies = Bodies(_MOST_BODIES * self.options.max_body_bytes)

    @property
    def needs_key(self) -> bool:
        return bool(self.options.api_key or self.options.api_key_file)

    @property
    def limits(self) -> Limits:
        """What requests are held to. Raises WireError while there is no engine."""
        ready = self.service.ready
        return Limits(
            vocab_size=min(ready.vocab_size, self.service.tokenizer.vocab_size),
            max_model_len=ready.max_model_len,
            drafters=frozenset(ready.drafters) - {"none"},
            max_priority=MAX_COUNT if self.options.scheduling_policy == PRIORITY else 0,
        )

    def check_model(self, name: str | None) -> None:
        """Raises WireError for a model that is not served; no name means the one that is."""
        if name is not None and name not in self.names:
            raise model_not_found(name, self.names)

    def reply(self, response_id: str, asked: Any, ask: Ask, **own: Any) -> Reply:
        """What the bodies of an answer to `asked`, a request with sampling fields that has become `ask`, share."""
        return Reply(
            id=response_id,
            created=int(time.time()),
            model=self.names[0],
            vocabulary=self.service.tokenizer,
            num_spec_tokens=_longest_draft(self.service.ready, ask),
            return_token_ids=asked.return_token_ids,
            include_usage=asked.include_usage,
            skip_special_tokens=asked.skip_special_tokens,
            **own,
        )


def _longest_draft(ready: Ready, ask: Ask) -> int:
    """0 where nothing can draft. What a grammar forces is drafted by an engine that drafts nothing else, too."""
    if ask.drafter == "none":
        return 0
    drafter = ask.drafter or ("prediction" if ask.prediction else ready.drafter)
    drafted = 0 if drafter == "none" else ready.num_spec_tokens
    return drafted if ask.params.structured is None else max(drafted, ready.num_forced_tokens)


CONTEXT = web.AppKey("specserve", Context)
ARRIVED = web.RequestKey("arrived", float)  # the event loop's time at which the whole request was there


def context(request: web.Request) -> Context:
    """The server that this request came to."""
    return request.app[CONTEXT]
