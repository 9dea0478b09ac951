"""What the training of every kind of head has in common: what it guesses at each depth of a draft, and what that
costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from specserve.models.heads.spec import HeadSpec, MedusaSpec
from specserve.models.spec import AttentionSpec, DecoderSpec, GatedMlp, LayerSpec, PlainMlp, RmsNorm, Rope
from specserve.train.batches import Batch

Judged = tuple[Tensor, Tensor, Tensor]  # as Batch.judged says


@dataclass(frozen=True, slots=True)
class Guesses:
    """What a head says at one depth: n guesses, each of a draft."""

    logits: Tensor  # float32 [n, draft vocabulary]
    target: Tensor  # float32 [n, draft vocabulary], the target's own distribution there
    truth: Tensor  # int64 [n], the place in the draft vocabulary of the token that came; -1 where it is not in there
    drafts: Tensor  # int64 [n], which of all drafts that the batch has; those of an answer lie together
    num_drafts: int


class TrainedHead(nn.Module, ABC):
    """A head with gradients. Its state_dict has the names of spec.shapes(); what stays as the target has it and is not
    stored with it are buffers. `ids` are those that it proposes from, ascending."""

    spec: HeadSpec
    hidden_layers: tuple[int, ...]
    depth_weights: Sequence[float]  # of the loss, one for each depth
    has_own_lm_head = False  # not the target's; it does not learn, either

    def __init__(self, ids: NDArray[np.int64], embedding: Tensor) -> None:
        super().__init__()
        place = torch.full((len(embedding),), -1, dtype=torch.int64)
        place[torch.from_numpy(ids)] = torch.arange(len(ids))
        self.register_buffer("place", place, persistent=False)
        self.register_buffer("embedding", embedding, persistent=False)

    @abstractmethod
    def shown(self, batch: Batch) -> Iterator[tuple[Judged, Tensor]]:
        """Depth after depth: where drafts are judged, as batch.judged says, and the logits of their tokens there,
        float32 [n, draft vocabulary]."""

    def guesses(self, batch: Batch) -> Iterator[Guesses]:
        """Depth after depth."""
        num_drafts = batch.starts.shape[1]
        for (answer, draft, place), logits in self.shown(batch):
            yield Guesses(
                logits=logits,
                target=batch.target[batch.target_rows[answer, place]],
                truth=self.places(batch.tokens[answer, place + 1]),
                drafts=answer * num_drafts + draft,
                num_drafts=batch.starts.numel(),
            )

    def tables(self) -> set[str]:
        """Names of matrices that are tables, not products: AdamW is for these."""
        return set()

    def stacked(self) -> dict[str, int]:
        """Names of matrices that have several products stacked along their outputs, and how many."""
        return {}

    def unshared(self) -> tuple[HeadSpec, dict[str, Tensor]]:
        """The spec and the tensors without the LM head, where that is the target's and did not learn."""
        tensors = self.state_dict()
        if isinstance(self.spec, MedusaSpec) or self.has_own_lm_head:
            return self.spec, tensors
        del tensors["lm_head.weight"]
        return replace(self.spec, has_head=False, shares_head=True), tensors

    def embed(self, ids: Tensor) -> Tensor:
        """As the target embeds, float32 [.., hidden]."""
        return F.embedding(ids, self.get_buffer("embedding"))

    def places(self, ids: Tensor) -> Tensor:
        """Of target ids in the draft vocabulary, -1 for those that are not in there."""
        return self.get_buffer("place")[ids]


def layers_spec(target: DecoderSpec, num_layers: int, vocab_size: int, qk_norm: bool) -> DecoderSpec:
    """Layers like the target's, but plain: gated, without biases, norms after sublayers and windows, rotating whole
    heads by halves."""
    like = next((layer for layer in target.layers if layer.attention.window is None), target.layers[0])
    norm = RmsNorm(like.norm.eps)
    attention = AttentionSpec(
        num_heads=like.attention.num_heads,
        num_kv_heads=like.attention.num_kv_heads,
        head_dim=like.attention.head_dim,
        scale=like.attention.head_dim**-0.5,
        head_norm=norm if qk_norm else None,
    )
    rope = next((each.position for each in (like, *target.layers) if isinstance(each.position, Rope)), Rope())
    position = replace(rope, interleaved=False, fraction=1.0)
    activation = like.mlp.activation if not isinstance(like.mlp, PlainMlp) else "silu"
    mlp = GatedMlp(size=like.mlp.width, activation=activation)
    layer = LayerSpec(norm=norm, position=position, attention=attention, mlp=mlp)
    return DecoderSpec(
        vocab_size=vocab_size,
        hidden_size=target.hidden_size,
        max_len=target.max_len,
        layers=(layer,) * num_layers,
        final_norm=norm,
    )


def frozen_head(head: Tensor, ids: NDArray[np.int64]) -> nn.Linear:
    """The target's LM head [vocab, hidden], reduced to `ids`, which does not learn."""
    linear = nn.Linear(head.shape[1], len(ids), bias=False, device="meta")
    linear.weight = nn.Parameter(head[torch.from_numpy(ids)].clone(), requires_grad=False)
    return linear


def loss_of(guesses: Guesses, cross_entropy: float) -> tuple[Tensor, Tensor]:
    """The mean loss, and of each guess the chance float32 [n] that a draft sampled from it is accepted.

    `cross_entropy` of the loss is that against the target's distribution, the rest the total variation distance, which
    is what is rejected: 1 - sum of min(p, q) (LK losses, DistillSpec: arXiv 2310.08461). What the target gives to ids
    outside of the draft vocabulary is lost whatever the head says.
    """
    log_q = guesses.logits.log_softmax(-1)
    accepted = torch.minimum(guesses.target, log_q.exp()).sum(-1)
    entropy = -(guesses.target * log_q).sum(-1)
    loss = cross_entropy * entropy + (1 - cross_entropy) * (1 - accepted)
    return loss.mean() if len(loss) else loss.sum(), accepted.detach()


def batch_loss(head: TrainedHead, batch: Batch, cross_entropy: float) -> Tensor:
    """The mean over depths by their weights."""
    total = torch.zeros((), device=batch.tokens.device)
    for weight, guesses in zip(head.depth_weights, head.guesses(batch), strict=True):
        total = total + weight * loss_of(guesses, cross_entropy)[0]
    return total / sum(head.depth_weights)
