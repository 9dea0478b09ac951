"""Next-token layers that come in the target's own checkpoint (multi-token prediction, MTP; arXiv 2404.19737 and
2412.19437) draft as an EAGLE head does, without any training of ours."""

from __future__ import annotations

from typing import Any

from specserve.speculation.feature_drafter import FeatureDrafter
from specserve.speculation.models import ModelContext

PRIORITY = 7
RUNS_MODEL = True


class MtpDrafter(FeatureDrafter):
    """Drafts with the first next-token layer of the target's checkpoint, or of that in `head`, a folder or repository
    of the same model, for a target that was quantised without them. See FeatureDrafter. "auto" takes part in it where
    the target has one and no head is named."""

    kind = "mtp"

    @staticmethod
    def suits(context: ModelContext, head: str | None = None, **others: Any) -> bool:
        return head is None and context.verification == "coupled" and context.has_head(None, "mtp")
