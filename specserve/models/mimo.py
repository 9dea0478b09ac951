"""MiMo (arXiv 2505.07608): Qwen 2's layers; the next-token layers beside them are for `--drafter mtp`."""

from __future__ import annotations

from specserve.models import qwen2

ARCHITECTURES = ("MiMoForCausalLM",)
MODEL_TYPES = ("mimo",)

spec = qwen2.spec


def rename(name: str) -> str | None:
    """None for a tensor that only a drafter reads."""
    return None if name.startswith("model.mtp_layers.") else name
