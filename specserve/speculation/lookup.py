"""Makes the drafter of an engine from its name and options, which are the parameters of its constructor."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from specserve.errors import ConfigError, unknown
from specserve.registry import DRAFTERS
from specserve.speculation.base import NONE
from specserve.types import Drafter


def create(name: str, options: Mapping[str, Any]) -> Drafter | None:
    """A drafter with its options; None for "none". Raises ConfigError for an unknown or missing option."""
    if name == NONE:
        if options:
            raise ConfigError(f"drafter is 'none' and takes no options, got {', '.join(sorted(options))}.")
        return None
    drafter: type[Drafter] = DRAFTERS.find(name, NONE)
    signature = inspect.signature(drafter)
    parameters = signature.parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for option in options:
            if option not in names:
                raise ConfigError(unknown(f"option of drafter {name!r}:", option, names))
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(f"Drafter {name!r}: {error}. Its options: {', '.join(names)}.") from error
    return drafter(**options)
