"""Which tensors of a checkpoint a model of transformers reads, and by what names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specserve.errors import ModelError
from specserve.models.generic.experts import PARTS
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
    for name, shape in found.experts.items():
        for whole in PARTS:
            del parameters[f"{name}.{whole}"]
        parameters |= shape.shapes(name)
    tied = dict(_tied(model, set(parameters)))
    shapes = {name: shape for name, shape in parameters.items() if name not in tied}
    replaced = (*found.linears, *found.embeddings)
    inside = {f"{module}.{part}" for module in replaced for part in ("weight", "bias")} | set(found.products)
    inside |= {each for name, shape in found.experts.items() for each in shape.shapes(name)}
    others = [name for name in parameters if name not in inside]
    head = f"{found.head}.weight"
    return Names(
        shapes, tied, others, None if head in tied else head, _renamer(model, set(shapes), tied, set(found.experts))
    )


def _tied(model: Any, names: set[str]) -> dict[str, str]:
    """Parameters that are others', and whose."""
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    return {name: own for name, own in tied.items() if name in names and own in names}


def _renamer(model: Any, names: set[str], tied: dict[str, str], experts: set[str]) -> Callable[[str], str | None]:
    """As transformers would name stored tensors."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    wholes = {f"{name}.{whole}" for name in experts for whole in PARTS}
    prefix, meta = model.base_model_prefix, dict.fromkeys(names | set(tied) | wholes, True)
    _refuse_converted(converters, names)
    ignored = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]

    def rename(stored: str) -> str | None:
        name, converted = rename_source_key(stored, renamings, converters, prefix, meta)
        if name in wholes:
            return str(name) if converted is None else _of_expert(stored, str(name), converted, converters)
        if name in names or name in tied:
            if converted is not None:
                raise ModelError(f"{stored} would have to be converted, which is not done for models like this.")
            return str(name)
        return None if any(each.search(stored) for each in ignored) else stored

    return rename


def _refuse_converted(converters: list[Any], names: set[str]) -> None:
    """Raises ModelError, before any file is read, where checkpoints have a model's tensors in another form."""
    for converter in converters:
        try:
            back = converter.reverse_transform()
        except Exception:  # of what it cannot write: such a checkpoint is refused when its tensors are named
            continue
        for name in sorted(names):
            if (
                not re.search(r"\.\d+\.(gate|up|down)_proj\.weight$", name)
                and back.rename_source_key(name)[1] is not None
            ):
                raise ModelError(f"Checkpoints have {name} in a form that would have to be converted.")


def _of_expert(stored: str, whole: str, pattern: str, converters: list[Any]) -> str:
    """One expert's tensor, which transformers would stack with the others' to `whole`, by its name in native families.
    Raises ModelError where it would do more than that."""
    experts, _, own = whole.rpartition(".")
    converter = next(each for each in converters if pattern in each.source_patterns)
    steps = [(type(each).__name__, getattr(each, "dim", None)) for each in converter.operations]
    numbers = re.findall(r"(?<=\.)\d+(?=\.)", stored)
    expected = [("MergeModulelist", 0), ("Concatenate", 1)][: len(PARTS[own])]
    if steps != expected or len(converter.source_patterns) != len(PARTS[own]) or not numbers:
        raise ModelError(f"{stored} would have to be converted, which is not done for models like this.")
    return f"{experts}.{int(numbers[-1])}.{PARTS[own][converter.source_patterns.index(pattern)]}.weight"
