"""Says what is wrong with a head, from its replays: each finding is a fault, what it costs, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specserve.bench.heads.replay import Replay
from specserve.bench.heads.variants import IDS, STATES, TAPS, Variant

SURE = 3.0  # standard errors that a difference must have
_WORTH = 0.1  # of the accepted tokens: what is not worth a word
_LEAST = 0.05  # accepted tokens of a draft: likewise
_MOST_SHIFT = 16  # of ids in a vocabulary that are looked for
_MOST_MISSING = 0.05  # of the target's tokens, that a good draft vocabulary lacks at most
_LOW = 0.35  # acceptance of the first token below which a head has learned little


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault by its short name, the sentence that says it, with its price, and what to do about it."""

    fault: str
    says: str
    todo: str

    def as_dict(self) -> dict[str, str]:
        return {"fault": self.fault, "says": self.says, "todo": self.todo}


def is_gain(gain: float, error: float, base: float) -> bool:
    """Whether so many accepted tokens more are more than chance, and worth a word."""
    return gain >= SURE * error and gain >= max(_LEAST, _WORTH * base)


_MEANING = {
    IDS: "The head was trained on token ids that stand {place} than those it is served",
    STATES: "The head was trained on hidden states that stand {place} than those it is served",
    TAPS: "The head was trained on other layers of the target than its config.json names",
}
_TODO = {
    (
        IDS,
        -1,
    ): "Beside the hidden state of token i it must read token i + 1: shift the ids when you train, or convert, it.",
    (IDS, 1): "In training it saw the token that it is to guess, which a server cannot show it: train it again.",
    (STATES, -1): "Pair the hidden state of token i with token i + 1, which comes next, and train it again.",
    (STATES, 1): "In training it saw hidden states that a server does not have yet: train it again.",
}


def misplaced(base: Replay, replays: Many[tuple[Variant, Replay]]) -> list[Finding]:
    """What a head does better with than with its own inputs: of each group the best."""
    found = []
    for group in (IDS, STATES, TAPS):
        gains = [(*replay.gain_over(base), variant) for variant, replay in replays if variant.group == group]
        better = [each for each in gains if is_gain(each[0], each[1], base.mean_accepted)]
        if not better:
            continue
        gain, error, variant = max(better, key=lambda each: each[0])
        offset = variant.shown.tokens or variant.shown.rows
        says = _MEANING[group].format(place="one place earlier" if offset < 0 else "one place later")
        says += f": with {variant.name} {gain:.2f} (+-{error:.2f}) more tokens of a draft are accepted."
        todo = _TODO.get((group, offset)) or (
            f"Name {variant.name} in config.json, as its format counts them (outputs from 0, or inputs of layers, "
            "which are one more), or train it again."
        )
        found.append(Finding(group, says, todo))
    return found


def shifted_places(base: Replay) -> list[Finding]:
    """Whether drafts are right for the place before, or after, the one that they stand in."""
    drafted, truth = np.array(base.drafted), np.array(base.truth)
    before = np.concatenate((np.array(base.before)[:, None], truth[:, :-1]), 1)[:, : base.depth]
    later = truth[:, 1 : base.depth + 1]
    judged = truth[:, 0] >= 0
    own = _share(drafted[:, 0] == truth[:, 0], judged)
    found = []
    for goal, says, todo in (
        (later, "one place further", "Drop its first token: it was trained to guess a token later than it stands for."),
        (
            before,
            "one place too early",
            "It repeats the token that it reads: shift its labels by one and train it again.",
        ),
    ):
        is_right = (drafted[:, 0] == goal[:, 0]) & (drafted[:, 0] != truth[:, 0])
        share = _share(is_right, judged & (goal[:, 0] >= 0))
        if is_gain(share - own, (0.5 / max(1, judged.sum())) ** 0.5, own):
            text = f"The first token of a draft is right for its own place in {own:.0%} of all places, for {says} in"
            found.append(Finding("places", f"{text} {share:.0%}.", todo))
    return found


def _share(right: NDArray[np.bool_], judged: NDArray[np.bool_]) -> float:
    return float(right[judged].mean()) if judged.any() else 0.0


def shifted_map(base: Replay, ids: Many[int] | None) -> list[Finding]:
    """Whether what is drafted stands for the token a few ids, or draft ids, beside it."""
    pairs = np.array([(drafted[0], truth[0]) for drafted, truth in zip(base.drafted, base.truth, strict=True)])
    pairs = pairs[pairs[:, 0] >= 0]
    if not len(pairs):
        return []
    own = float((pairs[:, 0] == pairs[:, 1]).mean())
    found = []
    for what, table in (("ids", None), ("places of the draft vocabulary", ids)):
        if what != "ids" and table is None:
            continue
        shift, share = _commonest_shift(pairs, table)
        if share - own >= max(SURE * (0.5 / len(pairs)) ** 0.5, _LEAST):
            says = (
                f"The head's first token is the target's moved by {shift:+d} {what} in {share:.0%} of all places, and "
                f"right in {own:.0%}."
            )
            where = "d2t (target id = i + d2t[i])" if ids is not None else "its LM head"
            found.append(Finding("map", says, f"The rows of {where} belong to other ids: write it anew."))
            break
    return found


