"""The drafter contract: what a drafter is told, what it answers, and what it is made with.

A drafter is a file, `drafters/NAME.py`, with one public class named `...Drafter`, or an entry point of the group
`specserve.drafters`. Its options are the parameters of its constructor behind the context:

    class EchoDrafter:
        needs = Needs()

        def __init__(self, context: DraftContext, token: int = 1) -> None: ...
        def begin(self, seq: SequenceView) -> None: ...
        def propose(self, requests: list[DraftRequest]) -> list[Draft]: ...
        def observe(self, step: StepReport) -> None: ...
        def end(self, seq: SequenceView) -> None: ...
        def close(self) -> None: ...  # only where there is something to save or to let go of
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Many
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from specserve.types import Draft, Ids, Sequence, Verdict


class GrammarReader(Protocol):
    """What structured.reader is: asks a grammar behind a sequence's tokens, by a state of its own."""

    def jump_forward(self, tokens: Many[int]) -> list[int]: ...
    def allowed(self, tokens: Many[int], draft: Many[int], num_words: int, is_forced: bool) -> Ids: ...


class SequenceView:
    """A sequence as one drafter sees it: copies, so that nothing done to them reaches the sequence. One for each
    sequence from `begin` to `end`, so it may be a key; equality is identity. Behind `end`, and for a drafter that was
    switched off, it tells no more of the sequence than it did, and no runner takes it."""

    def __init__(self, seq: Sequence, vocab_size: int) -> None:
        self._live: Sequence | None = seq  # None when it has ended
        self.has_grammar = seq.grammar is not None
        self._grammar: GrammarReader | None = (
            None if seq.grammar is None else seq.grammar.reader(seq.num_prompt, seq.stop_ids)
        )
        self._num_words = -(-vocab_size // 32)
        self.tokens = seq.tokens[:]  # prompt and output, up to the newest call
        self.num_prompt = seq.num_prompt
        self.request = (seq.parent or seq).key  # the same for all completions of a request, and no other's
        self.prediction = seq.prediction  # what the output will mostly be, says who asked
        self.is_private = seq.private  # whether it is a tenant of its own, of which nothing is worth keeping
        self.salt = self.request if seq.private else seq.salt  # of its tenant, which learns of no other, not by times
        self.seed = seq.seed
        self.temperature = seq.params.temperature
        self.adapter = None if seq.adapter is None else seq.adapter.info.digest  # by which the target is changed

    @property
    def _seq(self) -> Sequence:
        """The engine's own, for runners."""
        if self._live is None:
            raise RuntimeError("The sequence has ended, or its drafter was switched off: nothing more is known of it.")
        return self._live

    def _update(self) -> SequenceView:
        """Take in what is new of the sequence, before a call."""
        self.tokens += self._seq.tokens[len(self.tokens) :]
        return self

    def jump_forward(self) -> list[int]:
        """The tokens that must follow by the sequence's grammar, as the tokenizer would split them."""
        return [] if self._grammar is None else self._grammar.jump_forward(self.tokens)

    def allowed(self, tokens: Many[int], *, is_forced: bool) -> Ids:
        """The bits of the tokens that its grammar lets follow these, which are a draft: int32 [ceil(vocab / 32)]; with
        `is_forced` the one that must follow alone, where there is one. Nothing follows what may not stand, and what
        ends the sequence."""
        assert self._grammar is not None, "anything may follow"
        return self._grammar.allowed(self.tokens, tokens, self._num_words, is_forced)

    @property
    def num_cached(self) -> int:
        """Leading tokens that have KV of the target."""
        return self._seq.cached

    @property
    def num_draft_cached(self) -> int:
        """Leading tokens that have KV of the drafter's own model; see models.DraftRunner."""
        return self._seq.draft_cached


class DraftRequest(NamedTuple):
    """Propose at most `num_tokens` nodes behind the sequence's last token."""

    seq: SequenceView
    num_tokens: int


class SequenceReport(NamedTuple):
    """One sequence's share of a step that has run: the tokens seq.tokens[start : start + num_new] of its own, behind
    them the nodes of `draft`. `verdict` is what the target said, None for a chunk of a prompt that did not reach its
    end; its tokens are in seq.tokens already, up to the one that ended the sequence. `first_row` is that of its first
    token in the step's hidden states. With a verdict, row logits_start of what the step says of logits is for what
    follows the last of its own tokens, row logits_start + 1 + i for what follows node i."""

    seq: SequenceView
    start: int
    num_new: int
    draft: Draft
    verdict: Verdict | None
    first_row: int
    logits_start: int = 0

    @property
    def kept_rows(self) -> list[int]:
        """The rows whose tokens are part of the sequence now, in the order of their positions, from `start` on."""
        path = [] if self.verdict is None else self.verdict.path
        first_node = self.first_row + self.num_new
        return [*range(self.first_row, first_node), *(first_node + node for node in path)]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did for the sequences of one drafter. `hidden[l]` float32 [rows, hidden] is the residual stream
    behind layer l, for the layers that the drafter needs; `top` int32 [rows of logits, needs.top_k] has the target's
    best tokens of each row, best first, -1 where the logits are not finite, None where the drafter needs none. Both are
    valid until `observe` returns. `preempted` have lost their KV, the drafter's too, and will be computed again."""

    seqs: list[SequenceReport]
    hidden: Mapping[int, Tensor] = field(default_factory=dict)
    preempted: list[SequenceView] = field(default_factory=list)
    top: Ids | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter takes. `hidden_layers`: of which layers, counted from 0, it is shown the output; `top_k`: how many
    of the target's best tokens it is shown of each row of logits, at most MOST_TOP_K and the vocabulary;
    `memory_bytes`: what it will hold beyond its weights and its KV; `cost_class`: "free" for look-ups, which take
    microseconds and use no tensors, "pass" for a head that takes one pass for a draft of any length, "passes" for one
    that takes a pass for each token, "model" for a model that moreover has to read the prompt before its first draft;
    `observes`: whether it is told of steps; `reads_next`: whether its model's KV of a token depends on the next one."""

    hidden_layers: tuple[int, ...] = ()
    top_k: int = 0
    memory_bytes: int = 0
    cost_class: Literal["free", "pass", "passes", "model"] = "free"
    observes: bool = True
    reads_next: bool = False

    @classmethod
    def of(cls, parts: Many[Needs]) -> Needs:
        """What several drafters need together."""
        return cls(
            hidden_layers=tuple(sorted({layer for part in parts for layer in part.hidden_layers})),
            top_k=max(part.top_k for part in parts),
            memory_bytes=sum(part.memory_bytes for part in parts),
            cost_class=max((part.cost_class for part in parts), key=["free", "pass", "passes", "model"].index),
            observes=any(part.observes for part in parts),
            reads_next=any(part.reads_next for part in parts),
        )


class Drafter(Protocol):
    """Proposes continuations; a draft can never change what is generated, only how fast.

    `begin` once, in the first step that the sequence has a part in and before anything else is said of it, so never for
    one that ends while it waits; what takes long is for later steps, as all sequences wait for it. `propose` gives one
    draft for each request; `observe` tells of every step, prompts too; `end` once.

    A drafter may also have `close()`. It is called once, when the engine lets go of the drafter, with sequences that
    have not ended perhaps; on another thread than the calls before if these came from the engine's, and nobody waits
    for it longer than the drafter's timeout. One whose module states a PRIORITY may have `suits(context, **options)`,
    a static method: whether it has a part in "auto" for this target.
    """

    needs: Needs

    def begin(self, seq: SequenceView) -> None: ...
    def propose(self, requests: list[DraftRequest]) -> list[Draft]: ...
    def observe(self, step: StepReport) -> None: ...
    def end(self, seq: SequenceView) -> None: ...


class DraftContext(Protocol):
    """What a drafter is made with: the target it drafts for. One that runs a model is given a models.ModelContext."""

    vocab_size: int
    max_model_len: int
    hidden_size: int
    num_layers: int
    verification: str  # how sampled drafts are verified; see config.VERIFICATIONS
    memory_bytes: int | None  # that Needs may ask for; None: any number, as the KV cache is yet to be sized beside it
