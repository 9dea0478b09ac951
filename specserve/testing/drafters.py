"""A drafter that knows the answer, and steps made by hand."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence as Many

import numpy as np

from specserve.errors import ConfigError
from specserve.sampling.inputs import SamplingInput
from specserve.speculation.base import DraftRequest, Needs, SequenceView, StepReport
from specserve.types import Draft, ScheduledSeq, Sequence


class ScriptedDrafter:
    """A drafter that knows the answer and errs on purpose: for tests of everything around drafters.

    `scripts` maps a prompt's token ids to the output a recorded run gave; other prompts get empty drafts. Each drafted
    token is the right one with probability `accuracy`, else another of `vocab_size`; what follows an error is again
    from the script. With `decoys` > 0 the draft is a tree: every level has that many wrong siblings, in random order,
    and goes on below the scripted one. Errors depend on (seed, position) alone, not on calls before.

    `live` holds the sequences between begin and end; `num_drafted` and `num_accepted` count tokens.
    """

    needs = Needs()

    def __init__(
        self,
        scripts: Mapping[tuple[int, ...], Many[int]],
        vocab_size: int,
        *,
        accuracy: float = 1.0,
        decoys: int = 0,
        seed: int = 0,
    ) -> None:
        if not 0 <= accuracy <= 1 or decoys < 0 or vocab_size < decoys + 2:
            raise ConfigError(
                f"accuracy {accuracy} must lie in 0..1, decoys {decoys} be at least 0, and vocab_size {vocab_size} "
                "leave room for a planted error beside them."
            )
        self.scripts = scripts
        self.vocab_size = vocab_size
        self.accuracy = accuracy
        self.decoys = decoys
        self.seed = seed
        self.live: set[SequenceView] = set()
        self.num_drafted = 0
        self.num_accepted = 0

    def begin(self, seq: SequenceView) -> None:
        assert seq not in self.live, "begin twice"
        self.live.add(seq)

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        assert self.live.issuperset(seq for seq, _ in requests), "a sequence that has not begun, or has ended"
        drafts = [self._draft(seq, room) for seq, room in requests]
        self.num_drafted += sum(len(draft) for draft in drafts)
        return drafts

    def observe(self, step: StepReport) -> None:
        assert self.live.issuperset(each.seq for each in step.seqs), "a sequence that has not begun, or has ended"
        for each in step.seqs:
            self.num_accepted += 0 if each.verdict is None else len(each.verdict.path)

    def end(self, seq: SequenceView) -> None:
        assert seq in self.live, "end without begin"
        self.live.remove(seq)

    def _draft(self, seq: SequenceView, budget: int) -> Draft:
        script = self.scripts.get(tuple(seq.tokens[: seq.num_prompt]), ())
        tokens: list[int] = []
        parents: list[int] = []
        above = -1
        num_output = len(seq.tokens) - seq.num_prompt
        for depth, right in enumerate(itertools.islice(script, num_output, None)):
            room = budget - len(tokens)
            if room <= 0:
                break
            siblings, main = self._level(len(seq.tokens) + depth, right, min(self.decoys, room - 1))
            parents += [above] * len(siblings)
            above = len(tokens) + main
            tokens += siblings
        return Draft(np.asarray(tokens, np.int32), np.asarray(parents, np.int32))

    def _level(self, position: int, right: int, decoys: int) -> tuple[list[int], int]:
        """The siblings drafted for one position, and which of them the draft goes on from."""
        noise = np.random.default_rng((self.seed, position))
        accurate = noise.random() < self.accuracy
        wrong = 1 + noise.choice(self.vocab_size - 1, decoys + 1, replace=False)
        main = int(noise.integers(decoys + 1))
        siblings = [(right + int(offset)) % self.vocab_size for offset in wrong]
        if accurate:
            siblings[main] = right
        return siblings, main


def sampled(seqs: Many[Sequence], drafts: Many[Draft], starts: Many[int]) -> SamplingInput:
    """What a sampler is asked of them; as `scheduled`."""
    return SamplingInput.of(scheduled(seqs, drafts, starts))


def scheduled(seqs: Many[Sequence], drafts: Many[Draft], starts: Many[int]) -> list[ScheduledSeq]:
    """Sequences with their drafts as in a step, whose logits begin at rows `starts`."""
    found = zip(seqs, drafts, starts, strict=True)
    return [ScheduledSeq(seq, len(seq.tokens) - 1, 1, True, draft, logits_start=start) for seq, draft, start in found]


def path_to(draft: Draft, node: int) -> list[int]:
    """The nodes of a draft from the root's child down to `node`; empty for -1."""
    path: list[int] = []
    while node >= 0:
        path, node = [node, *path], int(draft.parents[node])
    return path
