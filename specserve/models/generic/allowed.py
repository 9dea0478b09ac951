"""Which functions of torch give a row the same bits whatever rows stand beside it: measured on a CPU, for rows of any
width with the threads of one and several cores. All others are refused by their names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from specserve.models.generic.foreign import ForeignCalls
from specserve.models.generic.modules import VECTOR

_MOVES = """view _unsafe_view reshape t transpose permute expand slice select squeeze unsqueeze split split_with_sizes
unbind alias detach clone copy_ _to_copy contiguous cat stack index index_select gather embedding repeat flip where
masked_fill masked_fill_ constant_pad_nd empty zeros ones arange full scalar_tensor zeros_like ones_like empty_like
full_like new_zeros new_ones new_empty new_full lift_fresh empty_strided fill_ zero_ unfold chunk narrow roll tril triu
_local_scalar_dense item is_nonzero equal any all cumsum diff max min sym_size concat set_ resize_ index_put_
select_backward slice_scatter unflatten flatten movedim swapaxes expand_as view_as type_as to"""
# Each number by itself, or two: what IEEE 754 rounds, and functions whose vectors and rests agree.
_NUMBERS = """add add_ sub sub_ mul mul_ div div_ neg abs sqrt rsqrt reciprocal relu relu_ clamp clamp_min clamp_max
maximum minimum eq ne lt gt le ge logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not floor ceil round
sign rsub square exp tanh tanh_ erf sin cos log remainder floor_divide fmod isnan isinf isfinite hardtanh
addcmul lerp leaky_relu hardswish threshold expm1 log1p"""
_REDUCTIONS = "mean sum var var_mean amax amin _softmax linalg_vector_norm norm native_layer_norm _fused_rms_norm"
# These round otherwise in the last numbers of a tensor: whole rows of vectors have none.
_WIDE = "sigmoid sigmoid_ silu silu_ softplus mish elu"
_EXPONENTS = (2, 3, 0.5, -0.5, -1)  # of pow, which are products and roots
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "dot", "linear")

# What chooses among a row's numbers looks at each row by itself; their dimension, and which argument it is.
_CHOICES = {"topk": 2, "sort": 1, "argsort": 1, "scatter": 1, "scatter_": 1}

_FREE = frozenset(_MOVES.split()) | frozenset(_NUMBERS.split())
_BY_ROWS = frozenset(_REDUCTIONS.split())
_VECTORS = frozenset(_WIDE.split())


class Watch(ForeignCalls):  # type: ignore[no-untyped-call]
    """Collects why functions that run within it are none for us. `where` says which module runs. Work of our own is
    not looked at: it runs in `ours`."""

    def __init__(self, where: Callable[[], str], is_one_thread: bool) -> None:
        super().__init__()
        self.reasons: dict[str, None] = {}  # in order, each once
        self._where, self._is_one_thread = where, is_one_thread

    def called(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        if (reason := _reason(name, args, kwargs, self._is_one_thread)) is not None:
            self.reasons[f"{reason} in {self._where()}"] = None
        return func(*args, **kwargs)


def _reason(name: str, args: Sequence[Any], kwargs: dict[str, Any], is_one_thread: bool) -> str | None:
    """None where a function may be."""
    if name in _FREE:
        return None
    if name == "gelu":  # oneDNN's where numbers lie together, torch's elsewhere
        return None if args[0].is_contiguous() else "it computes gelu of a part of a tensor"
    shapes = [arg.shape for arg in args if isinstance(arg, Tensor)]
    if name in _BY_ROWS:
        return None if _reduces_rows(name, args, kwargs) else f"it reduces over rows with {name}"
    if name in _CHOICES:
        return None if _is_of_rows(args, kwargs, _CHOICES[name]) else f"it uses torch's {name} over several rows"
    if name == "pow":
        base, exponent = args[0], args[1]
        if not isinstance(base, Tensor):  # frequencies of a rotation: the same numbers in each step
            return None
        is_exact = not isinstance(exponent, Tensor) and exponent in _EXPONENTS
        return None if is_exact else "it raises numbers to powers that are no products"
    if name in _VECTORS:
        width = shapes[0][-1] if shapes[0] else 1
        if shapes[0].numel() == 1 or (is_one_thread and width % VECTOR == 0):  # one: a parameter, no row
            return None
        return f"it computes {name} of rows of {width} numbers, whose last ones round by their number,"
    if name in _PRODUCTS:
        matrices = shapes[-2:]
        if len(matrices) == 2 and matrices[0][-1] == 1:  # positions by frequencies: one product each, and no sum
            return None
        return f"it multiplies matrices with {name}, not in a linear layer,"
    return f"it uses torch's {name}, which is not known to keep rows apart,"


def _is_of_rows(args: Sequence[Any], kwargs: dict[str, Any], place: int) -> bool:
    dim = kwargs.get("dim", args[place] if len(args) > place else -1)
    return isinstance(dim, int) and dim % args[0].dim() == args[0].dim() - 1


def _reduces_rows(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether each row, the last dimension, is reduced by itself."""
    x = args[0]
    if name == "native_layer_norm" or name == "_fused_rms_norm":
        return len(args[1]) == 1
    if name in ("linalg_vector_norm", "norm"):
        dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
    else:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    dims = [dim] if isinstance(dim, int) else dim
    return dims is not None and [each % x.dim() for each in dims] == [x.dim() - 1]
