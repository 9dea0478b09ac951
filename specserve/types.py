"""The nouns: what is asked, what is being generated, what was guessed, what the target said. The words: *draft* a
guess at the next tokens, a chain or a tree; *propose* make one; *verify* let the target judge it; *accept* a draft
token the target agrees with; *replacement* the target's own token at the first disagreement; *bonus* the token after
a draft that was accepted whole; *keep* the KV of what was accepted; *cached* how many tokens have valid KV."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Container, Iterable, Mapping, Sequence as Many
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from specserve.adapters import LoadedAdapter
from specserve.beams import Candidate, EarlyStopping, check_beams
from specserve.errors import FailureCode, InputError, check_number, shown, strict_fields
from specserve.explained import Explained
from specserve.help import Help
from specserve.structured.spec import Structured

if TYPE_CHECKING:
    import torch

Ids = NDArray[np.int32]
PREDICTION, JUMP_FORWARD = "prediction", "jump_forward"  # sources of drafts: what a request predicts, a grammar forces
FinishReason = Literal["stop", "length", "abort", "error"]
LogprobBlock = tuple[int, bytes]  # how many entries of log-probabilities, and these as engine.packed packs them


@strict_fields("sampling parameter", InputError)
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled; names and meanings are vLLM's and OpenAI's.

    `temperature=0` is greedy. `seed=None` draws one. `max_tokens=None` is up to the context length. `logprobs=k`
    reports the chosen token and the k best of the model's own distribution, before any processing; `prompt_logprobs`
    the same for the prompt. `num_speculative_tokens` caps this request's drafts (0: none), None leaves that to the
    engine. `structured` is what the output must be: whatever Structured.of takes. Raises InputError naming the field.
    """

    n: int = 1
    temperature: Annotated[float, Help("0 is greedy: the most likely token, the same text every time.")] = 1.0
    top_k: Annotated[int, Help("Only the k most likely tokens; 0 is off.")] = 0
    top_p: Annotated[float, Help("Only the most likely tokens that together reach this probability.")] = 1.0
    min_p: Annotated[float, Help("Only tokens at least this likely, relative to the most likely one.")] = 0.0
    repetition_penalty: Annotated[float, Help("Above 1 makes any token seen before less likely.")] = 1.0
    presence_penalty: Annotated[float, Help("Lowers tokens that are already in the output.")] = 0.0
    frequency_penalty: Annotated[float, Help("Lowers tokens by how often they are in the output.")] = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Many[int] | None = None
    bad_words: Many[str] = ()
    max_tokens: Annotated[int | None, Help("Most output tokens.")] = 16
    min_tokens: Annotated[int, Help("No end before this many tokens.")] = 0
    ignore_eos: Annotated[bool, Help("Go on after the model's end token.")] = False
    stop: Annotated[str | Many[str], Help("End at this text; may be repeated.")] = ()
    stop_token_ids: Many[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: Annotated[int | None, Help("With a temperature: the same seed gives the same text [default: drawn].")] = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_speculative_tokens: int | None = None
    structured: Structured | None = None
    beam_width: int | None = None  # beam search, of so many beams; the next two are for it
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        for name in _LISTS:
            if not isinstance(given := getattr(self, name), Iterable | None):
                raise InputError(f"{name} is {shown(given)}; it must be a list.", name)
            if given is not None or name != "allowed_token_ids":  # which allows all, where an empty list allows none
                given = () if given is None else (given,) if isinstance(given, str) else tuple(given)
                object.__setattr__(self, name, given)
        if not isinstance(given := self.logit_bias, Mapping | None):
            raise InputError(f"logit_bias is {shown(given)}; it must be a mapping of ids to numbers.", "logit_bias")
        for name, (kind, low, high) in RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                check_number(name, value, kind, low, high)
        for name, texts in (("stop", self.stop), ("bad_words", self.bad_words)):
            if wrong := [text for text in texts if not isinstance(text, str) or not text]:
                raise InputError(f"{name} holds {shown(wrong[0])}; it takes texts that are not empty.", name)
        if self.allowed_token_ids == ():
            raise InputError("allowed_token_ids is empty: leave it out to allow all tokens.", "allowed_token_ids")
        for token, bias in (self.logit_bias or {}).items():
            check_number(f"logit_bias[{shown(token)}]", bias, float, -100.0, 100.0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InputError(f"min_tokens is {self.min_tokens}, above max_tokens, {self.max_tokens}.", "min_tokens")
        check_beams(self)
        if self.structured is not None:
            object.__setattr__(self, "structured", Structured.of(self.structured))
            if self.ignore_eos:
                raise InputError("ignore_eos: structured output ends where its grammar does. Omit it.", "ignore_eos")

    def check_ids(self, vocab_size: int) -> None:
        """Raise InputError for a token id outside 0..vocab_size-1 (the width of the LM head)."""
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            if wrong := wrong_ids(tuple(getattr(self, name) or ()), vocab_size):
                reason = f"{name} holds {shown(wrong[0])}; token ids are whole numbers from 0 to {vocab_size - 1}."
                raise InputError(reason, name)


def wrong_ids(ids: Many[Any], vocab_size: int) -> list[Any]:
    """Those that are not ids of tokens. That there are none, as nearly always, is found without a loop in Python."""
    if set(map(type, ids)) <= {int} and (not ids or (min(ids) >= 0 and max(ids) < vocab_size)):
        return []
    return [each for each in ids if not isinstance(each, int) or isinstance(each, bool) or not 0 <= each < vocab_size]


# SamplingParams' numbers: int or float, least, most. None is beyond 64 bits: a request is sent to other processes.
RANGES: dict[str, tuple[type, float, float]] = {
    "n": (int, 1, 128),
    "temperature": (float, 0.0, 100.0),
    "top_k": (int, -1, 2**31 - 1),
    "top_p": (float, 1e-9, 1.0),
    "min_p": (float, 0.0, 1.0),
    "repetition_penalty": (float, 1e-3, 1e3),
    "presence_penalty": (float, -2.0, 2.0),
    "frequency_penalty": (float, -2.0, 2.0),
    "max_tokens": (int, 1, 2**63 - 1),
    "min_tokens": (int, 0, 2**63 - 1),
    "seed": (int, -(2**63), 2**64 - 1),
    "logprobs": (int, 0, 64),
    "prompt_logprobs": (int, 0, 64),
    "num_speculative_tokens": (int, 0, 1024),
    "beam_width": (int, 1, 32),
    "length_penalty": (float, -100.0, 100.0),
}
_LISTS = ("stop", "bad_words", "stop_token_ids", "allowed_token_ids")
_OPTIONAL = {"max_tokens", "seed", "logprobs", "prompt_logprobs", "num_speculative_tokens", "beam_width"}


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token under the model's own distribution (natural log), its rank (1 = the most likely),
    and the `top` most likely as {id: log-probability}, best first."""

    token: int
    logprob: float
    rank: int
    top: dict[int, float]


@dataclass(frozen=True, slots=True)
class BadWords:
    """Words as token ids, none of which may be completed; see sampling.bad_words. Before its last token a word has a
    stem. Among stems that begin alike a shorter one is the more common: what it forbids, no longer one repeats."""

    always: list[int]  # tokens that are words by themselves, ascending
    stems: list[bytes]  # int32 ids, the last one first; sorted, no two alike, none empty
    lasts: list[list[int]]  # [stems] tokens that may not follow it, ascending
    above: list[int]  # [stems] which other stem it begins with, the longest of them; -1: none


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence in order. `ids[i]` holds tokens [16 i, 16 i + 16); `hashes` has one chained digest for
    each leading block that the prefix cache knows; the first `num_drafted` have all KV of the drafter's model, too."""

    ids: array[int] = field(default_factory=lambda: array("i"))  # as packed: a step copies all of it
    hashes: list[bytes] = field(default_factory=list)
    num_drafted: int = 0


@dataclass(slots=True)
class SequenceStats:
    """What happened to one sequence. Times are seconds of time.perf_counter()."""

    arrived: float = 0.0
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    num_steps: int = 0  # verify steps: steps that emitted tokens
    num_drafts: int = 0  # of these, how many had a draft
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_jump_forward_tokens: int = 0  # of the draft tokens, those that a grammar left no choice of
    num_accepted_jump_forward_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)  # [i]: drafts of which token i was accepted
    drafted_by_position: list[int] = field(default_factory=list)  # [i]: drafts that had a token at depth i
    num_preemptions: int = 0
    num_prefix_cached_tokens: int = 0
    num_received_tokens: int = 0  # of the prompt, whose KV came from another engine
    by_source: dict[str, list[int]] = field(default_factory=dict)  # tokens drafted and accepted, of each that proposed
    drafter: str = "none"  # whose drafts it gets
    longest_draft: int = 0  # tokens that a draft of it may have, unless the request asks for fewer

    @property
    def accepted_prediction_tokens(self) -> int:
        """As in OpenAI's usage: tokens drafted from the request's prediction that the target agreed with."""
        return self.by_source.get(PREDICTION, (0, 0))[1]

    @property
    def rejected_prediction_tokens(self) -> int:
        """As in OpenAI's usage: tokens drafted from the request's prediction that did not become output."""
        return self.by_source.get(PREDICTION, (0, 0))[0] - self.accepted_prediction_tokens

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a verify step emits: 1 + accepted / steps; 1.0 before the first step."""
        return 1.0 + self.num_accepted_tokens / self.num_steps if self.num_steps else 1.0


@dataclass(eq=False, slots=True)
class Sequence:
    """One completion being generated; identity is equality. `tokens` is prompt + output, with KV of the first."""

    request_id: str
    index: int  # which of the request's n completions
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int  # uint64; resolved, already different for each of the n completions
    max_tokens: int  # resolved: params.max_tokens or what the context leaves
    eos_ids: frozenset[int] = frozenset()  # the model's own end tokens, empty with ignore_eos
    bad_words: BadWords | None = None  # params.bad_words as token ids
    priority: int = 0  # lower runs first; the scheduler bounds by how much
    order: int = 0  # arrival counter, set by the engine
    salt: bytes = b""  # prefix-cache salt: sequences with different salts share nothing
    private: bool = False  # whether drafters share nothing of it with other requests at all
    drafter: str = "none"  # whose drafts it gets, by name, and
    draft_limit: int = 0  # of how many tokens at most, but for
    jump_forward: bool = True  # whether tokens that its grammar leaves no choice of are drafted; all set by the policy
    prediction: tuple[int, ...] = ()  # what the output will mostly be, says who asked; a hint for drafters
    adapter: LoadedAdapter | None = None  # what the target's weights are changed by; drafters draft without it
    parent: Sequence | None = None  # the completion whose prompt KV this one shares (n > 1)
    beams: Any = None  # the engine.beams.BeamGroup that it is one of, set by that
    blocks: BlockTable = field(default_factory=BlockTable)  # set by the cache
    cached: int = 0  # leading tokens with valid KV, fewer than there are while it runs; set by the cache
    under_way: int = 0  # tokens after these whose KV comes with steps that have not ended; set by the scheduler
    draft_cached: int = 0  # leading tokens, then nodes of the draft, with KV of the drafter's model; set by its runner
    num_elsewhere: int = 0  # leading tokens whose KV may be had from another engine
    furthest: int = 0  # the highest `cached` it has had, set by the engine
    digests: list[bytes] = field(default_factory=list)  # of its leading blocks, as far as the cache needed them
    embeds: bool = False  # its prompt's last state is asked for
    embedding: bytes | None = None
    grammar: GuardedState | None = None
    edits: object = None  # set by sampling: what its parameters come to, in part shared with `parent`
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per output token, if asked for
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # one per prompt token, first None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it; None for eos
    stats: SequenceStats = field(default_factory=SequenceStats)
    explained: Explained | None = None  # its newest step, if its request asked for that
    key: bytes = field(default_factory=lambda: secrets.token_bytes(16))  # nobody else's
    stop_ids: frozenset[int] = field(init=False)  # every id that ends it: eos_ids and params.stop_token_ids

    def __post_init__(self) -> None:
        self.stop_ids = self.parent.stop_ids if self.parent else self.eos_ids.union(self.params.stop_token_ids)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A guess: node i is `tokens[i]` and follows node `parents[i]` (< i), or the last committed token (-1). A chain has
    parents [-1, 0, 1, ...] or is empty. Siblings must differ. `q[i]` is the distribution node i was drawn from, float
    [n, vocab]; None: all are one-hot. `jump_forward`: nodes that a grammar leaves no choice of. `confidence[i]`: how
    likely node i is accepted if its parent is; `sources[i]`: whose it is; `own`: no other's text, shown if rejected."""

    tokens: Ids
    parents: Ids
    q: torch.Tensor | None = None
    jump_forward: frozenset[int] = frozenset()
    confidence: NDArray[np.float32] | None = None  # [n]
    sources: Many[Many[str]] = ()
    own: Container[int] = frozenset()
    _chain: bool | None = field(default=None, init=False, repr=False)  # is_chain, which every step asks several times

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(cls, tokens: Many[int], q: torch.Tensor | None = None, **more: Any) -> Draft:
        """With `more` of a draft's fields."""
        ids = np.asarray(tokens, np.int32).reshape(-1)
        draft = cls(ids, np.arange(-1, len(ids) - 1, dtype=np.int32), q, **more)
        object.__setattr__(draft, "_chain", True)
        return draft

    @staticmethod
    def empty() -> Draft:
        return _EMPTY

    @property
    def is_chain(self) -> bool:
        if self._chain is None:
            object.__setattr__(self, "_chain", bool((self.parents == np.arange(-1, len(self) - 1)).all()))
        return bool(self._chain)

    @property
    def depths(self) -> Ids:
        """Depth of each node, int32 [n]: a child of the last committed token has depth 0."""
        if self.is_chain:
            return np.arange(len(self), dtype=np.int32)
        depths = np.zeros(len(self), np.int32)
        for i, parent in enumerate(self.parents):
            depths[i] = depths[parent] + 1 if parent >= 0 else 0
        return depths


_EMPTY = Draft.chain(())


@dataclass(eq=False, slots=True)
class ScheduledSeq:
    """One sequence's share of a step: `num_new` of its own tokens from `start` on, where it had begun no more,
    and, where these reach its end, the draft after them. Then it is `sampled`: row logits_start of the logits is for
    what follows its last token, row logits_start + 1 + i for what follows draft node i."""

    seq: Sequence
    start: int
    num_new: int
    sampled: bool
    draft: Draft = field(default_factory=lambda: _EMPTY)
    first_row: int = 0  # of its first token among the rows of the step; set by pack
    logits_start: int = 0  # set by pack


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target said: `tokens` are the accepted ones and one more (bonus or replacement), `path` the draft nodes
    kept. len(tokens) == len(path) + 1, always. `logprobs` has one entry per token if the request asked. `candidates`
    of a beam are the best that may follow it, and those that may follow each node of its draft, a chain."""

    tokens: list[int]
    path: list[int]
    logprobs: list[TokenLogprobs] | None = None
    candidates: list[list[Candidate]] | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sequence cannot go on; the engine ends it with finish_reason "error"."""

    message: str
    code: FailureCode = "completion_failed"


class Event(msgspec.Struct, frozen=True, array_like=True):
    """What one step did for one sequence: new output tokens, and how it ended if it did. `stats` count up to here; they
    come with its last event, and with all events of requests with stop strings, as any may be the last."""

    request_id: str
    index: int
    tokens: list[int]
    logprobs: list[LogprobBlock] | None = None  # one entry per token
    prompt_logprobs: list[LogprobBlock] | None = None  # one per prompt token, on the first event that has tokens
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # with finish_reason "error"; so is the next
    error_code: FailureCode | None = None
    stats: SequenceStats | None = None
    explained: Explained | None = None  # if asked for; comes with tokens
    beam: tuple[float, float] | None = None  # of a beam's answer: its cumulative log-probability, and its score
    embedding: bytes | None = None  # of a request that embeds: float32 [hidden], the last prompt token's final state


class GrammarState(Protocol):
    """Where one sequence stands in its grammar. The engine and a grammar meet only at a row of bits, int32
    [ceil(vocab / 32)], bit t set when token t may come next.

    `fill` writes all of a row; `allows` tells one bit of it, for less. `advance` moves over a token and says whether
    that may come; if not, nothing has moved. `rollback` takes back the last n that it moved over. `jump_forward` are
    the tokens that must follow, as the tokenizer would split them: a draft, as other tokens may spell the same. Any of
    them may raise: it is the request's end.

    `fill_draft` fills the rows of a whole draft, chain or tree, int32 [len(tokens) + 1, words], contiguous: rows[0] is
    the state's own, rows[i + 1] what may follow node i, nothing where that may not stand, is not in the vocabulary or
    is one of `ends`. The state is then where it was. A backend without a call of its own for it takes
    structured.walk.fill_draft. What it raises is the engine's fault, but for a RefusedError: then the constraint goes
    beyond the backend's limits.
    """

    def fill(self, row: Ids) -> None: ...
    def fill_draft(self, tokens: Ids, parents: Ids, ends: frozenset[int], rows: Ids) -> None: ...
    def allows(self, token: int) -> bool: ...
    def advance(self, token: int) -> bool: ...
    def rollback(self, n: int) -> None: ...
    def jump_forward(self) -> list[int]: ...


class GuardedState(GrammarState, Protocol):
    """A state that raises nothing: `fault` says why nothing may come any more. A `reader` has a state of its own for
    the same grammar; see speculation.base.GrammarReader."""

    fault: Failure | None

    def reader(self, num_prompt: int, ends: frozenset[int]) -> Any: ...
