"""What a sampler is asked of a step, and what it says, by value: both may be sent between where it runs and where
sequences are kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Many
from typing import NamedTuple

from specserve.sampling.edits import Edits, edits_of
from specserve.types import Draft, Failure, SamplingParams, ScheduledSeq, TokenLogprobs, Verdict


def num_logit_rows(sampled: Iterable[ScheduledSeq | SampledSeq]) -> int:
    """How many rows of logits these sequences have together."""
    return sum(len(each.draft) + 1 for each in sampled)


class SampledSeq(NamedTuple):
    """A sequence whose next tokens are chosen. It has len(draft) + 1 rows of logits: the first for what follows its
    last token, row 1 + i for what follows draft node i."""

    draft: Draft
    params: SamplingParams
    seed: int
    position: int  # of the first token that is chosen, in prompt and output
    logits_start: int
    edits: Edits | None
    num_candidates: int = 0  # of a beam: how many tokens that may come are to be told; 0: it is none


class ScoredTokens(NamedTuple):
    """Tokens of a prompt whose log-probabilities are asked for, one row of logits each, with the k best."""

    tokens: list[int]
    k: int


class SamplingInput(NamedTuple):
    """What is asked of the logits of a step: the rows of `seqs`, then those of `scored`, in their order."""

    seqs: Many[SampledSeq] = ()
    scored: Many[ScoredTokens] = ()

    @classmethod
    def of(cls, sampled: Iterable[ScheduledSeq], scored: Iterable[ScoredTokens] = ()) -> SamplingInput:
        seqs = []
        for each in sampled:
            seq, edits = each.seq, edits_of(each.seq, each.draft)
            most = 0 if seq.beams is None else seq.beams.num_candidates
            position = each.start + each.num_new
            seqs.append(SampledSeq(each.draft, seq.params, seq.seed, position, each.logits_start, edits, most))
        return cls(seqs, [*scored])


NOTHING = SamplingInput()


class SamplingOutput(NamedTuple):
    """One result for each of a SamplingInput's sequences, or the reason why it cannot go on; and the log-probabilities
    of each of its scored tokens."""

    results: Many[Verdict | Failure]
    scores: Many[list[TokenLogprobs]]
