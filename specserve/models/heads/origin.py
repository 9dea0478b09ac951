"""What a draft head has of its target's checkpoint, as trained, not as served: tables that both share, and by what a
head is found for its target."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from specserve.models.loader import check_tensors
from specserve.models.spec import RmsNorm


class TargetOrigin:
    """The model in `folder`. Raises ModelError as `load_model` does for files that are no model's."""

    def __init__(self, folder: Path) -> None:
        self._tensors = check_tensors(folder)
        self._spec = self._tensors.spec

    def embedding(self) -> Tensor:
        """The scaled embedding, float32 [vocab, hidden]."""
        table: Tensor = self._tensors["model.embed_tokens.weight"][:].float() * self._spec.embedding_scale
        return table

    def head(self) -> Tensor:
        """The LM head, float32 [vocab, hidden], with what divides its scores."""
        table = self._tensors["model.embed_tokens.weight" if self._spec.tied_embeddings else "lm_head.weight"]
        numbers = torch.nn.functional.normalize(table[:].float()) if self._spec.normed_head else table[:].float()
        return numbers / self._spec.logit_divisor

    def norm(self) -> Tensor:
        """By what the final norm multiplies, float32 [hidden]."""
        weight: Tensor = self._tensors["model.norm.weight"][:].float()
        norm = self._spec.final_norm
        return weight + norm.offset if isinstance(norm, RmsNorm) else weight

    def fingerprint(self) -> str:
        """The same for a model wherever it lies and however its matrices are quantized: of its final norm, which no
        format rounds, and its sizes. Adapters and merges that leave the norm alone keep it, and a head mostly drafts
        as well for them."""
        spec = self._spec
        found = hashlib.blake2b(f"{spec.hidden_size} {spec.num_layers} {spec.vocab_size}".encode(), digest_size=16)
        found.update(self.norm().cpu().numpy().astype("<f4").tobytes())
        return found.hexdigest()
