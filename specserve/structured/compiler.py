"""Compiles constraints once each and keeps what came of them, refusals too, within a bound of bytes.

Any number of threads may ask. Compiling may take long, so nobody asks who holds up others.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from specserve.config import DEFAULT_MAX_NUMBER_DIGITS
from specserve.errors import ConfigError, unknown
from specserve.registry import GRAMMARS
from specserve.structured.base import Backend, Grammar, RefusedError, Vocabulary
from specserve.structured.digits import BoundedGrammar, Extent, NumberTokens
from specserve.structured.schema.bounds import most_digits
from specserve.structured.spec import Structured

AUTO = "auto"
_log = logging.getLogger(__name__)

_REFUSAL_BYTES = 1024
_NUM_RECOUNTED = 64  # of what is kept, whenever something new comes
# What a backend raises for input that nobody thought of; it costs its author the request and nobody anything.
_UNFORESEEN = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError)
_REASON_CHARACTERS = 300  # of each backend's, where several refuse


def check_backend(name: str) -> None:
    """Raise ConfigError for a name that is neither a backend nor "auto", and for a backend whose package is missing."""
    if name == AUTO:
        return
    if name not in (names := GRAMMARS.names()):
        raise ConfigError("--grammar-backend: " + unknown("backend", name, [AUTO, *names]))
    if (package := GRAMMARS.missing(name)) is not None:
        raise ConfigError(
            f"--grammar-backend {name} needs the package {package}, which is not installed: pip install "
            f"'specserve[{name}]', or --grammar-backend {AUTO}, which takes those that are."
        )


@dataclass(slots=True)
class _Entry:
    """What came of a constraint; a refusal is kept as its message, as an error would keep its whole stack."""

    made: Future[Grammar | str]
    num_bytes: int = 0


class Compiler:
    """Compiles for one vocabulary, which is only asked for with the first constraint. `backend` is a name, or "auto":
    the first by PRIORITY that can enforce a constraint exactly, of those whose packages are installed. What is kept
    takes at most `max_bytes`. Numbers in JSON get at most `max_digits` digits, see structured.digits."""

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        backend: str = AUTO,
        max_bytes: int = 2**28,
        max_digits: int = DEFAULT_MAX_NUMBER_DIGITS,
    ) -> None:
        check_backend(backend)
        self._make_vocabulary = vocabulary
        self._names = GRAMMARS.ranked() if backend == AUTO else [backend]
        self._max_bytes = max_bytes
        self._max_digits = max_digits
        self._entries: OrderedDict[Structured, _Entry] = OrderedDict()  # least recently used first
        self._num_bytes = 0
        self._backends: dict[str, Backend | None] = {}  # None: its package is missing
        self._lock = threading.Lock()  # of the entries
        self._making = threading.Lock()  # of backends

    @property
    def num_bytes(self) -> int:
        """Of all that is kept, when the newest came."""
        return self._num_bytes

    def prepare(self, first_only: bool = False) -> None:
        """Make all backends that may be asked, which takes a second, or the one that is asked first."""
        for name in self._names[: 1 if first_only else None]:
            self._backend(name)
        self._number_tokens  # noqa: B018

    def known(self, asked: Structured) -> bool:
        """Whether `compile` would answer at once."""
        with self._lock:
            entry = self._entries.get(asked)
            return entry is not None and entry.made.done()

    def compile(self, asked: Structured) -> Grammar:
        """The grammar; two who ask for the same at once wait for one. Raises RefusedError."""
        with self._lock:
            entry = self._entries.get(asked)
            is_new = entry is None
            if entry is None:
                entry = self._entries[asked] = _Entry(Future())
            self._entries.move_to_end(asked)
        if is_new:
            self._make(asked, entry)
        found = entry.made.result()
        if isinstance(found, str):
            raise RefusedError(found)
        return found

    def _make(self, asked: Structured, entry: _Entry) -> None:
        try:
            found: Grammar | str = self._compiled(asked)
            size = _REFUSAL_BYTES if isinstance(found, str) else found.num_bytes
        except RefusedError as error:
            found, size = str(error).removeprefix("structured: "), _REFUSAL_BYTES
        except BaseException as error:
            with self._lock:
                self._entries.pop(asked, None)
            entry.made.set_exception(error)
            raise
        with self._lock:
            entry.num_bytes = size + sys.getsizeof(asked.text)
            self._num_bytes += entry.num_bytes
            entry.made.set_result(found)
            self._recount()
            self._shrink()

    def _recount(self) -> None:
        """Grammars grow while they are used: look at those that were asked for last."""
        for asked in islice(reversed(self._entries), _NUM_RECOUNTED):
            entry = self._entries[asked]
            if entry.num_bytes and not isinstance(found := entry.made.result(), str):
                grown = found.num_bytes + sys.getsizeof(asked.text)
                self._num_bytes += grown - entry.num_bytes
                entry.num_bytes = grown

    def _shrink(self) -> None:
        """Forget what was not used for longest; what is being made stays."""
        for asked, entry in list(self._entries.items()):
            if self._num_bytes <= self._max_bytes:
                return
            if entry.num_bytes:
                del self._entries[asked]
                self._num_bytes -= entry.num_bytes

    def _compiled(self, asked: Structured) -> Grammar:
        refusals: dict[str, str] = {}
        for name in self._names:
            backend = self._backend(name)
            if backend is None or asked.kind not in backend.kinds:
                continue
            try:
                return self._bounded(backend.compile(asked), asked)
            except RefusedError as error:
                refusals[name] = str(error).removeprefix("structured: ")
            except _UNFORESEEN as error:
                _log.warning("The grammar backend %s failed on a constraint, which is refused.", name, exc_info=error)
                refusals[name] = f"this {asked.kind} is not understood ({type(error).__name__})."
        if not any(self._backends.values()):
            raise RefusedError(f"none of the grammar backends {', '.join(self._names)} is installed here.")
        raise RefusedError(_together(refusals) or f"{asked.kind} is not supported by {' or '.join(self._names)}.")

    def _bounded(self, grammar: Grammar, asked: Structured) -> Grammar:
        """With numbers that end, where the grammar is one of JSON."""
        if asked.kind == "json_schema":
            extent = Extent(most_digits([json.loads(asked.text)], self._max_digits))
        elif asked.kind == "structural_tag" and (parts := _parts_of_tags(asked)):
            most = most_digits([schema for schema, _ in parts], self._max_digits)
            texts = {text for _, text in parts if text is not None}
            extent = Extent(most, "" in texts, tuple(text.encode() for text in sorted(texts) if text))
        else:
            return grammar
        return BoundedGrammar(grammar, self._number_tokens, extent)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return self._make_vocabulary()

    @cached_property
    def _number_tokens(self) -> NumberTokens:
        return NumberTokens(self._vocabulary)

    def _backend(self, name: str) -> Backend | None:
        """None where several may be asked and this one's package is missing."""
        if name not in self._backends:
            with self._making:
                if name not in self._backends:
                    is_here = GRAMMARS.missing(name) is None
                    self._backends[name] = GRAMMARS.find(name)(self._vocabulary) if is_here else None
        return self._backends[name]


def _parts_of_tags(asked: Structured) -> list[tuple[bool | dict[str, Any], str | None]]:
    from specserve.structured.tags import json_parts  # with pydantic, a tenth of a second, which few starts need

    return json_parts(asked)


def _together(refusals: dict[str, str]) -> str:
    """What each backend said, the one that was asked first at the front."""
    if len(refusals) <= 1:
        return "".join(refusals.values())
    return " ".join(f"{name}: {_shortened(reason)}" for name, reason in refusals.items())


def _shortened(reason: str) -> str:
    return reason if len(reason) <= _REASON_CHARACTERS else f"{reason[:_REASON_CHARACTERS]}..."
