"""The public names, loaded on first use: `import specserve` itself needs neither torch nor a device. Holds no code.

with specserve.LLM(drafter="ngram") as llm:
    print(llm.chat([{"role": "user", "content": "Hello"}])[0].outputs[0].text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from specserve.version import __version__ as __version__

if TYPE_CHECKING:
    from specserve.async_llm import AsyncLLM
    from specserve.client import AsyncClient, Client
    from specserve.config import EngineConfig
    from specserve.errors import (
        CapacityError,
        ConfigError,
        EngineError,
        InputError,
        ModelError,
        PromptTooLongError,
        ServerError,
        SpecserveError,
    )
    from specserve.llm import LLM
    from specserve.structured.spec import Structured
    from specserve.types import SamplingParams


__all__ = [
    "LLM",
    "AsyncLLM",
    "Client",
    "AsyncClient",
    "SamplingParams",
    "Structured",
    "EngineConfig",
    "SpecserveError",
    "InputError",
    "PromptTooLongError",
    "ConfigError",
    "ModelError",
    "CapacityError",
    "EngineError",
    "ServerError",
]

_HOMES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "Client": "client",
    "AsyncClient": "client",
    "SamplingParams": "types",
    "Structured": "structured.spec",
    "EngineConfig": "config",
}


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'specserve' has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(importlib.import_module(f"specserve.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
