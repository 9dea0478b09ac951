"""Texts of tenants in memory, each with the earlier places of every pair of tokens, kept in a file."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence as Many
from pathlib import Path
from typing import Any, NamedTuple

from specserve.checkpoint.textfile import TextFile, new_key, tenant_name
from specserve.types import Ids

_log = logging.getLogger(__name__)

_SAVE_EVERY_S = 180.0
_PAUSE_S = 1e-3  # of a save beside steps, after a fraction of that
_MOST_PLACES = 12  # of one text that are looked at
_BYTES_PER_TOKEN = 160  # of a text of which no pair comes twice
_TENANT_TOKENS = 10  # that a tenant counts for besides its texts': 1.6 KB
_MOST_WAITING = 2**18  # tokens of ended answers
_END = -1  # of an answer: no token


class Place(NamedTuple):
    """An earlier place: how many tokens before it agree with the newest, and what followed."""

    length: int
    following: list[int]


class Text:
    """A growing text, and for each pair of neighbours the place before that had the same."""

    def __init__(self, start: int = 0) -> None:
        self.stop = start  # of the source, what was taken in
        self.tokens = array("i")
        self._before = array("i")  # of each token and the one before it, where they were last; -1: nowhere
        self._last: dict[int, int] = {}
        self._single: dict[int, int] = {}  # where each token was last, but for the newest

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, source: Many[int], stop: int) -> int:
        """Take in what the source has up to `stop`; returns how many tokens these were."""
        new = source[self.stop : stop]
        for token in new:
            self._add(token)
        self.stop += len(new)
        return len(new)

    def _add(self, token: int) -> None:
        at = len(self.tokens)
        pair = self.tokens[-1] << 32 | token if at else -1
        if at:
            self._single[self.tokens[-1]] = at - 1
        self.tokens.append(token)
        self._before.append(self._last.get(pair, -1))
        self._last[pair] = at

    def places(self, newest: list[int], most: int) -> Iterator[Place]:
        """Where `newest` ends were before, the last first, with up to `most` tokens each that followed."""
        at = self._last.get(newest[-2] << 32 | newest[-1], -1) if len(newest) > 1 else -1
        for _ in range(_MOST_PLACES):
            if at < 0:
                return
            if at + 1 < len(self.tokens):
                yield Place(self._length(at, newest), self._following(at + 1, most))
            at = self._before[at]

    def single(self, token: int, most: int) -> Place | None:
        """Where this one token was last."""
        at = self._single.get(token)
        return None if at is None else Place(1, self._following(at + 1, most))

    def _length(self, at: int, newest: list[int]) -> int:
        tokens, most = self.tokens, min(at + 1, len(newest))
        for length in range(2, most):
            if tokens[at - length] != newest[-1 - length]:
                return length
        return max(most, 2)

    def _following(self, start: int, most: int) -> list[int]:
        following = self.tokens[start : start + most].tolist()
        return following[: following.index(_END)] if _END in following else following


class _Tenant:
    """What was answered to a tenant: two texts, of which the older one goes when the newer one is full."""

    def __init__(self) -> None:
        self.texts = [Text(), Text()]  # the newer one first

    def __len__(self) -> int:
        """The tokens that it counts for."""
        return _TENANT_TOKENS + sum(len(text) for text in self.texts)


class TextStore:
    """The texts of all tenants, in at most `num_bytes`. Answers wait until there is time to take them in. With a `path`
    it begins with what that file holds of the `target`, and is written to it by `close`, and every few minutes in which
    answers came by a thread that nobody waits for. Raises ConfigError as TextFile does."""

    def __init__(self, num_bytes: int, path: Path | None = None, target: Mapping[str, Any] | None = None) -> None:
        self.num_added = 0  # answers
        self._most = num_bytes // _BYTES_PER_TOKEN  # tokens
        self._tenants: OrderedDict[bytes, _Tenant] = OrderedDict()  # least recently used first
        self._num_tokens = 0
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        self._num_waiting = 0
        self._key = new_key()
        self._file: TextFile | None = None
        if path is not None:
            self._file = TextFile(path.expanduser(), dict(target or {}))
            self._key, texts = self._file.load()
            self.restore(texts)
        self._saver: threading.Thread | None = None
        self._closing = threading.Event()
        self._saved_at = time.monotonic()

    def tenant(self, salt: bytes) -> bytes:
        """The name of a salt's tenant, from which nobody finds the salt."""
        return tenant_name(self._key, salt)

    def save_now_and_then(self) -> None:
        """Begin to save, where it is time."""
        if self._file is not None and time.monotonic() - self._saved_at >= _SAVE_EVERY_S:
            self._saved_at = time.monotonic()
            if self._saver is None or not self._saver.is_alive():
                texts = self.texts_of_all()
                self._saver = threading.Thread(target=self._save, args=(texts,), name="specserve-suffix", daemon=True)
                self._saver.start()

    def close(self) -> None:
        """Save what there is, the answers that still wait to be taken in, too."""
        self._closing.set()
        if self._saver is not None:
            self._saver.join()  # it pauses no more
        self.take(_MOST_WAITING)
        if self._file is not None and self.num_added:
            self._file.save(self._key, self.texts_of_all(), lambda: None)

    def _save(self, texts: Iterable[tuple[bytes, array[int]]]) -> None:
        """On a thread of its own, which leaves the interpreter to the engine most of the time."""
        assert self._file is not None
        try:
            self._file.save(self._key, texts, lambda: self._closing.wait(_PAUSE_S))
        except (OSError, NotImplementedError) as error:  # the latter where a file system has no locks
            _log.warning("%s could not be written; the next try is in some minutes: %s.", self._file.path, error)

    def add(self, tenant: bytes, answer: list[int]) -> None:
        if not self._most:
            return
        self.num_added += 1
        self._waiting.append((tenant, [*answer, _END]))
        self._num_waiting += len(answer) + 1
        while self._num_waiting > _MOST_WAITING:
            self._num_waiting -= len(self._waiting.popleft()[1])

    def take(self, num_tokens: int) -> None:
        """Take in about so many tokens."""
        while self._waiting and num_tokens > 0:
            tenant, answer = self._waiting.popleft()
            now, later = answer[:num_tokens], answer[num_tokens:]
            if later:
                self._waiting.appendleft((tenant, later))
            self._num_waiting -= len(now)
            num_tokens -= len(now)
            self._extend(tenant, now)

    def texts(self, tenant: bytes) -> list[Text]:
        found = self._tenants.get(tenant)
        if found is None:
            return []
        self._tenants.move_to_end(tenant)
        return found.texts

    def texts_of_all(self) -> Iterator[tuple[bytes, array[int]]]:
        """All tenants' texts, the least recently used tenant first, of each the older text first. Which they are is
        settled by the call; the texts may grow while others walk over them, which takes little of the interpreter."""
        tenants = list(self._tenants.items())
        return ((name, text.tokens) for name, tenant in tenants for text in reversed(tenant.texts))

    def restore(self, texts: list[tuple[bytes, Ids]]) -> None:
        """Take in what `texts_of_all` gave, as far as there is room for the most recently used."""
        first, room = len(texts), self._most
        while first and room > 0:
            first -= 1
            room -= len(texts[first][1])
        at_once = max(1, self._most // 16)
        for name, found in texts[first:]:
            tokens = found[-self._most :].tolist()
            if tokens and tokens[-1] != _END:  # saved in the midst of an answer
                tokens.append(_END)
            for start in range(0, max(1, len(tokens)), at_once):
                self._extend(name, tokens[start : start + at_once], is_new=start == 0)

    def _extend(self, name: bytes, tokens: list[int], is_new: bool = False) -> None:
        tenant = self._tenants.pop(name, None)
        if tenant is None:
            tenant = _Tenant()
        else:
            self._num_tokens -= len(tenant)
        self._tenants[name] = tenant  # the most recently used one
        newer = tenant.texts[0]
        if is_new or len(newer) + len(tokens) > self._most // 2:
            tenant.texts = [Text(), newer]
            newer = tenant.texts[0]
        newer.stop = 0
        newer.extend(tokens, len(tokens))
        self._num_tokens += len(tenant)
        while self._num_tokens > self._most:
            self._num_tokens -= len(self._tenants.popitem(last=False)[1])
