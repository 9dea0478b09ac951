"""What a client asks for, and how it becomes sequences: defaults and limits are resolved, ids checked."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Sequence as Many
from dataclasses import dataclass

import msgspec

from specserve.adapters import LoadedAdapter
from specserve.cache.prefix import salted
from specserve.errors import InputError, PromptTooLongError, shown
from specserve.explained import Explained
from specserve.structured.base import Grammar, Guarded
from specserve.text.reasoning import Beginning
from specserve.types import BadWords, SamplingParams, Sequence, SequenceStats, wrong_ids

_GOLDEN = 0x9E3779B97F4A7C15  # spreads the completions of one seed over the 64-bit range


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must respect. `max_model_len` counts prompt and output together."""

    vocab_size: int
    max_model_len: int
    eos_ids: frozenset[int]


class Request(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """One prompt as ids with its parameters; the same in every process. `id` is that of whoever drives the engine: what
    a client of a server calls its request gets no further than there.

    `bad_words` are those of params as token ids. `priority`: lower is first, within bounds; see the scheduler. `salt`
    separates prefix caches, and what drafters learn; of one that is `private` they keep nothing. `drafter` is the name
    of its drafter, "none" for plain decoding; None leaves it to the engine. `prediction` is what the answer will mostly
    be, as ids: without a `drafter` the request drafts from it; a drafter that is named may make use of it or not.
    `adapter` is the name of a LoRA adapter that is loaded; None: the model as it is. One that `embeds` is asked for the
    last state of its prompt, and for one token that nobody reads.
    `explain`: its events tell what steps did with drafts. `compiles_slowly`: params.structured is known to take long.
    `arrived`: when, in seconds of time.perf_counter(), if not now. `num_elsewhere`: of so many leading tokens KV may be
    had from another engine, which a connector asks.
    `beginning`: where the answer begins, of a model that reasons; params.structured rules what is after reasoning.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    bad_words: BadWords | None = None
    priority: int = 0
    salt: bytes = b""
    private: bool = False
    drafter: str | None = None
    prediction: tuple[int, ...] = ()
    explain: bool = False
    compiles_slowly: bool = False
    beginning: Beginning = "after"
    adapter: str | None = None
    embeds: bool = False
    arrived: float | None = None
    num_elsewhere: int = 0


def sequences(
    request: Request, limits: Limits, grammar: Grammar | None = None, adapter: LoadedAdapter | None = None
) -> list[Sequence]:
    """The n sequences of a request, or as many as it has beams; `grammar` is params.structured, compiled, and `adapter`
    the one it names. Raises InputError or PromptTooLongError before anything is allocated."""
    params = request.params
    assert (grammar is None) == (params.structured is None), "a grammar is what structured asks for"
    params.check_ids(limits.vocab_size)
    _check_prompt(request.prompt_ids, limits)
    _check_prediction(request.prediction, limits)
    space = limits.max_model_len - len(request.prompt_ids)
    seed = secrets.randbits(64) if params.seed is None else params.seed
    others = params if params.prompt_logprobs is None else dataclasses.replace(params, prompt_logprobs=None)
    first: Sequence | None = None
    group: list[Sequence] = []
    if params.beam_width is not None:  # nothing is drawn
        params = dataclasses.replace(params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    for index in range(params.beam_width or params.n):
        seq = Sequence(
            request_id=request.id,
            index=index,
            tokens=list(request.prompt_ids),
            num_prompt=len(request.prompt_ids),
            params=params if index == 0 else others,
            seed=(seed + index * _GOLDEN) % 2**64,
            max_tokens=space if params.max_tokens is None else min(params.max_tokens, space),
            eos_ids=frozenset() if params.ignore_eos else limits.eos_ids,
            bad_words=request.bad_words,
            priority=request.priority,
            salt=salted(request.salt, None if adapter is None else adapter.digest),
            private=request.private,
            prediction=request.prediction,
            adapter=adapter,
            embeds=request.embeds,
            grammar=_started(grammar),
            parent=first,
            num_elsewhere=0 if index else request.num_elsewhere,
            stats=SequenceStats(arrived=request.arrived or time.perf_counter()),
            explained=Explained() if request.explain else None,
        )
        first = first or seq
        group.append(seq)
    return group


def _started(grammar: Grammar | None) -> Guarded | None:
    if grammar is None:
        return None
    try:
        return Guarded(grammar.start(), grammar)
    except Exception as error:  # a backend's own; it may end nothing but this request
        raise InputError(
            f"structured: the grammar cannot begin: {type(error).__name__}: {error}", "structured"
        ) from error


def _check_prompt(ids: list[int], limits: Limits) -> None:
    if not ids:
        raise InputError("The prompt is empty: there is no token to continue from.", "prompt")
    _check_ids("prompt", ids, limits)
    if len(ids) >= limits.max_model_len:
        reason = f"the context is {limits.max_model_len} tokens and needs room for one more"
        raise PromptTooLongError(len(ids), limits.max_model_len - 1, reason)


def _check_prediction(ids: Many[int], limits: Limits) -> None:
    """One longer than the context could never be said, and finding one's place in it would delay everybody."""
    if len(ids) > limits.max_model_len:
        raise InputError(
            f"The prediction has {len(ids)} tokens and the context is {limits.max_model_len}; an answer cannot be "
            "longer. Leave out what is not likely to come.",
            "prediction",
        )
    _check_ids("prediction", ids, limits)


def _check_ids(name: str, ids: Many[int], limits: Limits) -> None:
    if wrong := wrong_ids(ids, limits.vocab_size):
        allowed = f"ids are whole numbers from 0 to {limits.vocab_size - 1}"
        raise InputError(f"The {name} holds token id {shown(wrong[0])}; {allowed}.", name)
