"""What all routes of one server share."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from specserve.adapters import AdapterInfo
from specserve.checkpoint.pooling import Pooling, read_pooling
from specserve.errors import ModelError
from specserve.server.admission import Admission, BodyBudget
from specserve.server.options import PRIORITY, ServeOptions
from specserve.server.reports import Reports
from specserve.server.service import Service
from specserve.server.wire.errors import model_not_found
from specserve.server.wire.fields import MAX_COUNT, Limits
from specserve.server.wire.openai.replies import Reply
from specserve.server.wire.openai.sampling_fields import SamplingFields

_MOST_BODIES = 8  # of the largest size that are in memory at once


@dataclass(slots=True, kw_only=True)
class Context:
    """`names` are those that requests may use for the model; the first is the one in answers. `sampling` are
    the values that requests get which do not say them; `folder` is the model's; `timeline` has the seconds that the
    server's start took, by phase."""

    options: ServeOptions
    names: Sequence[str]
    service: Service
    reports: Reports
    admission: Admission
    folder: Path
    sampling: Mapping[str, float] = field(default_factory=dict)
    timeline: dict[str, float] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    body_budget: BodyBudget = field(init=False)
    pooling: Pooling | ModelError | None = field(
        init=False
    )  # how embeddings are made, or why not; None: not made for it

    def __post_init__(self) -> None:
        self.body_budget = BodyBudget(_MOST_BODIES * self.options.max_body_bytes, self.admission.counts)
        try:
            self.pooling = read_pooling(self.folder)
        except ModelError as error:
            self.pooling = error

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
            refused_drafters=tuple(ready.refused_drafters.items()),
            max_priority=MAX_COUNT if self.options.scheduling_policy == PRIORITY else 0,
            sampling=tuple(self.sampling.items()),
        )

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """The LoRA adapters that requests may name in place of the model."""
        return self.service.supervisor.adapters

    def check_model(self, name: str | None) -> None:
        """Raises WireError for a model or adapter that is not served; no name means the model that is."""
        if name is not None and name not in self.names and name not in self.adapters:
            raise model_not_found(name, [*self.names, *self.adapters])

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter that a model's name in a request means, if any."""
        return name if name in self.adapters and name not in self.names else None

    def reply(self, response_id: str, body: SamplingFields, **own: Any) -> Reply:
        """What the bodies of the response to these fields share."""
        return Reply(
            id=response_id,
            created=int(time.time()),
            model=self.adapter_of(body.model) or self.names[0],
            vocabulary=self.service.tokenizer,
            return_token_ids=body.return_token_ids,
            include_usage=body.include_usage,
            skip_special_tokens=body.skip_special_tokens,
            **own,
        )


CONTEXT = web.AppKey("specserve", Context)
ARRIVED = web.RequestKey("arrived", float)  # the event loop's time at which the whole request had arrived


def route_path(request: web.Request) -> str:
    """The path of a request, without what --root-path puts before all of them."""
    path, root = request.path, context(request).options.root_path
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def context(request: web.Request) -> Context:
    """The server that this request came to."""
    return request.app[CONTEXT]
