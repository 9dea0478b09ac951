"""Makes the drafter of an engine from its name and options, which are the parameters of its constructor."""

from __future__ import annotations

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
    known = {part: DRAFTERS.options(part)[0] for part in parts}
    for option in options or ():
        if not any(option in names for names in known.values()):
            raise ConfigError(unknown("option of drafter 'auto':", option, set().union(*known.values())))
    return {part: _suiting(part, {o: v for o, v in (options or {}).items() if o in known[part]}) for part in parts}


def prepare(name: str, options: Mapping[str, Any] | None) -> Maker | None:
    """What makes a drafter with these options, once there is a target; None for "none". A request's own drafter has no
    options, which is None. Raises ConfigError for an unknown drafter, and an unknown or missing option, which must not
    cost loading a model."""
    if name == NONE:
        if options:
            raise ConfigError(f"drafter is 'none' and takes no options, got {', '.join(sorted(options))}.")
        return None
    if options is None:
        missing = [option for option, is_required in DRAFTERS.options(name)[0].items() if is_required]
        if missing or name in DRAFTERS.stating(RUNS_MODEL):
            needed = ", ".join(missing) or "a model of its own"
            reason = f"needs {needed}, which no request can give: it must be the engine's --drafter"
            raise ConfigError(f"Drafter {name!r} {reason}.")
    return DRAFTERS.maker(name, options or {})


def _suiting(name: str, options: Mapping[str, Any]) -> PartMaker:
    """`prepare` for a part of "auto", which makes None where the drafter has no part in it."""
    make, suits = prepare(name, options), getattr(DRAFTERS.find(name), "suits", None)
    assert make is not None, "a file of drafters/"
    return lambda context: make(context) if suits is None or suits(context, **options) else None
