"""Suffix lookup: continue as texts did after what the sequence ends with, its own text and earlier answers to the same
tenant. Several continuations become a tree.

Ideas: SuffixDecoding (arXiv 2411.04975), here over chains of places with the same pair of tokens, as compressors of the
LZ77 family keep them (RFC 1951, section 4).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specserve.checkpoint.textstore import Place, Text, TextStore
from specserve.errors import ConfigError
from specserve.speculation.base import DraftContext, DraftRequest, Needs, SequenceView, StepReport
from specserve.speculation.ngrams import PerRequest, likelihood
from specserve.types import Draft

PRIORITY = 30  # part of "auto"

_STORE_MIB = 64.0
_TAKEN_PER_STEP = 2**11  # tokens of prompts and of ended answers, for all sequences together: about 1 ms
_LONGEST = 32  # tokens that two places are compared by


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
        self._prompts: PerRequest[Text] = PerRequest()
        self._texts: dict[SequenceView, _Sources] = {}
        path, names = None if store_path is None else Path(store_path), ("vocab_size", "hidden_size", "num_layers")
        target = {name: getattr(context, name) for name in names if path is not None}
        self._store = TextStore(self.needs.memory_bytes, path, target)

    def begin(self, seq: SequenceView) -> None:
        output = Text(max(0, seq.num_prompt - _LONGEST))
        self._texts[seq] = _Sources(self._prompts.take(seq, Text), output, self._store.tenant(seq.salt))

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
        self._store.save_now_and_then()

    def close(self) -> None:
        """Save what there is, the answers that still wait to be taken in, too."""
        self._store.close()

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


class _Sources(NamedTuple):
    """Where the drafts of a sequence come from."""

    prompt: Text
    output: Text
    tenant: bytes
