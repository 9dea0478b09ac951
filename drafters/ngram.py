"""Prompt lookup: continue as the sequence itself did after the last occurrence of its newest n tokens.

Method: prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding); options named as in vLLM.
"""

from __future__ import annotations

import numpy as np

from specserve.errors import ConfigError
from specserve.speculation.base import DraftContext, DraftRequest, Needs, SequenceView, StepReport
from specserve.speculation.ngrams import NGRAMS_PER_STEP, NgramIndex, PerRequest, likelihood, suffix_keys
from specserve.types import Draft


class NgramDrafter:
    """Chains looked up in the sequence's own tokens: the longest n-gram first, of equal ones the most recent.

    n runs from `prompt_lookup_max` down to `prompt_lookup_min`. A match that reaches the end of the sequence repeats
    (the overlapping copy of LZ77), so a loop of any period fills the budget. A begin costs O(1), a step O(new
    tokens), a proposal O(1) look-ups. The completions of a request share what is known of its prompt, of which about a
    thousand tokens are taken in with each step's proposals; until then drafts come from those. Raises ConfigError
    unless 1 <= prompt_lookup_min <= prompt_lookup_max.
    """

    needs = Needs()

    def __init__(self, context: DraftContext, prompt_lookup_max: int = 4, prompt_lookup_min: int = 1) -> None:
        for name, value in (("prompt_lookup_max", prompt_lookup_max), ("prompt_lookup_min", prompt_lookup_min)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1.")
        if prompt_lookup_min > prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min is {prompt_lookup_min}, above prompt_lookup_max, {prompt_lookup_max}."
            )
        self._sizes = range(prompt_lookup_max, prompt_lookup_min - 1, -1)
        self._prompts: PerRequest[NgramIndex] = PerRequest()
        self._indexes: dict[SequenceView, _Index] = {}

    def begin(self, seq: SequenceView) -> None:
        prompt = self._prompts.take(seq, lambda: NgramIndex(seq.tokens, seq.num_prompt, self._sizes))
        self._indexes[seq] = _Index(prompt, seq.num_prompt, self._sizes)
        self._indexes[seq].extend(seq.tokens)

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        left = NGRAMS_PER_STEP
        for seq, _ in requests:
            left -= self._indexes[seq].prompt.extend(left) if left > 0 else 0
        return [self._continue(seq.tokens, *self._indexes[seq].find(seq.tokens), most) for seq, most in requests]

    def observe(self, step: StepReport) -> None:
        for each in step.seqs:
            if each.verdict is not None:
                self._indexes[each.seq].extend(each.seq.tokens)

    def end(self, seq: SequenceView) -> None:
        del self._indexes[seq]
        self._prompts.give(seq)

    def _continue(self, tokens: list[int], size: int, start: int, most: int) -> Draft:
        if not size:
            return Draft.empty()
        following = tokens[start : start + most]
        confidence = np.array([likelihood(length) for length in range(size, size + most)], np.float32)
        return Draft.chain((following * -(-most // len(following)))[:most], confidence=confidence, own=range(most))


class _Index:
    """Where each n-gram of a growing list last occurred, for every n in `sizes` (longest first): its own of those that
    end after the prompt, which go first, and the shared one of those within it."""

    def __init__(self, prompt: NgramIndex, num_prompt: int, sizes: range) -> None:
        self.prompt = prompt
        self._sizes = sizes
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its last occurrence
        self._indexed = num_prompt - 1  # n-grams that end before this index, or at it, are in

    def extend(self, tokens: list[int]) -> None:
        """Take in what is new. The n-grams that end with the last token wait: nothing follows them yet."""
        for end in range(self._indexed + 1, len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, len(tokens) - 1)

    def find(self, tokens: list[int]) -> tuple[int, int]:
        """The longest n-gram that ends `tokens` and occurred earlier: n, and the index of the token after its last
        occurrence; (0, 0) if there is none."""
        self.extend(tokens)
        keys: list[int] = []
        for size in self._sizes:
            if size > len(tokens):
                continue
            start = self._after.get(tuple(tokens[-size:]))
            if start is not None:
                return size, start
            keys = keys or suffix_keys(tokens, size)
            if ends := self.prompt.ends(tokens, keys, size):
                return size, ends[-1]
        return 0, 0
