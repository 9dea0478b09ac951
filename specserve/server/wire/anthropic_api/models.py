"""The list of models as Anthropic's clients read it: in pages, between ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specserve.errors import InputError, unknown
from specserve.server.wire.anthropic_api.bodies import ModelInfo, ModelPage
from specserve.server.wire.sentences import shown
from specserve.server.wire.times import rfc3339

VERSION_HEADER = "anthropic-version"  # Anthropic's clients send it with every request, and no others do
MAX_PAGE, _PAGE = 1000, 20

PARAMETERS: tuple[dict[str, Any], ...] = (
    {
        "name": VERSION_HEADER,
        "in": "header",
        "description": "With any value the answer is in Anthropic's shape.",
        "schema": {"type": "string"},
    },
)
PAGE_PARAMETERS: tuple[dict[str, Any], ...] = (
    *PARAMETERS,
    {
        "name": "limit",
        "in": "query",
        "description": f"Models of a page in Anthropic's shape, 1 to {MAX_PAGE}; {_PAGE} by default.",
        "schema": {"type": "string"},
    },
    {
        "name": "after_id",
        "in": "query",
        "description": "The page after this model, in Anthropic's shape.",
        "schema": {"type": "string"},
    },
    {
        "name": "before_id",
        "in": "query",
        "description": "The page before this model, in Anthropic's shape.",
        "schema": {"type": "string"},
    },
)


def model_info(name: str, created: int, max_model_len: int) -> ModelInfo:
    """GET /v1/models/{id}; `created` in seconds since 1970, `max_model_len` in tokens."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": rfc3339(created),
        "lifecycle": "active",
        "max_input_tokens": max_model_len - 1,
        "max_tokens": max_model_len - 1,
    }


def model_page(names: Sequence[str], created: int, max_model_len: int, query: Mapping[str, str]) -> ModelPage:
    """GET /v1/models. Raises InputError for a page that there is none of."""
    limit = _limit(query.get("limit"))
    after, before = (_place(names, name, query.get(name)) for name in ("after_id", "before_id"))
    if after is not None and before is not None:
        raise InputError("after_id and before_id are both there. Send one of them.", "before_id")
    others = list(names) if before is None else list(names[:before])
    others = others[0 if after is None else after + 1 :]
    page = others[:limit] if before is None else others[-limit:]
    return {
        "data": [model_info(name, created, max_model_len) for name in page],
        "has_more": len(page) < len(others),
        "first_id": page[0] if page else None,
        "last_id": page[-1] if page else None,
    }


def _limit(sent: str | None) -> int:
    if sent is None:
        return _PAGE
    if not (sent.isascii() and sent.isdigit() and len(sent) < 5 and 1 <= int(sent) <= MAX_PAGE):
        raise InputError(f"limit is {shown(sent)}; it must be a whole number from 1 to {MAX_PAGE}.", "limit")
    return int(sent)


def _place(names: Sequence[str], name: str, sent: str | None) -> int | None:
    if sent is None:
        return None
    if sent not in names:
        raise InputError(f"{name}: " + unknown("model", sent[:100], names), name)
    return list(names).index(sent)
