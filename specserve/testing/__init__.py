"""Public test doubles: tiny random models in real model folders, a decoder driven by hand over paged KV, a drafter
whose luck is scripted, a grammar that is a list of sentences, random LoRA adapters, and a CUDA device that is not
there; and checks of all invariants of the KV cache and of steps under way."""

from specserve.testing.adapters import write_adapter as write_adapter
from specserve.testing.cuda import fake_cuda as fake_cuda
from specserve.testing.drafters import (
    ScriptedDrafter as ScriptedDrafter,
    path_to as path_to,
    sampled as sampled,
    scheduled as scheduled,
)
from specserve.testing.grammars import (
    LanguageGrammar as LanguageGrammar,
    LanguageState as LanguageState,
)
from specserve.testing.integrity import check_integrity as check_integrity, check_under_way as check_under_way
from specserve.testing.models import (
    CHAT_TEMPLATE as CHAT_TEMPLATE,
    SPECIAL_TOKENS as SPECIAL_TOKENS,
    TINY_ARCHITECTURES as TINY_ARCHITECTURES,
    Feed as Feed,
    PagedDecoder as PagedDecoder,
    llama_spec as llama_spec,
    random_weights as random_weights,
    tiny_config as tiny_config,
    tiny_tokenizer as tiny_tokenizer,
    unequal_rows as unequal_rows,
    write_tiny_model as write_tiny_model,
)
