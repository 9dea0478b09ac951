"""Finds by name what implements a contract: drafters, kernel backends, grammar backends and model families.

An entry is a file of the kind's folder, under its file name (those that begin with _ are parts of others), or an entry
point that another package declares in the group named like the folder: `specserve.drafters`, `specserve.kernels`,
`specserve.grammars`, `specserve.models`. A file comes before an entry point of the same name. A new entry takes no
change of any other file.

What must be known before an entry is imported stands as a literal at the top level of its module: `PRIORITY = 10` where
one of several is chosen (the highest comes first; an entry without one is used by name only), `DEVICES = ("cuda",)` in
a kernel backend that serves no others, `RUNS_MODEL = True` in a drafter that loads a model of its own (or "no KV", if
that keeps none), `ARCHITECTURES` and `MODEL_TYPES` in a model family. An entry imports what it needs when it is
imported itself, so that what is missing is known before it runs.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import itertools
import os
import pkgutil
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from operator import attrgetter
from pathlib import Path
from threading import Lock
from typing import Any

from specserve.errors import ConfigError, unknown

_OURS = __name__.partition(".")[0]
AUTO, NONE = "auto", "none"  # in place of a drafter's name: those that state a PRIORITY, together; plain decoding
RUNS_MODEL = "RUNS_MODEL"  # the constant of drafters whose model is loaded, and its KV planned, at the start


@dataclass(frozen=True, slots=True)
class Registry:
    """The entries of one kind. `suffix` ends the name of the one public class in a file that is the entry; with "" the
    module is. `parts` are the attributes that an entry must have."""

    noun: str  # in messages
    package: str  # whose folder holds the files; also the group of the entry points
    suffix: str
    parts: tuple[str, ...]
    mark: str = ""  # what a file must state to be an entry, where the folder holds others too
    others: tuple[str, ...] = ()  # names that are taken where an entry's is, and are none

    def files(self) -> list[str]:
        """Names of the entries that are files, sorted. None is imported."""
        return list(self._paths())

    def names(self) -> list[str]:
        """Names of all entries, sorted. None is imported."""
        return sorted({*self.files(), *self._points()})

    def stating(self, constant: str) -> dict[str, Any]:
        """The entries whose modules state `constant`, and what it is there. None is imported."""
        modules = {name: (point.module, _file(point.module)) for name, point in self._points().items()}
        modules |= {name: (f"{self.package}.{name}", path) for name, path in self._paths().items()}
        found = {name: _literal(module, path, constant) for name, (module, path) in modules.items()}
        return {name: value for name, value in sorted(found.items()) if value is not None}

    def ranked(self) -> list[str]:
        """Names of the entries with a PRIORITY, the highest first. None is imported."""
        priorities = self.stating("PRIORITY")
        return sorted(priorities, key=lambda name: (-priorities[name], name))

    def find(self, name: str) -> Any:
        """The entry of that name. Raises ConfigError for an unknown name (with near misses), for what it needs and is
        not installed, and for one that breaks its contract."""
        called = f"{self.noun.capitalize()} {name!r}"
        if (missing := self.missing(name)) is not None:
            raise ConfigError(f"{called} needs {_told(missing)}")
        module_name, attribute = self._place(name)
        module = importlib.import_module(module_name)
        if not attribute and self.suffix:
            attribute = self._only_class(module_name)
        found = attrgetter(attribute)(module) if attribute else module
        if lacking := [part for part in self.parts if not hasattr(found, part)]:
            parts = ", ".join(self.parts)
            raise ConfigError(f"{called}: {found!r} has no {', '.join(lacking)}; a {self.noun} has {parts}.")
        return found

    def options(self, name: str) -> tuple[dict[str, bool], bool]:
        """The options of the entry of that name, which are the parameters of its constructor behind the first, its
        context: whether each must be given, and whether others are taken, too. Raises ConfigError as `find` does."""
        found = self.find(name)
        if not (parameters := list(inspect.signature(found).parameters.values())):
            raise ConfigError(f"{self.noun.capitalize()} {name!r}: {found!r} takes no context, the first parameter.")
        named = [each for each in parameters[1:] if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
        return {each.name: each.default is each.empty for each in named}, takes_any

    def maker(self, name: str, options: Mapping[str, Any]) -> Callable[[Any], Any]:
        """What makes the entry with these options, once there is a context. Raises ConfigError as `find` does, and for
        an unknown or missing option."""
        known, takes_any = self.options(name)
        if not takes_any and (wrong := [option for option in options if option not in known]):
            raise ConfigError(unknown(f"option of {self.noun} {name!r}:", wrong[0], known))
        if missing := [option for option, is_required in known.items() if is_required and option not in options]:
            needs = f"{self.noun.capitalize()} {name!r} needs {', '.join(missing)}."
            raise ConfigError(f"{needs} Its options: {', '.join(known)}.")
        make = self.find(name)
        return lambda context: make(context, **options)

    def check(self, name: str) -> None:
        """Raises ConfigError for a name that is neither an entry's nor one of `others`. None is imported."""
        if name not in self.others:
            self._place(name)

    def missing(self, name: str) -> str | None:
        """The package or compiled module that an entry needs and that is not installed; None where all are. Raises
        ConfigError for an unknown name, as `find` does."""
        module_name, _ = self._place(name)
        try:
            importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or (error.name.partition(".")[0] == _OURS and not _is_compiled(error.name)):
                raise  # a mistake of ours is no missing package
            return error.name
        return None

    def choose(self, asked: object, without: Collection[str] = ()) -> Any:
        """The first of the ranked entries, but for those named `without`, whose `supports(asked)` is None and not a
        reason against it; those after it are not imported. Raises ConfigError with the reason of each."""
        reasons = []
        for name in self.ranked():
            reason = "is not to be used." if name in without else self._why_not(name, asked)
            if reason is None:
                return self.find(name)
            reasons.append(f"{name} {reason}")
        raise ConfigError(f"No {self.noun} here supports {asked}. " + " ".join(reasons))

    def reasons_before(self, chosen: str, asked: object, device: str) -> dict[str, str]:
        """Of the entries ranked before `chosen` that are made for that kind of device, and do not support what is
        asked, why not."""
        made_for = {name for name, kinds in self.stating("DEVICES").items() if device in kinds}
        before = itertools.takewhile(lambda name: name != chosen, self.ranked())
        reasons = {name: self._why_not(name, asked) for name in before if name in made_for}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def _why_not(self, name: str, asked: object) -> str | None:
        if (missing := self.missing(name)) is not None:
            return f"needs {_told(missing)}"
        reason: str | None = self.find(name).supports(asked)
        return reason

    def unbuilt_before(self, chosen: str) -> list[str]:
        """Entries ranked before `chosen` that need a compiled module of ours which is not there."""
        before = itertools.takewhile(lambda name: name != chosen, self.ranked())
        return [name for name in before if (missing := self.missing(name)) is not None and _is_compiled(missing)]

    def _paths(self) -> dict[str, str]:
        """The entries that are files, sorted by name, and where they are."""
        found = {name: path for name, path in _files(self.package).items() if not name.startswith("_")}
        if not self.mark:
            return found
        return {
            name: path
            for name, path in found.items()
            if _literal(f"{self.package}.{name}", path, self.mark) is not None
        }

    def _points(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in declared(self.package)}

    def _place(self, name: str) -> tuple[str, str]:
        """An entry's module, and where in it an entry point is; "" for a file."""
        if name in self._paths():
            return f"{self.package}.{name}", ""
        if (point := self._points().get(name)) is None:
            raise ConfigError(unknown(self.noun, name, [*self.others, *self.names()]))
        return point.module, point.attr or ""

    def _only_class(self, module_name: str) -> str:
        """The name of the module's one public class with the suffix; classes it imported do not count."""
        module = importlib.import_module(module_name)
        names = [
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module_name
            if name.endswith(self.suffix) and not name.startswith("_")
        ]
        if len(names) != 1:
            found = ", ".join(names) or "none"
            raise ConfigError(
                f"{module.__file__} must have exactly one public class named ...{self.suffix}; it has {found}."
            )
        return names[0]


