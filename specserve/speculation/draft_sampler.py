"""Samples the tokens of a model's drafts from its logits, as the verification of the target wants them sampled."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from specserve.errors import ConfigError
from specserve.ops import DrawArrays, Ops
from specserve.sampling import noise
from specserve.speculation.base import SequenceView
from specserve.speculation.models import ModelContext
from specserve.types import Draft


class SampledTokens(NamedTuple):
    """The next token of each row."""

    tokens: list[int]
    confidence: list[float]  # its share as ops.Drawn has it; where it was drawn from q the highest probability there
    second: list[tuple[int, float]]  # what else might come, and its share; nothing where there is a q
    q: list[Tensor | None]  # float32 [vocab] each, what it was drawn from; None where it was chosen
    keys: Tensor  # int64 [rows], for the token after it, where that has noise of its own


class DraftSampler:
    """One draft after another from logits [rows, vocab], one row for each sequence.

    A greedy sequence gets the best token. A sampled one gets, under `coupled`, the token that the target's own noise
    picks from this model's distribution, which is the target's where the two are alike; under `rejection` and `block`,
    a token drawn with noise of its own, and the distribution that it was drawn from. Distributions are at the
    sequence's temperature; what else its parameters do to the target's logits is left to the verification.
    """

    def __init__(self, verification: str, vocab_size: int, ops: Ops) -> None:
        self._is_coupled = verification == "coupled"
        self._ops = ops
        self._hashed = noise.hash_tokens(torch.arange(vocab_size, device=ops.device))

    def is_chosen(self, seqs: Many[SequenceView]) -> bool:
        """Whether no distribution belongs to what is drawn for any of them."""
        return self._is_coupled or all(seq.temperature == 0 for seq in seqs)

    def allowed_logits(
        self, behind: Many[tuple[SequenceView, Many[int]]], logits: Tensor, ids: Tensor | None
    ) -> Tensor:
        """Logits [rows, n] with -inf for what grammars do not allow after sequences and tokens of their drafts, and
        where something is forced for all else, unless a distribution belongs to the draft."""
        constrained = [row for row, (seq, _) in enumerate(behind) if seq.has_grammar]
        if not constrained:
            return logits
        some = [behind[row] for row in constrained]
        bits = np.stack([seq.allowed(tokens, is_forced=self.is_chosen([seq])) for seq, tokens in some])
        of_all = torch.from_numpy(np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little").astype(bool))
        of_all = of_all.to(logits.device)
        allowed = of_all[:, : logits.shape[1]] if ids is None else of_all[:, ids]
        found = logits.clone()
        found[constrained] = found[constrained].masked_fill(~allowed, -torch.inf)
        return found

    def best(self, scores: Tensor, count: int, ids: Tensor | None) -> tuple[Any, Any]:
        """The best tokens of each row of scores [..., n] and their shares, lists [..., count]; the share is 0 where
        nothing is allowed."""
        best = scores.softmax(-1).topk(count)
        return (best.indices if ids is None else ids[best.indices]).tolist(), best.values.nan_to_num().tolist()

    def noisy(self, seqs: Many[SequenceView], depths: Many[int], logits: Tensor, ids: Tensor | None) -> Tensor:
        """Of float32 logits [rows, n], each of a sequence at a depth of its draft, what the best tokens are chosen by:
        at the sequence's temperature with the noise that the target will choose with there; of greedy ones, and of
        those to whose drafts a distribution belongs, the logits."""
        drawn = [row for row, seq in enumerate(seqs) if seq.temperature > 0 and self.is_chosen([seq])]
        if not drawn:
            return logits
        seeds, places = [seqs[i].seed for i in drawn], [len(seqs[i].tokens) + depths[i] for i in drawn]
        keys = noise.row_keys(seeds, places, [noise.Purpose.SAMPLE] * len(drawn)).to(logits.device)
        temperatures = torch.tensor([seqs[i].temperature for i in drawn], dtype=torch.float64, device=logits.device)
        scores = (logits[drawn] - logits[drawn].amax(-1, keepdim=True)).double() / temperatures[:, None]
        scores += noise.gumbel(keys[:, None], self.hashed(logits.shape[1], ids))
        return logits.index_copy(0, torch.tensor(drawn, device=logits.device), scores.float())

    def hashed(self, num: int, ids: Tensor | None) -> Tensor:
        """Ids, or the first `num` tokens, as noise.hash_tokens has them."""
        return self._hashed[:num] if ids is None else self._hashed[ids]

    def arrays(self, seqs: Many[SequenceView], depths: range) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Temperatures [rows], and keys [depths, rows] for tokens of which `is_chosen` is true: the target's own."""
        temperatures = np.array([seq.temperature for seq in seqs], np.float64)
        if not temperatures.any():
            return temperatures, np.zeros((len(depths), len(seqs)), np.int64)
        places = [len(seq.tokens) + depth for depth in depths for seq in seqs]
        seeds = [seq.seed for seq in seqs] * len(depths)
        keys = noise.row_keys(seeds, places, [noise.Purpose.SAMPLE] * len(places)).numpy()
        return temperatures, keys.reshape(len(depths), len(seqs))

    def keys(self, seqs: Many[SequenceView]) -> Tensor:
        """What the first token of each draft is sampled with, int64 [rows]."""
        purposes = [noise.Purpose.DRAFT] * len(seqs)
        keys = noise.row_keys([seq.seed for seq in seqs], [len(seq.tokens) for seq in seqs], purposes)
        return keys.to(self._hashed.device)

    def sample(
        self, seqs: Many[SequenceView], logits: Tensor, keys: Tensor, depth: int, ids: Tensor | None = None
    ) -> SampledTokens:
        """The tokens at that depth, of float32 logits [rows, n] of token ids int64 [n], or of the first n where those
        are None; `keys` are those that the call before returned."""
        hashed = self.hashed(logits.shape[1], ids)
        if self.is_chosen(seqs):
            temperature, own = self.arrays(seqs, range(depth, depth + 1))
            arrays = np.arange(len(seqs)), temperature, own[0]
            how = DrawArrays(*(torch.from_numpy(each).to(logits.device) for each in arrays))
            found, share, *second = (each.tolist() for each in self._ops.draw(depth, logits, None, how, ids, hashed))
            # Nothing is drawn with the keys, so they stay.
            return SampledTokens(found, share, list(zip(*second, strict=True)), [None] * len(seqs), keys)
        best = logits.max(-1)
        tokens = best.indices
        confidence = (best.values - logits.logsumexp(-1)).exp()
        q: list[Tensor | None] = [None] * len(seqs)
        drawn = [i for i, seq in enumerate(seqs) if seq.temperature > 0]
        if drawn:
            temperatures = torch.tensor([seqs[i].temperature for i in drawn], dtype=torch.float64, device=logits.device)
            scores = (logits[drawn].double() / temperatures[:, None]).log_softmax(-1)
            tokens, confidence = tokens.clone(), confidence.clone()
            confidence[drawn] = scores.amax(-1).exp().float()
            for i, row in zip(drawn, scores.exp().float(), strict=True):
                q[i] = self._of_all(row, ids)
            tokens[drawn] = noise.sample(scores, keys[drawn], hashed)
        if ids is not None:
            tokens = ids[tokens]
        return SampledTokens(tokens.tolist(), confidence.tolist(), [], q, noise.fold(keys, self._hashed[tokens]))

    def _of_all(self, probabilities: Tensor, ids: Tensor | None) -> Tensor:
        """A distribution over some ids [n] as one over all [vocab]."""
        if ids is None:
            return pad(probabilities, (0, len(self._hashed) - len(probabilities)))
        return probabilities.new_zeros(len(self._hashed)).index_copy(0, ids, probabilities)


