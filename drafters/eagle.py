"""An EAGLE head guesses the target's next hidden state, and with it the token behind, again and again; see
arXiv 2401.15077, 2406.16858 (EAGLE-1, 2) and 2503.01840 (EAGLE-3)."""

from __future__ import annotations

from typing import Any

from specserve.speculation.draft_sampler import named_for_auto
from specserve.speculation.feature_drafter import FeatureDrafter
from specserve.speculation.models import ModelContext

PRIORITY = 6
RUNS_MODEL = True


class EagleDrafter(FeatureDrafter):
    """Drafts with `head`, a folder or repository of an EAGLE head that was made for the target; by default the one
    that comes along in the zoo, where there is one for it. See FeatureDrafter."""

    kind = "eagle"

    @staticmethod
    def suits(context: ModelContext, head: str | None = None, **others: Any) -> bool:
        return named_for_auto(context, head, "eagle")
