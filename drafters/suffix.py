"""Suffix lookup: continue as texts did after what the sequence ends with, its own text and earlier answers to the same
tenant. Several continuations become a tree.

Ideas: SuffixDecoding (arXiv 2411.04975), here over chains of places with the same pair of tokens, as compressors of the
LZ77 family keep them (RFC 1951, section 4).
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence as Many
from typing import NamedTuple

import numpy as np

from specserve.errors import ConfigError
from specserve.speculation.base import DraftContext, DraftRequest, Needs, SequenceView, StepReport, TokensView
from specserve.speculation.ngrams import PerRequest
from specserve.types import Draft

_TAKEN_PER_STEP = 2**11  # tokens of prompts and of ended answers, for all sequences together: about 1 ms
_MOST_PLACES = 12  # of one text that are looked at
_LONGEST = 32  # tokens that two places are compared by
_BYTES_PER_TOKEN = 160  # of a text of which no pair comes twice
_DOUBT = 4.0  # weight of what never occurred, against a place's length squared
_MOST_WAITING = 2**18  # tokens of ended answers
_END = -1  # of an answer: no token


class SuffixDrafter:
    """A tree of what followed earlier, weighed by how long the tokens before agree.

    Each tenant (salt) has a store of what was answered to it, in which newer texts take the place of older ones; the
    stores of all tenants together take `store_mib` MiB, and those that were not used for longest go first. A begin
    costs O(1), a step O(new tokens), a proposal a few look-ups: long prompts and ended answers are taken in bit by bit.
    Raises ConfigError unless 0 <= store_mib < 2^20.
    """

    def __init__(self, context: DraftContext, store_mib: float = 64.0) -> None:
        if not isinstance(store_mib, (int, float)) or isinstance(store_mib, bool) or not 0 <= store_mib < 2**20:
            raise ConfigError(f"store_mib is {store_mib!r}; it must be a number of MiB from 0 to 2^20.")
        self.needs = Needs(memory_bytes=int(store_mib * 2**20))
        self._prompts: PerRequest[_Text] = PerRequest()
        self._texts: dict[SequenceView, tuple[_Text, _Text]] = {}  # of each sequence, the prompt's and the output's
        self._store = _Store(self.needs.memory_bytes // _BYTES_PER_TOKEN)

    def begin(self, seq: SequenceView) -> None:
        self._texts[seq] = self._prompts.take(seq, _Text), _Text(max(0, seq.num_prompt - _LONGEST))

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        left = _TAKEN_PER_STEP
        for seq, _ in requests:
            prompt, output = self._texts[seq]
            left -= prompt.extend(seq.tokens, min(prompt.stop + max(left, 0), seq.num_prompt))
            output.extend(seq.tokens, len(seq.tokens))
        self._store.take(max(left, 0))
        return [self._propose(seq, most) for seq, most in requests]

    def observe(self, step: StepReport) -> None:
        """Tokens are taken in when a draft is asked for."""

    def end(self, seq: SequenceView) -> None:
        del self._texts[seq]
        self._prompts.give(seq)
        self._store.add(seq.salt, seq.tokens[max(0, seq.num_prompt - 2) :])

    def _propose(self, seq: SequenceView, most: int) -> Draft:
        newest = seq.tokens[-_LONGEST:]
        prompt, output = self._texts[seq]
        places = [_repeated(place, most) for place in output.places(newest, most)]
        places += prompt.places(newest, most)
        for text in self._store.texts(seq.salt):
            places += text.places(newest, most)
        for text in () if places else (output, prompt, *self._store.texts(seq.salt)):
            if (place := text.single(newest[-1], most)) is not None:
                return tree([_repeated(place, most)], most)
        return tree(places, most)


class Place(NamedTuple):
    """An earlier place: how many tokens before it agree with the newest, and what followed."""

    length: int
    following: list[int]


def _repeated(place: Place, most: int) -> Place:
    """A place so near the end that its continuation is what is being written repeats, as in a loop."""
    following = place.following
    return Place(place.length, (following * -(-most // len(following)))[:most] if following else [])


def tree(places: Iterable[Place], most: int) -> Draft:
    """The `most` likeliest nodes of all continuations. A token's share of its siblings' weight, and of doubt, is that
    of the places that have it, each counted as the square of its length."""
    children: list[dict[int, int]] = [{}]  # of the root, then of every node: token -> node
    weights = [0.0]  # of the places that go through a node
    for place in places:
        node, weight = 0, float(place.length**2)
        for token in place.following:
            child = children[node].setdefault(token, len(children))
            if child == len(children):
                children.append({})
                weights.append(0.0)
            weights[child] += weight
            node = child
    tokens: list[int] = []
    parents: list[int] = []
    likely = [(-1.0, 0, 0, -1)]  # minus the probability, node, its token, its parent in the draft
    while likely and len(tokens) < most:
        share, node, token, parent = heapq.heappop(likely)
        if node:
            tokens.append(token)
            parents.append(parent)
        at = len(tokens) - 1
        whole = _DOUBT + sum(weights[child] for child in children[node].values())
        for token, child in children[node].items():
            heapq.heappush(likely, (share * weights[child] / whole, child, token, at))
    return Draft(np.array(tokens, np.int32), np.array(parents, np.int32))


class _Text:
    """A growing text, and for each pair of neighbours the place before that had the same."""

    def __init__(self, start: int = 0) -> None:
        self.stop = start  # of the source, what was taken in
        self._tokens = array("i")
        self._before = array("i")  # of each token and the one before it, where they were last; -1: nowhere
        self._last: dict[int, int] = {}
        self._single: dict[int, int] = {}  # where each token was last, but for the newest

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, source: TokensView | Many[int], stop: int) -> int:
        """Take in what the source has up to `stop`; returns how many tokens these were."""
        new = source[self.stop : stop]
        for token in new:
            self._add(token)
        self.stop += len(new)
        return len(new)

    def _add(self, token: int) -> None:
        at = len(self._tokens)
        pair = self._tokens[-1] << 32 | token if at else -1
        if at:
            self._single[self._tokens[-1]] = at - 1
        self._tokens.append(token)
        self._before.append(self._last.get(pair, -1))
        self._last[pair] = at

    def places(self, newest: list[int], most: int) -> Iterator[Place]:
        """Where `newest` ends were before, the last first, with up to `most` tokens each that followed."""
        at = self._last.get(newest[-2] << 32 | newest[-1], -1) if len(newest) > 1 else -1
        for _ in range(_MOST_PLACES):
            if at < 0:
                return
            if at + 1 < len(self._tokens):
                yield Place(self._length(at, newest), self._following(at + 1, most))
            at = self._before[at]

    def single(self, token: int, most: int) -> Place | None:
        """Where this one token was last."""
        at = self._single.get(token)
        return None if at is None else Place(1, self._following(at + 1, most))

    def _length(self, at: int, newest: list[int]) -> int:
        tokens, most = self._tokens, min(at + 1, len(newest))
        for length in range(2, most):
            if tokens[at - length] != newest[-1 - length]:
                return length
        return max(most, 2)

    def _following(self, start: int, most: int) -> list[int]:
        following = self._tokens[start : start + most].tolist()
        return following[: following.index(_END)] if _END in following else following


class _Tenant:
    """What was answered to a tenant: two texts, of which the older one goes when the newer one is full."""

    def __init__(self) -> None:
        self.texts = [_Text(), _Text()]  # the newer one first

    def __len__(self) -> int:
        return sum(len(text) for text in self.texts)


class _Store:
    """The texts of all tenants, at most `most` tokens. Answers wait until there is time to take them in."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tenants: OrderedDict[bytes, _Tenant] = OrderedDict()  # least recently used first
        self._num_tokens = 0
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        self._num_waiting = 0

    def add(self, salt: bytes, answer: list[int]) -> None:
        if not self._most:
            return
        self._waiting.append((salt, [*answer, _END]))
        self._num_waiting += len(answer) + 1
        while self._num_waiting > _MOST_WAITING:
            self._num_waiting -= len(self._waiting.popleft()[1])

    def take(self, num_tokens: int) -> None:
        """Take in about so many tokens."""
        while self._waiting and num_tokens > 0:
            salt, answer = self._waiting.popleft()
            now, later = answer[:num_tokens], answer[num_tokens:]
            if later:
                self._waiting.appendleft((salt, later))
            self._num_waiting -= len(now)
            num_tokens -= len(now)
            self._extend(salt, now)

    def texts(self, salt: bytes) -> list[_Text]:
        tenant = self._tenants.get(salt)
        if tenant is None:
            return []
        self._tenants.move_to_end(salt)
        return tenant.texts

    def _extend(self, salt: bytes, tokens: list[int]) -> None:
        tenant = self._tenants.setdefault(salt, _Tenant())
        self._tenants.move_to_end(salt)
        before = len(tenant)
        newer = tenant.texts[0]
        if len(newer) + len(tokens) > self._most // 2:
            tenant.texts = [_Text(), newer]
            newer = tenant.texts[0]
        newer.stop = 0
        newer.extend(tokens, len(tokens))
        self._num_tokens += len(tenant) - before
        while self._num_tokens > self._most:
            self._num_tokens -= len(self._tenants.popitem(last=False)[1])
