"""A causal LM of transformers without its weights: made from config.json alone, never with code of a checkpoint."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from specserve.errors import ModelError

RUN, PROBE = "specserve", "specserve-probe"  # names of our attention in transformers' registry
_META = torch.device("meta")


class _EmptyOnMeta(TorchFunctionMode):
    """Layers make their weights with torch.empty: these take no memory. All else, as the frequencies of a rotation,
    which no checkpoint has, is made as it is."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.empty:
            kwargs["device"] = _META
        return function(*args, **kwargs)


def attend(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **given: Any
) -> tuple[torch.Tensor, None]:
    """What an attention layer of transformers calls with query [1, heads, rows, d], key and value -> [1, rows, heads,
    d]: asks who runs the model, whom `lead` made known to each module."""
    return module.specserve_attend(module, query, key, value, attention_mask, **given), None


def lead(model: nn.Module, attention: Callable[..., torch.Tensor]) -> None:
    """Let `attention` compute that of all of the model's layers."""
    every: Iterable[Any] = model.modules()
    for module in every:
        module.specserve_attend = attention


def make(config: Mapping[str, Any], masks: Callable[..., Any] | None = None) -> Any:
    """The model, a PreTrainedModel whose weights are on the device "meta", but for small ones that its constructor sets
    itself. With `masks` it is made to be probed: that is called for what layers get as their mask. Raises ModelError
    for what transformers has no causal LM for, with its own reason."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING  # seconds, which native models need not wait
    from transformers.initialization import no_init_weights
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kind = str(config.get("model_type"))
    for name in (RUN, PROBE):
        ALL_ATTENTION_FUNCTIONS.register(name, attend)
    if masks is not None:
        ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE, masks)
    with quiet(), torch.no_grad():
        try:
            # Without auto_map, which names code of the checkpoint: it is not asked for, and never run.
            parsed = CONFIG_MAPPING[kind].from_dict({k: v for k, v in config.items() if k != "auto_map"})
            made: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(parsed)]
            refuse(parsed)
            with no_init_weights(), _EmptyOnMeta():
                name = RUN if masks is None else PROBE
                model = made._from_config(parsed, dtype=torch.float32, attn_implementation=name)
        except ModelError:
            raise
        except KeyError as error:
            if error.args != (PROBE,):
                raise ModelError(f"transformers cannot make it from config.json: it lacks {error}.") from error
            raise ModelError("Its layers do not call attention through transformers' interface.") from error
        except Exception as error:  # whatever a constructor makes of a configuration that is not its own
            why = str(error).strip().splitlines() or [type(error).__name__]
            raise ModelError(f"transformers cannot make it from config.json: {why[0]}") from error
    return model.train(False)


def causal_model_types() -> set[str]:
    """The model_type of every causal LM that the installed transformers has."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def refuse(parsed: Any) -> None:
    """What a configuration says itself that is not served. Raises ModelError."""
    if parsed.is_encoder_decoder:
        raise ModelError("It is an encoder-decoder, whose decoder reads what an encoder makes of another text.")
    if not getattr(parsed.get_text_config(), "is_causal", True):
        raise ModelError("Its configuration asks for bidirectional attention.")


@contextmanager
def quiet() -> Iterator[None]:
    """transformers warns of what it deprecates in itself, and of settings that do not concern us."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
