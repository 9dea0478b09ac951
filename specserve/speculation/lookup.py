"""Finds drafters by name and makes them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, TypeAlias, cast

import specserve.drafters
from specserve.errors import ConfigError, unknown
from specserve.speculation.base import DraftContext, Drafter

NONE = "none"  # the name of plain decoding
GROUP = "specserve.drafters"
VERBS = ("begin", "propose", "observe", "end")


def available() -> list[str]:
    """Names of all drafters, files and entry points, sorted; none of them is imported."""
    return sorted({*files(), *_installed()})


def find(name: str) -> Callable[..., Drafter]:
    """The class of a drafter; a file goes before an entry point of the same name.

    Raises ConfigError for an unknown name (with near misses), a missing package, or a class that is not a drafter.
    """
    if name in files():
        found = _only_drafter(_import(name))
    elif name in _installed():
        found = _installed()[name].load()
    else:
        raise ConfigError(unknown("drafter", name, [NONE, *available()]))
    missing = [verb for verb in VERBS if not callable(getattr(found, verb, None))]
    if missing:
        raise ConfigError(f"Drafter {name!r}: {found!r} has no {', '.join(missing)}; a drafter has {', '.join(VERBS)}.")
    return cast(Callable[..., Drafter], found)


Maker: TypeAlias = Callable[[DraftContext], Drafter]


def prepare(name: str, options: Mapping[str, Any]) -> Maker | None:
    """What makes a drafter with these options, once there is a target; None for "none". Raises ConfigError for an
    unknown drafter, and an unknown or missing option, which must not cost loading a model."""
    if name == NONE:
        if options:
            raise ConfigError(f"drafter is 'none' and takes no options, got {', '.join(sorted(options))}.")
        return None
    drafter = find(name)
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
    if missing:
        raise ConfigError(f"Drafter {name!r}: {', '.join(missing)} must be given. Its options: {', '.join(names)}.")
    return lambda context: drafter(context, **options)


def files() -> set[str]:
    """Names of the drafters that are files of drafters/; none of them is imported."""
    return {module.name for module in pkgutil.iter_modules(specserve.drafters.__path__)}


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"{specserve.drafters.__name__}.{name}")
    except ModuleNotFoundError as error:
        raise ConfigError(f"Drafter {name!r} needs the package {error.name!r}, which is not installed.") from error


def _only_drafter(module: ModuleType) -> type:
    """The module's one public class named ...Drafter; classes it imported do not count."""
    classes = [
        value
        for key, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__
        if key.endswith("Drafter") and not key.startswith("_")
    ]
    if len(classes) != 1:
        found = ", ".join(c.__name__ for c in classes) or "none"
        raise ConfigError(f"{module.__file__} must have exactly one public class named ...Drafter; it has {found}.")
    return classes[0]
