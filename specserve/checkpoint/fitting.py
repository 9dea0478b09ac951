"""Which models of the catalog fit a machine's memory, how they have to be stored for it, and how long a context is
left. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specserve.checkpoint.entries import CatalogModel

LEAST_CONTEXT = 4096  # tokens without which a model does not count as fitting
WORK_BYTES = 4e8  # logits and activations of a step
KV_SHARE = 0.4  # of what weights leave, which the KV cache takes at most
GB = 10**9


@dataclass(frozen=True, slots=True)
class Fit:
    """Weights of `kind` take `num_bytes`, and `context` tokens fit beside them; too few where `is_large`. `is_default`
    says whether an engine takes that kind by itself."""

    kind: str
    num_bytes: float
    context: int
    is_default: bool
    is_large: bool

    def describe(self, model: CatalogModel) -> str:
        """ "fits", "fits with int4" or "too large", with the figures."""
        size = f"{self.num_bytes / GB:.1f} GB in {self.kind}"
        if self.is_large:
            return f"too large: {size}"
        how = "fits" if self.is_default else f"fits with {self.kind}"
        shorter = "" if self.context == model.context else f", context of {self.context:,} of {model.context:,} tokens"
        return f"{how}: {size}{shorter}"


def fit(model: CatalogModel, free: float, kinds: Sequence[str], dtype: str, kv_dtype: str) -> Fit:
    """The first of `kinds` with which the model fits `free` bytes, else the smallest. The one that an engine takes by
    itself comes first; `dtype` is that of the embedding."""
    found = [_fit(model, free, kind, kind == kinds[0], dtype, kv_dtype) for kind in kinds]
    return next((each for each in found if not each.is_large), min(found, key=lambda each: each.num_bytes))


def _fit(model: CatalogModel, free: float, kind: str, is_default: bool, dtype: str, kv_dtype: str) -> Fit:
    weights = model.weight_bytes(kind, dtype)
    tokens = int(max(0.0, free - weights - WORK_BYTES) * KV_SHARE / model.kv_bytes(1, kv_dtype))
    context = min(model.context, tokens // LEAST_CONTEXT * LEAST_CONTEXT)
    return Fit(kind, weights, context, is_default, is_large=context < min(LEAST_CONTEXT, model.context))
