"""Describes draft heads: what they read of a target, and the names and shapes of their tensors, which are those of the
`speculators` format where that has them. See each class for where its architecture was published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from specserve.models.spec import DecoderSpec, Shapes as Shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetShape:
    """What a head was made for: hidden size, layers and vocabulary of the target."""

    hidden_size: int
    num_layers: int  # 0 where a checkpoint does not say it; most do not
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSpec:
    """EAGLE-1 and 2 (arXiv 2401.15077, 2406.16858), version 1, and EAGLE-3 (arXiv 2503.01840), version 3.

    At position i the head reads the target's hidden state of token i, and token i + 1. `layers` are its own decoder
    layers; their vocab_size is the number of ids that it proposes from, which `d2t` maps to the target's where they are
    fewer: target id = i + d2t[i].

    Version 1 reads the hidden state behind the target's final norm: fc([embedding, hidden]) goes through the layers,
    the first of which has no input norm, and then to the target's LM head. Version 3 reads the outputs of the target's
    layers `hidden_layers`, side by side: fc makes one hidden state of them, and the first layer's attention reads
    [norm(embedding), norm(hidden)]. While it drafts it reads its own output in their place.

    The next-token layers that some checkpoints bring (MTP, arXiv 2412.19437) are version 1 with `fc_input_norms`.
    """

    kind: ClassVar[str] = "eagle"
    version: int  # 1 or 3
    target: TargetShape
    layers: DecoderSpec
    hidden_layers: tuple[int, ...] = ()  # of the target, counted from 0; version 3
    has_embedding: bool = False  # its own; else the target's
    has_head: bool = False  # an LM head of its own; else the target's
    shares_head: bool = False  # the target's LM head at its draft ids; such heads have none of their own
    fc_bias: bool = False
    norm_before_residual: bool = False  # the residual that enters the first layer is normed; version 3
    norm_before_fc: bool = False  # `input_norm` over all of what fc reads
    fc_norms: bool = False  # `fc_norm.i` over each hidden state that fc reads
    norm_output: bool = False  # what it reads in place of hidden states is behind its final norm
    first_input_norm: bool = False  # version 1: the first layer has an input norm
    final_norm: bool = False  # version 1: a norm before the LM head
    fc_input_norms: bool = False  # version 1: `embed_norm` and `hidden_norm` over what fc reads, the hidden state first

    @property
    def has_draft_vocab(self) -> bool:
        return self.layers.vocab_size != self.target.vocab_size

    def shapes(self) -> Shapes:
        """All tensors but d2t, int64 [draft vocabulary]."""
        own, target = self.layers, self.target.hidden_size
        hidden = own.hidden_size
        first = "layers.0.self_attn"
        plain = {n.removeprefix("model."): s for n, s in own.shapes().items() if n.startswith("model.layers.")}
        shapes: Shapes = dict(plain)
        if self.version == 3:
            shapes["fc.weight"] = (hidden, len(self.hidden_layers) * target)
            for name in ("q_proj", "k_proj", "v_proj"):
                shapes[f"{first}.{name}.weight"] = (plain[f"{first}.{name}.weight"][0], 2 * hidden)
            shapes["layers.0.hidden_norm.weight"] = (hidden,)
            if self.norm_before_fc:
                shapes["input_norm.weight"] = (len(self.hidden_layers) * target,)
            if self.fc_norms:
                shapes |= {f"fc_norm.{i}.weight": (target,) for i in range(len(self.hidden_layers))}
        else:
            shapes["fc.weight"] = (hidden, 2 * hidden)
            if not self.first_input_norm:
                del shapes["layers.0.input_layernorm.weight"]
            if self.fc_input_norms:
                shapes |= dict.fromkeys(("embed_norm.weight", "hidden_norm.weight"), (hidden,))
        if self.fc_bias:
            shapes["fc.bias"] = (hidden,)
        if self.version == 3 or self.final_norm:
            shapes["norm.weight"] = (hidden,)
        if self.has_embedding:
            shapes["embed_tokens.weight"] = (self.target.vocab_size, hidden)
        if self.has_head:
            shapes["lm_head.weight"] = (own.vocab_size, hidden)
        return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaSpec:
    """Medusa-1 (arXiv 2401.10774): head j guesses the token j + 2 places behind the one whose hidden state, behind the
    target's final norm, it reads: x + SiLU(W x + b) `num_layers` times, then its own LM head."""

    kind: ClassVar[str] = "medusa"
    target: TargetShape
    num_heads: int
    num_layers: int = 1
    draft_vocab_size: int

    @property
    def has_draft_vocab(self) -> bool:
        return self.draft_vocab_size != self.target.vocab_size

    def shapes(self) -> Shapes:
        """All tensors but d2t, int64 [draft vocabulary]; names are those of medusa_lm_head.pt."""
        hidden = self.target.hidden_size
        shapes: Shapes = {}
        for head in range(self.num_heads):
            for layer in range(self.num_layers):
                shapes[f"{head}.{layer}.linear.weight"] = (hidden, hidden)
                shapes[f"{head}.{layer}.linear.bias"] = (hidden,)
            shapes[f"{head}.{self.num_layers}.weight"] = (self.draft_vocab_size, hidden)
        return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """DFlash (arXiv 2602.06036) and DSpark: one pass over the last committed token and `block_size` - 1 masks behind
    it, all of which see each other and, as keys and values, what fc makes of the target's hidden states.

    `hidden_norm`(fc([outputs of hidden_layers])) is what k_proj and v_proj of every layer read for tokens that the
    target has computed; queries come from the block's own rows alone. Row i proposes the token behind i. Without
    `samples_anchor`, as DFlash was published, a mask proposes the token in its own place, and row 0 none. With
    `bigram_rank`, a row's logits get `bigram_out`(`bigram_in`[token]) for the token before the one it proposes. With
    `has_anchor_inputs`, which no published head has, part i of `anchor_inputs`(x) is added to the embedding of row i,
    where x is [`hidden_norm`'s output for the token before the last committed one, `anchor_norm`(embedding of the last
    committed one)]: rows need not find by attention what the target knows of the next token. With `has_confidence` a
    row's own chance of being accepted is sigmoid(confidence(hidden)), where `confidence_reads_bigram` that of [hidden,
    `bigram_in`[token]]; no draft asks it.
    """

    kind: ClassVar[str] = "block"
    target: TargetShape
    layers: DecoderSpec  # vocab_size: ids that it proposes from
    hidden_layers: tuple[int, ...]
    block_size: int  # rows of a pass: the last committed token and the masks
    mask_token_id: int  # of the target's vocabulary; its embedding stands at masks unless has_mask_embedding
    has_mask_embedding: bool = False
    has_embedding: bool = False
    has_head: bool = False
    shares_head: bool = False
    is_causal: bool = False  # rows see only those before them
    samples_anchor: bool = True
    bigram_rank: int = 0
    has_anchor_inputs: bool = False
    has_confidence: bool = False
    confidence_reads_bigram: bool = False

    @property
    def num_proposed(self) -> int:
        """Tokens that a pass proposes at most."""
        return self.block_size if self.samples_anchor else self.block_size - 1

    @property
    def has_draft_vocab(self) -> bool:
        return self.layers.vocab_size != self.target.vocab_size

    def shapes(self) -> Shapes:
        """All tensors but d2t, int64 [draft vocabulary]."""
        own, hidden = self.layers, self.layers.hidden_size
        shapes: Shapes = {
            n.removeprefix("model."): s
            for n, s in own.shapes().items()
            if n.startswith(("model.layers.", "model.norm."))
        }
        shapes["fc.weight"] = (hidden, len(self.hidden_layers) * self.target.hidden_size)
        shapes["hidden_norm.weight"] = (hidden,)
        if self.has_mask_embedding:
            shapes["mask_embedding"] = (hidden,)
        if self.has_embedding:
            shapes["embed_tokens.weight"] = (self.target.vocab_size, hidden)
        if self.has_head:
            shapes["lm_head.weight"] = (own.vocab_size, hidden)
        if self.bigram_rank:
            shapes["bigram_in.weight"] = (self.target.vocab_size, self.bigram_rank)
            shapes["bigram_out.weight"] = (own.vocab_size, self.bigram_rank)
        if self.has_anchor_inputs:
            shapes["anchor_norm.weight"] = (hidden,)
            shapes["anchor_inputs.weight"] = (self.block_size * hidden, 2 * hidden)
        if self.has_confidence:
            shapes["confidence.weight"] = (1, hidden + (self.bigram_rank if self.confidence_reads_bigram else 0))
            shapes["confidence.bias"] = (1,)
        return shapes


HeadSpec: TypeAlias = EagleSpec | MedusaSpec | BlockSpec
