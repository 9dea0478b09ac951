"""The beams of one request as sequences: who lives on after a step, with whose KV and grammar, and what is answered.

A group has as many sequences as beams. Those that are live run, together or not at all; the others hold nothing. The
first one computes the prompt. Where several beams follow one, they share its blocks, and each copies what it writes.
When a group is preempted its first live beam computes its KV again, then the others what differs in theirs.

**Drafts.** Where a step has verified a draft of every live beam, a chain, it may be several steps of the search: it
goes on as long as each survivor's token is the next node of its draft, whose row was computed. So answers do not depend
on drafts. A beam that is followed by others has them look its text up anew."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence as Many
from typing import TypeAlias

from specserve.beams import Answer, BeamSearch, Candidate, Choice, Text
from specserve.cache.cache import KVCache
from specserve.engine.append import count_draft
from specserve.engine.packed import packed
from specserve.engine.scheduler import Scheduler
from specserve.errors import InputError
from specserve.runtime.pack import Step
from specserve.structured.masks import advance
from specserve.types import Draft, Event, Failure, FinishReason, SamplingParams, ScheduledSeq, Sequence, Verdict

# What comes after a prompt of these tokens as a text that the stop strings of these parameters end.
BeginText: TypeAlias = Callable[[SamplingParams, Many[int]], Text]

_TOO_FEW = (
    "Beam search found {} answers: the grammar, allowed_token_ids, bad_words and min_tokens together leave no other. "
    "Ask for a smaller n."
)


class BeamGroup:
    """One request's beams. `live` are those of `search`, in its order."""

    def __init__(self, seqs: Many[Sequence], reopen: Callable[[Sequence], None], begin_text: BeginText) -> None:
        """`reopen` is called with a sequence that has got other tokens than it had."""
        root = seqs[0]
        self._reopen = reopen
        penalty, early = root.params.length_penalty, root.params.early_stopping
        self.seqs, self.width = seqs, len(seqs)
        text = begin_text(root.params, root.tokens) if root.params.stop else None
        self.search = BeamSearch(self.width, root.max_tokens, root.stop_ids, len(root.stop_ids), penalty, early, text)
        self.num_candidates = self.search.num_candidates
        self.live = [root]
        for seq in seqs:
            seq.beams = self

    def check(self, cache: KVCache, max_num_seqs: int) -> None:
        """Raise InputError for a group that could not run even alone."""
        root, size = self.seqs[0], cache.block_size
        if self.width > max_num_seqs:
            reason = f"beam_width is {self.width}, and at most {max_num_seqs} sequences run together (--max-num-seqs)."
            raise InputError(f"{reason} Ask for fewer beams.", "beam_width")
        shared, rest = divmod(root.num_prompt, size)
        most = (cache.num_blocks - shared) // self.width * size - rest  # each beam's tokens in blocks of its own
        if root.max_tokens > most:
            raise InputError(
                f"{self.width} beams of {root.max_tokens} tokens after {root.num_prompt} do not fit the KV cache, "
                f"{cache.num_blocks * size} tokens. Ask for fewer beams, or for max_tokens of at most {max(0, most)}.",
                "beam_width",
            )

    def num_forced(self) -> int:
        """How many tokens the grammar leaves every live beam no choice of."""
        return min(len(seq.grammar.jump_forward()) if seq.grammar is not None else 0 for seq in self.live)

    def keep(
        self,
        shares: Mapping[Sequence, ScheduledSeq],
        results: Mapping[Sequence, Verdict | Failure],
        cache: KVCache,
        scheduler: Scheduler,
    ) -> tuple[list[Event], dict[Sequence, Verdict]]:
        """Go on by what a step says of all live beams: its events, of a search that is over, and of each beam what
        stood of its draft."""
        before = self.live
        rows: dict[Sequence, list[list[Candidate]]] = {}
        for seq in shares:
            result = results[seq]
            if isinstance(result, Verdict):
                rows[seq] = result.candidates or []
            elif result.code == "no_token_left" and (seq.grammar is None or seq.grammar.fault is None):
                rows[seq] = [[]]  # the beam ends without an answer
            else:
                return self.fail(result), {}
        if len(shares) < len(before):
            self._resume(shares, cache, scheduler)
            return [], {}
        stood, chosen = dict.fromkeys(before, 0), list[Choice]()
        for depth in itertools.count():
            chosen = self.search.advance([rows[seq][depth] for seq in self.live])
            if self.search.is_done or not self._are_drafted(chosen, depth, shares, rows):
                break
            self.live = [self.live[beam] for beam, _ in chosen]
            stood |= dict.fromkeys(self.live, depth + 1)
        longest = max((shares[seq].draft for seq in before), key=len)
        count_draft(self.seqs[0], longest, list(range(max(stood.values()))))
        verdicts = {}
        for seq, count in stood.items():
            nodes = shares[seq].draft.tokens[:count].tolist()
            verdicts[seq] = Verdict([*nodes, -1], [*range(count)])  # what follows is no node that stands
        if self.search.is_done:
            return self._answer(), verdicts
        fault = self._grow(before, chosen, shares, verdicts, cache, scheduler)
        return ([] if fault is None else self.fail(fault)), verdicts

    def _resume(self, shares: Mapping[Sequence, ScheduledSeq], cache: KVCache, scheduler: Scheduler) -> None:
        """Some of the live beams lack KV, after a preemption: the last tokens of those that have it run again, with
        theirs. When the first one has its own, the others join with what they share of it."""
        for seq, share in shares.items():
            cache.keep(seq, share.num_new - 1)
        first, *others = self.live
        for seq in others:
            if first in shares and seq not in scheduler.running:
                cache.fork(first, seq, _num_same(first, seq) - cache.reads_next)
                scheduler.join(seq)

    def _are_drafted(
        self,
        chosen: list[Choice],
        depth: int,
        shares: Mapping[Sequence, ScheduledSeq],
        rows: Mapping[Sequence, list[list[Candidate]]],
    ) -> bool:
        """Whether the row after each of these tokens was computed."""
        for beam, token in chosen:
            seq = self.live[beam]
            draft = shares[seq].draft
            if not (draft.is_chain and depth < len(draft) and depth + 1 < len(rows[seq])):
                return False
            if draft.tokens[depth] != token:
                return False
        return True

    def _grow(
        self,
        before: list[Sequence],
        chosen: list[Choice],
        shares: Mapping[Sequence, ScheduledSeq],
        verdicts: Mapping[Sequence, Verdict],
        cache: KVCache,
        scheduler: Scheduler,
    ) -> Failure | None:
        """Let the chosen tokens follow their beams, the first of a beam's in its place, others beside it."""
        parents = [self.live[beam] for beam, _ in chosen]
        growing = set(parents)
        for seq in before:
            if seq not in growing:
                scheduler.remove(seq)
        for seq in growing:
            path = verdicts[seq].path
            nodes = verdicts[seq].tokens[: len(path)]
            cache.keep(seq, shares[seq].num_new, path, nodes)
            seq.tokens += nodes
            if seq.grammar is not None and (fault := advance(seq, nodes)) is not None:
                return fault
        idle = [seq for seq in self.seqs if seq not in growing]
        self.live = []
        for parent in parents:
            if parent in growing:
                growing.remove(parent)
                self.live.append(parent)
                continue
            child = idle.pop()
            if (fault := _become(child, parent)) is not None:
                return fault
            self._reopen(child)
            cache.fork(parent, child, parent.cached)
            child.furthest = child.cached
            scheduler.join(child)
            self.live.append(child)
        for seq, (_, token) in zip(self.live, chosen, strict=True):
            seq.tokens.append(token)
            if seq.grammar is not None and (fault := advance(seq, [token])) is not None:
                return fault
        return None

    def _answer(self) -> list[Event]:
        """The best answers, and for those that there are not why. Nothing of the group runs after it."""
        answers, wanted = self.search.answers, self.seqs[0].params.n
        few = Failure(_TOO_FEW.format(len(answers)), "no_token_left")
        rest = [self._event(i, "error", failure=few) for i in range(len(answers), wanted)]
        self._finish()
        return [self._told(i, answer) for i, answer in enumerate(answers[:wanted])] + rest

    def fail(self, failure: Failure) -> list[Event]:
        """End all of it."""
        faults = [seq.grammar.fault for seq in self.live if seq.grammar is not None]
        failure = next((fault for fault in faults if fault is not None), failure)
        self._finish()
        return [self._event(i, "error", failure=failure) for i in range(self.seqs[0].params.n)]

    def abort(self) -> list[Event]:
        """End all of it, as whoever asked wants no answer."""
        self._finish()
        return [self._event(i, "abort") for i in range(self.seqs[0].params.n)]

    def _finish(self) -> None:
        for seq in self.seqs:
            seq.finish_reason = "stop"

    def _told(self, index: int, answer: Answer) -> Event:
        root, path = self.seqs[0], answer.beam.path()
        last, text = path[-1].token, answer.beam.text
        stop = last if text is None else text.stop
        logprobs = None if root.params.logprobs is None else packed([each.entry for each in path])
        prompt = packed(root.prompt_logprobs) if index == 0 and root.params.prompt_logprobs is not None else None
        return Event(
            root.request_id,
            index,
            [each.token for each in path],
            logprobs,
            prompt,
            "length" if answer.is_cut else "stop",
            None if answer.is_cut or last in root.eos_ids else stop,
            stats=root.stats,
            beam=(answer.beam.score, answer.score),
        )

    def _event(self, index: int, reason: FinishReason, failure: Failure | None = None) -> Event:
        root = self.seqs[0]
        message, code = (None, None) if failure is None else (failure.message, failure.code)
        return Event(root.request_id, index, [], finish_reason=reason, error=message, error_code=code, stats=root.stats)


