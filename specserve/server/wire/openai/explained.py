"""What a step did with the draft of one choice, as `explained` of a stream's chunk and for the terminal."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from specserve.explained import HIDDEN
from specserve.outputs import Chunk

_described = with_config(ConfigDict(use_attribute_docstrings=True))


@_described
class DraftToken(TypedDict):
    text: str
    sources: list[str]
    """Who proposed it: drafters, or jump_forward for what a grammar left no choice of. None: the model's own."""


@_described
class Rejected(TypedDict):
    position: int
    """How many of `tokens` stand before it."""
    tokens: list[DraftToken]
    """What would have followed there."""


@_described
class ExplainedStep(TypedDict):
    """One step for one choice. Times are of the whole step, which may be for others, too."""

    tokens: list[DraftToken]
    """The text of each new token, as far as it is shown yet."""
    rejected: list[Rejected]
    """Every branch of the draft that was rejected, as far as the request's own conversation has put it forward."""
    room: int
    """How many tokens the drafters were asked for; 0: they were not asked."""
    proposed: dict[str, int]
    """Tokens that each source proposed, before any was left out."""
    num_verified: int
    """Tokens of the draft."""
    num_accepted: int
    step_rows: int
    """Rows of the step, others' too."""
    step_ms: float
    expected_ms: float | None
    """What the step was expected to take. Null where drafts are not weighed by cost, beside prompts and at first."""
    plain_ms: float | None
    """What it would have been expected to take without drafts."""
    allowance_ms: float | None
    """What drafts might still lose; below 0 a debt. Null where they are not weighed."""


def explained_step(chunk: Chunk, token_bytes: Callable[[int], bytes]) -> ExplainedStep:
    """Of a chunk whose step was asked for."""
    step = chunk.explained
    assert step is not None, "a request that did not ask"
    owners = [list(step.sources[node]) for node in step.path]
    owners += [[]] * (len(chunk.pieces) - len(owners))
    return {
        "tokens": [{"text": text, "sources": who} for text, who in zip(chunk.pieces, owners, strict=False)],
        "rejected": _rejected(chunk, token_bytes),
        "room": step.room,
        "proposed": step.proposed,
        "num_verified": len(step.tokens),
        "num_accepted": min(len(step.path), len(chunk.token_ids)),
        "step_rows": step.num_rows,
        "step_ms": 1e3 * step.seconds,
        "expected_ms": _ms(step.expected_s),
        "plain_ms": _ms(step.plain_s),
        "allowance_ms": _ms(step.allowance_s),
    }


def _rejected(chunk: Chunk, token_bytes: Callable[[int], bytes]) -> list[Rejected]:
    """Every branch of the draft from where it leaves what was accepted to its end, or to what is not shown; of the text
    alone that was kept."""
    step = chunk.explained
    assert step is not None
    shown = {-1}
    for node, parent in enumerate(step.parents):
        if parent in shown and step.tokens[node] != HIDDEN:
            shown.add(node)
    places = {-1: 0} | {node: i for i, node in enumerate(step.path, 1)}  # how many tokens of the chunk end with it
    branches: list[Rejected] = []
    for leaf in sorted(shown - {-1} - {step.parents[node] for node in shown - {-1}}):
        nodes: list[int] = []
        while leaf not in places:
            nodes.insert(0, leaf)
            leaf = step.parents[leaf]
        if nodes and places[leaf] < max(len(chunk.token_ids), 1):
            texts = [token_bytes(step.tokens[node]).decode("utf-8", "replace") for node in nodes]
            tokens: list[DraftToken] = [
                {"text": text, "sources": list(step.sources[node])} for text, node in zip(texts, nodes, strict=True)
            ]
            branches.append({"position": places[leaf], "tokens": tokens})
    return sorted(branches, key=lambda branch: branch["position"])


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
