"""Knows how to judge the drafts of a whole batch in one pass over its flattened rows, and what each sequence emits.
Knows nothing of models, caches, scheduling or where drafts come from."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.config import VERIFICATIONS
from specserve.errors import ConfigError, unknown
from specserve.ops import Laws
from specserve.sampling import verify
from specserve.sampling.edits import row_depths
from specserve.sampling.filters import is_processed, laws, normalise, process, shape
from specserve.sampling.logprobs import Native as NativeScores, token_logprobs
from specserve.sampling.noise import Purpose, draw, fold, hash_tokens, row_keys, unit
from specserve.sampling.rows import Rows
from specserve.types import Draft, Failure, Ids, SamplingParams, Sequence, TokenLogprobs, Verdict

_CACHED_ELEMENTS = 2**16
_BROKEN, _EMPTY = 1, 2  # why a row is bad; 0 is a good one
NO_TOKEN = (
    "No token may come at position {}: the grammar, allowed_token_ids, bad_words and min_tokens together forbid every "
    "one. Loosen one of them."
)
_NOT_FINITE = (
    "The model's logits for token {} are NaN or infinite: the model or its precision cannot handle this input. Try "
    "another dtype."
)


class Native(NativeScores, Protocol):
    """What of ops a sampler can use."""

    def draw(
        self, scores: Tensor, rows: NDArray[np.int64], laws: Laws, keys: Tensor, hashed: Tensor, masks: Ids | None
    ) -> Tensor: ...
    def best_within(self, scores: Tensor, row: int, masks: Ids) -> int: ...


@dataclass(slots=True)
class _Said:
    """What the device said about each row, on the host."""

    tokens: list[int]
    faults: list[int]
    stands: list[bool]  # whether a tried draft node passes its trial


class Sampler:
    """Turns logits into verdicts. `verification` is "coupled", "rejection" or "block" (see `verify`); greedy sequences
    and those without a draft come out the same in all three. Holds nothing but constants: every number it draws is a
    hash of the sequence's seed, the position and the token (see `noise`).

    `native` draws the target's own tokens in torch's stead; a sampler draws them all one way.

    Raises ConfigError for an unknown `verification`.
    """

    def __init__(
        self, vocab_size: int, verification: str, device: torch.device | str, native: Native | None = None
    ) -> None:
        if verification not in VERIFICATIONS:
            raise ConfigError("--verification: " + unknown("value", verification, VERIFICATIONS))
        self._native = native
        self.vocab_size = vocab_size
        self.verification = verification
        self.device = torch.device(device)
        self._hashed = hash_tokens(torch.arange(vocab_size, device=self.device))  # [vocab]
        # A CPU is twice as fast while the rows it works on fit its cache; other devices want them all at once.
        self._rows_at_once = max(1, _CACHED_ELEMENTS // vocab_size) if self.device.type == "cpu" else sys.maxsize

    def __call__(
        self, logits: Tensor, rows: Rows, masks: Ids | None, best: Tensor | None = None
    ) -> list[Verdict | Failure]:
        """One verdict for each sequence of `rows`, in order, or the reason why it cannot go on.

        logits float [rows.num_rows or more, vocab_size]; what follows the last row is padding. masks int32 [num_rows,
        ceil(vocab_size / 32)], bits of the tokens that may come. Draft tokens are below vocab_size; q, where there is
        one, is finite, not negative and sums to 1 in each row. What follows a token that ends the sequence is for the
        caller to trim. `best` int64 [rows.num_rows or more] spares a search where masks are all that is processed: each
        row's best token, -1 where its logits are NaN or infinite.
        """
        num_rows, vocab_size = logits.shape
        assert vocab_size == self.vocab_size, "logits are not of this vocabulary"
        assert num_rows >= rows.num_rows, "logits are not of this batch"
        assert masks is None or masks.shape == (rows.num_rows, -(-self.vocab_size // 32)), "masks are not of this batch"
        known = None if is_processed(rows, None) else best
        tried = [self._tries(seq, draft) for seq, draft in zip(rows.seqs, rows.drafts, strict=True)]
        sampled = [i for i, seq in enumerate(rows.seqs) if seq.params.temperature > 0]
        if known is not None and self._is_quick(logits, sampled, tried, masks):
            said, residual = self._quick_pass(known, logits, rows, sampled, masks), None
        else:
            known = known if masks is None else None
            raw, bits = logits[: rows.num_rows].float(), None if masks is None else torch.from_numpy(masks)
            said, residual = self._first_pass(raw, process(raw, rows, bits), rows, tried, known)
        paths = [self._walk(said, rows, i, tried[i]) for i in range(len(tried))]
        self._second_pass(said, rows, paths, tried, residual)
        return self._verdicts(logits, rows, said, paths)

    def score(self, logits: Tensor, tokens: list[int], k: int) -> list[TokenLogprobs]:
        """How likely the model found tokens[i] under logits[i] [rows, vocab_size], with the k best: for prompts. See
        token_logprobs."""
        return token_logprobs(logits, range(len(tokens)), tokens, [k] * len(tokens), self._native)

    def _tries(self, seq: Sequence, draft: Draft) -> bool:
        """Whether the draft is tried node by node, rather than compared with samples of the target."""
        return self.verification != "coupled" and seq.params.temperature > 0 and len(draft) > 0

    def _is_quick(self, logits: Tensor, sampled: list[int], tried: list[bool], masks: Ids | None) -> bool:
        """Whether rows whose best tokens are known need nothing of torch's."""
        is_drawn = not sampled or (self._native is not None and not any(tried))
        return is_drawn and (logits.is_cpu or masks is None)

    def _quick_pass(self, known: Tensor, logits: Tensor, rows: Rows, sampled: list[int], masks: Ids | None) -> _Said:
        """What `_first_pass` says, with no more than two calls of torch: after a step that has flushed every cache each
        costs as much as all the Python here."""
        tokens = known.tolist()
        said = _Said(tokens, [_BROKEN if token < 0 else 0 for token in tokens], [False] * len(tokens))
        if masks is not None:
            self._stay_within(said, logits, masks, rows)
        if sampled:
            assert self._native is not None, "who asked has looked"
            indices, keys = _row_indices(rows, sampled), _sample_keys(rows, sampled)
            drawn = self._native.draw(logits, indices, laws(_row_params(rows, sampled)), keys, self._hashed, masks)
            for row, token in zip(indices.tolist(), drawn.tolist(), strict=True):
                said.tokens[row] = token
                said.faults[row] = said.faults[row] or (_EMPTY if token < 0 else 0)
        return said

    def _stay_within(self, said: _Said, logits: Tensor, masks: Ids, rows: Rows) -> None:
        """Let greedy rows on a CPU say their best token of those that may come. Mostly that is their best of all; only
        where it is not is anything searched."""
        for seq, draft, start in zip(rows.seqs, rows.drafts, rows.starts, strict=True):
            if seq.params.temperature > 0:
                continue
            for row in range(start, start + len(draft) + 1):
                best = said.tokens[row]
                if said.faults[row] or masks.item(row, best // 32) >> best % 32 & 1:
                    continue
                if self._native is not None:
                    best = self._native.best_within(logits, row, masks)
                else:
                    best = _best_within(logits[row], masks[row])
                said.tokens[row] = best
                said.faults[row] = _EMPTY if best < 0 else 0

    def _first_pass(
        self, raw: Tensor, scores: Tensor, rows: Rows, tried: list[bool], known: Tensor | None
    ) -> tuple[_Said, Tensor | None]:
        """Everything that needs no walk, and the only transfer of a step unless a draft is tried. The second result is
        what is left to draw from in the rows of tried drafts, float64, one after the other."""
        if known is None:
            tokens = scores.argmax(-1)
            faults = _faults(raw, scores, tokens)
        else:
            known = known[: rows.num_rows]
            tokens, faults = known.clamp(min=0), torch.where(known < 0, _BROKEN, 0)
        sampled = [i for i, seq in enumerate(rows.seqs) if seq.params.temperature > 0]
        self._sample(scores, tokens, rows, [i for i in sampled if not tried[i]])
        stands = torch.zeros_like(faults)
        residual = self._judge(scores, faults, stands, rows, [i for i in sampled if tried[i]])
        return _Said(*torch.stack([tokens, faults, stands]).tolist()), residual

    def _sample(self, scores: Tensor, tokens: Tensor, rows: Rows, which: list[int]) -> None:
        """Let the target draw a token in every row of some sequences, into `tokens`."""
        if not which:
            return
        indices, params = _row_indices(rows, which), _row_params(rows, which)
        at, keys = torch.from_numpy(indices).to(self.device), _sample_keys(rows, which).to(self.device)
        if self._native is not None:
            tokens[at] = self._native.draw(scores, indices, laws(params), keys, self._hashed, None)
            return
        for first in range(0, len(at), self._rows_at_once):
            some = slice(first, first + self._rows_at_once)
            tokens[at[some]] = draw(shape(scores[at[some]], params[some]), keys[some], self._hashed)

    def _judge(self, scores: Tensor, faults: Tensor, stands: Tensor, rows: Rows, which: list[int]) -> Tensor | None:
        """Try every node of some drafts, the outcomes into `stands`; returns what is left to draw from in each row."""
        if not which:
            return None
        at = torch.from_numpy(_row_indices(rows, which)).to(self.device)
        odds = normalise(shape(scores[at], _row_params(rows, which)))
        drafts = [rows.drafts[i] for i in which]
        starts = _packed_starts(drafts)
        rounds = verify.plan(drafts, starts, self.device)
        chances = verify.judge(odds, rounds, faults[at] > 0, self.verification == "block")
        stands[at] = (self._uniforms([rows.seqs[i] for i in which], starts, rounds, len(at)) <= chances).long()
        return odds

    def _uniforms(self, seqs: list[Sequence], starts: list[int], rounds: list[verify.Round], num_rows: int) -> Tensor:
        """The uniform of each node at its row, keyed by the step's first position and the node's whole path. Keyed by
        its own position and token alone, a node that `block` tried in vain would meet the same number a step later."""
        keys = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        first = [len(seq.tokens) for seq in seqs]
        keys[starts] = row_keys([seq.seed for seq in seqs], first, [Purpose.ACCEPT] * len(seqs)).to(self.device)
        for trial in rounds:
            keys[trial.rows] = fold(keys[trial.parents], self._hashed[trial.tokens])
        return unit(keys)

    def _walk(self, said: _Said, rows: Rows, index: int, tried: bool) -> list[int]:
        """The accepted path of one sequence."""
        draft, start = rows.drafts[index], rows.starts[index]
        if not len(draft):
            return []
        own = slice(start, start + len(draft) + 1)
        bad = [fault > 0 for fault in said.faults[own]]
        if not tried:
            return verify.walk_coupled(draft, said.tokens[own], bad)
        walk = verify.walk_block if self.verification == "block" else verify.walk_rejection
        return walk(draft, [bool(stands) for stands in said.stands[own]], bad)

    def _second_pass(
        self, said: _Said, rows: Rows, paths: list[list[int]], tried: list[bool], residual: Tensor | None
    ) -> None:
        """Draw what follows the accepted paths of tried drafts, in place: a bonus from p, a replacement from what the
        rejected children left of it, with noise that neither their trial nor their drafter has used."""
        if residual is None:
            return
        which = [i for i, is_tried in enumerate(tried) if is_tried]
        ends = [verify.last_row(paths[i]) for i in which]
        starts = _packed_starts([rows.drafts[i] for i in which])
        seqs = [rows.seqs[i] for i in which]
        purposes = [
            Purpose.RECOVER if end - 1 in rows.drafts[i].parents else Purpose.SAMPLE
            for i, end in zip(which, ends, strict=True)
        ]
        positions = [len(rows.seqs[i].tokens) + len(paths[i]) for i in which]
        keys = row_keys([seq.seed for seq in seqs], positions, purposes).to(self.device)
        at = torch.tensor([start + end for start, end in zip(starts, ends, strict=True)], device=self.device)
        drawn = draw(residual[at].log_(), keys, self._hashed).tolist()
        for i, end, token in zip(which, ends, drawn, strict=True):
            said.tokens[rows.starts[i] + end] = token

    def _verdicts(self, logits: Tensor, rows: Rows, said: _Said, paths: list[list[int]]) -> list[Verdict | Failure]:
        found: list[Verdict | Failure] = []
        for seq, draft, start, path in zip(rows.seqs, rows.drafts, rows.starts, paths, strict=True):
            faults = said.faults[start : start + len(draft) + 1]
            if faults[0]:
                found.append(_failure(faults[0], len(seq.tokens)))
                continue
            extra = said.tokens[start + verify.last_row(path)]
            found.append(Verdict(*verify.conclude(draft, path, [fault > 0 for fault in faults], extra)))
        return self._with_logprobs(logits, rows, found)

    def _with_logprobs(self, logits: Tensor, rows: Rows, found: list[Verdict | Failure]) -> list[Verdict | Failure]:
        """Add what the model itself thought of each emitted token, read from the row that judged it."""
        asking = [
            (i, v, k)
            for i, v in enumerate(found)
            if isinstance(v, Verdict) and (k := rows.seqs[i].params.logprobs) is not None
        ]
        if not asking:
            return found
        at = [rows.starts[i] + row for i, verdict, _ in asking for row in (0, *(node + 1 for node in verdict.path))]
        tokens = [token for _, verdict, _ in asking for token in verdict.tokens]
        ks = [k for _, verdict, k in asking for _ in verdict.tokens]
        entries = iter(token_logprobs(logits, at, tokens, ks, self._native))
        for i, verdict, _ in asking:
            found[i] = Verdict(verdict.tokens, verdict.path, [next(entries) for _ in verdict.tokens])
        return found


def _failure(fault: int, position: int) -> Failure:
    if fault == _EMPTY:
        return Failure(NO_TOKEN.format(position), "no_token_left")
    return Failure(_NOT_FINITE.format(position))


def _best_within(logits: Tensor, mask: Ids) -> int:
    """As ops.best_within, of one row."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=len(logits))
    allowed = np.flatnonzero(bits)
    scores = logits.float().numpy()[allowed]
    at = int(scores.argmax()) if len(allowed) else 0
    return int(allowed[at]) if len(allowed) and scores[at] > -np.inf else -1


def _faults(raw: Tensor, scores: Tensor, best: Tensor) -> Tensor:
    """Why each row is bad, int64 [rows]. NaN wins every maximum, so the maxima tell; NaN < inf is false."""
    top = scores.gather(1, best[:, None]).squeeze(1)
    peak = top if scores is raw else raw.amax(-1)  # processing may hide a NaN
    broken = ~(peak.isfinite() & (top < torch.inf))
    return torch.where(broken, _BROKEN, torch.where(top == -torch.inf, _EMPTY, 0))


def _row_indices(rows: Rows, which: list[int]) -> NDArray[np.int64]:
    """The flat rows of some sequences, in order."""
    own = [np.arange(rows.starts[i], rows.starts[i] + len(rows.drafts[i]) + 1, dtype=np.int64) for i in which]
    return np.concatenate(own)


def _row_params(rows: Rows, which: list[int]) -> list[SamplingParams]:
    return [rows.seqs[i].params for i in which for _ in range(len(rows.drafts[i]) + 1)]


def _sample_keys(rows: Rows, which: list[int]) -> Tensor:
    """Noise keys of all rows of some sequences, for the target's own draws."""
    seeds, positions = [], []
    for i in which:
        seq, depths = rows.seqs[i], row_depths(rows.drafts[i])
        seeds += [seq.seed] * len(depths)
        positions += [len(seq.tokens) + depth for depth in depths]
    return row_keys(seeds, positions, [Purpose.SAMPLE] * len(seeds))


def _packed_starts(drafts: Many[Draft]) -> list[int]:
    """The first row of each draft where these drafts alone are packed."""
    return [0, *np.cumsum([len(draft) + 1 for draft in drafts])[:-1].tolist()]
