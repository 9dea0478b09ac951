"""Judges the drafts of a whole batch in one pass over its rows: what each sequence emits, or why it cannot go on."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.config import VERIFICATIONS
from specserve.errors import ConfigError, unknown
from specserve.ops import NO_TOKEN_LEFT, Ops, SamplingArrays
from specserve.sampling import edits, noise, verify
from specserve.sampling.edits import row_depths
from specserve.sampling.inputs import SampledSeq, SamplingInput, SamplingOutput, ScoredTokens, num_logit_rows
from specserve.sampling.logprobs import token_logprobs
from specserve.sampling.noise import Purpose, row_keys
from specserve.types import Failure, Ids, SamplingParams, TokenLogprobs, Verdict

NO_TOKEN = (
    "No token may come at position {}: the grammar, allowed_token_ids, bad_words and min_tokens together forbid every "
    "one. Loosen one of them."
)
_NOT_FINITE = (
    "The model's logits for token {} are NaN or infinite: the model or its precision cannot handle this input. Try "
    "another dtype."
)
_GREEDY = SamplingParams(temperature=0.0)
_TINIEST_TEMPERATURE = 1e-300  # 0 / denormal is NaN where denormals are flushed to zero


def sampling_arrays(
    rows: Many[int], params: Many[SamplingParams], keys: NDArray[np.int64] | None = None
) -> SamplingArrays:
    """The parameters of some rows as ops want them; without keys where nothing is drawn."""
    return SamplingArrays(
        np.array(rows, np.int64),
        np.array([p.temperature and max(p.temperature, _TINIEST_TEMPERATURE) for p in params], np.float64),
        np.array([p.min_p for p in params], np.float64),
        np.array([p.top_p for p in params], np.float64),
        np.array([p.top_k for p in params], np.int64),
        np.zeros(len(rows), np.int64) if keys is None else keys,
    )


class Sampler:
    """Turns logits into verdicts. `verification` is "coupled", "rejection" or "block" (see `verify`); greedy sequences
    and those without a draft come out the same in all three. Holds nothing but constants: every number it draws is a
    hash of the sequence's seed, the position and the token (see `noise`).

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
        sampled, num_rows = asked.seqs, num_logit_rows(asked.seqs)
        assert logits.shape[1] == self.vocab_size, "logits are not of this vocabulary"
        assert len(logits) >= num_rows, "logits are not of this batch"
        assert masks is None or masks.shape == (num_rows, -(-self.vocab_size // 32)), "masks are not of this batch"
        scores = edited(logits, asked)
        tokens: list[int] = (self._ops.argmax(logits) if best is None else best).tolist()
        self._sample(tokens, scores, sampled, masks)
        tried = [each for each in sampled if self._is_tried(each)]
        paths = self._accept_or_reject(tokens, scores, tried, masks) if tried else {}
        found: list[Verdict | Failure] = []
        for each in sampled:
            draft = each.draft
            own = tokens[each.logits_start : each.logits_start + len(draft) + 1]
            if own[0] < 0:
                found.append(
                    Failure(NO_TOKEN.format(each.position), "no_token_left")
                    if own[0] == NO_TOKEN_LEFT
                    else Failure(_NOT_FINITE.format(each.position))
                )
                continue
            bad = [token < 0 for token in own]
            path = paths.get(each.logits_start)
            if path is None:
                path = verify.walk_coupled(draft, own, bad)
            found.append(Verdict(*verify.make_verdict(draft, path, bad, own[verify.last_row(path)])))
        return self._with_logprobs(logits, sampled, found)

    def score(self, logits: Tensor, asked: ScoredTokens) -> list[TokenLogprobs]:
        """How likely the model found tokens[i] under logits[i] [rows or more, vocab_size], with the k best: for
        prompts. See token_logprobs."""
        tokens, k = asked
        return token_logprobs(self._ops, logits, range(len(tokens)), tokens, [k] * len(tokens))

    def _is_tried(self, each: SampledSeq) -> bool:
        """Whether the draft is accepted or rejected node by node, rather than compared with samples of the target."""
        return self.verification != "coupled" and each.params.temperature > 0 and len(each.draft) > 0

    def _sample(self, tokens: list[int], scores: Tensor, sampled: Many[SampledSeq], masks: Ids | None) -> None:
        """Put the token of each row, or why it has none, in place of the best by raw logits. Greedy rows mostly keep
        it, and are searched only where it may not come; so are those of tried drafts, to see whether any token may."""
        at: list[int] = []
        params: list[SamplingParams] = []
        seeds: list[int] = []
        positions: list[int] = []
        for each in sampled:
            is_drawn = each.params.temperature > 0 and not self._is_tried(each)
            is_changed = is_drawn or each.edits is not None
            if not is_changed and masks is None:
                continue
            for row, depth in enumerate(row_depths(each.draft), each.logits_start):
                best = tokens[row]
                if best < 0 or (not is_changed and masks is not None and masks.item(row, best // 32) >> best % 32 & 1):
                    continue
                at.append(row)
                params.append(each.params if is_drawn else _GREEDY)
                seeds.append(each.seed)
                positions.append(each.position + depth)
        if at:
            is_noisy = any(own is not _GREEDY for own in params)
            keys = row_keys(seeds, positions, [Purpose.SAMPLE] * len(at)).numpy() if is_noisy else None
            found = self._ops.sample(scores, sampling_arrays(at, params, keys), self._hashed, masks)
            for row, token in zip(at, found.tolist(), strict=True):
                tokens[row] = token

    def _accept_or_reject(
        self, tokens: list[int], scores: Tensor, tried: list[SampledSeq], masks: Ids | None
    ) -> dict[int, list[int]]:
        """The accepted path of each tried draft, by its first row of logits. The token after it is put into `tokens`: a
        bonus from p, a replacement from what the rejected children left of it, with noise that neither their trial nor
        their drafter has used."""
        drafts = [each.draft for each in tried]
        at = [each.logits_start + row for each in tried for row in range(len(each.draft) + 1)]
        params = [each.params for each in tried for _ in range(len(each.draft) + 1)]
        starts = [0, *np.cumsum([len(draft) + 1 for draft in drafts])[:-1].tolist()]  # in `at`
        bad = [tokens[row] < 0 for row in at]
        left = self._ops.probabilities(scores, sampling_arrays(at, params), masks)
        rounds = verify.plan(drafts, starts, left.device)
        chances = verify.judge(left, rounds, torch.tensor(bad, device=left.device), self.verification == "block")
        accepts = (self._uniforms(tried, starts, rounds, len(at)) <= chances).tolist()
        walk = verify.walk_block if self.verification == "block" else verify.walk_rejection
        paths: dict[int, list[int]] = {}
        ends: list[int] = []
        positions: list[int] = []
        purposes: list[Purpose] = []
        for each, draft, start in zip(tried, drafts, starts, strict=True):
            own = slice(start, start + len(draft) + 1)
            path = paths[each.logits_start] = walk(draft, accepts[own], bad[own])
            end = verify.last_row(path)
            ends.append(start + end)
            positions.append(each.position + len(path))
            purposes.append(Purpose.RESAMPLE if end - 1 in draft.parents else Purpose.SAMPLE)
        keys = row_keys([each.seed for each in tried], positions, purposes).to(left.device)
        for end, token in zip(ends, noise.sample(left[ends].log_(), keys, self._hashed).tolist(), strict=True):
            if not bad[end]:
                tokens[at[end]] = token
        return paths

    def _uniforms(
        self, tried: list[SampledSeq], starts: list[int], rounds: list[verify.Round], num_rows: int
    ) -> Tensor:
        """The uniform of each node at its row, keyed by the step's first position and the node's whole path. Keyed by
        its own position and token alone, a node that `block` tried in vain would meet the same number a step later."""
        keys = torch.zeros(num_rows, dtype=torch.int64, device=self._hashed.device)
        first = [each.position for each in tried]
        seeds = [each.seed for each in tried]
        keys[starts] = row_keys(seeds, first, [Purpose.ACCEPT] * len(tried)).to(keys.device)
        for trial in rounds:
            keys[trial.rows] = noise.fold(keys[trial.parents], self._hashed[trial.tokens])
        return noise.unit(keys)

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