def _commonest_shift(pairs: NDArray[np.int64], table: Many[int] | None) -> tuple[int, float]:
    """Of what is drafted and what came, int [places, 2]: by how many ids, or places in a table, they mostly differ,
    where they differ by few; and in which share of all places."""
    if table is not None:
        places = {token: place for place, token in enumerate(table)}
        known = [(places[a], places[b]) for a, b in pairs.tolist() if a in places and b in places]
        differences = [a - b for a, b in known]
    else:
        differences = (pairs[:, 0] - pairs[:, 1]).tolist()
    counts = Counter(each for each in differences if 0 < abs(each) <= _MOST_SHIFT)
    if not counts:
        return 0, 0.0
    shift, count = counts.most_common(1)[0]
    return shift, count / len(pairs)


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a draft vocabulary has of the tokens that the target wrote: `missing` is the share that it lacks,
    `commonest` those of it that came most, `allowed` bool [places, depth] where the answer's token is in it."""

    size: int
    missing: float
    commonest: list[tuple[int, int]]
    allowed: NDArray[np.bool_]


def coverage(base: Replay, ids: Many[int] | None) -> Coverage | None:
    """None where a head proposes from all of the target's ids."""
    if ids is None:
        return None
    truth = np.array(base.truth)[:, : base.depth]
    allowed = np.isin(truth, np.array(ids))
    came = truth[:, 0]
    lacking = Counter(came[~allowed[:, 0]].tolist())
    return Coverage(len(ids), float(1 - allowed[:, 0].mean()), lacking.most_common(8), allowed)


def cut_vocabulary(base: Replay, covers: Coverage | None, names: Mapping[int, str]) -> list[Finding]:
    if covers is None:
        return []
    error = (covers.missing * (1 - covers.missing) / max(1, len(covers.allowed))) ** 0.5
    if covers.missing - SURE * error <= _MOST_MISSING:
        return []
    within = sum(base.by_depth(covers.allowed))
    words = ", ".join(f"{names[token]!r} ({count})" for token, count in covers.commonest)
    says = (
        f"Its draft vocabulary of {covers.size:,} ids lacks {covers.missing:.1%} of the tokens that the target wrote, "
        f"none of which can be accepted: {base.mean_accepted:.2f} tokens of a draft are, and {within:.2f} where it has "
        f"them. It lacks most often {words}."
    )
    todo = "Choose the ids by what the target itself writes (specserve train counts them), or more of them."
    return [Finding("vocabulary", says, todo)]


def rounding(base: Replay, mended: Replay, whose: str) -> list[Finding]:
    """Of a replay with the head, or the target's states, in float32."""
    gain, error = mended.gain_over(base)
    if not is_gain(gain, error, base.mean_accepted):
        return []
    todo = {
        "head": "A head is packed as its target is: --quantization none keeps both as they are, at more bytes a step.",
        "target": "Train the head on states of the target as it is served: specserve train --quantization does.",
    }[whose]
    what = "the head's weights" if whose == "head" else "the target's weights, so its hidden states,"
    says = f"Rounding {what} costs {gain:.2f} (+-{error:.2f}) accepted tokens of a draft."
    return [Finding(f"rounding of the {whose}", says, todo)]


def template(base: Replay, other: Replay) -> list[Finding]:
    """`base` is with the chat template, `other` without, whose texts are others."""
    gain, error = other.mean_accepted - base.mean_accepted, (base.error**2 + other.error**2) ** 0.5
    if not is_gain(gain, error, 2 * base.mean_accepted):  # texts differ by themselves
        return []
    says = (
        f"With the chat template {base.mean_accepted:.2f} tokens of a draft are accepted, without it "
        f"{other.mean_accepted:.2f}: the head was trained on texts that no template had written."
    )
    return [Finding("template", says, "Train it on what the target answers to chats, as specserve train does.")]


def other_target(stated: str | None, name: str | None, own: str) -> list[Finding]:
    """Of the fingerprint that a head's config.json has, and the target's."""
    if stated is None or stated == own:
        return []
    which = f", {name}" if name else ""
    says = f"The head says that it was trained for another checkpoint{which}: its final norm differs."
    return [Finding("target", says, "Serve the checkpoint that it was trained for, or train a head for this one.")]


def learned(base: Replay, findings: Many[Finding]) -> list[Finding]:
    """A head without another fault that guesses badly."""
    first = (base.by_depth() or [0.0])[0]
    if findings or first >= _LOW:
        return []
    says = f"No fault of those that are looked for was found, and only {first:.0%} of its first tokens are accepted."
    return [
        Finding("training", says, "It has learned little of this target's answers: train it longer, on more of them.")
    ]


def payoff(cost: Mapping[str, Any]) -> str:
    """What the measured acceptance gives at the measured cost, in a sentence."""
    best, share = cost["best"], cost["drafting_share"]
    gain = cost["speedup"][best - 1]
    often = f"drafting takes {share:.0%} of a step of one row"
    if gain < 1.02:
        return f"It does not pay here, one stream alone: at best {gain:.2f}x, with drafts of {best}; {often}."
    return f"It pays {gain:.2f}x here, one stream alone, with drafts of {best}; {often}."
