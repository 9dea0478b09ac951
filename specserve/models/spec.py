"""Describes a decoder-only transformer by value: its layers, which may differ from each other, and what they share; the
shapes and names of every tensor follow from it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from specserve.cache.storage import KVShape
from specserve.errors import ConfigError, ModelError
from specserve.models.checks import check_number, check_size as check_size
from specserve.models.mlps import (
    ExpertsMlp as ExpertsMlp,
    GatedMlp as GatedMlp,
    PlainMlp as PlainMlp,
    Shapes as Shapes,
)
from specserve.models.positions import Alibi as Alibi, LearnedPositions, Position, Rope as Rope


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """x over its root mean square, times weight + offset (arXiv 1910.07467)."""

    eps: float
    offset: float = 0.0  # Gemma stores w - 1

    def __post_init__(self) -> None:
        check_number("rms_norm_eps", self.eps, positive=False)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """x without its mean, over its standard deviation, times a weight, plus a bias (arXiv 1607.06450)."""

    eps: float
    bias: bool = True

    def __post_init__(self) -> None:
        check_number("layer_norm_eps", self.eps, positive=False)


Norm = RmsNorm | LayerNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention (arXiv 2305.13245): query head h reads KV head h // (num_heads / num_kv_heads)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of query-key products
    window: int | None = None  # tokens that a row sees, itself among them; None: all
    head_norm: RmsNorm | None = None  # of every query head and every key head
    joint_norm: RmsNorm | None = None  # of all query heads as one vector, and of all key heads (OLMo 2)
    qkv_bias: bool = False
    out_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            check_size(name, getattr(self, name))
        check_number("query_scale", self.scale)
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly.")
        if self.head_dim % 4:
            # Rotary embedding needs halves; and GEMMs of narrower rests do not give every row the same bits.
            raise ModelError(f"head_dim is {self.head_dim}; it must be a multiple of 4.")
        window = self.window
        if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
            raise ModelError(f"sliding_window must be at least 1 token or null; it is {window!r}.")

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Numbers of a token's keys, and of its values."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Sequential:
    """Attention reads a norm of the residual stream and its output, times `multiplier`, joins that, then the MLP
    likewise. With `post_norms` each output is normed before it joins (Gemma); without `pre_norms` both read the stream
    as it is (OLMo 2)."""

    post_norms: bool = False
    multiplier: float = 1.0
    pre_norms: bool = True

    def __post_init__(self) -> None:
        check_number("residual_multiplier", self.multiplier)
        if self.post_norms and self.multiplier != 1.0:
            raise ModelError("A residual_multiplier of outputs that are normed is not supported.")
        assert self.pre_norms or self.post_norms, "there are norms"


@dataclass(frozen=True, slots=True)
class Parallel:
    """Attention and the MLP read the same residual stream, and both outputs join it (GPT-J). Each reads a norm of its
    own (GPT-NeoX), or both the same."""

    own_norms: bool = False
    multiplier: ClassVar[float] = 1.0


@dataclass(frozen=True, slots=True)
class PostNorm:
    """Attention reads the residual stream as it is and its output joins that, whose norm then takes its place; then the
    MLP likewise (arXiv 1706.03762). The last layer's second norm is the final one. In bfloat16 torch's and Triton's
    kernels round the stream at each norm."""

    multiplier: ClassVar[float] = 1.0


class NormNames(NamedTuple):
    """A layer's norms in a checkpoint; None where it has none."""

    attention: str | None  # before it; None: it reads the residual stream as it is
    post_attention: str | None
    mlp: str | None  # before it; None: it reads what attention reads, or, after it, the stream as it is
    post_mlp: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer. `norm` is that of all places of the `residual` form that have one, `position` how tokens know where
    they stand."""

    norm: Norm
    position: Position
    attention: AttentionSpec
    mlp: GatedMlp | PlainMlp | ExpertsMlp
    residual: Sequential | Parallel | PostNorm = Sequential()

    def __post_init__(self) -> None:
        if isinstance(self.norm, LayerNorm) and self.norm_names.post_attention is not None:
            raise ModelError("LayerNorms of what joins the residual stream are not supported.")
        is_normed = isinstance(self.residual, Sequential) and self.residual.pre_norms
        if isinstance(self.mlp, ExpertsMlp) and not is_normed:  # a router reads the norm of what stands before it
            raise ModelError("Experts in parallel with attention, or without a norm before them, are not supported.")
        is_reordered = isinstance(self.position, Rope) and not self.position.is_plain
        if self.attention.joint_norm is not None and (self.attention.head_norm is not None or is_reordered):
            raise ModelError("A norm of all heads together goes with none of each, and with rotation by halves alone.")
        match self.position:
            case Rope():
                self.position.check(self.attention.head_dim)
            case Alibi():
                self.position.check(self.attention.num_heads)

    @property
    def norm_names(self) -> NormNames:
        """Where a layer has four norms, the one named post_attention follows attention; where it has two, it opens the
        MLP. The two of PostNorm have the names of such two."""
        if isinstance(self.residual, Parallel):
            return NormNames(
                "input_layernorm", None, "post_attention_layernorm" if self.residual.own_norms else None, None
            )
        if isinstance(self.residual, PostNorm):
            return NormNames(None, None, "input_layernorm", "post_attention_layernorm")
        if not self.residual.pre_norms:
            return NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
        if self.residual.post_norms:
            return NormNames(
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            )
        return NormNames("input_layernorm", None, "post_attention_layernorm", None)

    def shapes(self, hidden: int) -> Shapes:
        """Every tensor of the layer, by its name in a Hugging Face checkpoint of Llama, and its shape."""
        own = self.attention
        shapes: Shapes = {}
        for norm in self.norm_names:
            shapes |= {} if norm is None else norm_shapes(norm, self.norm, hidden)
        if own.head_norm is not None:
            shapes |= dict.fromkeys(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), (own.head_dim,))
        if own.joint_norm is not None:
            shapes |= {"self_attn.q_norm.weight": (own.q_size,), "self_attn.k_norm.weight": (own.kv_size,)}
        for name, rows, columns, bias in (
            ("self_attn.q_proj", own.q_size, hidden, own.qkv_bias),
            ("self_attn.k_proj", own.kv_size, hidden, own.qkv_bias),
            ("self_attn.v_proj", own.kv_size, hidden, own.qkv_bias),
            ("self_attn.o_proj", hidden, own.q_size, own.out_bias),
        ):
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)
        return shapes | {f"mlp.{name}": shape for name, shape in self.mlp.shapes(hidden).items()}


def norm_shapes(name: str, norm: Norm, hidden: int) -> Shapes:
    """The tensors of a norm."""
    shapes: Shapes = {f"{name}.weight": (hidden,)}
    return shapes | {f"{name}.bias": (hidden,)} if isinstance(norm, LayerNorm) and norm.bias else shapes


class ModelSpec(Protocol):
    """What the engine has to know of a model: sizes in numbers, `max_len` in tokens, and what each layer keeps of one.
    `step_width` is how many numbers ops hold at most for each row of a step, but for its logits, and `runs` says in
    words how steps are computed."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def max_len(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def kv_shapes(self) -> list[KVShape]: ...
    @property
    def step_width(self) -> int: ...
    @property
    def runs(self) -> str: ...
    @property
    def note(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A decoder: an embedding, layers, a norm and an LM head. Raises ModelError for sizes that contradict each other
    and for forms that the op contract does not have."""

    vocab_size: int
    hidden_size: int
    max_len: int  # tokens
    layers: tuple[LayerSpec, ...]
    final_norm: Norm
    positions: LearnedPositions | None = None  # beside those that layers have
    embedding_norm: Norm | None = None  # of what enters the first layer
    embedding_size: int | None = (
        None  # of a token in embedding and LM head, where project_in and project_out are between
    )
    embedding_scale: float = 1.0
    logit_divisor: float = 1.0
    tied_embeddings: bool = False
    head_bias: bool = False
    normed_head: bool = False  # every row of the LM head is divided by its length (Baichuan 2)
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "max_len", "num_layers"):
            check_size(name, getattr(self, name))
        check_number("embedding_multiplier", self.embedding_scale)
        check_number("logits_scaling", self.logit_divisor)
        if self.logit_softcap is not None:
            check_number("final_logit_softcapping", self.logit_softcap)
        if self.embedding_size is not None:
            check_size("word_embed_proj_dim", self.embedding_size)
            if self.embedding_norm is not None:
                raise ModelError("A norm of embeddings that are projected is not supported.")
        if self.has_post_norms and len({layer.residual for layer in self.layers}) > 1:
            raise ModelError("Layers whose norms take the residual stream's place go with no others.")
        if self.positions is not None and self.max_len > self.positions.size:
            raise ModelError(f"{self.positions.size} learned positions are too few for {self.max_len} tokens.")
        # What a layer adds is normed by its own eps and joins the stream in one op with the norm of the next one.
        if len(found := sorted({self.final_norm.eps, *(layer.norm.eps for layer in self.layers)})) > 1:
            raise ModelError(f"The norms of the layers and the final one differ in eps, {found}; they must be alike.")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def has_post_norms(self) -> bool:
        """Whether layers norm the residual stream itself; the last of these norms is the final one."""
        return any(isinstance(layer.residual, PostNorm) for layer in self.layers)

    @property
    def final_norm_name(self) -> str:
        """Of the tensors of the final norm."""
        if not self.has_post_norms:
            return "model.norm"
        return f"model.layers.{self.num_layers - 1}.{self.layers[-1].norm_names.post_mlp}"

    @property
    def table_size(self) -> int:
        """Numbers of a token in the embedding and in the LM head."""
        return self.embedding_size or self.hidden_size

    @property
    def _ropes(self) -> list[Rope]:
        return [each.position for each in self.layers if isinstance(each.position, Rope)]

    @property
    def longest_len(self) -> int:
        """The largest max_len that one may ask for, tokens."""
        return max([self.max_len, *(rope.stretched_len for rope in self._ropes)])

    @property
    def runs(self) -> str:
        """How steps are computed, in words."""
        return "natively"

    @property
    def note(self) -> str:
        """What max_len decided of positions, to be said at start; "" where it decides nothing."""
        found = {rope.choice(self.max_len) for rope in self._ropes}
        return "".join(f"; rotary embedding: {each}" for each in sorted(filter(None, found)))

    @property
    def kv_shapes(self) -> list[KVShape]:
        return [KVShape(each.attention.num_kv_heads, each.attention.head_dim) for each in self.layers]

    @property
    def step_width(self) -> int:
        """What goes into a layer, what its products come to, and the residual."""
        widths = [
            4 * own.attention.q_size + 2 * own.attention.kv_size + own.mlp.step_width(self.hidden_size)
            for own in set(self.layers)
        ]
        projected = 0 if self.embedding_size is None else 2 * self.hidden_size + 3 * self.embedding_size
        return 5 * self.hidden_size + max(widths) + projected

    def shapes(self) -> Shapes:
        """Every tensor the model needs, by its name in a Hugging Face Llama checkpoint, and its shape."""
        table = (self.vocab_size, self.table_size)
        shapes: Shapes = {"model.embed_tokens.weight": table}
        if (own := self.positions) is not None:
            shapes["model.embed_positions.weight"] = (own.size + own.offset, self.hidden_size)
        if (size := self.embedding_size) is not None:
            shapes["model.project_in.weight"] = (self.hidden_size, size)
            shapes["model.project_out.weight"] = (size, self.hidden_size)
        if self.embedding_norm is not None:
            shapes |= norm_shapes("model.embed_norm", self.embedding_norm, self.hidden_size)
        for number, layer in enumerate(self.layers):
            tensors = layer.shapes(self.hidden_size)
            shapes |= {f"model.layers.{number}.{name}": shape for name, shape in tensors.items()}
        shapes |= norm_shapes(self.final_norm_name, self.final_norm, self.hidden_size)
        if self.head_bias:
            shapes["lm_head.bias"] = (self.vocab_size,)
        return shapes if self.tied_embeddings else shapes | {"lm_head.weight": table}


_Spec = TypeVar("_Spec", bound=Any)  # of a decoder, or of a model that runs through transformers


def shorten(spec: _Spec, max_len: int) -> _Spec:
    """The same model for at most `max_len` tokens. Raises ConfigError above the model's own limit."""
    if not 1 <= max_len <= spec.longest_len:
        raise ConfigError(f"max_model_len is {max_len}, but the model was made for at most {spec.longest_len} tokens.")
    return dataclasses.replace(spec, max_len=max_len)
