"""Beam search without a model: candidates in, survivors and answers out. Its results are those of transformers'
`generate(num_beams=..., do_sample=False)`, but that beams are always distinct: transformers fills up with copies."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence as Many
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from specserve.errors import InputError, shown

EarlyStopping = bool | Literal["never"]
_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def check_beams(params: Any) -> None:
    """Raise InputError for SamplingParams whose fields contradict one another, as far as beams are concerned."""
    width, given = params.beam_width, params.early_stopping
    if not isinstance(given, bool) and given != "never":
        raise InputError(f"early_stopping is {shown(given)}; it must be true, false or 'never'.", "early_stopping")
    if width is None:
        for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(params, name) != default:
                hint = "Set beam_width (over HTTP use_beam_search), or leave it out."
                raise InputError(f"{name} is for beam search. {hint}", name)
        return
    if params.n > width:
        raise InputError(f"n is {params.n}, above beam_width, {width}: each answer is a beam. Raise beam_width.", "n")
    for name, default in _PENALTIES.items():
        if (value := getattr(params, name)) != default:
            raise InputError(
                f"{name} is {value:g}; beam search compares texts by their log-probabilities, which it would change. "
                f"Set it to {default:g}.",
                name,
            )


class Candidate(NamedTuple):
    """A token that may follow a beam, and its log-probability given the beam. `entry` is for whoever reports it."""

    token: int
    logprob: float
    entry: Any = None


class Choice(NamedTuple):
    """What survives: the token that follows a beam, by its place among those that were live."""

    beam: int
    token: int


class Text(Protocol):
    """What a beam reads as, where that may end it: `stop` says at which stop text its last token did."""

    @property
    def stop(self) -> str | None: ...
    def after(self, token: int) -> Text: ...


@dataclass(frozen=True, slots=True)
class Beam:
    """A text as its last token and what is before; `score` is the sum of its log-probabilities. `text` is None after a
    token that ends it, and where no text does."""

    score: float = 0.0
    token: int = -1
    entry: Any = None
    before: Beam | None = None
    text: Text | None = None

    def path(self) -> list[Beam]:
        """One for each token, in order."""
        found: list[Beam] = []
        at = self
        while at.before is not None:
            found.append(at)
            at = at.before
        return found[::-1]


@dataclass(frozen=True, slots=True)
class Answer:
    """A beam that ended, of so much per length ** length_penalty; `is_cut`: by max_tokens."""

    beam: Beam
    score: float
    is_cut: bool


class BeamSearch:
    """One search. A step gives each live beam's candidates to `advance`, which says who lives on.

    `ends` end a beam, and so do stop texts where there is a `text`, what all begin with. Each step looks at the (1 +
    number of ends, 2 at least) * width best texts; of these the width best may end, and the width best that do not end
    live on. `answers` are the width best that ended, best first. `early_stopping` says when the search is over, once it
    has width answers: True at once; False when the best live beam is no better than the worst answer at its present
    length; "never" when it could not become better, with a positive `length_penalty` at the longest length.
    """

    def __init__(
        self,
        width: int,
        max_tokens: int,
        ends: Container[int] = (),
        num_ends: int = 0,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        text: Text | None = None,
    ) -> None:
        self.width, self.max_tokens = width, max_tokens
        self.num_candidates = max(2, 1 + num_ends) * width  # that any one beam may be asked for
        self._ends, self._penalty, self._early = ends, length_penalty, early_stopping
        self.length = 0  # tokens of a live beam
        self.live = [Beam(text=text)]
        self.answers: list[Answer] = []
        self.is_done = False

    def advance(self, candidates: Many[Many[Candidate]]) -> list[Choice]:
        """One token more. `candidates` are, of each live beam in order, the `num_candidates` best that may come, or all
        if these are fewer. Returns who lives on, best first: none when it is over. Equals rank by the order of their
        beams, then as they were given."""
        found = [
            (beam.score + each.logprob, i, each)
            for i, (beam, given) in enumerate(zip(self.live, candidates, strict=True))
            for each in given
        ]
        found.sort(key=lambda one: -one[0])
        self.length += 1
        is_last = self.length >= self.max_tokens
        chosen: list[Choice] = []
        grown: list[Beam] = []
        for rank, (score, i, each) in enumerate(found[: self.num_candidates]):
            if rank >= self.width and (is_last or len(grown) == self.width):
                break
            before, is_end = self.live[i], each.token in self._ends
            text = None if is_end or before.text is None else before.text.after(each.token)
            is_end = is_end or (text is not None and text.stop is not None)
            beam = Beam(score, each.token, each.entry, before, text)
            if (is_end or is_last) and rank < self.width:
                self._end(beam, is_cut=not is_end)
            elif not is_end and not is_last:
                grown.append(beam)
                chosen.append(Choice(i, each.token))
        self.live = grown
        self.is_done = not grown or self._is_over()
        return [] if self.is_done else chosen

    def _end(self, beam: Beam, is_cut: bool) -> None:
        self.answers.append(Answer(beam, beam.score / self._weight(self.length), is_cut))
        self.answers.sort(key=lambda answer: -answer.score)
        del self.answers[self.width :]

    def _is_over(self) -> bool:
        if len(self.answers) < self.width:
            return False
        longest = self.max_tokens if self._early == "never" and self._penalty > 0 else self.length
        return self._early is True or self.live[0].score / self._weight(longest) <= self.answers[-1].score

    def _weight(self, length: int) -> float:
        """length ** length_penalty, within what a float holds."""
        exponent = self._penalty * math.log2(length)
        return math.exp2(max(-900.0, min(exponent, 900.0))) if abs(exponent) > 900 else math.pow(length, self._penalty)
