"""Suffix lookup: continue as texts did after what the sequence ends with, its own text and earlier answers to the same
tenant. Several continuations become a tree.

Ideas: SuffixDecoding (arXiv 2411.04975), here over chains of places with the same pair of tokens, as compressors of the
LZ77 family keep them (RFC 1951, section 4).
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence as Many
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specserve.checkpoint.textfile import TextFile, new_key, tenant_name
from specserve.errors import ConfigError
from specserve.speculation.base import DraftContext, DraftRequest, Needs, SequenceView, StepReport
from specserve.speculation.ngrams import PerRequest, likelihood
from specserve.types import Draft, Ids

PRIORITY = 30  # part of "auto"

_log = logging.getLogger(__name__)

_STORE_MIB = 64.0
_SAVE_EVERY_S = 180.0
_PAUSE_S = 1e-3  # of a save beside steps, after a fraction of that
_TAKEN_PER_STEP = 2**11  # tokens of prompts and of ended answers, for all sequences together: about 1 ms
_MOST_PLACES = 12  # of one text that are looked at
_LONGEST = 32  # tokens that two places are compared by
_BYTES_PER_TOKEN = 160  # of a text of which no pair comes twice
_TENANT_TOKENS = 10  # that a tenant counts for besides its texts': 1.6 KB
_MOST_WAITING = 2**18  # tokens of ended answers
_END = -1  # of an answer: no token


class SuffixDrafter:
    """A tree of what followed earlier, weighed by how long the tokens before agree.

    Each tenant (salt) has a store of what was answered to it, in which newer texts take the place of older ones; the
    stores of all tenants together take `store_mib` MiB, and those that were not used for longest go first. A begin
    costs O(1), a step O(new tokens), a proposal a few look-ups: long prompts and ended answers are taken in bit by bit.

    `store_mib` is 64, but no more than what is left for a drafter that comes after the KV cache has been sized. With
    `store_path` the store is read from that file now. It is written to it when the engine closes, and every few minutes
    in which answers came by a thread that steps do not wait for. Raises ConfigError unless 0 <= store_mib < 2^20, and
    for a file that is of another model or cannot be read or written.
    """

    def __init__(
        self, context: DraftContext, store_mib: float | None = None, store_path: str | Path | None = None
    ) -> None:
        if store_mib is None:
            store_mib = _STORE_MIB if context.memory_bytes is None else min(_STORE_MIB, context.memory_bytes / 2**20)
        if not isinstance(store_mib, (int, float)) or isinstance(store_mib, bool) or not 0 <= store_mib < 2**20:
            raise ConfigError(f"store_mib is {store_mib!r}; it must be a number of MiB from 0 to 2^20.")
        if store_path is not None and (not isinstance(store_path, (str, Path)) or not str(store_path)):
            raise ConfigError(f"store_path is {store_path!r}; it must be the path of a file.")
        self.needs = Needs(memory_bytes=int(store_mib * 2**20), observes=False)
        self._prompts: PerRequest[_Text] = PerRequest()
        self._texts: dict[SequenceView, _Sources] = {}
        self._store = _Store(self.needs.memory_bytes // _BYTES_PER_TOKEN)
        self._key = new_key()
        self._file: TextFile | None = None
        if store_path is not None:
            target = {name: getattr(context, name) for name in ("vocab_size", "hidden_size", "num_layers")}
            self._file = TextFile(Path(store_path).expanduser(), target)
            self._key, texts = self._file.load()
            self._store.restore(texts)
        self._saver: threading.Thread | None = None
        self._closing = threading.Event()
        self._saved_at = time.monotonic()

    def begin(self, seq: SequenceView) -> None:
        output = _Text(max(0, seq.num_prompt - _LONGEST))
        self._texts[seq] = _Sources(self._prompts.take(seq, _Text), output, tenant_name(self._key, seq.salt))

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        left = _TAKEN_PER_STEP
        for seq, _ in requests:
            prompt, output, _ = self._texts[seq]
            left -= prompt.extend(seq.tokens, min(prompt.stop + max(left, 0), seq.num_prompt))
            output.extend(seq.tokens, len(seq.tokens))
        self._store.take(max(left, 0))
        return [self._propose(seq, most) for seq, most in requests]

    def observe(self, step: StepReport) -> None:
        """Tokens are taken in when a draft is asked for."""

    def end(self, seq: SequenceView) -> None:
        tenant = self._texts.pop(seq).tenant
        self._prompts.give(seq)
        if not seq.is_private:
            self._store.add(tenant, seq.tokens[max(0, seq.num_prompt - 2) :])
        if self._file is not None and time.monotonic() - self._saved_at >= _SAVE_EVERY_S:
            self._saved_at = time.monotonic()
            if self._saver is None or not self._saver.is_alive():
                texts = self._store.texts_of_all()
                self._saver = threading.Thread(target=self._save, args=(texts,), name="specserve-suffix", daemon=True)
                self._saver.start()

    def close(self) -> None:
        """Save what there is, the answers that still wait to be taken in, too."""
        self._closing.set()
        if self._saver is not None:
            self._saver.join()  # it pauses no more
        self._store.take(_MOST_WAITING)
        if self._file is not None and self._store.num_added:
            self._file.save(self._key, self._store.texts_of_all(), lambda: None)

    def _save(self, texts: Iterable[tuple[bytes, array[int]]]) -> None:
        """On a thread of its own, which leaves the interpreter to the engine most of the time."""
        assert self._file is not None
        try:
            self._file.save(self._key, texts, lambda: self._closing.wait(_PAUSE_S))
        except (OSError, NotImplementedError) as error:  # the latter where a file system has no locks
            _log.warning("%s could not be written; the next try is in some minutes: %s.", self._file.path, error)

    def _propose(self, seq: SequenceView, most: int) -> Draft:
        newest = seq.tokens[-_LONGEST:]
        prompt, output, tenant = self._texts[seq]
        stored = self._store.texts(tenant)
        places = [_repeated(place, most) for place in output.places(newest, most)]
        places += prompt.places(newest, most)
        others = [place for text in stored for place in text.places(newest, most)]
        for text in () if places or others else (output, prompt, *stored):
            if (place := text.single(newest[-1], most)) is not None and place.following:
                found = [_repeated(place, most)]
                return tree((), most, found) if text in stored else tree(found, most)
        return tree(places, most, others)


class Place(NamedTuple):
    """An earlier place: how many tokens before it agree with the newest, and what followed."""

    length: int
    following: list[int]


def _repeated(place: Place, most: int) -> Place:
    """A place so near the end that its continuation is what is being written repeats, as in a loop."""
    following = place.following
    return Place(place.length, (following * -(-most // len(following)))[:most] if following else [])


def tree(places: Iterable[Place], most: int, others: Iterable[Place] = ()) -> Draft:
    """The `most` likeliest nodes of all continuations, `others` in answers to other requests. How likely a node is,
    given its parent, is its share of its siblings, the places that go through each counted by the square of their
    length, times `likelihood` of the longest of its places: its length and the nodes before agree."""
    children: list[dict[int, int]] = [{}]  # of the root, then of every node: token -> node
    weights = [0.0]  # of the places that go through a node
    longest = [0]
    num_own = 0  # nodes, the first ones, that the request's own text put forward
    for place, is_own in [*((place, True) for place in places), *((place, False) for place in others)]:
        node, weight = 0, float(place.length**2)
        for length, token in enumerate(place.following, place.length):
            child = children[node].setdefault(token, len(children))
            if child == len(children):
                children.append({})
                weights.append(0.0)
                longest.append(0)
            weights[child] += weight
            longest[child] = max(longest[child], length)
            node = child
        num_own = len(children) if is_own else num_own
    own: list[int] = []
    tokens: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    likely = [(-1.0, 0, 0, -1, 1.0)]  # minus the probability, node, its token, its parent in the draft, given that
    while likely and len(tokens) < most:
        path, node, token, parent, given = heapq.heappop(likely)
        if node:
            own += [len(tokens)] * (node < num_own)
            tokens.append(token)
            parents.append(parent)
            confidence.append(given)
        at = len(tokens) - 1
        whole = sum(weights[child] for child in children[node].values())
        for token, child in children[node].items():
            given = weights[child] / whole * likelihood(longest[child])
            heapq.heappush(likely, (path * given, child, token, at, given))
    sure = np.array(confidence, np.float32)
    return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), confidence=sure, own=own)


class _Text:
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


class _Sources(NamedTuple):
    """Where the drafts of a sequence come from."""

    prompt: _Text
    output: _Text
    tenant: bytes


class _Tenant:
    """What was answered to a tenant: two texts, of which the older one goes when the newer one is full."""

    def __init__(self) -> None:
        self.texts = [_Text(), _Text()]  # the newer one first

    def __len__(self) -> int:
        """The tokens that it counts for."""
        return _TENANT_TOKENS + sum(len(text) for text in self.texts)


class _Store:
    """The texts of all tenants, at most `most` tokens. Answers wait until there is time to take them in."""

    def __init__(self, most: int) -> None:
        self.num_added = 0  # answers
        self._most = most
        self._tenants: OrderedDict[bytes, _Tenant] = OrderedDict()  # least recently used first
        self._num_tokens = 0
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        self._num_waiting = 0

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

    def texts(self, tenant: bytes) -> list[_Text]:
        found = self._tenants.get(tenant)
        if found is None:
            return []
        self._tenants.move_to_end(tenant)
        return found.texts

    def texts_of_all(self) -> Iterator[tuple[bytes, array[int]]]:
        """All tenants' texts, the least recently used tenant first, of each the older text first. Who is there is
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
            tenant.texts = [_Text(), newer]
            newer = tenant.texts[0]
        newer.stop = 0
        newer.extend(tokens, len(tokens))
        self._num_tokens += len(tenant)
        while self._num_tokens > self._most:
            self._num_tokens -= len(self._tenants.popitem(last=False)[1])
