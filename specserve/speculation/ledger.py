"""Bounds what drafts may cost beyond what they save."""

from __future__ import annotations

_SHARE = 0.01  # of the time
_STEPS = 2  # of plain decoding: what may be lost beyond that, at first
_GAINED = 4  # of plain decoding: what of gains counts for later; drafts that pay have unlucky stretches


class Ledger:
    """What drafts may still cost, in seconds, `allowance`: it begins with two plain steps, grows by 1 % of all time and
    by what drafts gain, up to four plain steps, and shrinks by what they lose. A step drafts only what it can afford if
    nothing is accepted, so in any stretch of time drafts lose at most 1 % of it and four plain steps, as far as `extra`
    and `plain` are right."""

    def __init__(self) -> None:
        self.allowance, self._is_new = 0.0, True

    def affordable(self, plain: float) -> float:
        """Seconds that this step may take beyond `plain`, which it takes without drafts."""
        if self._is_new and plain:
            self.allowance, self._is_new = _STEPS * plain, False
        return self.allowance

    def settle(self, seconds: float, extra: float, gained: float, plain: float) -> None:
        """A step took `seconds`, of these `extra` for drafts; accepted drafts saved `gained`. Plain steps take
        `plain`."""
        self.allowance = min(self.allowance + _SHARE * seconds + gained - extra, _GAINED * plain)
