"""What a draft head has of its target's checkpoint, as trained, not as served: tables that both share, and by what a
head is found for its target."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from specserve.errors import ModelError
from specserve.models.loader import check_tensors
from specserve.models.spec import DecoderSpec, RmsNorm


class TargetOrigin:
    """The model in `folder`. Raises ModelError as `load_model` does for files that are no model's."""

    def __init__(self, folder: Path) -> None:
        self._tensors = check_tensors(folder)
        self._spec = self._tensors.spec

    def _native(self) -> DecoderSpec:
        """Raises ModelError for a model that runs through transformers, whose code may do more with its tables."""
        if isinstance(self._spec, DecoderSpec):
            return self._spec
        raise ModelError(
            f"{self._spec.architecture} runs through transformers: a head that shares its tables can neither be "
            "trained nor loaded, as its code may do more with them. Use a head with an LM head of its own."
        )

    def embedding(self) -> Tensor:
        """The scaled embedding, float32 [vocab, hidden], projected where the model does."""
        spec = self._native()
        table: Tensor = self._tensors["model.embed_tokens.weight"][:].float() * spec.embedding_scale
        return table if spec.embedding_size is None else table @ self._matrix("model.project_in").T

    def head(self) -> Tensor:
        """The LM head, float32 [vocab, hidden], with what divides its scores, and of what is projected."""
        spec = self._native()
        table = self._tensors["model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"]
        numbers = torch.nn.functional.normalize(table[:].float()) if spec.normed_head else table[:].float()
        head: Tensor = numbers / spec.logit_divisor
        return head if spec.embedding_size is None else head @ self._matrix("model.project_out")

    def _matrix(self, name: str) -> Tensor:
        matrix: Tensor = self._tensors[f"{name}.weight"][:].float()
        return matrix

    def norm(self) -> Tensor:
        """By what the final norm multiplies, float32 [hidden]."""
        spec = self._native()
        weight, norm = self._matrix(spec.final_norm_name), spec.final_norm
        return weight + norm.offset if isinstance(norm, RmsNorm) else weight

    def fingerprint(self) -> str:
        """The same for a model wherever it lies and however its matrices are quantized: of its final norm, which no
        format rounds, and its sizes. Adapters and merges that leave the norm alone keep it, and a head mostly drafts
        as well for them."""
        spec = self._spec
        norm = self.norm() if isinstance(spec, DecoderSpec) else self._tensors[spec.names.others[-1]][:].float()
        found = hashlib.blake2b(f"{spec.hidden_size} {spec.num_layers} {spec.vocab_size}".encode(), digest_size=16)
        found.update(norm.cpu().numpy().astype("<f4").tobytes())
        return found.hexdigest()
