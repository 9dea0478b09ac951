"""The merges of a byte-pair vocabulary that ranks its tokens alone, as SentencePiece and tiktoken files do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

Symbols = TypeVar("Symbols", str, bytes)


def merge_of(token: Symbols, ranks: Mapping[Symbols, float]) -> tuple[Symbols, Symbols] | None:
    """The two tokens that become `token` when it is merged from its characters or bytes, always the pair next whose
    union ranks lowest, of equals the leftmost; None where that does not lead to it.

    Merging by these pairs is the same as by `ranks`: wherever `token` comes about in a text, its characters have been
    merged in the same order as here, because no merge goes across its ends, so the last one is this pair.
    """
    symbols = [token[i : i + 1] for i in range(len(token))]
    while len(symbols) > 2:
        joined = [ranks.get(symbols[i] + symbols[i + 1], _NEVER) for i in range(len(symbols) - 1)]
        best = min(joined)
        if best == _NEVER:
            return None
        at = joined.index(best)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return (symbols[0], symbols[1]) if len(symbols) == 2 else None


_NEVER = float("inf")


def merges_of(
    tokens: Iterable[Symbols], ranks: Mapping[Symbols, float], known: Iterable[Symbols]
) -> tuple[list[tuple[Symbols, Symbols]], list[Symbols]]:
    """The merges that lead to `tokens` of more than one symbol, by rank, and those tokens that none leads to: merging
    never makes them, or only of a symbol that is not `known`."""
    alphabet, merges, unreached = frozenset(known), [], []
    for token in sorted(tokens, key=lambda each: ranks[each]):
        pair = merge_of(token, ranks)
        if pair is not None and alphabet.issuperset(pair):
            merges.append(pair)
        elif len(token) > 1:
            unreached.append(token)
    return merges, unreached