def _become(child: Sequence, parent: Sequence) -> Failure | None:
    """Let a beam that is not live have the tokens of another, and stand there in its grammar, from where they parted:
    states of grammars cannot be copied."""
    same = _num_same(child, parent)
    parted = len(child.tokens) - same
    child.tokens[same:] = parent.tokens[same:]
    if child.grammar is None:
        return None
    child.grammar.rollback(parted)
    return advance(child, child.tokens[same:])


def _num_same(one: Sequence, other: Sequence) -> int:
    """Of how many tokens two beams both begin."""
    same, shortest = one.num_prompt, min(len(one.tokens), len(other.tokens))
    while same < shortest and one.tokens[same] == other.tokens[same]:
        same += 1
    return same


def level(step: Step) -> None:
    """Cut the drafts of beams to chains that are equally long: deeper, a survivor would have no row."""
    groups: dict[BeamGroup, list[ScheduledSeq]] = {}
    for each in step.seqs:
        if each.seq.beams is not None:
            groups.setdefault(each.seq.beams, []).append(each)
    for shares in groups.values():
        if not any(len(each.draft) for each in shares):
            continue
        paths = [_first_path(each.draft) for each in shares]
        length = min(map(len, paths))
        for each, path in zip(shares, paths, strict=True):
            nodes, draft = path[:length], each.draft
            each.draft = Draft.chain(
                draft.tokens[nodes].tolist(),
                jump_forward=frozenset(i for i, node in enumerate(nodes) if node in draft.jump_forward),
                sources=[draft.sources[node] for node in nodes] if draft.sources else (),
                own=frozenset(i for i, node in enumerate(nodes) if node in draft.own),
            )


def _first_path(draft: Draft) -> list[int]:
    """From the root the first child, which is the one that its drafter prefers, and so on."""
    if draft.is_chain:
        return [*range(len(draft))]
    path, parents = [-1], draft.parents.tolist()
    while path[-1] in parents:
        path.append(parents.index(path[-1]))
    return path[1:]


def fellows(seq: Sequence) -> Many[Sequence]:
    """The sequences that end with this one."""
    return [seq] if seq.beams is None else seq.beams.seqs