DRAFTERS = Registry(
    "drafter", "specserve.drafters", "Drafter", ("begin", "propose", "observe", "end"), others=(AUTO, NONE)
)
KERNELS = Registry("kernel backend", "specserve.kernels", "Kernels", ("supports", "create"))
GRAMMARS = Registry("grammar backend", "specserve.grammars", "Backend", ("kinds", "compile"))
MODELS = Registry("model family", "specserve.models", "", ("spec",), mark="ARCHITECTURES")


def declared(group: str) -> EntryPoints:
    """The entry points of installed packages in that group. Packages are looked through anew when a folder that Python
    imports from has changed: that takes as long as all else of a lookup ten times."""
    return _declared(group, tuple((path, _changed(path)) for path in sys.path))


@lru_cache(maxsize=16)
def _declared(group: str, paths: tuple[tuple[str, int], ...]) -> EntryPoints:
    return entry_points(group=group)


def _changed(path: str) -> int:
    try:
        return os.stat(path or ".").st_mtime_ns
    except OSError:
        return 0


def _files(package: str) -> dict[str, str]:
    """The modules in a package's folders, sorted by name, and the file of each. None is imported."""
    folders = list(importlib.import_module(package).__path__)
    return _listed(tuple((folder, _changed(folder)) for folder in folders))


