r"""\d, \w and \s are of ASCII, wherever they stand, with every backend that takes expressions."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from specserve.grammars._ascii import in_ascii
from specserve.structured.base import Vocabulary
from specserve.structured.compiler import Compiler
from specserve.structured.spec import Structured

# All bytes, so that every text is the tokens of its bytes.
WORDS = Vocabulary([bytes([byte]) for byte in range(256)], (256,), 257, lambda text: list(text.encode()))
PATTERNS = (r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", r"\\d", r"[a\]]\w", r"(?:\d|x)\s?")  # Python has no sets in sets
TEXTS = st.text(st.sampled_from("07azA_Z. \t\n\r\f\v\\]dx\x1c\u00e9\u0660\u00a0\u2028\u01c4"), min_size=1, max_size=3)


@pytest.fixture(scope="module", params=["llguidance", "outlines", "xgrammar"])
def compiler(request: pytest.FixtureRequest) -> Compiler:
    pytest.importorskip({"outlines": "outlines_core"}.get(request.param, request.param))
    return Compiler(lambda: WORDS, request.param)


def accepted(compiler: Compiler, pattern: str, text: str) -> bool:
    state: Any = compiler.compile(Structured.regex(pattern)).start()
    return all(state.advance(token) for token in (*text.encode(), 256))


@settings(max_examples=150)
@given(pattern=st.sampled_from(PATTERNS), text=TEXTS)
def test_rewritten_they_mean_what_python_says_of_ascii(pattern: str, text: str) -> None:
    assert bool(re.fullmatch(in_ascii(pattern), text)) == bool(re.fullmatch(pattern, text, re.ASCII))


@pytest.mark.parametrize("pattern", [r"\d", r"\w", r"\s", r"[\d.]+", r"[a\]\w]", r"(?:\d|x)\s?"])
def test_every_backend_says_so(compiler: Compiler, pattern: str) -> None:
    for text in ("7", "x", "_", " ", "\t", "7.", "\u0660", "\u00e9", "\u00a0", "]", "x "):
        assert accepted(compiler, pattern, text) == bool(re.fullmatch(pattern, text, re.ASCII)), text


def test_a_digit_has_ten_ways(compiler: Compiler) -> None:
    row = np.zeros(WORDS.num_words, np.int32)
    compiler.compile(Structured.regex(r"\d+")).start().fill(row)
    allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
    assert bytes(allowed.tolist()) == b"0123456789"
