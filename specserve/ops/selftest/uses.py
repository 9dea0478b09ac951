"""What a model asks of ops: its sizes, and which forms of them it has."""

from __future__ import annotations

from dataclasses import dataclass

ALL = frozenset(
    (
        *("bias", "placed", "post_norm", "rms_norm", "layer_norm", "head_norms", "joint_norm"),
        *("window", "alibi", "softcap", "adapters", "experts", "silu", "gelu_tanh", "relu", "gelu"),
        *("gated silu", "gated gelu_tanh"),
    )
)


@dataclass(frozen=True, slots=True)
class Uses:
    """Sizes of a layer, and which `forms` of ops, of ALL, the model has. What is no form all models have."""

    hidden: int = 576
    width: int = 1536  # of its MLP
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    forms: frozenset[str] = ALL

    def has(self, form: str) -> bool:
        """Whether a model has it; "" all have."""
        return not form or form in self.forms
