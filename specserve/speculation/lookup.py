"""Makes the drafter of an engine from its name and options, which are the parameters of its constructor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from specserve.errors import ConfigError, unknown
from specserve.registry import DRAFTERS
from specserve.speculation.base import DraftContext, Drafter

NONE = "none"  # the name of plain decoding

Maker: TypeAlias = Callable[[DraftContext], Drafter]


def prepare(name: str, options: Mapping[str, Any] | None) -> Maker | None:
    """What makes a drafter with these options, once there is a target; None for "none". A request's own drafter has no
    options, which is None. Raises ConfigError for an unknown drafter, and an unknown or missing option, which must not
    cost loading a model."""
    of_request, options = options is None, options or {}
    if name == NONE:
        if options:
            raise ConfigError(f"drafter is 'none' and takes no options, got {', '.join(sorted(options))}.")
        return None
    drafter: Callable[..., Drafter] = DRAFTERS.find(name, NONE)
    signature = inspect.signature(drafter)
    parameters = list(signature.parameters.values())[1:]
    if not signature.parameters:
        raise ConfigError(f"Drafter {name!r}: {drafter!r} takes no DraftContext, the first parameter of a drafter.")
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for option in options:
            if option not in names:
                raise ConfigError(unknown(f"option of drafter {name!r}:", option, names))
    missing = [p.name for p in parameters if p.name in names and p.default is p.empty and p.name not in options]
    if missing and of_request:
        reason = f"needs {', '.join(missing)}, which no request can give: it must be the engine's --drafter"
        raise ConfigError(f"Drafter {name!r} {reason}.")
    if missing:
        raise ConfigError(f"Drafter {name!r} needs {', '.join(missing)}. Its options: {', '.join(names)}.")
    return lambda context: drafter(context, **options)
