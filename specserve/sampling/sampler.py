"""Judges the drafts of a whole batch in one pass over its rows: what each sequence emits, or why it cannot go on."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specserve.config import VERIFICATIONS
from specserve.errors import ConfigError, unknown
from specserve.ops import NO_TOKEN_LEFT, DraftArrays, Ops
from specserve.sampling import edits, noise
from specserve.sampling.beams import candidates
from specserve.sampling.inputs import SampledSeq, SamplingInput, SamplingOutput, ScoredTokens, num_logit_rows
from specserve.sampling.logprobs import token_logprobs
from specserve.types import Failure, Ids, TokenLogprobs, Verdict

NO_TOKEN = (
    "No token may come at position {}: the grammar, allowed_token_ids, bad_words and min_tokens together forbid every "
    "one. Loosen one of them."
)
_NOT_FINITE = (
    "The model's logits for token {} are NaN or infinite: the model or its precision cannot handle this input. Try "
    "another dtype."
)
_TINIEST_TEMPERATURE = 1e-300  # 0 / denormal is NaN where denormals are flushed to zero


class Sampler:
    """Turns logits into verdicts. `verification` is "coupled", "rejection" or "block", as Ops.verify says; greedy
    sequences and those without a draft come out the same in all three. Holds nothing but constants: every number that
    is drawn is a hash of the sequence's seed, the position and the token (see `noise`).

    Raises ConfigError for an unknown `verification`.
    """

    def __init__(self, vocab_size: int, verification: str, ops: Ops) -> None:
        if verification not in VERIFICATIONS:
            raise ConfigError("--verification: " + unknown("value", verification, VERIFICATIONS))
        self.vocab_size = vocab_size
        self.verification = verification
        self._ops = ops
        self._hashed = noise.hash_tokens(torch.arange(vocab_size, device=ops.device))  # [vocab]

    def __call__(
        self, logits: Tensor, asked: SamplingInput, masks: Ids | None, best: Tensor | None = None
    ) -> SamplingOutput:
        """What is said of drafts and of prompts. logits float32 [rows, vocab_size]: those of all sequences, then those
        of scored tokens, then padding; all else as `verdicts` has it."""
        verdicts = self.verdicts(logits, asked, masks, best) if asked.seqs else []
        if beams := [i for i, each in enumerate(asked.seqs) if each.num_candidates]:
            those = [asked.seqs[i] for i in beams]
            rows = candidates(self._ops, logits, edited(logits, asked), those, masks)
            for i, found in zip(beams, rows, strict=True):
                if not isinstance(said := verdicts[i], Failure):
                    verdicts[i] = replace(said, candidates=found)
        scores, start = [], num_logit_rows(asked.seqs)
        for each in asked.scored:
            scores.append(self.score(logits[start:], each))
            start += len(each.tokens)
        return SamplingOutput(verdicts, scores)

    def verdicts(
        self, logits: Tensor, asked: SamplingInput, masks: Ids | None, best: Tensor | None = None
    ) -> list[Verdict | Failure]:
        """One verdict for each sequence, in order, or the reason why it cannot go on.

        logits float32 [rows, vocab_size], of which each sequence has len(draft) + 1 from its logits_start on. masks
        int32 [rows of sequences, ceil(vocab_size / 32)], bits of the tokens that may come. Draft tokens are below
        vocab_size; q, where there is one, is finite, not negative and sums to 1 in each row. What follows a token that
        ends the sequence is for the caller to trim. `best` is ops.argmax(logits), where that is known.
        """
        if best is None:
            best = self._ops.argmax(logits)
        # Where nothing is drawn, edited or masked, the best tokens are the answer, and no array need be made. Tensors
        # are hardly touched: a step's weights have driven all code out of the caches, and theirs is long.
        if masks is None and not any(each.params.temperature or each.edits for each in asked.seqs):
            known = best.tolist()
            return self._with_logprobs(logits, asked.seqs, [_agreed(each, known) for each in asked.seqs])
        num_rows = num_logit_rows(asked.seqs)
        assert logits.shape[1] == self.vocab_size, "logits are not of this vocabulary"
        assert len(logits) >= num_rows, "logits are not of this batch"
        assert masks is None or masks.shape == (num_rows, -(-self.vocab_size // 32)), "masks are not of this batch"
        drafts = draft_arrays(asked.seqs)
        verified = self._ops.verify(edited(logits, asked), best, drafts, self._hashed, masks, self.verification)
        tokens, nodes = verified.tokens.tolist(), verified.nodes.tolist()
        found: list[Verdict | Failure] = []
        for each, count in zip(asked.seqs, verified.counts.tolist(), strict=True):
            row = each.logits_start
            if count:
                found.append(Verdict(tokens[row : row + count], nodes[row : row + count - 1]))
            else:
                found.append(_failure(tokens[row], each.position))
        return self._with_logprobs(logits, asked.seqs, found)

    def score(self, logits: Tensor, asked: ScoredTokens) -> list[TokenLogprobs]:
        """How likely the model found tokens[i] under logits[i] [rows or more, vocab_size], with the k best: for
        prompts. See token_logprobs."""
        tokens, k = asked
        return token_logprobs(self._ops, logits, range(len(tokens)), tokens, [k] * len(tokens))

    def _with_logprobs(
        self, logits: Tensor, sampled: Many[SampledSeq], found: list[Verdict | Failure]
    ) -> list[Verdict | Failure]:
        """Add what the model itself thought of each emitted token, read from the row that judged it."""
        asking = [
            (i, verdict, k, each.logits_start)
            for i, (each, verdict) in enumerate(zip(sampled, found, strict=True))
            if isinstance(verdict, Verdict) and (k := each.params.logprobs) is not None
        ]
        if not asking:
            return found
        at = [start + row for _, verdict, _, start in asking for row in (0, *(node + 1 for node in verdict.path))]
        tokens = [token for _, verdict, _, _ in asking for token in verdict.tokens]
        ks = [k for _, verdict, k, _ in asking for _ in verdict.tokens]
        entries = iter(token_logprobs(self._ops, logits, at, tokens, ks))
        for i, verdict, _, _ in asking:
            found[i] = Verdict(verdict.tokens, verdict.path, [next(entries) for _ in verdict.tokens])
        return found


def _agreed(each: SampledSeq, best: list[int]) -> Verdict | Failure:
    """What is said where each row chooses its best token, -1: it has none, and nodes stand that were chosen."""
    first = row = each.logits_start
    tokens, path = list[int](), list[int]()
    if len(each.draft):  # children come after their parent, and siblings differ
        for node, (token, parent) in enumerate(
            zip(each.draft.tokens.tolist(), each.draft.parents.tolist(), strict=True)
        ):
            if first + 1 + parent == row and token == best[row]:
                row = first + 1 + node
                tokens.append(token)
                path.append(node)
    if best[row] >= 0:
        return Verdict([*tokens, best[row]], path)
    return Verdict(tokens, path[:-1]) if path else _failure(best[row], each.position)


def draft_arrays(sampled: Many[SampledSeq]) -> DraftArrays:
    """The drafts and parameters of sequences whose rows follow one another, as ops want them."""
    starts = [0]
    tokens: list[int] = []
    parents: list[int] = []
    positions: list[int] = []
    q: dict[int, Tensor] = {}
    for draft, _, _, position, start, *_ in sampled:
        assert start == starts[-1], "rows of sequences follow one another"
        num_nodes = len(draft.tokens)
        starts.append(start + num_nodes + 1)
        tokens.append(0)
        parents.append(-1)
        positions.append(position)
        if not num_nodes:
            continue
        tokens += draft.tokens.tolist()
        if draft.is_chain:
            parents += range(start, start + num_nodes)
            positions += range(position + 1, position + num_nodes + 1)
        else:
            parents += (draft.parents + (start + 1)).tolist()
            positions += (draft.depths + (position + 1)).tolist()
        if draft.q is not None:
            q[len(starts) - 2] = draft.q
    params = [each.params for each in sampled]
    own = [seed if seed < 2**63 else seed - 2**64 for _, _, seed, *_ in sampled]
    own += [p.top_k for p in params]
    own += [each.edits is not None for each in sampled]
    laws = [p.temperature and max(p.temperature, _TINIEST_TEMPERATURE) for p in params]
    laws += [p.min_p for p in params]
    laws += [p.top_p for p in params]
    return DraftArrays(
        np.array(starts, np.int64),
        np.array(tokens + parents + positions, np.int64).reshape(3, -1),
        np.array(own, np.int64).reshape(3, -1),
        np.array(laws, np.float64).reshape(3, -1),
        q,
    )


def _failure(reason: int, position: int) -> Failure:
    if reason == NO_TOKEN_LEFT:
        return Failure(NO_TOKEN.format(position), "no_token_left")
    return Failure(_NOT_FINITE.format(position))


def edited(logits: Tensor, asked: SamplingInput) -> Tensor:
    """Logits [rows or more, vocab] with the edits of all sequences, float32 [rows, vocab]; `logits` itself if there are
    none."""
    if all(each.edits is None for each in asked.seqs):
        return logits
    scores = logits[: num_logit_rows(asked.seqs)].to(torch.float32, copy=True)
    for each in asked.seqs:
        if each.edits is not None:
            edits.apply_edits(scores[each.logits_start : each.logits_start + len(each.draft) + 1], each.edits)
    return scores