def checked_probability(value: float) -> float:
    """The option min_probability of a drafter. Raises ConfigError for what is no number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ConfigError(f"min_probability is {value!r}; it must be a number from 0 to 1.")
    return value


def checked_flag(value: bool) -> bool:
    """The option second_best of a drafter. Raises ConfigError for what is neither true nor false."""
    if not isinstance(value, bool):
        raise ConfigError(f"second_best is {value!r}; it must be true or false.")
    return value


def named_for_auto(context: ModelContext, head: str | None, kind: str) -> bool:
    """For "auto": whether a head of that kind is named. Raises ConfigError where its drafts may not be cut."""
    if head is None or not context.has_head(head, kind):
        return False
    if context.verification != "coupled":
        raise ConfigError(
            f"--drafter auto uses a head under --verification coupled alone, and it is {context.verification}. "
            f"Name --drafter {kind}, or leave the head out."
        )
    return True


class ChainDraft:
    """A draft of at most `most` tokens that is being written after a sequence: a chain, which ends before a token that
    is less likely than `least`, and with `second_best` the next best beside each of its tokens. The likeliest of them
    all are the draft; a token is as likely as the product of what the model gives to it and those before."""

    def __init__(self, seq: SequenceView, most: int, least: float = 0.0, second_best: bool = False) -> None:
        self.seq, self.most, self._least, self._second_best = seq, most, least, second_best
        self.tokens: list[int] = []
        self._nodes: list[tuple[float, int, int, float]] = []  # how likely, depth, token and its own share
        self._chance = 1.0  # of the chain's last token
        self._q: list[Tensor] = []

    @property
    def last(self) -> int:
        """The newest token, the sequence's where there is none yet."""
        return self.tokens[-1] if self.tokens else self.seq.tokens[-1]

    def take(self, token: int, share: float, second: tuple[int, float] | None = None, q: Tensor | None = None) -> bool:
        """The next token of the chain and the second best there; returns whether one behind it may be in the draft."""
        if share < self._least:
            return False
        depth, before = len(self.tokens), self._chance
        self._chance *= min(share, 1.0)
        self._nodes.append((self._chance, depth, token, min(share, 1.0)))
        self.tokens.append(token)
        if q is not None:
            self._q.append(q)
        elif self._second_best and second is not None and second[1] > 0 and second[1] >= self._least:
            self._nodes.append((before * second[1], depth, *second))
        return sum(each[0] >= self._chance for each in self._nodes) < self.most

    def draft(self) -> Draft:
        # Of equals the first one: what stands before a token is never less likely.
        nodes = sorted(sorted(self._nodes, key=lambda node: -node[0])[: self.most], key=lambda node: node[1])
        place = {-1: -1}  # of the chain's token at each depth
        parents = []
        for i, (_, depth, token, _) in enumerate(nodes):
            parents.append(place[depth - 1])
            if token == self.tokens[depth]:
                place[depth] = i
        return Draft(
            np.array([node[2] for node in nodes], np.int32),
            np.array(parents, np.int32),
            torch.stack(self._q) if self._q else None,
            confidence=np.array([node[3] for node in nodes], np.float32),
            own=range(self.most),
        )


