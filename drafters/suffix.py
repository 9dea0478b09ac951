"""Suffix lookup: continue as texts did after what the sequence ends with, its own text and earlier answers to the same
tenant. Several continuations become a tree.

Ideas: SuffixDecoding (arXiv 2411.04975), here over chains of places with the same pair of tokens, as compressors of the
LZ77 family keep them (RFC 1951, section 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np

from specserve.checkpoint.textstore import Place, Text, TextStore
from specserve.errors import ConfigError
from specserve.speculation.base import DraftContext, DraftRequest, Needs, SequenceView, StepReport
from specserve.speculation.retrieval import checked_mib, likeliest_tree, likelihood
from specserve.types import Draft

PRIORITY = 30  # part of "auto"

_STORE_MIB = 64.0  # 400,000 tokens
# Tokens of prompts and of ended answers that are taken in for all sequences of a step together: about 1 ms. A quarter
# and four times as many replay the same with prompts of 300 tokens.
_TAKEN_PER_STEP = 2**11
_LONGEST = 32  # tokens that two places are compared by: a bound of the work, 4 to 64 replay the same


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
        store_mib = checked_mib("store_mib", store_mib, _STORE_MIB, 0, context)
        if store_path is not None and (not isinstance(store_path, (str, Path)) or not str(store_path)):
            raise ConfigError(f"store_path is {store_path!r}; it must be the path of a file.")
        self.needs = Needs(memory_bytes=int(store_mib * 2**20), observes=False)
        self._prompts: WeakValueDictionary[object, Text] = WeakValueDictionary()  # by request
        self._texts: dict[SequenceView, tuple[Text, Text, bytes]] = {}  # prompt, output, and whose these are
        if store_path is None:
            self._store = TextStore(self.needs.memory_bytes)
        else:
            target = {name: getattr(context, name) for name in ("vocab_size", "hidden_size", "num_layers")}
            self._store = TextStore(self.needs.memory_bytes, Path(store_path), target)

    def begin(self, seq: SequenceView) -> None:
        prompt, output = self._prompts.setdefault(seq.request, Text()), Text(max(0, seq.num_prompt - _LONGEST))
        self._texts[seq] = prompt, output, self._store.tenant(seq.salt)

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        left = _TAKEN_PER_STEP
        for seq, _ in requests:
            prompt, output, _ = self._texts[seq]
            left -= prompt.extend(seq.tokens, min(prompt.stop + left, seq.num_prompt))
            output.extend(seq.tokens, len(seq.tokens))
        self._store.take(left)
        return [self._propose(seq, most) for seq, most in requests]

    def observe(self, step: StepReport) -> None:
        """Tokens are taken in when a draft is asked for."""

    def end(self, seq: SequenceView) -> None:
        *_, tenant = self._texts.pop(seq)
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
        if places or others:
            return tree(places, most, others)
        for text in (output, prompt, *stored):
            if (place := text.single(newest[-1], most)) is not None and place.following:
                found = [_repeated(place, most)]
                return tree((), most, found) if text in stored else tree(found, most)
        return Draft.empty()


def _repeated(place: Place, most: int) -> Place:
    """A place so near the end that its continuation is what is being written repeats, as in a loop."""
    following = place.following
    return Place(place.length, (following * -(-most // len(following)))[:most] if following else [])


def tree(places: Iterable[Place], most: int, others: Iterable[Place] = ()) -> Draft:
    """The `most` likeliest nodes of all continuations, `others` in answers to other requests. How likely a node is,
    given its parent, is its share of its siblings, the places that go through each counted by the square of their
    length, times `likelihood` of the longest of its places: its length and the nodes before agree."""
    children: list[dict[int, int]] = [{}]  # of the root, then of every node: token -> node
    tokens, weights, longest = [-1], [0], [0]  # the last two of the places that go through a node
    num_own = 0  # nodes, the first ones, that the request's own text put forward
    for found in (places, others):
        for place in found:
            node, weight = 0, place.length**2
            for length, token in enumerate(place.following, place.length):
                child = children[node].setdefault(token, len(tokens))
                if child == len(tokens):
                    children.append({})
                    tokens.append(token)
                    weights.append(0)
                    longest.append(0)
                weights[child] += weight
                longest[child] = max(longest[child], length)
                node = child
        num_own = num_own or len(tokens)

    def follow(node: int) -> Iterator[tuple[float, int]]:
        below = children[node].values()
        whole = sum([weights[child] for child in below])
        likely = [(weights[child] / whole * likelihood(longest[child]), child) for child in below]
        return iter(sorted(likely, key=lambda each: -each[0]) if len(likely) > 1 else likely)

    nodes, parents, confidence = likeliest_tree(follow(0), follow, most)
    own = [i for i, node in enumerate(nodes) if node < num_own]
    return Draft(np.array([tokens[node] for node in nodes], np.int32), parents, confidence=confidence, own=own)
