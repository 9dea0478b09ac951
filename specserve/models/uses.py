"""What a model asks of ops, for their self-test."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

from specserve.models.loader import check_tensors
from specserve.models.positions import Alibi
from specserve.models.spec import DecoderSpec, ExpertsMlp, GatedMlp, LayerNorm, LayerSpec
from specserve.models.tensors import AnySpec
from specserve.ops import Ops
from specserve.ops.selftest.trust import choose_attention, trusted
from specserve.ops.selftest.uses import ALL, Uses

_log = logging.getLogger(__name__)
_OF_DRAFTERS = ("rms_norm", "gated silu")  # of trained heads, whatever the model
_OF_GENERIC = ALL - {"adapters", "experts"}  # of what is known only when it runs


def tested(
    ops: Ops,
    folder: Path,
    choose: Callable[[Collection[str]], Ops],
    attention: str,
    needs_bits: bool,
    block_size: int,
    has_adapters: bool,
) -> Ops:
    """On a GPU `ops`, or what `choose` makes without those that fail the self-test of what the model in `folder` uses,
    with the `attention` that is asked for, of config.ATTENTIONS; what is to be known of it goes to the log. Kernels
    that give a row other bits in other company fail where a user `needs_bits`. Raises ConfigError where nothing
    computes right numbers."""
    if ops.device.type == "cpu":
        return ops
    uses = uses_of(check_tensors(folder).spec, has_adapters)
    found = trusted(ops, choose, uses, block_size, needs_bits=needs_bits)
    told = choose_attention(found.ops, attention, uses, block_size)
    for line in filter(None, (*found.lines, told)):
        _log.warning("%s", line)
    return found.ops


def uses_of(spec: AnySpec, has_adapters: bool = False) -> Uses:
    """Sizes are those of the first layer."""
    if not isinstance(spec, DecoderSpec):
        shape = spec.layers[0].attention
        sizes = shape.num_heads, shape.num_kv_heads, shape.head_dim
        return Uses(spec.hidden_size, 2 * spec.hidden_size, *sizes, _OF_GENERIC)
    forms = {*_OF_DRAFTERS, *(form for layer in set(spec.layers) for form in _forms(layer))}
    norms = [spec.final_norm, spec.embedding_norm]
    forms |= {"layer_norm"} if any(isinstance(norm, LayerNorm) for norm in norms) else set()
    forms |= {"placed"} if spec.positions is not None else set()
    forms |= {"softcap"} if spec.logit_softcap is not None else set()
    forms |= {"bias"} if spec.head_bias else set()
    forms |= {"adapters"} if has_adapters else set()
    first = spec.layers[0]
    own = first.attention
    return Uses(spec.hidden_size, first.mlp.width, own.num_heads, own.num_kv_heads, own.head_dim, frozenset(forms))


def _forms(layer: LayerSpec) -> set[str]:
    own, mlp, names = layer.attention, layer.mlp, layer.norm_names
    is_gated = isinstance(mlp, GatedMlp)
    forms = {
        "layer_norm" if isinstance(layer.norm, LayerNorm) else "rms_norm": True,
        "post_norm": names.post_attention is not None or names.post_mlp is not None,
        "head_norms": own.head_norm is not None,
        "joint_norm": own.joint_norm is not None,
        "window": own.window is not None,
        "alibi": isinstance(layer.position, Alibi),
        "bias": own.qkv_bias or own.out_bias,
        "experts": isinstance(mlp, ExpertsMlp),
        ("gated " if is_gated else "") + getattr(mlp, "activation", "silu"): not isinstance(mlp, ExpertsMlp),
    }
    return {form for form, is_used in forms.items() if is_used}
