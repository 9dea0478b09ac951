"""Appends a verdict to its sequence: stops it, trims what comes after its end, counts. Stops are token ids here; stop
strings are text, which the detokenizer looks for."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from specserve.engine.packed import packed
from specserve.explained import HIDDEN
from specserve.types import JUMP_FORWARD, Draft, Event, Failure, Sequence, SequenceStats, Verdict


def append_verdict(seq: Sequence, draft: Draft, verdict: Verdict) -> list[int]:
    """Append the verdict's tokens up to the first that ends the sequence; returns those appended.

    Sets finish_reason and stop_reason. A stop token is part of the output ids; nothing after it is.
    """
    tokens: list[int] = []
    for token in verdict.tokens:
        seq.tokens.append(token)
        tokens.append(token)
        _stop(seq, token)
        if seq.finished:
            break
    if verdict.logprobs is not None:
        seq.logprobs += verdict.logprobs[: len(tokens)]
    count_draft(seq, draft, _stood(seq, draft, verdict.path[: len(tokens)], tokens))
    return tokens


def _stop(seq: Sequence, token: int) -> None:
    if seq.num_output >= seq.params.min_tokens:
        if token in seq.eos_ids:
            seq.finish_reason = "stop"
        elif token in seq.stop_ids:
            seq.finish_reason, seq.stop_reason = "stop", token
    if not seq.finished and seq.num_output >= seq.max_tokens:
        seq.finish_reason = "length"


def _stood(seq: Sequence, draft: Draft, path: list[int], tokens: list[int]) -> list[int]:
    """The draft nodes that became output. An end token after which a grammar lets nothing come is not in the verdict's
    path, as there is no bonus to follow it, but it stood."""
    if len(path) < len(tokens) and tokens[-1] in seq.stop_ids:
        last = path[-1] if path else -1
        path += np.flatnonzero((draft.parents == last) & (draft.tokens == tokens[-1])).tolist()
    return path


def count_draft(seq: Sequence, draft: Draft, path: list[int]) -> None:
    """Count a verify step, and which nodes of its draft stood."""
    stats, accepted, forced = seq.stats, len(path), draft.jump_forward
    owners = draft.sources or [[JUMP_FORWARD if i in forced else seq.drafter] for i in range(len(draft))]
    if (told := seq.explained) is not None:
        shown = [token if i in draft.own or i in path else HIDDEN for i, token in enumerate(draft.tokens.tolist())]
        told.tokens, told.parents, told.sources, told.path = shown, draft.parents.tolist(), owners, path
    for node, sources in enumerate(owners):
        for source in sources:
            counts = stats.by_source.setdefault(source, [0, 0])
            counts[0] += 1
            counts[1] += node in path
    stats.first_token = stats.first_token or time.perf_counter()
    stats.num_steps += 1
    if len(draft):
        depth = len(draft) if draft.is_chain else int(draft.depths.max()) + 1
        longer = depth - len(stats.drafted_by_position)
        stats.drafted_by_position += [0] * longer
        stats.accepted_by_position += [0] * longer
        stats.num_drafts += 1
        stats.num_draft_tokens += len(draft)
        stats.num_accepted_tokens += accepted
        stats.num_jump_forward_tokens += len(draft.jump_forward)
        stats.num_accepted_jump_forward_tokens += len(draft.jump_forward.intersection(path))
        for i in range(depth):
            stats.drafted_by_position[i] += 1
            stats.accepted_by_position[i] += i < accepted


def _snapshot(stats: SequenceStats) -> SequenceStats:
    by_position = stats.accepted_by_position[:], stats.drafted_by_position[:]
    by_source = {name: counts[:] for name, counts in stats.by_source.items()}
    return replace(stats, accepted_by_position=by_position[0], drafted_by_position=by_position[1], by_source=by_source)


def event(seq: Sequence, tokens: list[int], failure: Failure | None = None) -> Event:
    """What a step did for a sequence, as a snapshot."""
    first = seq.num_output == len(tokens)
    wants = seq.params
    return Event(
        request_id=seq.request_id,
        index=seq.index,
        tokens=tokens,
        logprobs=None if wants.logprobs is None else packed(seq.logprobs[len(seq.logprobs) - len(tokens) :]),
        prompt_logprobs=packed(seq.prompt_logprobs) if first and wants.prompt_logprobs is not None else None,
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
        error=None if failure is None else failure.message,
        error_code=None if failure is None else failure.code,
        stats=seq.stats if seq.finish_reason else _snapshot(seq.stats) if wants.stop else None,
        explained=seq.explained if tokens else None,
        embedding=seq.embedding,
    )
