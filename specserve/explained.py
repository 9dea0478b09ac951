"""What one step did for one sequence, for whoever asked to be told."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

HIDDEN = -1  # in the place of a token


class Explained(msgspec.Struct, array_like=True):
    """One step of one sequence.

    When its draft is made: `room`, how many tokens its drafters were asked for, 0 if not at all; `proposed`, how many
    nodes each drafter and its grammar proposed, by source; `num_rows`, those of the step, others' too; `plain_s`, the
    seconds that the step was expected to take without drafts, and `expected_s`, with them and with asking for them,
    None where drafts are not weighed by cost, beside chunks of prompts, and while nothing is known; `allowance_s`, the
    seconds that drafts might still lose, below 0 a debt.

    When it was verified: the draft, of which node i is tokens[i], follows node parents[i] (-1: the text so far) and was
    proposed by sources[i]; `path`, the nodes that were accepted. tokens[i] is HIDDEN for a rejected node that other
    requests' texts have put forward. When the step is over: `seconds`, what it took."""

    room: int = 0
    proposed: dict[str, int] = {}
    num_rows: int = 0
    plain_s: float | None = None
    expected_s: float | None = None
    allowance_s: float | None = None
    tokens: list[int] = []
    parents: list[int] = []
    sources: Sequence[Sequence[str]] = []
    path: list[int] = []
    seconds: float = 0.0
