"""What the tests of sampling share: sequences by hand, a naive oracle of the target's law, and planted faults."""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from specserve.sampling.bad_words import of_ids
from specserve.types import SamplingParams, Sequence


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Worded(Sequence):
    """A sequence that knows its bad words as the oracle reads them."""

    bad_ids: tuple[tuple[int, ...], ...]


def _sequence(tokens: list[int], num_prompt: int = 1, seed: int = 0, **options: Any) -> Sequence:
    eos_ids, bad_ids = options.pop("eos_ids", frozenset()), options.pop("bad_ids", ())
    params, words = SamplingParams(max_tokens=None, **options), of_ids(bad_ids) if bad_ids else None
    own = {"eos_ids": eos_ids, "bad_words": words}
    seq = Worded("r", 0, list(tokens), num_prompt, params, seed=seed, max_tokens=99, **own)
    seq.bad_ids = bad_ids
    return seq


@pytest.fixture(scope="session")
def sequence() -> Callable[..., Sequence]:
    """sequence(tokens, num_prompt, seed, **sampling parameters, eos_ids, bad_ids)"""
    return _sequence


def _edited_logits(logits: list[float], seq: Worded, path: list[int], allowed: list[bool] | None) -> list[float]:
    """Everything before temperature, for one row, one token at a time, in Python's float64."""
    params, text = seq.params, [*seq.tokens, *path]
    output = text[seq.num_prompt :]
    result = []
    for token, score in enumerate(logits):
        if token in text:
            score = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
        score -= params.frequency_penalty * output.count(token)
        score -= params.presence_penalty * (token in output)
        score += (params.logit_bias or {}).get(token, 0.0)
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            score = -math.inf
        for word in seq.bad_ids:
            if word[-1] == token and text[len(text) - len(word) + 1 :] == list(word[:-1]):
                score = -math.inf
        if len(output) < params.min_tokens and token in seq.stop_ids:
            score = -math.inf
        if allowed is not None and not allowed[token]:
            score = -math.inf
        result.append(score)
    return result


def _renormalise(law: list[float], keep: Callable[[float], bool]) -> list[float]:
    kept = [p if keep(p) else 0.0 for p in law]
    return [p / math.fsum(kept) for p in kept]


def _nucleus_floor(law: list[float], top_p: float) -> float:
    mass = 0.0
    for p in sorted(law, reverse=True):
        mass += p
        if mass >= top_p:
            return p
    return 0.0


def _law(logits: list[float], seq: Worded, path: list[int], allowed: list[bool] | None = None) -> np.ndarray | None:
    """The law of one row, float64 [vocab]; greedy puts all on the first of the best. None: no token is possible."""
    params, scores = seq.params, _edited_logits(logits, seq, path, allowed)
    best = max(scores)
    if best == -math.inf:
        return None
    if params.temperature == 0:
        return np.array([float(token == scores.index(best)) for token in range(len(scores))])
    law = _renormalise([math.exp((score - best) / params.temperature) for score in scores], lambda p: True)
    top = max(law)
    law = _renormalise(law, lambda p: p >= params.min_p * top)
    if params.top_k > 0:
        kth = sorted(law, reverse=True)[min(params.top_k, len(law)) - 1]
        law = _renormalise(law, lambda p: p >= kth)
    if params.top_p < 1:
        floor = _nucleus_floor(law, params.top_p)
        law = _renormalise(law, lambda p: p >= floor)
    return np.array(law)


@pytest.fixture(scope="session")
def oracle() -> Callable[..., np.ndarray | None]:
    """oracle(logits, seq, path, allowed) is the probability of each token after the draft tokens `path`; None where
    nothing is allowed."""
    return _law


@contextmanager
def _planted(module: ModuleType, name: str, old: str, new: str) -> Iterator[None]:
    """A function (or Class.method) of the real code with one piece of its source replaced."""
    holder, _, attribute = name.rpartition(".")
    owner = getattr(module, holder) if holder else module
    original = owner.__dict__[attribute]
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(old) == 1, f"{name} has no single {old!r}: the fault cannot be planted"
    made: dict[str, Any] = {}
    exec(compile(source.replace(old, new), f"<{name} with a fault>", "exec"), original.__globals__, made)
    setattr(owner, attribute, made[attribute])
    try:
        yield
    finally:
        setattr(owner, attribute, original)


@pytest.fixture(scope="session")
def planted() -> Callable[..., Any]:
    """with planted(module, name, old, new): the named function runs with `old` replaced by `new` in its source"""
    return _planted
