"""Makes the drafter of an engine from its name and options, which are the parameters of its constructor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from specserve.errors import ConfigError, unknown
from specserve.registry import AUTO, DRAFTERS, NONE, RUNS_MODEL
from specserve.speculation.base import DraftContext, Drafter

Maker: TypeAlias = Callable[[DraftContext], Drafter]
PartMaker: TypeAlias = Callable[[DraftContext], Drafter | None]


def makers(name: str, options: Mapping[str, Any] | None) -> Mapping[str, PartMaker]:
    """What makes the drafters that draft under a name, each by its own: none, one, or for "auto" all files of drafters/
    that state a PRIORITY, which take the options that they know. Raises ConfigError as `prepare` does."""
    if name != AUTO:
        make = prepare(name, options)
        return {} if make is None else {name: make}
    too_large = DRAFTERS.stating(RUNS_MODEL) if options is None else []
    parts = [part for part in DRAFTERS.ranked() if part in DRAFTERS.files() and part not in too_large]
    known = {part: set(inspect.signature(DRAFTERS.find(part)).parameters) - {"context"} for part in parts}
    for option in options or ():
        if not any(option in names for names in known.values()):
            raise ConfigError(unknown("option of drafter 'auto':", option, set().union(*known.values())))
    return {part: _suiting(part, {o: v for o, v in (options or {}).items() if o in known[part]}) for part in parts}


def prepare(name: str, options: Mapping[str, Any] | None) -> Maker | None:
    """What makes a drafter with these options, once there is a target; None for "none". A request's own drafter has no
    options, which is None. Raises ConfigError for an unknown drafter, and an unknown or missing option, which must not
    cost loading a model."""
    of_request, options = options is None, options or {}
    if name == NONE:
        if options:
            raise ConfigError(f"drafter is 'none' and takes no options, got {', '.join(sorted(options))}.")
        return None
    drafter: Callable[..., Drafter] = DRAFTERS.find(name)
    signature = inspect.signature(drafter)
    parameters = list(signature.parameters.values())[1:]
    if not signature.parameters:
        raise ConfigError(f"Drafter {name!r}: {drafter!r} takes no DraftContext, the first parameter of a drafter.")
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = [p.name for p in named]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if wrong := [option for option in options if option not in names and not takes_any]:
        raise ConfigError(unknown(f"option of drafter {name!r}:", wrong[0], names))
    missing = [p.name for p in named if p.default is p.empty and p.name not in options]
    if of_request and (missing or name in DRAFTERS.stating(RUNS_MODEL)):
        needed = ", ".join(missing) or "a model of its own"
        reason = f"needs {needed}, which no request can give: it must be the engine's --drafter"
        raise ConfigError(f"Drafter {name!r} {reason}.")
    if missing:
        raise ConfigError(f"Drafter {name!r} needs {', '.join(missing)}. Its options: {', '.join(names)}.")
    return lambda context: drafter(context, **options)


def _suiting(name: str, options: Mapping[str, Any]) -> PartMaker:
    """`prepare` for a part of "auto", which makes None where the drafter has no part in it."""
    make, suits = prepare(name, options), getattr(DRAFTERS.find(name), "suits", None)
    assert make is not None, "a file of drafters/"
    return lambda context: make(context) if suits is None or suits(context, **options) else None
