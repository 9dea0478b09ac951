"""Whether a drafter that is told of every step is worth what that takes, while it drafts and while it does not."""

from __future__ import annotations

from dataclasses import dataclass

from specserve.speculation import constants as tuned


@dataclass(slots=True)
class Upkeep:
    """What a drafter has saved, in seconds: what its own drafts save beyond their rows, less what asking it and telling
    it take, of prompts too.

    After so many steps, its trial, or when it has lost too much, it rests if it has saved nothing: it has no sequences
    then, and takes no time. What it has lost is repaid by a share of the time, half as quickly after each trial that
    failed; then there is another trial. While it pays, it is judged by what it saved lately.
    """

    num_failed: int = 0  # trials, one after another
    is_resting: bool = False
    num_steps: int = 0  # that decoded, of its trials and of what came of them, in all
    seconds: float = 0.0  # that these and those with prompts took, and
    saved: float = 0.0  # how many of them it has saved; below 0: lost
    _spent: float = 0.0  # of this step
    _balance: float = 0.0  # of the trial and of what came of it, and
    _since: int = 0  # its steps
    _owed: float | None = None  # at rest, what is yet to be repaid; None: what a trial loses at least

    def charge(self, seconds: float) -> None:
        """Asking it, or telling it, took so long."""
        self._spent += seconds

    def took(self, saved: float, seconds: float, plain: float) -> None:
        """A step took `seconds`, where one of decoding alone takes `plain` (0: unknown), and drafts that were nobody
        else's saved so many of them."""
        saved, self._spent = saved - self._spent, 0.0
        if self.is_resting:
            self._repay(seconds, plain)
            return
        self.seconds += seconds
        self.saved += saved
        self._balance += saved
        if not plain:
            return
        self.num_steps += 1
        self._since += 1
        is_judged = self._since >= tuned.TRIAL_STEPS
        if self._balance < (0.0 if is_judged else -tuned.TRIAL_LOSES * plain):
            self.is_resting, self._owed = True, max(-self._balance, tuned.TRIAL_PAYS * plain)
            self.num_failed += 1
        elif is_judged:
            self._balance = min(self._balance, tuned.TRIAL_PAYS * plain)
            self.num_failed = 0 if self._since % tuned.TRIAL_STEPS == 0 else self.num_failed

    def _repay(self, seconds: float, plain: float) -> None:
        """A step at rest; where all is repaid another trial begins."""
        if not plain:
            return
        owed = tuned.TRIAL_PAYS * plain if self._owed is None else self._owed
        self._owed = owed - tuned.UPKEEP_SHARE * seconds / 2 ** min(max(self.num_failed - 1, 0), tuned.MOST_HALVED)
        if self._owed <= 0:
            self.is_resting, self._balance, self._since = False, 0.0, 0