@lru_cache(maxsize=64)
def _listed(folders: tuple[tuple[str, int], ...]) -> dict[str, str]:
    found = {}
    for module in pkgutil.iter_modules([folder for folder, _ in folders]):
        spec = module.module_finder.find_spec(module.name, None)
        found[module.name] = (spec and spec.origin) or ""
    return dict(sorted(found.items()))


def _file(module_name: str) -> str:
    """Where a module is; "" for what is gone, as an entry point's may be."""
    try:
        spec = importlib.util.find_spec(module_name)
    except ModuleNotFoundError:
        return ""
    return (spec and spec.origin) or ""


def _literal(module_name: str, path: str, constant: str) -> Any:
    """What a module, which that file is, assigns to a constant at its top level, read without running it; None where it
    does not."""
    return _stated(module_name, path, _changed(path), constant) if path.endswith(".py") else None


@lru_cache(maxsize=2048)
def _stated(module_name: str, path: str, changed: int, constant: str) -> Any:
    """A model's start asks for the same constants of all files many times."""
    source = Path(path).read_text("utf-8")
    with _parsing:
        value = _assigned(source, constant) if constant in source else None
        try:
            return value and ast.literal_eval(value)
        except ValueError:
            why = "it is read without running the file, so it must be a literal"
            raise ConfigError(f"{module_name}: {constant} is {value}; {why}.") from None


_parsing = Lock()  # Python 3.11 counts how deep it is for all threads together, and raises where that does not fit


@lru_cache(maxsize=256)
def _assigned(source: str, constant: str) -> str | None:
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [constant]:
            return ast.unparse(node.value)
    return None


def _is_compiled(module_name: str) -> bool:
    """Whether it is a module of ours that a compiler builds: what stands for it in the source is a stub."""
    package, _, name = module_name.rpartition(".")
    if package.partition(".")[0] != _OURS:
        return False
    return any(Path(path, f"{name}.pyi").exists() for path in importlib.import_module(package).__path__)


def _told(missing: str) -> str:
    if _is_compiled(missing):
        return f"{missing}, which is not built here: install {_OURS} again with a C++ compiler at hand."
    return f"the package {missing!r}, which is not installed."
