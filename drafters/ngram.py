"""Prompt lookup: continue as the sequence itself did after the last occurrence of its newest n tokens.

Method: prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding); options named as in vLLM.
"""

from __future__ import annotations

from operator import itemgetter
from weakref import WeakValueDictionary

import numpy as np

from specserve.speculation.base import DraftContext, DraftRequest, Needs, SequenceView, StepReport
from specserve.speculation.retrieval import NGRAMS_PER_STEP, NgramIndex, checked_sizes, likelihood
from specserve.types import Draft


class NgramDrafter:
    """Chains looked up in the sequence's own tokens: the longest n-gram first, of equal ones the most recent.

    n runs from `prompt_lookup_max` down to `prompt_lookup_min`. A match that reaches the end of the sequence repeats
    (the overlapping copy of LZ77), so a loop of any period fills the budget. A begin costs O(1), a proposal O(new
    tokens). The completions of a request share what is known of its prompt, of which about a thousand tokens are taken
    in with each step's proposals; until then drafts come from those. Raises ConfigError unless
    1 <= prompt_lookup_min <= prompt_lookup_max.
    """

    needs = Needs(observes=False)

    def __init__(self, context: DraftContext, prompt_lookup_max: int = 4, prompt_lookup_min: int = 1) -> None:
        self._sizes = checked_sizes("prompt_lookup_min", prompt_lookup_min, "prompt_lookup_max", prompt_lookup_max)
        self._prompts: WeakValueDictionary[object, NgramIndex] = WeakValueDictionary()  # by request
        self._indexes: dict[SequenceView, tuple[NgramIndex, NgramIndex]] = {}  # of the prompt, of what follows

    def begin(self, seq: SequenceView) -> None:
        prompt = self._prompts.setdefault(seq.request, NgramIndex(self._sizes))
        self._indexes[seq] = prompt, NgramIndex(self._sizes, seq.num_prompt - 1)

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        left = max(1, NGRAMS_PER_STEP // len(self._sizes))  # tokens
        for seq, _ in requests:
            prompt, output = self._indexes[seq]
            left -= prompt.extend(seq.tokens, min(prompt.last + left, seq.num_prompt - 1))
            output.extend(seq.tokens, len(seq.tokens) - 1)
        return [self._continue(seq, most) for seq, most in requests]

    def observe(self, step: StepReport) -> None:
        """Tokens are taken in when a draft is asked for."""

    def end(self, seq: SequenceView) -> None:
        del self._indexes[seq]

    def _continue(self, seq: SequenceView, most: int) -> Draft:
        newest = tuple(seq.tokens[-self._sizes[0] :])
        prompt, output = self._indexes[seq]
        size, ends = output.find(newest)
        if size < self._sizes[0]:
            size, ends = max((size, ends), prompt.find(newest), key=itemgetter(0))  # of equal ones the first
        if not ends:
            return Draft.empty()
        following = seq.tokens[ends[-1] : ends[-1] + most]
        confidence = np.array([likelihood(length) for length in range(size, size + most)], np.float32)
        return Draft.chain((following * -(-most // len(following)))[:most], confidence=confidence, own=range(most))
