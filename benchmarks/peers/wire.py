"""How a runner talks to the comparison: one JSON object a line on stdin and stdout. Standard library only: every peer
runs it in an environment of its own.

A runner is started with a `Setup` as JSON in its only argument and first says `{"ready": {...}}` or
`{"unsupported": "why"}`. Then it answers `{"prompts": [[ids], ...], "max_tokens": n, "ignore_eos": bool}` with an
`Answer`, and `{"reset": true}` with `{}`. It ends with its stdin.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

Options = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a runner is started with. All of it is fixed for the life of the process."""

    model: str  # Hugging Face folder, with the tokenizer
    weights: str  # bf16, q8_0, ...
    gguf: str | None  # the file with these weights, for peers that read GGUF
    home: str  # the folder with the peers' environments and builds
    threads: int
    streams: int  # most prompts in one request
    context: int  # tokens, prompt and output
    speculation: bool
    options: Options  # the peer's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """New tokens of each prompt. Seconds from the request's arrival at the engine; the first token's are known for a
    single prompt only."""

    ids: list[list[int]]
    total_s: float
    ttft_s: float | None


class Engine(Protocol):
    """What a runner drives. `about` says what ran: versions and settings."""

    about: dict[str, Any]

    def generate(self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool) -> Answer: ...
    def reset(self) -> None:
        """Forget what earlier requests taught: prefixes and drafters' memories."""
        ...


class Unsupported(Exception):
    """This peer cannot run this setup. The message says why."""


def received() -> Setup:
    """What this process was started with."""
    return Setup(**json.loads(sys.argv[1]))


def chosen(defaults: Mapping[str, str], options: Options) -> Options:
    """The defaults with the options on top. Raises SystemExit for an option that is not among them."""
    if strange := sorted(options.keys() - defaults.keys()):
        raise SystemExit(f"Unknown option {', '.join(strange)}. Known: {', '.join(sorted(defaults)) or 'none'}.")
    return {**defaults, **options}


def precision(setup: Setup, allowed: Mapping[str, str]) -> str:
    """The engine's name for the weights asked for. Raises SystemExit for weights it has none for."""
    if setup.weights not in allowed:
        raise SystemExit(f"Weights {setup.weights!r} are not known here. Known: {', '.join(allowed)}.")
    return allowed[setup.weights]


def serve(start: Callable[[Setup], Engine]) -> None:
    """Answer requests until stdin ends. Whatever the engine prints goes to stderr: stdout is the protocol's alone."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(message: Mapping[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        engine = start(received())
    except Unsupported as reason:
        say({"unsupported": str(reason)})
        return
    say({"ready": engine.about})
    for line in sys.stdin:
        say(_reply(engine, json.loads(line)))


def _reply(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    if request.get("reset"):
        engine.reset()
        return {}
    return asdict(engine.generate(request["prompts"], request["max_tokens"], request["ignore_eos"]))