class GrowingChains:
    """Drafts that get a token each, again and again, until they end: `chains` are those that want another. A token is
    one of `ids`, or of the first ones where that is None, and one that the sequence's grammar allows."""

    def __init__(self, sampler: DraftSampler, chains: list[ChainDraft], ids: Tensor | None = None) -> None:
        self.chains = chains
        self._sampler, self._ids = sampler, ids
        self._keys, self._depth = sampler.keys([chain.seq for chain in chains]), 0

    def grow(self, logits: Tensor) -> list[int]:
        """The next token of each, of logits float32 [growing, ids]. Returns the rows of those that want another, which
        are the growing ones now."""
        seqs = [chain.seq for chain in self.chains]
        behind = [(chain.seq, chain.tokens) for chain in self.chains]
        allowed = self._sampler.allowed_logits(behind, logits, self._ids)
        is_open = [True] * len(seqs)
        if allowed is not logits:
            has_any = allowed.amax(-1) > -torch.inf  # a row without any is not used
            logits, is_open = torch.where(has_any[:, None], allowed, logits), has_any.tolist()
        drawn = self._sampler.sample(seqs, logits, self._keys, self._depth, self._ids)
        second: Many[tuple[int, float] | None] = drawn.second or [None] * len(seqs)
        rows = [
            row
            for row, chain in enumerate(self.chains)
            if is_open[row] and chain.take(drawn.tokens[row], drawn.confidence[row], second[row], drawn.q[row])
        ]
        self.chains, self._keys, self._depth = [self.chains[row] for row in rows], drawn.keys[rows], self._depth + 1
        return rows
