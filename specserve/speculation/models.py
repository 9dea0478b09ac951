"""What drafters that run a model of their own are made with, and how they run it."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from specserve.ops import Ops
from specserve.runtime.runner import Model
from specserve.speculation.base import DraftContext, SequenceView
from specserve.speculation.constants import MOST_MISSING as MOST_MISSING


class DraftInput(NamedTuple):
    """Tokens to run through a drafter's model at logical positions from `start` on, behind all that is there:
    start <= num_draft_cached. Tokens behind the sequence's end are nodes of the draft that will be proposed, in its
    order. `parents[i]` is the place in `tokens` of the token that token i follows, -1 for the one before `start`; None
    is a chain. A tree is run whole, from its first node on, since all see what stands before `start`. Logits come for
    the last `num_logits` tokens. `features` float32 [tokens, model.features_width], for a model that reads any.
    Tokens of a block see each other. What is written of scratch is no KV of the sequence's."""

    seq: SequenceView
    start: int
    tokens: Many[int]
    parents: Many[int] | None = None
    num_logits: int = 1
    features: Tensor | None = None
    is_block: bool = False
    is_scratch: bool = False


class HiddenInput(NamedTuple):
    """The target's hidden states of rows from logical position `start` on, float32 [rows, target's hidden] for each of
    the layers that a drafter's model reads: start <= num_draft_cached."""

    seq: SequenceView
    start: int
    hidden: list[Tensor]


class DraftOutput(NamedTuple):
    """One row for each of the logits that were asked for, input after input; valid until the runner's next call."""

    logits: Tensor  # float32 [rows, vocab]
    hidden: Tensor  # float32 [rows, hidden], behind the final norm, or what a head says of the next hidden state
    best: Tensor  # int64 [rows], the best token; -1 where the logits are not finite
    is_replayed: bool = False  # whether the next pass of as many rows leaves its tensors where these are


class DraftRunner(Protocol):
    """Runs a drafter's model, whose KV is extra layers of the target's slots: prefix hits, forks, trees and preemption
    keep it right as they keep the target's. `seq.num_draft_cached` says how far a sequence's is there."""

    most_rows: int  # tokens of one pass

    def run(self, inputs: Many[DraftInput]) -> DraftOutput:
        """One forward pass. At most `most_rows` tokens together, the engine's max_num_batched_tokens, and slots must be
        there: for tokens of the sequence that the target has computed, and from a proposal's request on for the last
        token and num_tokens nodes behind it."""

    def write_chains(self, chains: Many[Any], out: DraftOutput, sampler: Any) -> bool:
        """Write drafts, of draft_sampler.ChainDraft, to their ends, of a head that reads its own hidden states: `out`
        has a row of each. A token is one pass with the draw behind it and no Python between. For drafts without a
        grammar whose tokens are chosen. False, and nothing done, where `ops` do not record."""

    def catch_up(self, seqs: Many[SequenceView]) -> None:
        """Compute what tokens that the target has computed still lack of the model's KV, chunk by chunk."""

    def write(self, inputs: Many[HiddenInput]) -> Tensor:
        """Let the model's `write` fill its KV from what the target has computed. Returns what that returns, input after
        input."""

    def skip_missing_kv(self, seq: SequenceView, start: int) -> bool:
        """Whether the model can go on at `start`: all that stands before has KV, or at most MOST_MISSING tokens hold
        what an earlier draft left there. Those count as computed then: a head has no hidden states to redo them from,
        and a draft that is a little worse is better than none."""

    def read(self, seqs: Many[SequenceView]) -> DraftOutput:
        """What the model says behind each sequence's last token, having computed whatever it lacks before that."""


class ModelContext(DraftContext, Protocol):
    """A DraftContext with means of running a model."""

    ops: Ops

    def load(self, model: str) -> tuple[Model, Any]:
        """A model, named as the target is, and how its vocabulary stands to the target's: a
        text.vocabularies.SharedVocabulary. Raises ModelError for a model that is not there or cannot be run,
        ConfigError for a vocabulary that shares too little."""

    def load_head(self, name: str | None, kind: str) -> Any:
        """A draft head of that kind, made for this target, as models.heads runs it: from a folder or a repository, or
        None: from the zoo, where there is one.
        Raises ModelError for one that is not there, cannot be run or was made for another target."""

    def has_head(self, name: str | None, kind: str) -> bool:
        """Whether `load_head` would find a head of that kind by that name. Raises ModelError for one that is not there
        or cannot be read."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's embedding of int64 [n] -> float32 [n, hidden]."""

    def final_norm(self, hidden: Tensor) -> Tensor:
        """What the target's LM head reads of the residual stream behind its last layer, float32 [n, hidden] both."""

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's final norm and LM head over the residual stream behind its last layer, float32 [n, hidden] ->
        float32 [n, vocab]."""

    def runner(self, model: Model, reads: Tensor | None = None) -> DraftRunner:
        """A runner for a model made with `ops`, to be called in the drafter's constructor. Raises ConfigError where no
        KV can be had for it any more: for a second model, for a drafter that a request names, or that replaces
        another."""
