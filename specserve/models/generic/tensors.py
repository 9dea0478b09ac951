"""Which tensors of a checkpoint a model of transformers reads, and by what names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specserve.errors import ModelError
from specserve.models.generic.probe import Found


@dataclass(frozen=True, slots=True)
class Names:
    """Of a model's parameters, and of buffers that a checkpoint has."""

    shapes: dict[str, tuple[int, ...]]  # of all that are read
    tied: dict[str, str]  # those that are another one's, by its name
    others: list[str]  # what is neither a linear layer's nor an embedding's
    head: str | None  # the LM head's weight; None: it is the embedding
    rename: Callable[[str], str | None]  # a stored name -> one of `shapes`; None: it is harmless


def names_of(model: Any, found: Found) -> Names:
    """Raises ModelError for checkpoints of a form that transformers would have to convert."""
    parameters = {name: tuple(each.shape) for name, each in model.named_parameters(remove_duplicate=False)}
    kept = set(model.state_dict())
    parameters |= {name: tuple(each.shape) for name, each in model.named_buffers() if name in kept}
    tied = dict(_tied(model, set(parameters)))
    shapes = {name: shape for name, shape in parameters.items() if name not in tied}
    replaced = (*found.linears, *found.embeddings)
    inside = {f"{module}.{part}" for module in replaced for part in ("weight", "bias")}
    others = [name for name in parameters if name not in inside]
    head = f"{found.head}.weight"
    return Names(shapes, tied, others, None if head in tied else head, _renamer(model, set(shapes), tied))


def _tied(model: Any, names: set[str]) -> dict[str, str]:
    """Parameters that are others', and whose."""
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    return {name: own for name, own in tied.items() if name in names and own in names}


def _renamer(model: Any, names: set[str], tied: dict[str, str]) -> Callable[[str], str | None]:
    """As transformers would name stored tensors."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    prefix, meta = model.base_model_prefix, dict.fromkeys(names | set(tied), True)
    ignored = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]

    def rename(stored: str) -> str | None:
        name, converted = rename_source_key(stored, renamings, converters, prefix, meta)
        if name in names or name in tied:
            if converted is not None:
                raise ModelError(f"{stored} would have to be converted, which is not done for models like this.")
            return str(name)
        return None if any(each.search(stored) for each in ignored) else stored

    return rename
